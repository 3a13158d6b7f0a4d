"""Sealed frames: what opens, and what is refused."""

import struct

import pytest

from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.network import (
    HEADER_BYTES,
    HELLO_BYTES,
    MAX_FIRST_PAYLOAD_BYTES,
    MAX_PAYLOAD_BYTES,
    FrameCodec,
    draw_hello,
)

VERSION = b"version1"


def make_pair(connector_secret: bytes = b"s", listener_secret: bytes = b"s") -> tuple[FrameCodec, FrameCodec]:
    hellos = draw_hello(VERSION), draw_hello(VERSION)
    return (
        FrameCodec(connector_secret, *hellos, is_connector=True),
        FrameCodec(listener_secret, *hellos, is_connector=False),
    )


def split(frame: bytes) -> tuple[bytes, bytes]:
    return frame[:HEADER_BYTES], frame[HEADER_BYTES:]


def test_a_sealed_payload_opens_on_the_other_side_both_ways_and_tells_its_length():
    connector, listener = make_pair()
    for payload in (b"", b"one", b"x" * 100_000):
        for sender, receiver in ((connector, listener), (listener, connector)):
            header, sealed = split(sender.seal(payload))
            assert receiver.payload_bytes(header) == len(payload)
            assert receiver.open(header, sealed) == payload


def test_another_clusters_secret_is_refused():
    connector, listener = make_pair(listener_secret=b"other")
    with pytest.raises(ProtocolError, match="MAC"):
        listener.open(*split(connector.seal(b"hello")))


@pytest.mark.parametrize("position", [4, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 4])
def test_a_flipped_bit_anywhere_is_refused(position: int):
    connector, listener = make_pair()
    frame = bytearray(connector.seal(b"hello"))
    frame[position] ^= 1
    with pytest.raises(ProtocolError):
        listener.open(*split(bytes(frame)))


def test_a_repeated_frame_is_refused():
    connector, listener = make_pair()
    frame = connector.seal(b"hello")
    listener.open(*split(frame))
    with pytest.raises(ProtocolError):
        listener.open(*split(frame))


def test_a_dropped_frame_is_noticed_at_the_next():
    connector, listener = make_pair()
    connector.seal(b"lost")
    with pytest.raises(ProtocolError):
        listener.open(*split(connector.seal(b"next")))


def test_a_frame_reflected_to_its_sender_is_refused():
    connector, _ = make_pair()
    with pytest.raises(ProtocolError):
        connector.open(*split(connector.seal(b"hello")))


def test_a_recorded_session_does_not_open_in_another():
    frame = make_pair()[0].seal(b"hello")
    with pytest.raises(ProtocolError):
        make_pair()[1].open(*split(frame))


def header_of(length: int) -> bytes:
    return struct.pack("<I", length) + bytes(HEADER_BYTES - 4)


def test_a_length_over_the_cap_is_refused_before_anything_is_read():
    connector, listener = make_pair()
    listener.open(*split(connector.seal(b"hello")))
    assert listener.payload_bytes(header_of(MAX_PAYLOAD_BYTES)) == MAX_PAYLOAD_BYTES
    with pytest.raises(ProtocolError, match="cap"):
        listener.payload_bytes(header_of(MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(ValueError, match="cap"):
        connector.seal(bytes(MAX_PAYLOAD_BYTES + 1))


def test_a_stranger_can_make_nobody_wait_for_a_large_frame():
    _, listener = make_pair()
    with pytest.raises(ProtocolError, match="cap"):
        listener.payload_bytes(header_of(MAX_FIRST_PAYLOAD_BYTES + 1))


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1\r\n\r\n      ", bytes(HELLO_BYTES)])
def test_a_stranger_that_speaks_another_protocol_is_refused(hello: bytes):
    with pytest.raises(ProtocolError):
        FrameCodec(b"s", hello, draw_hello(VERSION), is_connector=False)


@pytest.mark.parametrize("is_connector", [True, False])
def test_a_peer_of_another_version_is_refused_with_both_versions(is_connector: bool):
    """Fields travel by position: a frame that opens is no proof that it means the same on both sides."""
    hellos = [draw_hello(VERSION), draw_hello(bytes(8))]
    with pytest.raises(ProtocolError, match=f"its messages are {bytes(8).hex()}, ours are {VERSION.hex()}"):
        FrameCodec(b"s", *hellos[:: 1 if is_connector else -1], is_connector=is_connector)
