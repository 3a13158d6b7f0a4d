"""SLO classes: what is promised to whom. The promises themselves are kept by admission, queues and schedulers.

The SLO classes that a router has heard of, by number: what goes before what, over arrays of classes.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import Promise

STANDARD = "standard"
MOST_PRIORITY = 1000


@dataclass(frozen=True)
class SLOClass:
    """One class of requests. Raises ConfigError for values that can't be meant."""

    name: str
    ttft_s: float | None = None  # to the first token; None: nothing promised, so never refused for being late
    tpot_s: float | None = None  # mean time between tokens after the first
    priority: int = 0  # a higher one goes first, gives way last, and is shed last
    share: float = 0.0  # of the workers' tokens that the class gets while it waits, so that it can't starve

    def __post_init__(self) -> None:
        if not self.name or not self.name.isascii() or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"name: {self.name!r} must be letters, digits, - and _")
        for what in ("ttft_s", "tpot_s"):
            value = getattr(self, what)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{what}: {value} must be above 0")
        if not -MOST_PRIORITY <= self.priority <= MOST_PRIORITY:
            raise ConfigError(f"priority: {self.priority} must be from {-MOST_PRIORITY} to {MOST_PRIORITY}")
        if not 0 <= self.share < 1:
            raise ConfigError(f"share: {self.share} must be at least 0 and below 1")


@dataclass(frozen=True)
class SLOConfig:
    """All classes. Without any there is one, `standard`, that promises nothing. Raises ConfigError."""

    classes: tuple[SLOClass, ...] = field(default_factory=lambda: (SLOClass(STANDARD),))
    default: str | None = None  # of requests that name none, and whose API key has none; None: the first
    admission: bool = True  # refuse (429) what would be late, rather than serve it late
    max_queue_s: float = 600.0  # of work before a request that is promised nothing; longer queues refuse it

    def __post_init__(self) -> None:
        names = [one.name for one in self.classes]
        if not names:
            raise ConfigError("classes: there must be one at least")
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"classes: {name} is there twice")
        if not self.max_queue_s > 0:
            raise ConfigError(f"max_queue_s: {self.max_queue_s} must be above 0")
        if self.default is not None and self.default not in names:
            raise ConfigError(f"default: {self.default} is none of the classes {', '.join(names)}")
        if sum(one.share for one in self.classes) > 1:
            raise ConfigError("classes: the shares of all together are over 1")

    @property
    def default_class(self) -> SLOClass:
        return self.classes[0] if self.default is None else self.named(self.default)

    def named(self, name: str) -> SLOClass:
        """Raises KeyError."""
        for one in self.classes:
            if one.name == name:
                return one
        raise KeyError(name)

    @property
    def is_set(self) -> bool:
        """Whether anybody has said anything of classes."""
        return [one.name for one in self.classes] != [STANDARD]


Floats = NDArray[np.float64]


class ServiceClasses:
    """Numbers count from 0, as classes are heard of first."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._priority: list[int] = []
        self._share: list[float] = []
        self._ahead: dict[int, tuple[Floats, Floats | None]] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, name: str, priority: int, share: float) -> int:
        """The class's number; what it says of itself last counts."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers)
            self._priority.append(priority)
            self._share.append(share)
        elif self._priority[number] == priority and self._share[number] == share:
            return number
        self._priority[number], self._share[number] = priority, share
        self._ahead.clear()
        return number

    def ahead_of(self, priority: int) -> tuple[Floats, Floats | None]:
        """For each class 1 where it goes before one of `priority`, else 0; and the shares of those that don't.

        None: none of them has a share.
        """
        known = self._ahead.get(priority)
        if known is None:
            first = np.array([1.0 if one >= priority else 0.0 for one in self._priority])
            floors = np.where(first > 0, 0.0, self._share)
            known = self._ahead[priority] = first, floors if floors.any() else None
        return known

    def number_of(self, promise: Promise) -> int:
        """The number of a request's class."""
        return self.number(promise.class_name, promise.priority, promise.share)

    def find(self, name: str) -> int | None:
        """The class's number, where it is known."""
        return self._numbers.get(name)
