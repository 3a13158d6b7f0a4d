"""The paged KV cache: tensors of [num_blocks, 2 (K, V), heads of this rank, block_size, head_dim], one a layer, or one
for a layer of each group (protocol/kv_layout.py). Of latents they are [num_blocks, 1, 1, block_size, row], where ranks
share each block's tokens with this rank's part of block_size.

A block of a tensor is contiguous, and within it each head's keys and values are: what a transfer moves is one piece.
The block pool decides which block belongs to which sequence.

On a CPU the cache is a memfd, mapped MAP_SHARED, so that other processes of this machine can read it where it lies. A
memfd has no name, so a killed process leaves nothing behind, and no mount limits it: the 64 MB that containers get for
/dev/shm don't count, the cgroup's memory limit does. It can neither shrink nor grow, so a process that has mapped it
never gets a SIGBUS, and only its creator writes into it.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from twostroke.model.batch import place
from twostroke.model.cache.memory import available_bytes, gibibytes
from twostroke.model.config import ModelShape
from twostroke.model.parallel.form import ONE_RANK, ParallelForm
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import KVLayout

logger = logging.getLogger(__name__)

_PIECE_BYTES = 64 * 1024 * 1024  # allocated at a time: a signal undoes the piece under way
_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1, not among fcntl's names
_NO_ROOM = {errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EOVERFLOW}


class KVCache:
    """Block storage on one rank, of its stage's layers, zeros at first; what `kvtransfer` calls a KVStore.

    Zeros, not garbage: masked positions are multiplied by 0, and 0 * NaN is NaN.
    """

    def __init__(self, tensors: list[Tensor], layout: KVLayout, rank: int):
        self.tensors = tensors
        self.layout = layout
        self.rank = rank
        self.groups = layout.groups_of(rank)
        self.num_blocks: int = tensors[0].shape[0]
        self.block_size = layout.block_size  # tokens
        # Those of each block that are here, where other ranks have the rest.
        self.local_tokens = layout.tokens_of(rank) if layout.context_ranks > 1 else None
        self.block_bytes = layout.block_bytes  # of one tensor

    def close(self) -> None:
        """Let go of the memory; it is freed with the last tensor on it."""
        self.tensors = []

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks, none of which is both; on a GPU only queued on the current stream."""
        device = self.tensors[0].device
        from_, to = place(np.array(sources, np.int64), device), place(np.array(targets, np.int64), device)
        for tensor in self.tensors:
            content = tensor.view(torch.uint8)  # torch can't index-copy FP8 on CPUs
            content.index_copy_(0, to, content.index_select(0, from_))


class HostKVCache(KVCache):
    """A cache in ordinary host memory: a HostStore."""

    def layer_bytes(self, layer: int) -> memoryview:
        """A writable view of uint8 [num_blocks * block_bytes]."""
        return self.tensors[layer].view(torch.uint8).reshape(-1).numpy().data


class SharedKVCache(HostKVCache):
    """A cache in host memory that processes of this machine can map and read: a SharedStore."""

    def __init__(self, tensors: list[Tensor], layout: KVLayout, rank: int, memory_fd: int, layer_stride: int):
        """Take the descriptor of a memfd with all layers. It is closed with the cache, or when the cache is
        collected."""
        super().__init__(tensors, layout, rank)
        self._memory_fd = memory_fd
        self._close_fd = weakref.finalize(self, os.close, memory_fd)
        self._layer_stride = layer_stride

    @property
    def memory_fd(self) -> int:
        """Descriptor of the memfd. Raises ValueError once the cache is closed."""
        if not self._close_fd.alive:
            raise ValueError("the KV cache is closed")
        return self._memory_fd

    def layer_offset(self, layer: int) -> int:
        """Return the offset of a layer in the memfd, in bytes: a multiple of the page size."""
        return layer * self._layer_stride

    def close(self) -> None:
        super().close()
        self._close_fd()


