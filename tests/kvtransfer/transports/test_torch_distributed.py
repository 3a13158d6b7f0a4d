"""What is peculiar to links through process groups: hanging operations, staging memory, threads, and digests."""

import asyncio
import time
from typing import Any

import pytest

from tests.rigs.kv_pair import BytesStore, link_threads, open_descriptors, settle, warm_up_torch
from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.kvtransfer.transports.staging import NUM_BUFFERS
from twostroke.kvtransfer.transports.torch_distributed import GroupLink, TorchDistributedTransport
from twostroke.protocol.errors import ConnectionLost


async def linked(store: BytesStore, cut: Cut, **options: Any) -> tuple[TorchDistributedTransport, GroupLink, GroupLink]:
    await warm_up_torch()
    transport = TorchDistributedTransport(store, **options)
    pending = await transport.prepare("127.0.0.1", cut)
    sender, receiver = await asyncio.gather(transport.join(pending.params, cut), pending.established())
    return transport, sender, receiver


def whole(store: BytesStore) -> Cut:
    return Cut(store.layout, 0, 1, 4, "raw")


async def test_a_send_returns_before_its_bytes_are_taken_and_staging_stays_bounded() -> None:
    store = BytesStore(1, 64, 4096)
    store.fill(1)
    transport, sender, receiver = await linked(store, whole(store), join_timeout_s=20)
    chunk = [Segment(0, tuple(range(64)))]
    first, second = sender.send(chunk, 0), sender.send(chunk, 1)
    await asyncio.gather(first, second)
    third = asyncio.create_task(sender.send(chunk, 2))
    await asyncio.wait([third], timeout=0.05)
    assert not third.done(), "both buffers are on their way"
    assert [await receiver.receive(chunk, seal) for seal in range(3)] == [True, True, True]
    await third
    memory = sender._staging._memory  # type: ignore[attr-defined]
    assert [buffer.numel() for buffer in memory] == [64 * store.block_bytes + 16] * NUM_BUFFERS
    await transport.close()


async def test_what_a_send_read_is_what_arrives_though_the_blocks_change_after_it() -> None:
    store = BytesStore(1, 8, 4096)
    store.fill(1)
    before = store.block(0, 1)
    transport, sender, receiver = await linked(store, whole(store), join_timeout_s=20)
    await sender.send([Segment(0, (1,))], 5)
    store.layers[0][store.block_bytes : 2 * store.block_bytes] = bytes(store.block_bytes)
    assert await receiver.receive([Segment(0, (3,))], 5)
    assert store.block(0, 3) == before
    await transport.close()


async def test_closing_ends_a_receive_that_waits_and_tells_the_peer_at_once() -> None:
    store = BytesStore(1, 8, 4096)
    descriptors, threads = open_descriptors(), link_threads()
    transport, sender, receiver = await linked(store, whole(store), join_timeout_s=20)
    hanging = asyncio.create_task(receiver.receive([Segment(0, (1,))], 1))
    await settle(lambda: receiver._free.qsize() < NUM_BUFFERS)
    began = time.monotonic()
    await receiver.close()
    with pytest.raises(ConnectionLost):
        await hanging
    with pytest.raises(ConnectionLost):
        await sender.receive([Segment(0, (1,))], 1)
    await transport.close()
    assert time.monotonic() - began < 10, "not after the operation's time-out, of 20 s"
    await settle(lambda: open_descriptors() <= descriptors and link_threads() <= threads)
    assert store.copy() == [bytes(8 * store.block_bytes)]


async def test_a_message_of_another_size_than_announced_is_damaged_and_no_more() -> None:
    store = BytesStore(1, 64, 4096)
    store.fill(1)
    before = store.copy()
    transport, sender, receiver = await linked(store, whole(store), join_timeout_s=20)
    small, large = [Segment(0, (1,))], [Segment(0, tuple(range(32)))]
    await sender.send(large, 1)
    assert not await receiver.receive(small, 1), "more came than was announced"
    await sender.send(small, 2)
    assert not await receiver.receive(large, 2), "less came"
    assert store.copy() == before
    await sender.send(large, 3)
    assert await receiver.receive(large, 3)
    await transport.close()


async def test_bytes_that_come_after_the_link_was_shut_stay_in_staging() -> None:
    store = BytesStore(1, 8, 4096)
    store.fill(1)
    before = store.copy()
    transport, sender, receiver = await linked(store, whole(store), join_timeout_s=20)
    receiving = asyncio.create_task(receiver.receive([Segment(0, (1,))], 1))
    await settle(lambda: receiver._free.qsize() < NUM_BUFFERS)
    receiver.shut_store()  # as `close` begins
    await sender.send([Segment(0, (2,))], 1)
    with pytest.raises(ConnectionLost, match="closed"):
        await receiving
    assert store.copy() == before
    await transport.close()
