"""How /v1/chat/completions answers."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from twostroke.protocol.requests import FinishReason
from twostroke.router.openai.answers import Format, Usage, encode_json, ids_of, joined
from twostroke.router.openai.choices import Delta, ShownToken


class TopLogprob(TypedDict):
    """A likely token in a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that was drawn in a position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(TypedDict):
    """The answer of a response that is not streamed."""

    role: Literal["assistant"]
    content: str
    refusal: None


class DeltaMessage(TypedDict, total=False):
    """What a chunk adds to the answer; the first has the role."""

    role: Literal["assistant"]
    content: str


class ChatChoice(TypedDict):
    """A choice of a response that is not streamed."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChunkChoice(TypedDict):
    """What a chunk adds to a choice."""

    index: int
    delta: DeltaMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    """The response."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    service_tier: NotRequired[str]


class ChatChunk(TypedDict):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]
    service_tier: NotRequired[str]


class ChatFormat(Format):
    """Writes one response."""

    id_prefix = "chatcmpl"

    def events(self, delta: Delta, usage: Usage | None = None) -> bytes:
        """As `Format.events`; an event with the role goes before all others of a choice."""
        told = super().events(delta, usage)
        if delta.index in self._opened:
            return told
        self._opened.add(delta.index)
        opening: ChunkChoice = {
            "index": delta.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._event([opening], usage, self._prompt(delta.index)) + told

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        written: list[ChatChoice] = []
        for index, deltas in enumerate(choices):
            choice: ChatChoice = {
                "index": index,
                "message": {"role": "assistant", "content": joined(deltas), "refusal": None},
                "logprobs": self._logprobs(index, deltas),
                "finish_reason": deltas[-1].finish_reason,
            }
            if self._return_token_ids:
                choice["token_ids"] = ids_of(deltas)
            written.append(choice)
        response = {"object": "chat.completion", "choices": written, "usage": usage}
        return encode_json(self._head | response | self._prompt(0))

    def _part(self, delta: Delta) -> ChunkChoice:
        is_end = delta.finish_reason is not None and not delta.text
        choice: ChunkChoice = {
            "index": delta.index,
            "delta": {} if is_end else {"content": delta.text},
            "logprobs": self._logprobs(delta.index, [delta]),
            "finish_reason": delta.finish_reason,
        }
        if self._return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return choice

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk", "choices": choices}

    def _prompt(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": list(self._jobs[index].request.token_ids)} if self._return_token_ids else {}

    def _logprobs(self, index: int, deltas: Sequence[Delta]) -> ChatLogprobs | None:
        if not self._has_logprobs(index):
            return None
        return {"content": [self._token(token) for delta in deltas for token in delta.shown], "refusal": None}

    def _token(self, token: ShownToken) -> TokenLogprob:
        top = [self._top(token_id, logprob) for token_id, logprob in token.sampled.top]
        return {**self._top(token.sampled.token_id, token.sampled.logprob or 0.0), "top_logprobs": top}

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        piece = self._tokenizer.piece(token_id)
        return {"token": piece.text, "logprob": logprob, "bytes": list(piece.raw)}
