"""The way between a store's units and contiguous buffers that a process group can send.

A buffer holds a chunk as it is on the wire: its units one after the other, encoded where that was agreed, and their
digest. So a chunk is one message, however many blocks and layers it spans.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.digest import DIGEST_BYTES
from kvtransfer.encodings import decode, encode
from kvtransfer.host_units import HostUnits, count_units
from kvtransfer.layout import Cut, Segment
from kvtransfer.store import HostStore

NUM_BUFFERS = 2
"""While one chunk is on the wire, the next is packed, or the one before unpacked."""

_HOT_BYTES = 512 * 1024  # packed and digested at once: the digest reads what is in the processor's cache


class Staging(Protocol):
    """The buffers of one end of a link, on the device whose group moves them.

    Holds at most NUM_BUFFERS of the largest chunk so far each. `pack` and `post` belong to one thread, `wait` and
    `unpack` to another; a buffer is on one of the two at a time.
    """

    def buffer(self, index: int, num_units: int) -> Tensor:
        """uint8 [num_units * unit_bytes + DIGEST_BYTES]: buffer `index`, grown where needed."""

    def pack(self, segments: Sequence[Segment], seal: int, packed: Tensor) -> None:
        """Units and their digest -> packed."""

    def unpack(self, segments: Sequence[Segment], seal: int, packed: Tensor) -> bool:
        """packed -> units, complete when it returns; where the digest is wrong, no unit is touched and it is False."""

    def post(self, move: Callable[[], dist.Work]) -> dist.Work:
        """Start a send of what was packed, or a receive."""

    def wait(self, work: dist.Work) -> None:
        """Wait on the calling thread until a send or receive is complete. Raises RuntimeError."""


class HostStaging:
    """For stores in host memory."""

    def __init__(self, store: HostStore, cut: Cut):
        self._cut = cut
        self._units = HostUnits(store, cut)
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_BUFFERS)]
        self._raw = np.empty(0, np.uint8)  # units before they are encoded, or after they are decoded

    def buffer(self, index: int, num_units: int) -> Tensor:
        num_bytes = num_units * self._cut.unit_bytes + DIGEST_BYTES
        if self._memory[index].numel() < num_bytes:
            self._memory[index] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[index][:num_bytes]

    def pack(self, segments: Sequence[Segment], seal: int, packed: Tensor) -> None:
        array: NDArray[np.uint8] = packed.numpy()
        hasher = xxhash.xxh3_128(seed=seal)
        at = 0
        for part in _parts(segments, self._part_units):
            size = count_units(part) * self._cut.unit_bytes
            piece = array[at : at + size]
            if self._cut.encoding == "raw":
                self._units.pack(part, piece)
            else:
                raw = self._scratch(part)
                self._units.pack(part, raw)
                encode(raw, self._cut, piece)
            hasher.update(piece.data)
            at += size
        array[at:] = np.frombuffer(hasher.digest(), np.uint8)

    def unpack(self, segments: Sequence[Segment], seal: int, packed: Tensor) -> bool:
        array: NDArray[np.uint8] = packed.numpy()
        end = array.size - DIGEST_BYTES
        if xxhash.xxh3_128_digest(array[:end].data, seed=seal) != array[end:].tobytes():
            return False
        if self._cut.encoding == "raw":
            self._units.unpack(segments, array)
            return True
        at = 0
        for part in _parts(segments, self._part_units):
            size = count_units(part) * self._cut.unit_bytes
            raw = self._scratch(part)
            decode(array[at : at + size], self._cut, raw)
            self._units.unpack(part, raw)
            at += size
        return True

    def post(self, move: Callable[[], dist.Work]) -> dist.Work:
        return move()

    def wait(self, work: dist.Work) -> None:
        work.wait()

    @property
    def _part_units(self) -> int:
        return max(1, _HOT_BYTES // self._units.unit_bytes)

    def _scratch(self, part: Sequence[Segment]) -> NDArray[np.uint8]:
        size = count_units(part) * self._units.unit_bytes
        if self._raw.size < size:
            self._raw = np.empty(size, np.uint8)
        return self._raw[:size]


def _parts(segments: Sequence[Segment], part_units: int) -> list[list[Segment]]:
    """The units in parts of at most `part_units`, in order."""
    parts: list[list[Segment]] = []
    room = 0
    for segment in segments:
        at = 0
        while at < len(segment.unit_ids):
            if room == 0:
                parts.append([])
                room = part_units
            taken = segment.unit_ids[at : at + room]
            parts[-1].append(Segment(segment.layer, taken))
            at += len(taken)
            room -= len(taken)
    return parts
