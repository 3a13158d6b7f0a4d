"""Weight-only quantisation: what a quantised projection means, whatever device computes it and however it packs it.

A weight [out, in] is integers (or FP8 numbers), and one scale for each group of `group_size` neighbouring columns of a
row: W[o, i] = values[o, i] * scales[o, i // group_size]. What is quantised here is symmetric. Checkpoints may have zero
points or minima, which are an offset that is added: of a zero point z it is -z * scale. Activations stay as they are.
int8 has one group a row, int4 groups of 64 columns (as Dettmers & Zettlemoyer 2023 found 4 bits to need).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.costs.sizes import INT4_GROUP

FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1's codes 0 to 7; codes 8 to 15 are negative (Rouhani et al. 2023)."""


@dataclass(frozen=True)
class QuantizedWeight:
    """The common form; each device packs it its own way."""

    values: Tensor  # [out, in], int8: -128 to 127, of four bits -8 to 7; or float8_e4m3fn, of four bits e2m1's numbers
    scales: Tensor  # fp32 [out, groups], of either sign
    group_size: int  # columns; the last group may be shorter
    bits: Literal[8, 4]
    offsets: Tensor | None = None  # fp32 [out, groups], added to each weight of the group
    order: Tensor | None = None  # int64 [in]: column i of all this is of the input order[i]; None: of input i
    units: Tensor | None = None  # fp32 [out]: a row's scales are two-byte numbers times this; None: times one

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]

    @property
    def is_fp4(self) -> bool:
        return self.bits == 4 and self.values.dtype == torch.float8_e4m3fn

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight that is computed with, [out, in]: the reference of every kernel."""
        weight = self.values.float() * self._of_columns(self.scales)
        if self.offsets is not None:
            weight += self._of_columns(self.offsets)
        if self.order is not None:
            weight = torch.empty_like(weight).index_copy_(1, self.order, weight)
        return weight.to(dtype)

    def to(self, device: torch.device) -> "QuantizedWeight":
        """Return the weight on that device: itself if it is there."""
        moved = {
            name: each.to(device)
            for name in ("values", "scales", "offsets", "order", "units")
            if (each := getattr(self, name)) is not None
        }
        return replace(self, **moved)

    def rows(self, chosen: slice | Tensor) -> "QuantizedWeight":
        """Return the weight with these outputs only, in this order."""
        offsets, units = (None if each is None else each[chosen] for each in (self.offsets, self.units))
        return replace(self, values=self.values[chosen], scales=self.scales[chosen], offsets=offsets, units=units)

    def columns(self, chosen: slice) -> "QuantizedWeight":
        """Return the weight with these inputs only. A group that is cut makes all groups smaller.

        Raises ValueError where the inputs have an order of their own: what is chosen may lie in groups of any size.
        """
        if self.order is not None:
            raise ValueError("columns with an order of their own can't be cut")
        first, end, _ = chosen.indices(self.values.shape[1])
        size = (
            math.gcd(self.group_size, first) if end == self.values.shape[1] else math.gcd(self.group_size, first, end)
        )
        if self.num_groups == 1:
            size = end - first
        groups = torch.arange(first, end, size) // self.group_size
        offsets = None if self.offsets is None else self.offsets[:, groups]
        return replace(
            self, values=self.values[:, first:end], scales=self.scales[:, groups], offsets=offsets, group_size=size
        )

    def with_groups_within(self, columns: int) -> "QuantizedWeight":
        """The same weight in groups that divide `columns`, so of no more."""
        size = columns if self.num_groups == 1 else math.gcd(self.group_size, columns)
        return self if size == self.group_size else self._in_groups_of(size)

    def _in_groups_of(self, size: int) -> "QuantizedWeight":
        """Return each value within one of these groups."""
        groups = torch.arange(0, self.values.shape[1], size) // self.group_size
        offsets = None if self.offsets is None else self.offsets[:, groups]
        return replace(self, scales=self.scales[:, groups], offsets=offsets, group_size=size)

    def _of_columns(self, scales: Tensor) -> Tensor:
        """fp32 [out, groups] -> [out, in]."""
        return scales[:, :, None].expand(-1, -1, self.group_size).flatten(1)[:, : self.values.shape[1]]


def fp4_codes(values: Tensor) -> Tensor:
    """float8_e4m3fn of e2m1's numbers -> their codes, uint8."""
    bits = values.view(torch.uint8)
    magnitudes = torch.tensor(FP4_MAGNITUDES, device=values.device).to(torch.float8_e4m3fn).view(torch.uint8)
    return (torch.searchsorted(magnitudes.int(), (bits & 0x7F).int()) | (bits >> 7) << 3).to(torch.uint8)


def fp4_values(codes: Tensor) -> Tensor:
    """Return the values of FP4 codes: the inverse of `fp4_codes`."""
    magnitudes = torch.tensor(FP4_MAGNITUDES)
    return (
        torch.cat((magnitudes, -magnitudes))
        .to(torch.float8_e4m3fn)
        .view(torch.uint8)[codes.long()]
        .view(torch.float8_e4m3fn)
    )


def one_below_the_other(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Stack the rows of weights with the same inputs: of different bits all get the more, of different groups those
    that fit into each. None where there is no such form."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(part.values.dtype != first.values.dtype for part in parts) or any(
        (part.order is None) != (first.order is None)
        or (part.order is not None and first.order is not None and not torch.equal(part.order, first.order))
        for part in parts
    ):
        return None
    size = math.gcd(*(part.group_size for part in parts if part.num_groups > 1)) or first.group_size
    parts = [part._in_groups_of(size) for part in parts]
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = torch.cat([torch.zeros_like(part.scales) if part.offsets is None else part.offsets for part in parts])
    units = None
    if any(part.units is not None for part in parts):
        units = torch.cat([torch.ones_like(part.scales[:, 0]) if part.units is None else part.units for part in parts])
    return QuantizedWeight(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        size,
        8 if any(part.bits == 8 for part in parts) else 4,
        offsets,
        first.order,
        units,
    )


def two_byte_scales(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Factors fp32 [out], and fp16 scales and offsets [out, groups] whose products with them are the weight's.

    Factors are powers of two, times the weight's units: what checkpoints have in two bytes stays what it is, as long as
    the largest of a row is not 2^29 times the smallest; other scales keep 11 bits.
    """
    units = torch.ones_like(weight.scales[:, 0]) if weight.units is None else weight.units
    largest = weight.scales.abs().amax(1)
    if weight.offsets is not None:
        largest = torch.maximum(largest, weight.offsets.abs().amax(1))
    exponents = (torch.frexp(largest / units).exponent - 15).clamp(min=-126)  # fp16 ends at 2^16
    factors = torch.ldexp(units, exponents)
    offsets = None if weight.offsets is None else (weight.offsets / factors[:, None]).half()
    return factors, (weight.scales / factors[:, None]).half(), offsets


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
