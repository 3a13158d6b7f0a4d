"""From a client's request to one job per choice: the checks that need the model, and the workers' own words."""

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest, Promise, SamplingParams
from twostroke.router.openai.parsing import Prompt, too_long
from twostroke.router.openai.schemas import ChatRequest, CompletionRequest, GenerationFields
from twostroke.router.text.tokenizer import TextTokenizer

DEFAULT_COMPLETION_TOKENS = 16
_SEED_MASK = 2**63 - 1
_LEAST_TOP_P = 1e-6  # clients may ask for 0; workers need it above, and it leaves the likeliest token alone


@dataclass(frozen=True)
class Job:
    """One choice of a response."""

    index: int  # of the choice in the response
    group: int  # of its prompt: choices of one prompt share its prefix
    request: GenerateRequest  # a template, see Pipeline.generate
    stop: tuple[str, ...]
    echo: str = ""  # shown before the first token


@dataclass(frozen=True)
class Terms:
    """On which terms a request is served, beside what it asks for itself."""

    promise: Promise = field(default_factory=Promise)
    cache_salt: bytes = b""


_NO_TERMS = Terms()


class JobMaker:
    """Makes jobs for one model. `draw_seed` gives the seed of requests that name none."""

    def __init__(self, tokenizer: TextTokenizer, *, draw_seed: Callable[[], int] = lambda: secrets.randbits(63)):
        self._tokenizer = tokenizer
        self._draw_seed = draw_seed

    async def of_completion(
        self, asked: CompletionRequest, prompts: Sequence[Prompt], max_context: int, terms: Terms = _NO_TERMS
    ) -> list[Job]:
        """The jobs of `prompts`, as `prompts_of` has read them. Raises RequestError naming the field at fault."""
        jobs: list[Job] = []
        for prompt in prompts:
            if isinstance(prompt, str):
                add_special_tokens = asked.add_special_tokens is not False
                token_ids = await self._tokenise(prompt, "prompt", max_context, add_special_tokens=add_special_tokens)
            else:
                token_ids = prompt
                self.check_vocabulary(token_ids, "prompt")
            room = _room(len(token_ids), max_context, "prompt")
            max_tokens = self._max_tokens(asked.max_tokens, min(DEFAULT_COMPLETION_TOKENS, room), room, "max_tokens")
            echo = ""
            if asked.echo:
                echo = prompt if isinstance(prompt, str) else self._tokenizer.decode(token_ids)
            jobs += self._choices(asked, token_ids, max_tokens, asked.logprobs, terms, first=jobs, echo=echo)
        return jobs

    async def of_chat(self, asked: ChatRequest, max_context: int, terms: Terms = _NO_TERMS) -> list[Job]:
        """Raises RequestError naming the field at fault."""
        text = self._tokenizer.render_chat([message.as_template_sees() for message in asked.messages])
        token_ids = await self._tokenise(text, "messages", max_context, add_special_tokens=False)
        room = _room(len(token_ids), max_context, "messages")
        param = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = self._max_tokens(asked.max_completion_tokens or asked.max_tokens, room, room, param)
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        return self._choices(asked, token_ids, max_tokens, logprobs, terms, first=())

    async def _tokenise(self, text: str, param: str, max_context: int, *, add_special_tokens: bool) -> list[int]:
        token_ids = await self.encode(text, param, max_context, add_special_tokens=add_special_tokens)
        if not token_ids:
            raise RequestError(f"{param}: has no tokens", param=param)
        return token_ids

    async def encode(self, text: str, param: str, max_context: int, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`. Raises RequestError, without tokenising, where they must be over the context."""
        if self._tokenizer.surely_over(text, max_context):
            raise too_long(param, "more than that", max_context)
        return await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        """Raises RequestError for a token id that the model does not have."""
        if max(token_ids, default=0) >= self._tokenizer.vocab_size:
            raise RequestError(
                f"{param}: token ids must be below the vocabulary's size of {self._tokenizer.vocab_size}", param=param
            )

    def _max_tokens(self, asked: int | None, default: int, room: int, param: str) -> int:
        if asked is None:
            return default
        if asked > room:
            raise RequestError(
                f"{param}: the prompt leaves room for {room} tokens of the model's context, not for {asked}",
                param=param,
                code="context_length_exceeded",
            )
        return asked

    def _choices(
        self,
        asked: GenerationFields,
        token_ids: Sequence[int],
        max_tokens: int,
        logprobs: int | None,
        terms: Terms,
        *,
        first: Sequence[Job],
        echo: str = "",
    ) -> list[Job]:
        """The `n` jobs of one prompt, after the jobs in `first`."""
        if asked.min_tokens is not None and asked.min_tokens > max_tokens:
            raise RequestError(f"min_tokens: must not be over max_tokens, {max_tokens}", param="min_tokens")
        stop_token_ids = tuple(asked.stop_token_ids or ())
        self.check_vocabulary(stop_token_ids, "stop_token_ids")
        if not asked.ignore_eos:
            stop_token_ids = tuple(dict.fromkeys((*self._tokenizer.eos_token_ids, *stop_token_ids)))
        request = GenerateRequest(
            request_id="",
            router_id="",
            token_ids=tuple(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=self._sampling(asked, logprobs),
            max_tokens=max_tokens,
            min_tokens=asked.min_tokens or 0,
            stop_token_ids=stop_token_ids,
            cache_salt=terms.cache_salt,
            promise=terms.promise,
        )
        group = first[-1].group + 1 if first else 0
        return [
            Job(len(first) + i, group, _reseeded(request, i), tuple(asked.stop or ()), echo)
            for i in range(asked.n or 1)
        ]

    def _sampling(self, asked: GenerationFields, logprobs: int | None) -> SamplingParams:
        biases = {int(token_id): bias for token_id, bias in (asked.logit_bias or {}).items()}
        self.check_vocabulary(tuple(biases), "logit_bias")
        return SamplingParams(
            temperature=1.0 if asked.temperature is None else float(asked.temperature),
            top_k=min(max(0, asked.top_k or 0), self._tokenizer.vocab_size),
            top_p=1.0 if asked.top_p is None else max(float(asked.top_p), _LEAST_TOP_P),
            min_p=float(asked.min_p or 0.0),
            presence_penalty=float(asked.presence_penalty or 0.0),
            frequency_penalty=float(asked.frequency_penalty or 0.0),
            repetition_penalty=1.0 if asked.repetition_penalty is None else float(asked.repetition_penalty),
            logit_bias=tuple(sorted((token_id, float(bias)) for token_id, bias in biases.items())),
            seed=(self._draw_seed() if asked.seed is None else asked.seed) & _SEED_MASK,
            logprobs=None if logprobs is None else min(logprobs, self._tokenizer.vocab_size),
        )


def _reseeded(request: GenerateRequest, choice: int) -> GenerateRequest:
    """Choice 0 keeps the seed, so that n=1 and the first of many agree; each other has its own."""
    if choice == 0:
        return request
    digest = hashlib.sha256(request.sampling.seed.to_bytes(8, "little") + choice.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") & _SEED_MASK
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, seed=seed))


def _room(num_prompt_tokens: int, max_context: int, param: str) -> int:
    """Output tokens that the context leaves for this prompt: at least one, or RequestError."""
    if num_prompt_tokens >= max_context:
        raise too_long(param, str(num_prompt_tokens), max_context)
    return max_context - num_prompt_tokens
