"""When a chunk is sent again, and when another link is asked for. Pure: a clock is handed in.

    attempt 0   fails: again, on the same link if that lives
    attempt 1   fails: again, on another link, by another transport where the pair has one
    attempt 2   fails: the transfer is given up, and the prompt computed anew

A link is given up by its source: where it broke, could not be joined, or carried a chunk's attempt 1 and damaged it.
"""

from collections import deque

from twostroke.protocol.clock import Clock

MAX_ATTEMPTS = 3


def needs_other_link(attempt: int) -> bool:
    """Whether this attempt may not go where the one before it went."""
    return attempt == MAX_ATTEMPTS - 1


class LinkBudget:
    """How many links a connection may ask for: a pair that breaks every link ends in an abort, not in a loop."""

    def __init__(self, clock: Clock, max_links: int, within_s: float):
        self._clock = clock
        self._max_links = max_links
        self._within_s = within_s
        self._asked: deque[float] = deque()

    def ask(self) -> bool:
        """Whether one more may be asked for now; it counts then."""
        now = self._clock()
        while self._asked and now - self._asked[0] >= self._within_s:
            self._asked.popleft()
        if len(self._asked) >= self._max_links:
            return False
        self._asked.append(now)
        return True
