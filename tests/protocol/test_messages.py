import contextlib
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.frame_fuzzer import CORPUS
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import (
    Abort,
    AskTurn,
    Awaited,
    BlocksChanged,
    BlocksHeld,
    Cancel,
    Chunk,
    Commit,
    Convicted,
    Drain,
    EndTurn,
    GiveTurn,
    Grant,
    Hello,
    KVHello,
    KVNotSent,
    KVWelcome,
    Message,
    Offer,
    Ping,
    PrefillFailed,
    Reach,
    Refuse,
    ReportBlocks,
    Run,
    SendPrefix,
    StatsFrame,
    TokenFrame,
    Verified,
    Welcome,
    decode_message,
    encode_message,
)
from twostroke.protocol.rank_messages import RankMessage
from twostroke.protocol.requests import Address, Peer, SampledToken, Ticket, TokenEvent
from twostroke.protocol.stats import WorkerStats
from twostroke.protocol.verdicts import MOST_TOLD, Verdict

P, D = Peer("prefill-1", 2**62), Peer("decode-1", 7)
TICKET = Ticket(b"t" * 16, "request", P, D, (Address("127.0.0.1", 65535), Address("::1", 1)), 2, b"m" * 16)
LAYOUT = KVLayout("digest", "bfloat16", 2, 4, 8, 16, 2)
LINK: dict[str, str | int] = {"host": "127.0.0.1", "port": 1, "token": "00ff"}
EXAMPLES: list[Message] = [
    Hello(P, D, KVHello(LAYOUT, 1, "int8", Reach(("shm", "tcp"), "machine", "cpu"))),
    Welcome(D, KVWelcome(LAYOUT, 0, "tcp", "why", ("missing",), LINK)),
    Refuse("reason"),
    Ping(),
    TokenFrame((TokenEvent("r", 3, (SampledToken(5, -0.5, ((5, -0.5), (6, -1.5))),), "stop"),)),
    StatsFrame(WorkerStats(num_running=2, step_seconds=0.25)),
    KVNotSent("r"),
    BlocksHeld(b"8 bytes.another.", True, False, 3),
    BlocksChanged(4, b"8 bytes.", b""),
    ReportBlocks(),
    Cancel("r"),
    Drain(),
    PrefillFailed("r"),
    Offer(TICKET, 17),
    SendPrefix(TICKET, (1, 2, 3), b"salt"),
    Convicted((Verdict(b"f" * 16, 599.5),)),
    AskTurn(3),
    GiveTurn(3),
    EndTurn(),
    Chunk(b"t" * 16, 0, (Run(0, 1, 2), Run(1, 1, 2)), 4),
    Commit(b"t" * 16, 9, SampledToken(5)),
    Grant(b"t" * 16, 4),
    Awaited(b"t" * 16),
    Verified(b"t" * 16),
    Abort(b"t" * 16, "reason"),
    *(message for message in CORPUS if isinstance(message, get_args(RankMessage))),
]


def test_every_kind_of_message_has_an_example_here():
    assert {type(example) for example in EXAMPLES} == set(get_args(Message))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_decodes_to_itself(message: Message):
    assert decode_message(encode_message(message)) == message


def test_a_token_channel_is_greeted_without_words_about_kv():
    for message in (Hello(P, D), Welcome(D)):
        assert decode_message(encode_message(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_truncated_message_is_refused(message: Message):
    payload = encode_message(message)
    for end in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode_message(payload[:end])


@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_a_protocol_error(payload: bytes):
    with contextlib.suppress(ProtocolError):
        decode_message(payload)


@pytest.mark.parametrize(
    "payload",
    [
        ["Unknown", 1],
        ["Cancel", 1],
        ["Cancel"],
        ["Cancel", "r", "more"],
        {"type": "Cancel", "request_id": "r"},
        ["Chunk", b"t", 0, 1, 2, [[0, 1, 2]], 4.5],
        ["Chunk", b"t", 0, 1, 2, [[0, 1]], 4],
        ["Chunk", b"t", 0, 1, 2, [[0, 1, 2, 3]], "4"],
        ["Convicted", [[b"too short", 1.0]]],
        ["Convicted", [[b"f" * 17, 1.0]]],
        ["Convicted", [[b"f" * 16, 0.0]]],
        ["Convicted", [[b"f" * 16, float("nan")]]],
        ["Convicted", [[b"f" * 16, 1e9]]],
        ["Convicted", [[b"f" * 16, 1.0]] * (MOST_TOLD + 1)],
    ],
)
def test_wrong_names_types_and_counts_are_refused(payload: object):
    with pytest.raises(ProtocolError):
        decode_message(msgspec.msgpack.encode(payload))
