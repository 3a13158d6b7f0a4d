"""What only TCP links do: doors and tokens, several streams, bytes that are cut off or changed on their way."""

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable

import pytest

from tests.rigs.kv_pair import BytesStore, link_threads, open_descriptors, settle
from twostroke.kvtransfer.link import DIGEST_BYTES
from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.kvtransfer.transports.tcp import MIN_PART_BYTES, TcpLink, TcpTransport
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.kv_layout import Encoding

Mangle = Callable[[int, bytes], bytes | None]
"""(bytes that went before, these bytes) -> what is passed on; None cuts the connection."""


def blocks(store: BytesStore, encoding: Encoding = "raw") -> Cut:
    return Cut(store.layout, 0, store.layout.heads_per_rank, store.layout.block_size, encoding)


@contextlib.asynccontextmanager
async def links(
    source: BytesStore, target: BytesStore, cut: Cut, *, streams: int = 1, mangle: Mangle | None = None
) -> AsyncIterator[tuple[TcpLink, TcpLink]]:
    """A link's two ends, through a proxy where bytes are to be mangled; leaves nothing behind."""
    descriptors, threads = open_descriptors(), link_threads()
    sending, receiving = (TcpTransport(store, local_streams=streams) for store in (source, target))
    pending = await receiving.prepare("127.0.0.1", cut)
    params = dict(pending.params)
    proxy: asyncio.Server | None = None
    pipes: set[asyncio.Task[None]] = set()
    if mangle is not None:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", int(pending.params["port"]))
            answers = asyncio.create_task(pipe(onward_reader, writer, lambda _, data: data))
            pipes.add(answers)
            await pipe(reader, onward_writer, mangle)

        async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Mangle) -> None:
            before = 0
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    passed = change(before, data)
                    if passed is None:
                        break
                    before += len(data)
                    writer.write(passed)
                    await writer.drain()
            writer.close()

        proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
        params["port"] = proxy.sockets[0].getsockname()[1]
    try:
        ends = await asyncio.gather(sending.join(params, cut), pending.established())
        assert [len(end._streams) for end in ends] == [streams, streams]
        yield ends
    finally:
        await sending.close()
        await receiving.close()
        if proxy is not None:
            proxy.close()
            await asyncio.gather(*pipes, return_exceptions=True)
            await proxy.wait_closed()
    await settle(lambda: open_descriptors() <= descriptors and link_threads() <= threads)


GREETING_BYTES = 34


@pytest.mark.parametrize("num_blocks", [2, 60], ids=["inline", "on the thread"])
async def test_every_changed_byte_is_found_and_the_next_chunk_is_whole(num_blocks: int) -> None:
    source, target = BytesStore(1, 64, 1024), BytesStore(1, 64, 1024)
    source.fill(1)
    size = num_blocks * source.block_bytes + DIGEST_BYTES
    draw = random.Random(4)
    spoilt = [GREETING_BYTES + 2 * i * size + draw.choice([0, size - 1, draw.randrange(size)]) for i in range(10)]

    def mangle(before: int, data: bytes) -> bytes:
        changed = bytearray(data)
        for at in spoilt:
            if before <= at < before + len(data):
                changed[at - before] ^= 1 << draw.randrange(8)
        return bytes(changed)

    chunk = [Segment(0, tuple(range(num_blocks)))]
    async with links(source, target, blocks(source), mangle=mangle) as (sender, receiver):
        for seal in range(20):
            _, is_intact = await asyncio.gather(sender.send(chunk, seal), receiver.receive(chunk, seal))
            assert is_intact == bool(seal % 2)
    assert target.copy()[0][: num_blocks * source.block_bytes] == source.copy()[0][: num_blocks * source.block_bytes]


@pytest.mark.parametrize("seed", range(12))
async def test_a_link_that_is_cut_at_any_byte_is_lost_at_both_ends(seed: int) -> None:
    source, target = BytesStore(1, 64, 2048), BytesStore(1, 64, 2048)
    source.fill(1)
    draw = random.Random(seed)
    num_blocks = draw.choice([1, 2, 64])
    size = num_blocks * source.block_bytes + DIGEST_BYTES
    end = GREETING_BYTES + draw.choice([1, size - 1, size - DIGEST_BYTES, draw.randrange(1, size)])

    def mangle(before: int, data: bytes) -> bytes | None:
        return None if before >= end else data[: end - before]

    chunk = [Segment(0, tuple(range(num_blocks)))]
    async with links(source, target, blocks(source), mangle=mangle) as (sender, receiver):

        async def send_on() -> None:
            while True:
                await sender.send(chunk, 1)

        sent, received = await asyncio.gather(send_on(), receiver.receive(chunk, 1), return_exceptions=True)
        assert isinstance(sent, ConnectionLost)
        assert isinstance(received, ConnectionLost)


