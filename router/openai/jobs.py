"""Makes one job per choice of a client's request: checks that need the model, and requests for the workers."""

import asyncio
import hashlib
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from twostroke.protocol.errors import ContextExceeded, RequestError
from twostroke.protocol.grammars import Grammars
from twostroke.protocol.requests import GenerateRequest, Promise, SamplingParams, ScoringParams
from twostroke.router.openai.fields import Tool, grammar_of
from twostroke.router.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    Prompt,
    TextFields,
    TokenizeRequest,
)
from twostroke.router.request_state import ChatParsing, ChoiceJob, PromptToScore
from twostroke.router.text.generation_config import SamplingDefaults
from twostroke.router.text.grammar import AnswerGrammar, CallableFunction, GrammarChecks
from twostroke.router.text.output_format import CallSyntax, OutputFormat
from twostroke.router.text.tokenizer import OFF_LOOP_CHARS, TextTokenizer

DEFAULT_COMPLETION_TOKENS = 16
_SEED_MASK = 2**63 - 1
MAX_RESPONSE_ITEMS = 2**20
_MIN_TOP_P = 1e-6
"""Least top_p of workers: clients may ask for 0; this leaves the likeliest token alone."""


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a request: the longest context, its promise, its cache salt."""

    max_context: int  # tokens, prompt and output together
    promise: Promise
    cache_salt: bytes = b""  # of the API key
    keep_s: float = 0.0  # seconds for which the client wants KV kept, by an API whose chats have no field for it


class JobMaker:
    """Makes jobs for the model that `tokenizer` and `defaults` belong to."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        defaults: SamplingDefaults,
        max_items: int = MAX_RESPONSE_ITEMS,
        vocab_size: Callable[[], int] | None = None,
    ):
        """`max_items`: tokens and log-probabilities that a router holds for one response at most. `vocab_size` tells
        the size of the vocabulary that the workers' logits have; None: the folder's word does."""
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._max_items = max_items
        self._vocab_size = vocab_size or (lambda: tokenizer.vocab_size)
        self._grammars = Grammars(lambda: msgspec.structs.replace(tokenizer.vocabulary, size=self._vocab_size()))

    async def make(self, body: CompletionRequest | ChatRequest, limits: RequestLimits) -> list[ChoiceJob]:
        """The jobs of all choices, prompt by prompt. Raises RequestError naming the field at fault."""
        checks = GrammarChecks(
            self._grammars, salt=_salted(limits.cache_salt, body.cache_salt), client=limits.cache_salt
        )
        grammar = await grammar_of(body, checks)
        jobs = await (
            self._of_chat(body, limits, grammar, checks)
            if isinstance(body, ChatRequest)
            else self._of_completion(body, limits, grammar)
        )
        self._check_items(body, jobs)
        left_out = tuple(sorted(checks.left_out))
        return [replace(job, left_out=left_out) for job in jobs] if left_out else jobs

    def _check_items(self, body: CompletionRequest | ChatRequest, jobs: Sequence[ChoiceJob]) -> None:
        """Raises RequestError where the response may come to hold more items than are allowed."""
        prompts = {job.group: job.prompt.request for job in jobs if job.prompt is not None}
        items = sum(map(_scored_items, prompts.values()))
        if not body.stream:  # what a stream has sent is kept no longer
            items += sum(job.request.max_tokens * _items_per_token(job.request.sampling.logprobs) for job in jobs)
        if items > self._max_items:
            param = "prompt_logprobs" if prompts else "logprobs" if body.shows_logprobs else "n"
            raise RequestError(
                f"{param}: choices (n, prompt) times tokens ({body.token_limit[0]}, and of the prompt with echo or "
                f"prompt_logprobs) times log-probabilities come to {items} in one response, and this server holds "
                f"{self._max_items} (router.max_response_items): lower one of them, or ask for a stream",
                param=param,
            )

    async def _of_completion(self, body: CompletionRequest, limits: RequestLimits, grammar: str) -> list[ChoiceJob]:
        jobs: list[ChoiceJob] = []
        prediction = await self._prediction(body, limits)
        for group, prompt in enumerate(body.prompts):
            token_ids = await self.prompt_ids(body, prompt, "prompt", limits.max_context)
            default = min(DEFAULT_COMPLETION_TOKENS, limits.max_context - len(token_ids))
            request = self._request(body, token_ids, "prompt", default, body.logprobs, limits, grammar)
            echo = ""
            if body.echo:
                is_whole = isinstance(prompt, str) and body.truncate_prompt_tokens is None
                echo = (
                    prompt
                    if isinstance(prompt, str) and is_whole
                    else self._tokenizer.decode(token_ids, skip_special_tokens=not body.shows_special)
                )
            request = msgspec.structs.replace(request, prediction=prediction)
            scored = body.logprobs if body.echo else None
            jobs += _choices(body, request, group, echo, scored)
        return jobs

    async def _of_chat(
        self, body: ChatRequest, limits: RequestLimits, grammar: str, checks: GrammarChecks
    ) -> list[ChoiceJob]:
        text = chat_prompt(self._tokenizer, body)
        token_ids = await self.encode(text, "messages", limits.max_context, add_special_tokens=False)
        self._check_vocabulary(token_ids, "messages")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        default = limits.max_context - len(token_ids)
        if not body.stream:
            items_per_token = body.num_candidates * _items_per_token(logprobs)
            scored = 0 if body.prompt_logprobs is None else len(token_ids) * (1 + body.prompt_logprobs)
            default = min(default, max(1, (self._max_items - scored) // items_per_token))
        is_long = len(text) > OFF_LOOP_CHARS
        chat = await asyncio.to_thread(self._chat_parser, body, text) if is_long else self._chat_parser(body, text)
        grammar = await self._answer_grammar(body, chat, grammar, checks)
        request = self._request(body, token_ids, "messages", default, logprobs, limits, grammar)
        request = msgspec.structs.replace(request, prediction=await self._prediction(body, limits))
        return _choices(body, request, chat=chat)

    async def _prediction(self, body: GenerationFields, limits: RequestLimits) -> tuple[int, ...]:
        """Return the tokens that the client expects in the answer. Raises RequestError for more than a context."""
        if body.prediction is None or not (text := body.prediction.text):
            return ()
        token_ids = await self.encode(text, "prediction", limits.max_context, add_special_tokens=False)
        return tuple(self.checked(token_ids, "prediction", limits.max_context))

    def _chat_parser(self, body: ChatRequest, prompt: str) -> ChatParsing | None:
        """Raises RequestError where tools are offered, and the format of this model's calls is not known."""
        form, tools = self._format(body), body.allowed_tools
        if tools and form is None:
            raise RequestError(
                "tools: the model's response template does not tell how it calls tools: those who run the server name "
                "a format by model.response_template",
                param="tools",
            )
        if form is None:
            return None
        by_name = {tool.function.name: tool.function.parameters or {} for tool in tools}
        opened = form.language.parser(
            prompt,
            by_name or None,
            is_parallel=body.is_parallel,
            is_forced=bool(body.forced_tools),
            trigger="" if form.call is None else form.call.trigger,
        )
        return ChatParsing(opened, body.include_reasoning is not False, has_tools=bool(tools))

    def _format(self, body: ChatRequest) -> OutputFormat | None:
        """Return the format of the answer: the model's own, or the generic one for calls that its own does not tell."""
        form = self._tokenizer.output_format
        if not body.allowed_tools:
            return form
        is_known = form is not None and form.language.has_calls and (form.call is not None or not body.forced_tools)
        return form if is_known else self._tokenizer.generic_format

    async def _answer_grammar(
        self, body: ChatRequest, chat: ChatParsing | None, grammar: str, checks: GrammarChecks
    ) -> str:
        """Return the grammar of the whole answer: calls, reasoning, and the `grammar` of the content."""
        form, forced, budget = self._format(body), body.forced_tools, body.thinking_token_budget
        rules = AnswerGrammar(self._tokenizer.controls)
        thinking, call = (None, None) if form is None else (form.thinking, form.call)
        if budget and (thinking is None or not rules.ends_thoughts(thinking)):
            why = "this model does not think"
            if thinking is not None:
                why = "the mark that ends thoughts is no token of this model"
            if body.is_budget_required:
                raise RequestError(f"thinking_token_budget: {why}", param="thinking_token_budget")
            budget = None
        offered = [] if call is None else body.allowed_tools
        is_strict = any(tool.function.strict for tool in offered) and call is not None and rules.marks_calls(call)
        calls, functions = "", list[CallableFunction]()
        if call is not None and (forced or is_strict or (grammar and offered)):
            functions = [await self._function(body, tool, call, checks) for tool in forced or offered]
            is_free = not forced and not grammar
            calls = rules.of_calls(call, functions, is_parallel=body.is_parallel, is_free=is_free)
        if forced:
            rest, param, grammar = f"{calls}\nrest: /\\s{{0,8}}/ calls", "tools", ""  # there is no content
        elif grammar and (calls or thinking is not None):
            either = "(@answer | calls)" if calls else "@answer"
            rest, param = f"{calls}\nrest: /\\s{{0,8}}/ {either}", "response_format"
        elif calls and call is not None:
            until = rules.until_calls(call, functions, thinking, is_bounded=bool(budget))
            rest, param = f"{calls}\n{until}", "tools"
        elif budget and thinking is not None:
            rest, param = rules.anything(thinking), "thinking_token_budget"
        else:
            return grammar
        assert chat is not None  # there is a form
        is_open = chat.opened.is_reasoning
        if chat.opened.opening.strip() and not is_open:
            thinking = None
        whole = rules.of_answer(thinking, rest, is_open=is_open, most_tokens=budget, answer=grammar)
        return await checks.check(whole, param)

    async def _function(
        self, body: ChatRequest, tool: Tool, call: CallSyntax, checks: GrammarChecks
    ) -> CallableFunction:
        """A tool, as it is to be called. Of one that may be called, and is not strict, arguments are any object.

        Raises RequestError for a schema that can't be followed.
        """
        name, is_strict = tool.function.name, bool(tool.function.strict)
        if not is_strict and not body.forced_tools:
            return CallableFunction(name, {}, is_strict)
        schema: Mapping[str, Any] = tool.function.parameters or {}
        param = f"{body.path_of(tool)}.parameters"
        schema = await checks.schema(schema, param, lenient=not is_strict)
        if call.argument is not None and is_strict and schema and "properties" not in schema:
            raise RequestError(f"{param}: must have properties: this model writes arguments one by one", param=param)
        return CallableFunction(name, schema, is_strict)

    async def prompt_ids(self, body: TextFields, prompt: Prompt, param: str, max_context: int) -> list[int]:
        """The token ids of a text, or those given; the last ones, where a prompt is to be cut.

        Raises RequestError as `encode` and `checked` do, and where there are none.
        """
        most = body.truncate_prompt_tokens
        if isinstance(prompt, str):
            limit = max_context if most is None else len(prompt.encode())  # a body's limit must do
            special = body.add_special_tokens is not False
            prompt = await self.encode(prompt, param, limit, add_special_tokens=special)
        if most is not None:
            prompt = prompt[-(max_context if most == -1 else most) :] if most else []
        if not prompt:
            raise RequestError(f"{param}: has no tokens", param=param)
        return self.checked(prompt, param, max_context)

    async def encode(self, text: str, param: str, max_context: int, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`. Raises RequestError, without tokenising, where they must be over the context."""
        least = self._tokenizer.least_tokens(text)
        if least > max_context:
            raise ContextExceeded(param, least, max_context)
        return await self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def checked(self, token_ids: list[int], param: str, max_context: int) -> list[int]:
        """These ids. Raises RequestError where they are over the context, or the model does not have one of them."""
        if len(token_ids) > max_context:
            raise ContextExceeded(param, len(token_ids), max_context)
        self._check_vocabulary(token_ids, param)
        return token_ids

    def _check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        if max(token_ids, default=0) >= (size := self._vocab_size()):
            raise RequestError(f"{param}: token ids must be below the vocabulary's size of {size}", param=param)

    def _request(
        self,
        body: GenerationFields,
        token_ids: Sequence[int],
        param: str,
        default_tokens: int,
        logprobs: int | None,
        limits: RequestLimits,
        grammar: str,
    ) -> GenerateRequest:
        """Return the worker's request for the first choice of one prompt, which is in the field `param`."""
        if grammar:
            _check_alone(body)
        if not token_ids:
            raise RequestError(f"{param}: has no tokens", param=param)
        room = limits.max_context - len(token_ids)
        if room < 1 and body.token_limit[1] != 0:
            raise ContextExceeded(param, len(token_ids), limits.max_context)
        limited_by, limit = body.token_limit
        max_tokens = default_tokens if limit is None else limit
        if max_tokens > room:
            raise ContextExceeded(param, len(token_ids), limits.max_context, max_tokens, limited_by)
        if body.min_tokens is not None and body.min_tokens > max_tokens:
            raise RequestError(f"min_tokens: must not be over max_tokens, {max_tokens}", param="min_tokens")
        stop_token_ids = tuple(body.stop_token_ids or ())
        self._check_vocabulary(stop_token_ids, "stop_token_ids")
        if not body.ignore_eos:
            stop_token_ids = tuple(dict.fromkeys((*self._tokenizer.eos_token_ids, *stop_token_ids)))
        return GenerateRequest(
            request_id="",
            router_id="",
            token_ids=tuple(token_ids),
            num_prompt_tokens=len(token_ids),
            sampling=self._sampling(body, logprobs),
            max_tokens=max_tokens,
            min_tokens=body.min_tokens or 0,
            stop_token_ids=stop_token_ids,
            cache_salt=_salted(limits.cache_salt, body.cache_salt),
            grammar=grammar,
            promise=limits.promise,
            client=limits.cache_salt,
            keep_s=max(limits.keep_s, body.keep_s),
        )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return bad words as tokens: at an answer's beginning, and within it."""
        ways = [tuple(self._tokenizer.encode_word(way)) for word in words for way in (word, " " + word.lstrip())]
        return tuple(dict.fromkeys(way for way in ways if way))

    def _sampling(self, body: GenerationFields, logprobs: int | None) -> SamplingParams:
        biases = {int(token_id): bias for token_id, bias in (body.logit_bias or {}).items()}
        self._check_vocabulary(tuple(biases), "logit_bias")
        allowed = tuple(dict.fromkeys(body.allowed_token_ids or ()))
        self._check_vocabulary(allowed, "allowed_token_ids")
        if body.num_candidates > (body.n or 1) and logprobs is None:
            logprobs = 0  # they are ranked by them
        asked_for = body.model_dump(include=set(SamplingDefaults.model_fields), exclude_none=True)
        drawn = self._defaults.model_copy(update=asked_for)
        return SamplingParams(
            temperature=float(drawn.temperature),
            top_k=min(max(0, drawn.top_k), self._vocab_size()),
            top_p=max(float(drawn.top_p), _MIN_TOP_P),
            min_p=float(drawn.min_p),
            presence_penalty=float(body.presence_penalty or 0.0),
            frequency_penalty=float(body.frequency_penalty or 0.0),
            repetition_penalty=float(drawn.repetition_penalty),
            logit_bias=tuple(sorted((token_id, float(bias)) for token_id, bias in biases.items())),
            allowed_token_ids=allowed,
            bad_words=self._bad_words(body.bad_words or ()),
            # vLLM takes -1 for none.
            seed=(secrets.randbits(63) if body.seed in (None, -1) else body.seed) & _SEED_MASK,
            logprobs=None if logprobs is None else min(logprobs, self._vocab_size()),
        )


def chat_prompt(tokenizer: TextTokenizer, body: ChatRequest | TokenizeRequest) -> str:
    """The text that the chat template makes of a chat. Raises RequestError where it refuses."""
    sent = body.messages or []
    continues = bool(body.continue_final_message or (sent and sent[-1].prefix))
    messages = [message.as_template_sees() for message in sent]
    said, mark = "", ""
    if continues:
        # Behind the message, so that it is known where that ends: its own words may stand elsewhere in the prompt, too.
        said, mark = messages[-1]["content"], f"zq{uuid.uuid4().hex}"
        messages[-1]["content"] = said + mark + _WHITE
    text = tokenizer.render_chat(
        messages,
        tools=[tool.model_dump(exclude_none=True) for tool in body.allowed_tools] or None,
        documents=body.documents or None,
        variables=body.template_variables,
        add_generation_prompt=not continues and body.add_generation_prompt is not False,
    )
    if not continues:
        return text
    end = text.rfind(mark)
    if end < 0 or messages[-1].get("tool_calls"):
        why = "the chat template does not show the last message as it is" if end < 0 else "the last message has calls"
        raise RequestError(f"continue_final_message: {why}", param="continue_final_message")
    is_kept = text.startswith(_WHITE, end + len(mark))
    cut = "" if is_kept or not said.strip() else said[len(said.rstrip()) :]
    return text[:end].removesuffix(cut)


_WHITE = "\t\n \t"
"""White space behind a message that goes on: a template that cuts it off would cut off the message's own, too."""


def _salted(salt: bytes, own: str | None) -> bytes:
    """Join the client's own salt, which keeps the prefix apart from that of others that have the same key."""
    return salt if not own else hashlib.sha256(len(salt).to_bytes(4, "big") + salt + own.encode()).digest()[:16]


def _choices(
    body: GenerationFields,
    request: GenerateRequest,
    group: int = 0,
    echo: str = "",
    echoed_logprobs: int | None = None,
    chat: ChatParsing | None = None,
) -> list[ChoiceJob]:
    """The `n` jobs of one prompt, after those of the groups before."""
    num = body.num_candidates
    stop = tuple(body.stop or ())
    prompt = None
    if body.scores_prompt:
        wanted = [one for one in (body.prompt_logprobs, echoed_logprobs) if one is not None]
        # One token comes with the scores; more, or several choices', are drawn after it.
        max_tokens = request.max_tokens if num == 1 and request.max_tokens == 1 else 0
        params = ScoringParams(logprobs=max(wanted, default=None))
        prompt = PromptToScore(msgspec.structs.replace(request, max_tokens=max_tokens, scoring=params))
        if max_tokens == request.max_tokens:  # nothing is drawn after it
            request = prompt.request
    return [
        ChoiceJob(
            _reseeded(request, i),
            group * num + i,
            group,
            stop,
            echo,
            shows_stop=bool(body.include_stop_str_in_output),
            shows_special=body.shows_special,
            prompt=prompt,
            echoes_logprobs=echoed_logprobs is not None,
            prompt_logprobs=body.prompt_logprobs,
            chat=chat,
        )
        for i in range(num)
    ]


def _reseeded(request: GenerateRequest, choice: int) -> GenerateRequest:
    """Choice 0 keeps the seed, so that n=1 and the first of many agree; each other has its own."""
    if choice == 0:
        return request
    digest = hashlib.sha256(request.sampling.seed.to_bytes(8, "little") + choice.to_bytes(8, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") & _SEED_MASK
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, seed=seed))


def _items_per_token(logprobs: int | None) -> int:
    """Return the items of one drawn token: itself, its log-probability and those of its alternatives."""
    return 1 if logprobs is None else 2 + logprobs


def _scored_items(request: GenerateRequest) -> int:
    """Return the items of a prompt whose tokens are scored."""
    logprobs = None if request.scoring is None else request.scoring.logprobs
    return 0 if logprobs is None else request.num_prompt_tokens * (1 + logprobs)


def _check_alone(body: GenerationFields) -> None:
    """Raises RequestError for fields that would have a say beside a grammar, the one of forced calls, too."""
    if body.allowed_token_ids or body.bad_words:
        param = "allowed_token_ids" if body.allowed_token_ids else "bad_words"
        raise RequestError(f"{param}: not together with a schema or grammar, which decides itself", param=param)
    if body.ignore_eos:
        raise RequestError("ignore_eos: an answer that follows a schema or grammar ends with it", param="ignore_eos")
