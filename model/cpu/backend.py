"""The backend of CPUs: numba kernels for what torch has no single pass for, torch for the prompt's attention."""

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.model.architectures.delta_net import DeltaWeights
from twostroke.model.architectures.mamba import MambaWeights
from twostroke.model.architectures.states import ConvolutionWeights, StateWeights
from twostroke.model.backend import (
    AS_THEY_ARE,
    AttentionForm,
    Chosen,
    Experts,
    ExpertWeights,
    GroupNorm,
    HeadNorms,
    KVScales,
    LayerNorm,
    Linear,
    MLAHeads,
    RowNorms,
)
from twostroke.model.batch import BatchLayout
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.config import Activation, Quantization, Routing
from twostroke.model.cpu import linears, mla
from twostroke.model.cpu.experts import make_experts
from twostroke.model.cpu.kernels import elementwise, experts, paged_attention, states
from twostroke.model.cpu.kernels.launch import CoreLending, Launcher
from twostroke.model.cpu.kernels.projections import gemm
from twostroke.model.parallel.tensor_parallel import ContextParts


class CpuStates:
    """Implements model.backend.StateKernels; prompts are torch's."""

    def __init__(self, launcher: Launcher):
        self._launcher = launcher

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Implement StateKernels.empty."""
        del device
        return self._launcher.empty(shape, dtype)

    def step(
        self, weights: StateWeights, products: Sequence[Tensor], kv_layer: Tensor, layout: BatchLayout, out: Tensor
    ) -> None:
        """Implement StateKernels.step."""
        where = kv_layer, layout, out
        match weights:
            case DeltaWeights():
                states.delta_step(self._launcher, products, weights, *where)
            case MambaWeights():
                states.mamba_step(self._launcher, products, weights, *where)
            case ConvolutionWeights():
                states.convolution_step(self._launcher, products, weights, *where)


class CpuBackend:
    """Implements model.backend.Backend for fp32 and bf16. All tensors are contiguous."""

    def __init__(self, lending: CoreLending | None = None) -> None:
        self.launcher = Launcher(lending)
        self.state_kernels = CpuStates(self.launcher)

    def make_linear(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        quantization: Quantization,
        dtype: torch.dtype,
    ) -> Linear:
        """Implement Backend.make_linear."""
        return linears.make_linear(weight, bias, quantization, dtype, self.launcher)

    def embed(self, token_ids: Tensor, table: Tensor | Linear, first: int, dtype: torch.dtype) -> Tensor:
        """Implement Backend.embed."""
        if isinstance(table, Tensor):
            return gemm.look_up(self.launcher, token_ids, table, first)
        return table.embed(token_ids, first, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Implement Backend.rms_norm."""
        return elementwise.rms_norm(self.launcher, x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Implement Backend.add_rms_norm; writes into both inputs."""
        return elementwise.add_rms_norm(self.launcher, x, residual, weight, eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Implement Backend.add."""
        return elementwise.add(self.launcher, x, residual)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Implement Backend.scale."""
        return elementwise.scale(self.launcher, x, factor)

    def scale_by_position(self, x: Tensor, scales: Tensor, positions: Tensor) -> Tensor:
        """Implement Backend.scale_by_position."""
        return elementwise.scale_by_position(self.launcher, x, scales, positions)

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        """Implement Backend.soft_cap."""
        return elementwise.soft_cap(self.launcher, logits, cap)

    def square_sums(self, qkv: Tensor, norms: RowNorms) -> Tensor:
        """Implement Backend.square_sums."""
        return elementwise.square_sums(self.launcher, qkv, norms)

    def norm_rows(self, qkv: Tensor, square_sums: Tensor, norms: RowNorms) -> Tensor:
        """Implement Backend.norm_rows; writes into qkv."""
        return elementwise.norm_rows(self.launcher, qkv, square_sums, norms)

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        layout: BatchLayout,
        norms: HeadNorms | None = None,
        kv_scales: KVScales = AS_THEY_ARE,
        query_scales: Tensor | None = None,
    ) -> Tensor:
        """Implement Backend.rope_and_write_kv; norms write into qkv."""
        return elementwise.rope_and_write_kv(
            self.launcher, qkv, cos_sin, kv_layer, layout, norms, kv_scales, query_scales
        )

    def attention(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout, form: AttentionForm) -> Tensor:
        """Implement Backend.attention."""
        rows, heads, dim = q.shape
        out = self.launcher.empty((rows, heads, dim), q.dtype)
        if layout.num_decodes:
            paged_attention.decode_attention(self.launcher, q, kv_layer, layout, form, out)
        if layout.num_decodes < layout.context_lens.numel():
            paged_attention.prefill_attention(q, kv_layer, layout, form, out)
        return out.view(rows, heads * dim)

    def write_latents(
        self, rows: Tensor, norm: Tensor, eps: float, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout
    ) -> None:
        """Implement Backend.write_latents."""
        elementwise.write_latents(self.launcher, rows, norm, eps, cos_sin, kv_layer, layout)

    def write_index_keys(
        self, keys: Tensor, norm: LayerNorm, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout
    ) -> None:
        """Implement Backend.write_index_keys."""
        elementwise.write_index_keys(self.launcher, keys, norm, cos_sin, kv_layer, layout)

    def group_square_sums(self, x: Tensor, norm: GroupNorm) -> Tensor:
        """Implement Backend.group_square_sums."""
        return states.group_square_sums(self.launcher, x, norm)

    def norm_groups(self, x: Tensor, square_sums: Tensor, norm: GroupNorm, dtype: torch.dtype) -> Tensor:
        """Implement Backend.norm_groups."""
        return states.norm_groups(self.launcher, x, square_sums, norm, dtype)

    def gate_rows(self, x: Tensor, gates: Tensor) -> Tensor:
        """Implement Backend.gate_rows; writes into x."""
        return elementwise.gate_rows(self.launcher, x, gates)

    def make_mla(self, heads: MLAHeads, parts: ContextParts | None = None) -> mla.CpuMLA:
        """Implement Backend.make_mla."""
        return mla.CpuMLA(heads, self.launcher, parts)

    def gated(self, x: Tensor, gate_up: Linear, activation: Activation) -> Tensor:
        """Implement Backend.gated."""
        return elementwise.gate(self.launcher, gate_up(x), activation)

    def gate_columns(self, gates: Tensor, x: Tensor, first: int, activation: Activation) -> Tensor:
        """Implement Backend.gate_columns."""
        return elementwise.gate_columns(self.launcher, gates, x, first, activation)

    def feed_forward(self, x: Tensor, gate_up: Linear, down: Linear, activation: Activation) -> Tensor:
        """Return `down` of what `gated` makes of x."""
        return down(self.gated(x, gate_up, activation))

    def make_experts(
        self, weights: ExpertWeights, activation: Activation, quantization: Quantization, dtype: torch.dtype
    ) -> Experts:
        """Implement Backend.make_experts."""
        return make_experts(weights, activation, quantization, dtype, self.launcher)

    def route(
        self, logits: Tensor, correction: Tensor | None, routing: Routing, scales: Tensor | None = None
    ) -> Chosen:
        """Implement Backend.route."""
        return experts.route(self.launcher, logits, correction, routing, scales)

    def gate_by_sigmoid(self, x: Tensor, logits: Tensor) -> Tensor:
        """Implement Backend.gate_by_sigmoid; writes into x."""
        return experts.gate_by_sigmoid(self.launcher, x, logits)
