"""The units of a rank pair in host memory, and their bytes on the way between there and a stream, batch by batch.

A unit on the wire is [kinds (K and V, or latents), heads of the rank pair, unit_tokens, head_dim]. Where units are
whole blocks, their batches are the blocks' own memory; otherwise they are packed through bounded staging memory, and
encoded where that was agreed.

Encoded, KV has one byte a value on the wire, with a scale for each row; half the bytes of bf16. A row is the head_dim
values of one token and one head, of K or of V, or of its latent. It becomes head_dim codes c and a bf16 scale s: a
value is s * c, with c an int8 in [-127, 127], or an fp8 (e4m3: 4 bits of exponent, 3 of mantissa, up to 448). `s` is
the row's largest magnitude / 127 (or 448), rounded up to bf16, so that no code is ever cut off, and at least 2**-126. A
unit on the wire: the codes [kinds, num_heads, unit_tokens, head_dim], then the scales [kinds, num_heads, unit_tokens],
little-endian.

Errors: int8 within s / 2; fp8 within 1/16 of the value, or s * 2**-10 for values below s * 2**-6. Then the target
rounds to its own dtype. A row with NaN or infinity becomes all NaN, so broken KV stays recognisable.

The same on CUDA: model/cuda/kernels/kv_units.py; both ends may run either.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twostroke.kvtransfer.layout import KVShard, Segment

Buffer = memoryview | NDArray[np.uint8]
"""uint8, one-dimensional, contiguous."""

BATCH_BYTES = 128 * 1024
"""Bytes of a batch: few enough that the next reader (a checksum, the kernel) finds it in the processor's cache."""
MAX_VIEWS = 1000  # in a batch: the kernel takes 1024 in one call, and a checksum may follow


class HostMemory(Protocol):
    """A cache in host memory: a HostStore, or what a peer shares of its own."""

    @property
    def num_blocks(self) -> int: ...

    def layer_bytes(self, layer: int) -> memoryview: ...


class HostUnits:
    """One end of a rank pair in host memory. Every method raises ValueError for units that the memory hasn't.

    Thread-safe: nothing is kept between calls. numpy moves bytes without the interpreter's lock.
    """

    def __init__(self, memory: HostMemory, shard: KVShard):
        layout = shard.layout
        self.unit_bytes = shard.stored_unit_bytes
        self.is_whole_blocks = shard.units_per_block == 1 and shard.num_heads == layout.heads_per_rank
        self._parts = shard.units_per_block
        self._num_units = memory.num_blocks * self._parts
        self._layers = {layer: memory.layer_bytes(shard.tensor_index(layer)) for layer in shard.layers}
        rows = layout.kinds * shard.num_heads  # of a unit: `unit_tokens` tokens each
        shape = memory.num_blocks, layout.kinds, layout.heads_per_rank, self._parts, self.unit_bytes // rows
        heads = slice(shard.first_head, shard.first_head + shard.num_heads)
        self._arrays = {
            layer: np.frombuffer(memory, np.uint8).reshape(shape)[:, :, heads] for layer, memory in self._layers.items()
        }

    def views(self, segments: Sequence[Segment]) -> list[memoryview]:
        """The blocks' own memory, in wire order; adjacent blocks are one view. Only where units are whole blocks.

        Few large views make scatter/gather and digests fast; a table that was allocated at once is often one run.
        """
        views: list[memoryview] = []
        size = self.unit_bytes
        for segment in segments:
            self._check(segment)
            layer = self._layers[segment.layer]
            views += [layer[first * size : end * size] for first, end in adjacent_runs(segment.unit_ids)]
        return views

    def pack(self, segments: Sequence[Segment], out: Buffer) -> None:
        """Copy units, as stored, one after the other into the first bytes of `out`."""
        for array, blocks, parts, wire in self._places(segments, out):
            wire[...] = array[blocks, :, :, parts]

    def unpack(self, segments: Sequence[Segment], packed: Buffer) -> None:
        """Copy units, as stored, from the first bytes of `packed` to their places."""
        for array, blocks, parts, wire in self._places(segments, packed):
            array[blocks, :, :, parts] = wire

    def release(self) -> None:
        """Let go of the memory: nothing may be moved any more."""
        self._arrays.clear()
        self._layers.clear()

    def _places(
        self, segments: Sequence[Segment], packed: Buffer
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]]:
        """Yield for each segment its layer, its units' blocks and places in them, and their slice of `packed`."""
        flat = np.frombuffer(packed, np.uint8)
        at = 0
        for segment in segments:
            self._check(segment)
            array = self._arrays[segment.layer]
            blocks, parts = np.divmod(np.asarray(segment.unit_ids, np.int64), self._parts)
            end = at + blocks.size * self.unit_bytes
            yield array, blocks, parts, flat[at:end].reshape(blocks.size, *array.shape[1:3], array.shape[4])
            at = end

    def _check(self, segment: Segment) -> None:
        if segment.layer not in self._layers:
            raise ValueError(f"there is no layer {segment.layer} among {len(self._layers)}")
        ids = segment.unit_ids
        if ids and not (min(ids) >= 0 and max(ids) < self._num_units):
            raise ValueError(f"units {min(ids)} to {max(ids)} are not all within a store of {self._num_units}")


