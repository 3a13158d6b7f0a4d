"""The delta rule in chunks is the plain recurrence, and states lie in blocks as the module says."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.architectures.delta_net import CHUNK, DeltaNet, DeltaWeights, delta_rule
from twostroke.model.architectures.state_sizes import DeltaSizes
from twostroke.model.batch import BatchLayout, make_layout
from twostroke.model.cpu.backend import CpuStates
from twostroke.model.cpu.kernels.program import Launcher
from twostroke.model.step import SequenceStep

SIZES = DeltaSizes(key_heads=2, value_heads=4, key=8, value=6, taps=4)
HIDDEN, KV_HEADS, BLOCK = 16, 2, 8


def recurrence(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The rule token by token, in fp64."""
    q, k, v, beta, decay, matrix = (part.double() for part in (q, k, v, beta, decay, matrix))
    outputs = []
    for token in range(q.shape[1]):
        matrix = matrix * decay[:, token].exp()[:, None, None]
        known = (matrix * k[:, token, :, None]).sum(1)
        matrix = matrix + k[:, token, :, None] * ((v[:, token] - known) * beta[:, token, None])[:, None]
        outputs.append((matrix * q[:, token, :, None]).sum(1))
    return torch.stack(outputs, 1), matrix


@pytest.mark.parametrize("count", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 200])
def test_chunks_give_what_the_recurrence_gives(count: int) -> None:
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k = functional.normalize(draw(4, count, 8), dim=2), functional.normalize(draw(4, count, 8), dim=2)
    v, beta, decay = draw(4, count, 6), draw(4, count).sigmoid(), -functional.softplus(draw(4, count))
    matrix = draw(4, 8, 6)
    found, state = delta_rule(q, k, v, beta, decay, matrix)
    expected, last = recurrence(q, k, v, beta, decay, matrix)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=1e-5)


class Product:
    """A Linear over a plain weight."""

    def __init__(self, weight: Tensor):
        self._weight = weight
        self.out_features = len(weight)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return (x.float() @ self._weight.T).to(out_dtype or x.dtype)

    def embed(self, token_ids: Tensor, first: int, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError


@pytest.fixture
def net() -> DeltaNet:
    return DeltaNet(random_weights())


def random_weights() -> DeltaWeights:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return DeltaWeights(
        inputs=Product(draw(SIZES.conv_width + SIZES.value_width, HIDDEN)),
        strengths=Product(draw(2 * SIZES.value_heads, HIDDEN)),
        conv=draw(SIZES.conv_width, SIZES.taps),
        decay=draw(SIZES.value_heads).exp(),
        decay_bias=draw(SIZES.value_heads),
        norm=draw(SIZES.value),
        eps=1e-6,
        sizes=SIZES,
    )


def cache(num_blocks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(num_blocks, 2, KV_HEADS, BLOCK, 16 * 4 // dtype.itemsize, dtype=dtype)


def layout(*sequences: tuple[int, int, list[int]]) -> BatchLayout:
    """Lay out sequences of (first position, tokens, block table) each; single tokens come first."""
    steps = [SequenceStep([0] * count, start, table, None) for start, count, table in sequences]
    return make_layout(steps, BLOCK, torch.device("cpu"))


@pytest.mark.parametrize("cuts", [[37], [1] * 37, [5, 3, 8, 16, 5], [8, 1, 28], [2, 35]])
def test_a_sequence_gives_the_same_however_it_is_cut_into_steps(net: DeltaNet, cuts: list[int]) -> None:
    x = torch.randn((37, HIDDEN), generator=torch.Generator().manual_seed(1))
    table = [4, 1, 3, 0, 2]
    expected = net(x, cache(5), layout((0, 37, table)))
    states, start, found = cache(5), 0, []
    for count in cuts:
        found.append(net(x[start : start + count], states, layout((start, count, table))))
        start += count
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-5)


def test_sequences_of_a_step_do_not_touch_each_other(net: DeltaNet) -> None:
    x = torch.randn((21, HIDDEN), generator=torch.Generator().manual_seed(2))
    states = cache(6)
    first = net(x[20:], states, layout((0, 1, [5])))
    together = net(x[:20], states, layout((1, 1, [5]), (0, 19, [2, 0, 4])))
    torch.testing.assert_close(together[1:], net(x[1:20], cache(3), layout((0, 19, [0, 1, 2]))), rtol=1e-4, atol=1e-5)
    both = net(torch.cat((x[20:], x[:1])), cache(1), layout((0, 2, [0])))
    torch.testing.assert_close(torch.cat((first, together[:1])), both, rtol=1e-4, atol=1e-5)


def test_each_full_row_keeps_the_state_behind_it(net: DeltaNet) -> None:
    # Another sequence may go on from any of them, as from a prefix.
    x = torch.randn((30, HIDDEN), generator=torch.Generator().manual_seed(3))
    states = cache(7)
    expected = net(x, states, layout((0, 30, [0, 1, 2, 3])))
    for row in (1, 2, 3):
        table = [*range(row), *range(4, 8 - row)]
        after = net(x[row * BLOCK :], states, layout((row * BLOCK, 30 - row * BLOCK, table)))
        torch.testing.assert_close(after, expected[row * BLOCK :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_a_state_that_has_seen_other_tokens_gives_no_number(net: DeltaNet, count: int) -> None:
    x = torch.randn((8, HIDDEN), generator=torch.Generator().manual_seed(4))
    states = cache(1)
    net(x[:5], states, layout((0, 5, [0])))
    for start in (4, 5):  # one of its tokens again, and the next one
        found = net(x[start : start + count], states.clone(), layout((start, count, [0])))
        assert bool(found.isnan().all()) == (start == 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_cpus_computes_single_tokens_as_torch_does(net: DeltaNet, dtype: torch.dtype) -> None:
    lengths, generator = (0, 1, 7, 8, 13, 16), torch.Generator().manual_seed(5)
    ours, theirs = DeltaNet(random_weights(), CpuStates(Launcher())), cache(3 * len(lengths), dtype)
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
    assert again.isnan().all(1).tolist() == [(length + 3) % BLOCK > 0 for length in lengths]


def test_every_number_of_a_state_has_room_in_a_block(net: DeltaNet) -> None:
    needed = max(SIZES.numbers_in(kind, KV_HEADS) for kind in (0, 1))
    states = cache(1)
    net(torch.randn(3, HIDDEN), states, layout((0, 3, [0])))
    used = states.view(2, KV_HEADS, -1)
    assert used[..., needed:].eq(0).all()
    assert used[1, :, SIZES.numbers_in(1, KV_HEADS) - 1].eq(3).all()  # the tokens that it has seen
