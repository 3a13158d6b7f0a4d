"""y = x W^T + b, prepared once for the device it runs on."""

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.backend import Linear


class PlainLinear:
    """torch's own, over weights as the checkpoint lays them out. Implements Linear."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        """weight [out, in] and bias [out], which are copied: a view would keep the whole checkpoint mapped."""
        self._weight = weight.clone()
        self._bias = None if bias is None else bias.clone()
        self.out_features = weight.shape[0]

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """As Linear."""
        return functional.linear(x, self._weight, self._bias).to(out_dtype or x.dtype)

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """As Linear.rows."""
        return self._weight[indices].to(dtype)


def embed(token_ids: Tensor, table: Tensor | Linear, first: int, dtype: torch.dtype) -> Tensor:
    """As Backend.embed, in torch."""
    count = table.shape[0] if isinstance(table, Tensor) else table.out_features
    indices = token_ids - first
    inside = (indices >= 0) & (indices < count)
    indices = indices.clamp(0, max(0, count - 1))
    found = table[indices].to(dtype) if isinstance(table, Tensor) else table.rows(indices, dtype)
    return found * inside[:, None]
