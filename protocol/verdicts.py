"""Requests that have taken workers down: how processes tell each other of them, and remember them for a while.

A request is known by its fingerprint, which its router makes. It is a hash, so what passes between processes, and what
a worker remembers for routers that come later, tells nobody what was asked. Nothing here does I/O.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Annotated

import msgspec

from twostroke.protocol.clock import Clock

FINGERPRINT_BYTES = 16
MOST_TOLD = 1024
"""Verdicts in one message, which is 30 KB then."""
LONGEST_S = 86_400.0
"""What a verdict may have left when it is told: a day."""

_SAME_S = 1.0  # what is told again has been under way for a moment: less than this is no news


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """This request is refused for so long from now on. What is left travels, since clocks differ."""

    fingerprint: Annotated[bytes, msgspec.Meta(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)]
    left_s: Annotated[float, msgspec.Meta(gt=0.0, le=LONGEST_S)]


class Verdicts:
    """Those of the last `longest_s` seconds, `most` at most: whoever was told first goes first."""

    def __init__(self, clock: Clock, *, most: int = MOST_TOLD, longest_s: float = LONGEST_S):
        self._clock = clock
        self._most = most
        self._longest_s = longest_s
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, verdict: Verdict) -> bool:
        """Whether that is news. What is known already, to the second, is not, so that nothing is told in circles."""
        now = self._clock()
        until = now + min(verdict.left_s, self._longest_s)
        known = self._until.get(verdict.fingerprint, now)
        if until <= now or (known > now and until < known + _SAME_S):
            return False
        self._until[verdict.fingerprint] = until
        self._until.move_to_end(verdict.fingerprint)
        while len(self._until) > self._most:
            self._until.popitem(last=False)
        return True

    def learn(self, verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
        """Add these; returns those that are news."""
        return tuple(verdict for verdict in verdicts if self.add(verdict))

    def holds(self, fingerprint: bytes) -> bool:
        """Whether the request is to be refused now."""
        until = self._until.get(fingerprint)
        if until is None:
            return False
        if self._clock() < until:
            return True
        del self._until[fingerprint]
        return False

    def to_tell(self) -> tuple[Verdict, ...]:
        """What is known, with what is left of it: for one message, so the latest of them."""
        now = self._clock()
        latest = list(self._until.items())[-MOST_TOLD:]
        return tuple(Verdict(fingerprint, min(until - now, LONGEST_S)) for fingerprint, until in latest if until > now)
