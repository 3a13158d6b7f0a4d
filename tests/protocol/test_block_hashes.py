import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.protocol.blocks import (
    HASH_BYTES,
    NAME_BYTES,
    chain_hashes,
    next_hash,
    pack_names,
    root_hash,
    short_name,
    unpack_names,
)
from twostroke.protocol.errors import ProtocolError

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(tokens, st.integers(1, 8))
def test_only_full_blocks_have_a_hash(token_ids: list[int], block_size: int):
    hashes = chain_hashes(token_ids, block_size, b"")
    assert len(hashes) == len(token_ids) // block_size
    assert all(len(h) == HASH_BYTES for h in hashes)


@given(tokens, tokens, st.integers(1, 8))
def test_hashes_agree_exactly_as_far_as_the_tokens_do(left: list[int], right: list[int], block_size: int):
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    left_hashes, right_hashes = chain_hashes(left, block_size, b""), chain_hashes(right, block_size, b"")
    shared = common // block_size
    assert left_hashes[:shared] == right_hashes[:shared]
    assert not set(left_hashes[shared:]) & set(right_hashes[shared:])


def test_the_chain_can_be_grown_block_by_block():
    first = next_hash(root_hash(b"salt"), [1, 2])
    assert chain_hashes([1, 2, 3, 4], 2, b"salt") == [first, next_hash(first, [3, 4])]


def test_another_salt_names_the_same_block_differently():
    assert chain_hashes([1, 2], 2, b"a") != chain_hashes([1, 2], 2, b"b")


@given(st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)))
def test_names_travel_as_the_beginnings_of_the_hashes(hashes: list[bytes]):
    names = [short_name(block_hash) for block_hash in hashes]
    packed = pack_names(names)
    assert packed == b"".join(block_hash[:NAME_BYTES] for block_hash in hashes)
    assert list(unpack_names(packed)) == names


def test_bytes_that_end_within_a_name_are_refused():
    with pytest.raises(ProtocolError, match="9 bytes"):
        unpack_names(bytes(9))
