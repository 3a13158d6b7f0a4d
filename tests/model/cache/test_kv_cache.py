"""The cache as a transfer sees it: bytes of blocks, which another process can map."""

import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model.conftest import TINY
from twostroke.kvtransfer.link import DeviceStore, HostStore, SharedStore
from twostroke.model.cache.kv_cache import KVCache, SharedKVCache, make_kv_cache
from twostroke.model.checkpoint.config_file import parse_model_config
from twostroke.model.costs.sizes import kv_block_bytes
from twostroke.model.parallel.form import ParallelForm
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import KVLayout

CONFIG = parse_model_config({**TINY, "num_hidden_layers": 3}, "test")


def make_cache(**changes: Any) -> KVCache:
    settings: dict[str, Any] = {
        "num_blocks": 5,
        "block_size": 4,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "model_digest": "d",
    }
    return make_kv_cache(CONFIG, **{**settings, **changes})


def shared_cache(**changes: Any) -> SharedKVCache:
    cache = make_cache(**changes)
    assert isinstance(cache, SharedKVCache)
    return cache


def open_memfds() -> int:
    gc.collect()
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum("memfd:kv-cache" in link for link in links)


def mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:kv-cache")


def test_a_block_of_a_layer_is_one_piece_of_bytes() -> None:
    cache = shared_cache()
    assert (len(cache.tensors), cache.num_blocks, cache.block_size) == (3, 5, 4)
    assert cache.block_bytes * len(cache.tensors) == kv_block_bytes(CONFIG, 4, 2)
    view = cache.layer_bytes(1)
    assert view.nbytes == cache.num_blocks * cache.block_bytes
    assert not view.readonly
    cache.tensors[1][3] = torch.arange(128).view(2, 2, 4, 8)
    block = bytes(view[3 * cache.block_bytes : 4 * cache.block_bytes])
    assert block == cache.tensors[1][3].contiguous().view(torch.uint8).numpy().tobytes()


def test_the_layout_says_all_that_peers_must_agree_on() -> None:
    layout = make_cache().layout
    assert layout == KVLayout("d", "bfloat16", num_layers=3, num_kv_heads=2, head_dim=8, block_size=4)
    assert make_cache(dtype=torch.float32).layout.dtype == "float32"


def test_a_rank_holds_its_share_of_the_heads() -> None:
    cache = make_cache(parallel=ParallelForm(2), rank=1)
    assert (cache.rank, cache.layout.tp_size) == (1, 2)
    assert cache.tensors[0].shape == (5, 2, 1, 4, 8)
    assert cache.block_bytes == cache.tensors[0][0].nbytes


def test_each_kind_of_cache_is_the_kind_of_store_that_it_claims_to_be() -> None:
    shared = make_cache()
    assert isinstance(shared, SharedStore)
    assert not isinstance(shared, DeviceStore)
    device = make_cache(device=torch.device("meta"))
    assert isinstance(device, DeviceStore)
    assert not isinstance(device, HostStore)
    assert device.layer_tensor(2) is device.tensors[2]
    assert device.device == "meta"


