"""The kernels' references as a backend."""

import torch
from torch import Tensor

from twostroke.model.backend import BatchLayout, Linear, PlainLinear, embed
from twostroke.model.checkpoint.quantization import Quantization
from twostroke.model.cuda.kernels.elementwise import (
    add_rms_norm_reference,
    rms_norm_reference,
    rope_and_write_kv_reference,
    silu_mul_reference,
)
from twostroke.model.cuda.kernels.prefill_attention import paged_attention_reference


class ReferenceBackend:
    """Implements `Backend` in plain torch, on any device."""

    def make_linear(self, weight: Tensor, bias: Tensor | None, quantization: Quantization) -> Linear:
        return PlainLinear(weight, bias)

    def embed(self, token_ids: Tensor, table: Tensor | Linear, first: int, dtype: torch.dtype) -> Tensor:
        return embed(token_ids, table, first, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm_reference(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm_reference(x, residual, weight, eps)

    def rope_and_write_kv(self, qkv: Tensor, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        return rope_and_write_kv_reference(qkv, cos_sin, kv_layer, layout.positions, layout.slots)

    def attention(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        tensors = (layout.query_starts, layout.context_lens, layout.block_tables)
        return paged_attention_reference(q, kv_layer, *tensors)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul_reference(gate_up)
