"""States of delta nets, Mamba-2 and short convolutions lie in blocks as the module says."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from twostroke.model.architectures.delta_net import DeltaNet, DeltaWeights
from twostroke.model.architectures.mamba import Mamba, MambaWeights
from twostroke.model.architectures.states import ConvolutionWeights, ShortConvolution, StateMixer
from twostroke.model.backend import GroupNorm, StateKernels
from twostroke.model.batch import BatchLayout, make_layout
from twostroke.model.cpu.backend import CpuStates
from twostroke.model.cpu.kernels.launch import Launcher
from twostroke.model.state_sizes import ConvolutionSizes, DeltaSizes, MambaSizes
from twostroke.model.step import SequenceStep

HIDDEN, KV_HEADS, BLOCK = 16, 2, 8
Mixer = StateMixer[Any]


class Product:
    """A Linear over a plain weight."""

    def __init__(self, weight: Tensor):
        self._weight = weight
        self.out_features = len(weight)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return (x.float() @ self._weight.T).to(out_dtype or x.dtype)

    def embed(self, token_ids: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError


def drawing() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


def delta_net(kernels: StateKernels | None = None) -> Mixer:
    draw, sizes = drawing(), DeltaSizes(key_heads=2, value_heads=4, key=8, value=6, taps=4)
    return DeltaNet(
        DeltaWeights(
            inputs=Product(draw(sizes.conv_width + sizes.value_width, HIDDEN)),
            strengths=Product(draw(2 * sizes.value_heads, HIDDEN)),
            conv=draw(sizes.conv_width, sizes.taps),
            decay=draw(sizes.value_heads).exp(),
            decay_bias=draw(sizes.value_heads),
            norm=draw(sizes.value),
            eps=1e-6,
            sizes=sizes,
        ),
        kernels,
    )


def mamba(groups: int, has_bias: bool, kernels: StateKernels | None = None) -> Mixer:
    draw, sizes = drawing(), MambaSizes(heads=4, head=4, state=6, groups=groups, taps=3)
    return Mamba(
        MambaWeights(
            inputs=Product(draw(sizes.input_width - sizes.heads, HIDDEN)),
            time_steps=Product(draw(sizes.heads, HIDDEN)),
            conv=draw(sizes.conv_width, sizes.taps),
            conv_bias=draw(sizes.conv_width) if has_bias else None,
            decay=draw(sizes.heads).exp(),
            skip=draw(sizes.heads),
            step_bias=draw(sizes.heads),
            step_limits=(0.1, 2.0),
            norm=GroupNorm(draw(sizes.output_width), sizes.output_width, 1e-5),
            sizes=sizes,
        ),
        kernels,
    )


def convolution(kernels: StateKernels | None = None) -> Mixer:
    draw, sizes = drawing(), ConvolutionSizes(channel_count=12, taps=3)
    weights = ConvolutionWeights(Product(draw(36, HIDDEN)), draw(12, 3), draw(12), sizes)
    return ShortConvolution(weights, kernels)


MIXERS: dict[str, Callable[..., Mixer]] = {
    "delta net": delta_net,
    "mamba, a group for each two heads": lambda kernels=None: mamba(2, True, kernels),
    "mamba, groups of KV heads": lambda kernels=None: mamba(4, False, kernels),
    "mamba, one group of all KV heads": lambda kernels=None: mamba(1, True, kernels),
    "convolution": convolution,
}


@pytest.fixture(params=MIXERS)
def make(request: pytest.FixtureRequest) -> Callable[..., Mixer]:
    return MIXERS[request.param]


@pytest.fixture
def net(make: Callable[..., Mixer]) -> Mixer:
    return make()


def cache(num_blocks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(num_blocks, 2, KV_HEADS, BLOCK, 16 * 4 // dtype.itemsize, dtype=dtype)


def layout(*sequences: tuple[int, int, list[int]]) -> BatchLayout:
    """Lay out sequences of (first position, tokens, block table) each; single tokens come first."""
    steps = [SequenceStep([0] * count, start, table, None) for start, count, table in sequences]
    return make_layout(steps, BLOCK, torch.device("cpu"))


@pytest.mark.parametrize("cuts", [[37], [1] * 37, [5, 3, 8, 16, 5], [8, 1, 28], [2, 35]])
def test_a_sequence_gives_the_same_however_it_is_cut_into_steps(net: Mixer, cuts: list[int]) -> None:
    x = torch.randn((37, HIDDEN), generator=torch.Generator().manual_seed(1))
    table = [4, 1, 3, 0, 2]
    expected = net(x, cache(5), layout((0, 37, table)))
    states, start, found = cache(5), 0, []
    for count in cuts:
        found.append(net(x[start : start + count], states, layout((start, count, table))))
        start += count
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-5)


def test_sequences_of_a_step_do_not_touch_each_other(net: Mixer) -> None:
    x = torch.randn((21, HIDDEN), generator=torch.Generator().manual_seed(2))
    states = cache(6)
    first = net(x[20:], states, layout((0, 1, [5])))
    together = net(x[:20], states, layout((1, 1, [5]), (0, 19, [2, 0, 4])))
    torch.testing.assert_close(together[1:], net(x[1:20], cache(3), layout((0, 19, [0, 1, 2]))), rtol=1e-4, atol=1e-5)
    both = net(torch.cat((x[20:], x[:1])), cache(1), layout((0, 2, [0])))
    torch.testing.assert_close(torch.cat((first, together[:1])), both, rtol=1e-4, atol=1e-5)


def test_each_full_row_keeps_the_state_behind_it(net: Mixer) -> None:
    # Another sequence may go on from any of them, as from a prefix.
    x = torch.randn((30, HIDDEN), generator=torch.Generator().manual_seed(3))
    states = cache(7)
    expected = net(x, states, layout((0, 30, [0, 1, 2, 3])))
    for row in (1, 2, 3):
        table = [*range(row), *range(4, 8 - row)]
        after = net(x[row * BLOCK :], states, layout((row * BLOCK, 30 - row * BLOCK, table)))
        torch.testing.assert_close(after, expected[row * BLOCK :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_a_state_that_has_seen_other_tokens_gives_no_number(net: Mixer, count: int) -> None:
    x = torch.randn((8, HIDDEN), generator=torch.Generator().manual_seed(4))
    states = cache(1)
    net(x[:5], states, layout((0, 5, [0])))
    for start in (4, 5):  # one of its tokens again, and the next one
        after = states.clone()
        found = net(x[start : start + count], after, layout((start, count, [0])))
        assert bool(found.isnan().all()) == (start == 4)
        following = net(x[:1], after, layout((start + count, 1, [0, 0])))
        assert bool(following.isnan().all()) == (start == 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_cpus_computes_single_tokens_as_torch_does(
    make: Callable[..., Mixer], dtype: torch.dtype
) -> None:
    lengths, generator = (0, 1, 7, 8, 13, 16), torch.Generator().manual_seed(5)
    net, ours, theirs = make(), make(CpuStates(Launcher())), cache(3 * len(lengths), dtype)
    sequences = [(length, 1, [3 * index, 3 * index + 1, 3 * index + 2]) for index, length in enumerate(lengths)]
    for length, _, table in sequences:
        if length:
            net(torch.randn((length, HIDDEN), generator=generator).to(dtype), theirs, layout((0, length, table)))
    own = theirs.clone()
    for step in range(4):
        x = torch.randn((len(lengths), HIDDEN), generator=generator).to(dtype)
        at = layout(*((length + step, 1, table) for length, _, table in sequences))
        expected, found = net(x, theirs, at), ours(x, own, at)
        torch.testing.assert_close(found, expected, rtol=2e-4 if dtype == torch.float32 else 2e-2, atol=1e-5)
        assert found.isfinite().all()
    torch.testing.assert_close(own.view(torch.float32), theirs.view(torch.float32), rtol=1e-4, atol=1e-5)
    again = ours(x, own, at)  # a token that the states have seen, but for the row before where it is a row's first
    is_unknown = [(length + 3) % BLOCK > 0 for length in lengths]
    assert again.isnan().all(1).tolist() == is_unknown
    at = layout(*((length + 4, 1, table) for length, _, table in sequences))
    assert ours(x, own, at).isnan().all(1).tolist() == is_unknown


def test_every_number_of_a_state_has_room_in_a_block(net: Mixer) -> None:
    sizes, states = net.weights.sizes, cache(1)
    needed = max(sizes.numbers_in(kind, KV_HEADS) for kind in (0, 1))
    net(torch.randn(3, HIDDEN), states, layout((0, 3, [0])))
    used = states.view(2, KV_HEADS, -1)
    assert used[..., needed:].eq(0).all()
    assert used[1, :, sizes.numbers_in(1, KV_HEADS) - 1].eq(3).all()  # the tokens that it has seen
