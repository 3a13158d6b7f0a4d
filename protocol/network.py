"""The network as a constructor argument: live TCP with authenticated frames, or memory on virtual time (simulator).

    u32 length of payload | 16 bytes of HMAC-SHA256(session key, direction | counter | payload) | payload

Each side opens with a hello of magic, version and nonce. The session key comes from the cluster's secret and both
hellos, so a recorded stream can't be replayed; the counter refuses dropped, repeated or reordered frames. Fields travel
by position, and two versions would misread each other: the version is that of all messages together. The length is
checked against a cap before anything is allocated.
"""

import asyncio
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Protocol

from twostroke.protocol.errors import ConnectionLost, ProtocolError
from twostroke.protocol.messages import PROTOCOL, Message, decode_message, encode_message
from twostroke.protocol.requests import Address

MAGIC = b"2STROKE2"
VERSION_BYTES = 8
NONCE_BYTES = 16
HELLO_BYTES = len(MAGIC) + VERSION_BYTES + NONCE_BYTES
MAC_BYTES = 16
HEADER_BYTES = 4 + MAC_BYTES
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
MAX_FIRST_PAYLOAD_BYTES = 16 * 1024  # until a right MAC has shown that the peer is no stranger; hellos are far smaller

_LENGTH = struct.Struct("<I")
_COUNTER = struct.Struct("<Q")


def draw_hello(version: bytes) -> bytes:
    """The first bytes of each side, whose messages are of this version: VERSION_BYTES."""
    return MAGIC + version + secrets.token_bytes(NONCE_BYTES)


def _version_of(hello: bytes) -> str:
    return hello[len(MAGIC) : len(MAGIC) + VERSION_BYTES].hex()


class FrameCodec:
    """Seals and opens the frames of one side of one connection."""

    def __init__(self, secret: bytes, connector_hello: bytes, listener_hello: bytes, *, is_connector: bool):
        """Raises ProtocolError where the peer's hello is none, or its messages are of another version."""
        for hello in (connector_hello, listener_hello):
            if len(hello) != HELLO_BYTES or not hello.startswith(MAGIC):
                raise ProtocolError("the peer does not speak this protocol")
        ours, theirs = map(_version_of, (connector_hello, listener_hello)[:: 1 if is_connector else -1])
        if ours != theirs:
            raise ProtocolError(f"the peer runs another version: its messages are {theirs}, ours are {ours}")
        self._key = hmac.digest(secret, b"session" + connector_hello + listener_hello, hashlib.sha256)
        self._sealing, self._opening = (b"C", b"L") if is_connector else (b"L", b"C")
        self._sealed = 0
        self._opened = 0

    def seal(self, payload: bytes) -> bytes:
        """The frame around `payload`. Raises ValueError for one over the cap."""
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise ValueError(f"a payload of {len(payload)} bytes is over the cap of {MAX_PAYLOAD_BYTES}")
        mac = self._mac(self._sealing, self._sealed, payload)
        self._sealed += 1
        return _LENGTH.pack(len(payload)) + mac + payload

    def payload_bytes(self, header: bytes) -> int:
        """The payload's length as the next frame's header tells it. Raises ProtocolError for one over the cap."""
        (length,) = _LENGTH.unpack_from(header)
        cap = MAX_PAYLOAD_BYTES if self._opened else MAX_FIRST_PAYLOAD_BYTES
        if length > cap:
            raise ProtocolError(f"a frame of {length} bytes is over the cap of {cap}")
        return int(length)

    def open(self, header: bytes, payload: bytes) -> bytes:
        """`payload`, once its MAC is found right. Raises ProtocolError otherwise."""
        expected = self._mac(self._opening, self._opened, payload)
        if not hmac.compare_digest(expected, header[4:HEADER_BYTES]):
            raise ProtocolError("a frame's MAC is wrong: another cluster's secret, or a damaged stream")
        self._opened += 1
        return payload

    def _mac(self, direction: bytes, counter: int, payload: bytes) -> bytes:
        return hmac.digest(self._key, direction + _COUNTER.pack(counter) + payload, hashlib.sha256)[:MAC_BYTES]


class Connection(Protocol):
    """An ordered, authenticated stream of messages. A broken one raises ConnectionLost from then on."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes that `send` has accepted and the peer has not yet taken."""

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
        """Address where peers can reach it, with the port that is bound."""

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
