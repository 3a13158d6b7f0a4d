"""The bytes of a lane's units on their way between host memory and a stream, batch by batch.

Where units are whole blocks the batches are the blocks' own memory; otherwise they are packed through bounded staging
memory, and encoded where that was agreed. A batch is small enough that whoever reads it next (a digest, the kernel)
finds it in the processor's cache.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from twostroke.kvtransfer.encodings import decode, encode
from twostroke.kvtransfer.host_units import HostUnits, count_units, split_segments
from twostroke.kvtransfer.layout import Cut, Segment
from twostroke.kvtransfer.store import HostStore

BATCH_BYTES = 128 * 1024
"""Measured over loopback with blocks of 64 KiB, in CPU time for 64 MiB (4 ms without digests): in batches of 128 KiB a
digest adds 0.8 ms to receiving and 1.2 ms to sending; in batches of 256 KiB 1.2 and 2.1 ms, since the beginning of what
`recvmsg` has just written is then out of the core's cache again; below 128 KiB the system calls take more than that.
"""
MAX_VIEWS = 1000  # in a batch: the kernel takes 1024 in one call, and a digest may follow


class HostWire(Protocol):
    """Both directions of one stream; one thread at a time."""

    def outgoing(self, segments: Sequence[Segment]) -> Iterator[list[memoryview]]:
        """The units' bytes as on the wire. A batch holds until the next one is asked for. Raises ValueError."""

    def incoming(self, segments: Sequence[Segment]) -> Iterator[list[memoryview]]:
        """Room for the units' bytes; they are in their places once the next batch was asked for. Raises ValueError."""


def make_host_wire(store: HostStore, cut: Cut) -> HostWire:
    """The kind for this cut."""
    return BlockWire(store, cut) if cut.is_whole_blocks else PackedWire(store, cut)


class BlockWire:
    """Units that are blocks, byte by byte: nothing is copied."""

    def __init__(self, store: HostStore, cut: Cut):
        self._units = HostUnits(store, cut)

    def outgoing(self, segments: Sequence[Segment]) -> Iterator[list[memoryview]]:
        return batches(self._units.views(segments))

    def incoming(self, segments: Sequence[Segment]) -> Iterator[list[memoryview]]:
        return batches(self._units.views(segments))


class PackedWire:
    """Units that are parts of blocks, or encoded: they pass through one buffer (two, where encoded) of a batch."""

    def __init__(self, store: HostStore, cut: Cut):
        self._cut = cut
        self._units = HostUnits(store, cut)
        self._batch_units = max(1, BATCH_BYTES // self._units.unit_bytes)
        self._raw = np.empty(0, np.uint8)
        self._wire = self._raw

    def outgoing(self, segments: Sequence[Segment]) -> Iterator[list[memoryview]]:
        for part, num_units in self._parts(segments):
            raw, wire = self._raw[: num_units * self._units.unit_bytes], self._wire[: num_units * self._cut.unit_bytes]
            self._units.pack(part, raw)
            if self._cut.encoding != "raw":
                encode(raw, self._cut, wire)
            yield [wire.data]

    def incoming(self, segments: Sequence[Segment]) -> Iterator[list[memoryview]]:
        for part, num_units in self._parts(segments):
            raw, wire = self._raw[: num_units * self._units.unit_bytes], self._wire[: num_units * self._cut.unit_bytes]
            yield [wire.data]
            if self._cut.encoding != "raw":
                decode(wire, self._cut, raw)
            self._units.unpack(part, raw)

    def _parts(self, segments: Sequence[Segment]) -> Iterator[tuple[list[Segment], int]]:
        if not self._raw.size:
            self._raw = np.empty(self._batch_units * self._units.unit_bytes, np.uint8)
            is_raw = self._cut.encoding == "raw"
            self._wire = self._raw if is_raw else np.empty(self._batch_units * self._cut.unit_bytes, np.uint8)
        num_units = count_units(segments)
        starts = range(0, num_units, self._batch_units)
        for start, part in zip(starts, split_segments(segments, starts), strict=True):
            yield part, min(self._batch_units, num_units - start)


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
