"""The table of angles against transformers' own."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from twostroke.model.architectures.rope import cos_sin_table
from twostroke.model.checkpoint.config_file import parse_model_config

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    "yarn_fine": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
}


@pytest.mark.parametrize("head_dim", [16, 40, 128])
@pytest.mark.parametrize("name", ROPES)
def test_every_scaling_equals_transformers(name: str, head_dim: int) -> None:
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 4 * head_dim,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_theta": 50000.0} | ROPES[name],
    }
    table = cos_sin_table(parse_model_config(raw, "test").rope, head_dim, 1024)
    cos, sin = LlamaRotaryEmbedding(LlamaConfig(**raw))(torch.zeros(1), torch.arange(1024).unsqueeze(0))
    half = head_dim // 2
    torch.testing.assert_close(table[:, :half], cos[0, :, :half], rtol=0, atol=1e-6)
    torch.testing.assert_close(table[:, half:], sin[0, :, :half], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("longest", "factors"), [(128, "short_factor"), (256, "long_factor")])
@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_long_rope_takes_its_factors_by_the_model(kind: str, longest: int, factors: str) -> None:
    """transformers changes from the short to the long ones within a request, whose KV would then be of both."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 5.0, 8.0]}
    raw: dict[str, Any] = {
        "architectures": ["Phi3ForCausalLM"],
        "vocab_size": 40000,
        "hidden_size": 32,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": longest,
        "original_max_position_embeddings": 128,
        "rope_parameters": rope,
    }
    table = cos_sin_table(parse_model_config(raw, "test").rope, 8, 100)
    config = Phi3Config(**raw)
    config.rope_parameters |= {"short_factor": rope[factors], "long_factor": rope[factors]}
    cos, sin = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(100).unsqueeze(0))
    torch.testing.assert_close(table, torch.cat((cos[0, :, :4], sin[0, :, :4]), dim=1), rtol=0, atol=1e-6)
