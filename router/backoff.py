"""Pauses between the attempts of one request. Pure: the random source is an argument."""

from collections.abc import Callable


class Backoff:
    """Pauses that double, each shortened at random by up to half: requests that failed together don't return together.

    `draw` gives numbers from 0 to 1.
    """

    def __init__(self, *, first_s: float, most_s: float, draw: Callable[[], float]):
        self._first_s = first_s
        self._most_s = most_s
        self._draw = draw

    def pause_s(self, num_before: int) -> float:
        """The pause after which to try again, with `num_before` pauses made already."""
        longest_s = min(self._first_s * 2.0 ** min(num_before, 32), self._most_s)
        return longest_s * (1.0 - 0.5 * self._draw())
