"""Experts on CPUs: packed for our kernels as projections are (linears.py), else one projection each, by torch.

The kernels read only experts that some token takes. A token's result does not depend on the others.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.backend import Chosen, ExpertPlaces, Experts, ExpertWeights
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.config import Activation, Quantization
from twostroke.model.cpu.kernels import elementwise, experts
from twostroke.model.cpu.kernels.launch import Launcher
from twostroke.model.cpu.kernels.projections import gemm, packing, quant
from twostroke.model.cpu.linears import is_quantized_supported, is_supported, make_linear, packed_memory


def make_experts(
    weights: ExpertWeights, activation: Activation, quantization: Quantization, dtype: torch.dtype, launcher: Launcher
) -> Experts:
    """Implement Backend.make_experts."""
    if is_packed(weights.gate_up, quantization, dtype) and is_packed(weights.down, quantization, dtype):
        return CpuExperts(weights, activation, quantization, launcher)
    return PlainExperts(weights, activation, quantization, dtype, launcher)


def is_packed(weight: Tensor | QuantizedWeight, quantization: Quantization, dtype: torch.dtype) -> bool:
    """Return True if this CPU has the instructions of the packed kernels for these weights."""
    if isinstance(weight, QuantizedWeight):
        return packing.can_pack(weight) and is_quantized_supported(dtype, weight.values.shape[1])
    if quantization in ("auto", "none"):
        return is_supported(dtype)
    return is_quantized_supported(dtype, weight.shape[1])


class _Stack:
    """One projection of all experts, each with whole panels of its own."""

    def __init__(
        self,
        weight: Tensor | QuantizedWeight,
        bias: Tensor | None,
        number: int,
        quantization: Quantization,
        launcher: Launcher,
    ):
        """weight [number * out, in], bias [number, out]; both are copied."""
        rows = weight.shape[0] if isinstance(weight, Tensor) else len(weight.values)
        self.out_features = rows // number
        self._launcher = launcher
        beyond = -self.out_features % gemm.PANEL_COLUMNS

        def padded(rows: Tensor, value: float = 0.0) -> Tensor:
            """[number * out, ...] -> [number * whole panels, ...]"""
            if not beyond:
                return rows.contiguous()
            each = rows.view(number, self.out_features, -1)
            return functional.pad(each, (0, 0, 0, beyond), value=value).flatten(0, 1)

        self._packed: Tensor | packing.PackedWeight
        if isinstance(weight, QuantizedWeight):
            offsets = None if weight.offsets is None else padded(weight.offsets)
            values = padded(weight.values.view(torch.int8)).view(weight.values.dtype)
            scales = padded(weight.scales)
            units = None if weight.units is None else padded(weight.units.reshape(-1, 1), 1.0)[:, 0]
            self._packed = packing.pack(replace(weight, values=values, scales=scales, offsets=offsets, units=units))
        elif quantization in ("auto", "none"):
            self._packed = gemm.pack(padded(weight))
        else:
            bits: Literal[8, 4] = 8 if quantization == "int8" else 4
            self._packed = packing.quantize_and_pack(padded(weight), bits)
        whole = number * (self.out_features + beyond)
        self._bias = gemm.bias_of_panels(None if bias is None else padded(bias.reshape(-1, 1))[:, 0], whole)

    @property
    def memory(self) -> list[Tensor]:
        """Return all memory that differs between experts, stacked."""
        if isinstance(self._packed, Tensor):
            return [self._packed, self._bias]
        packed = self._packed
        parts = packed.codes, packed.factors, packed.scales, packed.offsets, self._bias
        return [part for part in parts if part is not None]

    def __call__(self, x: Tensor, tasks: Tensor, out_dtype: torch.dtype) -> Tensor:
        """Multiply each task's rows of x by the weights of its expert."""
        where = self._bias, self.out_features, out_dtype
        if isinstance(self._packed, Tensor):
            return gemm.multiply_tasks(self._launcher, x, tasks, self._packed, *where)
        return quant.multiply_tasks(self._launcher, x, tasks, self._packed, *where)


