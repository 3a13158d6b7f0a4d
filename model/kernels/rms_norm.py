"""RMSNorm, alone and with the residual addition before it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.kernels.launch import power_of_two

# Warps by the padded row length: enough lanes for 16-byte accesses, few enough that the row's sum stays cheap.
_WARPS = ((512, 1), (1024, 2), (2048, 4), (8192, 8))
_MOST_WARPS = 16


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, hidden] -> x / sqrt(mean(x^2) + eps) * weight in fp32, rounded once (Zhang & Sennrich 2019)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm(x + residual), x + residual): the sum is rounded to x's dtype, and the norm taken of what is kept."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_reference(total, weight, eps), total


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
):
    """One program a row. With ADD, x + residual replaces the residual and is what gets normalised."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    inside = columns < HIDDEN
    value = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual_at = residual + row * residual_stride + columns
        total = (value + tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual_at, total, mask=inside)
        value = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, (value * scale * gain).to(out.dtype.element_ty), mask=inside)


def _warps(padded: int) -> int:
    return next((warps for length, warps in _WARPS if padded <= length), _MOST_WARPS)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm_reference` on the GPU. x [T, hidden] with contiguous rows; a new tensor is returned."""
    rows, hidden = x.shape
    out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    padded = power_of_two(hidden)
    if rows:
        rms_norm_kernel[(rows,)](
            x, x, weight, out, eps, x.stride(0), 0, hidden,
            HIDDEN=hidden, PADDED=padded, ADD=False, num_warps=_warps(padded),
        )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_reference` on the GPU, in place: x becomes the norm and residual the sum; both are returned."""
    rows, hidden = x.shape
    padded = power_of_two(hidden)
    if rows:
        rms_norm_kernel[(rows,)](
            x, residual, weight, x, eps, x.stride(0), residual.stride(0), x.stride(0),
            HIDDEN=hidden, PADDED=padded, ADD=True, num_warps=_warps(padded),
        )  # fmt: skip
    return x, residual
