"""The operations of a decoder layer that differ by device: vectorised torch and numba on CPUs, Triton on CUDA.

Linear layers, embeddings and the sampler are not here: torch serves them on both. Shapes: T tokens of the whole batch,
flattened; B sequences; H query heads, G KV heads, D head dimension.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


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


class Backend(Protocol):
    """One device's way to do a decoder layer's inner operations: model/cpu_backend.py, model/cuda_backend.py."""

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
