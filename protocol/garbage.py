"""Python's garbage collector in processes that serve.

A full collection looks at every object that can be part of a circle. A worker's start leaves some 280,000 of them, and
looking through these stops every stream for 140 ms. So they are frozen once the start is over, after which a full
collection costs what the requests of late have left.
"""

import gc
import time
from collections.abc import Mapping

GENERATIONS = 3
THRESHOLDS = (5_000, 20, 20)
"""New objects before a collection of the youngest, and how many of one generation come before one of the next.

Requests leave no reference cycles, so collections find nothing, and fewer are better. Over 200 requests of 32 tokens,
eight at a time, a worker spent 3 ms in ten collections of the youngest at Python's own 700, and 0.6 ms in one at 5,000;
no older generation was collected at either.
"""


class _Collections:
    """Seconds of this process's collections, by generation, from its making on."""

    def __init__(self) -> None:
        self.seconds = [0.0] * GENERATIONS
        self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, about: Mapping[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds[about["generation"]] += time.perf_counter() - self._began


_collections: _Collections | None = None


def freeze_start_up() -> None:
    """Collect what the start of this process left behind, and never look through the rest again.

    Call it when a process is ready to serve. A process that holds several workers may call it for each.
    """
    global _collections
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    if _collections is None:
        _collections = _Collections()


def collection_seconds() -> tuple[float, ...]:
    """Return the seconds that collections have taken since the start was frozen, by generation; empty before that."""
    return () if _collections is None else tuple(_collections.seconds)
