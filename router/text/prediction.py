"""Tokens of an answer that a client has predicted, for OpenAI's usage. Pure."""

from collections.abc import Sequence

_SYNC = 3
"""Tokens that must agree before an answer is taken to be at a place of the prediction."""


class PredictedTokens:
    """Counts the tokens of an answer that follow the client's prediction.

    The answer is expected to begin as the prediction does. Where it leaves it, it is back once its last three tokens
    stand in the prediction.
    """

    def __init__(self, token_ids: Sequence[int]):
        """`token_ids` are the prediction's."""
        self._token_ids = token_ids
        self._places: dict[tuple[int, ...], int] | None = None  # behind three tokens each; made once it is needed
        self._place: int | None = 0
        self._last: tuple[int, ...] = ()
        self.num_accepted = 0

    @property
    def num_rejected(self) -> int:
        """Tokens of the prediction that the answer lacks."""
        return max(0, len(self._token_ids) - self.num_accepted)

    def add(self, token_id: int) -> None:
        """Take in the answer's next token."""
        self._last = (*self._last[1 - _SYNC :], token_id)
        place = self._place
        if place is not None and place < len(self._token_ids) and self._token_ids[place] == token_id:
            self.num_accepted += 1
            self._place = place + 1
        else:
            self._place = self._place_behind(self._last)

    def _place_behind(self, last: tuple[int, ...]) -> int | None:
        """Return the place behind the first occurrence of three tokens."""
        if self._places is None:
            token_ids = self._token_ids
            ends = range(len(token_ids), _SYNC - 1, -1)
            self._places = {tuple(token_ids[end - _SYNC : end]): end for end in ends}
        return self._places.get(last)
