"""TCP links: several streams, a rate limit, bytes that are cut off or changed on their way."""

import asyncio
import base64
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator

import pytest

from tests.rigs.kv_links import blocks, join, linked, move, two
from tests.rigs.kv_pair import BytesStore, settle
from tests.rigs.proxy import Mangle, Proxy
from twostroke.kvtransfer.layout import Segment
from twostroke.kvtransfer.link import CHECKSUM_BYTES
from twostroke.kvtransfer.transports import sockets
from twostroke.kvtransfer.transports.tcp import MIN_PART_BYTES, TcpLink, TcpTransport
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.requests import Address

GREETING_BYTES = 34
WHOLE = [Segment(0, tuple(range(64)))]


@contextlib.asynccontextmanager
async def through_proxy(
    source: BytesStore, target: BytesStore, mangle: Mangle
) -> AsyncIterator[tuple[TcpLink, TcpLink]]:
    """Both ends of a link of one stream."""
    async with two("tcp", source, target) as (sending, receiving):
        pending = await receiving.prepare("127.0.0.1", blocks(source))
        proxy = Proxy()
        proxy.mangle = mangle
        port = (await proxy.start()).port
        proxy.upstream.set_result(Address("127.0.0.1", pending.params["port"]))
        try:
            yield await asyncio.gather(
                sending.join({**pending.params, "port": port}, blocks(source)), pending.established()
            )
        finally:
            await proxy.close()


@pytest.mark.parametrize(("num_blocks", "kinds"), [(2, 2), (60, 2), (60, 1)])
async def test_every_changed_byte_is_found_and_the_next_chunk_is_whole(num_blocks: int, kinds: int) -> None:
    source, target = (BytesStore(1, 64, 1024, kinds=kinds) for _ in range(2))
    source.fill(1)
    size = num_blocks * source.block_bytes + CHECKSUM_BYTES
    draw = random.Random(4)
    spoilt = [GREETING_BYTES + 2 * i * size + draw.choice([0, size - 1, draw.randrange(size)]) for i in range(10)]

    def mangle(before: int, data: bytes) -> bytes:
        changed = bytearray(data)
        for at in spoilt:
            if before <= at < before + len(data):
                changed[at - before] ^= 1 << draw.randrange(8)
        return bytes(changed)

    chunk = [Segment(0, tuple(range(num_blocks)))]
    async with through_proxy(source, target, mangle) as ends:
        for seed in range(20):
            assert await move(ends, chunk, chunk, seed) == bool(seed % 2)
    assert target.copy()[0][: num_blocks * source.block_bytes] == source.copy()[0][: num_blocks * source.block_bytes]


@pytest.mark.parametrize("seed", range(6))
async def test_a_link_that_is_cut_at_any_byte_is_lost_at_both_ends(seed: int) -> None:
    source, target = BytesStore(1, 64, 2048), BytesStore(1, 64, 2048)
    source.fill(1)
    draw = random.Random(seed)
    num_blocks = draw.choice([1, 2, 64])
    size = num_blocks * source.block_bytes + CHECKSUM_BYTES
    end = GREETING_BYTES + draw.choice([1, size - 1, size - CHECKSUM_BYTES, draw.randrange(1, size)])

    def mangle(before: int, data: bytes) -> bytes | None:
        return None if before >= end else data[: end - before]

    chunk = [Segment(0, tuple(range(num_blocks)))]
    async with through_proxy(source, target, mangle) as (sender, receiver):

        async def send_on() -> None:
            while True:
                await sender.send(chunk, 1)

        sent, received = await asyncio.gather(send_on(), receiver.receive(chunk, 1), return_exceptions=True)
        assert isinstance(sent, ConnectionLost)
        assert isinstance(received, ConnectionLost)


