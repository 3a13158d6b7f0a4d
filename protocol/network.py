"""The network as a constructor argument: live TCP, or memory on virtual time (tests/simulation).

The live network: authenticated frames over TCP, on asyncio.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.frames import HEADER_BYTES, HELLO_BYTES, FrameCodec, draw_hello
from twostroke.protocol.messages import PROTOCOL, Message, decode_message, encode_message
from twostroke.protocol.requests import Address


class Connection(Protocol):
    """An ordered, authenticated stream of messages. A broken one raises ConnectionLost from then on."""

    @property
    def unsent_bytes(self) -> int:
        """What `send` has accepted and the peer's side has not yet taken."""

    def send(self, message: Message) -> None:
        """Queue `message` behind those before it; never waits. Raises ConnectionLost."""

    async def drain(self) -> None:
        """Wait until the unsent bytes are below the high-water mark. Raises ConnectionLost."""

    async def receive(self) -> Message:
        """The next message. Raises ConnectionLost when the peer is gone, ProtocolError when it misbehaves."""

    async def close(self) -> None:
        """End the connection; a `receive` that waits raises ConnectionLost. May be called more than once."""


Handler = Callable[[Connection], Awaitable[None]]


class Listener(Protocol):
    """Accepts connections until closed."""

    @property
    def address(self) -> Address:
        """Where peers can reach it (the port is the one really bound)."""

    async def close(self) -> None:
        """Stop accepting, and cancel the handlers of open connections and wait for them."""


class Network(Protocol):
    """Makes connections."""

    async def connect(self, address: Address) -> Connection:
        """Raises ConnectionLost where nobody listens, or the peer does not share our secret."""

    async def listen(self, host: str, handler: Handler) -> Listener:
        """Listen on a free port of `host`; each connection runs `handler`, and is closed when it returns."""


HANDSHAKE_S = 5.0
FLUSH_S = 1.0  # how long a closing connection tries to get rid of what was sent
_STREAM_ERRORS = (OSError, asyncio.IncompleteReadError, EOFError)


class TcpConnection:
    """A Connection over a pair of asyncio streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, codec: FrameCodec):
        self._reader = reader
        self._writer = writer
        self._codec = codec

    @property
    def unsent_bytes(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: Message) -> None:
        if self._writer.is_closing():
            raise ConnectionLost("the connection is closed")
        self._writer.write(self._codec.seal(encode_message(message)))

    async def drain(self) -> None:
        try:
            await self._writer.drain()
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    async def receive(self) -> Message:
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            payload = await self._reader.readexactly(self._codec.payload_bytes(header))
        except _STREAM_ERRORS as error:
            raise ConnectionLost(f"the peer is gone ({error})") from error
        return decode_message(self._codec.open(header, payload))

    async def close(self) -> None:
        self._writer.close()
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._writer.wait_closed()
        except TimeoutError:
            self._writer.transport.abort()  # the peer does not read: what is left would never go out
        except OSError:
            return  # a peer that died already leaves an error here that says nothing new


class TcpListener:
    """A listening socket with the tasks of its connections, once it is started."""

    _server: asyncio.Server

    def __init__(self, secret: bytes, handler: Handler):
        self._secret = secret
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self, host: str) -> None:
        """Bind a free port. Raises ConnectionLost where `host` is not an address of this machine."""
        try:
            self._server = await asyncio.start_server(self._accept, host, 0)
        except OSError as error:
            raise ConnectionLost(f"can't listen on {host}: {error}") from error

    @property
    def address(self) -> Address:
        host, port = self._server.sockets[0].getsockname()[:2]
        return Address(host, port)

    async def close(self) -> None:
        self._closed = True
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed:  # asyncio had accepted it before
            writer.close()
            return
        # Were this a coroutine, asyncio would keep only a weak hold of its task, and log a cancellation as an error.
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Cancelled in the handshake, or before it began, the task has no connection to close.
        task.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            codec = await _handshake(reader, writer, self._secret, is_connector=False)
        except ConnectionLost:  # a stranger knocked; nothing was begun that would have to end
            return
        connection = TcpConnection(reader, writer, codec)
        try:
            await self._handler(connection)
        finally:
            await connection.close()


class TcpNetwork:
    """Connections between processes that share the cluster's secret."""

    def __init__(self, secret: bytes):
        self._secret = secret

    async def connect(self, address: Address) -> TcpConnection:
        """Raises ConnectionLost where nobody answers within the handshake's time."""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                reader, writer = await asyncio.open_connection(address.host, address.port)
        except (OSError, TimeoutError) as error:
            raise ConnectionLost(f"no answer from {address}: {error}") from error
        try:
            codec = await _handshake(reader, writer, self._secret, is_connector=True)
        except BaseException:
            writer.close()
            raise
        return TcpConnection(reader, writer, codec)

    async def listen(self, host: str, handler: Handler) -> TcpListener:
        listener = TcpListener(self._secret, handler)
        await listener.start(host)
        return listener


async def _handshake(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, is_connector: bool
) -> FrameCodec:
    """Exchange hellos. Raises ConnectionLost (gone, late) or ProtocolError (another protocol, or version of it)."""
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = draw_hello(bytes.fromhex(PROTOCOL))
    writer.write(mine)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            theirs = await reader.readexactly(HELLO_BYTES)
    except (*_STREAM_ERRORS, TimeoutError) as error:
        raise ConnectionLost(f"the peer did not complete the handshake ({error})") from error
    hellos = (mine, theirs) if is_connector else (theirs, mine)
    return FrameCodec(secret, *hellos, is_connector=is_connector)
