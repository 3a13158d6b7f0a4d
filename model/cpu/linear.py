"""Projections on CPUs in bf16 and fp32."""

import torch
from torch import Tensor

from twostroke.model.cpu.kernels import floats as cpu_dot
from twostroke.model.cpu.kernels import gemm as cpu_gemm
from twostroke.model.cpu.kernels import gemm as cpu_gemm_pack
from twostroke.model.cpu.kernels.program import Launcher


def is_supported(dtype: torch.dtype) -> bool:
    """Whether this CPU has what CpuLinear's kernels are made of: AVX512-BF16 for bf16, AVX-512 for fp32."""
    if dtype == torch.bfloat16:
        return cpu_dot.is_supported()
    return dtype == torch.float32 and bool(torch.cpu._is_avx512_supported())


class CpuLinear:
    """One packed copy of the weights that serves every number of rows. Implements model.backend.Linear.

    A row's result does not depend on the other rows, nor on how many there are.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, launcher: Launcher):
        """weight [out, in], of a dtype that `is_supported`; bias [out]. Both are copied."""
        self.out_features, self.in_features = weight.shape
        self._dtype = weight.dtype
        self._launcher = launcher
        self._packed = cpu_gemm_pack.pack(weight.contiguous())
        self._bias = torch.zeros(self.out_features) if bias is None else bias.to(torch.float32, copy=True)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """As Linear, for contiguous x of the weights' dtype; gives bf16 or fp32."""
        return cpu_gemm.multiply(self._launcher, x, self._packed, self._bias, out_dtype or x.dtype)

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """As Linear.rows."""
        return self.embed(indices, 0, dtype)

    def embed(self, token_ids: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        """As Backend.embed, of these weights."""
        shape = (self.out_features, self.in_features)
        return cpu_gemm_pack.look_up_packed(self._launcher, token_ids, self._packed, self._dtype, shape, first, dtype)
