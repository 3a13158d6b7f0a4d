"""Sums that forget: what was added lately, and how much of it comes a second. Pure: the time is an argument."""

import math

_LEAST_S = 0.5
"""A rate over a shorter time would be that of a single event."""


class DecayingSum:
    """A sum whose parts fade away exponentially, to a third or so after `memory_s` seconds."""

    __slots__ = ("_at", "_began", "_memory_s", "_value")

    def __init__(self, memory_s: float):
        self._memory_s = memory_s
        self._value = 0.0
        self._at = 0.0
        self._began: float | None = None

    def add(self, amount: float, now: float) -> None:
        """Add what has come at `now`; times never go back."""
        if self._began is None:
            self._began = now
        self._value = self.value(now) + amount
        self._at = now

    def value(self, now: float) -> float:
        """What is left of all that was added."""
        return self._value * math.exp(min(0.0, self._at - now) / self._memory_s)

    def rate(self, now: float) -> float:
        """What has come a second, over the last `memory_s` or so; at first, over what time there has been."""
        if self._began is None:
            return 0.0
        remembered = 1.0 - math.exp(-max(now - self._began, _LEAST_S) / self._memory_s)
        return self.value(now) / (self._memory_s * remembered)
