"""Which tokens may be drawn next, of requests whose answers follow a grammar.

A mask is a row of bits: bit t % 32 of word t // 32 is 1 where token t may be drawn. Rows of other requests have none.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from twostroke.model.step import Draw

_WORTH_THREADS = 8  # masks, and cores: with less, waking threads takes longer than the 10 to 50 us of each mask


@dataclass(frozen=True)
class TokenMasks:
    """The masks of some rows of logits."""

    rows: NDArray[np.int64]  # [R], ascending
    words: NDArray[np.int32]  # [R, ceil(V / 32)]

    def within(self, first: int, end: int) -> "TokenMasks":
        """Those of the rows from `first` to `end`, counted from there."""
        some = slice(*np.searchsorted(self.rows, (first, end)))
        return TokenMasks(self.rows[some] - first, self.words[some])


class MaskFiller:
    """Fills masks without the interpreter's lock, many at once where there are cores for it. Belongs to one thread."""

    def __init__(self, vocab_size: int, num_cores: int | None = None):
        """`vocab_size` is the model's; `num_cores` None: those that the thread may use."""
        self._num_words = -(-vocab_size // 32)
        self._num_cores = num_cores or len(os.sched_getaffinity(0))
        self._executor: LLExecutor | None = None  # has threads: made when there is something to do

    def fill(self, draws: Sequence[Draw], positions: Sequence[int], last_tokens: Sequence[int]) -> TokenMasks | None:
        """Advance the constraints to `positions`, where tokens are to be drawn, and say what may be; None: anything.

        `last_tokens` are those right before. Tokens that a draw forbids are taken out of its mask, unless nothing would
        be left: a grammar that allows its end alone comes before `min_tokens`. Stop tokens are taken out where the
        grammar takes them as text and the answer may not end; a constraint that has no other token left fails.
        """
        held = [(row, draw, draw.constraint) for row, draw in enumerate(draws) if draw.constraint is not None]
        if not held:
            return None
        words = np.zeros((len(held), self._num_words), np.int32)

        def advance_and_compute(some: Iterable[int]) -> None:
            for i in some:
                row, draw, constraint = held[i]
                constraint.advance(draw.history, draw.num_prompt_tokens, last_tokens[row], positions[row])
            self._compute([(held[i][2].matcher, i) for i in some], words)

        advance_and_compute(range(len(held)))
        if again := [i for i, (_, _, constraint) in enumerate(held) if constraint.may_try_again()]:
            advance_and_compute(again)
        for i, (row, draw, constraint) in enumerate(held):
            if constraint.masks_failed(positions[row]):
                words[i] = -1  # what is drawn is thrown away
                continue
            if draw.forbidden:
                _take_out(words[i], draw.forbidden)
            stops = constraint.early_stops(partial(_is_allowed, words[i]))
            if stops and not _take_out(words[i], stops):
                constraint.fail(positions[row])
        return TokenMasks(np.array([row for row, _, _ in held], np.int64), words)

    def _compute(self, matchers: list[tuple[LLMatcher, int]], words: NDArray[np.int32]) -> None:
        """Write each one's mask into its row."""
        row_bytes = words.shape[1] * words.itemsize
        if len(matchers) < _WORTH_THREADS or self._num_cores < _WORTH_THREADS:
            for matcher, i in matchers:
                matcher.unsafe_compute_mask_ptr(words.ctypes.data + i * row_bytes, row_bytes)
            return
        if self._executor is None:
            self._executor = LLExecutor()
        self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, row_bytes, len(words))


def _is_allowed(words: NDArray[np.int32], token_id: int) -> bool:
    return token_id < 32 * len(words) and bool(words[token_id // 32] >> token_id % 32 & 1)


def _take_out(words: NDArray[np.int32], token_ids: Sequence[int]) -> bool:
    """Take tokens out of a mask, unless nothing would be left of it. Returns whether they were taken out."""
    left = words.view(np.uint32).copy()
    for token_id in token_ids:
        if token_id < 32 * len(left):
            left[token_id // 32] &= ~np.uint32(1 << token_id % 32)
    if not left.any():
        return False
    words[:] = left.view(np.int32)
    return True
