"""A storage of KV objects in memory, with faults, and its calls on virtual time.

What a storage can do to a reader: answer late or never, fail, lose a blob, return other bytes than were written, or
another blob's. A writer that is killed leaves nothing, or the beginning of a blob where the storage tears it.
"""

import asyncio
import errno
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from twostroke.kvtiers.storage.blobs import BlobInfo, BlobMissing

ResultT = TypeVar("ResultT")


class MemoryReader:
    """One open blob."""

    def __init__(self, data: bytes):
        self.num_bytes = len(data)
        self._data = data
        self._offset = 0

    def read_into(self, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            piece = self._data[self._offset : self._offset + buffer.nbytes]
            buffer.cast("B")[: len(piece)] = piece
            self._offset += len(piece)
            if len(piece) < buffer.nbytes:
                raise EOFError("the blob ends before")

    def skip(self, num_bytes: int) -> None:
        self._offset += num_bytes


class MemoryBlobs:
    """A BlobStore. Faults are counted down by name in `faults`, one for each call that they can spoil."""

    def __init__(self, draw: random.Random):
        self.blobs: dict[str, bytes] = {}
        self.quarantined: list[str] = []
        self.faults: Counter[str] = Counter()
        self._draw = draw

    @contextmanager
    def open(self, key: str) -> Iterator[MemoryReader]:
        if self._is_due("fail_read"):
            raise OSError("the storage fails this read")
        if key not in self.blobs or self._is_due("lose"):
            raise BlobMissing(key)
        data = self.blobs[key]
        if self._is_due("flip") and data:
            place = self._draw.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ 1 << self._draw.randrange(8)]) + data[place + 1 :]
        if self._is_due("truncate"):
            data = data[: self._draw.randrange(len(data) + 1)]
        if self._is_due("swap"):
            data = self.blobs[self._draw.choice(sorted(self.blobs))]
        yield MemoryReader(data)

    def write(self, key: str, parts: Sequence[memoryview]) -> None:
        if self._is_due("fail_write"):
            raise OSError("the storage fails this write")
        if self._is_due("full"):
            raise OSError(errno.ENOSPC, "no space is left", key)
        data = b"".join(parts)
        self.blobs[key] = data[: self._draw.randrange(len(data))] if self._is_due("tear") else data

    def delete(self, key: str) -> None:
        self.blobs.pop(key, None)

    def quarantine(self, key: str) -> None:
        if self.blobs.pop(key, None) is not None:
            self.quarantined.append(key)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        for key in sorted(self.blobs):
            if key.startswith(prefix):
                yield BlobInfo(key, len(self.blobs[key]), 0.0)

    def _is_due(self, fault: str) -> bool:
        if not self.faults[fault]:
            return False
        self.faults[fault] -= 1
        return True


class VirtualCalls:
    """The Calls of a storage on virtual time: each takes `seconds()`, and `hangs` keeps all from ending."""

    def __init__(self, max_calls: int, seconds: Callable[[], float]):
        self._max_calls = max_calls
        self._seconds = seconds
        self.num_under_way = 0
        self._end_of_hang: asyncio.Event | None = None

    @property
    def is_full(self) -> bool:
        return self.num_under_way >= self._max_calls

    def hang(self) -> None:
        """Let no call end until `go_on`."""
        self._end_of_hang = self._end_of_hang or asyncio.Event()

    def go_on(self) -> None:
        """End a hang."""
        if self._end_of_hang is not None:
            self._end_of_hang.set()
            self._end_of_hang = None

    async def run(self, call: Callable[[], ResultT]) -> ResultT:
        # As on a thread, a call goes on though its waiter is cancelled, and then nobody hears of its error.
        running = asyncio.ensure_future(self._run(call))
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return await asyncio.shield(running)

    async def _run(self, call: Callable[[], ResultT]) -> ResultT:
        self.num_under_way += 1
        try:
            await asyncio.sleep(self._seconds())
            if self._end_of_hang is not None:
                await self._end_of_hang.wait()
            return call()
        finally:
            self.num_under_way -= 1

    def close(self) -> None:
        """Nothing is left to end."""
