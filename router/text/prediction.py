"""Tokens of an answer that a client has predicted, for OpenAI's usage. Pure."""

from collections.abc import Sequence

import numpy as np

_SYNC = 3
"""Tokens that must agree before an answer is taken to be at a place of the prediction."""
_BITS = 21  # of a token id


class PredictedTokens:
    """Counts the tokens of an answer that follow the client's prediction, each of which counts once.

    The answer is expected to begin as the prediction does. Where it leaves it, it is back once its last three tokens
    stand in what is left of the prediction.
    """

    def __init__(self, token_ids: Sequence[int]):
        """`token_ids` are the prediction's, below 2 ** 21."""
        self._token_ids = token_ids
        wide = np.array(token_ids, np.int64)
        self._keys = wide[:-2] << 2 * _BITS | wide[1:-1] << _BITS | wide[2:]
        self._place = 0  # of the next predicted token
        self._is_following = True
        self._last: tuple[int, ...] = ()
        self.num_accepted = 0

    @property
    def num_rejected(self) -> int:
        """Tokens of the prediction that the answer lacks."""
        return len(self._token_ids) - self.num_accepted

    def add(self, token_id: int) -> None:
        """Take in the answer's next token."""
        self._last = (*self._last[1 - _SYNC :], token_id)
        if self._is_following and self._place < len(self._token_ids) and self._token_ids[self._place] == token_id:
            self.num_accepted += 1
            self._place += 1
            return
        self._is_following = False
        if len(self._last) == _SYNC and self._place < len(self._keys):
            first, second, third = self._last
            found = np.flatnonzero(self._keys[self._place :] == first << 2 * _BITS | second << _BITS | third)
            if len(found):
                self._place += int(found[0]) + _SYNC
                self._is_following = True
