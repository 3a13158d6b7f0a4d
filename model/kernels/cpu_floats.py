"""How CPU kernels read and write numbers: fp32 in registers; bf16 in memory is handled as its 16 bits.

Widening is a shift; on the way back a value is rounded to nearest even.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload

from model.kernels.cpu_launch import bits_of_float, float_of_bits


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


@njit(nogil=True, fastmath={"nnan", "nsz"}, error_model="numpy")
def largest(values, count, floor):
    """The largest of `floor` and the first `count` values, none of which may be NaN."""
    for i in range(count):
        floor = values[i] if values[i] > floor else floor
    return floor