async def test_a_large_chunk_goes_over_all_streams_and_a_small_one_over_the_first() -> None:
    source, target = BytesStore(1, 64, 4096), BytesStore(1, 64, 4096)
    source.fill(1)
    shard = blocks(source)
    carried: list[int] = []
    async with linked("tcp, 3 streams", source, target) as (sender, receiver):
        for stream in sender._streams:
            call = stream.thread.call
            stream.thread.call = lambda *args, c=call: carried.append(args[2]) or c(*args)  # type: ignore[method-assign]
        for num_blocks, parts in ((64, 3), (2 * MIN_PART_BYTES // shard.unit_bytes, 2), (10, 1)):
            carried.clear()
            chunk = [Segment(0, tuple(range(num_blocks)))]
            assert await move((sender, receiver), chunk, chunk)
            assert len(carried) == parts
            assert sum(carried) == num_blocks * shard.unit_bytes
            assert max(carried) - min(carried) <= shard.unit_bytes
    assert target.copy() == source.copy()


async def test_parts_of_a_chunk_do_not_pass_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = BytesStore(1, 64, 4096), BytesStore(1, 64, 4096)
    source.fill(1)
    source.layers[0][len(source.layers[0]) // 2 :] = source.layers[0][: len(source.layers[0]) // 2]
    monkeypatch.setattr(sockets, "is_within_one_machine", lambda _: False)
    async with two("tcp", source, target) as (sending, receiving):
        receiving._streams = 2
        ends = await join(sending, receiving, blocks(source))
        ends[0]._streams.reverse()
        assert not await move(ends, WHOLE, WHOLE)


async def test_one_stream_that_breaks_ends_the_link() -> None:
    source, target = BytesStore(1, 64, 4096), BytesStore(1, 64, 4096)
    async with linked("tcp, 3 streams", source, target) as (sender, receiver):
        receive = asyncio.create_task(receiver.receive(WHOLE, 1))
        sender._streams[2].thread.break_off()
        with pytest.raises(ConnectionLost):
            await receive
        for call in (receiver.receive(WHOLE, 1), receiver.discard(1)):
            with pytest.raises(ConnectionLost, match="closed"):
                await call


@pytest.mark.parametrize("name", ["tcp", "tcp, 3 streams"])
async def test_a_cancelled_call_breaks_the_link_for_the_peer_too(name: str) -> None:
    source, target = BytesStore(1, 64, 4096), BytesStore(1, 64, 4096)
    async with linked(name, source, target) as (sender, receiver):
        receive = asyncio.create_task(receiver.receive(WHOLE, 1))
        await asyncio.sleep(0)
        receive.cancel()

        async def send_on() -> None:
            while True:  # what the sockets hold may still go out
                await sender.send(WHOLE, 1)

        with pytest.raises(ConnectionLost):
            await asyncio.wait_for(send_on(), 10)


async def test_close_in_the_middle_of_a_chunk_waits_until_nothing_writes() -> None:
    source, target = BytesStore(1, 64, 65536), BytesStore(1, 64, 65536)
    source.fill(1)
    async with linked("tcp", source, target) as (sender, receiver):
        send = asyncio.create_task(sender.send(WHOLE, 1))
        receive = asyncio.create_task(receiver.receive(WHOLE, 1))
        await settle(lambda: any(target.layers[0][:1000]))
        await receiver.close()
        held = target.copy()
        with pytest.raises(ConnectionLost):
            await receive
        with pytest.raises(ConnectionLost):
            await send
        assert target.copy() == held


@pytest.mark.parametrize(("ours", "theirs", "count"), [(4, 2, 2), (2, 4, 2), (64, 3, 3)])
async def test_between_machines_the_smaller_number_of_streams_counts_and_within_one_there_is_one(
    ours: int, theirs: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BytesStore()
    sending, receiving = TcpTransport(store, streams=ours), TcpTransport(store, streams=theirs)
    ends = await join(sending, receiving, blocks(store))
    assert [len(end._streams) for end in ends] == [1, 1]
    monkeypatch.setattr(sockets, "is_within_one_machine", lambda _: False)
    ends = await join(sending, receiving, blocks(store))
    assert [len(end._streams) for end in ends] == [count, count]
    await sending.close()
    await receiving.close()


async def test_a_links_limit_is_shared_by_its_streams_on_the_sending_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "is_within_one_machine", lambda _: False)
    store = BytesStore()
    sending, receiving = TcpTransport(store, streams=2, max_bytes_per_s=10_000_001), TcpTransport(store)
    ends = await join(sending, receiving, blocks(store))
    paces = [
        [struct.unpack("Q", stream.thread.socket.getsockopt(socket.SOL_SOCKET, 47, 8))[0] for stream in end._streams]
        for end in ends
    ]
    assert paces == [[5_000_000] * 2, [2**64 - 1] * 2]
    await sending.close()
    await receiving.close()


@pytest.mark.parametrize(
    ("index", "count"), [(0, 2), (1, 1), (0, 9), (3, 3)], ids=["another count", "no such", "too many", "last + 1"]
)
async def test_a_stream_that_does_not_fit_the_others_is_sent_away(index: int, count: int) -> None:
    store = BytesStore()
    receiving = TcpTransport(store, streams=3)
    pending = await receiving.prepare("127.0.0.1", blocks(store))
    token = base64.b64decode(str(pending.params["token"]))
    opened = []
    for greeting in ((0, 3), (index, count), (0, 3)):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(pending.params["port"]))
        opened.append(writer)
        writer.write(token + bytes(greeting))
        assert await reader.read(1) == (b"\x01" if len(opened) == 1 else b"")
    for writer in opened:
        writer.close()
        await writer.wait_closed()
    await receiving.close()


async def test_listening_on_a_strange_address_is_a_lost_connection() -> None:
    with pytest.raises(ConnectionLost, match=r"can't listen on 192\.0\.2\.1"):
        await TcpTransport(BytesStore()).prepare("192.0.2.1", blocks(BytesStore()))


async def test_links_go_over_ipv6_too() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    source, target = BytesStore(), BytesStore()
    source.fill(1)
    sending, receiving = TcpTransport(source), TcpTransport(target)
    pending = await receiving.prepare("::1", blocks(source))
    ends = await asyncio.gather(sending.join(pending.params, blocks(source)), pending.established())
    chunk = [Segment(0, tuple(range(32)))]
    assert await move(ends, chunk, chunk)
    assert target.copy()[0] == source.copy()[0]
    await sending.close()
    await receiving.close()
