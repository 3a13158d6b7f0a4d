"""Frames that no honest peer sends: each is refused, or is a message after all; nothing crashes or swells."""

import multiprocessing
import struct
import tracemalloc
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.protocol.frame_fuzzer import CORPUS, DAMAGED, HOSTILE, KINDS, STRANGE_HELLO, fuzz
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import KVWelcome, Welcome, decode_message, encode_message
from twostroke.protocol.requests import Peer

FRAMES = 250_000  # 15,000 of each kind
PROCESSES = 2
SHARDS = 8
MIB = 1024 * 1024


def test_fuzzed_frames_crash_nothing_and_memory_stays_bounded():
    outcomes: Counter[tuple[str, str]] = Counter()
    accepted: Counter[str] = Counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        for tally in pool.map(fuzz, range(SHARDS), [FRAMES // SHARDS] * SHARDS):
            outcomes += tally.outcomes
            accepted += tally.accepted
            assert tally.peak_growth_bytes < 32 * MIB
    of_kind = {kind: Counter({out: n for (k, out), n in outcomes.items() if k == kind}) for kind in KINDS}
    assert outcomes.total() == FRAMES
    for kind in KINDS:
        assert of_kind[kind].total() > FRAMES / len(KINDS) * 0.9, f"{kind} was hardly tried"
        assert of_kind[kind]["refused"] + of_kind[kind]["lost"] > 250, f"{kind} is no danger as it is made"
    for kind in DAMAGED:
        assert of_kind[kind]["accepted"] == 0, "only a right MAC lets a frame pass"
    for kind in ("payload: cut short", "payload: bytes behind it"):
        assert of_kind[kind]["accepted"] == 0, "a message is one whole payload"
    # Flipped bits in a string or a number leave a message that the decoder can't find fault with: those pass, and the
    # fuzzer is seen to reach behind the first byte.
    assert of_kind["payload: bits flipped"]["accepted"] > 250
    assert sum(of_kind[kind]["accepted"] for kind in HOSTILE) > 2500
    assert of_kind["frame: cut short"]["lost"] > 2500
    assert of_kind[STRANGE_HELLO]["refused"] > 2500
    assert set(accepted) == {type(message).__name__ for message in CORPUS}


def array_of(count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count)


LARGEST = 1024 * 1024
LAYOUT = KVLayout("m", "float32", 2, 2, 64, 16)
WELCOME = Welcome(Peer("d", 1), KVWelcome(LAYOUT, 0, "tcp", "why", (), {}))  # ends with its link parameters, none
CHUNK_UP_TO_RUNS = b"\x95\xa5Chunk\xc4\x10" + bytes(16) + b"\x00"
SWOLLEN = {
    "an array of 2**32 - 1": array_of(2**32 - 1),
    "runs: 2**32 - 1, none follows": CHUNK_UP_TO_RUNS + array_of(2**32 - 1),
    "runs: as many as there are bytes, all wrong": CHUNK_UP_TO_RUNS + array_of(LARGEST) + bytes(LARGEST),
    "runs: whole ones, and one that is cut": CHUNK_UP_TO_RUNS
    + array_of(LARGEST // 4)
    + b"\x93\0\0\0" * (LARGEST // 4 - 1),
    "events: as many as there are bytes": b"\x92\xaaTokenFrame" + array_of(LARGEST) + b"\x90" * LARGEST,
    "deeper than any stack": b"\x92\xaaTokenFrame" + b"\x91" * LARGEST,
    "a string of 4 GiB": b"\x92\xa6Cancel\xdb\xff\xff\xff\xff",
    "link parameters without end": encode_message(WELCOME)[:-1] + b"\xdf\xff\xff\xff\xff" + b"\xa1k\x01" * 1000,
}


@pytest.mark.parametrize("what", SWOLLEN)
def test_a_payload_that_announces_more_than_it_has_costs_no_more_than_its_length_allows(what: str):
    payload = SWOLLEN[what]
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode_message(payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 1024 + 32 * len(payload)
