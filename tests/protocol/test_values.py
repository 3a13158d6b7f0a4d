"""Values that the parts exchange: names of blocks, layouts of KV, requests, tickets."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.protocol.block_hash import (
    HASH_BYTES,
    NAME_BYTES,
    chain_hashes,
    next_hash,
    pack_names,
    root_hash,
    short_name,
    unpack_names,
)
from twostroke.protocol.errors import EpochMismatch, ProtocolError, TicketRefused
from twostroke.protocol.kv_layout import FP8, KVLayout, RankCut, incompatibility
from twostroke.protocol.requests import (
    Address,
    GenerateRequest,
    Peer,
    SamplingParams,
    finish_reason,
    forbidden_tokens,
    mint_ticket,
    verify_ticket,
)

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@settings(deadline=None)
@given(tokens, st.integers(1, 8))
def test_only_full_blocks_have_a_hash(token_ids: list[int], block_size: int):
    hashes = chain_hashes(token_ids, block_size, b"")
    assert len(hashes) == len(token_ids) // block_size
    assert all(len(h) == HASH_BYTES for h in hashes)


@settings(deadline=None)
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


@settings(deadline=None)
@given(st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES)))
def test_names_travel_as_the_beginnings_of_the_hashes(hashes: list[bytes]):
    names = [short_name(block_hash) for block_hash in hashes]
    packed = pack_names(names)
    assert packed == b"".join(block_hash[:NAME_BYTES] for block_hash in hashes)
    assert list(unpack_names(packed)) == names


def test_bytes_that_end_within_a_name_are_refused():
    with pytest.raises(ProtocolError, match="9 bytes"):
        unpack_names(bytes(9))


LAYOUT = KVLayout("m", "bfloat16", num_layers=2, num_kv_heads=8, head_dim=64, block_size=16, tp_size=2)


def changed(**fields: Any) -> KVLayout:
    return msgspec.structs.replace(LAYOUT, **fields)


def test_ranks_share_the_heads_in_order_and_hold_copies_where_there_are_more_of_them():
    assert [changed(tp_size=2).first_head(rank) for rank in range(2)] == [0, 4]
    assert changed(tp_size=2).heads_per_rank == 4
    many = changed(num_kv_heads=2, tp_size=8)
    assert many.heads_per_rank == 1
    assert [many.first_head(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_stages_share_the_layers_in_order_and_their_ranks_the_heads():
    staged = changed(num_layers=7, tp_size=2, pp_size=3)
    assert staged.num_ranks == 6
    assert [staged.layers_of(rank) for rank in range(0, 6, 2)] == [range(0, 2), range(2, 4), range(4, 7)]
    assert [staged.layers_of(rank) for rank in range(1, 6, 2)] == [staged.layers_of(rank) for rank in range(0, 6, 2)]
    assert [staged.first_head(rank) for rank in range(6)] == [0, 4] * 3
    alike = changed(num_layers=8, windows=(0, 4) * 4, pp_size=2)
    assert [alike.groups_of(rank).windows for rank in range(4)] == [alike.groups.windows] * 4
    assert {alike.groups_of(rank).num_tensors for rank in range(4)} == {2}


def test_a_block_holds_keys_and_values_of_a_ranks_heads():
    assert LAYOUT.block_bytes == 2 * 4 * 16 * 64 * 2
    assert changed(dtype="float32").block_bytes == 2 * LAYOUT.block_bytes


def test_block_sizes_and_tensor_parallel_sizes_may_differ():
    assert incompatibility(LAYOUT, changed(block_size=64, tp_size=8, pp_size=2)) is None
    assert incompatibility(LAYOUT, LAYOUT) is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model": "n"}, "the model differs: m at the source, n at the target"),
        ({"num_layers": 3}, "the number of layers differs: 2 at the source, 3 at the target"),
        ({"num_kv_heads": 4}, "the number of KV heads differs: 8 at the source, 4 at the target"),
        ({"head_dim": 32}, "the head dimension differs: 64 at the source, 32 at the target"),
        ({"version": 2}, "the layout version differs: 1 at the source, 2 at the target"),
        ({"dtype": "float16"}, "the KV dtype differs: bfloat16 at the source, float16 at the target"),
        ({"tp_size": 3}, "the target's layout can't be: 3 tensor-parallel ranks can't share 8 KV heads evenly"),
        ({"tp_size": 0}, "the target's layout can't be: a size is not positive"),
        ({"pp_size": 0}, "the target's layout can't be: a size is not positive"),
        ({"pp_size": 3}, "the target's layout can't be: 3 pipeline stages can't share 2 layers"),
        ({"block_size": 0}, "the target's layout can't be: a size is not positive"),
    ],
)
def test_what_can_not_go_is_told_with_both_sides_values(fields: dict[str, Any], text: str):
    assert str(incompatibility(LAYOUT, changed(**fields))).startswith(text)


def test_every_stage_has_each_kind_of_layer_in_the_models_proportion():
    uneven = changed(num_layers=4, windows=(0, 0, 4, 4), pp_size=2)
    assert str(incompatibility(uneven, uneven)).startswith(
        "the source's layout can't be: 2 pipeline stages do not each"
    )


def test_dtypes_may_differ_where_the_kv_is_encoded_on_its_way():
    assert incompatibility(LAYOUT, changed(dtype="float16"), "int8") is None
    fault = incompatibility(LAYOUT, changed(dtype="int4"), "int8")
    assert fault == "the target's layout can't be: there is no KV dtype int4"


def test_kv_in_fp8_goes_as_it_is_stored_to_a_cache_in_fp8_alone():
    in_fp8 = changed(dtype=FP8)
    assert 2 * in_fp8.block_bytes == LAYOUT.block_bytes
    assert incompatibility(in_fp8, changed(dtype=FP8, block_size=64)) is None
    differs = "the KV dtype differs: float8_e4m3fn at the source, bfloat16 at the target"
    assert incompatibility(in_fp8, LAYOUT) == incompatibility(in_fp8, LAYOUT, "int8") == differs
    assert str(incompatibility(LAYOUT, in_fp8, "fp8")).startswith("the KV dtype differs: bfloat16 at the source")
    assert str(incompatibility(in_fp8, in_fp8, "int8")).endswith("it is sent as it is stored, not as int8")


def make_request(**changes: object) -> GenerateRequest:
    fields: dict[str, object] = {
        "request_id": "r",
        "router_id": "router",
        "token_ids": (1, 2, 3),
        "num_prompt_tokens": 3,
        "sampling": SamplingParams(),
        "max_tokens": 4,
        "stop_token_ids": (0,),
    }
    return GenerateRequest(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_output_tokens", "token", "expected"),
    [(1, 5, None), (1, 0, "stop"), (3, 5, None), (4, 5, "length"), (4, 0, "stop"), (5, 5, "length")],
)
def test_a_request_ends_at_a_stop_token_or_at_its_length(num_output_tokens: int, token: int, expected: str | None):
    assert finish_reason(make_request(), num_output_tokens, token) == expected


def test_stop_tokens_are_forbidden_until_min_tokens_are_out():
    request = make_request(min_tokens=2)
    assert [forbidden_tokens(request, n) for n in (0, 1, 2)] == [(0,), (0,), ()]


def test_a_stop_token_ends_the_request_from_the_first_draw_that_allows_it():
    request = make_request(min_tokens=2)
    assert [finish_reason(request, n, 0) for n in (1, 2, 3)] == [None, None, "stop"]


def test_a_resumed_request_knows_what_was_already_sent():
    assert make_request(token_ids=(1, 2, 3, 9, 9)).num_output_tokens_given == 2


P, D = Peer("p", 1), Peer("d", 2)
HOME = (Address("127.0.0.1", 9),)


def test_a_minted_ticket_is_accepted_by_the_workers_it_names():
    verify_ticket(b"secret", mint_ticket(b"secret", "r", P, D, HOME), source=P, target=D)


def test_no_two_tickets_share_a_transfer_id():
    assert len({mint_ticket(b"s", "r", P, D, HOME).transfer_id for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": "other"},
        {"transfer_id": bytes(16)},
        {"source": Peer("q", 1)},
        {"target": Peer("d", 3)},
        {"target_addresses": (Address("127.0.0.1", 10),)},
        {"target_addresses": (*HOME, *HOME)},
        {"source_cut": RankCut(ranks=2)},
        {"source_cut": RankCut(stages=2)},
        {"source_cut": RankCut(context_ranks=2)},
        {"target_cut": RankCut(stages=2)},
        {"mac": b""},
    ],
)
def test_a_changed_ticket_is_refused(change: dict[str, object]):
    ticket = msgspec.structs.replace(mint_ticket(b"secret", "r", P, D, HOME), **change)
    with pytest.raises(TicketRefused, match="signature"):
        verify_ticket(b"secret", ticket, source=ticket.source, target=ticket.target)


@pytest.mark.parametrize(
    ("secret", "source", "target", "error", "text"),
    [
        (b"theirs", P, D, TicketRefused, "signature"),
        (b"ours", Peer("q", 1), D, TicketRefused, "the ticket's source is p, not q"),
        (b"ours", P, Peer("d", 3), EpochMismatch, "the ticket's target is d in its epoch 2"),
    ],
    ids=["another cluster's", "another worker's", "from before a restart"],
)
def test_a_ticket_for_others_is_refused(secret: bytes, source: Peer, target: Peer, error: Any, text: str):
    with pytest.raises(error, match=text):
        verify_ticket(b"ours", mint_ticket(secret, "r", P, D, HOME), source=source, target=target)
