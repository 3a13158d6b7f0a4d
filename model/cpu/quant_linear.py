"""Quantised projections on CPUs, packed once: there is no other copy."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.backend import Linear
from twostroke.model.checkpoint.quantization import QuantizedWeight, quantize
from twostroke.model.cpu.kernels import quant as cpu_quant
from twostroke.model.cpu.kernels import quant_tile as cpu_quant_tile
from twostroke.model.cpu.kernels.program import Launcher
from twostroke.model.cpu.kernels.quant import quantize_and_pack

ROWS_AN_ITEM = 256  # of activations


def make_quantized_linear(
    weight: Tensor, bias: Tensor | None, quantization: Literal["int8", "int4"], launcher: Launcher
) -> Linear:
    """The fastest that this CPU has for activations of the weight's dtype. weight [out, in], bias [out]."""
    bits: Literal[8, 4] = 8 if quantization == "int8" else 4
    if is_supported(weight.dtype, weight.shape[1]):
        return CpuQuantizedLinear(weight, bias, bits, launcher)
    return TorchQuantizedLinear(weight, bias, bits)


def is_supported(dtype: torch.dtype, in_features: int) -> bool:
    """Whether CpuQuantizedLinear's kernels take such activations, on this CPU."""
    return dtype == torch.bfloat16 and in_features % 8 == 0 and cpu_quant_tile.is_supported()


class CpuQuantizedLinear:
    """int8 or int4 weights for bf16 activations. Implements model.backend.Linear.

    A row's result does not depend on the other rows, nor on how many there are.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: Literal[8, 4], launcher: Launcher):
        """weight [out, in], bias [out]."""
        self.out_features, self.in_features = weight.shape
        self._bits = bits
        self._launcher = launcher
        self._values, self._scales = quantize_and_pack(weight.contiguous(), bits)
        self._bias = None if bias is None else bias.to(torch.float32, copy=True)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """As Linear, for contiguous bf16 x; gives bf16 or fp32."""
        dtype, rows, panels = out_dtype or x.dtype, x.shape[0], len(self._values)
        out = self._launcher.empty((rows, self.out_features), dtype)
        arguments = (
            x.data_ptr(),
            self._values.data_ptr(),
            self._scales.data_ptr(),
            0 if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
            self.in_features,
            self.out_features,
            int(dtype == torch.float32),
            panels,
            rows,
        )
        if rows <= cpu_quant.DIRECT_MOST_ROWS:
            self._launcher.run(cpu_quant.direct_kernel(self._bits), panels, 1, *arguments)
        else:
            items = panels * -(-rows // ROWS_AN_ITEM)
            self._launcher.run(cpu_quant.unpacked_kernel(self._bits), items, 1, *arguments, ROWS_AN_ITEM)
        return out

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """As Linear.rows."""
        return self.embed(indices, 0, dtype)

    def embed(self, token_ids: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """As Backend.embed, of these weights. Raises ValueError for int4, of which no embedding is made."""
        if self._bits != 8:
            raise ValueError("an embedding is held in 8 bits, not in 4")
        rows = token_ids.numel()
        out = self._launcher.empty((rows, self.in_features), dtype)
        self._launcher.run(
            cpu_quant.look_up_int8_kernel(),
            rows,
            1,
            token_ids.data_ptr(),
            self._values.data_ptr(),
            self._scales.data_ptr(),
            out.data_ptr(),
            first,
            self.out_features,
            self.in_features,
            int(dtype == torch.float32),
        )
        return out


class TorchQuantizedLinear:
    """int8 or int4 weights for any activations, in torch, on any CPU. Implements model.backend.Linear.

    Weights are widened a slice of rows at a time, which stays in the cache while it is multiplied.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: Literal[8, 4]):
        """weight [out, in], bias [out]."""
        self.out_features, self.in_features = weight.shape
        starts = range(0, self.out_features, _Slice.ROWS)
        self._slices = [_Slice.of(quantize(weight[first : first + _Slice.ROWS], bits)) for first in starts]
        self._bias = None if bias is None else bias.clone()

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """As Linear."""
        out = torch.cat([functional.linear(x, part.widened(x.dtype)) for part in self._slices], dim=1)
        return (out if self._bias is None else out + self._bias).to(out_dtype or x.dtype)

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """As Linear.rows."""
        out = torch.empty((indices.numel(), self.in_features), dtype=dtype)
        for number in torch.unique(indices // _Slice.ROWS).tolist():
            ours = indices // _Slice.ROWS == number
            out[ours] = self._slices[number].widened(dtype)[indices[ours] % _Slice.ROWS]
        return out


@dataclass(frozen=True)
class _Slice:
    """Some rows of a weight; of four bits two neighbouring columns are a byte, each with 8 added, the first one low."""

    ROWS: ClassVar = 256

    values: Tensor  # int8 [rows, in], or uint8 [rows, in / 2 rounded up]
    scales: Tensor
    columns: int
    group_size: int

    @classmethod
    def of(cls, weight: QuantizedWeight) -> "_Slice":
        values = weight.values
        columns = values.shape[1]
        if weight.bits == 4:
            nibbles = functional.pad(values + 8, (0, columns % 2)).view(torch.uint8)
            values = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
        return cls(values, weight.scales, columns, weight.group_size)

    def widened(self, dtype: torch.dtype) -> Tensor:
        if self.values.dtype == torch.int8:
            return QuantizedWeight(self.values, self.scales, self.group_size, 8).dequantized(dtype)
        nibbles = torch.stack((self.values & 15, self.values >> 4), dim=2).flatten(1)[:, : self.columns]
        return QuantizedWeight(nibbles.char() - 8, self.scales, self.group_size, 4).dequantized(dtype)
