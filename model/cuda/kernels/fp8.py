"""FP8 numbers (e4m3: a sign, 4 bits of exponent, 3 of mantissa, up to 448; Micikevicius et al. 2022) on any GPU.

What is written is rounded by integer arithmetic: the same everywhere, in Triton's interpreter too. What is read is
converted by the GPU where it knows the type (sm_89 and later), and by its bits elsewhere.
"""

import triton
import triton.language as tl

_LIMIT = tl.constexpr(448.0)


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
    """As `fp8_code`; what is beyond 448 becomes that, and NaN stays."""
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
def of_cache(stored, element: tl.constexpr):
    """What was loaded of a KV cache, in the dtype of activations, exactly; int8 are FP8's bits."""
    if stored.dtype == tl.int8:
        # Sign, exponent and mantissa at the places of an fp32 number's: it is 2**-120 times the value.
        code = stored.to(tl.int32)
        number = ((code << 20) & -2014314496).to(tl.float32, bitcast=True) * 1.329227995784916e36
        stored = tl.where((code & 0x7F) == 0x7F, float("nan"), number)
    return stored.to(element)
