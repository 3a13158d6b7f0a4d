"""Whose suspect a worker computes: one router's at a time, first come, first served.

When a worker dies, its routers must know whose request was alone with it. Each sees to that among its own; the worker
does among the routers, and knows nothing of what it is for.
"""

from collections.abc import Callable


class Turns:
    """Of one worker. `give` tells a router that its turn, of this number, has come."""

    def __init__(self, give: Callable[[str, int], None]):
        self._give = give
        self._line: dict[str, int] = {}  # who wants it, by when they came; the first one has it
        self._is_closed = False

    def ask(self, router_id: str, number: int) -> None:
        """The router wants a turn, or has asked again while it waits."""
        self._line[router_id] = number
        if next(iter(self._line)) == router_id and not self._is_closed:
            self._give(router_id, number)

    def close(self) -> None:
        """The worker ends, perhaps of what is computed in this very turn: there is no next one to be accused of it."""
        self._is_closed = True

    def end(self, router_id: str) -> None:
        """The router's turn is over, or not wanted any more. Harmless for one that never asked."""
        if router_id not in self._line:
            return
        had_it = next(iter(self._line)) == router_id
        del self._line[router_id]
        if had_it and self._line and not self._is_closed:
            self._give(*next(iter(self._line.items())))
