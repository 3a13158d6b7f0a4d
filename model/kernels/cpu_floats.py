"""How CPU kernels read and write numbers: fp32 in registers; bf16 in memory is handled as its 16 bits.

Widening is a shift; on the way back a value is rounded to nearest even.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from twostroke.model.kernels.cpu_launch import bits_of_float, compiled, float_of_bits


def widen(value):
    """The float32 of a stored value (fp32, or bf16 as uint16)."""
    raise NotImplementedError("compiled code only")


@overload(widen, inline="always")
def _widen(value):
    if value == types.uint16:
        return lambda value: float_of_bits(np.uint32(value) << np.uint32(16))
    return lambda value: value


def store(array, index, value):
    """array[index] = value, rounded to the array's type."""
    raise NotImplementedError("compiled code only")


@overload(store, inline="always")
def _store(array, index, value):
    if array.dtype == types.uint16:

        def rounded(array, index, value):
            bits = bits_of_float(value)
            even = (bits >> np.uint32(16)) & np.uint32(1)
            array[index] = np.uint16((bits + np.uint32(0x7FFF) + even) >> np.uint32(16))

        return rounded

    def plain(array, index, value):
        array[index] = value

    return plain


_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)


@njit(nogil=True, fastmath={"contract"}, error_model="numpy")
def exponential(x):
    """e^x in fp32 to 2 ulp, without a call: loops over it vectorise (Cody & Waite reduction, Cephes' polynomial).

    Clamped to [-87, 88]: below, the result is 1e-38 instead of 0.
    """
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    whole = np.floor(x * _LOG2_E + np.float32(0.5))
    part = x - whole * _LN2_HIGH - whole * _LN2_LOW
    series = np.float32(1.9875691500e-4)
    series = series * part + np.float32(1.3981999507e-3)
    series = series * part + np.float32(8.3334519073e-3)
    series = series * part + np.float32(4.1665795894e-2)
    series = series * part + np.float32(1.6666665459e-1)
    series = series * part + np.float32(5.0000001201e-1)
    value = series * part * part + part + np.float32(1.0)
    return value * float_of_bits(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))


@compiled
def largest(values, count):
    """The largest of the first `count` values, none of which may be NaN; -inf where there are none."""
    highest = np.float32(-np.inf)
    for i in range(count):
        highest = _larger(highest, values[i])
    return highest


@intrinsic
def _larger(typingctx: Any, left: Any, right: Any) -> Any:
    """The larger of two float32, neither NaN. Of `max` and of comparisons LLVM makes no vector loop."""
    del typingctx, left, right

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        del context, signature
        real = ir.FloatType()
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(real, (real, real)), "llvm.maxnum.f32"
        )
        return builder.call(function, arguments, fastmath=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), codegen