async def test_a_large_chunk_goes_over_all_streams_and_a_small_one_over_the_first() -> None:
    source, target = BytesStore(1, 64, 4096), BytesStore(1, 64, 4096)
    source.fill(1)
    cut = blocks(source)
    carried: list[int] = []
    async with links(source, target, cut, streams=3) as (sender, receiver):
        for stream in sender._streams:
            start = stream.thread.start
            stream.thread.start = lambda *args, s=start: carried.append(args[2]) or s(*args)  # type: ignore[method-assign]
        for num_blocks, parts in ((64, 3), (2 * MIN_PART_BYTES // cut.unit_bytes, 2), (10, 1)):
            carried.clear()
            chunk = [Segment(0, tuple(range(num_blocks)))]
            _, is_intact = await asyncio.gather(sender.send(chunk, 9), receiver.receive(chunk, 9))
            assert is_intact
            assert len(carried) == parts
            assert sum(carried) == num_blocks * cut.unit_bytes
            assert max(carried) - min(carried) <= cut.unit_bytes
    assert target.copy() == source.copy()


async def test_parts_of_a_chunk_do_not_pass_for_each_other() -> None:
    source, target = BytesStore(1, 64, 4096), BytesStore(1, 64, 4096)
    source.fill(1)
    source.layers[0][len(source.layers[0]) // 2 :] = source.layers[0][: len(source.layers[0]) // 2]
    chunk = [Segment(0, tuple(range(64)))]
    async with links(source, target, blocks(source), streams=2) as (sender, receiver):
        sender._streams.reverse()
        _, is_intact = await asyncio.gather(sender.send(chunk, 9), receiver.receive(chunk, 9))
        assert not is_intact


async def test_one_stream_that_breaks_ends_the_link() -> None:
    source, target = BytesStore(1, 64, 4096), BytesStore(1, 64, 4096)
    chunk = [Segment(0, tuple(range(64)))]
    async with links(source, target, blocks(source), streams=3) as (sender, receiver):
        receive = asyncio.create_task(receiver.receive(chunk, 1))
        sender._streams[2].thread.break_off()
        with pytest.raises(ConnectionLost):
            await receive
        for call in (receiver.receive(chunk, 1), receiver.discard(1)):
            with pytest.raises(ConnectionLost, match="closed"):
                await call


@pytest.mark.parametrize("streams", [1, 3])
async def test_a_cancelled_call_breaks_the_link_for_the_peer_too(streams: int) -> None:
    source, target = BytesStore(1, 64, 4096), BytesStore(1, 64, 4096)
    chunk = [Segment(0, tuple(range(64)))]
    async with links(source, target, blocks(source), streams=streams) as (sender, receiver):
        receive = asyncio.create_task(receiver.receive(chunk, 1))
        await asyncio.sleep(0)
        receive.cancel()

        async def send_on() -> None:
            while True:  # what the sockets hold may still go out
                await sender.send(chunk, 1)

        with pytest.raises(ConnectionLost):
            await asyncio.wait_for(send_on(), 10)


async def test_close_in_the_middle_of_a_chunk_waits_until_nothing_writes() -> None:
    source, target = BytesStore(1, 64, 65536), BytesStore(1, 64, 65536)
    source.fill(1)
    chunk = [Segment(0, tuple(range(64)))]
    async with links(source, target, blocks(source)) as (sender, receiver):
        send = asyncio.create_task(sender.send(chunk, 1))
        receive = asyncio.create_task(receiver.receive(chunk, 1))
        await settle(lambda: any(target.layers[0][:1000]))
        await receiver.close()
        held = target.copy()
        with pytest.raises(ConnectionLost):
            await receive
        with pytest.raises(ConnectionLost):
            await send
        assert target.copy() == held


@pytest.mark.parametrize(("ours", "theirs", "count"), [(1, 1, 1), (4, 2, 2), (2, 4, 2), (64, 3, 3)])
async def test_the_smaller_number_of_streams_counts(ours: int, theirs: int, count: int) -> None:
    store = BytesStore()
    sending, receiving = TcpTransport(store, local_streams=ours), TcpTransport(store, local_streams=theirs)
    pending = await receiving.prepare("127.0.0.1", blocks(store))
    ends = await asyncio.gather(sending.join(pending.params, blocks(store)), pending.established())
    assert [len(end._streams) for end in ends] == [count, count]
    await sending.close()
    await receiving.close()


async def test_between_machines_a_link_has_more_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.kvtransfer.transports.tcp._is_within_one_machine", lambda _: False)
    store = BytesStore()
    sending, receiving = TcpTransport(store), TcpTransport(store, streams=3)
    pending = await receiving.prepare("127.0.0.1", blocks(store))
    ends = await asyncio.gather(sending.join(pending.params, blocks(store)), pending.established())
    assert [len(end._streams) for end in ends] == [3, 3]
    await sending.close()
    await receiving.close()


async def test_a_links_limit_is_shared_by_its_streams_on_the_sending_side() -> None:
    store = BytesStore()
    sending = TcpTransport(store, local_streams=2, max_bytes_per_s=10_000_001)
    receiving = TcpTransport(store, local_streams=2)
    pending = await receiving.prepare("127.0.0.1", blocks(store))
    ends = await asyncio.gather(sending.join(pending.params, blocks(store)), pending.established())
    paces = [
        [struct.unpack("Q", stream.thread.socket.getsockopt(socket.SOL_SOCKET, 47, 8))[0] for stream in end._streams]
        for end in ends
    ]
    assert paces == [[5_000_000] * 2, [2**64 - 1] * 2]
    await sending.close()
    await receiving.close()


@pytest.mark.parametrize("count", [0, 65])
def test_a_number_of_streams_that_can_not_be_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 64"):
        TcpTransport(BytesStore(), streams=count)


async def test_only_the_peer_with_the_token_gets_the_link_however_many_strangers_come_first() -> None:
    source, target = BytesStore(), BytesStore()
    source.fill(1)
    cut = blocks(source)
    sending, receiving = TcpTransport(source), TcpTransport(target)
    pending = await receiving.prepare("127.0.0.1", cut)
    strangers = [socket.create_connection(("127.0.0.1", int(pending.params["port"]))) for _ in range(3)]
    with pytest.raises(ConnectionLost, match="can't join"):
        await sending.join({**pending.params, "token": "00" * 32}, cut)
    with pytest.raises(ConnectionLost, match="hexadecimal"):
        await sending.join({**pending.params, "token": "no"}, cut)
    with pytest.raises(ConnectionLost, match="no streams"):
        await sending.join({**pending.params, "local_streams": 0}, cut)
    with pytest.raises(ConnectionLost, match="can't join"):
        await sending.join({**pending.params, "host": "127.0.0.1", "port": 1}, cut)
    sender, receiver = await asyncio.gather(sending.join(pending.params, cut), pending.established())
    await asyncio.gather(sender.send([Segment(0, (1,))], 1), receiver.receive([Segment(0, (2,))], 1))
    assert target.block(0, 2) == source.block(0, 1)
    with pytest.raises(ConnectionLost):
        await sending.join(pending.params, cut)
    for stranger in strangers:
        assert stranger.recv(1) == b"", "sent away once the peer had come"
        stranger.close()
    await sending.close()
    await receiving.close()


@pytest.mark.parametrize(
    ("index", "count"), [(0, 2), (1, 1), (0, 9), (3, 3)], ids=["another count", "no such", "too many", "last + 1"]
)
async def test_a_stream_that_does_not_fit_the_others_is_sent_away(index: int, count: int) -> None:
    store = BytesStore()
    receiving = TcpTransport(store, streams=3, local_streams=3)
    pending = await receiving.prepare("127.0.0.1", blocks(store))
    token = bytes.fromhex(str(pending.params["token"]))
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


async def test_a_transport_that_is_closed_closes_its_doors() -> None:
    descriptors = open_descriptors()
    receiving = TcpTransport(BytesStore())
    pending = await receiving.prepare("127.0.0.1", blocks(BytesStore()))
    waiting = asyncio.create_task(pending.established())
    await asyncio.sleep(0)
    await receiving.close()
    with pytest.raises(ConnectionLost, match="given up"):
        await waiting
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncio.open_connection("127.0.0.1", int(pending.params["port"]))
    await settle(lambda: open_descriptors() <= descriptors)


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
    sender, receiver = await asyncio.gather(sending.join(pending.params, blocks(source)), pending.established())
    chunk = [Segment(0, tuple(range(32)))]
    _, is_intact = await asyncio.gather(sender.send(chunk, 1), receiver.receive(chunk, 1))
    assert is_intact
    assert target.copy()[0] == source.copy()[0]
    await sending.close()
    await receiving.close()
