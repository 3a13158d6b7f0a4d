"""Seals of chunks."""

import msgspec
import pytest

from twostroke.kvtransfer.link import DIGEST_BYTES, chunk_seal
from twostroke.protocol.messages import Chunk, Run
from twostroke.protocol.requests import Peer

CHUNK = Chunk(b"t" * 16, 3, 0, 1, (Run(2, 0, 4), Run(3, 0, 4)), 4096)
SOURCE, TARGET = Peer("prefill-0", 2**63 + 5), Peer("decode-0", 9)


def test_a_seal_is_a_seed_of_64_bits_that_both_sides_come_to() -> None:
    seal = chunk_seal(CHUNK, SOURCE, TARGET)
    assert 0 <= seal < 2**64
    assert seal == chunk_seal(msgspec.structs.replace(CHUNK), SOURCE, TARGET)
    assert DIGEST_BYTES == 16


@pytest.mark.parametrize(
    "other",
    [
        {"transfer_id": b"u" * 16},
        {"sequence": 4},
        {"attempt": 1},
        {"link": 0},
        {"runs": (Run(3, 0, 4), Run(2, 0, 4))},
        {"runs": (Run(2, 0, 4), Run(3, 1, 4))},
        {"runs": (Run(2, 0, 4), Run(3, 0, 5))},
        {"num_bytes": 4097},
    ],
)
def test_a_seal_is_of_everything_that_a_chunks_message_says(other: dict[str, object]) -> None:
    changed = msgspec.structs.replace(CHUNK, **other)
    assert chunk_seal(changed, SOURCE, TARGET) != chunk_seal(CHUNK, SOURCE, TARGET)


@pytest.mark.parametrize(
    "peers", [(SOURCE, Peer("decode-0", 10)), (Peer("prefill-0", 1), TARGET), (TARGET, SOURCE)], ids=str
)
def test_a_seal_is_of_both_epochs(peers: tuple[Peer, Peer]) -> None:
    assert chunk_seal(CHUNK, *peers) != chunk_seal(CHUNK, SOURCE, TARGET)
