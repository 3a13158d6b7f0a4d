"""Host memory for KV of requests that had to give their blocks back: pinned where the cache is on a GPU."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from model.kv_cache import KVCache
from model.step import BlockCopy
from protocol.errors import ConfigError


class SwapSpace:
    """As many more blocks on one rank, laid out as the cache's. Copies are made on the engine's thread, between steps.

    Which block holds what is the scheduler's business. On a CPU, memory that is never used is never taken.
    """

    def __init__(self, kv_cache: KVCache, num_blocks: int):
        """Raises ConfigError where so much memory can't be had."""
        self.num_blocks = num_blocks
        self.block_bytes = kv_cache.block_bytes * kv_cache.num_layers
        """Of one block in all layers, on this rank."""
        self.num_bytes = 0  # counter: copied so far, both ways
        self.seconds = 0.0  # counter: that took
        self._cache = kv_cache
        is_on_gpu = kv_cache.tensors[0].device.type == "cuda"
        try:
            self._tensors = [
                torch.empty((num_blocks, *layer.shape[1:]), dtype=layer.dtype, pin_memory=is_on_gpu)
                for layer in kv_cache.tensors
            ]
        except RuntimeError as error:  # torch's own word for it
            raise ConfigError(f"no memory for {num_blocks} blocks of swap space: lower swap_gib ({error})") from error

    def copy(self, copy: BlockCopy) -> None:
        """Returns when it is done. The blocks must not change meanwhile."""
        began = time.perf_counter()
        for cache, host in zip(self._cache.tensors, self._tensors, strict=True):
            if cache.device.type == "cpu":
                _copy_on_host(cache, host, copy)
            else:
                _copy_over_bus(cache, host, copy)
        if self._cache.tensors[0].device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.num_bytes += len(copy.cache_blocks) * self.block_bytes
        self.seconds += time.perf_counter() - began


def _copy_on_host(cache: Tensor, host: Tensor, copy: BlockCopy) -> None:
    for block, host_block, count in consecutive_runs(copy.cache_blocks, copy.host_blocks):
        there, here = host[host_block : host_block + count], cache[block : block + count]
        if copy.is_out:
            there.copy_(here)
        else:
            here.copy_(there)


def _copy_over_bus(cache: Tensor, host: Tensor, copy: BlockCopy) -> None:
    """Through one contiguous tensor on the device, since a copy across the bus for each block would be slow."""
    blocks = torch.tensor(copy.cache_blocks, device=cache.device)
    staged = cache.index_select(0, blocks) if copy.is_out else torch.empty_like(cache[: len(blocks)])
    for first, host_block, count in consecutive_runs(range(len(copy.host_blocks)), copy.host_blocks):
        there, here = host[host_block : host_block + count], staged[first : first + count]
        if copy.is_out:
            there.copy_(here, non_blocking=True)
        else:
            here.copy_(there, non_blocking=True)
    if not copy.is_out:
        cache.index_copy_(0, blocks, staged)


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
