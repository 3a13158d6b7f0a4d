"""Chances that drafted tokens are right, learnt from every prediction, run or not. Pure.

A prediction is checked by the token that is drawn anyway, so chances are learnt at no cost, and are known before the
first row is spent on a draft. The chance depends on where the prediction comes from and on the length of the match, and
for each request on how its own predictions turned out.
"""

from typing import Literal, get_args

from twostroke.worker.speculation.suffix_match import MOST_MATCH

DraftSource = Literal["own", "answers", "prediction", "grammar", "mtp"]
"""The request's own tokens, earlier answers, the client's prediction from its beginning on, a grammar's forced text, or
the model's MTP head."""

MEMORY = 0.995
"""Weight of all earlier predictions of a kind after one more."""
OWN_MEMORY = 0.9
"""The same for a request's own."""
_PRIOR = 4.0  # predictions that the first guess counts as
_OWN_PRIOR = 3.0  # right ones
_SURE = 0.98
_LIMITS = (3, 4, 6, 9, 15, MOST_MATCH)  # the longest match of each kind
_KIND = tuple(next(kind for kind, most in enumerate(_LIMITS) if length <= most) for length in range(MOST_MATCH + 1))
_FIRST_GUESS = (0.3, 0.45, 0.6, 0.7, 0.8, 0.9)
MTP_LENGTH = _LIMITS[3]
"""Length of the match that a prediction of an MTP head counts as: heads are first taken to be right so often."""
_FIRST_GUESS_OF_FORCED = (0.6, 0.8, 0.9, 0.9, 0.9, 0.9)  # by how many tokens are left of the text, the last one first


class AcceptanceRates:
    """Rates at which predictions were right, over all requests of a worker."""

    def __init__(self) -> None:
        self._right = {
            source: [_PRIOR * guess for guess in (_FIRST_GUESS_OF_FORCED if source == "grammar" else _FIRST_GUESS)]
            for source in get_args(DraftSource)
        }
        self._all = {source: [_PRIOR] * len(_FIRST_GUESS) for source in get_args(DraftSource)}

    def rate(self, source: DraftSource, length: int) -> float:
        """Return the chance that a match of so many tokens predicts the next one."""
        kind = _KIND[min(length, MOST_MATCH)]
        return self._right[source][kind] / self._all[source][kind]

    def note(self, source: DraftSource, length: int, *, is_right: bool) -> None:
        """Learn from one prediction."""
        kind = _KIND[min(length, MOST_MATCH)]
        self._right[source][kind] = MEMORY * self._right[source][kind] + is_right
        self._all[source][kind] = MEMORY * self._all[source][kind] + 1.0


class OwnAcceptance:
    """Compares how often a request's predictions were right with what was expected of them."""

    __slots__ = ("_expected", "_right")

    def __init__(self) -> None:
        self._right = 0.0
        self._expected = 0.0

    def note(self, expected: float, *, is_right: bool) -> None:
        """Learn from one prediction with a chance of `expected` by all requests' rates."""
        self._right = OWN_MEMORY * self._right + is_right
        self._expected = OWN_MEMORY * self._expected + expected

    def chance(self, rate: float) -> float:
        """Return the chance of a prediction that is right at `rate` over all requests."""
        return min(_SURE, rate * (self._right + _OWN_PRIOR) / (self._expected + _OWN_PRIOR))
