"""Projections on CPUs: packed for our kernels where the CPU has the instructions for them, else torch's.

Each holds one copy of its weights that serves every number of rows, and a row's result does not depend on the other
rows, nor on how many there are.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.backend import Linear
from twostroke.model.cache.memory import available_bytes
from twostroke.model.checkpoint.quantization import QuantizedWeight, quantize
from twostroke.model.config import Quantization
from twostroke.model.cpu.kernels import floats
from twostroke.model.cpu.kernels.launch import Launcher
from twostroke.model.cpu.kernels.projections import gemm, packing, quant, short_tiles

ROWS_WIDENED = 256  # of weights, by torch, at a time
WIDENED_SHARE = 1 / 64
"""Most of the free memory that one projection may take when it is widened at load."""


def make_linear(
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    quantization: Quantization,
    dtype: torch.dtype,
    launcher: Launcher,
) -> Linear:
    """Implement Backend.make_linear with the fastest form that this CPU has.

    What has no kernel keeps the checkpoint's layout, for torch: oneDNN's own layout is faster, but no row can be read
    from it, as tied embeddings must. Where no kernel reads quantised weights they are widened here, once, as long as
    there is room: widening them in each step takes eight times as long (SmolLM2 in Q4_1, two EPYC cores with AVX2,
    2026-11-27: 320 ms a token for 40).
    """
    if isinstance(weight, QuantizedWeight):
        if is_quantized_supported(dtype, weight.values.shape[1]) and packing.can_pack(weight):
            return CpuQuantizedLinear(packing.pack(weight), bias, launcher)
        if weight.values.numel() * dtype.itemsize <= WIDENED_SHARE * available_bytes(torch.device("cpu")):
            return make_linear(weight.dequantized(dtype), bias, "none", dtype, launcher)
        return TorchQuantizedLinear(weight, bias)
    if quantization in ("auto", "none"):
        return CpuLinear(weight, bias, launcher) if is_supported(dtype) else PlainLinear(weight, bias)
    bits: Literal[8, 4] = 8 if quantization == "int8" else 4
    if is_quantized_supported(dtype, weight.shape[1]):
        return CpuQuantizedLinear(packing.quantize_and_pack(weight.contiguous(), bits), bias, launcher)
    return make_linear(quantize(weight, bits), bias, "auto", dtype, launcher)


def is_supported(dtype: torch.dtype) -> bool:
    """Return True if this CPU has the instructions of CpuLinear's kernels: AVX512-BF16 for bf16, AVX2 for fp32."""
    if dtype == torch.bfloat16:
        return floats.is_supported()
    return dtype == torch.float32 and (short_tiles.is_usable() or bool(torch.cpu._is_avx512_supported()))


def is_quantized_supported(dtype: torch.dtype, in_features: int) -> bool:
    """Return True if CpuQuantizedLinear's kernels take these activations on this CPU."""
    return dtype == torch.bfloat16 and in_features % 8 == 0 and quant.is_supported()


