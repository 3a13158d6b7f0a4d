"""Weight-only quantisation: what a quantised projection means, whatever device computes it and however it packs it.

A weight [out, in] becomes integers and one scale for each group of `group_size` neighbouring columns of a row:
W[o, i] = values[o, i] * scales[o, i // group_size]. Symmetric, without zero points. Activations stay as they are.
int8 has one group a row, int4 groups of 64 columns (as Dettmers & Zettlemoyer 2023 found 4 bits to need).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.config import Quantization

INT4_GROUP = 64  # columns that share a scale


@dataclass(frozen=True)
class QuantizedWeight:
    """The common form; each device packs it its own way."""

    values: Tensor  # int8 [out, in]: -127 to 127, of four bits -8 to 7
    scales: Tensor  # fp32 [out, groups], of four bits of either sign
    group_size: int  # columns; the last group may be shorter
    bits: Literal[8, 4]

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight that is computed with, [out, in]: the reference of every kernel."""
        columns = self.values.shape[1]
        scales = self.scales.repeat_interleave(self.group_size, dim=1)[:, :columns]
        return (self.values.float() * scales).to(dtype)


def quantize(weight: Tensor, bits: Literal[8, 4]) -> QuantizedWeight:
    """Round a weight [out, in] of any float dtype to the nearest of its row's (int4: its group's) steps.

    The largest of a row is 127 or -127 steps of int8. The largest of a group is -8 steps of int4, which may be negative
    ones for that: steps of a seventh, with which -8 were never needed, make errors an eighth larger. Steps of int4 are
    numbers that bf16 can hold, so that kernels may store them in two bytes.
    """
    rows, columns = weight.shape
    group_size = columns if bits == 8 else min(INT4_GROUP, columns)
    padding = -columns % group_size
    groups = functional.pad(weight.float(), (0, padding)).view(rows, -1, group_size)
    if bits == 8:
        steps, lowest, highest = groups.abs().amax(dim=2) / 127, -127, 127
    else:
        low, high = groups.aminmax(dim=2)
        steps, lowest, highest = (torch.where(high > -low, high, low) / -8).bfloat16().float(), -8, 7
    steps = torch.where(steps != 0, steps, 1.0)  # zeros stay zeros with any step
    values = (groups / steps[:, :, None]).round_().clamp_(lowest, highest).to(torch.int8)
    return QuantizedWeight(values.view(rows, -1)[:, :columns].contiguous(), steps, group_size, bits)


def of_lm_head(quantization: Quantization) -> Quantization:
    """How the LM head is held, and with it a tied embedding: what decides between tokens gets no less than 8 bits."""
    return "int8" if quantization == "int4" else quantization


def tensor_bytes(shape: tuple[int, ...], dtype: torch.dtype, quantization: Quantization) -> int:
    """Of a weight (or, unquantised, of any tensor) of this shape."""
    count = torch.Size(shape).numel()
    if quantization == "none":
        return count * dtype.itemsize
    rows, columns = shape
    if quantization == "int8":
        return count + rows * torch.float32.itemsize
    return count // 2 + rows * -(-columns // INT4_GROUP) * torch.bfloat16.itemsize
