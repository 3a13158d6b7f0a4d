"""The operations of a decoder layer that differ by device: vectorised torch and numba on CPUs, Triton on CUDA.

Shapes: T tokens of the whole batch, flattened; B sequences; H query heads, G KV heads, D head dimension, all of this
tensor-parallel rank.

y = x W^T + b, prepared once for the device it runs on.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.checkpoint.quantization import Quantization


@dataclass(frozen=True)
class BatchLayout:
    """Where the tokens of a step stand. Tensors are on the engine's device.

    Sequences that bring exactly one token (decodes) come first, then the others (prefill chunks): so that each kind
    is one kernel call. The runner sorts the batch and puts the results back in the caller's order.
    """

    positions: Tensor  # int64 [T]: position of each token in its sequence
    slots: Tensor  # int64 [T]: where its KV goes, block id * block_size + offset
    query_starts: Tensor  # int32 [B + 1]: token range of sequence b is [query_starts[b], query_starts[b + 1])
    context_lens: Tensor  # int32 [B]: tokens of context including this step's own
    block_tables: Tensor  # int32 [B, blocks of the longest]: padded with 0
    num_decodes: int  # the first `num_decodes` sequences have one token each
    max_query_len: int
    max_context_len: int

    def of_last_tokens(self, rows: Tensor, sequences: Tensor) -> "BatchLayout":
        """The layout of some sequences' last tokens alone, whose KV is in the cache: all are decodes.

        rows int64 [N]: of the tokens; sequences int64 [N]: of their sequences, in the same order.
        """
        count = rows.numel()
        return BatchLayout(
            positions=self.positions[rows],
            slots=self.slots[rows],
            query_starts=torch.arange(count + 1, dtype=torch.int32, device=rows.device),
            context_lens=self.context_lens[sequences],
            block_tables=self.block_tables[sequences],
            num_decodes=count,
            max_query_len=1,
            max_context_len=self.max_context_len,
        )


class Linear(Protocol):
    """A projection y = x W^T + b with its weights inside, laid out once for the device: there is no other copy."""

    @property
    def out_features(self) -> int: ...

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """x [T, in] -> [T, out], in x's dtype unless told otherwise."""

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """W[indices], for int64 [T] -> [T, in]: what an embedding does that shares the LM head's weights."""


class Backend(Protocol):
    """One device's way to do a decoder layer's operations: model/cpu/backend.py, model/cuda/backend.py."""

    def make_linear(self, weight: Tensor, bias: Tensor | None, quantization: Quantization) -> Linear:
        """weight [out, in] and bias [out], which are copied: packed, and quantised where asked for."""

    def embed(self, token_ids: Tensor, table: "Tensor | Linear", first: int, dtype: torch.dtype) -> Tensor:
        """Rows of a table whose first row is token `first`'s; zeros for tokens outside of it (another rank's).

        token_ids int64 [T]; table [rows, hidden]. Returns `dtype` [T, hidden].
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, hidden] -> x / sqrt(mean(x^2) + eps) * weight, statistics in fp32 (Zhang & Sennrich 2019)."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); may write into its inputs."""

    def rope_and_write_kv(self, qkv: Tensor, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        """Rotate Q and K, and write K and V into the cache.

        qkv [T, (H + 2 G) D]; cos_sin fp32 [max_position, D]: cos of the D/2 frequencies, then sin; rotation in the
        half-split form of Llama checkpoints. kv_layer [num_blocks, 2, G, block_size, D] is written at `layout.slots`.
        Returns the rotated Q, [T, H, D].
        """

    def attention(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        """Causal attention of each query over its sequence's cached KV, scale 1 / sqrt(D). Returns [T, H * D]."""

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I] -> silu(gate) * up, [T, I]."""


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
