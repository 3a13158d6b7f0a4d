"""Weights of layers that keep a state, on one rank: the rows and columns of its heads."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twostroke.model.architectures.delta_net import DeltaNet, DeltaWeights
from twostroke.model.architectures.mamba import Mamba, MambaWeights
from twostroke.model.architectures.short_convolution import ConvolutionWeights, ShortConvolution
from twostroke.model.architectures.states import StateMixer
from twostroke.model.backend import GroupNorm, Linear, StateKernels
from twostroke.model.config import ConvolutionSpec, DeltaSpec, MambaSpec, Projection, StateSpec
from twostroke.model.parallel.form import Shard, of_heads, shifted
from twostroke.model.shapes.state_sizes import ConvolutionSizes, DeltaSizes, MambaSizes, StateSizes

if TYPE_CHECKING:
    from twostroke.model.checkpoint.decoder_weights import RankTensors, Weight


class StateLoader:
    """Builds one rank's part of layers that keep a state, whose sizes on all ranks these are."""

    def __init__(self, tensors: "RankTensors", sizes: StateSizes, shard: Shard, kernels: StateKernels | None):
        self._tensors = tensors
        self._whole = sizes
        self._shard = shard
        self._kernels = kernels

    def mixer(self, prefix: str, parts: StateSpec, eps: float) -> tuple[StateMixer[Any], Linear]:
        """Return a layer, and the projection of its result. `eps` is that of the model's norms."""
        match parts, self._whole:
            case DeltaSpec(), DeltaSizes():
                mixer: StateMixer[Any] = DeltaNet(self._delta(prefix, parts, self._whole, eps), self._kernels)
            case MambaSpec(), MambaSizes():
                mixer = Mamba(self._mamba(prefix, parts, self._whole), self._kernels)
            case ConvolutionSpec(), ConvolutionSizes():
                mixer = ShortConvolution(self._convolution(prefix, parts, self._whole), self._kernels)
            case _:
                raise TypeError(f"{parts} has no {self._whole}")
        columns = self._shard.part(self._whole.output_width)
        return mixer, self._tensors.by_columns(prefix, parts.output, columns)

    def _delta(self, prefix: str, parts: DeltaSpec, whole: DeltaSizes, eps: float) -> DeltaWeights:
        tensors, shard, sizes = self._tensors, self._shard, whole.of_rank(self._shard.size)
        key_heads, value_heads = shard.part(whole.key_heads), shard.part(whole.value_heads)
        keys, values = of_heads(key_heads, sizes.key), of_heads(value_heads, sizes.value)
        convolved = [keys, shifted(keys, whole.key_width), shifted(values, 2 * whole.key_width)]
        if parts.by_key_heads:
            each = sizes.value_heads // sizes.key_heads
            inputs = self._by_key_heads(prefix, parts.qkv, key_heads, [sizes.key, sizes.key, *[each * sizes.value] * 2])
            strengths = self._by_key_heads(prefix, parts.beta, key_heads, [each, each])
        else:
            inputs = [tensors.rows(prefix, parts.qkv, rows) for rows in convolved]
            inputs.append(tensors.rows(prefix, parts.gate, values))
            strengths = [tensors.rows(prefix, part, value_heads) for part in (parts.beta, parts.decay)]
        return DeltaWeights(
            inputs=tensors.linear(tensors.together(inputs), None),
            strengths=tensors.linear(tensors.plain(tensors.together(strengths)), None, "none"),
            conv=self._kept(prefix, parts.conv, convolved)[:, 0],
            decay=self._kept(prefix, parts.decay_log, [value_heads]).exp(),
            decay_bias=self._kept(prefix, parts.decay_bias, [value_heads]),
            norm=self._kept(prefix, f"{parts.norm}.weight", [slice(0, sizes.value)]),
            eps=eps,
            sizes=sizes,
        )

    def _by_key_heads(self, prefix: str, part: Projection, heads: slice, widths: Sequence[int]) -> "list[Weight]":
        """Return parts of a projection whose rows are, key head by key head, so many of each part."""
        rows = of_heads(heads, sum(widths))
        of_head = torch.arange(rows.stop - rows.start).view(-1, sum(widths))
        places = torch.cat([some.reshape(-1) for some in torch.split(of_head, list(widths), dim=1)])
        return [self._tensors.at_places(prefix, part, rows, places)]

    def _mamba(self, prefix: str, parts: MambaSpec, whole: MambaSizes) -> MambaWeights:
        shard, sizes = self._shard, whole.of_rank(self._shard.size)
        heads, width = shard.part(whole.heads), shard.part(whole.output_width)
        first = shard.rank * whole.groups // shard.size
        group = slice(first * whole.state, (first + sizes.groups) * whole.state)
        convolved = [width, *(shifted(group, whole.output_width + some * whole.group_width) for some in (0, 1))]
        rows = [width, *(shifted(part, whole.output_width) for part in convolved)]
        steps = [shifted(heads, whole.output_width + whole.conv_width)]
        weight, size = self._kept(prefix, f"{parts.norm}.weight", [width]), whole.output_width // whole.groups
        shared = (whole.groups, first) if whole.groups < shard.size else (0, 0)
        return MambaWeights(
            inputs=self._projection(prefix, parts.inputs, rows),
            time_steps=self._projection(prefix, parts.inputs, steps, is_exact=True),
            conv=self._kept(prefix, parts.conv, convolved)[:, 0],
            conv_bias=None if parts.conv_bias is None else self._kept(prefix, parts.conv_bias, convolved),
            decay=self._kept(prefix, parts.decay_log, [heads]).exp(),
            skip=self._kept(prefix, parts.skip, [heads]),
            step_bias=self._kept(prefix, parts.step_bias, [heads]),
            step_limits=parts.step_limits,
            norm=GroupNorm(weight, size, parts.norm_eps, *shared),
            sizes=sizes,
        )

    def _convolution(self, prefix: str, parts: ConvolutionSpec, whole: ConvolutionSizes) -> ConvolutionWeights:
        channels = self._shard.part(whole.channel_count)
        rows = [shifted(channels, some * whole.channel_count) for some in range(3)]
        return ConvolutionWeights(
            inputs=self._projection(prefix, parts.inputs, rows),
            conv=self._kept(prefix, parts.conv, [channels])[:, 0],
            conv_bias=None if parts.conv_bias is None else self._kept(prefix, parts.conv_bias, [channels]),
            sizes=whole.of_rank(self._shard.size),
        )

    def _projection(self, prefix: str, part: Projection, rows: Sequence[slice], is_exact: bool = False) -> Linear:
        """Return the projection to these rows, one behind the other; an exact one is never quantised."""
        tensors = self._tensors
        weight = tensors.together([tensors.rows(prefix, part, some) for some in rows])
        name = f"{prefix}{part.name}.bias"
        bias = torch.cat([tensors.kept(name, some) for some in rows]) if part.has_bias else None
        return tensors.linear(tensors.plain(weight), bias, "none") if is_exact else tensors.linear(weight, bias)

    def _kept(self, prefix: str, name: str, rows: Sequence[slice]) -> Tensor:
        """Return rows of a tensor in fp32, one behind the other."""
        return torch.cat([self._tensors.kept(f"{prefix}{name}", some, torch.float32) for some in rows])
