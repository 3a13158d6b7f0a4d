"""The SLO classes that a router has heard of, by number: what goes before what, over arrays of classes."""

import numpy as np
from numpy.typing import NDArray

from twostroke.protocol.requests import Promise

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
