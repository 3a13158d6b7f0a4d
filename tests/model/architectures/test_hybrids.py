"""Granite 4, Bamba, Nemotron-H and LFM2: what transformers saves is read, what would be computed otherwise refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.model.architectures.test_conformance import FAMILY_SHAPES, make_runner, random_prompts
from tests.model.conftest import TINY
from twostroke.model.checkpoint.config_file import load_model_config, parse_model_config
from twostroke.model.checkpoint.weights import SINGLE_FILE, Checkpoint
from twostroke.protocol.errors import ConfigError

HYBRIDS = [name for name in FAMILY_SHAPES if name.startswith(("granite4", "bamba", "nemotron_h", "lfm2"))]


@pytest.mark.parametrize("shape", HYBRIDS)
def test_a_folder_that_transformers_saves_has_the_tensors_that_are_expected(shape: str, tmp_path: Path) -> None:
    raw = TINY | FAMILY_SHAPES[shape]
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw)))
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path, load_model_config(tmp_path))  # which finds each one that it needs, and no other
    assert set(checkpoint.shapes) <= load_file(tmp_path / SINGLE_FILE).keys()
    assert checkpoint.num_parameters == parameters(model)


def parameters(model: Any) -> int:
    """Return the number of parameters, and of the experts' corrections, which transformers has as buffers."""
    corrections = (buffer for name, buffer in model.named_buffers() if name.endswith("_bias"))
    return sum(part.numel() for part in (*model.parameters(), *corrections))


@pytest.mark.parametrize("infinity", [float("inf"), {"__float__": "Infinity"}, 1e30])
def test_steps_of_prompts_are_limited_as_transformers_limits_them(
    infinity: Any, write_checkpoint: Any, generate: Any
) -> None:
    # It limits no steps of answers, so that one token is drawn of each prompt.
    folder = write_checkpoint(seed=0, **FAMILY_SHAPES["bamba"])
    limit_steps(folder, [2.0, infinity])
    prompts = random_prompts(96, 1, (1, 17, 100))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = [[int(model(torch.tensor([prompt])).logits[0, -1].argmax())] for prompt in prompts]
    assert generate(make_runner(folder, 8, 64), prompts, 1, chunk=37, block_size=8) == expected
    limit_steps(folder, [0.0, 0.01])
    assert generate(make_runner(folder, 8, 64), prompts, 1, chunk=37, block_size=8) != expected


def limit_steps(folder: Path, limits: list[Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"time_step_limit": limits}))


@pytest.mark.parametrize(
    ("shape", "unread"),
    [
        ("lfm2", {"rms_norm_eps": 0.5, "hidden_act": "gelu_pytorch_tanh"}),
        ("lfm2_moe", {"rms_norm_eps": 0.5, "hidden_act": "gelu_pytorch_tanh"}),
        ("nemotron_h", {"rms_norm_eps": 0.5}),
    ],
)
def test_fields_that_transformers_does_not_read_change_nothing(shape: str, unread: dict[str, Any]) -> None:
    raw = TINY | FAMILY_SHAPES[shape]
    assert parse_model_config(raw | unread, "config.json") == parse_model_config(raw, "config.json")


M, A = "mamba", "attention"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("granite4", {"layer_types": [M] * 4}, "layer_types: a model without any layer that attends"),
    ("granite4", {"layer_types": [M, A, M]}, "layer_types: expected 4 times one of"),
    ("granite4", {"layer_types": [M, A, M, "conv"]}, "layer_types: expected 4 times one of"),
    ("granite4", {"mamba_n_heads": 3}, "mamba_n_heads: 3 heads of 16 are not mamba_expand times hidden_size"),
    (
        "granite4",
        {"mamba_n_heads": 1, "mamba_d_head": "auto"},
        "mamba_n_heads: 1 is no multiple of num_key_value_heads",
    ),
    ("granite4", {"mamba_n_groups": 3}, "mamba_n_groups: 3 does not divide mamba_n_heads"),
    ("granite4", {"time_step_limit": [0.1]}, "time_step_limit: expected the least and the greatest"),
    ("granite4", {"position_embedding_type": "alibi"}, "position_embedding_type: 'alibi' is not supported"),
    ("granite4", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: 'gelu_pytorch_tanh' is not supported with Mamba-2"),
    ("bamba", {"attn_layer_indices": []}, "attn_layer_indices: a model without any layer that attends"),
    (
        "nemotron_h",
        {"hybrid_override_pattern": "-M*-MM"},
        "block 0, mlp, has neither mamba nor attention just before it",
    ),
    ("nemotron_h", {"hybrid_override_pattern": "M-E*MM"}, "block 2, moe, has neither"),
    ("nemotron_h", {"hybrid_override_pattern": "M-X*MM"}, "hybrid_override_pattern: expected one of"),
    ("nemotron_h", {"num_hidden_layers": 5}, "num_hidden_layers: 5, but hybrid_override_pattern has 6 blocks"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act: 'silu' is not supported, only 'relu2' is"),
    ("nemotron_h", {"attention_bias": True}, "attention_bias: biases of attention are not supported"),
    ("nemotron_h_experts", {"moe_latent_size": 16}, "moe_latent_size: experts in a smaller space"),
    ("lfm2", {"conv_L_cache": 1}, "hidden_size: 32 channels of 1 taps are not shared out"),
    ("lfm2", {"hidden_size": 2**40}, "hidden_size: 1099511627776 channels of 4 taps are not shared out"),
    ("nemotron_h", {"mamba_num_heads": 2**40}, "mamba_num_heads: 1099511627776 heads of 16 numbers"),
    ("qwen3_5", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act: 'gelu_pytorch_tanh' is not supported here"),
    ("qwen3_5", {"linear_value_head_dim": 2**40}, "linear_key_head_dim: 4398046511136 channels of 4 taps"),
    ("lfm2", {"full_attn_idxs": []}, "layer_types: a model without any layer that attends"),
    ("lfm2_moe", {"num_dense_layers": 2**40}, "num_dense_layers: 1099511627776 is more than any model has"),
    ("lfm2_moe", {"layer_types": ["conv"] * 3}, "layer_types: expected 4 times 'conv' or 'full_attention'"),
]


@pytest.mark.parametrize(("shape", "fields", "why"), REFUSED, ids=[f"{shape}: {why}" for shape, _, why in REFUSED])
def test_what_would_be_computed_otherwise_is_refused_by_its_field(shape: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"config.json: .*{why}"):
        parse_model_config(TINY | FAMILY_SHAPES[shape] | fields, "config.json")
