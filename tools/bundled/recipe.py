"""The bundled model's shape and training recipe, in one place and without a machine in mind."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.tools.bundled.vocabulary import VOCABULARY_SIZE

CONTEXT = 8192  # tokens
MODEL_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": CONTEXT,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 5,
    "rope_theta": 100_000.0,  # for readers older than `rope_parameters`
}
"""5.8 M parameters: small enough for the repository, with all that a large Llama has (GQA, RoPE, SwiGLU)."""


def save_config(folder: Path) -> None:
    """Writes config.json and generation_config.json."""
    generation = {name: MODEL_CONFIG[name] for name in ("bos_token_id", "eos_token_id")}
    for name, content in (("config.json", MODEL_CONFIG), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Recipe:
    seed: int = 20
    tokens_per_step: int = 8192
    # (progress at which the phase ends, sequence length): attention is cheap on short sequences, so most of the
    # training sees those; the last phases make the long context usable.
    phases: tuple[tuple[float, int], ...] = ((0.80, 512), (0.90, 2048), (1.0, 4096))
    muon_learning_rate: float = 0.02  # the hidden matrices
    adam_learning_rate: float = 0.003  # embeddings and norms
    weight_decay: float = 0.1
    warm_up: int = 100  # steps
    dropout: float = 0.1  # of each residual branch; worth more steps of it where the corpus is read a dozen times
    dropout_steps: int = 523  # afterwards none: this run reads the corpus a few times only, and learns faster without
    gradient_clip: float = 1.0

    def learning_rate_factor(self, step: int, progress: float) -> float:
        """Linear warm-up, and linear decay to 0. `step` counts from 0, `progress` runs from 0 to 1."""
        return min((step + 1) / self.warm_up, 1.0) * (1 - progress)

    def sequence_length(self, progress: float) -> int:
        return next((length for end, length in self.phases if progress < end), self.phases[-1][1])
