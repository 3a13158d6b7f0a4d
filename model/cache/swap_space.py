"""Host memory for KV of requests that had to give their blocks back: pinned where the cache is on a GPU."""

import time
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twostroke.model.batch import place
from twostroke.model.cache.kv_cache import KVCache
from twostroke.model.step import BlockCopy
from twostroke.protocol.errors import ConfigError

_STAGED_BYTES = 32 * 2**20
"""Bytes of a layer that cross the bus at a time: they fit into GPU memory that the measured steps leave."""


class SwapSpace:
    """Additional blocks in host memory on one rank, laid out as the cache's. Copies are made on the engine's thread,
    between steps.

    Which block holds what is the scheduler's business. On a CPU, memory that is never used is never taken.
    """

    def __init__(self, kv_cache: KVCache, num_blocks: int):
        """Raises ConfigError where so much memory can't be had."""
        self.num_blocks = num_blocks
        self.block_bytes = kv_cache.block_bytes * len(kv_cache.tensors)
        """Bytes of one block in all tensors, on this rank."""
        self.num_bytes = 0  # counter: copied so far, both ways
        self.seconds = 0.0  # counter: that took
        self._cache = kv_cache
        self._device = kv_cache.tensors[0].device
        try:
            self._tensors = [
                torch.empty((num_blocks, *layer.shape[1:]), dtype=layer.dtype) for layer in kv_cache.tensors
            ]
            if self._device.type == "cuda":
                pinned: list[Tensor] = []
                weakref.finalize(self, _unpin, pinned, self._device).atexit = False
                for tensor in self._tensors:
                    _pin(tensor)
                    pinned.append(tensor)
        except RuntimeError as error:  # torch's own word for it
            raise ConfigError(f"no memory for {num_blocks} blocks of swap space: lower swap_gib ({error})") from error

    def copy(self, copy: BlockCopy) -> None:
        """Returns when it is done. The blocks must not change meanwhile."""
        began = time.perf_counter()
        if self._device.type == "cpu":
            runs = consecutive_runs(copy.cache_blocks, copy.host_blocks)
            for cache, host in zip(self._cache.tensors, self._tensors, strict=True):
                _copy_runs(cache, host, runs, copy.is_out)
        else:
            most = max(1, _STAGED_BYTES // self._cache.block_bytes)
            for first in range(0, len(copy.cache_blocks), most):
                some = slice(first, first + most)
                part = BlockCopy(copy.is_out, copy.cache_blocks[some], copy.host_blocks[some])
                copy_over_bus(self._cache.tensors, self._tensors, part)
            torch.cuda.current_stream(self._device).synchronize()
        self.num_bytes += len(copy.cache_blocks) * self.block_bytes
        self.seconds += time.perf_counter() - began


def _copy_runs(blocks: Tensor, host: Tensor, runs: Sequence[tuple[int, int, int]], is_out: bool) -> None:
    """Across a bus, only queued on the current stream."""
    for block, host_block, count in runs:
        here, there = blocks[block : block + count], host[host_block : host_block + count]
        target, source = (there, here) if is_out else (here, there)
        target.copy_(source, non_blocking=True)


def copy_over_bus(cache_layers: Sequence[Tensor], host_layers: Sequence[Tensor], copy: BlockCopy) -> None:
    """Copy blocks through a contiguous tensor on the device: a copy across the bus for each block would be slow.

    Only queued on the current stream.
    """
    blocks = place(np.array(copy.cache_blocks, np.int64), cache_layers[0].device)
    runs = consecutive_runs(range(len(copy.host_blocks)), copy.host_blocks)
    for cache, host in zip(cache_layers, host_layers, strict=True):
        staged = cache.index_select(0, blocks) if copy.is_out else torch.empty_like(cache[: len(blocks)])
        _copy_runs(staged, host, runs, copy.is_out)
        if not copy.is_out:
            cache.index_copy_(0, blocks, staged)


def _pin(tensor: Tensor) -> None:
    """Have the GPU copy from and to memory by itself. torch's own pinned memory comes in powers of two, nearly twice
    what is asked for at worst. Raises RuntimeError."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))


def _unpin(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Unpin memory before it returns to the system. Runs on any thread, which must not get a context on another GPU by
    this."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        for tensor in tensors:
            torch.cuda.check_error(cudart.cudaHostUnregister(tensor.data_ptr()))


def consecutive_runs(left: Sequence[int], right: Sequence[int]) -> list[tuple[int, int, int]]:
    """Pairs of equally long sequences as (first of left, first of right, length) of runs in which both count up."""
    runs: list[tuple[int, int, int]] = []
    for one, other in zip(left, right, strict=True):
        if runs:
            first, first_other, count = runs[-1]
            if (one, other) == (first + count, first_other + count):
                runs[-1] = (first, first_other, count + 1)
                continue
        runs.append((one, other, 1))
    return runs
