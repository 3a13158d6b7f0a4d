"""Products of FP8 by torch, whose kernels (CUTLASS, cuBLASLt) are ahead of ours where tokens are many.

A product is taken from torch where it agrees with ours at first: torch raises for what a GPU or its CUDA doesn't know,
and has given wrong results for scales that lie in memory another way than cuBLASLt reads them.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.backend import FP8_LIMIT
from twostroke.model.cuda.kernels.gemm import FP8_GROUP, CudaPackedWeight

_log = logging.getLogger(__name__)
_AGREEMENT = 1e-2  # the relative error of the mean: of two results that are rounded to bf16
_ROWS = (
    4  # cuBLASLt's block-scaled products take multiples of this many tokens, and of as many steps of FP8_GROUP columns
)

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Codes [T, in], their scales fp32 [T] and a bias [out] -> bf16 [T, out]."""


def torch_product(weight: CudaPackedWeight) -> Product | None:
    """Return torch's product with a weight in FP8, or None where its scales are of no form that torch knows."""
    if len(weight.scales) == 1:
        return _ByRows(weight)
    blocks = weight.scales[:, ::FP8_GROUP]  # [columns / 128, rows / 128]
    is_whole = weight.rows % FP8_GROUP == 0 and weight.columns % FP8_GROUP == 0
    if not is_whole or not torch.equal(blocks.repeat_interleave(FP8_GROUP, dim=1), weight.scales):
        return None
    return _ByBlocks(weight, blocks)


class _ByRows:
    """Weights with a scale a row."""

    def __init__(self, weight: CudaPackedWeight):
        self._weight, self._scales = weight.packed.T, weight.scales

    def __call__(self, codes: Tensor, x_scales: Tensor, bias: Tensor | None) -> Tensor:
        return torch._scaled_mm(
            codes, self._weight, x_scales[:, None], self._scales, bias=bias, out_dtype=torch.bfloat16
        )


class _ByBlocks:
    """Weights with a scale for each block of 128 by 128, and activations with one for each 128 columns of a token."""

    def __init__(self, weight: CudaPackedWeight, blocks: Tensor):
        self._weight, self._steps = weight.packed.T, len(blocks)
        self._scales = functional.pad(blocks.T, (0, -len(blocks) % _ROWS)).contiguous().T

    def __call__(self, codes: Tensor, x_scales: Tensor, bias: Tensor | None) -> Tensor:
        tokens = len(codes)
        if beyond := -tokens % _ROWS:
            codes = functional.pad(codes.view(torch.uint8), (0, 0, 0, beyond)).view(codes.dtype)
            x_scales = functional.pad(x_scales, (0, beyond))
        scaling = functional.ScalingType
        y = functional.scaled_mm(
            codes, self._weight, x_scales.expand(self._steps, -1).contiguous().T, scaling.BlockWise1x128,
            self._scales, scaling.BlockWise128x128, output_dtype=torch.bfloat16,
        )[:tokens]  # fmt: skip
        return y if bias is None else y.add_(bias)


class TorchProducts:
    """Remembers which of torch's products agree with ours, by the weight's shape. One for all projections."""

    def __init__(self) -> None:
        self._agreeing: dict[tuple[object, ...], bool] = {}

    def agrees(self, weight: CudaPackedWeight, bias: Tensor | None, theirs: Product, ours: Product) -> bool:
        """Tell whether both give the same for random tokens, a number of them that needs filling up; log if not."""
        key = weight.rows, weight.columns, len(weight.scales), bias is None
        if key not in self._agreeing:
            device = weight.packed.device
            generator = torch.Generator(device).manual_seed(0)
            values = torch.randn((70, weight.columns), generator=generator, device=device)
            # Before torch 2.12 a number beyond FP8's limit becomes NaN: one of a million normal values times 100 would.
            codes = (values * 100).clamp(-FP8_LIMIT, FP8_LIMIT).to(torch.float8_e4m3fn)
            scales = values[:, 0].abs() + 0.5
            fault = None
            try:
                expected = ours(codes, scales, bias).float()
                error = (theirs(codes, scales, bias).float() - expected).norm() / expected.norm()
                fault = None if error <= _AGREEMENT else f"is off by {error:.1e}"
            except (RuntimeError, ValueError, AttributeError) as raised:
                fault = f"fails ({str(raised).splitlines()[0]})"
            self._agreeing[key] = fault is None
            if fault is not None:
                _log.warning(
                    "torch's product of FP8 with weights [%d, %d] %s: ours is taken", weight.rows, weight.columns, fault
                )
        return self._agreeing[key]
