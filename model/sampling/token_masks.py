"""Masks of the tokens that may be drawn next, for requests whose answers follow a grammar.

A mask is a row of bits: bit t % 32 of word t // 32 is 1 where token t may be drawn. Rows of other requests have none.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from twostroke.model.step import Constraint, Draw

if TYPE_CHECKING:
    from llguidance import LLExecutor

_WORTH_THREADS = 8  # masks, and cores: with less, waking threads takes longer than the 10 to 50 us of each mask


@dataclass(frozen=True)
class TokenMasks:
    """The masks of some rows of logits."""

    rows: NDArray[np.int64]  # [R], ascending
    words: NDArray[np.int32]  # [R, ceil(V / 32)]

    def within(self, first: int, end: int) -> "TokenMasks":
        """Return the rows from `first` to `end`, counted from `first`."""
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
        held = [(number, draw, draw.constraint) for number, draw in enumerate(draws) if draw.constraint is not None]
        if not held:
            return None
        rows = [
            _HeldRow(place, draw, constraint, positions[number], last_tokens[number])
            for place, (number, draw, constraint) in enumerate(held)
        ]
        words = np.zeros((len(rows), self._num_words), np.int32)
        # Drafts of one request share a matcher, which goes from each to the next.
        for num_drafted in range(1 + max(row.draw.num_drafted for row in rows)):
            self._fill_rows([row for row in rows if row.draw.num_drafted == num_drafted], words)
        return TokenMasks(np.array([number for number, _, _ in held], np.int64), words)

    def _fill_rows(self, rows: "list[_HeldRow]", words: NDArray[np.int32]) -> None:
        """Fill the masks of rows of different requests."""
        self._advance_and_compute(rows, words)
        self._advance_and_compute([row for row in rows if row.alone(row.constraint.may_try_again)], words)
        for row in rows:
            if row.has_failed or row.constraint.masks_failed(row.position):
                words[row.place] = -1  # what is drawn is thrown away
                continue
            if row.draw.forbidden:
                _take_out(words[row.place], row.draw.forbidden)
            stops = row.constraint.early_stops(partial(_is_allowed, words[row.place]))
            if stops and not _take_out(words[row.place], stops):
                row.constraint.fail(row.position)

    def _advance_and_compute(self, rows: "list[_HeldRow]", words: NDArray[np.int32]) -> None:
        """Write each row's mask into its place, but for rows that fail."""
        rows = [row for row in rows if row.alone(row.advance)]
        if self._compute_at_once(rows, words):
            return
        row_bytes = words.shape[1] * words.itemsize
        for row in rows:
            address = words.ctypes.data + row.place * row_bytes
            row.alone(partial(row.constraint.matcher.unsafe_compute_mask_ptr, address, row_bytes))

    def _compute_at_once(self, rows: "list[_HeldRow]", words: NDArray[np.int32]) -> bool:
        """Write the masks by threads. False where they are not worth it, or fail at a row, which is not named."""
        if len(rows) < _WORTH_THREADS or self._num_cores < _WORTH_THREADS:
            return False
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        matchers = [(row.constraint.matcher, row.place) for row in rows]
        try:
            row_bytes = words.shape[1] * words.itemsize
            self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, row_bytes, len(words))
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # llguidance may panic, which is no Exception
            return False
        return True


@dataclass(frozen=True)
class _HeldRow:
    """A row of logits with a constraint."""

    place: int  # among those that have one
    draw: Draw
    constraint: Constraint
    position: int
    last_token: int

    @property
    def has_failed(self) -> bool:
        return self.draw.fault is not None and self.draw.fault.error is not None

    def advance(self) -> bool:
        self.constraint.advance(self.draw.history, self.draw.num_prompt_tokens, self.last_token, self.position)
        return True

    def alone(self, act: Callable[[], bool | None]) -> bool | None:
        """Return what `act` returns; None where it raises, which is the row's own error."""
        try:
            return None if self.has_failed else act()
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # llguidance may panic, which is no Exception
            if self.draw.fault is None:
                raise
            self.draw.fault.note(error)
            return None


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
