"""Two ends of a link of any transport, between stores of plain bytes; nothing may be left of them."""

import asyncio
import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.kv_pair import (
    BytesStore,
    link_threads,
    make_transport,
    open_descriptors,
    rank_shard,
    settle,
    warm_up_torch,
)
from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.transports import sockets
from twostroke.protocol.kv_layout import Encoding

NAMES = ("shm", "tcp", "tcp, 3 streams", "torch_distributed")
NIXL = pytest.param(
    "nixl",
    marks=pytest.mark.skipif(find_spec("nixl") is None, reason="needs nixl: make tools"),
)
ALL_NAMES = (*NAMES, NIXL)


class SharedBytesStore(BytesStore):
    """One whose bytes other processes can map."""

    def __init__(self, *sizes: int, **layout: Any):
        super().__init__(*sizes, **layout)
        size = len(self.layers[0])
        self.memory_fd = os.memfd_create("kv-bytes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.memory_fd)
        os.ftruncate(self.memory_fd, size * len(self.layers))
        fcntl.fcntl(self.memory_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        whole = memoryview(mmap.mmap(self.memory_fd, size * len(self.layers)))
        self.layers = [whole[self.layer_offset(i) : self.layer_offset(i + 1)] for i in range(len(self.layers))]  # type: ignore[misc]

    def layer_offset(self, layer: int) -> int:
        return layer * self.num_blocks * self.block_bytes


def mappings() -> int:
    """Return the number of mappings of caches, of peers and our own."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:kv-bytes")


@contextlib.asynccontextmanager
async def two(name: str, source: BytesStore, target: BytesStore, **options: Any) -> AsyncIterator[tuple[Any, Any]]:
    """A transport on either side; no descriptor, mapping or thread may be left in the end.

    With `tcp, 3 streams` both sides seem to be on different machines.
    """
    if name == "torch_distributed":
        await warm_up_torch()
    before = open_descriptors(), link_threads(), mappings()
    sending, receiving = make_transport(name, source, **options), make_transport(name, target, **options)
    with pytest.MonkeyPatch.context() as patch:
        if name == "tcp, 3 streams":
            patch.setattr(sockets, "is_within_one_machine", lambda _: False)
        try:
            yield sending, receiving
        finally:
            await sending.close()
            await receiving.close()

    def is_nothing_left() -> bool:
        after = open_descriptors(), link_threads(), mappings()
        return all(now <= then for now, then in zip(after, before, strict=True))

    await settle(is_nothing_left)


def blocks(store: BytesStore, encoding: Encoding = "raw") -> KVShard:
    """Whole blocks as units."""
    return rank_shard(store.layout, 0, store.layout.heads_per_rank, store.layout.block_size, encoding)


async def join(sending: Any, receiving: Any, source_cut: KVShard, target_cut: KVShard | None = None) -> tuple[Any, Any]:
    """Both ends of a link."""
    pending = await receiving.prepare("127.0.0.1", target_cut or source_cut)
    joined, established = await asyncio.gather(sending.join(pending.params, source_cut), pending.established())
    return joined, established


@contextlib.asynccontextmanager
async def linked(
    name: str, source: BytesStore, target: BytesStore, *shards: KVShard, **options: Any
) -> AsyncIterator[tuple[Any, Any]]:
    """Both ends of a link, of whole blocks if no cuts are said."""
    async with two(name, source, target, **options) as (sending, receiving):
        yield await join(sending, receiving, *(shards or (blocks(source),)))


async def move(ends: tuple[Any, Any], sent: Sequence[Segment], received: Sequence[Segment], seed: int = 5) -> bool:
    """Move a chunk; return whether its checksum was right."""
    _, has_right_checksum = await asyncio.gather(ends[0].send(sent, seed), ends[1].receive(received, seed))
    return bool(has_right_checksum)
