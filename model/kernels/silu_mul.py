"""The gated activation of a SwiGLU feed-forward layer: silu(gate) * up."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # columns a program: 8 an element lane at 4 warps, one 16-byte access of a 16-bit type
_WARPS = 4


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I], gate first -> silu(gate) * up [T, I] in fp32, rounded once (Shazeer 2020)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


@triton.jit
def silu_mul_kernel(gate_up, out, stride, out_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    # Of both signs the exponential that can't overflow.
    shrunk = tl.exp(-tl.abs(gate))
    sigmoid = tl.where(gate >= 0, 1.0, shrunk) / (1.0 + shrunk)
    tl.store(out + row * out_stride + columns, (gate * sigmoid * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu_mul_reference` on the GPU. gate_up [T, 2 I] with contiguous rows."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        silu_mul_kernel[(rows, triton.cdiv(width, _BLOCK))](
            gate_up, out, gate_up.stride(0), width, WIDTH=width, BLOCK=_BLOCK, num_warps=_WARPS
        )
    return out
