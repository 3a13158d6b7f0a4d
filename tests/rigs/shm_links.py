"""Caches in shared memory, and the two ends of an shm link between them, of which nothing may be left."""

import asyncio
import contextlib
import gc
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import torch

from twostroke.kvtransfer.link import DataLink
from twostroke.kvtransfer.rules.layout import Cut, Lane, Segment, cut_lane, plan_lanes
from twostroke.kvtransfer.transports.shm import ShmTransport
from twostroke.model.architectures.llama import decoder_spec
from twostroke.model.cache.kv_cache import SharedKVCache, make_kv_cache
from twostroke.model.config import ModelConfig, RopeConfig

NUM_LAYERS = 3


def make_cache(
    num_blocks: int = 16, block_size: int = 4, heads: int = 2, tp_size: int = 1, rank: int = 0, head_dim: int = 8
) -> SharedKVCache:
    config = ModelConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_layers=NUM_LAYERS,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_position=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        spec=decoder_spec(),
    )
    cache = make_kv_cache(
        config,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
        model_digest="m",
        tp_size=tp_size,
        rank=rank,
    )
    assert isinstance(cache, SharedKVCache)
    return cache


def filled(cache: SharedKVCache, seed: int = 1) -> SharedKVCache:
    generator = torch.Generator().manual_seed(seed)
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def cuts(source: SharedKVCache, target: SharedKVCache, lane: Lane | None = None) -> tuple[Cut, Cut]:
    if lane is None:
        (lane,) = plan_lanes(source.layout.tp_size, target.layout.tp_size, source.layout.num_kv_heads)
    return cut_lane(lane, source.layout, target.layout, "raw")


def belongings() -> tuple[int, int, int]:
    """Open descriptors, mappings of caches, threads."""
    mappings = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:kv-cache")
    return len(os.listdir("/proc/self/fd")), mappings, threading.active_count()


def assert_nothing_is_left(before: tuple[int, int, int]) -> None:
    """Less may be left, where what earlier tests forgot was collected meanwhile."""
    if belongings() != before:
        gc.collect()
    after = belongings()
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


@contextlib.asynccontextmanager
async def transports(
    source: SharedKVCache, target: SharedKVCache, **options: float
) -> AsyncIterator[tuple[ShmTransport, ShmTransport]]:
    """One on either side; nothing may be left of them in the end."""
    before = belongings()
    sending, receiving = ShmTransport(source, **options), ShmTransport(target, **options)
    try:
        yield sending, receiving
    finally:
        await sending.close()
        await receiving.close()
    assert_nothing_is_left(before)


@contextlib.asynccontextmanager
async def link(
    source: SharedKVCache, target: SharedKVCache, lane: Lane | None = None
) -> AsyncIterator[tuple[DataLink, DataLink]]:
    async with transports(source, target) as (sending, receiving):
        source_cut, target_cut = cuts(source, target, lane)
        pending = await receiving.prepare("127.0.0.1", target_cut)
        yield await asyncio.gather(sending.join(pending.params, source_cut), pending.established())


async def move(links: tuple[DataLink, DataLink], source: list[Segment], target: list[Segment], seal: int = 5) -> bool:
    _, intact = await asyncio.gather(links[0].send(source, seal), links[1].receive(target, seal))
    return intact


def copy_of(cache: SharedKVCache) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in cache.tensors]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))
