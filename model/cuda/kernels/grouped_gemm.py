"""Projections whose weights checkpoints have quantised: int8, int4 or FP8 in groups of 16 to 128 columns, with offsets.

A weight is widened in registers, scaled, and given its group's offset, then rounded to x's type and multiplied: what
is computed with is the dequantised weight, whatever its form. That is more work a weight than gemm.py's own two forms
take, which scale sums; those stay the ones for what is quantised here. Columns are not split: tiles of few rows are
enough for all multiprocessors where an output has some thousand features.

Bytes of a row: int8 as v + 128; FP8 (e4m3) as it is; of int4, column 2 j low and 2 j + 1 high, each as v + 8. Rows end
with columns of scale 0, up to a multiple of 128. FP4 (e2m1) lies as int4 does. No table and no conversion instruction
is needed: FP8's sign, exponent and mantissa moved to their places in an fp32 number are 2^-120 times the value, FP4's
2^-126 times, which also sm_80 can do.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from twostroke.model.checkpoint.quantization import QuantizedWeight, fp4_codes, two_byte_scales
from twostroke.model.cuda.kernels.gemm import BYTE_ZERO, NIBBLE_ZERO, load_x, widen
from twostroke.model.cuda.kernels.launch import dot_precision

Kind = Literal["int8", "int4", "fp8", "fp4"]

_STEP = 128  # columns that rows are a multiple of
_MIN_GROUP = 16


@dataclass(frozen=True)
class GroupedWeight:
    """A weight in the kernels' form."""

    packed: Tensor  # uint8 [out, in up to a multiple of 128, of int4 half of that]
    scales: Tensor  # fp16 [groups, out]
    offsets: Tensor | None  # as scales
    factors: Tensor  # fp32 [out], of scales and offsets
    kind: Kind
    group_size: int
    columns: int

    @property
    def rows(self) -> int:
        return len(self.packed)


def pack_groups(weight: QuantizedWeight) -> GroupedWeight:
    """Pack a weight whose inputs are in order. Raises ValueError for groups that are too small."""
    columns = weight.values.shape[1]
    weight = weight.with_groups_within(_STEP)
    if weight.group_size < _MIN_GROUP:
        raise ValueError(f"kernels take groups of {_MIN_GROUP} columns or more, not of {weight.group_size}")
    beyond = -columns % _STEP
    kind: Kind = "int8" if weight.bits == 8 else "int4"
    if weight.is_fp4:
        kind, codes = "fp4", functional.pad(fp4_codes(weight.values), (0, beyond))
    elif weight.values.dtype == torch.float8_e4m3fn:
        kind, codes = "fp8", functional.pad(weight.values.view(torch.uint8), (0, beyond))
    else:
        zero = BYTE_ZERO if kind == "int8" else NIBBLE_ZERO
        codes = functional.pad((weight.values.to(torch.int16) + zero).to(torch.uint8), (0, beyond), value=zero)
    if kind in ("int4", "fp4"):
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    factors, *numbers = two_byte_scales(weight)
    more = (columns + beyond) // weight.group_size - weight.num_groups
    scales, offsets = (None if each is None else functional.pad(each, (0, more)).T.contiguous() for each in numbers)
    assert scales is not None
    return GroupedWeight(codes.contiguous(), scales, offsets, factors, kind, weight.group_size, columns)


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Tiling of one launch. A program computes y^T [block_n, block_t] in steps of block_k columns."""

    block_t: int  # tokens
    block_n: int  # rows of the weight
    block_k: int
    num_warps: int
    num_stages: int


# For 16-bit types, by the number of tokens; the first row with room wins, or the last.
_CONFIGS = (
    GroupedConfig(16, 16, 128, num_warps=4, num_stages=4),
    GroupedConfig(64, 64, 64, num_warps=4, num_stages=4),
    GroupedConfig(128, 64, 64, num_warps=8, num_stages=3),
)
_FP32_CONFIGS = (GroupedConfig(16, 16, 64, num_warps=4, num_stages=2), GroupedConfig(32, 16, 64, 4, 2))
TOKENS_OF_CONFIGS = (1, 17, 65)


def grouped_config(dtype: torch.dtype, num_tokens: int) -> GroupedConfig:
    """The table's row for any number of tokens."""
    table = _FP32_CONFIGS if dtype == torch.float32 else _CONFIGS
    return next((config for config in table if num_tokens <= config.block_t), table[-1])


_BYTE_ZERO = tl.constexpr(BYTE_ZERO)
_NIBBLE_ZERO = tl.constexpr(NIBBLE_ZERO)


@triton.jit
def widen_code(code, KIND: tl.constexpr):
    """uint8 of int8 or FP8 weights -> fp32, exact."""
    if KIND == "fp8":
        bits = code.to(tl.uint32)
        return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        return widen(code, 0xFF, _BYTE_ZERO)


