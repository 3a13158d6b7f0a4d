"""The way between a store's blocks and a contiguous buffer that a process group can send."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kvtransfer.block_views import block_views
from kvtransfer.store import DeviceStore, KVStore
from model.kv_cache import KVCache


class Staging(Protocol):
    """A contiguous buffer on the device whose group moves it, and the way between it and the blocks."""

    def buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], the same memory each time; grown where needed."""

    def pack(self, layer: int, block_ids: Sequence[int], packed: Tensor) -> None:
        """Blocks -> packed, uint8 [len(block_ids) * block_bytes]; complete when it returns."""

    def unpack(self, layer: int, block_ids: Sequence[int], packed: Tensor) -> None:
        """packed -> blocks; complete when it returns."""

    def wait(self, work: dist.Work) -> None:
        """Wait on the calling thread until a send or receive is complete. Raises RuntimeError."""


class HostStaging:
    """For stores in host memory."""

    def __init__(self, store: KVStore):
        self._store = store
        self._memory = torch.empty(0, dtype=torch.uint8)

    def buffer(self, num_bytes: int) -> Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[:num_bytes]

    def pack(self, layer: int, block_ids: Sequence[int], packed: Tensor) -> None:
        array, at = packed.numpy(), 0
        for view in block_views(self._store, layer, block_ids):
            np.copyto(array[at : at + view.nbytes], np.frombuffer(view, np.uint8))
            at += view.nbytes

    def unpack(self, layer: int, block_ids: Sequence[int], packed: Tensor) -> None:
        array, at = packed.numpy(), 0
        for view in block_views(self._store, layer, block_ids):
            np.copyto(np.frombuffer(view, np.uint8), array[at : at + view.nbytes])
            at += view.nbytes

    def wait(self, work: dist.Work) -> None:
        work.wait()


class CudaStaging:
    """For stores in GPU memory; works on a stream of its own, beside the model's. Not confirmed on hardware."""

    def __init__(self, store: DeviceStore):
        self._store = store
        self._device = torch.device(store.device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._memory = torch.empty(0, dtype=torch.uint8, device=self._device)

    def buffer(self, num_bytes: int) -> Tensor:
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._memory[:num_bytes]

    def pack(self, layer: int, block_ids: Sequence[int], packed: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            blocks = block_words(self._store, layer)
            words = packed.view(blocks.dtype).view(len(block_ids), -1)
            torch.index_select(blocks, 0, self._index(block_ids), out=words)
        self._stream.synchronize()

    def unpack(self, layer: int, block_ids: Sequence[int], packed: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            blocks = block_words(self._store, layer)
            blocks.index_copy_(0, self._index(block_ids), packed.view(blocks.dtype).view(len(block_ids), -1))
        self._stream.synchronize()

    def wait(self, work: dist.Work) -> None:
        with torch.cuda.stream(self._stream):
            work.wait()
        self._stream.synchronize()

    def _index(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._device)


class CudaStore:
    """A KV cache in a GPU's memory as `kvtransfer` sees it. Not confirmed on hardware."""

    def __init__(self, cache: KVCache):
        self._cache = cache

    @property
    def num_layers(self) -> int:
        return self._cache.num_layers

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def block_size(self) -> int:
        return self._cache.block_size

    @property
    def block_bytes(self) -> int:
        return self._cache.block_bytes

    @property
    def fingerprint(self) -> str:
        return self._cache.fingerprint

    @property
    def device(self) -> str:
        return str(self._cache.tensors[0].device)

    def layer_bytes(self, layer: int) -> memoryview:
        """Raises TypeError: there is no such view."""
        return self._cache.layer_bytes(layer)

    def layer_tensor(self, layer: int) -> Tensor:
        return self._cache.tensors[layer]

    def read_blocks(self, layer: int, block_ids: Sequence[int]) -> memoryview:
        index = torch.tensor(block_ids, dtype=torch.int64, device=self.device)
        words = block_words(self, layer).index_select(0, index)
        return words.cpu().view(torch.uint8).view(-1).numpy().data


def block_words(store: DeviceStore, layer: int) -> Tensor:
    """The layer as [num_blocks, words of a block]: int64 where blocks divide into such words, else uint8.

    Index operations on single bytes are several times slower.
    """
    tensor: Tensor = store.layer_tensor(layer)
    dtype = torch.int64 if store.block_bytes % 8 == 0 else torch.uint8
    return tensor.view(store.num_blocks, -1).view(dtype)
