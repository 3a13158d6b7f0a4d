"""Blocks to a contiguous buffer and back."""

import random

import pytest
import torch
from transfer_harness import BytesStore

from kvtransfer.digest import digest_blocks
from kvtransfer.store import DeviceStore
from kvtransfer.transports.staging import CudaStore, HostStaging, block_words
from model.config import ModelConfig, RopeConfig
from model.kv_cache import KVCache


def make_cache(dtype: torch.dtype, head_dim: int = 6) -> KVCache:
    config = ModelConfig(
        vocab_size=8,
        hidden_size=12,
        intermediate_size=8,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=head_dim,
        max_position=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
    )
    cache = KVCache(config, num_blocks=9, block_size=3, dtype=dtype, device=torch.device("cpu"), model_digest="m")
    for tensor in cache.tensors:
        tensor.normal_()
    return cache


def test_packing_and_unpacking_follow_both_tables() -> None:
    source, target = BytesStore(2, 20, 33), BytesStore(2, 20, 33)
    source.fill(1)
    from_ids, to_ids = random.Random(1).sample(range(20), 12), random.Random(2).sample(range(20), 12)
    packing, unpacking = HostStaging(source), HostStaging(target)
    packed = packing.buffer(12 * 33)
    packing.pack(1, from_ids, packed)
    unpacking.unpack(1, to_ids, packed)
    for from_id, to_id in zip(from_ids, to_ids, strict=True):
        assert target.block(1, to_id) == source.block(1, from_id)
    assert target.layers[0] == bytes(20 * 33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_store_reads_the_same_bytes_as_a_host_view(dtype: torch.dtype) -> None:
    cache = make_cache(dtype)
    store = CudaStore(cache)
    assert isinstance(store, DeviceStore)
    assert not isinstance(cache, DeviceStore)
    ids = [4, 0, 7, 8]
    size = cache.block_bytes
    wanted = b"".join(bytes(cache.layer_bytes(1)[i * size : (i + 1) * size]) for i in ids)
    assert bytes(store.read_blocks(1, ids)) == wanted
    assert digest_blocks(store, 1, ids) == digest_blocks(cache, 1, ids), "both ends may differ in their device"


def test_blocks_that_are_no_whole_words_are_taken_as_bytes() -> None:
    assert block_words(CudaStore(make_cache(torch.float32)), 0).dtype is torch.int64
    odd = make_cache(torch.bfloat16, head_dim=5)
    assert odd.block_bytes % 8
    assert block_words(CudaStore(odd), 0).shape == (9, odd.block_bytes)