class CpuLinear:
    """bf16 or fp32 weights, packed. Implements model.backend.Linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None, launcher: Launcher):
        """weight [out, in], of a dtype that `is_supported`; bias [out]. Both are copied."""
        self.out_features, self.in_features = weight.shape
        self._dtype = weight.dtype
        self._launcher = launcher
        self._packed = gemm.pack(weight.contiguous())
        self._bias = gemm.bias_of_panels(bias, self.out_features)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Implement Linear for contiguous x of the weights' dtype; returns bf16 or fp32."""
        return gemm.multiply(self._launcher, x, self._packed, self._bias, self.out_features, out_dtype or x.dtype)

    def embed(self, token_ids: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """Implement Linear.embed for the weights' dtype."""
        shape = (self.out_features, self.in_features)
        return gemm.look_up_packed(self._launcher, token_ids, self._packed, self._dtype, shape, first)


class CpuQuantizedLinear:
    """8-bit or 4-bit weights for bf16 activations, packed. Implements model.backend.Linear."""

    def __init__(self, weight: packing.PackedWeight, bias: Tensor | None, launcher: Launcher):
        """bias [out]."""
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._launcher = launcher
        self._weight = weight
        self._bias = gemm.bias_of_panels(bias, self.out_features)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Implement Linear for contiguous bf16 x; returns bf16 or fp32."""
        return quant.multiply(self._launcher, x, self._weight, self._bias, out_dtype or x.dtype)

    def embed(self, token_ids: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """Implement Linear.embed in bf16, for a weight whose inputs are in order."""
        return quant.look_up(self._launcher, token_ids, self._weight, first)


class PlainLinear:
    """torch's own, over weights as the checkpoint lays them out. Implements model.backend.Linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        """weight [out, in] and bias [out], which are copied: a view would keep the whole checkpoint mapped."""
        self._weight = weight.clone()
        self._bias = None if bias is None else bias.clone()
        self.out_features = weight.shape[0]

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Implement Linear."""
        if out_dtype != torch.float32 or x.dtype == torch.float32:
            return functional.linear(x, self._weight, self._bias).to(out_dtype or x.dtype)
        # Logits, of tokens and of experts: rounded to bf16 first, they would often tie.
        x = x.float()
        out = torch.cat([functional.linear(x, part.float()) for part in torch.split(self._weight, ROWS_WIDENED)], dim=1)
        return out if self._bias is None else out.add_(self._bias)

    def embed(self, token_ids: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """Implement Linear.embed."""
        return embed(token_ids, self._weight, first, dtype)


class TorchQuantizedLinear:
    """Quantised weights for any activations, in torch, on any CPU. Implements model.backend.Linear.

    Weights are widened a slice of rows at a time, which stays in the cache while it is multiplied. Of four bits two
    neighbouring columns are a byte, each with 8 added, the first one low.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None):
        """bias [out]. Both are copied."""
        self.out_features, self.in_features = weight.values.shape
        starts = range(0, self.out_features, ROWS_WIDENED)
        self._slices = [_copied(weight.rows(slice(first, first + ROWS_WIDENED))) for first in starts]
        self._bias = None if bias is None else bias.clone()

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Implement Linear."""
        out = torch.cat([functional.linear(x, self._widened(part, x.dtype)) for part in self._slices], dim=1)
        return (out if self._bias is None else out + self._bias).to(out_dtype or x.dtype)

    def embed(self, token_ids: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """Implement Linear.embed."""
        out = torch.zeros((token_ids.numel(), self.in_features), dtype=dtype)
        indices = token_ids - first
        parts = indices.where((indices >= 0) & (indices < self.out_features), -1) // ROWS_WIDENED
        for number in torch.unique(parts[parts >= 0]).tolist():
            ours = parts == number
            out[ours] = self._widened(self._slices[number], dtype)[indices[ours] % ROWS_WIDENED]
        return out

    def _widened(self, part: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        if part.bits == 8 or part.is_fp4:
            return part.dequantized(dtype)
        nibbles = torch.stack((part.values & 15, part.values >> 4), dim=2).flatten(1)[:, : self.in_features]
        return replace(part, values=nibbles.char() - 8).dequantized(dtype)


def packed_memory(linear: Linear) -> list[Tensor]:
    """Return all memory that differs between projections that `make_linear` made of weights in one form."""
    match linear:
        case PlainLinear():
            parts = [linear._weight, linear._bias]
        case CpuLinear():
            parts = [linear._packed, linear._bias]
        case CpuQuantizedLinear():
            weight = linear._weight
            parts = [weight.codes, weight.factors, weight.scales, weight.offsets, linear._bias]
        case TorchQuantizedLinear():
            slices = linear._slices
            parts = [part for each in slices for part in (each.values, each.scales, each.offsets)] + [linear._bias]
        case _:
            raise ValueError(f"{linear} is none of this file's")
    return [part for part in parts if part is not None]


def _copied(weight: QuantizedWeight) -> QuantizedWeight:
    """Four-bit integers two a byte: uint8 [rows, in / 2 rounded up]; others as they are."""
    if weight.bits == 8 or weight.is_fp4:
        values = weight.values.clone()
    else:
        nibbles = functional.pad(weight.values + 8, (0, weight.values.shape[1] % 2)).view(torch.uint8)
        values = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    offsets = None if weight.offsets is None else weight.offsets.clone()
    return replace(weight, values=values, scales=weight.scales.clone(), offsets=offsets)


def embed(token_ids: Tensor, table: Tensor, first: int, dtype: torch.dtype) -> Tensor:
    """Implement Backend.embed in torch."""
    indices = token_ids - first
    inside = (indices >= 0) & (indices < len(table))
    return table[indices.where(inside, 0)].to(dtype) * inside[:, None]