class CpuExperts:
    """Implements model.backend.Experts for bf16, fp32, and quantised weights with bf16 activations."""

    def __init__(self, weights: ExpertWeights, activation: Activation, quantization: Quantization, launcher: Launcher):
        """Weights that `is_packed`; all are copied."""
        number = weights.number
        self._gate_up = _Stack(weights.gate_up, weights.gate_up_bias, number, quantization, launcher)
        self._down = _Stack(weights.down, weights.down_bias, number, quantization, launcher)
        self.hits = torch.zeros(weights.layer_number, dtype=torch.int64)
        self.places = weights.places
        self._number = number
        # With copies, choices name slots, whose hits nobody counts, and one more slot for experts elsewhere.
        self._slot_hits = torch.zeros(number + 1, dtype=torch.int64)
        self._local_experts = range(weights.first, weights.first + number) if self.places is None else range(number)
        self._activation = activation
        self._launcher = launcher

    def __call__(self, x: Tensor, chosen: Chosen) -> Tensor:
        """Implement Experts, for contiguous x."""
        launcher, most_rows = self._launcher, min(gemm.most_task_rows(x.dtype), quant.ROWS_AN_ITEM)
        found, hits = chosen.experts, self.hits
        if self.places is not None:
            found, hits = experts.locate(launcher, found, self.places.slots, hits), self._slot_hits
        order = experts.order(launcher, found, hits, self._local_experts, most_rows)
        gate_up = self._gate_up(experts.gather(launcher, x, order.choices), order.tasks, x.dtype)
        inner = elementwise.gate(launcher, gate_up, self._activation)
        del gate_up  # its place is another's
        y = self._down(inner, order.tasks, torch.float32)
        return experts.combine(launcher, y, order.places, chosen.weights, x.dtype)

    def slot_memory(self, slot: int) -> list[Tensor]:
        """Implement Experts.slot_memory."""
        parts = [part for stack in (self._gate_up, self._down) for part in stack.memory]
        sizes = [len(part) // self._number for part in parts]
        return [part[slot * size : (slot + 1) * size] for part, size in zip(parts, sizes, strict=True)]


class PlainExperts:
    """Implements model.backend.Experts with one projection after the other, each for the tokens that take it."""

    def __init__(
        self,
        weights: ExpertWeights,
        activation: Activation,
        quantization: Quantization,
        dtype: torch.dtype,
        launcher: Launcher,
    ):
        self._gate_up, self._down = (
            [make_linear(part, bias, quantization, dtype, launcher) for part, bias in weights.of_each(which)]
            for which in ("gate_up", "down")
        )
        self.hits = torch.zeros(weights.layer_number, dtype=torch.int64)
        self.places = weights.places
        self._first = weights.first
        self._activation = activation
        self._launcher = launcher

    def slot_memory(self, slot: int) -> list[Tensor]:
        """Implement Experts.slot_memory."""
        return [part for which in (self._gate_up, self._down) for part in packed_memory(which[slot])]

    def __call__(self, x: Tensor, chosen: Chosen) -> Tensor:
        """Implement Experts."""
        out = torch.zeros(x.shape)
        experts, counts = torch.unique(chosen.experts, return_counts=True)
        self.hits[experts.long()] += counts
        slots = chosen.experts - self._first if self.places is None else self._slots(chosen.experts, self.places)
        for index in torch.unique(slots).tolist():
            if not 0 <= index < len(self._gate_up):
                continue
            tokens, places = (slots == index).nonzero(as_tuple=True)
            gate_up = self._gate_up[index](x[tokens])
            inner = elementwise.gate(self._launcher, gate_up, self._activation)
            y = self._down[index](inner, torch.float32)
            out.index_add_(0, tokens, y * chosen.weights[tokens, places, None])
        return out.to(x.dtype)

    @staticmethod
    def _slots(experts: Tensor, places: ExpertPlaces) -> Tensor:
        found = experts.long()
        copies = torch.arange(len(found))[:, None] % places.slots[found, 0]
        return places.slots[found, 1 + copies]
