"""The digest of a chunk that never lies in one piece: over units in their places, in the order of the wire."""

from collections.abc import Sequence

import numpy as np
import xxhash

from kvtransfer.host_units import HostUnits, count_units
from kvtransfer.layout import Segment

_FEW_BYTES = 32 * 1024  # in pieces smaller than this, copying them together costs less than a call for each


class UnitDigest:
    """xxh3-128 of units of one store, fed piece by piece. Not thread-safe."""

    def __init__(self, units: HostUnits):
        self._units = units
        self._together = np.empty(0, np.uint8)
        self._hash = xxhash.xxh3_128()

    def start(self, seal: int) -> None:
        """Begin a chunk."""
        self._hash = xxhash.xxh3_128(seed=seal)

    def update(self, segments: Sequence[Segment]) -> None:
        """The next units. A few hundred KiB at a time are still in the core's cache where they were just copied."""
        size = count_units(segments) * self._units.unit_bytes
        if self._units.is_whole_blocks:
            views = self._units.views(segments)
            if len(views) * _FEW_BYTES <= size:
                for view in views:
                    self._hash.update(view)
                return
        if self._together.size < size:
            self._together = np.empty(size, np.uint8)
        self._units.pack(segments, self._together)
        self._hash.update(self._together[:size].data)

    def result(self) -> bytes:
        """The chunk's digest, 16 bytes."""
        return bytes(self._hash.digest())
