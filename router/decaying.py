"""Sums that forget: what was added lately, and how much of it comes a second. Pure: the time is an argument."""

import math


class DecayingSum:
    """A sum whose parts fade away exponentially, to a third or so after `memory_s` seconds."""

    __slots__ = ("_at", "_memory_s", "_value")

    def __init__(self, memory_s: float):
        self._memory_s = memory_s
        self._value = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add what has come at `now`; times never go back."""
        self._value = self.value(now) + amount
        self._at = now

    def value(self, now: float) -> float:
        """What is left of all that was added."""
        return self._value * math.exp(min(0.0, self._at - now) / self._memory_s)

    def rate(self, now: float) -> float:
        """What has come a second, over the last `memory_s` or so; once it comes steadily for longer than that."""
        return self.value(now) / self._memory_s
