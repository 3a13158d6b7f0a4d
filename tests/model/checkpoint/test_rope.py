"""The table of angles against transformers' own."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

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