class HostWire:
    """Both directions of one stream of units, batch by batch; one thread at a time."""

    def __init__(self, memory: HostMemory, shard: KVShard):
        self.shard = shard
        self._units = HostUnits(memory, shard)
        self._batch_units = max(1, BATCH_BYTES // self._units.unit_bytes)
        self._raw = np.empty(0, np.uint8)  # one batch as stored, and as on the wire: the same where not encoded
        self._wire = self._raw

    def outgoing(self, segments: Sequence[Segment]) -> Iterator[list[memoryview]]:
        """Yield the units' bytes in their form on the wire. A batch is valid until the next one. Raises ValueError."""
        if self.shard.is_whole_blocks:
            yield from batches(self._units.views(segments))
            return
        for part, raw, wire in self._staged(segments):
            self._units.pack(part, raw)
            if self.shard.encoding != "raw":
                encode(raw, self.shard, wire)
            yield [wire.data]

    def incoming(self, segments: Sequence[Segment]) -> Iterator[list[memoryview]]:
        """Yield room for the units' bytes, which move to their places with the next batch. Raises ValueError."""
        if self.shard.is_whole_blocks:
            yield from batches(self._units.views(segments))
            return
        for part, raw, wire in self._staged(segments):
            yield [wire.data]
            if self.shard.encoding != "raw":
                decode(wire, self.shard, raw)
            self._units.unpack(part, raw)

    def _staged(
        self, segments: Sequence[Segment]
    ) -> Iterator[tuple[list[Segment], NDArray[np.uint8], NDArray[np.uint8]]]:
        if not self._raw.size:
            self._raw = np.empty(self._batch_units * self._units.unit_bytes, np.uint8)
            is_raw = self.shard.encoding == "raw"
            self._wire = self._raw if is_raw else np.empty(self._batch_units * self.shard.unit_bytes, np.uint8)
        for part in split_segments(segments, range(0, count_units(segments), self._batch_units)):
            count = count_units(part)
            yield part, self._raw[: count * self._units.unit_bytes], self._wire[: count * self.shard.unit_bytes]


def adjacent_runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs in which ids count up by one, each as its first id and the one behind its last."""
    runs: list[tuple[int, int]] = []
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            runs.append((ids[start], ids[start] + end - start))
            start = end
    return runs


def batches(views: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """`views`, large ones cut, in lists of at most BATCH_BYTES bytes and MAX_VIEWS views."""
    batch: list[memoryview] = []
    room = BATCH_BYTES
    for view in views:
        at, size = 0, view.nbytes
        while size - at > room:
            batch.append(view[at : at + room])
            yield batch
            at += room
            batch, room = [], BATCH_BYTES
        batch.append(view[at:] if at else view)
        room -= size - at
        if room == 0 or len(batch) == MAX_VIEWS:
            yield batch
            batch, room = [], BATCH_BYTES
    if batch:
        yield batch


def count_units(segments: Sequence[Segment]) -> int:
    """Return the number of units in all segments."""
    return sum(len(segment.unit_ids) for segment in segments)


def split_segments(segments: Sequence[Segment], starts: Sequence[int]) -> list[list[Segment]]:
    """The units cut into consecutive parts; part i begins with unit `starts[i]`, and the first start is 0."""
    parts: list[list[Segment]] = []
    bounds = list(chain(starts, (count_units(segments),)))
    for first, end in pairwise(bounds):
        part: list[Segment] = []
        at = 0
        for segment in segments:
            low, high = max(first - at, 0), min(end - at, len(segment.unit_ids))
            if low < high:
                part.append(Segment(segment.layer, segment.unit_ids[low:high]))
            at += len(segment.unit_ids)
        parts.append(part)
    return parts


def encode(raw: NDArray[np.uint8], shard: KVShard, out: NDArray[np.uint8]) -> None:
    """Units as stored -> as on the wire. The interpreter's lock is free meanwhile.

    raw [units * cut.stored_unit_bytes] of `cut.layout.dtype`, out [units * cut.unit_bytes]; both contiguous, apart from
    each other, and of a cut with an encoding: nothing here checks that.
    """
    from twostroke.model.cpu.kernels.kv_encode import encode_rows

    encode_rows(shard.encoding, shard.layout.dtype, raw, out, out.size // shard.unit_bytes, shard.layout.head_dim)


def decode(wire: NDArray[np.uint8], shard: KVShard, out: NDArray[np.uint8]) -> None:
    """Units as on the wire -> as this side stores them, in `cut.layout.dtype`, which may differ from the source's.

    wire [units * cut.unit_bytes], out [units * cut.stored_unit_bytes]; as for `encode`.
    """
    from twostroke.model.cpu.kernels.kv_encode import decode_rows

    decode_rows(shard.encoding, shard.layout.dtype, wire, out, wire.size // shard.unit_bytes, shard.layout.head_dim)
