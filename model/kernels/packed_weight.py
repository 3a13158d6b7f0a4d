"""Quantised weights as the GPU's kernels read them: bytes without a sign, and four bits two to a byte.

int8: the byte of a value v is v + 128. int4: columns go in blocks of 128, which are two groups that share a scale; byte
j of a block holds column j in its low half and column 64 + j in its high one, each as v + 8. So the low halves of a
tile of bytes are one group's columns in order, and the high ones the next group's: unpacking moves nothing between
threads, and each half has one scale a row. The high half is used where it stands, as 16 times its value: the scales of
those groups are a sixteenth.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.quantization import INT4_GROUP, QuantizedWeight

BYTE_ZERO = 128  # what stands for 0
NIBBLE_ZERO = 8


@dataclass(frozen=True)
class PackedWeight:
    """A QuantizedWeight in the kernels' form."""

    packed: Tensor  # uint8 [out, in] of eight bits; [out, 64 * blocks of 128 columns] of four
    # fp32 [out] of eight bits; bf16 [2 * blocks, out] of four, each odd one a sixteenth of its group's
    scales: Tensor
    rows: int
    columns: int
    bits: Literal[8, 4]


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Where int4 columns don't fill the last block, it ends with zeros of scale 0.

    Raises ValueError for other groups than a row of int8 and INT4_GROUP columns of int4, and for scales of int4 that
    are no bf16 numbers.
    """
    rows, columns = weight.values.shape
    if weight.bits == 8:
        if weight.scales.shape[1] != 1:
            raise ValueError(f"int8 kernels take one scale a row, not {weight.scales.shape[1]}")
        return PackedWeight(_unsigned(weight.values, BYTE_ZERO), weight.scales[:, 0].contiguous(), rows, columns, 8)
    if weight.group_size != INT4_GROUP and weight.scales.shape[1] > 1:
        raise ValueError(f"int4 kernels take groups of {INT4_GROUP} columns, not {weight.group_size}")
    if not torch.equal(weight.scales, weight.scales.bfloat16().float()):
        raise ValueError("int4 kernels take scales that bf16 can hold")
    nibbles = functional.pad(_unsigned(weight.values, NIBBLE_ZERO), (0, -columns % (2 * INT4_GROUP)), value=NIBBLE_ZERO)
    low, high = nibbles.view(rows, -1, 2, INT4_GROUP).unbind(2)
    packed = (low | (high << 4)).view(rows, -1)
    groups = 2 * packed.shape[1] // INT4_GROUP
    scales = functional.pad(weight.scales, (0, groups - weight.scales.shape[1])).T.contiguous()
    scales[1::2] /= 16
    return PackedWeight(packed, scales.bfloat16(), rows, columns, 4)


def unpack(weight: PackedWeight) -> Tensor:
    """The weights that are computed with, fp32 [out, in]: the reference of the kernels that read them."""
    if weight.bits == 8:
        return (weight.packed.float() - BYTE_ZERO) * weight.scales[:, None]
    blocks = weight.packed.view(weight.rows, -1, 1, INT4_GROUP)
    values = torch.cat((blocks & 15, blocks >> 4), dim=2).float() - NIBBLE_ZERO
    values[:, :, 1] *= 16
    return (values * weight.scales.T.float().view(weight.rows, -1, 2, 1)).view(weight.rows, -1)[:, : weight.columns]


def _unsigned(values: Tensor, zero: int) -> Tensor:
    return (values.to(torch.int16) + zero).to(torch.uint8).contiguous()
