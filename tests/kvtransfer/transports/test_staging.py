"""Chunks to one contiguous buffer and back."""

import random

import numpy as np
import pytest
import torch
import xxhash

from tests.rigs.kv_pair import BytesStore, rank_shard
from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.transports import staging as staging_buffers
from twostroke.kvtransfer.transports.host_units import HostUnits, encode
from twostroke.kvtransfer.transports.staging import HostStaging
from twostroke.protocol.kv_layout import Encoding

CUTS = [(0, 4, 4), (1, 2, 4), (0, 4, 2), (3, 1, 1)]  # first head, heads, unit tokens


def store_of(seed: int | None = None, num_blocks: int = 20) -> BytesStore:
    """Two layers of bf16 values of about 1, four heads, blocks of four tokens; zeros without a seed."""
    store = BytesStore(2, num_blocks, 6, num_kv_heads=4)
    if seed is not None:
        torch.manual_seed(seed)
        for layer in store.layers:
            layer[:] = torch.randn(len(layer) // 2).bfloat16().view(torch.uint8).numpy().tobytes()
    return store


def segments_of(seed: int, shard: KVShard, num_blocks: int = 20) -> list[Segment]:
    draw = random.Random(seed)
    return [Segment(layer, tuple(draw.sample(range(num_blocks * shard.units_per_block), 9))) for layer in (1, 0)]


def raw_units(store: BytesStore, shard: KVShard, segments: list[Segment]) -> bytes:
    raw = rank_shard(shard.layout, shard.first_head, shard.num_heads, shard.unit_tokens, "raw")
    out = np.zeros(sum(len(segment.unit_ids) for segment in segments) * raw.unit_bytes, np.uint8)
    HostUnits(store, raw).pack(segments, out)
    return out.tobytes()


@pytest.mark.parametrize("encoding", ["raw", "int8", "fp8"])
@pytest.mark.parametrize(("first", "heads", "tokens"), CUTS)
def test_a_buffer_holds_the_units_as_on_the_wire_and_is_unpacked_where_the_table_says(
    first: int, heads: int, tokens: int, encoding: Encoding
) -> None:
    source, target = store_of(1), store_of()
    shard = rank_shard(source.layout, first, heads, tokens, encoding)
    packing, unpacking = HostStaging(source, shard), HostStaging(target, shard)
    sent, received = segments_of(1, shard), segments_of(2, shard)
    packed = packing.buffer(1, 18)
    packing.pack(sent, 7, packed)
    wire = raw = raw_units(source, shard, sent)
    if encoding != "raw":
        encoded = np.zeros(18 * shard.unit_bytes, np.uint8)
        encode(np.frombuffer(raw, np.uint8), shard, encoded)
        wire = encoded.tobytes()
    assert packed.numpy().tobytes() == wire + xxhash.xxh3_128_digest(wire, seed=7)
    assert unpacking.unpack(received, 7, packed)
    wanted, found = (
        torch.frombuffer(bytearray(units), dtype=torch.bfloat16).float()
        for units in (raw, raw_units(target, shard, received))
    )
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0 if encoding == "raw" else 0.15)
    everywhere = sum(np.count_nonzero(np.frombuffer(layer, np.int16)) for layer in target.layers)
    assert everywhere == int(found.count_nonzero()), "and nowhere else"


@pytest.mark.parametrize("encoding", ["raw", "int8"])
def test_a_damaged_chunk_touches_no_block(encoding: Encoding) -> None:
    source, target = store_of(1), store_of()
    shard = rank_shard(source.layout, 0, 4, 4, encoding)
    packing, unpacking = HostStaging(source, shard), HostStaging(target, shard)
    packed = packing.buffer(0, 18)
    packing.pack(segments_of(1, shard), 7, packed)
    for place in (0, packed.numel() // 2, packed.numel() - 17, packed.numel() - 1):
        packed[place] ^= 1
        assert not unpacking.unpack(segments_of(2, shard), 7, packed)
        packed[place] ^= 1
    assert not unpacking.unpack(segments_of(2, shard), 8, packed)
    assert not any(map(any, target.layers))


def test_a_buffer_grows_to_the_largest_chunk_and_no_further() -> None:
    store = store_of()
    shard = rank_shard(store.layout, 0, 4, 4, "raw")
    staging = HostStaging(store, shard)
    for index in range(HostStaging.num_buffers):
        large = staging.buffer(index, 18)
        assert large.numel() == 18 * shard.unit_bytes + 16
        assert staging.buffer(index, 3).data_ptr() == large.data_ptr()
        assert staging.buffer(index, 18).data_ptr() == large.data_ptr()
    assert staging.buffer(0, 18).data_ptr() != staging.buffer(1, 18).data_ptr()


def test_a_receive_has_room_for_the_largest_chunk_and_its_own_units_are_in_front(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = store_of()
    shard = rank_shard(store.layout, 0, 4, 4, "raw")
    for max_chunk_bytes, room in ((10 * shard.unit_bytes, 10), (1, 2)):
        monkeypatch.setattr(staging_buffers, "MAX_CHUNK_BYTES", max_chunk_bytes)
        staging = HostStaging(store, shard)
        landing = staging.landing(0, 2)
        assert landing.numel() == room * shard.unit_bytes + 16
        assert staging.buffer(0, 2).data_ptr() == landing.data_ptr()
        assert staging.landing(0, 1).data_ptr() == landing.data_ptr()
    assert HostStaging(store, shard).landing(0, 18).numel() == 18 * shard.unit_bytes + 16
