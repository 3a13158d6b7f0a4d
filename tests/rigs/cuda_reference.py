"""What kernels of CUDA must compute, in plain torch and numpy: products, FP8 tokens, checksums of KV."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twostroke.model.backend import FP8_LIMIT
from twostroke.model.costs.sizes import INT4_GROUP
from twostroke.model.cuda.kernels.fp8 import MIN_SIZE
from twostroke.model.cuda.kernels.gemm import BYTE_ZERO, FP8_GROUP, NIBBLE_ZERO, CudaPackedWeight

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def quantize_tokens_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, in] -> e4m3 [T, in] and fp32 scales [T], a token's largest magnitude over e4m3's largest number; NaN for a
    token that holds NaN or infinity."""
    wide = x.float()
    # By a tensor: on a GPU torch would multiply with a number's reciprocal, which is off by a bit for one in three.
    scales = wide.abs().amax(1).clamp(min=MIN_SIZE) / wide.new_tensor(FP8_LIMIT)
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    codes = (wide * (1 / scales)[:, None]).clamp(-FP8_LIMIT, FP8_LIMIT)
    return codes.to(torch.float8_e4m3fn), scales


def unpack(weight: CudaPackedWeight) -> Tensor:
    """The weights that are computed with, fp32 [out, in]: the reference of the kernels that read them."""
    if weight.bits == 16:
        return weight.packed.float()
    if weight.is_fp8:
        group = weight.columns if len(weight.scales) == 1 else FP8_GROUP
        return weight.packed.float() * weight.scales.T.repeat_interleave(group, dim=1)[:, : weight.columns]
    if weight.bits == 8:
        return (weight.packed.float() - BYTE_ZERO) * weight.scales[:, None]
    blocks = weight.packed.view(weight.rows, -1, 1, INT4_GROUP)
    values = torch.cat((blocks & 15, blocks >> 4), dim=2).float() - NIBBLE_ZERO
    values[:, :, 1] *= 16
    return (values * weight.scales.T.float().view(weight.rows, -1, 2, 1)).view(weight.rows, -1)[:, : weight.columns]


def linear_reference(x: Tensor, weight: CudaPackedWeight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """x [T, in] -> [T, out]: summed in fp32, rounded once to out_dtype."""
    y = x.float() @ unpack(weight).T
    return (y if bias is None else y + bias.float()).to(out_dtype)


def fp8_linear_reference(x: Tensor, weight: CudaPackedWeight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Compute `linear_reference` of x rounded as `quantize_tokens_reference` does."""
    codes, scales = quantize_tokens_reference(x)
    y = codes.float() @ unpack(weight).T * scales[:, None]
    return (y if bias is None else y + bias.float()).to(out_dtype)


def digest_reference(data: NDArray[np.uint8], seal: int) -> bytes:
    """The digest of uint8 [bytes], in numpy."""
    words = np.zeros(-(-data.size // 8), np.uint64)
    words.view(np.uint8)[: data.size] = data
    golden, start = np.uint64(_GOLDEN), np.uint64(seal)
    with np.errstate(over="ignore"):
        places = start + np.arange(1, words.size + 1, dtype=np.uint64) * golden
        mixed = _mix_reference(words ^ places)
        turned = (mixed << np.uint64(29)) | (mixed >> np.uint64(35))
        a = mixed.sum(dtype=np.uint64)
        b = (turned * (places | np.uint64(1))).sum(dtype=np.uint64)
        size = np.uint64(data.size)
        return _mix_reference(np.array([a ^ (start + size), b + a * golden + size], np.uint64)).tobytes()


def _mix_reference(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))
