"""A decoder's weights on one rank: cut, fused, packed and quantised as they are loaded, one projection at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.backend import Backend, Linear
from model.config import ModelConfig
from model.quantization import Quantization
from model.rope import cos_sin_table
from model.weights import Checkpoint


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; q, k, v and gate, up are fused by rows."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> (H + 2 G) D of this rank
    output: Linear  # H D -> hidden: this rank's summand
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 I
    down: Linear  # I -> hidden: this rank's summand


@dataclass(frozen=True)
class DecoderWeights:
    """All of a decoder, of one rank, on its device."""

    embedding: Tensor | Linear  # [this rank's vocabulary, hidden]; tied ones are the LM head
    first_token: int  # of this rank's vocabulary
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Linear  # hidden -> this rank's vocabulary
    cos_sin: Tensor  # fp32 [max_context, D]


def load_decoder_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int,
    backend: Backend,
    quantization: Quantization = "none",
) -> DecoderWeights:
    """Raises ConfigError."""

    def tensor(name: str) -> Tensor:
        return checkpoint.tensor(name).to(device=device, dtype=dtype)

    def linear(*names: str, has_bias: bool) -> Linear:
        def fused(kind: str) -> Tensor:
            parts = [tensor(f"{name}.{kind}") for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return backend.make_linear(fused("weight"), fused("bias") if has_bias else None, quantization)

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return LayerWeights(
            input_norm=tensor(f"{prefix}input_layernorm.weight"),
            qkv=linear(*(f"{attention}{name}_proj" for name in "qkv"), has_bias=config.attention_bias),
            output=linear(f"{attention}o_proj", has_bias=config.attention_bias),
            mlp_norm=tensor(f"{prefix}post_attention_layernorm.weight"),
            gate_up=linear(f"{mlp}gate_proj", f"{mlp}up_proj", has_bias=config.mlp_bias),
            down=linear(f"{mlp}down_proj", has_bias=config.mlp_bias),
        )

    is_tied = config.tie_word_embeddings
    lm_head = linear("model.embed_tokens" if is_tied else "lm_head", has_bias=False)
    return DecoderWeights(
        embedding=lm_head if is_tied else tensor("model.embed_tokens.weight"),
        first_token=0,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=tensor("model.norm.weight"),
        lm_head=lm_head,
        cos_sin=cos_sin_table(config.rope, config.head_dim, max_context).to(device),
    )
