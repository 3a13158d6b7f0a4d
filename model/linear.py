"""y = x W^T + b, prepared once for the device it runs on."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """A projection with its weights inside."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out], in the weights' dtype."""


class PlainLinear:
    """torch's own, over weights as the checkpoint lays them out."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        """weight [out, in], bias [out]."""
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """oneDNN over weights in its own blocked layout, so that no call has to reorder them first."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        """weight [out, in], bias [out]; the weight is copied into the packed layout."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


_PACK_FOR_ROWS = 32  # rows of x that the layout is chosen for; other numbers of rows use it as well


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest form for the weight's device. weight [out, in], bias [out]."""
    if weight.device.type == "cpu" and torch._C._has_mkldnn:
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)
