"""Frames as a broken or hostile peer may send them, and what the live receiving path makes of them.

A case is one connection: the peer's valid first frame in some of them, then one frame that is wrong. Half of the kinds
damage the bytes of a sealed frame, as a network would; a MAC must stop them all. The other half put a right MAC around
a payload that no honest peer would make: only the decoder stands between it and the process.
"""

import asyncio
import random
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec

from twostroke.protocol import messages
from twostroke.protocol.errors import ConnectionLost, ProtocolError
from twostroke.protocol.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameCodec
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import Message, decode_message, encode_message
from twostroke.protocol.network import TcpConnection
from twostroke.protocol.requests import Address, Peer, SampledToken, Ticket, TokenEvent
from twostroke.protocol.stats import TransferStats, WorkerStats
from twostroke.protocol.verdicts import Verdict

SECRET = b"the fuzzer's secret"

_SOURCE, _TARGET = Peer("prefill-1", 2**62), Peer("decode-1", 7)
_ID = bytes(range(200, 216))
_TICKET = Ticket(_ID, "request", _SOURCE, _TARGET, (Address("127.0.0.1", 65535), Address("::1", 1)), 2, b"m" * 16)
_LAYOUT = KVLayout("0123abcd", "bfloat16", 32, 8, 128, 16, 2)
_PARAMS: dict[str, str | int] = {"host": "127.0.0.1", "port": 65535, "token": "ff" * 16}
_TOKEN = SampledToken(151935, -0.5, ((42, -0.5), (7, -1.5)))
_REACH = messages.Reach(("shm", "tcp"), "machine", "cpu")
_SEQUENCES = (
    messages.RankSequence((7, 9), 70_000, (1, 2, 3), True),
    messages.RankSequence(tuple(range(90)), 0, (5,), False),
)

CORPUS: tuple[Message, ...] = (
    messages.Hello(_SOURCE, _TARGET),
    messages.Hello(_SOURCE, _TARGET, messages.KVHello(_LAYOUT, 1, "int8", _REACH)),
    messages.Welcome(_TARGET),
    messages.Welcome(_TARGET, messages.KVWelcome(_LAYOUT, 0, "tcp", "it joins any", ("shm: elsewhere",), _PARAMS)),
    messages.Refuse("the layouts differ: größer"),
    messages.Ping(),
    messages.TokenFrame((TokenEvent("r", 3, (_TOKEN,), "stop"), TokenEvent("s", 0, (SampledToken(5),), None, "gone"))),
    messages.TokenFrame(tuple(TokenEvent(f"request-{i}", i, (SampledToken(i),)) for i in range(64))),
    messages.StatsFrame(WorkerStats(num_running=2, step_seconds=0.25, transfer_bytes=2**40)),
    messages.KVNotSent("r"),
    messages.BlocksHeld(b"8 bytes.another.", True, False, 3),
    messages.BlocksChanged(4, b"8 bytes.", b""),
    messages.ReportBlocks(),
    messages.Cancel("r"),
    messages.Drain(),
    messages.PrefillFailed("r"),
    messages.SendPrefix(_TICKET, tuple(range(0, 60_000, 600)), b"salt"),
    messages.Convicted((Verdict(_ID, 599.5), Verdict(_ID[::-1], 0.25))),
    messages.Offer(_TICKET, 17),
    messages.Chunk(_ID, 0, (messages.Run(0, 1, 2), messages.Run(31, 0, 70_000)), 2**22),
    messages.Chunk(_ID, 2**20, tuple(messages.Run(layer, 0, 300) for layer in range(32)), 2**33),
    messages.Commit(_ID, 9, _TOKEN),
    messages.Commit(_ID, 0, None),
    messages.Grant(_ID, 4096),
    messages.Awaited(_ID),
    messages.Verified(_ID),
    messages.Abort(_ID, "reason"),
    messages.RankHello(_SOURCE, 3),
    messages.RankLoaded(Address("127.0.0.1", 65535)),
    messages.RankFailed("no memory"),
    messages.RankStep(_SEQUENCES, True),
    messages.RankStep(
        (), False, (messages.RankCopy(True, (70_000, 5), (0, 300)), messages.RankCopy(False, (1,), (2,)))
    ),
    messages.StepEnded(),
    messages.OpenTransfer(2**33, _TICKET, 17, (4, 5), 16),
    messages.TransferReady(3, 17),
    messages.CommitTransfer(3, _TOKEN),
    messages.DeclineTransfer(_TICKET, "nothing is cached"),
    messages.ExpectTransfer(4, _TICKET, (6, 7), 20, 16),
    messages.KeepTransfer(_TICKET),
    messages.RefuseTransfer(_TICKET),
    messages.AbortTransfer(4, "reason"),
    messages.TransferEnded(4, None, _TOKEN, TransferStats(bytes=2**40, links_lost=1)),
    messages.TransferEnded(3, "the peer is gone", None, TransferStats()),
)
_PAYLOADS = tuple(encode_message(message) for message in CORPUS)
_TAGS = tuple(sorted({type(message).__name__ for message in CORPUS}))
_HELLOS = b"2STROKE1" + bytes(16), b"2STROKE1" + b"\xff" * 16

