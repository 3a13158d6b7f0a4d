"""Single tokens of layers that keep a state, on CUDA: gated delta nets, Mamba-2, gated short convolutions.

A state is read from the block of the token before and written into that of its own, which mostly are the same. A layer
takes two launches. The convolution only reads the number of tokens that a state has seen, and makes NaN of a state of
other tokens. The layer's own kernel, which needs all of a head's convolved channels, writes the number.

The last rows of a captured step may be copies of one sequence (model/cuda/graphs.py). All programs of a launch run at
once, so a copy would meet a state that has been rewritten. Only the first of equal rows computes, and writes the
results of all: a block is written for one sequence alone, so equal rows are those with the same one.

One token of gated delta nets: after the convolution, update of the states and gated norm in one pass over them.

A program holds the matrix of a value head in registers, so each of its numbers is read once and written once. With a
the decay, what a state gives of keys and queries is summed together:

    S' = a S + k u^T,  u = b (v - a S^T k),  S'^T q = a S^T q + (k . q) u.

Predicted, not measured: a token of a layer of Qwen3-Next (32 matrices of 128 x 128) reads 2.2 MB and writes 2.2 MB,
convolution included, which an H100's 3.35 TB/s takes 1.3 us for; its 4.7 MFLOP of fp32 take 0.07 us of 67 TFLOP/s. A
batch of one has 32 programs for 132 multiprocessors, and takes the latency of one load of 64 KiB instead.

One token of Mamba-2: after the convolution, one pass over the states.

A program holds the matrix of a head in registers, so each of its numbers is read once and written once.

Predicted, not measured: a token of a layer of Nemotron Nano 9B v2 (128 matrices of 80 x 128) reads 5.4 MB and writes
5.4 MB, convolution included, which an H100's 3.35 TB/s takes 3.2 us for; its 6.6 MFLOP of fp32 take 0.1 us of 67
TFLOP/s.

References: model/architectures/delta_net.py, mamba.py, states.py.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.architectures.delta_net import NORM_EPS, DeltaWeights
from twostroke.model.architectures.mamba import MambaWeights
from twostroke.model.architectures.states import ConvolutionWeights, StateWeights
from twostroke.model.batch import BatchLayout
from twostroke.model.cuda.kernels.launch import await_inputs, dependent_launch, power_of_two
from twostroke.model.state_sizes import StateSizes

_BLOCK = 256  # channels of a program, which reads and writes taps - 1 numbers of each
_BLOCK_WARPS = 4
_THREAD_NUMBERS = 64
"""Numbers of a matrix that a thread holds in registers: two programs of a 128 x 128 matrix share a multiprocessor."""


@triton.jit
def written_block(tables, positions, row, table_stride, BLOCK_SIZE: tl.constexpr):
    """Return the block of a row's token, which is written."""
    return tl.load(tables + row * table_stride + tl.load(positions + row) // BLOCK_SIZE).to(tl.int64)


@triton.jit
def read_block(tables, row, position, table_stride, BLOCK_SIZE: tl.constexpr):
    """Return the block of the token before, whose state is read; any block for a first token."""
    return tl.load(tables + row * table_stride + tl.maximum(position - 1, 0) // BLOCK_SIZE).to(tl.int64)


@triton.jit
def is_copy(tables, positions, row, target, table_stride, BLOCK_SIZE: tl.constexpr):
    """Tell whether the row before is the same sequence."""
    before = written_block(tables, positions, tl.maximum(row - 1, 0), table_stride, BLOCK_SIZE)
    return (row > 0) & (before == target)


@triton.jit
def store_for_copies(
    out, found, inside, row, target, tables, positions, table_stride, WIDTH: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Store numbers at `out` + row * WIDTH, and the same for the copies that follow the row."""
    last = tl.num_programs(0) - 1
    is_same = True
    while is_same:
        tl.store(out + row * WIDTH, found.to(out.dtype.element_ty), mask=inside)
        row += 1
        following = written_block(tables, positions, tl.minimum(row, last), table_stride, BLOCK_SIZE)
        is_same = (row <= last) & (following == target)


@triton.jit
def part_of(cache, block, kind, kv_head, KV_HEADS: tl.constexpr, PART: tl.constexpr):
    """Return the address of a block's part for a kind and a KV head, of PART fp32 numbers."""
    return cache + ((block * 2 + kind) * KV_HEADS + kv_head) * PART


@triton.jit
def matrix_offsets(
    inside,
    ROWS: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMNS_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PART: tl.constexpr,
):
    """Return where a matrix [ROWS, COLUMNS] lies behind its KV head's part of the first kind, which has half of the
    rows, and which of these places are real. `inside`: the place of its head in the part."""
    rows, columns = tl.arange(0, ROWS_PADDED)[:, None], tl.arange(0, COLUMNS_PADDED)[None, :]
    half: tl.constexpr = ROWS // 2
    places = rows // half * (KV_HEADS * PART) + (inside * half + rows % half) * COLUMNS + columns
    return places, (rows < ROWS) & (columns < COLUMNS)


@triton.jit
def count_token(
    cache, target, kv_head, position, number, SEEN: tl.constexpr, KV_HEADS: tl.constexpr, PART: tl.constexpr
):
    """Write the number of tokens that a KV head's state has seen: none where the convolution's `number` is NaN."""
    seen = tl.where(number == number, position + 1.0, float("nan"))
    tl.store(part_of(cache, target, 1, kv_head, KV_HEADS, PART) + SEEN, seen)


@triton.jit
def load_matrix(
    cache,
    tables,
    positions,
    row,
    head,
    table_stride,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMNS_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Return a head's matrix [ROWS, COLUMNS] behind the token before, and `matrix_offsets` of its places. SHARE: heads
    of a KV head."""
    position = tl.load(positions + row)
    source = read_block(tables, row, position, table_stride, BLOCK_SIZE)
    places, real = matrix_offsets(head % SHARE, ROWS, ROWS_PADDED, COLUMNS, COLUMNS_PADDED, KV_HEADS, PART)
    before = part_of(cache, source, 0, head // SHARE, KV_HEADS, PART)
    return tl.load(before + places, mask=real & (position > 0), other=0.0), places, real


@triton.jit
def store_matrix(
    cache,
    positions,
    row,
    target,
    head,
    matrix,
    places,
    real,
    number,
    SHARE: tl.constexpr,
    SEEN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PART: tl.constexpr,
):
    """Store a head's matrix in the block of its token; the first head of each KV head's part also counts the token."""
    kv_head = head // SHARE
    tl.store(part_of(cache, target, 0, kv_head, KV_HEADS, PART) + places, matrix, mask=real)
    if head % SHARE == 0:
        count_token(cache, target, kv_head, tl.load(positions + row), number, SEEN, KV_HEADS, PART)


@triton.jit
def soft_plus(x):
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit(do_not_specialize=["positions", "tables", "table_stride"])
def convolution_kernel(
    inputs,
    conv,
    bias,
    channels,
    cache,
    tables,
    positions,
    convolved,
    table_stride,
    COLUMNS: tl.constexpr,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    TAPS_PADDED: tl.constexpr,
    KEPT_0: tl.constexpr,
    KEPT_1: tl.constexpr,
    MATRICES: tl.constexpr,
    SEEN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_GATES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (row, block's part, BLOCK of its KEPT channels): the SiLU of the convolution of input columns from FIRST
    on, and the last inputs moved on by one. Where it HAS_GATES, it convolves the products of those columns with the
    columns 2 * WIDTH behind, without SiLU."""
    await_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    target = written_block(tables, positions, row, table_stride, BLOCK_SIZE)
    if is_copy(tables, positions, row, target, table_stride, BLOCK_SIZE):
        return
    position = tl.load(positions + row)
    source = read_block(tables, row, position, table_stride, BLOCK_SIZE)
    kv_head, kind = tl.program_id(1) // 2, tl.program_id(1) % 2
    kept = tl.where(kind == 0, KEPT_0, KEPT_1)
    at, tap = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TAPS_PADDED)[None, :]
    real = at < kept
    channel = tl.load(channels + kind * (KV_HEADS * KEPT_0) + kv_head * kept + at, mask=real, other=0)
    places = MATRICES + at[:, None] * (TAPS - 1) + tap
    before = part_of(cache, source, kind, kv_head, KV_HEADS, PART) + places
    after = part_of(cache, target, kind, kv_head, KV_HEADS, PART) + places - 1
    column = inputs + row * COLUMNS + FIRST + channel
    new = tl.load(column, mask=real, other=0.0).to(tl.float32)
    if HAS_GATES:
        new *= tl.load(column + 2 * WIDTH, mask=real, other=0.0).to(tl.float32)
    window = tl.load(before, mask=real[:, None] & (tap < TAPS - 1) & (position > 0), other=0.0)
    window = tl.where(tap == TAPS - 1, new[:, None], window)
    factors = tl.load(conv + channel[:, None] * TAPS + tap, mask=real[:, None] & (tap < TAPS), other=0.0)
    total = tl.sum(window * factors, axis=1)
    tl.debug_barrier()  # a number may be written by another thread than the one that reads it
    tl.store(after, window, mask=real[:, None] & (tap > 0) & (tap < TAPS))
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=real, other=0.0)
    seen = tl.load(part_of(cache, source, 1, kv_head, KV_HEADS, PART) + SEEN)
    known = tl.where((position == 0) | (seen == position.to(tl.float32)), 1.0, float("nan"))
    if not HAS_GATES:
        total *= tl.sigmoid(total)
    tl.store(convolved + row * WIDTH + channel, total * known, mask=real)


def convolve(
    inputs: Tensor,
    first: int,
    weights: StateWeights,
    cache: Tensor,
    layout: BatchLayout,
    form: dict[str, int],
    *,
    has_gates: bool = False,
) -> Tensor:
    """Return the results of the convolution, fp32 [decodes, conv width], NaN for states of other tokens, and move its
    last inputs on. Arguments are those of its kernel; `cache` and `form` are those of `state_numbers_view`."""
    sizes, count, kv_heads = weights.sizes, layout.num_decodes, form["KV_HEADS"]
    convolved = torch.empty((count, sizes.conv_width), dtype=torch.float32, device=inputs.device)
    kept, bias = [len(sizes.channels(kind, 0, kv_heads)) for kind in (0, 1)], weights.conv_bias
    convolution_kernel[(count, 2 * kv_heads, triton.cdiv(max(kept), _BLOCK))](
        inputs, weights.conv, weights.conv if bias is None else bias, _channels(sizes, kv_heads, inputs.device), cache,
        layout.block_tables, layout.positions, convolved, layout.block_tables.stride(0),
        COLUMNS=inputs.shape[1], FIRST=first, WIDTH=sizes.conv_width, TAPS=sizes.taps,
        TAPS_PADDED=power_of_two(sizes.taps), KEPT_0=kept[0], KEPT_1=kept[1],
        MATRICES=sizes.matrix_numbers_in(kv_heads), HAS_BIAS=bias is not None, HAS_GATES=has_gates, BLOCK=_BLOCK,
        **form, num_warps=_BLOCK_WARPS, **dependent_launch(inputs),
    )  # fmt: skip
    return convolved


def state_numbers_view(kv_layer: Tensor, sizes: StateSizes) -> tuple[Tensor, dict[str, int]]:
    """Return the cache's tensor as fp32 numbers of parts, and what kernels must know of its form."""
    numbers = kv_layer.view(*kv_layer.shape[:3], -1).view(torch.float32)
    kv_heads = kv_layer.shape[2]
    seen = sizes.numbers_in(1, kv_heads) - 1
    return numbers, {"KV_HEADS": kv_heads, "PART": numbers.shape[3], "BLOCK_SIZE": kv_layer.shape[3], "SEEN": seen}


def matrix_warps(rows: int, columns: int) -> int:
    """Return the warps of a program that holds a matrix."""
    return max(1, min(16, power_of_two(rows) * power_of_two(columns) // (32 * _THREAD_NUMBERS)))


@lru_cache
def _channels(sizes: StateSizes, kv_heads: int, device: torch.device) -> Tensor:
    """Return the channels of all KV heads' parts of the first kind, then of the second."""
    return torch.tensor(
        [place for kind in (0, 1) for head in range(kv_heads) for place in sizes.channels(kind, head, kv_heads)],
        dtype=torch.int32,
        device=device,
    )


_NORM_EPS = tl.constexpr(NORM_EPS)


@triton.jit(do_not_specialize=["positions", "tables", "table_stride"])
def delta_step_kernel(
    inputs,
    convolved,
    strengths,
    decays,
    decay_biases,
    norm,
    cache,
    tables,
    positions,
    out,
    table_stride,
    eps,
    query_scale,
    COLUMNS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    SEEN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (row, value head)."""
    WIDTH: tl.constexpr = VALUE_HEADS * VALUE
    KEY_WIDTH: tl.constexpr = KEY_HEADS * KEY
    SHARE: tl.constexpr = VALUE_HEADS // KV_HEADS
    await_inputs(DEPENDENT)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = written_block(tables, positions, row, table_stride, BLOCK_SIZE)
    if is_copy(tables, positions, row, target, table_stride, BLOCK_SIZE):
        return
    matrix, places, real = load_matrix(
        cache, tables, positions, row, head, table_stride,
        SHARE, KEY, KEY_PADDED, VALUE, VALUE_PADDED, KV_HEADS, PART, BLOCK_SIZE,
    )  # fmt: skip

    keys, values = tl.arange(0, KEY_PADDED), tl.arange(0, VALUE_PADDED)
    of_key, of_value = keys < KEY, values < VALUE
    of_row = convolved + row * (2 * KEY_WIDTH + WIDTH)
    of_head = of_row + head // (VALUE_HEADS // KEY_HEADS) * KEY
    q = tl.load(of_head + keys, mask=of_key, other=0.0)
    k = tl.load(of_head + KEY_WIDTH + keys, mask=of_key, other=0.0)
    v = tl.load(of_row + 2 * KEY_WIDTH + head * VALUE + values, mask=of_value, other=0.0)
    q *= query_scale / tl.sqrt(tl.sum(q * q, axis=0) + _NORM_EPS)
    k *= 1.0 / tl.sqrt(tl.sum(k * k, axis=0) + _NORM_EPS)
    match = tl.sum(k * q, axis=0)
    of_row = strengths + row * (2 * VALUE_HEADS) + head
    step = soft_plus(tl.load(of_row + VALUE_HEADS) + tl.load(decay_biases + head))
    decay = tl.exp(-tl.load(decays + head) * step)

    known, through = tl.sum(matrix * k[:, None], axis=0), tl.sum(matrix * q[:, None], axis=0)
    update = (v - decay * known) * tl.sigmoid(tl.load(of_row))
    matrix = matrix * decay + k[:, None] * update[None, :]
    store_matrix(cache, positions, row, target, head, matrix, places, real, match, SHARE, SEEN, KV_HEADS, PART)

    found = decay * through + match * update
    found *= 1.0 / tl.sqrt(tl.sum(found * found, axis=0) / VALUE + eps)
    found *= tl.load(norm + values, mask=of_value, other=0.0)
    gates = inputs + row * COLUMNS + (COLUMNS - WIDTH) + head * VALUE
    gate = tl.load(gates + values, mask=of_value, other=0.0).to(tl.float32)
    found *= gate * tl.sigmoid(gate)
    store_for_copies(
        out + head * VALUE + values, found, of_value, row, target, tables, positions, table_stride, WIDTH, BLOCK_SIZE
    )  # fmt: skip


def delta_step(
    products: Sequence[Tensor], weights: DeltaWeights, kv_layer: Tensor, layout: BatchLayout, out: Tensor
) -> None:
    """Implement StateKernels.step."""
    inputs, strengths = products
    sizes, tables = weights.sizes, layout.block_tables
    cache, form = state_numbers_view(kv_layer, sizes)
    convolved = convolve(inputs, 0, weights, cache, layout, form)
    delta_step_kernel[(layout.num_decodes, sizes.value_heads)](
        inputs, convolved, strengths, weights.decay, weights.decay_bias, weights.norm, cache, tables, layout.positions,
        out, tables.stride(0), weights.eps, sizes.key**-0.5,
        COLUMNS=inputs.shape[1], KEY_HEADS=sizes.key_heads, VALUE_HEADS=sizes.value_heads, KEY=sizes.key,
        KEY_PADDED=power_of_two(sizes.key), VALUE=sizes.value, VALUE_PADDED=power_of_two(sizes.value), **form,
        num_warps=matrix_warps(sizes.key, sizes.value), **dependent_launch(inputs),
    )  # fmt: skip


@triton.jit(do_not_specialize=["positions", "tables", "table_stride"])
def mamba_step_kernel(
    inputs,
    convolved,
    steps,
    decays,
    skips,
    step_biases,
    cache,
    tables,
    positions,
    out,
    table_stride,
    least_step,
    most_step,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    STATE: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    SEEN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (row, head)."""
    WIDTH: tl.constexpr = HEADS * HEAD
    SHARE: tl.constexpr = HEADS // KV_HEADS
    await_inputs(DEPENDENT)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    target = written_block(tables, positions, row, table_stride, BLOCK_SIZE)
    if is_copy(tables, positions, row, target, table_stride, BLOCK_SIZE):
        return
    matrix, places, real = load_matrix(
        cache, tables, positions, row, head, table_stride,
        SHARE, HEAD, HEAD_PADDED, STATE, STATE_PADDED, KV_HEADS, PART, BLOCK_SIZE,
    )  # fmt: skip

    dims, states = tl.arange(0, HEAD_PADDED), tl.arange(0, STATE_PADDED)
    of_head, of_state = dims < HEAD, states < STATE
    of_row = convolved + row * (WIDTH + 2 * GROUPS * STATE)
    x = tl.load(of_row + head * HEAD + dims, mask=of_head, other=0.0)
    of_group = of_row + WIDTH + head // (HEADS // GROUPS) * STATE + states
    b = tl.load(of_group, mask=of_state, other=0.0)
    c = tl.load(of_group + GROUPS * STATE, mask=of_state, other=0.0)
    step = soft_plus(tl.load(steps + row * HEADS + head) + tl.load(step_biases + head))
    step = tl.minimum(tl.maximum(step, least_step), most_step)

    matrix = matrix * tl.exp(-tl.load(decays + head) * step) + (x * step)[:, None] * b[None, :]
    found = tl.sum(matrix * c[None, :], axis=1) + tl.load(skips + head) * x
    number = tl.sum(b, axis=0)
    store_matrix(cache, positions, row, target, head, matrix, places, real, number, SHARE, SEEN, KV_HEADS, PART)

    gate = tl.load(inputs + row * COLUMNS + head * HEAD + dims, mask=of_head, other=0.0).to(tl.float32)
    found *= gate * tl.sigmoid(gate)
    store_for_copies(
        out + head * HEAD + dims, found, of_head, row, target, tables, positions, table_stride, WIDTH, BLOCK_SIZE
    )  # fmt: skip


def mamba_step(
    products: Sequence[Tensor], weights: MambaWeights, kv_layer: Tensor, layout: BatchLayout, out: Tensor
) -> None:
    """Implement StateKernels.step, before the norm."""
    inputs, steps = products
    sizes, tables = weights.sizes, layout.block_tables
    cache, form = state_numbers_view(kv_layer, sizes)
    convolved = convolve(inputs, sizes.output_width, weights, cache, layout, form)
    mamba_step_kernel[(layout.num_decodes, sizes.heads)](
        inputs, convolved, steps, weights.decay, weights.skip, weights.step_bias, cache, tables, layout.positions, out,
        tables.stride(0), *map(float, weights.step_limits),
        COLUMNS=inputs.shape[1], HEADS=sizes.heads, HEAD=sizes.head, HEAD_PADDED=power_of_two(sizes.head),
        STATE=sizes.state, STATE_PADDED=power_of_two(sizes.state), GROUPS=sizes.groups, **form,
        num_warps=matrix_warps(sizes.head, sizes.state), **dependent_launch(inputs),
    )  # fmt: skip


_GATE_BLOCK = 1024  # channels of a program
_GATE_WARPS = 4


@triton.jit(do_not_specialize=["positions", "tables", "table_stride"])
def convolution_gate_kernel(
    inputs,
    convolved,
    cache,
    tables,
    positions,
    out,
    table_stride,
    WIDTH: tl.constexpr,
    SEEN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (row, BLOCK channels): the second third of the inputs times the convolution. A row's first program also
    writes the number of seen tokens."""
    await_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    target = written_block(tables, positions, row, table_stride, BLOCK_SIZE)
    if is_copy(tables, positions, row, target, table_stride, BLOCK_SIZE):
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < WIDTH
    found = tl.load(convolved + row * WIDTH + channel, mask=real, other=0.0)
    found *= tl.load(inputs + row * (3 * WIDTH) + WIDTH + channel, mask=real, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        position = tl.load(positions + row)
        for kv_head in range(KV_HEADS):
            number = tl.load(convolved + row * WIDTH + kv_head * (WIDTH // KV_HEADS))
            count_token(cache, target, kv_head, position, number, SEEN, KV_HEADS, PART)
    store_for_copies(out + channel, found, real, row, target, tables, positions, table_stride, WIDTH, BLOCK_SIZE)


def convolution_step(
    products: Sequence[Tensor], weights: ConvolutionWeights, kv_layer: Tensor, layout: BatchLayout, out: Tensor
) -> None:
    """Implement StateKernels.step."""
    (inputs,) = products
    sizes, tables = weights.sizes, layout.block_tables
    cache, form = state_numbers_view(kv_layer, sizes)
    convolved = convolve(inputs, 0, weights, cache, layout, form, has_gates=True)
    convolution_gate_kernel[(layout.num_decodes, triton.cdiv(sizes.channel_count, _GATE_BLOCK))](
        inputs, convolved, cache, tables, layout.positions, out, tables.stride(0), WIDTH=sizes.channel_count,
        BLOCK=_GATE_BLOCK, **form, num_warps=_GATE_WARPS, **dependent_launch(inputs),
    )  # fmt: skip


class CudaStates:
    """Implements model.backend.StateKernels; prompts are torch's."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Implement StateKernels.empty."""
        return torch.empty(shape, dtype=dtype, device=device)

    def step(
        self, weights: StateWeights, products: Sequence[Tensor], kv_layer: Tensor, layout: BatchLayout, out: Tensor
    ) -> None:
        """Implement StateKernels.step."""
        where = kv_layer, layout, out
        match weights:
            case DeltaWeights():
                delta_step(products, weights, *where)
            case MambaWeights():
                mamba_step(products, weights, *where)
            case ConvolutionWeights():
                convolution_step(products, weights, *where)
