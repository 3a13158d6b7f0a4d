"""Frames on a byte stream: length, MAC, payload. Nothing here does I/O.

    u32 length of payload | 16 bytes of HMAC-SHA256(session key, direction | counter | payload) | payload

Each side opens with a hello of magic, version and nonce. The session key comes from the cluster's secret and both
hellos, so a recorded stream can't be replayed; the counter refuses dropped, repeated or reordered frames. Fields travel
by position, and two versions would misread each other: the version is that of all messages together.
The length is checked against a cap before anything is allocated.
"""

import hashlib
import hmac
import secrets
import struct

from twostroke.protocol.errors import ProtocolError

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
