"""How /v1/completions answers."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from twostroke.protocol.requests import FinishReason
from twostroke.router.openai.answers import Format, Usage, encode_json, ids_of, joined
from twostroke.router.openai.choices import Delta, ShownToken


class CompletionLogprobs(TypedDict):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """A choice, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class Completion(TypedDict):
    """The response, and each chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    service_tier: NotRequired[str]


class CompletionFormat(Format):
    """Writes one response."""

    id_prefix = "cmpl"

    def whole(self, choices: Sequence[Sequence[Delta]], usage: Usage) -> bytes:
        written = [self._choice(index, deltas) for index, deltas in enumerate(choices)]
        return encode_json(self._chunk(written) | {"usage": usage})

    def _part(self, delta: Delta) -> CompletionChoice:
        return self._choice(delta.index, [delta])

    def _chunk(self, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": "text_completion", "choices": choices}

    def _choice(self, index: int, deltas: Sequence[Delta]) -> CompletionChoice:
        job = self._jobs[index]
        choice: CompletionChoice = {
            "index": index,
            "text": joined(deltas),
            "logprobs": None,
            "finish_reason": deltas[-1].finish_reason,
        }
        if self._has_logprobs(index):
            choice["logprobs"] = self._logprobs([token for delta in deltas for token in delta.shown])
        if self._return_token_ids:
            choice["token_ids"] = ids_of(deltas)
        if index not in self._opened:  # what is told of the prompt goes before the first tokens
            self._opened.add(index)
            choice["text"] = job.echo + choice["text"]
            if self._return_token_ids:
                choice["prompt_token_ids"] = list(job.request.token_ids)
        return choice

    def _logprobs(self, tokens: Sequence[ShownToken]) -> CompletionLogprobs:
        piece = self._tokenizer.piece
        tops: list[dict[str, float]] = []
        for token in tokens:
            top: dict[str, float] = {}
            for token_id, logprob in token.sampled.top:
                top.setdefault(piece(token_id).text, logprob)  # two tokens may read alike: the likelier counts
            if token.sampled.logprob is not None:
                top.setdefault(piece(token.sampled.token_id).text, token.sampled.logprob)
            tops.append(top)
        return {
            "tokens": [piece(token.sampled.token_id).text for token in tokens],
            "token_logprobs": [token.sampled.logprob for token in tokens],
            "top_logprobs": tops,
            "text_offset": [token.offset for token in tokens],
        }
