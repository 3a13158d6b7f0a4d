"""The bundled model's shape and training recipe, in one place and without a machine in mind."""

import json
from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaConfig

from twostroke.tools.bundled.vocabulary import VOCABULARY_SIZE

CONTEXT = 8192  # tokens
CONFIG_FIELDS = (
    "architectures",
    "model_type",
    "dtype",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "initializer_range",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def model_config() -> LlamaConfig:
    """5.8 M parameters: small enough for the repository, with all that a large Llama has (GQA, RoPE, SwiGLU)."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=5,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def save_config(folder: Path) -> None:
    """Writes config.json and generation_config.json: what a reader needs, without transformers' other defaults."""
    full = model_config().to_dict()
    kept = {name: full[name] for name in CONFIG_FIELDS}
    # Readers older than `rope_parameters` look for the plain number.
    kept["rope_theta"] = full["rope_parameters"]["rope_theta"]
    generation = {"bos_token_id": full["bos_token_id"], "eos_token_id": full["eos_token_id"]}
    for name, content in (("config.json", kept), ("generation_config.json", generation)):
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
