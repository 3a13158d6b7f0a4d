"""Which layouts can exchange KV, and how large their parts are."""

from typing import Any

import msgspec
import pytest

from twostroke.protocol.kv_layout import KVLayout, incompatibility

LAYOUT = KVLayout("m", "bfloat16", num_layers=2, num_kv_heads=8, head_dim=64, block_size=16, tp_size=2)


def changed(**fields: Any) -> KVLayout:
    return msgspec.structs.replace(LAYOUT, **fields)


def test_ranks_share_the_heads_in_order_and_hold_copies_where_there_are_more_of_them():
    assert [changed(tp_size=2).first_head(rank) for rank in range(2)] == [0, 4]
    assert changed(tp_size=2).heads_per_rank == 4
    many = changed(num_kv_heads=2, tp_size=8)
    assert many.heads_per_rank == 1
    assert [many.first_head(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_block_holds_keys_and_values_of_a_ranks_heads():
    assert LAYOUT.block_bytes == 2 * 4 * 16 * 64 * 2
    assert changed(dtype="float32").block_bytes == 2 * LAYOUT.block_bytes


def test_block_sizes_and_tensor_parallel_sizes_may_differ():
    assert incompatibility(LAYOUT, changed(block_size=64, tp_size=8)) is None
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
        ({"block_size": 0}, "the target's layout can't be: a size is not positive"),
    ],
)
def test_what_can_not_go_is_told_with_both_sides_values(fields: dict[str, Any], text: str):
    assert str(incompatibility(LAYOUT, changed(**fields))).startswith(text)


def test_dtypes_may_differ_where_the_kv_is_encoded_on_its_way():
    assert incompatibility(LAYOUT, changed(dtype="float16"), "int8") is None
    fault = incompatibility(LAYOUT, changed(dtype="int4"), "int8")
    assert fault == "the target's layout can't be: there is no KV dtype int4"
