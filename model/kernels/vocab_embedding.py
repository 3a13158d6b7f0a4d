"""Embedding rows out of one rank's slice of the vocabulary, in whatever form its weights are kept for the LM head."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.kernels.packed_weight import BYTE_ZERO, NIBBLE_ZERO, PackedWeight, unpack
from twostroke.model.quantization import INT4_GROUP

_BLOCK = 1024  # columns a program
_WARPS = 4


def vocab_embedding_reference(
    token_ids: Tensor, table: Tensor | PackedWeight, first: int, out_dtype: torch.dtype
) -> Tensor:
    """token_ids int64 [T], table [rows, hidden] of the tokens from `first` on -> [T, hidden]; others' rows are zeros.

    So the sum over all ranks is the whole vocabulary's embedding (Shoeybi et al. 2019).
    """
    rows = table if isinstance(table, Tensor) else unpack(table)
    indices = token_ids - first
    inside = (indices >= 0) & (indices < rows.shape[0])
    return torch.where(inside[:, None], rows[indices.where(inside, 0)], 0).to(out_dtype)


@triton.jit(do_not_specialize=["first"])
def vocab_embedding_kernel(
    token_ids,
    table,
    scales,
    out,
    first,
    num_rows,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token and BLOCK columns. BITS: 16 for any float type, or those of a PackedWeight."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids + token) - first
    inside = (columns < COLUMNS) & (row >= 0) & (row < num_rows)
    if BITS == 16:
        value = tl.load(table + row * COLUMNS + columns, mask=inside, other=0.0).to(tl.float32)
    elif BITS == 8:
        byte = tl.load(table + row * COLUMNS + columns, mask=inside, other=ZERO)
        scale = tl.load(scales + row, mask=(row >= 0) & (row < num_rows), other=0.0)
        value = (byte.to(tl.float32) - ZERO) * scale
    else:
        group = columns // GROUP
        row_bytes: tl.constexpr = (COLUMNS + 2 * GROUP - 1) // (2 * GROUP) * GROUP
        byte = tl.load(table + row * row_bytes + group // 2 * GROUP + columns % GROUP, mask=inside, other=0)
        scale = tl.load(scales + group * num_rows + row, mask=inside, other=0.0).to(tl.float32)
        high = group % 2 == 1
        # The high half stands for 16 times its value.
        value = tl.where(high, (byte & 0xF0).to(tl.float32) - 16 * ZERO, (byte & 0x0F).to(tl.float32) - ZERO) * scale
    tl.store(out + token * COLUMNS + columns, value.to(out.dtype.element_ty), mask=columns < COLUMNS)


def vocab_embedding(token_ids: Tensor, table: Tensor | PackedWeight, first: int, out_dtype: torch.dtype) -> Tensor:
    """`vocab_embedding_reference` on the GPU. token_ids int64 [T]; the table is contiguous. Returns a new tensor."""
    if isinstance(table, Tensor):
        bits, (rows, columns), weights, scales = 16, table.shape, table, table
    else:
        bits, rows, columns, weights, scales = table.bits, table.rows, table.columns, table.packed, table.scales
    out = torch.empty((token_ids.shape[0], columns), dtype=out_dtype, device=token_ids.device)
    if token_ids.shape[0]:
        vocab_embedding_kernel[(token_ids.shape[0], triton.cdiv(columns, _BLOCK))](
            token_ids, weights, scales, out, first, rows,
            COLUMNS=columns, BITS=bits, ZERO=BYTE_ZERO if bits == 8 else NIBBLE_ZERO, GROUP=INT4_GROUP, BLOCK=_BLOCK,
            num_warps=_WARPS,
        )  # fmt: skip
    return out
