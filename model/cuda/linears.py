"""Projections on a GPU: which kernel multiplies how many tokens.

Up to MOST_TOKENS tokens a projection is bound by reading its weights, and the skinny kernel reads them; beyond, cuBLAS
is hard to beat. Quantised weights are for our kernels alone. Nothing here synchronises with the host, and a launch
depends on shapes alone, so that all of it can be captured in CUDA graphs.
"""

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.cuda.kernels.elementwise import vocab_embedding
from twostroke.model.cuda.kernels.launch import Target
from twostroke.model.cuda.kernels.quant_gemm import PackedWeight, pack, quant_config, quant_gemm
from twostroke.model.cuda.kernels.skinny_gemm import MOST_TOKENS, SplitWorkspace, skinny_config, skinny_gemm

# Numbers of tokens that reach each row of the launch tables: of skinny products, and of quantised ones.
_FEW_TOKENS = (1, 17, 33)
_ANY_TOKENS = (*_FEW_TOKENS, 65, 129)


class CudaLinear:
    """Weights as the checkpoint lays them out, or in eight or four bits, widened as they are multiplied.

    Implements model.backend.Linear.
    """

    def __init__(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, target: Target, workspace: SplitWorkspace
    ):
        """weight [out, in] and bias [out], on one device, kept and not copied if contiguous; quantised weights are
        copied into the kernels' form. The workspace may be shared by all projections that run on one stream.

        Raises ValueError for groups of columns that the kernels don't know.
        """
        self._weight: Tensor | PackedWeight
        self._distinct_tokens: tuple[int, ...]
        if isinstance(weight, Tensor):
            self.out_features, self.in_features = weight.shape
            self._weight, self._distinct_tokens = weight.contiguous(), _FEW_TOKENS
        else:
            self.out_features, self.in_features = weight.values.shape
            self._weight, self._distinct_tokens = pack(weight), _ANY_TOKENS
        self._bias = bias
        self._target = target
        self._workspace = workspace
        self._compiled: set[tuple[torch.dtype, torch.dtype]] = set()

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """As Linear; sums are fp32 and rounded once, to `out_dtype`.

        The first call with an `out_dtype` compiles what any later one could need; it can't be captured.
        """
        out_dtype = out_dtype or x.dtype
        if (x.dtype, out_dtype) not in self._compiled:
            self._compiled.add((x.dtype, out_dtype))
            for tokens in self._distinct_tokens:
                self(x.new_zeros((tokens, self.in_features)), out_dtype)
        weight, shape = self._weight, (x.shape[0], self.out_features, self.in_features)
        if not isinstance(weight, Tensor):
            quantized = quant_config(self._target, x.dtype, weight.bits, *shape)
            return quant_gemm(x, weight, self._bias, out_dtype, self._workspace, quantized)
        if x.shape[0] <= MOST_TOKENS:
            skinny = skinny_config(self._target, x.dtype, *shape)
            return skinny_gemm(x, weight, self._bias, out_dtype, self._workspace, skinny)
        if out_dtype == x.dtype:
            return functional.linear(x, weight, self._bias)
        y = torch.mm(x, weight.T, out_dtype=out_dtype)
        return y if self._bias is None else y.add_(self._bias)

    def embed(self, token_ids: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """As Linear.embed."""
        return vocab_embedding(token_ids, self._weight, first, dtype)
