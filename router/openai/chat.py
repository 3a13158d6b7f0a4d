"""How /v1/chat/completions answers."""

from collections.abc import Sequence

import msgspec

from twostroke.protocol.requests import FinishReason
from twostroke.router.openai.choices import Delta, ShownToken
from twostroke.router.openai.common import Usage, encode_json, event, joined
from twostroke.router.openai.jobs import Job
from twostroke.router.text.tokenizer import TextTokenizer


class TopLogprob(msgspec.Struct):
    """A likely token in a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """The token that was drawn in a position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(msgspec.Struct):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None = None


class Message(msgspec.Struct):
    """The answer of a response that is not streamed."""

    content: str
    role: str = "assistant"
    refusal: None = None


class DeltaMessage(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the answer; the first has the role."""

    role: str | None = None
    content: str | None = None


class Choice(msgspec.Struct):
    """A choice of a response that is not streamed."""

    index: int
    message: Message
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct):
    """What a chunk adds to a choice."""

    index: int
    delta: DeltaMessage
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    """The response."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    object: str = "chat.completion"


class ChatChunk(msgspec.Struct):
    """One event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    object: str = "chat.completion.chunk"


class ChatFormat:
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

    def opening(self, index: int) -> bytes | None:
        chunk = self._chunk(ChunkChoice(index, DeltaMessage("assistant", ""), None, None))
        if self._return_token_ids:
            chunk.prompt_token_ids = list(self._jobs[index].request.token_ids)
        return event(chunk)

    def chunk(self, delta: Delta) -> bytes:
        message = DeltaMessage(content=delta.text) if delta.text or delta.finish_reason is None else DeltaMessage()
        choice = ChunkChoice(delta.index, message, self._logprobs([delta]), delta.finish_reason)
        if self._return_token_ids:
            choice.token_ids = list(delta.token_ids)
        return event(self._chunk(choice))

    def usage_chunk(self, usage: Usage) -> bytes:
        return event(ChatChunk(self._id, self._created, self._model, [], usage, service_tier=self._tier))

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        written = []
        for index, deltas in enumerate(choices):
            choice = Choice(index, Message(joined(deltas)), self._logprobs(deltas), deltas[-1].finish_reason)
            if self._return_token_ids:
                choice.token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
            written.append(choice)
        response = ChatCompletion(self._id, self._created, self._model, written, usage, service_tier=self._tier)
        if self._return_token_ids:
            response.prompt_token_ids = list(self._jobs[0].request.token_ids)
        return encode_json(response)

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        return ChatChunk(self._id, self._created, self._model, [choice], self._no_usage, service_tier=self._tier)

    def _logprobs(self, deltas: Sequence[Delta]) -> Logprobs | None:
        if self._jobs[0].request.sampling.logprobs is None:
            return None
        return Logprobs([self._token(token) for delta in deltas for token in delta.shown])

    def _token(self, token: ShownToken) -> TokenLogprob:
        piece = self._tokenizer.piece(token.sampled.token_id)
        top = [
            TopLogprob(other.text, logprob, list(other.raw))
            for other, logprob in ((self._tokenizer.piece(one), logprob) for one, logprob in token.sampled.top)
        ]
        return TokenLogprob(piece.text, token.sampled.logprob or 0.0, list(piece.raw), top)
