"""Experts on GPUs: which a token takes, and their products as grouped GEMMs. Reference: tests/rigs/reference.py.

Tokens' choices are put in the order of their experts. A tile of rows belongs to one expert; the last of an expert's is
padded. How many rows each has stands in memory alone, so a launch depends on the number of tokens and can be captured:
its programs look up their expert in a list of tiles, which an expert more than a tile of rows makes longer by one.
The first product multiplies gate and up together and ends with the activation; the second one ends with the choice's
weight, and a sum over a token's choices follows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from twostroke.model.backend import Chosen
from twostroke.model.config import Activation, Routing
from twostroke.model.cuda.kernels.gemm import activate, load_x
from twostroke.model.cuda.kernels.grouped_gemm import GroupedWeight, load_weights
from twostroke.model.cuda.kernels.launch import dot_precision, power_of_two


@triton.jit
def route_kernel(
    logits,
    correction,
    experts,
    weights,
    scale,
    scales,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SUMMED: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISES: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per token, its experts as [BLOCK_G, BLOCK_W], a group a row."""
    row = tl.program_id(0).to(tl.int64)
    WIDTH: tl.constexpr = NUM_EXPERTS // GROUPS
    NOTHING: tl.constexpr = float("-inf")
    group, within = tl.arange(0, BLOCK_G)[:, None], tl.arange(0, BLOCK_W)[None, :]
    number = group * WIDTH + within
    is_real = (group < GROUPS) & (within < WIDTH)
    found = tl.load(logits + row * NUM_EXPERTS + number, mask=is_real, other=NOTHING)
    if SIGMOID:
        shrunk = tl.exp(-tl.abs(found))
        scores = tl.where(found >= 0, 1.0, shrunk) / (1.0 + shrunk)
    else:
        scores = tl.exp(found - tl.max(tl.max(found, 1), 0))
        scores = scores / tl.sum(tl.sum(tl.where(is_real, scores, 0.0), 1), 0)
    choosing = scores
    if HAS_CORRECTION:
        choosing += tl.load(correction + number, mask=is_real, other=0.0)
    # NaN ranks below every number, so that the chosen are always experts.
    choosing = tl.where(choosing == choosing, choosing, -3.0e38)
    choosing = tl.where(is_real, choosing, NOTHING)
    if GROUPS > 1:
        left = choosing
        sums = tl.zeros([BLOCK_G], tl.float32)
        for _ in tl.static_range(SUMMED):
            sums += tl.max(left, 1)
            left = tl.where(within == tl.argmax(left, 1)[:, None], NOTHING, left)
        groups = tl.arange(0, BLOCK_G)
        sums = tl.where(groups < GROUPS, sums, NOTHING)
        is_open = tl.zeros([BLOCK_G], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.argmax(sums, 0)
            is_open = tl.where(groups == best, 1, is_open)
            sums = tl.where(groups == best, NOTHING, sums)
        choosing = tl.where(is_open[:, None] > 0, choosing, NOTHING)
    choosing = tl.reshape(choosing, [BLOCK_G * BLOCK_W])
    scores = tl.reshape(scores, [BLOCK_G * BLOCK_W])
    lanes, places = tl.arange(0, BLOCK_G * BLOCK_W), tl.arange(0, BLOCK_K)
    chosen, chosen_scores = tl.zeros([BLOCK_K], tl.int32), tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.argmax(choosing, 0)
        score = tl.sum(tl.where(lanes == best, scores, 0.0), 0)
        choosing = tl.where(lanes == best, NOTHING, choosing)
        chosen = tl.where(places == k, best // BLOCK_W * WIDTH + best % BLOCK_W, chosen)
        chosen_scores = tl.where(places == k, score, chosen_scores)
    if NORMALISES:
        chosen_scores = chosen_scores / tl.sum(chosen_scores, 0)
    if scales is not None:
        chosen_scores *= tl.load(scales + chosen)
    at = row * TOP_K + places
    tl.store(experts + at, chosen, mask=places < TOP_K)
    tl.store(weights + at, chosen_scores * scale, mask=places < TOP_K)


def route(logits: Tensor, correction: Tensor | None, routing: Routing, scales: Tensor | None = None) -> Chosen:
    """Implement Backend.route."""
    tokens, count = logits.shape
    experts = torch.empty((tokens, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, routing.top_k), dtype=torch.float32, device=logits.device)
    if tokens:
        route_kernel[(tokens,)](
            logits, logits if correction is None else correction, experts, weights, routing.scale, scales,
            NUM_EXPERTS=count, TOP_K=routing.top_k, GROUPS=routing.groups, TOP_GROUPS=routing.top_groups,
            SUMMED=routing.summed, SIGMOID=routing.scoring == "sigmoid", NORMALISES=routing.normalises,
            HAS_CORRECTION=correction is not None, BLOCK_G=power_of_two(routing.groups),
            BLOCK_W=power_of_two(count // routing.groups), BLOCK_K=power_of_two(routing.top_k), num_warps=1,
        )  # fmt: skip
    return Chosen(experts, weights)


@triton.jit(do_not_specialize=["count", "tile_rows", "num_tiles"])
def order_kernel(experts, hits, starts, choices, tiles, count, tile_rows, num_tiles, BLOCK: tl.constexpr):
    """One program per expert, and one behind the last: where its choices start, and which they are, in their order.

    An expert whose rows are those from `start` on has the tiles from start // tile_rows + expert on, up to the next
    one's: enough, whatever its rows, so that no program waits for another's count. Nor does it add to another's hits.
    """
    expert = tl.program_id(0)
    place = 0
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = tl.load(experts + at, mask=at < count, other=2147483647)
        place += tl.sum((found < expert).to(tl.int32), 0)
    tl.store(starts + expert, place)
    start = place
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_mine = tl.load(experts + at, mask=at < count, other=2147483647) == expert
        ranks = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(choices + place + ranks - 1, at, mask=is_mine)
        place += tl.sum(is_mine.to(tl.int32), 0)
    is_expert = expert < tl.num_programs(0) - 1
    end = tl.where(is_expert, place // tile_rows + expert + 1, num_tiles)
    for first in range(start // tile_rows + expert, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(tiles + at, tl.zeros([BLOCK], tl.int32) + expert, mask=at < end)
    tl.store(hits + expert, tl.load(hits + expert, mask=is_expert) + (place - start), mask=is_expert)


def order(experts: Tensor, hits: Tensor, tile_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """experts int32 [T, top_k] -> starts int32 [number + 1], choices int32 [T top_k] in the order of experts, and the
    expert of each tile, int32, `number` where there is none.

    They are counted in hits int64 [number].
    """
    number, count = len(hits), experts.numel()
    num_tiles = triton.cdiv(count, tile_rows) + number
    starts, choices, tiles = (
        torch.empty(size, dtype=torch.int32, device=experts.device) for size in (number + 1, count, num_tiles)
    )
    order_kernel[(number + 1,)](
        experts, hits, starts, choices, tiles, count, tile_rows, num_tiles, BLOCK=1024, num_warps=4
    )
    return starts, choices, tiles


@triton.jit(do_not_specialize=["count"])
def locate_kernel(experts, slots, hits, out, count, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """The slot of each choice, BLOCK a program: of an expert's copies, the one whose turn the token's row is."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + at, mask=at < count, other=0)
    holders = tl.load(slots + expert * COLUMNS)
    tl.store(out + at, tl.load(slots + expert * COLUMNS + 1 + at // TOP_K % holders), mask=at < count)
    tl.atomic_add(hits + expert, 1, mask=at < count, sem="relaxed")


def locate(experts: Tensor, slots: Tensor, hits: Tensor) -> Tensor:
    """experts int32 [T, top_k], counted in hits -> the slots that hold them, as ExpertPlaces says, int32 likewise."""
    out, count = torch.empty_like(experts), experts.numel()
    locate_kernel[(triton.cdiv(count, 256),)](
        experts, slots, hits, out, count, TOP_K=experts.shape[1], COLUMNS=slots.shape[1], BLOCK=256, num_warps=4
    )
    return out


@triton.jit
def load_rows(
    weight,
    scales,
    offsets,
    factors,
    rows,
    start,
    num_rows,
    num_columns,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
):
    """Rows of a weight in any form at the columns from `start` on, [BLOCK_N, BLOCK_K]."""
    if KIND == "plain":
        columns = start + tl.arange(0, BLOCK_K)
        at = weight + rows.to(tl.int64)[:, None] * STRIDE + columns[None, :]
        return tl.load(at, mask=(columns < num_columns)[None, :], other=0.0)
    else:
        return load_weights(
            weight, scales, offsets, factors, rows, start, num_rows,
            KIND, GROUP, BLOCK_N, BLOCK_K, STRIDE, HAS_OFFSETS,
        )  # fmt: skip


@triton.jit
def tile_of(starts, tiles, num_tiles, FIRST: tl.constexpr, NUMBER: tl.constexpr, BLOCK_T: tl.constexpr):
    """The program's expert, counted from FIRST, the place of its tile's first row, and the end of the expert's rows,
    which comes before that place where the program has nothing to do."""
    tile = tl.program_id(1)
    if FIRST > 0:
        tile += tl.load(starts + FIRST) // BLOCK_T + FIRST
    expert = tl.load(tiles + tile, mask=tile < num_tiles, other=FIRST + NUMBER)
    is_here = expert < FIRST + NUMBER
    start = tl.load(starts + expert, mask=is_here, other=0)
    end = tl.load(starts + expert + 1, mask=is_here, other=-1)
    return expert - FIRST, start + (tile - start // BLOCK_T - expert) * BLOCK_T, tl.where(is_here, end, -1)


@triton.jit(do_not_specialize=["num_tiles"])
def gate_up_kernel(
    x,
    weight,
    scales,
    offsets,
    factors,
    bias,
    starts,
    choices,
    tiles,
    num_tiles,
    out,
    num_rows,
    num_columns,
    FIRST: tl.constexpr,
    NUMBER: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
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
    """One program per BLOCK_N of an expert's SIZE features, and BLOCK_T of its rows: out [place, SIZE]."""
    expert, first, end = tile_of(starts, tiles, num_tiles, FIRST, NUMBER, BLOCK_T)
    places = first + tl.arange(0, BLOCK_T)
    if first < end:
        real = (places < end)[None, :]
        tokens = tl.load(choices + places, mask=places < end, other=0) // TOP_K
        features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        if ACTIVATION == "relu2":
            rows = expert * SIZE + tl.minimum(features, SIZE - 1)
        else:
            rows = expert * (2 * SIZE) + tl.minimum(features, SIZE - 1)
        x_rows = x + tokens.to(tl.int64)[None, :] * num_columns
        gate = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for start in range(0, num_columns, BLOCK_K):
            x_tile = load_x(x_rows, real, start + tl.arange(0, BLOCK_K), num_columns, False)
            w = load_rows(
                weight, scales, offsets, factors, rows, start, num_rows, num_columns,
                KIND, GROUP, BLOCK_N, BLOCK_K, STRIDE, HAS_OFFSETS,
            )  # fmt: skip
            gate = tl.dot(w.to(x_tile.dtype), x_tile, acc=gate, input_precision=PRECISION)
            if ACTIVATION != "relu2":
                w = load_rows(
                    weight, scales, offsets, factors, rows + SIZE, start, num_rows, num_columns,
                    KIND, GROUP, BLOCK_N, BLOCK_K, STRIDE, HAS_OFFSETS,
                )  # fmt: skip
                up = tl.dot(w.to(x_tile.dtype), x_tile, acc=up, input_precision=PRECISION)
        if HAS_BIAS:  # which none without a gate has
            gate += tl.load(bias + rows).to(tl.float32)[:, None]
            up += tl.load(bias + rows + SIZE).to(tl.float32)[:, None]
        at = places.to(tl.int64)[None, :] * SIZE + features[:, None]
        inside = (features < SIZE)[:, None] & real
        tl.store(out + at, activate(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tiles"])
def down_kernel(
    x,
    weight,
    scales,
    offsets,
    factors,
    bias,
    starts,
    choices,
    tiles,
    num_tiles,
    weights,
    out,
    num_rows,
    num_columns,
    FIRST: tl.constexpr,
    NUMBER: tl.constexpr,
    SIZE: tl.constexpr,
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
    """Multiply rows x [place, columns] as gate_up_kernel does; the results are weighted, out [choice, SIZE]."""
    expert, first, end = tile_of(starts, tiles, num_tiles, FIRST, NUMBER, BLOCK_T)
    places = first + tl.arange(0, BLOCK_T)
    if first < end:
        real = (places < end)[None, :]
        mine = tl.load(choices + places, mask=places < end, other=0)
        features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = expert * SIZE + tl.minimum(features, SIZE - 1)
        x_rows = x + places.to(tl.int64)[None, :] * num_columns
        acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        for start in range(0, num_columns, BLOCK_K):
            x_tile = load_x(x_rows, real, start + tl.arange(0, BLOCK_K), num_columns, False)
            w = load_rows(
                weight, scales, offsets, factors, rows, start, num_rows, num_columns,
                KIND, GROUP, BLOCK_N, BLOCK_K, STRIDE, HAS_OFFSETS,
            )  # fmt: skip
            acc = tl.dot(w.to(x_tile.dtype), x_tile, acc=acc, input_precision=PRECISION)
        if HAS_BIAS:
            acc += tl.load(bias + rows).to(tl.float32)[:, None]
        acc *= tl.load(weights + mine, mask=places < end, other=0.0)[None, :]
        at = mine.to(tl.int64)[None, :] * SIZE + features[:, None]
        tl.store(out + at, acc, mask=(features < SIZE)[:, None] & real)


@triton.jit
def sum_kernel(
    y,
    experts,
    out,
    FIRST: tl.constexpr,
    END: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per token and BLOCK columns: the sum of its choices' rows, in their order, of experts from FIRST to
    END. Others' rows were never written."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(TOP_K):
        expert = tl.load(experts + row * TOP_K + k)
        is_here = (expert >= FIRST) & (expert < END)
        total += tl.load(y + (row * TOP_K + k) * WIDTH + columns, mask=(columns < WIDTH) & is_here, other=0.0)
    tl.store(out + row * WIDTH + columns, total.to(out.dtype.element_ty), mask=columns < WIDTH)


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """Tiling of the experts' products, in steps of block_k columns."""

    block_t: int  # rows
    block_n: int  # features
    block_k: int
    num_warps: int
    num_stages: int


# By rows of an expert, if all had as many: a step of decodes, a short prompt, and a long one, each tile of which reads
# an expert's weights again.
ROWS_OF_CONFIGS = (16, 64)
_CONFIGS = (
    ExpertsConfig(16, 32, 128, num_warps=4, num_stages=3),
    ExpertsConfig(64, 64, 64, num_warps=4, num_stages=3),
    ExpertsConfig(128, 64, 64, num_warps=8, num_stages=3),
)
_FP32_CONFIGS = (ExpertsConfig(16, 16, 64, num_warps=4, num_stages=2), *[ExpertsConfig(32, 16, 64, 4, 2)] * 2)


def experts_config(dtype: torch.dtype, num_choices: int, number: int) -> ExpertsConfig:
    """Return the tiling for `num_choices` choices among `number` experts."""
    table = _FP32_CONFIGS if dtype == torch.float32 else _CONFIGS
    return table[sum(num_choices > number * rows for rows in ROWS_OF_CONFIGS)]


@dataclass(frozen=True)
class ExpertsWeight:
    """One projection of all experts, one below the other."""

    weight: Tensor | GroupedWeight  # [number * out, in], contiguous
    bias: Tensor | None  # [number * out]

    @property
    def shape(self) -> tuple[int, int]:
        weight = self.weight
        return (weight.shape[0], weight.shape[1]) if isinstance(weight, Tensor) else (weight.rows, weight.columns)

    def memory(self, slot: int, number: int) -> list[Tensor]:
        """Return the contiguous memory of one of `number` experts."""
        weight, rows = self.weight, self.shape[0] // number
        parts = [weight] if isinstance(weight, Tensor) else [weight.packed, weight.factors, *weight.scales]
        if not isinstance(weight, Tensor) and weight.offsets is not None:
            parts += [*weight.offsets]
        if self.bias is not None:
            parts.append(self.bias)
        return [part[slot * rows : (slot + 1) * rows] for part in parts]

    @property
    def device(self) -> torch.device:
        return (self.weight if isinstance(self.weight, Tensor) else self.weight.packed).device

    def launched(self, x: Tensor) -> tuple[tuple[Tensor, ...], dict[str, object]]:
        """The kernels' tensors, x in the place of those that there are not, and their constants."""
        weight, bias = self.weight, x if self.bias is None else self.bias
        common = {"HAS_BIAS": self.bias is not None, "PRECISION": dot_precision(x.dtype)}
        if isinstance(weight, Tensor):
            form = {"KIND": "plain", "GROUP": 0, "STRIDE": weight.shape[1], "HAS_OFFSETS": False}
            return (weight, x, x, x, bias), {**form, **common}
        form = {"KIND": weight.kind, "GROUP": weight.group_size, "STRIDE": weight.packed.shape[1]}
        offsets = x if weight.offsets is None else weight.offsets
        tensors = (weight.packed, weight.scales, offsets, weight.factors, bias)
        return tensors, {**form, "HAS_OFFSETS": weight.offsets is not None, **common}


def compute(
    x: Tensor,
    chosen: Chosen,
    gate_up: ExpertsWeight,
    down: ExpertsWeight,
    hits: Tensor,
    held: range,
    activation: Activation,
    config: ExpertsConfig,
) -> Tensor:
    """Implement Experts for contiguous x; sums are fp32. `held` are the experts whose weights these are. Returns a new
    tensor."""
    (tokens, top_k), hidden, number = chosen.experts.shape, x.shape[1], len(held)
    ordered = order(chosen.experts, hits, config.block_t)
    num_tiles = len(ordered[-1])
    tiles = {
        "FIRST": held.start,
        "NUMBER": number,
        "BLOCK_T": config.block_t,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }
    tiles |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    size = gate_up.shape[0] // (number if activation == "relu2" else 2 * number)
    inner = torch.empty((tokens * top_k, size), dtype=x.dtype, device=x.device)
    # A token takes no expert twice. Of experts that are elsewhere no tile is launched.
    row_tiles = triton.cdiv(tokens * min(top_k, number), config.block_t) + number
    tensors, constants = gate_up.launched(x)
    gate_up_kernel[(triton.cdiv(size, config.block_n), row_tiles)](
        x, *tensors, *ordered, num_tiles, inner, *gate_up.shape,
        SIZE=size, TOP_K=top_k, ACTIVATION=activation, **constants, **tiles,
    )  # fmt: skip
    y = torch.empty((tokens * top_k, hidden), dtype=torch.float32, device=x.device)
    tensors, constants = down.launched(inner)
    down_kernel[(triton.cdiv(hidden, config.block_n), row_tiles)](
        inner, *tensors, *ordered, num_tiles, chosen.weights, y, *down.shape, SIZE=hidden, **constants, **tiles
    )
    out = torch.empty_like(x)
    sum_kernel[(tokens, triton.cdiv(hidden, 1024))](
        y, chosen.experts, out,
        FIRST=held.start, END=held.stop, WIDTH=hidden, TOP_K=top_k, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def gate_by_sigmoid_kernel(
    x, logits, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LOGITS: tl.constexpr, PADDED: tl.constexpr
):
    """One program per row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if LOGITS == 1:
        logit = tl.load(logits + row)
    else:
        numbers = tl.arange(0, PADDED)
        logit = tl.max(tl.load(logits + row * LOGITS + numbers, mask=numbers < LOGITS, other=float("-inf")), axis=0)
    shrunk = tl.exp(-tl.abs(logit))
    factor = tl.where(logit >= 0, 1.0, shrunk) / (1.0 + shrunk)
    found = tl.load(x + row * WIDTH + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (found * factor).to(out.dtype.element_ty), mask=columns < WIDTH)


def gate_by_sigmoid(x: Tensor, logits: Tensor) -> Tensor:
    """Implement Backend.gate_by_sigmoid in place."""
    rows, width = x.shape
    if rows:
        gate_by_sigmoid_kernel[(rows, triton.cdiv(width, 1024))](
            x, logits, x,
            WIDTH=width, BLOCK=1024, LOGITS=logits.shape[1], PADDED=power_of_two(logits.shape[1]), num_warps=4,
        )  # fmt: skip
    return x
