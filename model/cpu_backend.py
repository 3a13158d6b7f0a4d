"""The backend of CPUs."""

from torch import Tensor

from model.backend import BatchLayout
from model.kernels import cpu_reference


class CpuBackend:
    """Implements model.backend.Backend."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return cpu_reference.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        residual = x + residual
        return cpu_reference.rms_norm(residual, weight, eps), residual

    def rope_and_write_kv(self, qkv: Tensor, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        return cpu_reference.rope_and_write_kv(qkv, cos_sin, kv_layer, layout)

    def attention(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        return cpu_reference.attention(q, kv_layer, layout)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return cpu_reference.silu_mul(gate_up)
