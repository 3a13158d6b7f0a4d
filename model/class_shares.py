"""What classes of a lower priority get while higher ones keep a worker busy, so that none starves. Pure.

A class that waits saves up its share of the tokens that go to higher classes. What it has saved it may spend before
them; what it is given anyhow is paid from that, too. Where nobody of the class waits, nothing is kept: it has missed
nothing.
"""

from collections.abc import Iterable, Mapping

from twostroke.protocol.requests import Promise

LEAST_SHARE = 0.02  # of a class that has been promised less: it must get on, too
MOST_SHARE = 0.9


class ClassShares:
    """Tokens saved by each class. They may stand for anything that is scheduled and counted: tokens, rows of steps."""

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Whether any class has something saved."""
        return bool(self._saved)

    def saved(self, class_name: str) -> int:
        """Whole tokens that the class may have before any higher class."""
        return int(self._saved.get(class_name, 0.0))

    def settle(self, given: Mapping[Promise, int], waiting: Iterable[Promise]) -> None:
        """A step gives so many tokens to requests with these promises, and leaves these classes waiting for more."""
        highest = max((promise.priority for promise in given), default=None)
        if highest is None and not self._saved:
            return
        saved: dict[str, float] = {}
        for name, promise in {promise.class_name: promise for promise in waiting}.items():
            to_higher = sum(tokens for other, tokens in given.items() if other.priority > promise.priority)
            to_it = sum(tokens for other, tokens in given.items() if other.class_name == name)
            share = min(max(promise.share, LEAST_SHARE), MOST_SHARE)
            # x of T tokens are its share of all once x / (T - x) of what others get are saved.
            left = self._saved.get(name, 0.0) + to_higher * share / (1 - share) - to_it
            if left > 0:
                saved[name] = left
        self._saved = saved
