"""Copies between a store's units and contiguous buffers that a process group can send, or NIXL read.

A buffer holds a chunk in its form on the wire: its units one after the other, encoded where agreed, and their checksum.
So a chunk is one message, however many blocks and layers it spans.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.link import CHECKSUM_BYTES, ON_HOSTS, DeviceStore, HostStore, KVStore
from twostroke.kvtransfer.transports.host_units import HostWire

MAX_CHUNK_BYTES = ON_HOSTS.chunk_bytes  # that a source sends at once, if nothing else is configured


class Staging(Protocol):
    """The buffers of one end of a link, on the device whose group moves them.

    Holds at most `num_buffers` of the largest chunk so far each, or of the largest possible one, see `landing`. `pack`
    and `post` belong to one thread, `wait` and `unpack` to another; a buffer is on one of the two at a time.
    """

    @property
    def num_buffers(self) -> int:
        """One for each chunk under way: while one is on the wire, the next is packed, or the one before unpacked."""

    def warm_up(self) -> None:
        """Compile the kernels of `pack` and `unpack`, if needed. May block for seconds. Raises RuntimeError."""

    def buffer(self, index: int, num_units: int) -> Tensor:
        """Return buffer `index`, grown where needed: uint8 [num_units * unit_bytes + DIGEST_BYTES]."""

    def landing(self, index: int, num_units: int) -> Tensor:
        """Return the memory that a receive is posted into: uint8 [at least as many]; `buffer` is its beginning."""

    def pack(self, segments: Sequence[Segment], seed: int, packed: Tensor) -> None:
        """Copy units and their checksum into `packed`."""

    def unpack(self, segments: Sequence[Segment], seed: int, packed: Tensor) -> bool:
        """Copy `packed` into units, before returning True; with a wrong checksum, touch no unit and return False."""

    def post(self, move: Callable[[], dist.Work]) -> dist.Work:
        """Start a send of packed units, or a receive."""

    def wait(self, work: dist.Work) -> None:
        """Wait on the calling thread until a send or receive is complete. Raises RuntimeError."""


class HostStaging:
    """Staging memory for stores in host memory.

    A receive has room for the largest chunk there can be, of MAX_CHUNK_BYTES or a single unit. Gloo ends the process
    when a message is larger than the receive that it meets, which may happen once chunks are out of step with their
    announcements. It accepts a smaller message, and the checksum then fails.
    """

    num_buffers = ON_HOSTS.chunks_under_way

    def __init__(self, store: HostStore, shard: KVShard):
        self._shard = shard
        self._landing_bytes = max(MAX_CHUNK_BYTES, shard.unit_bytes) + CHECKSUM_BYTES
        self._wire = HostWire(store, shard)
        self._memory = [torch.empty(0, dtype=torch.uint8) for _ in range(self.num_buffers)]

    def warm_up(self) -> None:
        """Do nothing: kernels for host memory are compiled with the first chunk, in the background or not at all."""

    def buffer(self, index: int, num_units: int) -> Tensor:
        num_bytes = num_units * self._shard.unit_bytes + CHECKSUM_BYTES
        return self._grown(index, num_bytes)[:num_bytes]

    def landing(self, index: int, num_units: int) -> Tensor:
        return self._grown(index, max(num_units * self._shard.unit_bytes + CHECKSUM_BYTES, self._landing_bytes))

    def pack(self, segments: Sequence[Segment], seed: int, packed: Tensor) -> None:
        array: NDArray[np.uint8] = packed.numpy()
        end = array.size - CHECKSUM_BYTES
        at = 0
        for batch in self._wire.outgoing(segments):
            for view in batch:
                array[at : at + view.nbytes] = view
                at += view.nbytes
        array[end:] = np.frombuffer(xxhash.xxh3_128_digest(array[:end].data, seed=seed), np.uint8)

    def unpack(self, segments: Sequence[Segment], seed: int, packed: Tensor) -> bool:
        array: NDArray[np.uint8] = packed.numpy()
        end = array.size - CHECKSUM_BYTES
        if xxhash.xxh3_128_digest(array[:end].data, seed=seed) != array[end:].tobytes():
            return False
        at = 0
        for batch in self._wire.incoming(segments):
            for view in batch:
                view[:] = array[at : at + view.nbytes].data
                at += view.nbytes
        return True

    def post(self, move: Callable[[], dist.Work]) -> dist.Work:
        return move()

    def wait(self, work: dist.Work) -> None:
        work.wait()

    def _grown(self, index: int, num_bytes: int) -> Tensor:
        if self._memory[index].numel() < num_bytes:
            self._memory[index] = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[index]


def make_staging(store: KVStore, shard: KVShard) -> Staging:
    """Make the staging buffers of one end of a link. Raises TypeError for an unknown store."""
    if isinstance(store, HostStore):
        return HostStaging(store, shard)
    if isinstance(store, DeviceStore):
        from twostroke.kvtransfer.transports.device_units import CudaStaging  # loads Triton

        staging: Staging = CudaStaging(store, shard)
        return staging
    raise TypeError(f"{type(store).__name__} is neither a HostStore nor a DeviceStore")
