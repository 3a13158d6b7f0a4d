"""One end of a rank pair in a GPU's memory: chunks as they are on the wire, the stream that works on them, and the
staging buffers of NCCL groups.

Not confirmed on hardware. Under Triton's interpreter it also runs on CPU tensors, which is how its tests do.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from twostroke.kvtransfer.layout import KVShard, Segment, pair_shards, rank_pairs
from twostroke.kvtransfer.link import ON_GPUS, DeviceStore
from twostroke.kvtransfer.transports.host_units import count_units
from twostroke.model.cache.layer_announcer import LaunchedWork
from twostroke.model.cuda.kernels.kv_units import (
    DIGEST_BYTES,
    PADDING,
    UnitPlaces,
    address_tensor,
    copy_and_digest_units,
    copy_units,
    decode_units,
    digest,
    digest_units,
    encode_units,
    packed_places,
    paged_places,
)
from twostroke.protocol.kv_layout import DTYPE_BYTES, Encoding, KVLayout

_WORD_BYTES = 8


class DeviceQueue:
    """A stream of its own, beside the model's and beside other links'. For one thread."""

    def __init__(self, device: torch.device):
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def __call__(self) -> AbstractContextManager[object]:
        """Within the block this thread launches on the stream, and the stream's device is the current one."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def keep(self, memory: Tensor) -> None:
        """Keep memory of another stream from being reused before work on this stream is done."""
        if self._stream is not None:
            memory.record_stream(self._stream)

    def later(self, found: Tensor) -> Callable[[], bytes]:
        """Return a function that waits, on any thread, for the work launched so far, and returns the tensor's bytes.

        It does not wait for work launched later. Call this within the block.
        """
        if self._stream is None:
            return found.numpy().tobytes
        on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        on_host.copy_(found, non_blocking=True)
        done = LaunchedWork(self._stream.device)

        def wait() -> bytes:
            done.synchronize()
            return on_host.numpy().tobytes()

        return wait

    def wait(self) -> None:
        """Wait until everything launched so far is done. Frees the interpreter's lock."""
        if self._stream is not None:
            self._stream.synchronize()


