"""Links through process groups: hanging operations, staging memory, threads, and digests."""

import asyncio
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.rigs.delegate import Delegate
from tests.rigs.kv_links import blocks, linked
from tests.rigs.kv_pair import BytesStore, settle
from twostroke.kvtransfer.layout import Segment
from twostroke.kvtransfer.transports import torch_distributed
from twostroke.kvtransfer.transports.staging import HostStaging
from twostroke.kvtransfer.transports.torch_distributed import TorchDistributedTransport
from twostroke.model.parallel.tensor_parallel import NCCL_ENVIRONMENT
from twostroke.protocol.errors import ConnectionLost

NAME = "torch_distributed"


def filled(num_blocks: int) -> BytesStore:
    store = BytesStore(1, num_blocks, 4096)
    store.fill(1)
    return store


async def test_a_send_returns_before_its_bytes_are_taken_and_staging_stays_bounded() -> None:
    store = filled(64)
    chunk = [Segment(0, tuple(range(64)))]
    async with linked(NAME, store, store, join_timeout_s=20) as (sender, receiver):
        await asyncio.gather(sender.send(chunk, 0), sender.send(chunk, 1))
        third = asyncio.create_task(sender.send(chunk, 2))
        await asyncio.wait([third], timeout=0.05)
        assert not third.done(), "both buffers are on their way"
        assert [await receiver.receive(chunk, seed) for seed in range(3)] == [True, True, True]
        await third
        memory = sender._staging._memory
        assert [buffer.numel() for buffer in memory] == [64 * store.block_bytes + 16] * HostStaging.num_buffers


async def test_what_a_send_read_is_what_arrives_though_the_blocks_change_after_it() -> None:
    store = filled(8)
    before = store.block(0, 1)
    async with linked(NAME, store, store, join_timeout_s=20) as (sender, receiver):
        await sender.send([Segment(0, (1,))], 5)
        store.layers[0][store.block_bytes : 2 * store.block_bytes] = bytes(store.block_bytes)
        assert await receiver.receive([Segment(0, (3,))], 5)
    assert store.block(0, 3) == before


async def test_closing_ends_a_receive_that_waits_and_tells_the_peer_at_once() -> None:
    store = BytesStore(1, 8, 4096)
    async with linked(NAME, store, store, join_timeout_s=20) as (sender, receiver):
        hanging = asyncio.create_task(receiver.receive([Segment(0, (1,))], 1))
        await settle(lambda: receiver._free.qsize() < HostStaging.num_buffers)
        began = time.monotonic()
        await receiver.close()
        with pytest.raises(ConnectionLost):
            await hanging
        with pytest.raises(ConnectionLost):
            await sender.receive([Segment(0, (1,))], 1)
    assert time.monotonic() - began < 10, "not after the operation's time-out, of 20 s"
    assert store.copy() == [bytes(8 * store.block_bytes)]


async def test_a_message_of_another_size_than_announced_is_damaged_and_no_more() -> None:
    store = filled(64)
    before = store.copy()
    async with linked(NAME, store, store, join_timeout_s=20) as (sender, receiver):
        small, large = [Segment(0, (1,))], [Segment(0, tuple(range(32)))]
        await sender.send(large, 1)
        assert not await receiver.receive(small, 1), "more came than was announced"
        await sender.send(small, 2)
        assert not await receiver.receive(large, 2), "less came"
        assert store.copy() == before
        await sender.send(large, 3)
        assert await receiver.receive(large, 3)


async def test_bytes_that_arrive_after_the_link_was_closed_stay_in_staging() -> None:
    store = filled(8)
    before = store.copy()
    async with linked(NAME, store, store, join_timeout_s=20) as (sender, receiver):
        receiving = asyncio.create_task(receiver.receive([Segment(0, (1,))], 1))
        await settle(lambda: receiver._free.qsize() < HostStaging.num_buffers)
        receiver.shut_store()  # as `close` begins
        await sender.send([Segment(0, (2,))], 1)
        with pytest.raises(ConnectionLost, match="closed"):
            await receiving
    assert store.copy() == before


async def test_a_dead_nccl_peer_costs_its_group_and_never_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch ends the process whose operation fails by default; it reads the variable when a group is made."""
    read: list[dict[str, str | None]] = []
    begun: list[str] = []
    aborted: list[str] = []

    class DeadPeersGroup:
        class Options:
            _timeout: timedelta

        def __init__(self, *_: Any):
            begun.append("group")
            read.append({name: os.environ.get(name) for name in NCCL_ENVIRONMENT})

        def send(self, *_: Any) -> Any:
            raise RuntimeError("NCCL Error 6: remote process exited or there was a network error")

        def abort(self) -> None:
            aborted.append(threading.current_thread().name)

    class OnDevice(Delegate):
        """A staging that is not the host's."""

        def warm_up(self) -> None:
            begun.append("warm-up")

    for name in NCCL_ENVIRONMENT:
        monkeypatch.setenv(name, "3")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", DeadPeersGroup, raising=False)
    make = torch_distributed.make_staging
    monkeypatch.setattr(torch_distributed, "make_staging", lambda store, shard: OnDevice(make(store, shard)))
    store = filled(8)
    shard = blocks(store)
    receiving, sending = (TorchDistributedTransport(store, join_timeout_s=20) for _ in range(2))
    pending = await receiving.prepare("127.0.0.1", shard)
    with pytest.raises(ConnectionLost, match="remote process exited"):
        await sending.join(pending.params, shard)
    await sending.close()
    assert read == [NCCL_ENVIRONMENT]
    assert begun == ["warm-up", "group"], "no operation's time runs while kernels are compiled"
    assert aborted[-1:] == ["kv-group-wait_0"]
    await pending.close()
    await receiving.close()
