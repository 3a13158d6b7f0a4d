"""KV rows to one byte a value and back, on CPUs: two passes over a row that is in the processor's cache.

The format and its error bounds are described in kvtransfer/transports/host_units.py. One thread, without the
interpreter's lock.
"""

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from twostroke.model.cpu.kernels.floats import fp8_code, fp8_value, store, widen
from twostroke.model.cpu.kernels.launch import bits_of_float, float_of_bits

_MIN_SCALE = np.uint32(0x00800000)  # 2**-126, the least normal number: its inverse is finite
_NAN = np.uint32(0x7FC00000)
_TOO_LARGE = np.uint32(0x7F000000)  # 2**127: from here on, s * c might overflow
_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: what is added to it is rounded to an integer, in its lowest bits
_ROUND_BITS = np.uint32(0x4B400000)

_inline = njit(inline="always", error_model="numpy")


@_inline
def _scale_bits(largest, limit):
    """bf16 scale, as fp32 bits, of a row whose largest magnitude has these fp32 bits."""
    if largest >= _TOO_LARGE:
        return _NAN
    scale = (bits_of_float(float_of_bits(largest) / limit) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return max(scale, _MIN_SCALE)


@_inline
def _int8_code(value):
    return np.uint8((bits_of_float(value + _ROUND) - _ROUND_BITS) & np.uint32(0xFF))


@_inline
def _int8_value(code):
    return np.float32(np.int8(code))


def _make_encoder(code_of: Any, limit: float) -> Any:
    most = np.float32(limit)

    @njit(nogil=True, error_model="numpy")
    def encode(raw, wire):  # raw [units, rows, head_dim], wire [units, rows * (head_dim + 2)]
        units, rows, dim = raw.shape
        for unit in range(units):
            for row in range(rows):
                values, codes = raw[unit, row], wire[unit, row * dim : (row + 1) * dim]
                largest = np.uint32(0)
                for i in range(dim):
                    size = np.uint32(bits_of_float(widen(values[i])) & np.uint32(0x7FFFFFFF))
                    largest = size if size > largest else largest
                scale = _scale_bits(largest, most)
                at = rows * dim + 2 * row
                wire[unit, at] = np.uint8((scale >> np.uint32(16)) & np.uint32(0xFF))
                wire[unit, at + 1] = np.uint8(scale >> np.uint32(24))
                inverse = np.float32(1) / float_of_bits(scale)
                for i in range(dim):
                    codes[i] = code_of(widen(values[i]) * inverse)

    return encode


def _make_decoder(value_of: Any) -> Any:
    @njit(nogil=True, error_model="numpy")
    def decode(wire, raw):
        units, rows, dim = raw.shape
        for unit in range(units):
            for row in range(rows):
                values, codes = raw[unit, row], wire[unit, row * dim : (row + 1) * dim]
                at = rows * dim + 2 * row
                bits = (np.uint32(wire[unit, at]) << np.uint32(16)) | (np.uint32(wire[unit, at + 1]) << np.uint32(24))
                scale = float_of_bits(bits)
                for i in range(dim):
                    store(values, i, value_of(codes[i]) * scale)

    return decode


# Compiled for fp32 and for bf16 when they are first needed; a third of a second each.
_ENCODERS = {"int8": _make_encoder(_int8_code, 127.0), "fp8": _make_encoder(fp8_code, 448.0)}
_DECODERS = {"int8": _make_decoder(_int8_value), "fp8": _make_decoder(fp8_value)}
_NUMPY = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view, so that compiled code serves sources with and without write access."""
    view = array.view()
    view.flags.writeable = False
    return view


def encode_rows(
    encoding: str, dtype: str, raw: NDArray[np.uint8], wire: NDArray[np.uint8], num_units: int, head_dim: int
) -> None:
    """raw, of `dtype` -> wire; both uint8, contiguous, of `num_units` units. fp16 is widened first, by numpy.

    Raises ValueError where `raw` does not lie on a multiple of its dtype's size.
    """
    rows = wire.size // num_units // (head_dim + 2) if num_units else 0
    values = _values(raw, dtype, (num_units, rows, head_dim))
    if dtype == "float16":
        values = values.astype(np.float32)
    _ENCODERS[encoding](_read_only(values), wire.reshape(num_units, rows * (head_dim + 2)))


def decode_rows(
    encoding: str, dtype: str, wire: NDArray[np.uint8], raw: NDArray[np.uint8], num_units: int, head_dim: int
) -> None:
    """wire -> raw, of `dtype`; as for `encode_rows`. What fp16 can't hold becomes infinite."""
    rows = wire.size // num_units // (head_dim + 2) if num_units else 0
    values = _values(raw, dtype, (num_units, rows, head_dim))
    codes = _read_only(wire.reshape(num_units, rows * (head_dim + 2)))
    if dtype != "float16":
        _DECODERS[encoding](codes, values)
        return
    widened = np.empty(values.shape, np.float32)
    _DECODERS[encoding](codes, widened)
    with np.errstate(over="ignore"):
        values[:] = widened


def _values(raw: NDArray[np.uint8], dtype: str, shape: tuple[int, int, int]) -> NDArray[Any]:
    values = raw.view(_NUMPY[dtype]).reshape(shape)
    if not values.flags.aligned:
        raise ValueError(f"values of {dtype} begin at an odd address")
    return values