class DeviceUnits:
    """Finds, packs and unpacks units of a store. A buffer holds units, zeros up to a multiple of PADDING, a checksum.

    One launch moves a chunk, however many blocks and layers it spans, and digests it where its words allow. Methods
    launch on the current stream. They raise ValueError for units that the store hasn't.
    """

    def __init__(self, store: DeviceStore, shard: KVShard):
        self.device = torch.device(store.device)
        self.places = unit_places(shard)
        self._shard = shard
        self._layers = {layer: store.layer_tensor(shard.tensor_index(layer)) for layer in shard.layers}  # kept alive
        self._bases = {layer: np.int64(tensor.data_ptr()) for layer, tensor in self._layers.items()}
        self._num_units = store.num_blocks * shard.units_per_block

    def buffer_bytes(self, num_units: int) -> int:
        return -(-num_units * self._shard.unit_bytes // PADDING) * PADDING + DIGEST_BYTES

    def addresses(self, segments: Sequence[Segment]) -> Tensor:
        """Return the addresses of these units: int64 [units] on the device."""
        parts: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        for segment in segments:
            if segment.layer not in self._bases:
                raise ValueError(f"there is no layer {segment.layer} among {len(self._bases)}")
            ids = np.asarray(segment.unit_ids, np.int64)
            if ids.size and not (ids.min() >= 0 and ids.max() < self._num_units):
                raise ValueError(f"units {ids.min()} to {ids.max()} are not all within a store of {self._num_units}")
            parts.append(self.places.addresses(self._bases[segment.layer], ids))
        return address_tensor(np.concatenate(parts), self.device)

    def pack(self, segments: Sequence[Segment], seed: int, packed: Tensor) -> None:
        """Units and their checksum -> packed, uint8 [buffer_bytes]."""
        units = count_units(segments)
        here, there, trailer = self.addresses(segments), self._packed_addresses(packed, units), _trailer(packed)
        flat = packed_places(self.places)
        if self._digests_words:
            copy_and_digest_units(self.places, here, flat, there, seed, trailer)
            return
        size = units * self._shard.unit_bytes
        packed[size:-DIGEST_BYTES].zero_()
        if self._shard.encoding == "raw":
            copy_units(self.places, here, flat, there)
        else:
            layout = self._shard.layout
            encode_units(self.places, here, self._shard.encoding, layout.dtype, layout.head_dim, packed)
        digest(packed, size, seed, trailer)

    def unpack(self, segments: Sequence[Segment], seed: int, packed: Tensor) -> bool:
        """packed -> units; False, and no unit touched, where the checksum is wrong. Waits for the checksum alone."""
        units = count_units(segments)
        flat, there = packed_places(self.places), self._packed_addresses(packed, units)
        here = self.addresses(segments)
        found = torch.empty(2, dtype=torch.int64, device=self.device)
        if self._digests_words:
            digest_units(flat, there, seed, found)
        else:
            digest(packed, units * self._shard.unit_bytes, seed, found)
        if not torch.equal(found, _trailer(packed)):
            return False
        if self._shard.encoding == "raw":
            copy_units(flat, there, self.places, here)
        else:
            layout = self._shard.layout
            decode_units(self.places, here, self._shard.encoding, layout.dtype, layout.head_dim, packed)
        return True

    @property
    def _digests_words(self) -> bool:
        """True where both ends can checksum units while they copy them. Both ends decide this from the same facts."""
        return self._shard.encoding == "raw" and self.places.head_bytes % _WORD_BYTES == 0

    def _packed_addresses(self, packed: Tensor, num_units: int) -> Tensor:
        flat = packed_places(self.places)
        return address_tensor(flat.addresses(np.int64(packed.data_ptr()), np.arange(num_units)), self.device)


def unit_places(shard: KVShard) -> UnitPlaces:
    """Return how the cut's units lie in its side's store."""
    layout = shard.layout
    return paged_places(
        row_bytes=layout.head_dim * DTYPE_BYTES[layout.dtype],
        heads_per_block=layout.heads_per_rank,
        block_size=layout.rank_tokens,
        first_head=shard.first_head,
        num_heads=shard.num_heads,
        unit_tokens=shard.unit_tokens,
        kinds=layout.kinds,
    )


def _trailer(packed: Tensor) -> Tensor:
    """The checksum's place in a buffer, int64 [2]."""
    return packed[-DIGEST_BYTES:].view(torch.int64)


class ScratchStore:
    """A DeviceStore of one block, which is every layer's, to try kernels on."""

    num_blocks = 1

    def __init__(self, shard: KVShard, device: torch.device):
        self.layout, self.rank = shard.layout, shard.rank
        self.device = str(device)
        self._block = torch.zeros(shard.layout.block_bytes, dtype=torch.uint8, device=device)

    def layer_tensor(self, layer: int) -> Tensor:
        return self._block


def _any_unit(shard: KVShard) -> tuple[Segment]:
    return (Segment(shard.layers.start, (0,)),)


_ANY_SEED = 1 << 62  # of 64 bits, as seeds are: Triton compiles for the width that it meets


def warm_up_source(shard: KVShard, queue: DeviceQueue, device: torch.device) -> None:
    """Compile what a source of cuda_ipc launches for this rank pair, where it is not: it digests a unit."""
    with queue():
        units = DeviceUnits(ScratchStore(shard, device), shard)
        found = torch.empty(2, dtype=torch.int64, device=device)
        digest_units(units.places, units.addresses(_any_unit(shard)), _ANY_SEED, found)
    queue.wait()


def warm_up_target(peer: KVShard, own: KVShard, queue: DeviceQueue, device: torch.device) -> None:
    """Copy a unit, to compile and load what a cuda_ipc target needs; the counterpart of `warm_up_source`."""
    with queue():
        here, there = (DeviceUnits(ScratchStore(shard, device), shard) for shard in (peer, own))
        found = torch.empty(2, dtype=torch.int64, device=device)
        addresses = here.addresses(_any_unit(peer)), there.addresses(_any_unit(own))
        copy_and_digest_units(here.places, addresses[0], there.places, addresses[1], _ANY_SEED, found)
    queue.wait()


def warm_up_pairs(names: Sequence[str], store: DeviceStore, peers: Iterable[KVLayout], encoding: Encoding) -> None:
    """Compile what transports of these names launch for rank pairs between this store's rank and workers of these
    layouts.

    Raises RuntimeError as `CudaStaging.warm_up` does, and where CUDA or Triton does.
    """
    layout, device = store.layout, torch.device(store.device)
    queue = DeviceQueue(device)
    for peer in dict.fromkeys(peers):
        pairs = rank_pairs(layout, peer)
        outgoing = [pair_shards(pair, layout, peer, encoding)[0] for pair in pairs if pair.source_rank == store.rank]
        pairs = rank_pairs(peer, layout)
        incoming = [pair_shards(pair, peer, layout, encoding) for pair in pairs if pair.target_rank == store.rank]
        if "cuda_ipc" in names and encoding == "raw":
            for shard in outgoing:
                warm_up_source(shard, queue, device)
            for theirs, own in incoming:
                warm_up_target(theirs, own, queue, device)
        if {"torch_distributed", "nixl"} & set(names):
            for shard in (*outgoing, *(own for _, own in incoming)):
                CudaStaging(store, shard).warm_up()


class CudaStaging:
    """Staging memory for stores in a GPU's memory; one stream for each of its two threads.

    All memory is allocated for these streams: memory that another stream, the engine's, has freed may still be in use
    there by kernels that wait their turn.

    A layer is announced to the transfer once its KV is in memory (model/cache/kv_cache.py), so what is packed needs no
    event to wait for, and the model's stream never waits for this one.
    """

    num_buffers = ON_GPUS.chunks_under_way

    def __init__(self, store: DeviceStore, shard: KVShard):
        self._shard = shard
        self._units = DeviceUnits(store, shard)
        self._posting = DeviceQueue(self._units.device)
        self._waiting = DeviceQueue(self._units.device)
        self._memory: list[Tensor | None] = [None] * self.num_buffers

    def warm_up(self) -> None:
        """Pack a unit and unpack it. Raises RuntimeError also where the result differs."""
        scratch = CudaStaging(ScratchStore(self._shard, self._units.device), self._shard)
        packed, unit = scratch.buffer(0, 1), _any_unit(self._shard)
        scratch.pack(unit, _ANY_SEED, packed)
        if not scratch.unpack(unit, _ANY_SEED, packed):
            raise RuntimeError("this GPU does not find the checksum that it has computed itself")

    def buffer(self, index: int, num_units: int) -> Tensor:
        num_bytes = self._units.buffer_bytes(num_units)
        memory = self._memory[index]
        if memory is None or memory.numel() < num_bytes:
            with self._posting():
                memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._units.device)
            self._waiting.keep(memory)
            self._memory[index] = memory
        return memory[:num_bytes]

    def landing(self, index: int, num_units: int) -> Tensor:
        return self.buffer(index, num_units)  # NCCL wants the same size on both sides

    def pack(self, segments: Sequence[Segment], seed: int, packed: Tensor) -> None:
        with self._posting():
            self._units.pack(segments, seed, packed)
        self._posting.wait()  # the store's blocks may be given away once the send returns

    def unpack(self, segments: Sequence[Segment], seed: int, packed: Tensor) -> bool:
        with self._waiting():
            is_right = self._units.unpack(segments, seed, packed)
        self._waiting.wait()
        return is_right

    def post(self, move: Callable[[], dist.Work]) -> dist.Work:
        with self._posting():  # NCCL's own stream waits for this one
            return move()

    def wait(self, work: dist.Work) -> None:
        with self._waiting():
            work.wait()
        self._waiting.wait()
