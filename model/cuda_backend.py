"""The operations of a decoder layer on CUDA: Triton kernels behind `model.backend.Backend`.

Importing this needs no GPU. Under Triton's interpreter the backend also runs on CPU tensors, which is how its tests do.
"""

import torch
from torch import Tensor

from model.backend import BatchLayout
from model.kernels.decode_attention import decode_attention, decode_config
from model.kernels.launch import Target
from model.kernels.prefill_attention import prefill_attention, prefill_config
from model.kernels.rms_norm import add_rms_norm, rms_norm
from model.kernels.rope_kv import rope_and_write_kv
from model.kernels.silu_mul import silu_mul


class CudaBackend:
    """Implements `Backend` for one GPU, which must be the thread's current CUDA device whenever a method is called.

    Nothing synchronises with the host, and launches depend on shapes and on the layout's plain numbers alone: a decode
    step can be captured in a CUDA graph, with a layout whose `max_context_len` is the longest to come.
    """

    def __init__(self, target: Target | None = None) -> None:
        """`target`: the GPU to choose launches for; the current CUDA device if None.

        Raises ValueError if that device is too old, RuntimeError if there is none.
        """
        if target is None:
            target = Target.of_device(torch.device("cuda", torch.cuda.current_device()))
        self._target = target

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return add_rms_norm(x, residual, weight, eps)

    def rope_and_write_kv(self, qkv: Tensor, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        return rope_and_write_kv(qkv, cos_sin, kv_layer, layout.positions, layout.slots)

    def attention(self, q: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        tokens, heads, dim = q.shape
        groups = kv_layer.shape[2]
        out = torch.empty((tokens, heads * dim), dtype=q.dtype, device=q.device)
        decodes = layout.num_decodes
        if decodes:
            decode_attention(
                q[:decodes],
                kv_layer,
                layout.context_lens[:decodes],
                layout.block_tables[:decodes],
                out[:decodes],
                decode_config(self._target, dim, q.dtype, groups, decodes, layout.max_context_len),
            )
        if tokens > decodes:
            prefill_attention(
                q,
                kv_layer,
                layout.query_starts[decodes:],
                layout.context_lens[decodes:],
                layout.block_tables[decodes:],
                layout.max_query_len,
                out,
                prefill_config(self._target.architecture, dim, q.dtype, heads // groups, layout.max_query_len),
            )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)
