"""Log-probabilities of a prompt's own tokens, as OpenAI's completions and as vLLM show them."""

from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec
from typing_extensions import TypedDict

from twostroke.protocol.requests import PromptScores, SampledToken
from twostroke.router.text.tokenizer import TextTokenizer, new_detokenizer


class PromptLogprob(TypedDict):
    """vLLM's: how likely a token was in a position of the prompt."""

    logprob: float
    rank: int  # 1 is the likeliest
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""vLLM's: for each prompt token, by token ids, itself and the likeliest others; null for the first."""


class ShownToken(msgspec.Struct, frozen=True):
    """A token with log-probabilities, and where its text begins in the choice's text (characters)."""

    sampled: SampledToken
    offset: int


def _rows(scores: PromptScores, token_ids: Sequence[int], most: int) -> Iterator[tuple[SampledToken, int]]:
    """The scored tokens of a prompt, from its second on, with at most so many alternatives, and their ranks."""
    width = scores.num_alternatives
    others, ranks = memoryview(scores.token_ids).cast("i"), memoryview(scores.ranks).cast("i")
    logprobs = memoryview(scores.logprobs).cast("f")
    for row, (token_id, rank) in enumerate(zip(islice(token_ids, 1, None), ranks, strict=True)):
        own, *rest = logprobs[row * (width + 1) : (row + 1) * (width + 1)]
        top = zip(others[row * width : (row + 1) * width], rest, strict=True)
        yield SampledToken(token_id, own, tuple(islice(top, most))), rank


def echoed(
    scores: PromptScores, token_ids: Sequence[int], num_alternatives: int, tokenizer: TextTokenizer, echo: str
) -> tuple[ShownToken, ...]:
    """A prompt's tokens as a completion shows those that it echoes. The first has no log-probability.

    `echo` is the text that is shown of the prompt. It has a special token's name where the client wrote it, and none
    where the tokenizer added the token.
    """
    text, offset = new_detokenizer(tokenizer), 0
    shown: list[ShownToken] = []
    first = SampledToken(token_ids[0])
    for sampled in (first, *(one for one, _ in _rows(scores, token_ids, num_alternatives))):
        if tokenizer.is_special(sampled.token_id):
            offset += len(text.flush())  # no character goes on beyond it
            name = tokenizer.piece(sampled.token_id).text
            shown.append(ShownToken(sampled, offset))
            offset += len(name) if echo.startswith(name, offset) else 0
        else:
            shown.append(ShownToken(sampled, offset))
            offset += len(text.add(sampled.token_id))
    return tuple(shown)


def prompt_logprobs(
    scores: PromptScores, token_ids: Sequence[int], num_alternatives: int, tokenizer: TextTokenizer
) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`."""
    found: PromptLogprobs = [None]
    for sampled, rank in _rows(scores, token_ids, num_alternatives):
        likely = {token_id: (logprob, place) for place, (token_id, logprob) in enumerate(sampled.top, 1)}
        likely.setdefault(sampled.token_id, (sampled.logprob or 0.0, rank))
        found.append(
            {
                str(token_id): {
                    "logprob": logprob,
                    "rank": place,
                    "decoded_token": tokenizer.piece(token_id).text,
                }
                for token_id, (logprob, place) in likely.items()
            }
        )
    return found