# msgpack's ways to announce more than follows: arrays, maps, strings, bytes and extensions of 32 bits.
_COUNT_32 = b"\xdd\xdf\xdb\xc6\xc9"


@dataclass
class Tally:
    """What became of a shard's frames."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind of frame, what came of it)
    accepted: Counter[str] = field(default_factory=Counter)  # message types that hostile payloads passed as
    peak_growth_bytes: int = 0  # of resident memory, above what a few thousand frames had already taken


# --- payloads of a peer that knows the secret ---


def _flip(draw: random.Random, payload: bytes) -> bytes:
    damaged = bytearray(payload)
    for _ in range(1 + int(draw.random() * 4)):
        damaged[int(draw.random() * len(damaged))] ^= 1 << int(draw.random() * 8)
    return bytes(damaged)


def _truncate(draw: random.Random, payload: bytes) -> bytes:
    return payload[: int(draw.random() * len(payload))]


def _append(draw: random.Random, payload: bytes) -> bytes:
    return payload + draw.randbytes(1 + int(draw.random() * 8))


def _splice(draw: random.Random, payload: bytes) -> bytes:
    other = draw.choice(_PAYLOADS)
    return payload[: int(draw.random() * len(payload))] + other[int(draw.random() * len(other)) :]


def _repeat_a_part(draw: random.Random, payload: bytes) -> bytes:
    start = int(draw.random() * len(payload))
    part = payload[start : start + 1 + int(draw.random() * 16)]
    return payload[:start] + part * (2 + int(draw.random() * 50)) + payload[start:]


def _announce(draw: random.Random, payload: bytes) -> bytes:
    """A huge count somewhere, of elements or bytes that do not follow."""
    at = int(draw.random() * len(payload))
    count = draw.choice((0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 0x01000000, draw.getrandbits(32)))
    return payload[:at] + bytes((draw.choice(_COUNT_32),)) + struct.pack(">I", count) + payload[at:]


def _nest(draw: random.Random, payload: bytes) -> bytes:
    """Arrays in arrays, or maps in maps, deeper than any stack, in the place of some part."""
    at = int(draw.random() * len(payload))
    opening = draw.choice((b"\x91", b"\x92\xc0", b"\x81\xa1k", b"\xdc\x00\x01", b"\x81\x80"))
    return payload[:at] + opening * (10 ** (1 + int(draw.random() * 3.5)))


def _any_bytes(draw: random.Random, payload: bytes) -> bytes:
    return draw.randbytes(int(draw.random() * 200))


def _invent(draw: random.Random, payload: bytes) -> bytes:
    """A right tag with fields of any type and number."""
    fields = [_any_value(draw, 0) for _ in range(int(draw.random() * 9))]
    return msgspec.msgpack.encode([draw.choice(_TAGS), *fields])


def _swap_fields(draw: random.Random, payload: bytes) -> bytes:
    """A message, one field of which is another value or another message's."""
    message = msgspec.msgpack.decode(payload)
    other = msgspec.msgpack.decode(draw.choice(_PAYLOADS))
    if len(message) > 1:
        at = 1 + int(draw.random() * (len(message) - 1))
        message[at] = _any_value(draw, 0) if draw.random() < 0.5 else other[int(draw.random() * len(other))]
    else:
        message.append(other)
    return msgspec.msgpack.encode(message)


def _any_value(draw: random.Random, depth: int) -> Any:
    kind = int(draw.random() * (10 if depth < 3 else 8))
    match kind:
        case 0:
            return None
        case 1:
            return draw.random() < 0.5
        case 2:
            return draw.choice((0, -1, 2**63 - 1, 2**64 - 1, -(2**63), draw.getrandbits(20)))
        case 3:
            return draw.choice((0.0, -0.5, float("nan"), float("inf"), 1e308))
        case 4:
            return draw.choice(("", "tcp", "stop", "raw", "\x00", "ü" * 40))
        case 5 | 6:
            return _ID
        case 7:
            return draw.randbytes(int(draw.random() * 20))
        case 8:
            return {_any_value(draw, 3) or 0: _any_value(draw, depth + 1) for _ in range(int(draw.random() * 3))}
    return [_any_value(draw, depth + 1) for _ in range(int(draw.random() * 5))]


HOSTILE: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "payload: bits flipped": _flip,
    "payload: cut short": _truncate,
    "payload: bytes behind it": _append,
    "payload: spliced": _splice,
    "payload: a part repeated": _repeat_a_part,
    "payload: a huge count": _announce,
    "payload: nested deep": _nest,
    "payload: any bytes": _any_bytes,
    "payload: invented fields": _invent,
    "payload: swapped fields": _swap_fields,
}


# --- sealed frames, damaged on their way ---


def _flip_frame(draw: random.Random, frame: bytes, later: bytes) -> bytes:
    return _flip(draw, frame)


def _truncate_frame(draw: random.Random, frame: bytes, later: bytes) -> bytes:
    return _truncate(draw, frame)


