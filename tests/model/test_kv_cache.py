"""The cache as a transfer sees it: bytes of blocks."""

import numpy as np
import pytest
import torch

from model.config import ModelConfig, RopeConfig
from model.kv_cache import KVCache, kv_block_bytes

CONFIG = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
)


def make_cache(digest: str = "d", dtype: torch.dtype = torch.bfloat16, block_size: int = 4) -> KVCache:
    return KVCache(
        CONFIG, num_blocks=5, block_size=block_size, dtype=dtype, device=torch.device("cpu"), model_digest=digest
    )


def test_a_block_of_a_layer_is_one_piece_of_bytes() -> None:
    cache = make_cache()
    assert (cache.num_layers, cache.num_blocks, cache.block_size) == (3, 5, 4)
    assert cache.block_bytes * cache.num_layers == kv_block_bytes(CONFIG, 4, torch.bfloat16)
    view = cache.layer_bytes(1)
    assert view.nbytes == cache.num_blocks * cache.block_bytes
    assert not view.readonly
    cache.tensors[1][3] = torch.arange(128).view(2, 2, 4, 8)
    block = bytes(view[3 * cache.block_bytes : 4 * cache.block_bytes])
    assert block == cache.tensors[1][3].contiguous().view(torch.uint8).numpy().tobytes()


def test_bytes_written_through_the_view_are_in_the_cache() -> None:
    cache, other = make_cache(), make_cache()
    cache.tensors[2].copy_(torch.randn(cache.tensors[2].shape))
    np.asarray(other.layer_bytes(2))[:] = np.asarray(cache.layer_bytes(2))
    assert torch.equal(cache.tensors[2], other.tensors[2])
    assert not other.tensors[1].any()


@pytest.mark.parametrize("change", [{"digest": "e"}, {"dtype": torch.float32}, {"block_size": 8}])
def test_the_fingerprint_tells_layouts_apart(change: dict[str, object]) -> None:
    assert make_cache().fingerprint == make_cache().fingerprint
    assert make_cache().fingerprint != make_cache(**change).fingerprint  # type: ignore[arg-type]
