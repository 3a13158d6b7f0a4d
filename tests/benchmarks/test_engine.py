"""The work that the engine bench holds against the machine's limits, counted another way."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.model.architectures.test_conformance import FAMILY_SHAPES
from tests.model.conftest import TINY
from twostroke.benchmarks.random_model import MODELS, write_random_model
from twostroke.model.checkpoint.config_file import load_model_config, parse_model_config
from twostroke.model.checkpoint.weights import Checkpoint
from twostroke.model.config import ModelConfig
from twostroke.model.costs.operations import MachineLimits, OperationWork, decode_work, prefill_work
from twostroke.model.parameters import expected_shapes

HYBRIDS = ("granite4_dense", "nemotron_h", "lfm2")
"""Small shapes whose layers keep other states than the bench's models."""


def config_of(name: str) -> ModelConfig:
    raw = TINY | FAMILY_SHAPES[name] if name in HYBRIDS else MODELS[name]
    return parse_model_config({**raw, "max_position_embeddings": 4096}, "test")


def weights_of(config: ModelConfig) -> int:
    """All that every decode step multiplies by: matrices, and a tied embedding once."""
    return sum(
        math.prod(shape)
        for name, shape in expected_shapes(config).items()
        if len(shape) == 2 and (config.tie_word_embeddings or "embed" not in name)
    )


@pytest.mark.parametrize("name", [*HYBRIDS, *(name for name in MODELS if "moe" not in name)])
def test_a_decode_step_reads_all_weights_and_its_context_and_uses_each_weight_for_each_row(name: str) -> None:
    config = config_of(name)
    weights, kv = weights_of(config), 8 * 300 * config.kv_values
    layers, matrices, states, products = config.num_layers, 0, 0, 0
    if (sizes := config.state) is not None:
        layers = sum(not config.keeps_state(layer) for layer in range(config.num_layers))
        matrices = (config.num_layers - layers) * math.prod(sizes.matrix)
        inputs = (config.num_layers - layers) * sizes.conv_width * (sizes.taps - 1)
        states, products = 8 * 2 * 4 * (matrices + inputs), 2 * sizes.products  # in fp32, read and written
    of_pair = 16 * (512 + 64 + 512) if name == "mla-small" else 2 * config.q_size
    work = decode_work(config, 8, 300, "none")
    assert work.bytes == 2 * (weights + kv) + states
    assert work.operations == 2 * 8 * weights + 2 * 8 * 300 * of_pair * layers + products * 8 * matrices
    head = config.hidden_size * config.vocab_size
    assert decode_work(config, 8, 300, "int8").bytes == weights + 2 * kv + states
    assert decode_work(config, 8, 300, "none", 4.0).bytes == 4 * (weights + kv) + states
    assert decode_work(config, 8, 300, "int4").bytes == (0.5 + 2 / 64) * (weights - head) + head + 2 * kv + states


def test_a_decode_step_reads_the_experts_that_its_tokens_are_expected_to_hit() -> None:
    config = config_of("moe-small")
    experts = config.spec.layer.experts
    assert experts is not None
    of_one = 3 * experts.size * config.hidden_size * config.num_layers
    others = weights_of(config) - 64 * of_one
    for batch, hit in ((1, 8), (2, 8 + 8 * 56 / 64), (10_000, 64)):
        work = decode_work(config, batch, 0, "none")
        assert work.bytes == pytest.approx(2 * (others + hit * of_one), rel=1e-6)
        assert work.operations == pytest.approx(2 * batch * (others + 8 * of_one))


def test_a_prompt_leaves_out_of_the_last_layer_what_only_other_rows_would_read() -> None:
    config = config_of("160m")
    everything = 2 * 1024 * (weights_of(config) - config.hidden_size * config.vocab_size)
    work = prefill_work(config, 1024, "none")
    last_layer = everything / config.num_layers
    assert everything - last_layer < work.operations - 2 * config.num_layers * config.q_size * 1024**2 < everything


def test_layers_with_windows_read_and_weigh_no_more_than_their_window() -> None:
    windowed = config_of("gemma3-1b")
    full = replace(windowed, windows=())
    near, far = (decode_work(windowed, 1, context, "none").bytes for context in (512, 1024))
    assert near == decode_work(full, 1, 512, "none").bytes
    assert far - near == 4 * 512 * 2 * windowed.kv_size * 2, "4 of 26 layers keep everything"
    assert prefill_work(windowed, 512, "none") == prefill_work(full, 512, "none")
    spared = prefill_work(full, 2048, "none").operations - prefill_work(windowed, 2048, "none").operations
    assert spared == 22 * 4 * windowed.q_size * (2048 - 512) ** 2 / 2


def test_the_floor_is_the_slower_of_reading_and_computing() -> None:
    assert OperationWork(1, operations=8.0, bytes=3.0).floor_s(MachineLimits(gemm=2.0, read=1.0)) == 4.0
    assert OperationWork(1, operations=8.0, bytes=5.0).floor_s(MachineLimits(gemm=2.0, read=1.0)) == 5.0


def test_the_random_model_is_a_checkpoint_of_its_shape(tmp_path: Path) -> None:
    write_random_model(tmp_path, max_position=77)
    config = load_model_config(tmp_path)
    assert config.max_position == 77
    tensor = Checkpoint(tmp_path, config).tensor("model.layers.11.mlp.down_proj.weight")
    assert tensor.shape == (768, 2048)
    assert 0.01 < tensor.float().std() < 0.03
