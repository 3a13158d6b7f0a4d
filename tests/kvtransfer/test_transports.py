"""Each transport's links, without sender and receiver."""

import asyncio
import contextlib
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from transfer_harness import BytesStore, open_descriptors, settle, warm_up_torch

from kvtransfer.link import DataLink, Transport
from kvtransfer.transports import make_transport
from kvtransfer.transports.tcp import TcpTransport
from protocol.errors import ConfigError, ConnectionLost

BOTH = pytest.mark.parametrize("name", ["tcp", "torch_distributed"])


@contextlib.asynccontextmanager
async def two(
    name: str, source: BytesStore, target: BytesStore, **options: float
) -> AsyncIterator[tuple[Transport, Transport]]:
    """A transport on either side; nothing may be left open in the end."""
    if name == "torch_distributed":
        await warm_up_torch()
    before = open_descriptors()
    sending, receiving = make_transport(name, source, **options), make_transport(name, target, **options)
    try:
        yield sending, receiving
    finally:
        await sending.close()
        await receiving.close()
    await settle(lambda: open_descriptors() <= before)


async def link(sending: Transport, receiving: Transport) -> tuple[DataLink, DataLink]:
    pending = await receiving.prepare("127.0.0.1")
    joined, established = await asyncio.gather(sending.join(pending.params), pending.established())
    return joined, established


@BOTH
@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(1, 1), (5, 96), (2500, 64), (40, 65536)])
async def test_blocks_arrive_in_the_order_of_both_tables(name: str, num_blocks: int, block_bytes: int) -> None:
    source, target = BytesStore(2, num_blocks, block_bytes), BytesStore(2, num_blocks, block_bytes)
    source.fill(1)
    async with two(name, source, target) as (sending, receiving):
        sender, receiver = await link(sending, receiving)
        for layer in range(2):
            from_ids = random.Random(layer).sample(range(num_blocks), num_blocks)
            to_ids = random.Random(layer + 5).sample(range(num_blocks), num_blocks)
            await asyncio.gather(sender.send(layer, from_ids), receiver.receive(layer, to_ids))
            for from_id, to_id in zip(from_ids, to_ids, strict=True):
                assert source.block(layer, from_id) == target.block(layer, to_id)


@BOTH
async def test_what_is_discarded_leaves_the_stream_in_step(name: str) -> None:
    source, target = BytesStore(1, 8, 300_000), BytesStore(1, 8, 300_000)
    source.fill(1)
    async with two(name, source, target) as (sending, receiving):
        sender, receiver = await link(sending, receiving)
        await asyncio.gather(sender.send(0, [0, 1, 2, 3, 4, 5]), receiver.discard(6 * 300_000))
        assert target.copy() == [bytes(8 * 300_000)]
        await asyncio.gather(sender.send(0, [7]), receiver.receive(0, [2]))
        assert target.block(0, 2) == source.block(0, 7)


@BOTH
async def test_a_cancelled_receive_breaks_the_link_and_late_bytes_go_nowhere(name: str) -> None:
    source, target = BytesStore(1, 8, 100_000), BytesStore(1, 8, 100_000)
    source.fill(1)
    async with two(name, source, target) as (sending, receiving):
        sender, receiver = await link(sending, receiving)
        receive = asyncio.create_task(receiver.receive(0, [0, 1, 2, 3]))
        await asyncio.wait([receive], timeout=0.02)
        receive.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receive
        await receiver.close()
        with pytest.raises(ConnectionLost, match="closed"):
            await receiver.receive(0, [0])
        send = asyncio.create_task(sender.send(0, [4, 5, 6, 7]))
        await asyncio.wait([send], timeout=0.05)
        await sender.close()
        await asyncio.wait([send])
        assert send.cancelled() or isinstance(send.exception(), ConnectionLost | None)
        assert target.copy() == [bytes(8 * 100_000)]


@BOTH
async def test_a_peer_that_is_gone_breaks_the_link(name: str) -> None:
    source, target = BytesStore(1, 8, 100_000), BytesStore(1, 8, 100_000)
    async with two(name, source, target) as (sending, receiving):
        sender, receiver = await link(sending, receiving)
        await sender.close()
        with pytest.raises(ConnectionLost):
            await receiver.receive(0, [0, 1, 2])
        await receiver.close()
        await receiver.close()


@BOTH
async def test_a_peer_that_does_not_join_is_not_awaited_for_ever(name: str) -> None:
    store = BytesStore()
    async with two(name, store, store, join_timeout_s=0.2) as (_, receiving):
        pending = await receiving.prepare("127.0.0.1")
        with pytest.raises(ConnectionLost):
            await pending.established()
        await pending.close()


@BOTH
async def test_a_pending_link_may_be_given_up_while_it_is_awaited(name: str) -> None:
    store = BytesStore()
    async with two(name, store, store, join_timeout_s=30) as (_, receiving):
        pending = await receiving.prepare("127.0.0.1")
        waiting = asyncio.create_task(pending.established())
        await asyncio.wait([waiting], timeout=0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await pending.close()


@BOTH
async def test_parameters_of_another_transport_are_refused(name: str) -> None:
    store = BytesStore()
    async with two(name, store, store) as (sending, _):
        with pytest.raises(ConnectionLost, match="not those of"):
            await sending.join({"segment": "x"})


async def test_only_the_peer_with_the_token_gets_the_link_however_many_strangers_come_first() -> None:
    source, target = BytesStore(), BytesStore()
    source.fill(1)
    async with two("tcp", source, target) as (sending, receiving):
        pending = await receiving.prepare("127.0.0.1")
        strangers = [socket.create_connection(("127.0.0.1", int(pending.params["port"]))) for _ in range(3)]
        with pytest.raises(ConnectionLost, match="can't join"):
            await sending.join({**pending.params, "token": "00" * 32})
        with pytest.raises(ConnectionLost, match="hexadecimal"):
            await sending.join({**pending.params, "token": "no"})
        sender, receiver = await asyncio.gather(sending.join(pending.params), pending.established())
        await asyncio.gather(sender.send(0, [1]), receiver.receive(0, [2]))
        assert target.block(0, 2) == source.block(0, 1)
        with pytest.raises(ConnectionLost):
            await sending.join(pending.params)
        for stranger in strangers:
            assert stranger.recv(1) == b"", "sent away once the peer had come"
            stranger.close()


async def test_listening_on_a_strange_address_is_a_lost_connection() -> None:
    with pytest.raises(ConnectionLost, match=r"can't listen on 192\.0\.2\.1"):
        await TcpTransport(BytesStore()).prepare("192.0.2.1")


def test_an_unknown_transport_is_named_beside_those_known() -> None:
    with pytest.raises(ConfigError, match="'pigeon'; known are tcp, torch_distributed"):
        make_transport("pigeon", BytesStore())


def test_torch_is_imported_only_for_the_transport_that_needs_it() -> None:
    code = (
        "import sys, kvtransfer.sender, kvtransfer.receiver, kvtransfer.transports as t;"
        "t.make_transport('tcp', None); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
