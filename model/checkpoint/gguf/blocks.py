"""The blocks of GGUF's quantised tensors, read into `QuantizedWeight`: no weight is rounded once more.

Their layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. A row is blocks of 32 columns, of K kinds
of 256, each with its scales before or behind its numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.config import WeightForm

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
_Parts = tuple[_Bytes, _Floats, _Floats | None]
"""Decoded blocks: numbers [blocks, columns] as stored, and for each group [blocks, groups] its factor and its summand.
"""


@dataclass(frozen=True)
class BlockKind:
    """One kind of blocks."""

    form: WeightForm
    block_bytes: int
    zero: int  # what is taken from each number, so that it is one of `form`'s
    parts: Callable[[_Bytes], _Parts]  # of blocks [blocks, block_bytes]


def read_blocks(data: _Bytes, kind: BlockKind) -> QuantizedWeight:
    """data [rows, bytes of a row]."""
    rows = len(data)
    numbers, scales, added = kind.parts(data.reshape(-1, kind.block_bytes))
    values = torch.from_numpy(numbers.reshape(rows, -1)).view(torch.int8)
    size = kind.form.group_size
    assert size is not None
    offsets = None if added is None else _rows(added + kind.zero * scales, rows)
    return QuantizedWeight(values - kind.zero, _rows(scales, rows), size, kind.form.bits, offsets)


def _rows(of_groups: _Floats, rows: int) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(of_groups.reshape(rows, -1)))


def _halves(blocks: _Bytes, first: int) -> _Floats:
    """The fp16 number at a byte of each block, [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: _Bytes, together: int) -> _Bytes:
    """[blocks, n] -> [blocks, 2 n]: of `together` bytes all lower halves, then all higher ones."""
    runs = packed.reshape(len(packed), -1, 1, together)
    return np.concatenate((runs & 15, runs >> 4), axis=2).reshape(len(packed), -1)


def _fifth_bits(blocks: _Bytes, first: int) -> _Bytes:
    """Bits of four bytes as 16 or 0, [blocks, 32]."""
    return np.unpackbits(blocks[:, first : first + 4], axis=1, bitorder="little") * np.uint8(16)


def _q4_0(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 2:], 16), _halves(blocks, 0), None


def _q4_1(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 4:], 16), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2), _halves(blocks, 0), None


def _q5_1(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4), _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: _Bytes) -> _Parts:
    return blocks[:, 2:], _halves(blocks, 0), None


def _k_scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """Return the factors and offsets of the eight groups of Q4_K and Q5_K, six bits each in 12 bytes, behind the
    block's own factors."""
    low, both, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((low & 63, high & 15 | low >> 6 << 4), axis=1)
    minima = np.concatenate((both & 63, high >> 4 | both >> 6 << 4), axis=1)
    return _halves(blocks, 0) * scales, -_halves(blocks, 2) * minima


def _q4_k(blocks: _Bytes) -> _Parts:
    return _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: _Bytes) -> _Parts:
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)  # bit i is of the group i
    return _nibbles(blocks[:, 48:], 32) | fifth.reshape(len(blocks), -1) * np.uint8(16), *_k_scales(blocks)


def _q6_k(blocks: _Bytes) -> _Parts:
    low = _nibbles(blocks[:, :128], 64).reshape(-1, 2, 4, 32)  # halves of a block, and their quarters
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return (low | high * np.uint8(16)).reshape(len(blocks), -1), _halves(blocks, 208) * np.float32(scales), None


BLOCK_KINDS: Mapping[str, BlockKind] = {
    "Q8_0": BlockKind(WeightForm("int8", 32), 34, 0, _q8_0),
    "Q4_0": BlockKind(WeightForm("int4", 32), 18, 8, _q4_0),
    "Q4_1": BlockKind(WeightForm("int4", 32, has_offsets=True), 20, 8, _q4_1),
    "Q5_0": BlockKind(WeightForm("int8", 32), 22, 16, _q5_0),
    "Q5_1": BlockKind(WeightForm("int8", 32, has_offsets=True), 24, 16, _q5_1),
    "Q4_K": BlockKind(WeightForm("int4", 32, has_offsets=True), 144, 8, _q4_k),
    "Q5_K": BlockKind(WeightForm("int8", 32, has_offsets=True), 176, 16, _q5_k),
    "Q6_K": BlockKind(WeightForm("int8", 16), 210, 32, _q6_k),
}
