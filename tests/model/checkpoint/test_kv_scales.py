"""KV scales of a checkpoint, and what an engine does with the setting of FP8 caches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.kernels.paged_cases import ReferenceBackend
from tests.model.architectures.test_conformance import FAMILY_SHAPES, random_prompts
from tests.model.conftest import make_decoder
from twostroke.model.backend import AS_THEY_ARE, Backend, KVScales, LoadOptions
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.decoder_weights import load_decoder_weights
from twostroke.model.checkpoint.weights import SINGLE_FILE, Checkpoint
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import load_engine
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler
from twostroke.protocol.errors import ConfigError

FP8 = torch.float8_e4m3fn
LAYER = "model.layers.{}.self_attn."


def with_scales(folder: Path, **scales: Tensor) -> Checkpoint:
    """The checkpoint with these tensors beside its own; `__` is a dot, and a number in front the layer's."""
    added = {LAYER.format(name[1]) + name[3:].replace("__", "."): scale for name, scale in scales.items()}
    tensors = {name: part for name, part in load_file(folder / SINGLE_FILE).items() if not name.endswith("_scale")}
    save_file(tensors | added, folder / SINGLE_FILE, metadata={"format": "pt"})
    return Checkpoint(folder, load_model_config(folder))


def loaded_scales(checkpoint: Checkpoint, kv_dtype: torch.dtype | None) -> list[KVScales]:
    options = LoadOptions(torch.float32, torch.device("cpu"), 64, kv_dtype=kv_dtype)
    weights = load_decoder_weights(checkpoint, checkpoint._config, options, CpuBackend())
    return [layer.attention.kv_scales for layer in weights.layers]


def test_each_layers_scales_are_read_by_the_names_that_writers_give_them(write_checkpoint: Any) -> None:
    folder = write_checkpoint()
    assert loaded_scales(with_scales(folder), FP8) == [AS_THEY_ARE, AS_THEY_ARE]
    checkpoint = with_scales(
        folder,
        _0_k_scale=torch.tensor([0.5]),
        _0_v_scale=torch.tensor(0.25, dtype=torch.bfloat16),
        _1_k_proj__k_scale=torch.tensor(3.0),
        _1_attn__v_scale=torch.tensor(2.0),
    )
    assert loaded_scales(checkpoint, FP8) == [KVScales(0.5, 0.25), KVScales(3.0, 2.0)]
    assert loaded_scales(checkpoint, None) == [AS_THEY_ARE, AS_THEY_ARE], "of a cache that needs none"


def test_kv_of_other_scales_is_another_models(write_checkpoint: Any) -> None:
    folder = write_checkpoint()
    digests = [
        with_scales(folder, **scales).digest()
        for scales in ({}, {"_0_k_scale": torch.ones(1)}, {"_0_k_scale": torch.tensor(2.0)})
    ]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("scale", [torch.zeros(1), torch.ones(2), torch.tensor(float("inf")), torch.tensor(1)])
def test_a_scale_that_is_no_positive_number_is_named(scale: Tensor, write_checkpoint: Any) -> None:
    checkpoint = with_scales(write_checkpoint(), _1_v_scale=scale)
    with pytest.raises(ConfigError, match=r"tensor model\.layers\.1\.self_attn\.v_scale is to be one positive number"):
        checkpoint.kv_scales(1)


def test_tokens_over_scaled_kv_are_the_references(write_checkpoint: Any, generate: Any) -> None:
    folder = write_checkpoint(seed=3)
    prompts = random_prompts(96, 1, (1, 17, 64, 200))

    def drawn(backend: Backend) -> list[list[int]]:
        decoder, cache = make_decoder(folder, backend, num_blocks=64, block_size=16, kv_dtype=FP8)
        runner = ModelRunner(decoder, Sampler(96), cache, 1024)
        answers: list[list[int]] = generate(runner, prompts, 24, chunk=100, block_size=16)
        return answers

    unscaled = drawn(ReferenceBackend())
    with_scales(folder, _0_k_scale=torch.tensor(0.11), _0_v_scale=torch.tensor(0.07), _1_v_scale=torch.tensor(0.3))
    expected = drawn(ReferenceBackend())
    assert expected != unscaled, "else nothing is shown"
    assert drawn(CpuBackend()) == expected


def test_an_engines_cache_in_fp8_has_as_many_more_blocks_as_their_bytes_are_fewer(write_checkpoint: Any) -> None:
    folder = write_checkpoint()
    plain, in_fp8 = (
        load_engine(EngineConfig(folder, dtype="float32", kv_cache_bytes=2**20, kv_cache_dtype=choice))
        for choice in ("auto", "fp8")
    )
    assert in_fp8.num_blocks == 4 * plain.num_blocks
    assert (plain.kv_cache.layout.dtype, in_fp8.kv_cache.layout.dtype) == ("float32", "float8_e4m3fn")
    for loaded in (plain, in_fp8):
        loaded.engine.close()


def test_latents_are_not_kept_in_fp8(write_checkpoint: Any) -> None:
    folder = write_checkpoint(**FAMILY_SHAPES["deepseek_v3"])
    with pytest.raises(ConfigError, match=r"^kv_cache_dtype: fp8 is not for latents"):
        load_engine(EngineConfig(folder, kv_cache_dtype="fp8"))
