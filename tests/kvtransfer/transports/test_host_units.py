"""Units in host memory, compared with slices of the cache as an array."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.rigs.kv_pair import BytesStore, rank_shard
from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.transports.host_units import (
    BATCH_BYTES,
    MAX_VIEWS,
    HostUnits,
    HostWire,
    batches,
    count_units,
    split_segments,
)
from twostroke.protocol.kv_layout import DTYPE_BYTES, Encoding, KVLayout


@st.composite
def cases(draw: st.DrawFn) -> tuple[BytesStore, KVShard, list[Segment]]:
    """A filled store, a cut of it, and units of it in any order."""
    heads = draw(st.integers(1, 5))
    unit_tokens, parts = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 4))
    first_head = draw(st.integers(0, heads - 1))
    store = BytesStore(
        3,
        draw(st.integers(1, 6)),
        draw(st.sampled_from([1, 3, 8])),
        num_kv_heads=heads,
        block_size=unit_tokens * parts,
        dtype=draw(st.sampled_from(["bfloat16", "float32"])),
        kinds=draw(st.integers(1, 2)),
    )
    store.fill(draw(st.integers(0, 9)))
    shard = rank_shard(store.layout, first_head, draw(st.integers(1, heads - first_head)), unit_tokens, "raw")
    unit_ids = st.integers(0, store.num_blocks * parts - 1)
    segments = st.builds(Segment, st.integers(0, 2), st.lists(unit_ids, max_size=9, unique=True).map(tuple))
    return store, shard, draw(st.lists(segments, max_size=4))


def naive(store: BytesStore, shard: KVShard, segments: list[Segment]) -> bytes:
    """The units as on the wire: [kinds, heads of the rank pair, unit_tokens, head_dim] each."""
    return b"".join(
        unit_array(store, shard, segment.layer, unit_id).tobytes()
        for segment in segments
        for unit_id in segment.unit_ids
    )


def unit_array(store: BytesStore, shard: KVShard, layer: int, unit_id: int) -> NDArray[np.uint8]:
    """A view of the unit, [kinds, heads, unit_tokens, bytes of a row]."""
    layout = shard.layout
    row = layout.head_dim * DTYPE_BYTES[layout.dtype]
    blocks = np.frombuffer(store.layers[layer], np.uint8)
    blocks = blocks.reshape(store.num_blocks, layout.kinds, layout.heads_per_rank, layout.block_size, row)
    block, part = divmod(unit_id, shard.units_per_block)
    tokens = slice(part * shard.unit_tokens, (part + 1) * shard.unit_tokens)
    return blocks[block, :, shard.first_head : shard.first_head + shard.num_heads, tokens]


@given(cases())
@settings(max_examples=150, deadline=None)
def test_packed_units_are_slices_of_the_cache(case: tuple[BytesStore, KVShard, list[Segment]]) -> None:
    store, shard, segments = case
    units = HostUnits(store, shard)
    expected = naive(store, shard, segments)
    assert len(expected) == count_units(segments) * units.unit_bytes == count_units(segments) * shard.unit_bytes
    out = np.full(len(expected) + 3, 0xAA, np.uint8)
    units.pack(segments, out)
    assert out.tobytes() == expected + b"\xaa" * 3
    if units.is_whole_blocks:
        assert b"".join(units.views(segments)) == expected


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_unpacked_units_land_where_they_belong_and_nothing_else_changes(
    case: tuple[BytesStore, KVShard, list[Segment]], draw: random.Random
) -> None:
    store, shard, segments = case
    seen: set[tuple[int, int]] = set()
    once = []
    for segment in segments:
        ids = tuple(unit_id for unit_id in segment.unit_ids if (segment.layer, unit_id) not in seen)
        seen |= {(segment.layer, unit_id) for unit_id in ids}
        once.append(Segment(segment.layer, ids))
    packed = draw.randbytes(count_units(once) * shard.unit_bytes)
    expected = [bytearray(layer) for layer in store.layers]
    untouched = BytesStore(3, store.num_blocks, store.layout.head_dim)
    untouched.layers = expected
    at = 0
    for segment in once:
        for unit_id in segment.unit_ids:
            place = unit_array(untouched, shard, segment.layer, unit_id)
            place[:] = np.frombuffer(packed[at : at + shard.unit_bytes], np.uint8).reshape(place.shape)
            at += shard.unit_bytes
    HostUnits(store, shard).unpack(once, memoryview(packed))
    assert store.copy() == [bytes(layer) for layer in expected]


def test_adjacent_blocks_are_one_view() -> None:
    store = BytesStore(2, 16)
    units = HostUnits(store, rank_shard(store.layout, 0, 1, 4, "raw"))
    views = units.views([Segment(0, (3, 4, 5, 9, 8)), Segment(1, (9,))])
    assert [view.nbytes // store.block_bytes for view in views] == [3, 1, 1, 1]


@pytest.mark.parametrize("segment", [Segment(0, (16,)), Segment(0, (3, -1)), Segment(2, (0,)), Segment(-1, (0,))])
def test_units_that_a_store_has_not_are_refused(segment: Segment) -> None:
    store = BytesStore(2, 8, num_kv_heads=2)
    whole, part = rank_shard(store.layout, 0, 2, 4, "raw"), rank_shard(store.layout, 0, 1, 2, "raw")
    if segment.unit_ids == (16,):
        assert HostUnits(store, part).pack([Segment(0, (15,))], np.empty(10**4, np.uint8)) is None
    buffer = np.zeros(10**4, np.uint8)
    for units in (HostUnits(store, whole), HostUnits(store, part)):
        for call in (units.pack, units.unpack):
            with pytest.raises(ValueError, match=r"no layer|not all within"):
                call([segment], buffer)
    with pytest.raises(ValueError, match=r"no layer|not all within"):
        HostUnits(store, whole).views([segment])


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=5), st.lists(st.integers(0, 12), max_size=4))
def test_split_segments_are_all_units_in_their_order(sizes: list[int], shards: list[int]) -> None:
    segments = [Segment(layer, tuple(range(10 * layer, 10 * layer + size))) for layer, size in enumerate(sizes)]
    starts = sorted({0, *(shard for shard in shards if shard < sum(sizes))})
    parts = split_segments(segments, starts)

    def flat(some: list[Segment]) -> list[tuple[int, int]]:
        return [(segment.layer, unit_id) for segment in some for unit_id in segment.unit_ids]

    everything = flat(segments)
    assert [flat(part) for part in parts] == [
        everything[first:end] for first, end in zip(starts, [*starts[1:], None], strict=True)
    ]


@given(st.lists(st.integers(1, 3 * BATCH_BYTES), max_size=6), st.integers(0, 2 * MAX_VIEWS))
@settings(max_examples=40, deadline=None)
def test_batches_are_all_bytes_in_their_order_in_bounded_pieces(sizes: list[int], num_small: int) -> None:
    backing = memoryview(random.Random(1).randbytes(sum(sizes) + 7 * num_small))
    views, at = [], 0
    for size in [*sizes, *[7] * num_small]:
        views.append(backing[at : at + size])
        at += size
    made = list(batches(views))
    assert b"".join(view for batch in made for view in batch) == backing
    assert all(0 < sum(view.nbytes for view in batch) <= BATCH_BYTES for batch in made)
    assert all(len(batch) <= MAX_VIEWS for batch in made)


@pytest.mark.parametrize("encoding", ["raw", "int8", "fp8"])
@pytest.mark.parametrize("unit_tokens", [4, 16])
def test_what_goes_out_comes_in_at_a_store_with_other_blocks(encoding: Encoding, unit_tokens: int) -> None:
    source = BytesStore(1, 40, 128, num_kv_heads=4, block_size=16)
    target = BytesStore(1, 160, 128, num_kv_heads=4, block_size=4) if unit_tokens == 4 else make_like(source.layout)
    values = np.random.default_rng(3).standard_normal(source.num_blocks * source.block_bytes // 2).astype(np.float32)
    source.layers[0][:] = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # bf16
    shards = [rank_shard(store.layout, 1, 2, unit_tokens, encoding) for store in (source, target)]
    num_units = source.num_blocks * shards[0].units_per_block
    from_ids, to_ids = (tuple(random.Random(seed).sample(range(num_units), num_units)) for seed in (1, 2))
    out, into = HostWire(source, shards[0]), HostWire(target, shards[1])
    total = 0
    for sent, room in zip(out.outgoing([Segment(0, from_ids)]), into.incoming([Segment(0, to_ids)]), strict=True):
        for view, place in zip(sent, room, strict=True):
            place[:] = view
            total += view.nbytes
    assert total == num_units * shards[0].unit_bytes
    for from_id, to_id in zip(from_ids, to_ids, strict=True):
        was, came = unit_array(source, shards[0], 0, from_id), unit_array(target, shards[1], 0, to_id)
        if encoding == "raw":
            assert (was == came).all()
        else:
            np.testing.assert_allclose(as_floats(came), as_floats(was), atol=0.04, rtol=0.08)


def make_like(layout: KVLayout) -> BytesStore:
    return BytesStore(1, 40, layout.head_dim, num_kv_heads=layout.num_kv_heads, block_size=layout.block_size)


def as_floats(unit: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (np.ascontiguousarray(unit).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