class DeviceKVCache(KVCache):
    """A cache in a GPU's memory: a DeviceStore."""

    @property
    def device(self) -> str:
        """The device in torch's notation, `cuda:0`."""
        return str(self.tensors[0].device)

    def layer_tensor(self, layer: int) -> Tensor:
        return self.tensors[layer]


def make_kv_cache(
    config: ModelShape,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    model_digest: str,
    parallel: ParallelForm = ONE_RANK,
    rank: int = 0,
) -> KVCache:
    """A rank's cache on `device`; on CPUs one that others can map, where the system has memfds.

    `rank` is one of the ranks of all stages. Raises ConfigError where the host has too little memory.
    """
    name = str(dtype).removeprefix("torch.")
    layout = config.kv_layout(model_digest, name, block_size).over(parallel.cut)
    if device.type == "cpu":
        return make_host_cache(layout, num_blocks=num_blocks, rank=rank)
    shape = _shape(layout, num_blocks)
    layers = range(layout.groups_of(rank).num_tensors)
    return DeviceKVCache([torch.zeros(shape, dtype=dtype, device=device) for _ in layers], layout, rank)


def make_host_cache(layout: KVLayout, *, num_blocks: int, rank: int = 0) -> HostKVCache:
    """A rank's cache in host memory, which others can map where the system has memfds.

    Raises ConfigError where the host has too little memory.
    """
    shape, dtype = _shape(layout, num_blocks), getattr(torch, layout.dtype)
    num_tensors, layer_bytes = layout.groups_of(rank).num_tensors, num_blocks * layout.block_bytes
    layers = range(num_tensors)
    stride = -(-layer_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        try:
            fd, memory = make_shared_memory(stride * num_tensors)
        except OSError as error:
            logger.warning(
                "the KV cache can't be shared with other processes, so KV goes to them over sockets: %s", error
            )
            return HostKVCache([torch.zeros(shape, dtype=dtype) for _ in layers], layout, rank)
    except (MemoryError, RuntimeError) as error:  # the latter is torch's own word for it
        size = gibibytes(layer_bytes * num_tensors)
        raise ConfigError(f"no memory for a KV cache of {size}: use a smaller KV cache ({error})") from error
    count = layer_bytes // dtype.itemsize
    tensors = [torch.frombuffer(memory, dtype=dtype, count=count, offset=layer * stride) for layer in layers]
    return SharedKVCache([tensor.view(shape) for tensor in tensors], layout, rank, fd, stride)


def _shape(layout: KVLayout, num_blocks: int) -> tuple[int, ...]:
    return num_blocks, layout.kinds, layout.heads_per_rank, layout.rank_tokens, layout.head_dim


def make_shared_memory(num_bytes: int) -> tuple[int, mmap.mmap]:
    """A memfd of zeros, all of its pages there from the start, and a writable mapping of it, which goes with its last
    view, whether or not the descriptor is still open.

    Raises MemoryError where there is less than asked for, and OSError where this process can't have a memfd at all.
    """
    if num_bytes > available_bytes(torch.device("cpu")):
        raise MemoryError("not so much is free")  # to try would wake the kernel's out-of-memory killer
    with contextlib.ExitStack() as undo:
        try:
            fd = os.memfd_create("kv-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, fd)
            os.ftruncate(fd, num_bytes)
            # Not when they are first written: that would be a SIGBUS for us or, worse, for a reader.
            for start in range(0, num_bytes, _PIECE_BYTES):
                os.posix_fallocate(fd, start, min(_PIECE_BYTES, num_bytes - start))
            memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            undo.callback(memory.close)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except AttributeError as error:  # Python was built for a system without memfds
            raise OSError(str(error)) from error
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise MemoryError(str(error)) from error
            raise
        with contextlib.suppress(OSError):  # an older kernel; readers are given read-only descriptors anyway
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        undo.pop_all()
    return fd, memory
