"""KV at one byte a value on the wire, with a scale for each row; half the bytes of bf16.

A row is the head_dim values of one token and one head, of K or of V. It becomes head_dim codes c and a bf16 scale s:
a value is s * c, with c an int8 in [-127, 127], or an fp8 (e4m3: 4 bits of exponent, 3 of mantissa, up to 448).
`s` is the row's largest magnitude / 127 (or 448), rounded up to bf16, so that no code is ever cut off, and at least
2**-126. A unit on the wire: the codes [2 (K, V), num_heads, unit_tokens, head_dim], then the scales
[2, num_heads, unit_tokens], little-endian.

Errors: int8 within s / 2; fp8 within 1/16 of the value, or s * 2**-10 for values below s * 2**-6. Then the target
rounds to its own dtype. A row with NaN or infinity comes out as NaN altogether: broken KV stays recognisably so.

The same on CUDA: model/cuda/kernels/kv_units.py; both ends may run either.
"""

import numpy as np
from numpy.typing import NDArray

from twostroke.kvtransfer.rules.layout import Cut
from twostroke.protocol.kv_layout import DTYPE_BYTES


def raw_unit_bytes(cut: Cut) -> int:
    """Bytes of a unit as this side's store has it."""
    return 2 * cut.num_heads * cut.unit_tokens * cut.layout.head_dim * DTYPE_BYTES[cut.layout.dtype]


def encode(raw: NDArray[np.uint8], cut: Cut, out: NDArray[np.uint8]) -> None:
    """Units as stored -> as on the wire. The interpreter's lock is free meanwhile.

    raw [units * raw_unit_bytes(cut)] of `cut.layout.dtype`, out [units * cut.unit_bytes]; both contiguous, apart from
    each other. Raises ValueError for other sizes, or a cut without encoding.
    """
    units = _num_units(raw, out, cut)
    from twostroke.model.cpu.kernels.kv_encode import encode_rows

    encode_rows(cut.encoding, cut.layout.dtype, raw, out, units, cut.layout.head_dim)


def decode(wire: NDArray[np.uint8], cut: Cut, out: NDArray[np.uint8]) -> None:
    """Units as on the wire -> as this side stores them, in `cut.layout.dtype`, which may differ from the source's.

    wire [units * cut.unit_bytes], out [units * raw_unit_bytes(cut)]; as for `encode`.
    """
    units = _num_units(out, wire, cut)
    from twostroke.model.cpu.kernels.kv_encode import decode_rows

    decode_rows(cut.encoding, cut.layout.dtype, wire, out, units, cut.layout.head_dim)


def _num_units(raw: NDArray[np.uint8], wire: NDArray[np.uint8], cut: Cut) -> int:
    if cut.encoding == "raw":
        raise ValueError("KV of this cut travels as it is stored")
    units, rest = divmod(wire.size, cut.unit_bytes)
    if rest or raw.size != units * raw_unit_bytes(cut):
        raise ValueError(
            f"{raw.size} bytes as stored and {wire.size} on the wire are not the same units, "
            f"of {raw_unit_bytes(cut)} and {cut.unit_bytes} bytes"
        )
    return units
