"""Writes one storage's objects, one after the other and for a share of the time, so that reads come between.

Each storage has its own writer: one that hangs keeps nothing from the others. What waits behind a write that hangs is
dropped, since its memory is needed; the write itself goes on, and its memory stays until it has ended.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from twostroke.kvtiers.host_tier import HostObject
from twostroke.kvtiers.prefix_objects import PrefixObjects
from twostroke.kvtiers.storage_tier import ObjectRef, StorageTier

HANG_S = 20.0
"""Seconds after which a write counts as hanging."""


@dataclass(eq=False)
class TierWriter:
    """The queue of one storage. Objects in it are pinned."""

    tier: StorageTier
    objects: PrefixObjects
    share: float  # of its time that it writes, at most
    on_done: Callable[[ObjectRef], None]  # an object is written, or dropped
    waiting: deque[tuple[ObjectRef, HostObject]] = field(default_factory=deque, init=False)
    _running: "asyncio.Task[None] | None" = field(default=None, init=False)
    _writing: "asyncio.Task[float] | None" = field(default=None, init=False)
    _is_closing: bool = field(default=False, init=False)

    @property
    def is_busy(self) -> bool:
        """True while something is written, or waits to be."""
        return self._running is not None

    @property
    def num_waiting(self) -> int:
        """Objects that are not written yet."""
        return len(self.waiting) + (self._writing is not None)

    def add(self, ref: ObjectRef, one: HostObject) -> None:
        """Write an object behind all that waits; never waits."""
        one.pins += 1
        self.waiting.append((ref, one))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name=f"writer of the {self.tier.name} tier")

    async def close(self, timeout_s: float) -> None:
        """Write what waits, for so long at most. The storage's threads may go on behind that."""
        self._is_closing = True
        if self._running is None:
            return
        await asyncio.wait({self._running}, timeout=timeout_s)
        left = [task for task in (self._running, self._writing) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self.waiting:
                ref, one = self.waiting.popleft()
                sections = [self.objects.section(one, group) for group in sorted(one.blocks)]
                writing = self._writing = asyncio.create_task(self.tier.write(ref, sections), name="object's write")
                ended, _ = await asyncio.wait({writing}, timeout=HANG_S)
                if not ended:
                    self.tier.write_hangs()
                    self._drop_waiting()
                    await asyncio.wait({writing})  # nothing else is written before the storage is back
                self._writing = None
                self._end(ref, one)
                if not self._is_closing:
                    await asyncio.sleep(writing.result() * (1.0 / self.share - 1.0))
        finally:
            self._running = None

    def _drop_waiting(self) -> None:
        while self.waiting:
            ref, one = self.waiting.popleft()
            self.tier.count("dropped")
            self._end(ref, one)

    def _end(self, ref: ObjectRef, one: HostObject) -> None:
        one.pins -= 1
        self.on_done(ref)
