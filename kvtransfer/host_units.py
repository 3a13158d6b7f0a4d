"""How the units of a lane lie in host memory: as views of whole blocks, or as runs of bytes that are copied.

A unit on the wire is [2 (K, V), heads of the lane, unit_tokens, head_dim]; in a layer of the store these are 1, 2 or
2 * heads runs of bytes: one where the unit is a block, two where it is as high as a block (then the lane's heads lie
side by side), else one for each head of K and of V.
"""

from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from twostroke.kvtransfer.layout import Cut, Segment
from twostroke.kvtransfer.store import HostStore
from twostroke.protocol.kv_layout import DTYPE_BYTES

Buffer = memoryview | NDArray[np.uint8]
"""uint8, one-dimensional, contiguous."""


_NOT_BLOCKS = "these units are not whole blocks: they have to be packed"


class UnitRuns:
    """Where the runs of units begin in a layer of one side's store. Pure geometry of a cut, without its memory.

    Both ends of a lane have the same `unit_bytes`, and the smaller `run_bytes` divides the larger: a copy from one
    store to the other takes `offsets(..., run_bytes)` of both sides with the smaller one.
    """

    def __init__(self, cut: Cut):
        layout = cut.layout
        row_bytes = layout.head_dim * DTYPE_BYTES[layout.dtype]
        self.head_bytes = cut.unit_tokens * row_bytes  # of K or of V, in a unit
        self.unit_bytes = 2 * cut.num_heads * self.head_bytes  # as stored: not encoded
        whole_height = cut.units_per_block == 1
        if whole_height and cut.num_heads == layout.heads_per_rank:
            self.run_bytes = self.unit_bytes
        elif whole_height:
            self.run_bytes = self.unit_bytes // 2
        else:
            self.run_bytes = self.head_bytes
        self._units_per_block = cut.units_per_block
        self._block_bytes = layout.block_bytes
        heads = np.arange(cut.first_head, cut.first_head + cut.num_heads)
        kinds = np.arange(2)[:, None] * layout.heads_per_rank
        self._heads = ((kinds + heads) * (layout.block_size * row_bytes)).reshape(-1)  # of one block, wire order

    def offsets(self, unit_ids: Sequence[int], run_bytes: int | None = None) -> NDArray[np.int64]:
        """Where the runs of these units begin in a layer's bytes, in wire order: int64 [units * runs a unit].

        `run_bytes` may be smaller than our own where it is the own one of the lane's other end.
        """
        size = self.run_bytes if run_bytes is None else run_bytes
        ids = np.asarray(unit_ids, dtype=np.int64)
        if self._units_per_block == 1:
            units = ids * self._block_bytes
        else:
            blocks, parts = np.divmod(ids, self._units_per_block)
            units = blocks * self._block_bytes + parts * self.head_bytes
        heads = self._heads[:: size // self.head_bytes]
        return (units[:, None] + heads).reshape(-1)


class HostUnits:
    """One end of a lane in a store in host memory. Every method raises ValueError for units that the store hasn't.

    Thread-safe: nothing is kept between calls.
    """

    def __init__(self, store: HostStore, cut: Cut):
        self.runs = UnitRuns(cut)
        self.unit_bytes = self.runs.unit_bytes  # as stored
        self.is_whole_blocks = self.runs.run_bytes == self.unit_bytes == cut.layout.block_bytes
        self._num_units = store.num_blocks * cut.units_per_block
        self._layers = [store.layer_bytes(layer) for layer in range(cut.layout.num_layers)]
        self._starts = [np.frombuffer(layer, np.uint8).ctypes.data for layer in self._layers]

    def views(self, segments: Sequence[Segment]) -> list[memoryview]:
        """The blocks' own memory, in wire order; adjacent blocks are one view. Only where units are whole blocks.

        Few large views make scatter/gather and digests fast; a table that was allocated at once is often one run.
        """
        if not self.is_whole_blocks:
            raise ValueError(_NOT_BLOCKS)
        views: list[memoryview] = []
        size = self.unit_bytes
        for segment in segments:
            ids = segment.unit_ids
            layer = self._layer(segment)
            start = 0
            for end in range(1, len(ids) + 1):
                if end == len(ids) or ids[end] != ids[end - 1] + 1:
                    first = ids[start]
                    views.append(layer[first * size : (first + end - start) * size])
                    start = end
        return views

    def addresses(self, segments: Sequence[Segment]) -> NDArray[np.int64]:
        """Where whole blocks lie in this process's memory, in wire order: int64 [units]. For kernels."""
        if not self.is_whole_blocks:
            raise ValueError(_NOT_BLOCKS)
        parts = []
        for segment in segments:
            self._layer(segment)
            parts.append(np.array(segment.unit_ids, np.int64) * self.unit_bytes + self._starts[segment.layer])
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])

    def pack(self, segments: Sequence[Segment], out: Buffer) -> None:
        """Copy units, as stored, one after the other into the first bytes of `out`. The interpreter's lock is free."""
        self._copy(segments, out, is_pack=True)

    def unpack(self, segments: Sequence[Segment], packed: Buffer) -> None:
        """Copy units, as stored, from the first bytes of `packed` to their places. The interpreter's lock is free."""
        self._copy(segments, packed, is_pack=False)

    def _copy(self, segments: Sequence[Segment], packed: Buffer, *, is_pack: bool) -> None:
        from twostroke.kvtransfer.unit_copy import copy_runs

        size = self.runs.run_bytes
        at = 0
        for segment in segments:
            layer = self._layer(segment)
            own = self.runs.offsets(segment.unit_ids)
            wire = np.arange(at, at + own.size * size, size, dtype=np.int64)
            if is_pack:
                copy_runs(packed, wire, layer, own, size)
            else:
                copy_runs(layer, own, packed, wire, size)
            at += own.size * size

    def _layer(self, segment: Segment) -> memoryview:
        """The segment's layer. Raises ValueError where the store has not all of the segment's units."""
        if not 0 <= segment.layer < len(self._layers):
            raise ValueError(f"there is no layer {segment.layer} among {len(self._layers)}")
        ids = segment.unit_ids
        if ids and not (min(ids) >= 0 and max(ids) < self._num_units):
            raise ValueError(f"units {min(ids)} to {max(ids)} are not all within a store of {self._num_units}")
        return self._layers[segment.layer]


def count_units(segments: Sequence[Segment]) -> int:
    """How many units there are in all segments."""
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
