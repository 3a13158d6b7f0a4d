"""The backend of CPUs: numba kernels for what torch has no single pass for, torch for the prompt's attention."""

import torch
from torch import Tensor

from twostroke.model.backend import BatchLayout, Linear, PlainLinear, embed
from twostroke.model.checkpoint.quantization import Quantization
from twostroke.model.cpu import linear as cpu_linear
from twostroke.model.cpu.kernels import attention as cpu_attention
from twostroke.model.cpu.kernels import elementwise as cpu_elementwise
from twostroke.model.cpu.kernels import gemm as cpu_gemm_pack
from twostroke.model.cpu.kernels.program import Launcher
from twostroke.model.cpu.linear import CpuLinear
from twostroke.model.cpu.quant_linear import CpuQuantizedLinear, make_quantized_linear


class CpuBackend:
    """Implements model.backend.Backend for fp32 and bf16. All tensors are contiguous."""

    def __init__(self) -> None:
        self.launcher = Launcher()

    def make_linear(self, weight: Tensor, bias: Tensor | None, quantization: Quantization) -> Linear:
        """As Backend.make_linear. CPUs without AVX-512 keep the checkpoint's layout, for torch: oneDNN's own layout is
        faster, but no row can be read from it, as tied embeddings must."""
        if quantization != "none":
            return make_quantized_linear(weight, bias, quantization, self.launcher)
        if cpu_linear.is_supported(weight.dtype):
            return CpuLinear(weight, bias, self.launcher)
        return PlainLinear(weight, bias)

    def embed(self, token_ids: Tensor, table: Tensor | Linear, first: int, dtype: torch.dtype) -> Tensor:
        """As Backend.embed."""
        if isinstance(table, CpuLinear | CpuQuantizedLinear):
            return table.embed(token_ids, first, dtype)
        if isinstance(table, Tensor):
            return cpu_gemm_pack.look_up(self.launcher, token_ids, table, first, dtype)
        return embed(token_ids, table, first, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As Backend.rms_norm."""
        return cpu_elementwise.rms_norm(self.launcher, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As Backend.add_rms_norm; writes into both inputs."""
        return cpu_elementwise.add_rms_norm(self.launcher, x, residual, weight, eps)

    def rope_and_write_kv(self, qkv: Tensor, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        """As Backend.rope_and_write_kv."""
        return cpu_elementwise.rope_and_write_kv(self.launcher, qkv, cos_sin, kv_layer, layout)

    def attention(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        """As Backend.attention."""
        rows, heads, dim = q.shape
        out = self.launcher.empty((rows, heads, dim), q.dtype)
        if layout.num_decodes:
            cpu_attention.decode_attention(self.launcher, q, kv_layer, layout, out)
        if layout.num_decodes < layout.context_lens.numel():
            cpu_attention.prefill_attention(q, kv_layer, layout, out)
        return out.view(rows, heads * dim)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """As Backend.silu_mul."""
        return cpu_elementwise.silu_mul(self.launcher, gate_up)