@triton.jit
def of_columns(scales_at, factors, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUPS: tl.constexpr):
    """fp16 at [rows, GROUPS] -> fp32 [rows, BLOCK_K], each group's for its columns."""
    scales = tl.load(scales_at).to(tl.float32) * factors
    scales = tl.broadcast_to(scales[:, :, None], (BLOCK_N, GROUPS, BLOCK_K // GROUPS))
    return scales.reshape(BLOCK_N, BLOCK_K)


@triton.jit
def widen_nibble(code, KIND: tl.constexpr):
    """uint8 of whose low half is an int4 or FP4 weight -> fp32, exact."""
    if KIND == "fp4":
        bits = code.to(tl.uint32)
        return (((bits & 0x8) << 28) | ((bits & 0x7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        return widen(code, 0x0F, _NIBBLE_ZERO)


@triton.jit
def load_weights(
    weight,
    scales,
    offsets,
    factors,
    rows,
    start,
    num_rows,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """BLOCK_N rows of a packed weight at the columns from `start` on, which begin a group, fp32 [BLOCK_N, BLOCK_K]."""
    GROUPS: tl.constexpr = BLOCK_K // GROUP if GROUP < BLOCK_K else 1
    weight_rows = weight + rows.to(tl.int64)[:, None] * STRIDE
    of_rows = tl.load(factors + rows)[:, None]
    if KIND == "int4" or KIND == "fp4":
        both = tl.load(weight_rows + (start // 2 + tl.arange(0, BLOCK_K // 2))[None, :])
        low, high = widen_nibble(both, KIND), widen_nibble(both >> 4, KIND)
        w = tl.join(low, high).reshape(BLOCK_N, BLOCK_K)
    else:
        w = widen_code(tl.load(weight_rows + (start + tl.arange(0, BLOCK_K))[None, :]), KIND)
    groups = (start // GROUP + tl.arange(0, GROUPS))[None, :] * num_rows + rows[:, None]
    w *= of_columns(scales + groups, of_rows, BLOCK_N, BLOCK_K, GROUPS)
    if HAS_OFFSETS:
        w += of_columns(offsets + groups, of_rows, BLOCK_N, BLOCK_K, GROUPS)
    return w


# The number of tokens changes from step to step: specialised on it, the kernel would be compiled again while serving.
@triton.jit(do_not_specialize=["num_tokens"])
def grouped_gemm_kernel(
    x,
    weight,
    scales,
    offsets,
    factors,
    bias,
    y,
    num_tokens,
    num_rows,
    num_columns,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per BLOCK_N rows of the weight, which has STRIDE bytes a row, and BLOCK_T tokens."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    real_rows = tl.minimum(rows, num_rows - 1)
    real = (tokens < num_tokens)[None, :]
    x_rows = x + tokens.to(tl.int64)[None, :] * num_columns
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(0, num_columns, BLOCK_K):
        w = load_weights(
            weight, scales, offsets, factors, real_rows, start, num_rows,
            KIND, GROUP, BLOCK_N, BLOCK_K, STRIDE, HAS_OFFSETS,
        )  # fmt: skip
        columns = start + tl.arange(0, BLOCK_K)
        x_tile = load_x(x_rows, real, columns, num_columns, False)
        acc = tl.dot(w.to(x_tile.dtype), x_tile, acc=acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc += tl.load(bias + real_rows).to(tl.float32)[:, None]
    at = tokens.to(tl.int64)[None, :] * num_rows + rows[:, None]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=(rows < num_rows)[:, None] & real)


def grouped_gemm(
    x: Tensor, weight: GroupedWeight, bias: Tensor | None, out_dtype: torch.dtype, config: GroupedConfig
) -> Tensor:
    """y = x W^T + b for contiguous x [T, in] and bias [out]; sums are fp32. Returns a new tensor [T, out]."""
    tokens, rows = len(x), weight.rows
    y = torch.empty((tokens, rows), dtype=out_dtype, device=x.device)
    if tokens and rows:
        grouped_gemm_kernel[(triton.cdiv(rows, config.block_n), triton.cdiv(tokens, config.block_t))](
            x, weight.packed, weight.scales, x if weight.offsets is None else weight.offsets, weight.factors,
            x if bias is None else bias, y, tokens, rows, weight.columns,
            KIND=weight.kind, GROUP=weight.group_size,
            BLOCK_T=config.block_t, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            STRIDE=weight.packed.shape[1], HAS_OFFSETS=weight.offsets is not None, HAS_BIAS=bias is not None,
            PRECISION=dot_precision(x.dtype), num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["token_ids", "first"])
def grouped_embedding_kernel(
    token_ids,
    weight,
    scales,
    offsets,
    factors,
    out,
    first,
    num_rows,
    num_columns,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token and BLOCK columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids + token) - first
    is_ours = (row >= 0) & (row < num_rows)
    inside = (columns < num_columns) & is_ours
    if KIND == "int4" or KIND == "fp4":
        both = tl.load(weight + row * STRIDE + columns // 2, mask=inside, other=0)
        value = widen_nibble(both >> (columns % 2 * 4).to(tl.uint8), KIND)
    else:
        value = widen_code(tl.load(weight + row * STRIDE + columns, mask=inside, other=0), KIND)
    group = columns // GROUP * num_rows + row
    value *= tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
    if HAS_OFFSETS:
        value += tl.load(offsets + group, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(factors + row, mask=is_ours, other=0.0)
    tl.store(out + token * num_columns + columns, value.to(out.dtype.element_ty), mask=columns < num_columns)


def grouped_embedding(token_ids: Tensor, table: GroupedWeight, first: int, out_dtype: torch.dtype) -> Tensor:
    """Implement Backend.embed."""
    out = torch.empty((len(token_ids), table.columns), dtype=out_dtype, device=token_ids.device)
    if len(token_ids):
        grouped_embedding_kernel[(len(token_ids), triton.cdiv(table.columns, 1024))](
            token_ids, table.packed, table.scales, table.scales if table.offsets is None else table.offsets,
            table.factors, out, first, table.rows, table.columns,
            KIND=table.kind, GROUP=table.group_size, STRIDE=table.packed.shape[1],
            HAS_OFFSETS=table.offsets is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out
