"""Every message survives its encoding, and nothing else is taken for one."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.frame_fuzzer import CORPUS
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.messages import (
    Message,
    RankCopy,
    RankSequence,
    RankStep,
    decode_message,
    encode_message,
    most_step_bytes,
)
from twostroke.protocol.verdicts import MOST_TOLD

LARGE = 2**32 - 1


def test_the_corpus_has_every_kind_of_message():
    assert {type(message) for message in CORPUS} == set(Message.__subclasses__())


@pytest.mark.parametrize("message", CORPUS, ids=lambda message: type(message).__name__)
def test_a_message_decodes_to_itself_and_to_nothing_where_it_is_cut_short(message: Message):
    payload = encode_message(message)
    assert decode_message(payload) == message
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


def test_no_step_is_longer_than_it_can_be():
    blocks = (LARGE,) * 300
    step = RankStep(
        tuple(RankSequence((LARGE,) * 20, LARGE, blocks, True) for _ in range(50)),
        True,
        tuple(RankCopy(False, blocks, blocks) for _ in range(50)),
    )
    told = len(encode_message(step))
    most = most_step_bytes(max_tokens=20 * 50, max_sequences=50, blocks_of_one=300, host_blocks=300 * 50)
    assert told <= most < 1.05 * told
