"""Layers that keep a state instead of keys and values: what delta nets, Mamba-2 and short convolutions have in common.

States lie in the KV cache's blocks (protocol/kv_layout.py's STATE_WINDOW): of a row of a block table the one behind its
last computed token. A chunk that crosses rows leaves one in each of them.

Gated short convolutions (LFM2, Liquid AI 2025): a token's output is C conv(B x), of its own gates B and C.

The state is the last inputs B x of the convolution alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.backend import GroupNorm, Linear, StateKernels
from twostroke.model.batch import BatchLayout
from twostroke.model.state_sizes import ConvolutionSizes, StateSizes


class StateWeights(Protocol):
    """Weights that all of these layers have, fp32 of one rank's heads."""

    @property
    def sizes(self) -> StateSizes: ...

    @property
    def conv(self) -> Tensor:
        """[conv width, taps]."""

    @property
    def conv_bias(self) -> Tensor | None:
        """[conv width]."""


W = TypeVar("W", bound=StateWeights)


class StateMixer(ABC, Generic[W]):
    """One rank's heads of such a layer, over loaded weights."""

    norm: GroupNorm | None = None
    """Norm of the results, which may need those of all ranks."""

    def __init__(self, weights: W, kernels: StateKernels | None = None):
        """`kernels` compute single tokens; None: torch does."""
        self.weights = weights
        self._kernels = kernels

    @abstractmethod
    def products(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what is projected of tokens x [T, hidden], [T, width] each."""

    @abstractmethod
    def conv_inputs(self, products: Sequence[Tensor]) -> Tensor:
        """Return what the convolution takes of these products, fp32 [T, conv width]."""

    @abstractmethod
    def scan(self, convolved: Tensor, products: Sequence[Tensor], matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Run tokens of one sequence through the recurrence, in chunks. Return their results [T, output width] and the
        matrices behind them; `matrix` [heads, rows, columns] are those before, `convolved` [T, conv width]."""

    @abstractmethod
    def step(self, convolved: Tensor, products: Sequence[Tensor], matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Run one token of each of B sequences through it, as `scan` does. `matrix` [B, heads, rows, columns]."""

    def __call__(self, x: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        """x [T, hidden] -> [T, output width], before `norm` and the output's projection; fp32 where there is a norm.

        Reads the states of the tokens before, and leaves those of the step's tokens, in the cache's tensor kv_layer
        [num_blocks, 2, G, block_size, D]. A state that has not seen all tokens before the step's gives NaN.
        """
        products, first = self.products(x), layout.num_decodes
        shape, dtype = (len(x), self.weights.sizes.output_width), x.dtype if self.norm is None else torch.float32
        if self._kernels is None:
            out = torch.empty(shape, dtype=dtype, device=x.device)
        else:
            out = self._kernels.empty(shape, dtype, x.device)
        if first and self._kernels is not None:
            self._kernels.step(self.weights, products, kv_layer, layout, out)
        elif first:
            self._decode([part[:first] for part in products], kv_layer, layout, out[:first])
        if first < layout.context_lens.numel():
            states = States(kv_layer, self.weights.sizes)
            starts, ends = layout.query_starts.tolist(), layout.context_lens.tolist()
            for index in range(first, len(ends)):
                rows, table = slice(starts[index], starts[index + 1]), layout.block_tables[index].long()
                self._prefill([part[rows] for part in products], states, table, ends[index], out[rows])
        return out

    def _decode(self, products: Sequence[Tensor], kv_layer: Tensor, layout: BatchLayout, out: Tensor) -> None:
        """Compute the sequences that bring one token each, the first ones of the step, into `out`."""
        states, count = States(kv_layer, self.weights.sizes), len(out)
        positions, tables, size = layout.positions[:count], layout.block_tables[:count].long(), states.block_size
        rows = torch.arange(count, device=out.device)
        matrix, last, known = states.load(tables[rows, (positions - 1).clamp_min(0) // size], positions)
        last = torch.cat((last, self.conv_inputs(products)[:, :, None]), dim=2)
        convolved = (last * self.weights.conv).sum(2)
        if self.weights.conv_bias is not None:
            convolved = convolved + self.weights.conv_bias
        found, matrix = self.step(convolved, products, matrix)
        out[:] = (found * known[:, None]).to(out.dtype)
        states.store(tables[rows, positions // size], matrix, last[:, :, 1:], (positions + 1) * known)

    def _prefill(self, products: Sequence[Tensor], states: "States", table: Tensor, end: int, out: Tensor) -> None:
        """Compute one sequence's chunk, which ends at `end`, row by row of its block table."""
        size, taps, start = states.block_size, self.weights.sizes.taps, end - len(out)
        before = torch.tensor([start], device=out.device)
        matrix, inputs, known = states.load(table[max(start - 1, 0) // size][None], before)
        matrix = matrix[0]
        inputs = torch.cat((inputs[0], self.conv_inputs(products).T), dim=1)  # [conv width, taps - 1 + tokens]
        conv, bias = self.weights.conv, self.weights.conv_bias
        convolved = functional.conv1d(inputs[None], conv[:, None], bias, groups=len(inputs))[0].T
        for row in range(start // size, -(-end // size)):
            first, last = max(row * size, start) - start, min((row + 1) * size, end) - start
            part = slice(first, last)
            found, matrix = self.scan(convolved[part], [one[part] for one in products], matrix)
            out[part] = (found * known).to(out.dtype)
            seen = known * (start + last)
            states.store(table[row][None], matrix[None], inputs[None, :, last : last + taps - 1], seen)


class States:
    """The states in a tensor of the cache, as fp32 numbers of each block's parts (state_sizes.py)."""

    def __init__(self, kv_layer: Tensor, sizes: StateSizes):
        self.block_size = kv_layer.shape[3]
        self._parts = kv_layer.view(*kv_layer.shape[:3], -1).view(torch.float32)  # [blocks, 2, kv heads, numbers]
        self._sizes = sizes
        self._kv_heads = kv_layer.shape[2]
        self._matrices = sizes.matrix_numbers_in(self._kv_heads)
        self._channels, self._places = _places(sizes, self._kv_heads, self._parts.shape[3], kv_layer.device)

    def load(self, blocks: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the matrices [B, heads, rows, columns] and the convolution's last inputs [B, conv width, taps - 1]
        behind the first `num_tokens` [B] tokens, which are 0 before the first one.

        The third are 1, or NaN where a state has seen other tokens: it is none of this sequence, and no number is
        better than a wrong one.
        """
        groups, parts, (heads, rows, columns) = self._kv_heads, self._parts[blocks], self._sizes.matrix
        half = (len(blocks), 2, groups, heads // groups, rows // 2, columns)
        matrix = parts[..., : self._matrices].reshape(half).permute(0, 2, 3, 1, 4, 5)
        matrix = matrix.reshape(len(blocks), heads, rows, columns)
        inputs = parts.flatten(1)[:, self._places]
        seen = parts[:, 1, 0, self._sizes.numbers_in(1, groups) - 1]
        is_first = num_tokens == 0
        return (
            torch.where(is_first[:, None, None, None], 0.0, matrix),
            torch.where(is_first[:, None, None], 0.0, inputs),
            torch.where(is_first | (seen == num_tokens), 1.0, torch.nan),
        )

    def store(self, blocks: Tensor, matrix: Tensor, inputs: Tensor, num_tokens: Tensor) -> None:
        """Write states as `load` returns them, which have seen `num_tokens`: NaN for those that are to stay without
        number."""
        groups, count = self._kv_heads, len(blocks)
        heads, rows, columns = self._sizes.matrix
        halves = matrix.reshape(count, groups, heads // groups, 2, rows // 2 * columns).permute(3, 0, 1, 2, 4)
        halves = halves.reshape(2, count, groups, self._matrices)
        seen = num_tokens.to(torch.float32)[:, None, None].expand(-1, groups, 1)
        for kind, channels in enumerate(self._channels):
            kept = inputs[:, channels].reshape(count, groups, -1)
            numbers = torch.cat((halves[kind], kept, *((seen,) if kind else ())), dim=2)
            self._parts[blocks, kind, :, : numbers.shape[2]] = numbers


def group_square_sums(x: Tensor, norm: GroupNorm) -> Tensor:
    """fp32 [T, width] -> [T, norm.columns]: of each group, 0 for groups of other ranks."""
    sums = x.new_zeros((len(x), norm.columns))
    own = slice(norm.first, norm.first + norm.own_groups)
    sums[:, own] = x.view(len(x), norm.own_groups, -1).square().sum(2)
    return sums


def norm_groups(x: Tensor, square_sums: Tensor, norm: GroupNorm, dtype: torch.dtype) -> Tensor:
    """fp32 [T, width] normalised by the sums over all ranks (Zhang & Sennrich 2019), rounded once, to `dtype`."""
    sums = square_sums[:, norm.first : norm.first + norm.own_groups, None]
    normal = x.view(len(x), norm.own_groups, -1) * (sums / norm.size + norm.eps).rsqrt()
    return (normal.view(x.shape) * norm.weight).to(dtype)


@lru_cache
def _places(
    sizes: StateSizes, kv_heads: int, numbers: int, device: torch.device
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the channels in each KV head's parts of either kind [kv heads, channels], and where each channel's last
    inputs lie among the `numbers` of all of a block's parts [conv width, taps - 1]."""
    before, first = sizes.taps - 1, sizes.matrix_numbers_in(kv_heads)
    kinds = [torch.tensor([sizes.channels(kind, head, kv_heads) for head in range(kv_heads)]) for kind in (0, 1)]
    places = torch.empty((sizes.conv_width, before), dtype=torch.int64)
    for kind, channels in enumerate(kinds):
        for head, of_head in enumerate(channels):
            start = (kind * kv_heads + head) * numbers + first
            places[of_head] = torch.arange(start, start + len(of_head) * before).view(-1, before)
    return (kinds[0].to(device), kinds[1].to(device)), places.to(device)


@dataclass(frozen=True)
class ConvolutionWeights:
    """Weights of one rank's channels. All but the projection are fp32."""

    inputs: Linear  # hidden -> B, C, x
    conv: Tensor  # [channels, taps]
    conv_bias: Tensor | None  # [channels]
    sizes: ConvolutionSizes  # this rank's channels


class ShortConvolution(StateMixer[ConvolutionWeights]):
    """One rank's channels of a layer's short convolution, over loaded weights."""

    def products(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.weights.inputs(x),)

    def conv_inputs(self, products: Sequence[Tensor]) -> Tensor:
        gate, _, x = products[0].float().chunk(3, dim=1)
        return gate * x

    def scan(self, convolved: Tensor, products: Sequence[Tensor], matrix: Tensor) -> tuple[Tensor, Tensor]:
        return convolved * products[0].chunk(3, dim=1)[1].float(), matrix

    def step(self, convolved: Tensor, products: Sequence[Tensor], matrix: Tensor) -> tuple[Tensor, Tensor]:
        return self.scan(convolved, products, matrix)