def test_another_process_reads_the_cache_through_its_descriptor() -> None:
    cache = shared_cache()
    for layer, tensor in enumerate(cache.tensors):
        tensor.fill_(layer + 1)
        assert cache.layer_offset(layer) % mmap.PAGESIZE == 0
    code = (
        "import mmap, os, sys; m = mmap.mmap({0}, os.fstat({0}).st_size, prot=mmap.PROT_READ); print(m[{1}:{2}].hex())"
    )
    start = cache.layer_offset(2)
    code = code.format(cache.memory_fd, start, start + cache.block_bytes)
    done = subprocess.run(
        [sys.executable, "-c", code],
        pass_fds=[cache.memory_fd],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == bytes(cache.layer_bytes(2)[: cache.block_bytes]).hex()


def test_nobody_shrinks_grows_or_writes_the_memory_that_others_may_have_mapped() -> None:
    cache = shared_cache()
    size = os.fstat(cache.memory_fd).st_size
    for other in (0, 2 * size):
        with pytest.raises(PermissionError):
            os.ftruncate(cache.memory_fd, other)
    with pytest.raises(PermissionError):
        os.pwrite(cache.memory_fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(cache.memory_fd, size)
    seals = fcntl.fcntl(cache.memory_fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW
    assert not os.get_inheritable(cache.memory_fd)
    assert os.fstat(cache.memory_fd).st_blocks * 512 >= size, "no page is left to be found missing later"


def test_descriptor_and_mapping_end_with_the_cache() -> None:
    before = (open_memfds(), mapped())
    cache = shared_cache()
    assert open_memfds() > before[0]
    cache.close()
    cache.close()
    assert (open_memfds(), mapped()) == before
    with pytest.raises(ValueError, match="closed"):
        _ = cache.memory_fd
    forgotten = shared_cache()
    del forgotten
    assert (open_memfds(), mapped()) == before


def test_a_tensor_that_outlives_the_cache_keeps_its_memory_and_nothing_else() -> None:
    before = (open_memfds(), mapped())
    cache = shared_cache()
    tensor = cache.tensors[1]
    cache.close()
    tensor.fill_(7)
    assert tensor.sum() == 7 * tensor.numel()
    del tensor
    assert (open_memfds(), mapped()) == before


def failing(code: int) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [
        (os, "memfd_create", errno.ENOSYS),
        (os, "memfd_create", errno.EMFILE),
        (os, "memfd_create", None),  # this Python was built for a system without
        (fcntl, "fcntl", errno.EINVAL),  # it can't be sealed
    ],
    ids=str,
)
def test_without_memfds_the_cache_is_in_ordinary_memory_and_the_log_says_so(
    module: Any, name: str, fault: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = open_memfds()
    if fault is None:
        monkeypatch.delattr(module, name)
    else:
        monkeypatch.setattr(module, name, failing(fault))
    cache = make_cache()
    assert isinstance(cache, HostStore)
    assert not isinstance(cache, SharedStore)
    assert not cache.tensors[0].any()
    assert "can't be shared" in caplog.text
    assert (name if fault is None else os.strerror(fault)) in caplog.text
    assert open_memfds() == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_a_cache_that_does_not_fit_is_a_setting_to_change(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_memfds()
    monkeypatch.setattr(os, "posix_fallocate", failing(code))
    with pytest.raises(ConfigError, match=r"KV cache of .* use a smaller KV cache"):
        make_cache()
    assert open_memfds() == before


def test_a_cache_larger_than_any_machine_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="use a smaller KV cache") as caught:
        make_cache(num_blocks=2**48)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("layers", "name", "of_token"), [(60, "DeepseekV2", 69_120), (61, "DeepseekV3", 70_272)])
def test_of_latents_a_token_takes_what_the_papers_count(layers: int, name: str, of_token: int) -> None:
    """(d_c + d_h^R) l numbers (DeepSeek-AI 2024, table 1), of 2 bytes; on every rank, whatever their number. 1/57 of
    what 128 heads' keys and values would take."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    dense = {"num_hidden_layers": layers, "first_k_dense_replace": layers, "num_attention_heads": 128}
    raw = {
        **TINY,
        **sizes,
        **dense,
        "num_key_value_heads": 128,
        "architectures": [f"{name}ForCausalLM"],
        "model_type": None,
    }
    config = parse_model_config(raw, "test")
    assert kv_block_bytes(config, 1, 2) == kv_block_bytes(config, 1, 2, ParallelForm(8)) == of_token
    layout = KVLayout("", "bfloat16", layers, config.num_kv_heads, config.head_dim, 16, kinds=config.kv_kinds)
    assert layout.token_bytes == of_token
    assert round(2 * 128 * 128 * layers * 2 / of_token) == 57
