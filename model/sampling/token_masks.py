"""Which tokens may be drawn next, of requests whose answers follow a grammar.

A mask is a row of bits: bit t % 32 of word t // 32 is 1 where token t may be drawn. Rows of other requests have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from twostroke.model.step import Draw


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
    """Fills masks, many at once and without the interpreter's lock. Belongs to one thread."""

    def __init__(self, vocab_size: int):
        """Of the model."""
        self._num_words = -(-vocab_size // 32)
        self._executor: LLExecutor | None = None  # has threads: made when there is something to do

    def fill(self, draws: Sequence[Draw], positions: Sequence[int], last_tokens: Sequence[int]) -> TokenMasks | None:
        """Advance the constraints to `positions`, where tokens are to be drawn, and say what may be; None: anything.

        `last_tokens` are those right before. Tokens that a draw forbids are taken out of its mask, unless nothing would
        be left: a grammar that allows its end alone comes before `min_tokens`.
        """
        held = [(row, draw, draw.constraint) for row, draw in enumerate(draws) if draw.constraint is not None]
        if not held:
            return None
        if self._executor is None:
            self._executor = LLExecutor()
        words = np.zeros((len(held), self._num_words), np.int32)
        for row, draw, constraint in held:
            constraint.advance(draw.history, draw.num_prompt_tokens, last_tokens[row], positions[row])
        sound = [(one[2].matcher, i) for i, one in enumerate(held) if not one[2].masks_failed(positions[one[0]])]
        if sound:
            self._executor.unsafe_compute_mask_ptr(sound, words.ctypes.data, 4 * self._num_words, len(held))
        for i, (row, draw, constraint) in enumerate(held):
            if constraint.masks_failed(positions[row]):
                words[i] = -1  # what is drawn is thrown away
            elif draw.forbidden:
                _take_out(words[i], draw.forbidden)
        return TokenMasks(np.array([row for row, _, _ in held], np.int64), words)


def _take_out(words: NDArray[np.int32], token_ids: Sequence[int]) -> None:
    left = words.copy()
    for token_id in token_ids:
        if token_id < 32 * len(left):
            left[token_id // 32] &= ~np.int32(np.uint32(1 << token_id % 32).astype(np.int32))
    if left.any():
        words[:] = left
