"""A Llama decoder over loaded weights: pre-norm layers of grouped-query attention and a gated MLP.

Tokens of all sequences of a step are flattened into one [T, hidden] tensor; where they stand is in the BatchLayout.
Weights, activations and cache share one dtype; norms, rotation and attention accumulate in fp32 inside the backend.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from model.backend import Backend, BatchLayout
from model.config import ModelConfig
from model.layer_announcer import LayerAnnouncer
from model.linear import Linear, make_linear
from model.rope import cos_sin_table
from model.weights import Checkpoint


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; q, k, v and gate, up are fused by rows."""

    input_norm: Tensor  # [hidden]
    qkv: Linear  # hidden -> (H + 2 G) D
    output: Linear  # H D -> hidden
    mlp_norm: Tensor  # [hidden]
    gate_up: Linear  # hidden -> 2 I
    down: Linear  # I -> hidden


@dataclass(frozen=True)
class DecoderWeights:
    """All of a decoder, on one device, in one dtype."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden]
    lm_head: Linear  # hidden -> vocab
    cos_sin: Tensor  # fp32 [max_context, D]


class Decoder:
    """Runs a step's tokens through the layers, writing their KV into the cache on the way."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, backend: Backend):
        self._eps = config.rms_norm_eps
        self._weights = weights
        self._backend = backend

    def forward(
        self,
        token_ids: Tensor,
        layout: BatchLayout,
        kv_layers: Sequence[Tensor],
        draw_rows: Tensor,
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor | None:
        """Logits fp32 [N, vocab] of the rows that draw, None where none does.

        token_ids int64 [T]; draw_rows int64 [N], ascending rows of T; kv_layers [num_blocks, 2, G, block_size, D] each.
        `on_layer(i)` is called, in order, once layer i's KV is in the cache, and before this returns; on CUDA by
        another thread, while later layers are launched.
        """
        if on_layer is None or not kv_layers[0].is_cuda:
            return self._forward(token_ids, layout, kv_layers, draw_rows, on_layer)
        stream = torch.cuda.current_stream(kv_layers[0].device)
        with LayerAnnouncer(on_layer) as announcer:

            def record(layer: int) -> None:
                announcer.announce(layer, stream.record_event())

            return self._forward(token_ids, layout, kv_layers, draw_rows, record)

    def _forward(
        self,
        token_ids: Tensor,
        layout: BatchLayout,
        kv_layers: Sequence[Tensor],
        draw_rows: Tensor,
        on_layer: Callable[[int], None] | None,
    ) -> Tensor | None:
        """As `forward`; `on_layer(i)` is called once the write of layer i's KV is done, or on CUDA launched."""
        backend, weights = self._backend, self._weights
        residual = functional.embedding(token_ids, weights.embedding)
        x = backend.rms_norm(residual, weights.layers[0].input_norm, self._eps)
        last = len(weights.layers) - 1
        for index, layer in enumerate(weights.layers):
            kv_layer = kv_layers[index]
            q = backend.rope_and_write_kv(layer.qkv(x), weights.cos_sin, kv_layer, layout)
            if on_layer is not None:
                on_layer(index)
            if index == last and draw_rows.numel() == 0:
                return None  # nobody reads what comes after the last layer's KV
            x = backend.attention(q, kv_layer, layout)
            if index == last and draw_rows.numel() < token_ids.numel():
                x, residual = x[draw_rows], residual[draw_rows]
            x = layer.output(x)
            x, residual = backend.add_rms_norm(x, residual, layer.mlp_norm, self._eps)
            x = layer.down(backend.silu_mul(layer.gate_up(x)))
            if index < last:
                x, residual = backend.add_rms_norm(x, residual, weights.layers[index + 1].input_norm, self._eps)
        x, _ = backend.add_rms_norm(x, residual, weights.final_norm, self._eps)
        return weights.lm_head(x).float()


def load_decoder_weights(
    checkpoint: Checkpoint, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_context: int
) -> DecoderWeights:
    """Convert, fuse and pack the checkpoint's tensors, one projection at a time. Raises ConfigError."""

    def tensor(name: str) -> Tensor:
        return checkpoint.tensor(name).to(device=device, dtype=dtype)

    def linear(*names: str, has_bias: bool) -> Linear:
        def fused(kind: str) -> Tensor:
            parts = [tensor(f"{name}.{kind}") for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return make_linear(fused("weight"), fused("bias") if has_bias else None)

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

    return DecoderWeights(
        embedding=tensor("model.embed_tokens.weight"),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=tensor("model.norm.weight"),
        lm_head=linear("model.embed_tokens" if config.tie_word_embeddings else "lm_head", has_bias=False),
        cos_sin=cos_sin_table(config.rope, config.head_dim, max_context).to(device),
    )
