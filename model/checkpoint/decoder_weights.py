"""A decoder's weights on one rank: cut, fused, packed and quantised as they are loaded, one projection at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.model.architectures.rope import cos_sin_table
from twostroke.model.backend import Backend, Linear
from twostroke.model.checkpoint.quantization import Quantization, of_lm_head
from twostroke.model.checkpoint.weights import WHOLE, Checkpoint
from twostroke.model.config import ModelConfig
from twostroke.model.parallel.tensor_parallel import WHOLE_MODEL, Shard


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
    shard: Shard = WHOLE_MODEL,
) -> DecoderWeights:
    """Those of one rank, of which it reads its slices alone. Raises ConfigError."""

    def tensor(name: str, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        return checkpoint.tensor(name, rows, columns).to(device=device, dtype=dtype).contiguous()

    def kept(name: str, rows: slice = WHOLE) -> Tensor:
        """A tensor that is used as it is: copied, or one view would keep the whole file mapped."""
        return checkpoint.tensor(name, rows).to(device=device, dtype=dtype, copy=True)

    def linear_by_rows(
        rows_of: dict[str, slice], *, has_bias: bool, quantization: Quantization = quantization
    ) -> Linear:
        """One projection that computes all of these, each for its rows."""

        def fused(kind: str) -> Tensor:
            parts = [tensor(f"{name}.{kind}", rows) for name, rows in rows_of.items()]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return backend.make_linear(fused("weight"), fused("bias") if has_bias else None, quantization)

    def linear_by_columns(name: str, columns: slice, *, has_bias: bool) -> Linear:
        """This rank's summand; the bias counts once among them."""
        bias = tensor(f"{name}.bias") if has_bias and shard.rank == 0 else None
        return backend.make_linear(tensor(f"{name}.weight", columns=columns), bias, quantization)

    queries = shard.part(config.num_heads)
    query_rows, kv_rows = (
        slice(heads.start * config.head_dim, heads.stop * config.head_dim)
        for heads in (queries, shard.kv_heads(config.num_kv_heads))
    )
    inner, vocabulary = shard.part(config.intermediate_size), shard.vocabulary(config.vocab_size)

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = {f"{attention}q_proj": query_rows, f"{attention}k_proj": kv_rows, f"{attention}v_proj": kv_rows}
        return LayerWeights(
            input_norm=kept(f"{prefix}input_layernorm.weight"),
            qkv=linear_by_rows(qkv, has_bias=config.attention_bias),
            output=linear_by_columns(f"{attention}o_proj", query_rows, has_bias=config.attention_bias),
            mlp_norm=kept(f"{prefix}post_attention_layernorm.weight"),
            gate_up=linear_by_rows({f"{mlp}gate_proj": inner, f"{mlp}up_proj": inner}, has_bias=config.mlp_bias),
            down=linear_by_columns(f"{mlp}down_proj", inner, has_bias=config.mlp_bias),
        )

    is_tied = config.tie_word_embeddings
    lm_head = linear_by_rows(
        {"model.embed_tokens" if is_tied else "lm_head": vocabulary},
        has_bias=False,
        quantization=of_lm_head(quantization),
    )
    return DecoderWeights(
        embedding=lm_head if is_tied else kept("model.embed_tokens.weight", vocabulary),
        first_token=vocabulary.start,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=kept("model.norm.weight"),
        lm_head=lm_head,
        cos_sin=cos_sin_table(config.rope, config.head_dim, max_context).to(device),
    )
