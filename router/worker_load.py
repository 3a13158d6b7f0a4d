"""What one router asks of one worker, by class, in seconds of prompts. Pure: the time is an argument."""

import math
from collections import defaultdict

from twostroke.router.decaying import DecayingSum

WANTED_S = 4.0
"""How long a wish is remembered. Longer, and lower classes are refused for many seconds after an overload, by idle
workers."""

BLIND_S = 0.5
"""Between a worker's stats: what was sent meanwhile, they don't tell of."""


class WorkerLoad:
    """Of one worker that computes prompts."""

    def __init__(self) -> None:
        self._wanted: dict[int, DecayingSum] = defaultdict(lambda: DecayingSum(WANTED_S))  # by priority
        self._unseen: dict[str, DecayingSum] = defaultdict(lambda: DecayingSum(BLIND_S))  # by class
        self.sent_at = -math.inf

    def want(self, priority: int, prompt_s: float, now: float) -> None:
        """A prompt would like to be computed there, whether it is let in or not."""
        self._wanted[priority].add(prompt_s, now)

    def send(self, class_name: str, prompt_s: float, now: float) -> None:
        """A prompt is let in."""
        self._unseen[class_name].add(prompt_s, now)
        self.sent_at = now

    def wanted_above(self, priority: int, now: float) -> float:
        """The part of the worker's time that classes of a higher priority want; above 1 where they want too much."""
        return sum(one.rate(now) for other, one in self._wanted.items() if other > priority)

    def unseen_s(self, now: float, class_name: str | None = None) -> float:
        """Work that the worker's stats don't tell of yet: of one class, or of all."""
        if class_name is not None:
            return self._unseen[class_name].value(now) if class_name in self._unseen else 0.0
        return sum(one.value(now) for one in self._unseen.values())

    def is_forgotten(self, now: float) -> bool:
        """Whether nothing has been wanted of it for long."""
        return all(one.value(now) < 1e-6 for one in self._wanted.values())
