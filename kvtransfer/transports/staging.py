"""The way between a store's units and contiguous buffers that a process group can send.

A buffer holds a chunk as it is on the wire: its units one after the other, encoded where that was agreed, and their
digest. So a chunk is one message, however many blocks and layers it spans.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.digest import DIGEST_BYTES
from twostroke.kvtransfer.encodings import decode, encode
from twostroke.kvtransfer.host_units import HostUnits, count_units, split_segments
from twostroke.kvtransfer.layout import Cut, Segment
from twostroke.kvtransfer.store import HostStore

NUM_BUFFERS = 2
"""While one chunk is on the wire, the next is packed, or the one before unpacked."""

MAX_CHUNK_BYTES = TransferConfig().max_chunk_bytes

_HOT_BYTES = 256 * 1024  # encoded or decoded at once: the second pass reads what is in the processor's cache


class Staging(Protocol):
    """The buffers of one end of a link, on the device whose group moves them.

    Holds at most NUM_BUFFERS of the largest chunk so far each, or of the largest possible one, see `landing`. `pack`
    and `post` belong to one thread, `wait` and `unpack` to another; a buffer is on one of the two at a time.
    """

    def buffer(self, index: int, num_units: int) -> Tensor:
        """uint8 [num_units * unit_bytes + DIGEST_BYTES]: buffer `index`, grown where needed."""

    def landing(self, index: int, num_units: int) -> Tensor:
        """uint8 [at least as many]: what a receive of so many units is posted into. `buffer` is its beginning then."""

    def pack(self, segments: Sequence[Segment], seal: int, packed: Tensor) -> None:
        """Units and their digest -> packed."""

    def unpack(self, segments: Sequence[Segment], seal: int, packed: Tensor) -> bool:
        """packed -> units, complete when it returns; where the digest is wrong, no unit is touched and it is False."""

    def post(self, move: Callable[[], dist.Work]) -> dist.Work:
        """Start a send of what was packed, or a receive."""

    def wait(self, work: dist.Work) -> None:
        """Wait on the calling thread until a send or receive is complete. Raises RuntimeError."""


class HostStaging:
    """For stores in host memory.

    A receive has room for the largest chunk there can be, of `max_chunk_bytes` or a single unit. Gloo ends the process
    when a message is larger than the receive that it meets, as it may be once chunks are out of step with their
    announcements; a smaller one it takes, and the digest tells.
    """

    def __init__(self, store: HostStore, cut: Cut, max_chunk_bytes: int = MAX_CHUNK_BYTES):
        self._cut = cut
        self._landing_bytes = max(max_chunk_bytes, cut.unit_bytes) + DIGEST_BYTES
        self._units = HostUnits(store, cut)
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_BUFFERS)]
        self._raw = np.empty(0, np.uint8)  # units before they are encoded, or after they are decoded

    def buffer(self, index: int, num_units: int) -> Tensor:
        num_bytes = num_units * self._cut.unit_bytes + DIGEST_BYTES
        return self._grown(index, num_bytes)[:num_bytes]

    def landing(self, index: int, num_units: int) -> Tensor:
        return self._grown(index, max(num_units * self._cut.unit_bytes + DIGEST_BYTES, self._landing_bytes))

    def pack(self, segments: Sequence[Segment], seal: int, packed: Tensor) -> None:
        array: NDArray[np.uint8] = packed.numpy()
        end = array.size - DIGEST_BYTES
        if self._cut.encoding == "raw":
            self._units.pack(segments, array)
        else:
            for part, piece in self._pieces(segments, array):
                raw = self._scratch(part)
                self._units.pack(part, raw)
                encode(raw, self._cut, piece)
        array[end:] = np.frombuffer(xxhash.xxh3_128_digest(array[:end].data, seed=seal), np.uint8)

    def unpack(self, segments: Sequence[Segment], seal: int, packed: Tensor) -> bool:
        array: NDArray[np.uint8] = packed.numpy()
        end = array.size - DIGEST_BYTES
        if xxhash.xxh3_128_digest(array[:end].data, seed=seal) != array[end:].tobytes():
            return False
        if self._cut.encoding == "raw":
            self._units.unpack(segments, array)
            return True
        for part, piece in self._pieces(segments, array):
            raw = self._scratch(part)
            decode(piece, self._cut, raw)
            self._units.unpack(part, raw)
        return True

    def post(self, move: Callable[[], dist.Work]) -> dist.Work:
        return move()

    def wait(self, work: dist.Work) -> None:
        work.wait()

    def _grown(self, index: int, num_bytes: int) -> Tensor:
        if self._memory[index].numel() < num_bytes:
            self._memory[index] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[index]

    def _pieces(
        self, segments: Sequence[Segment], array: NDArray[np.uint8]
    ) -> Iterator[tuple[list[Segment], NDArray[np.uint8]]]:
        """Parts of the chunk, each with its place on the wire."""
        size = self._cut.unit_bytes
        step = max(1, _HOT_BYTES // self._units.unit_bytes)
        starts = list(range(0, count_units(segments), step))
        for start, part in zip(starts, split_segments(segments, starts), strict=True):
            yield part, array[start * size : (start + count_units(part)) * size]

    def _scratch(self, part: Sequence[Segment]) -> NDArray[np.uint8]:
        size = count_units(part) * self._units.unit_bytes
        if self._raw.size < size:
            self._raw = np.empty(size, np.uint8)
        return self._raw[:size]