def _splice_frame(draw: random.Random, frame: bytes, later: bytes) -> bytes:
    """The start of one frame and the rest of another."""
    return frame[: 1 + int(draw.random() * (len(frame) - 1))] + later[int(draw.random() * len(later)) :]


def _lie_about_the_length(draw: random.Random, frame: bytes, later: bytes) -> bytes:
    actual = len(frame) - HEADER_BYTES
    length = draw.choice((0, actual - 1, actual + 1, MAX_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES + 1, 0xFFFFFFFF))
    if length == actual or draw.random() < 0.2:
        length = draw.getrandbits(32)
    return struct.pack("<I", length) + frame[4:] + later


def _come_out_of_turn(draw: random.Random, frame: bytes, later: bytes) -> bytes:
    """A later frame first: one was lost, or two changed places."""
    return later + frame


def _come_from_elsewhere(draw: random.Random, frame: bytes, later: bytes) -> bytes:
    """A frame of another session."""
    stranger = FrameCodec(SECRET, _HELLOS[1], _HELLOS[0], is_connector=True)
    return stranger.seal(frame[HEADER_BYTES:])


DAMAGED: dict[str, Callable[[random.Random, bytes, bytes], bytes]] = {
    "frame: bits flipped": _flip_frame,
    "frame: cut short": _truncate_frame,
    "frame: spliced": _splice_frame,
    "frame: wrong length": _lie_about_the_length,
    "frame: out of turn": _come_out_of_turn,
    "frame: another session's": _come_from_elsewhere,
}

STRANGE_HELLO = "hello: damaged"
KINDS = (*HOSTILE, *DAMAGED, STRANGE_HELLO)


# --- the receiving side ---


def fuzz(seed: int, count: int) -> Tally:
    """Run `count` cases. Raises whatever the receiving path raises that it should not."""
    draw, tally = random.Random(seed), Tally()
    loop = asyncio.new_event_loop()  # stream readers want one; nothing runs on it
    try:
        _run_cases(draw, loop, min(count, 2000), tally)
        before = _peak_resident_bytes()
        _run_cases(draw, loop, count - min(count, 2000), tally)
        tally.peak_growth_bytes = _peak_resident_bytes() - before
    finally:
        loop.close()
    return tally


def _run_cases(draw: random.Random, loop: asyncio.AbstractEventLoop, count: int, tally: Tally) -> None:
    for _ in range(count):
        kind = KINDS[int(draw.random() * len(KINDS))]
        payload = _PAYLOADS[int(draw.random() * len(_PAYLOADS))]
        try:
            outcome, message = _one_case(draw, loop, kind, payload)
        except Exception as error:
            error.add_note(f"{kind}, made from {decode_message(payload)}")
            raise
        tally.outcomes[kind, outcome] += 1
        if message is not None:
            tally.accepted[type(message).__name__] += 1


def _one_case(
    draw: random.Random, loop: asyncio.AbstractEventLoop, kind: str, payload: bytes
) -> tuple[str, Message | None]:
    if kind == STRANGE_HELLO:
        try:
            FrameCodec(
                SECRET, draw.choice((_flip, _truncate, _append))(draw, _HELLOS[0]), _HELLOS[1], is_connector=False
            )
        except ProtocolError:
            return "refused", None
        return "other nonce", None
    peer = FrameCodec(SECRET, *_HELLOS, is_connector=True)
    reader = asyncio.StreamReader(loop=loop)
    # Only `close` and `send` need a writer.
    connection = TcpConnection(
        reader, cast(asyncio.StreamWriter, None), FrameCodec(SECRET, *_HELLOS, is_connector=False)
    )
    if draw.random() < 0.25:
        reader.feed_data(peer.seal(_PAYLOADS[0]))
        _receive(connection)
    if kind in HOSTILE:
        sent = None
        hostile = HOSTILE[kind](draw, payload)
        reader.feed_data(peer.seal(hostile))
        is_damaged = hostile != payload
    else:
        sent = peer.seal(payload)
        wire = DAMAGED[kind](draw, sent, peer.seal(_PAYLOADS[0]))
        is_damaged = not wire.startswith(sent)
        reader.feed_data(wire)
    reader.feed_eof()
    try:
        message = _receive(connection)
    except ProtocolError:
        return "refused", None
    except ConnectionLost:
        return "lost", None
    if not is_damaged:
        return "unchanged", None
    if sent is not None:
        raise AssertionError(f"a damaged frame passed as {message}")
    again = encode_message(message)
    if encode_message(decode_message(again)) != again:
        raise AssertionError(f"{message} does not survive its own encoding")
    return "accepted", message


def _receive(connection: TcpConnection) -> Message:
    """What `receive` returns or raises; everything has been fed, so it never waits."""
    try:
        connection.receive().send(None)
    except StopIteration as done:
        return cast(Message, done.value)
    raise AssertionError("the connection waits for bytes after the stream's end")


def _peak_resident_bytes() -> int:
    """The most memory that this process ever held (getrusage would begin with what its parent held)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
