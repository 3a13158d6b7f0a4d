"""The operations of a decoder layer on CUDA: Triton kernels behind `model.backend.Backend`.

Importing this needs no GPU. Under Triton's interpreter the backend also runs on CPU tensors, which is how its tests do.
"""

import torch
from torch import Tensor

from twostroke.model.backend import Linear
from twostroke.model.batch import BatchLayout
from twostroke.model.checkpoint.quantization import quantize
from twostroke.model.config import Quantization
from twostroke.model.cuda.kernels.decode_attention import decode_attention, decode_config
from twostroke.model.cuda.kernels.elementwise import (
    add_rms_norm,
    rms_norm,
    rope_and_write_kv,
    silu_mul,
    vocab_embedding,
)
from twostroke.model.cuda.kernels.launch import Target
from twostroke.model.cuda.kernels.prefill_attention import PrefillConfig, prefill_attention, prefill_config
from twostroke.model.cuda.kernels.skinny_gemm import SplitWorkspace
from twostroke.model.cuda.kernels.tma_prefill import (
    LEAST_QUERY_LEN,
    TmaPrefillConfig,
    tma_prefill_attention,
    tma_prefill_config,
)
from twostroke.model.cuda.linears import CudaLinear

# Enough tokens that a context is split and a chunk takes large tiles.
_MANY = 1 << 16
# Among the lengths of chunks that small tiles are for.
_SHORT_CHUNKS = range(1, 2 * LEAST_QUERY_LEN)


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
        self._compiled: set[tuple[object, ...]] = set()
        self._workspace: SplitWorkspace | None = None  # of all projections: they run one after the other

    def make_linear(self, weight: Tensor, bias: Tensor | None, quantization: Quantization) -> CudaLinear:
        if self._workspace is None:
            self._workspace = SplitWorkspace(weight.device)
        held = weight if quantization == "none" else quantize(weight, 8 if quantization == "int8" else 4)
        return CudaLinear(held, bias, self._target, self._workspace)

    def embed(self, token_ids: Tensor, table: Tensor | Linear, first: int, dtype: torch.dtype) -> Tensor:
        if isinstance(table, Tensor):
            return vocab_embedding(token_ids, table, first, dtype)
        return table.embed(token_ids, first, dtype)

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
        self._compile_once(q, kv_layer)
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
            self._prefill_attention(
                q,
                kv_layer,
                layout.query_starts[decodes:],
                layout.context_lens[decodes:],
                layout.block_tables[decodes:],
                tokens - decodes,
                layout.max_query_len,
                out,
                self._prefill_config(q, kv_layer, layout.max_query_len),
            )
        return out

    def _prefill_config(self, q: Tensor, kv_layer: Tensor, max_query_len: int) -> PrefillConfig | TmaPrefillConfig:
        """The kernel and its tiles for the GPU, the cache's layout and the longest chunk."""
        heads, dim = q.shape[1:]
        groups, block_size = kv_layer.shape[2:4]
        return tma_prefill_config(self._target, dim, q.dtype, block_size, max_query_len) or prefill_config(
            self._target.architecture, dim, q.dtype, heads // groups, max_query_len
        )

    def _prefill_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        num_tokens: int,
        max_query_len: int,
        out: Tensor,
        config: PrefillConfig | TmaPrefillConfig,
    ) -> None:
        tensors = (q, kv_layer, query_starts, context_lens, block_tables)
        if isinstance(config, TmaPrefillConfig):
            tma_prefill_attention(*tensors, num_tokens, out, self._target, config)
        else:
            prefill_attention(*tensors, max_query_len, out, config)

    def _compile_once(self, q: Tensor, kv_layer: Tensor) -> None:
        """Compile every variant of the attention kernels for these shapes, by launching each on an empty sequence.

        Which variant a step takes depends on its lengths; without this the first long context, for one, would wait
        seconds for a compiler.
        """
        _, heads, dim = q.shape
        groups = kv_layer.shape[2]
        key = (heads, dim, q.dtype, kv_layer.shape[1:], kv_layer.stride())
        if key in self._compiled:
            return
        self._compiled.add(key)
        nothing = torch.zeros(2, dtype=torch.int32, device=q.device)
        table = nothing[:1].view(1, 1)
        out = torch.empty((1, heads * dim), dtype=q.dtype, device=q.device)
        one = torch.zeros((1, heads, dim), dtype=q.dtype, device=q.device)
        for most_tokens in (1, _MANY):
            decode = decode_config(self._target, dim, q.dtype, groups, 1, most_tokens)
            decode_attention(one, kv_layer, nothing[:1], table, out, decode)
        for prefill in {self._prefill_config(q, kv_layer, length) for length in (*_SHORT_CHUNKS, _MANY)}:
            self._prefill_attention(one, kv_layer, nothing, nothing[:1], table, 1, 1, out, prefill)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return silu_mul(gate_up)
