"""Memory for what a recorded program writes on its way: places that stay, shared by all programs of an engine.

A recording only notes addresses, so its intermediate results must lie where every replay may write. As in a CUDA
graph's private pool, a place is handed out again once the tensors on it are gone: first to later results of the same
recording, then to other recordings, since one program runs at a time.
"""

import bisect
import math
import weakref

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: a cache line, and a vector
CHUNK_BYTES = 1 << 20


class Arena:
    """Belongs to one thread. Memory is taken from the system in chunks and never given back: programs point into it."""

    def __init__(self) -> None:
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._free: list[tuple[int, int, int]] = []
        """(chunk, begin, end) of free places, ascending; neighbours are merged."""

    @property
    def num_bytes(self) -> int:
        """All chunks together; pages that nobody wrote take no memory."""
        return sum(map(len, self._chunks))

    @property
    def free_bytes(self) -> int:
        return sum(end - begin for _, begin, end in self._free)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised, contiguous and aligned; its place is free again when the last tensor on it is gone."""
        used = math.prod(shape) * dtype.itemsize
        chunk, begin, end = self._take(-(-max(used, 1) // ALIGNMENT) * ALIGNMENT)
        # The storage holds this array: views live on it even where torch forgets what they are views of.
        place = self._chunks[chunk][begin:end]
        weakref.finalize(place, self._give_back, chunk, begin, end).atexit = False
        return torch.from_numpy(place)[:used].view(dtype).view(shape)

    def borrow(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor of this arena once more, without holding its place: good until others write there.

        Raises ValueError for a tensor that is not of this arena.
        """
        for chunk in self._chunks:
            offset = tensor.data_ptr() - chunk.ctypes.data
            if 0 <= offset < len(chunk):
                return torch.from_numpy(chunk[offset : offset + tensor.nbytes]).view(tensor.dtype).view(tensor.shape)
        raise ValueError(f"a tensor at {tensor.data_ptr():#x} is not of this arena")

    def _take(self, size: int) -> tuple[int, int, int]:
        fitting = [place for place in self._free if place[2] - place[1] >= size]
        if not fitting:
            fitting = [self._add_chunk(size)]
        chunk, begin, end = min(fitting, key=lambda place: place[2] - place[1])
        index = self._free.index((chunk, begin, end))
        self._free[index : index + 1] = [(chunk, begin + size, end)] if begin + size < end else []
        return chunk, begin, begin + size

    def _add_chunk(self, size: int) -> tuple[int, int, int]:
        size = max(size, CHUNK_BYTES)
        memory = np.empty(size + ALIGNMENT, np.uint8)
        skipped = -memory.ctypes.data % ALIGNMENT
        self._chunks.append(memory[skipped : skipped + size])
        place = (len(self._chunks) - 1, 0, size)
        self._free.append(place)
        return place

    def _give_back(self, chunk: int, begin: int, end: int) -> None:
        index = bisect.bisect(self._free, (chunk, begin, end))
        if index < len(self._free) and self._free[index][:2] == (chunk, end):
            end = self._free.pop(index)[2]
        if index > 0 and self._free[index - 1][::2] == (chunk, begin):
            index -= 1
            begin = self._free.pop(index)[1]
        self._free.insert(index, (chunk, begin, end))
