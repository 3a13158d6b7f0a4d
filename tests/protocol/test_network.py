"""Connections over TCP, and how long a peer may say nothing."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from twostroke.protocol.clock import Silence
from twostroke.protocol.errors import ConnectionLost, ProtocolError
from twostroke.protocol.messages import Cancel, Refuse
from twostroke.protocol.network import Connection, TcpConnection, TcpNetwork
from twostroke.protocol.requests import Address


@contextlib.asynccontextmanager
async def connected_pair() -> AsyncIterator[tuple[TcpConnection, Connection]]:
    accepted: asyncio.Queue[Connection] = asyncio.Queue()
    done = asyncio.Event()

    async def handler(connection: Connection) -> None:
        accepted.put_nowait(connection)
        await done.wait()

    network = TcpNetwork(b"secret")
    listener = await network.listen("127.0.0.1", handler)
    client = await network.connect(listener.address)
    try:
        yield client, await accepted.get()
    finally:
        done.set()
        await client.close()
        await listener.close()


async def test_messages_arrive_in_order_both_ways():
    async with connected_pair() as (client, server):
        for number in range(100):
            client.send(Cancel(str(number)))
            server.send(Refuse(str(number)))
        await client.drain()
        assert [await server.receive() for _ in range(100)] == [Cancel(str(n)) for n in range(100)]
        assert [await client.receive() for _ in range(100)] == [Refuse(str(n)) for n in range(100)]


async def test_a_name_server_that_does_not_answer_keeps_no_processes_apart(monkeypatch: pytest.MonkeyPatch):
    def ask_nobody(*_: object, **__: object) -> None:
        raise AssertionError("a name is looked up")  # in a thread, of which a loop has few, for as long as that takes

    monkeypatch.setattr(socket, "getaddrinfo", ask_nobody)
    async with connected_pair() as (client, server):
        client.send(Cancel("a"))
        assert await server.receive() == Cancel("a")


async def test_a_closed_peer_is_a_lost_connection():
    async with connected_pair() as (client, server):
        await server.close()
        with pytest.raises(ConnectionLost):
            await client.receive()


async def test_sending_on_a_closed_connection_is_an_error():
    async with connected_pair() as (client, _):
        await client.close()
        await client.close()
        with pytest.raises(ConnectionLost):
            client.send(Cancel("r"))


async def test_closing_towards_a_peer_that_does_not_read_ends_soon():
    async with connected_pair() as (_client, server):
        while server.unsent_bytes < 20_000_000:
            server.send(Refuse("x" * 1_000_000))
        async with asyncio.timeout(30.0):
            await server.close()
            with pytest.raises(ConnectionLost):
                await server.receive()


async def test_nobody_listening_is_a_lost_connection():
    async with connected_pair() as (_client, _):
        pass
    with pytest.raises(ConnectionLost, match="no answer"):
        await TcpNetwork(b"secret").connect(Address("127.0.0.1", 1))


async def test_a_peer_with_another_secret_is_cut_off_and_others_go_on():
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def handler(connection: Connection) -> None:
        try:
            message = await connection.receive()
            heard.put_nowait(type(message).__name__)
        except ProtocolError:
            heard.put_nowait("refused")

    listener = await TcpNetwork(b"secret").listen("127.0.0.1", handler)
    stranger = await TcpNetwork(b"wrong").connect(listener.address)
    friend = await TcpNetwork(b"secret").connect(listener.address)
    stranger.send(Cancel("r"))
    assert await heard.get() == "refused"
    friend.send(Cancel("r"))
    assert await heard.get() == "Cancel"
    for connection in (stranger, friend):
        await connection.close()
    await listener.close()


async def test_bytes_that_are_no_hello_are_cut_off():
    async def handler(connection: Connection) -> None:
        raise AssertionError("a stranger got in")

    listener = await TcpNetwork(b"secret").listen("127.0.0.1", handler)
    reader, writer = await asyncio.open_connection(listener.address.host, listener.address.port)
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.read()  # the listener's hello, then the end
    writer.close()
    await writer.wait_closed()
    await listener.close()


async def test_closing_a_listener_ends_its_handlers():
    started, ended = asyncio.Event(), asyncio.Event()

    async def handler(connection: Connection) -> None:
        started.set()
        try:
            await connection.receive()
        finally:
            ended.set()

    network = TcpNetwork(b"secret")
    listener = await network.listen("127.0.0.1", handler)
    client = await network.connect(listener.address)
    await started.wait()
    await listener.close()
    assert ended.is_set()
    await client.close()


async def test_a_connection_that_was_accepted_while_its_listener_closed_is_closed_too() -> None:
    async def handler(connection: Connection) -> None:
        raise AssertionError("nobody listens any more")

    listener = await TcpNetwork(b"secret").listen("127.0.0.1", handler)
    await listener.close()
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as late:
        late.setblocking(False)
        listener._accept(*await asyncio.open_connection(sock=door.accept()[0]))
        async with asyncio.timeout(2):  # less than the time for a handshake
            assert await asyncio.get_running_loop().sock_recv(late, 1024) == b""


class Clock:
    """Real time, and what a test adds to it: a process that was stopped."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.skipped_s


async def test_a_peer_that_says_nothing_outlasts_the_limit() -> None:
    silence = Silence(Clock(), 0.02)
    await asyncio.wait_for(silence.outlast(), 20)
    assert silence.is_too_long
    silence.end()
    assert silence.length_s < 0.02


async def test_what_this_process_slept_through_is_forgiven() -> None:
    clock = Clock()
    silence = Silence(clock, 30.0)
    pause = asyncio.create_task(silence.pause(0.01))
    await asyncio.sleep(0)
    clock.skipped_s = 1000.0
    await pause
    assert not silence.is_too_long
    assert silence.length_s < 20


async def test_a_pause_that_is_a_little_late_forgives_nothing() -> None:
    clock = Clock()
    silence = Silence(clock, 30.0)
    for _ in range(5):
        pause = asyncio.create_task(silence.pause(0.0))
        await asyncio.sleep(0)
        clock.skipped_s += 9.0
        await pause
    assert silence.is_too_long
