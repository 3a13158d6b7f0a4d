"""How /v1/completions answers."""

from collections.abc import Sequence

import msgspec

from twostroke.protocol.requests import FinishReason
from twostroke.router.openai.choices import Delta, ShownToken
from twostroke.router.openai.common import Usage, encode_json, event, joined
from twostroke.router.openai.jobs import Job
from twostroke.router.text.tokenizer import TextTokenizer


class Logprobs(msgspec.Struct):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Choice(msgspec.Struct):
    """A choice, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    """The response, and each chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    object: str = "text_completion"


class CompletionFormat:
    """Writes one response; see `Format`. `usage_in_chunks`: every chunk has `usage: null`, as OpenAI's do.

    `service_tier` is the request's SLO class; None where there is nothing to tell.
    """

    def __init__(
        self,
        response_id: str,
        created: int,
        model: str,
        jobs: Sequence[Job],
        tokenizer: TextTokenizer,
        *,
        return_token_ids: bool,
        usage_in_chunks: bool,
        service_tier: str | None = None,
    ):
        self._id = response_id
        self._created = created
        self._model = model
        self._jobs = jobs
        self._tokenizer = tokenizer
        self._return_token_ids = return_token_ids
        self._no_usage = None if usage_in_chunks else msgspec.UNSET
        self._tier = msgspec.UNSET if service_tier is None else service_tier
        self._unopened = {job.index for job in jobs}

    def opening(self, index: int) -> bytes | None:
        return None

    def chunk(self, delta: Delta) -> bytes:
        choice = self._choice(delta.index, [delta])
        if delta.index in self._unopened:
            self._unopened.discard(delta.index)
            choice = self._with_prompt(choice)
        return event(Completion(self._id, self._created, self._model, [choice], self._no_usage, self._tier))

    def usage_chunk(self, usage: Usage) -> bytes:
        return event(Completion(self._id, self._created, self._model, [], usage, self._tier))

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        written = [self._with_prompt(self._choice(index, deltas)) for index, deltas in enumerate(choices)]
        return encode_json(Completion(self._id, self._created, self._model, written, usage, self._tier))

    def _choice(self, index: int, deltas: Sequence[Delta]) -> Choice:
        logprobs = None
        if self._jobs[index].request.sampling.logprobs is not None:
            logprobs = self._logprobs([token for delta in deltas for token in delta.shown])
        choice = Choice(index, joined(deltas), logprobs, deltas[-1].finish_reason)
        if self._return_token_ids:
            choice.token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        return choice

    def _with_prompt(self, choice: Choice) -> Choice:
        job = self._jobs[choice.index]
        choice.text = job.echo + choice.text
        if self._return_token_ids:
            choice.prompt_token_ids = list(job.request.token_ids)
        return choice

    def _logprobs(self, tokens: Sequence[ShownToken]) -> Logprobs:
        piece = self._tokenizer.piece
        tops: list[dict[str, float]] = []
        for token in tokens:
            top: dict[str, float] = {}
            for token_id, logprob in token.sampled.top:
                top.setdefault(piece(token_id).text, logprob)  # two tokens may read alike: the likelier counts
            if token.sampled.logprob is not None:
                top.setdefault(piece(token.sampled.token_id).text, token.sampled.logprob)
            tops.append(top)
        return Logprobs(
            tokens=[piece(token.sampled.token_id).text for token in tokens],
            token_logprobs=[token.sampled.logprob for token in tokens],
            top_logprobs=tops,
            text_offset=[token.offset for token in tokens],
        )
