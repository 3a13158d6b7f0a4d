"""FP8 numbers (e4m3: a sign, 4 bits of exponent, 3 of mantissa, up to 448; Micikevicius et al. 2022) on any GPU.

What is written is rounded by integer arithmetic: the same everywhere, in Triton's interpreter too. What is read is
converted by the GPU where it knows the type (sm_89 and later), and by its bits elsewhere.

Activations that meet weights in FP8 are rounded to it with a scale of each token's own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.backend import FP8_LIMIT
from twostroke.model.cuda.kernels.launch import power_of_two

_LIMIT = tl.constexpr(FP8_LIMIT)
MIN_SIZE = 1e-30  # of a token's largest magnitude: a token of zeros has a scale, too


@triton.jit
def fp8_code(value):
    """fp32, at most 448 and what is rounded to it -> the code's bits, int32: to nearest, ties to even."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # exponents: 127 in fp32, 7 in e4m3
    small = (tl.abs(value) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # multiples of 2**-9
    return tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def fp8_code_of_any(value):
    """Return the code as `fp8_code` does; values above 448 saturate, and NaN stays NaN."""
    limited = tl.where(value > _LIMIT, _LIMIT, tl.where(value < -_LIMIT, -_LIMIT, value))
    return tl.where(value == value, fp8_code(limited), 0x7F)


@triton.jit
def fp8_value(code):
    """The bits of a code that is no NaN, int32 in [0, 255] -> fp32."""
    size = code & 0x7F
    normal = ((size << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    magnitude = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
    return tl.where(code >= 0x80, -magnitude, magnitude)


@triton.jit
def rounded(value, element: tl.constexpr):
    """fp32 -> what is stored as `element`, of which uint8 are FP8's bits."""
    if element == tl.uint8:
        value = fp8_code_of_any(value)
    return value.to(element)


@triton.jit
def beside_cache(q, stored: tl.constexpr):
    """Queries in the dtype in which a cache of `stored` elements is multiplied: beside FP8 those of bf16 become fp16.

    Hardware widens FP8 to fp16. On to bf16 it converts one number at a time, at a sixteenth of an addition's rate on
    sm_90, which took longer than reading bf16 in the first place (H200, 2026-11-26). A query of bf16 is exact in fp16
    from 2**-14 up to 65504, and no normed and projected state comes near that end.
    """
    if stored.primitive_bitwidth == 8 and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)
    return q


@triton.jit
def of_cache(stored, element: tl.constexpr):
    """Return what was loaded of a KV cache, in the dtype that it is multiplied in, exactly; int8 are FP8's bits."""
    if stored.dtype == tl.int8:
        # Sign, exponent and mantissa at the places of an fp32 number's: it is 2**-120 times the value.
        code = stored.to(tl.int32)
        number = ((code << 20) & -2014314496).to(tl.float32, bitcast=True) * 1.329227995784916e36
        stored = tl.where((code & 0x7F) == 0x7F, float("nan"), number)
    return stored.to(element)


@triton.jit
def size_of(values):
    """Magnitudes, infinite for NaN: a maximum passes over that."""
    return tl.where(values == values, tl.abs(values), float("inf"))


@triton.jit
def token_scale(largest, MIN_SIZE: tl.constexpr):
    """The scale of a token whose largest magnitude this is, and what its values are multiplied with."""
    scale = tl.where(largest < float("inf"), tl.div_rn(tl.maximum(largest, MIN_SIZE), _LIMIT), float("nan"))
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def quantize_tokens_kernel(x, codes, scales, COLUMNS: tl.constexpr, PADDED: tl.constexpr, MIN_SIZE: tl.constexpr):
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    values = tl.load(x + token * COLUMNS + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)
    scale, inverse = token_scale(tl.max(size_of(values), axis=0), MIN_SIZE)
    tl.store(codes + token * COLUMNS + columns, rounded(values * inverse, tl.uint8), mask=columns < COLUMNS)
    tl.store(scales + token, scale)


def quantize_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """tests/rigs/cuda_reference.py's `quantize_tokens_reference` of contiguous x."""
    tokens, columns = x.shape
    codes = torch.empty((tokens, columns), dtype=torch.uint8, device=x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    padded = power_of_two(columns)
    if tokens:
        quantize_tokens_kernel[(tokens,)](
            x,
            codes,
            scales,
            COLUMNS=columns,
            PADDED=padded,
            MIN_SIZE=MIN_SIZE,
            num_warps=8 if padded > 2048 else 4,
        )
    return codes.view(torch.float8_e4m3fn), scales
