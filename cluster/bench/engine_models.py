"""The random models that `bench engine` measures: what speed depends on is their shape."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from twostroke.model.config import load_model_config
from twostroke.model.weights import SINGLE_FILE, expected_shapes

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
MODELS: Mapping[str, dict[str, Any]] = {
    "160m": {  # GPT-2 small's layers, with grouped-query attention: 125 million parameters
        **_LLAMA,
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "1.2b": {  # Llama-3.2-1B
        **_LLAMA,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
}
_DISTINCT = 1 << 22  # values, repeated: drawing a billion takes longer than measuring


def write_random_model(folder: Path, name: str = "160m", *, max_position: int = 4096) -> None:
    """A bf16 checkpoint of a shape in MODELS; small weights, so that nothing overflows."""
    (folder / "config.json").write_text(json.dumps({**MODELS[name], "max_position_embeddings": max_position}))
    values = (torch.randn(_DISTINCT, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for tensor, shape in expected_shapes(load_model_config(folder)):
        count = math.prod(shape)
        tensors[tensor] = values.repeat(-(-count // _DISTINCT))[:count].view(shape)
    save_file(tensors, folder / SINGLE_FILE)
