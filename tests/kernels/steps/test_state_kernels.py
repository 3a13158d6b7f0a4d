"""Kernels of layers that keep a state compute single tokens as torch does, in Triton's interpreter."""

import pytest
import torch

from tests.kernels.paged_cases import assert_close
from tests.model.architectures.test_states import BLOCK, HIDDEN, MIXERS, Mixer, cache, layout
from twostroke.model.cuda.kernels.states import CudaStates

pytestmark = pytest.mark.usefixtures("interpreter")

LENGTHS = (0, 1, 7, 8, 13, 16)
TABLES = [[3 * index, 3 * index + 1, 3 * index + 2] for index in range(len(LENGTHS))]


def mixers(name: str) -> tuple[Mixer, Mixer]:
    """Return a layer that torch computes, and the same one with kernels."""
    return MIXERS[name](), MIXERS[name](CudaStates())


def tokens(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(seed)).to(dtype)


def after_prompts(net: Mixer, dtype: torch.dtype) -> torch.Tensor:
    """Return a cache with the states of sequences of LENGTHS tokens."""
    states = cache(3 * len(LENGTHS), dtype)
    for length, table in zip(LENGTHS, TABLES, strict=True):
        if length:
            net(tokens(length, dtype), states, layout((0, length, table)))
    return states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MIXERS)
def test_single_tokens_are_computed_as_by_torch_across_blocks(name: str, dtype: torch.dtype) -> None:
    net, ours = mixers(name)
    expected_states = after_prompts(net, dtype)
    states = expected_states.clone()
    for step in range(4):
        x = tokens(len(LENGTHS), dtype, seed=step)
        at = layout(*((length + step, 1, table) for length, table in zip(LENGTHS, TABLES, strict=True)))
        found = ours(x, states, at)
        assert found.isfinite().all()
        assert_close(found, net(x, expected_states, at), scale=16)
    assert_close(states.view(torch.float32), expected_states.view(torch.float32), scale=16)
    again = ours(x, states, at)  # a token that the states have seen, but for the row before where it is a row's first
    is_unknown = [(length + 3) % BLOCK > 0 for length in LENGTHS]
    assert again.isnan().all(1).tolist() == is_unknown
    at = layout(*((length + 4, 1, table) for length, table in zip(LENGTHS, TABLES, strict=True)))
    assert ours(x, states, at).isnan().all(1).tolist() == is_unknown


@pytest.mark.parametrize("name", MIXERS)
def test_copies_of_the_last_row_give_its_results_and_rewrite_its_state_once(name: str) -> None:
    # Batches are padded so for a captured step. In the interpreter each program sees what those before it wrote.
    net, ours = mixers(name)
    expected_states = after_prompts(net, torch.float32)
    states = expected_states.clone()
    at = layout((13, 1, TABLES[4]), *[(7, 1, TABLES[2])] * 3)
    x = tokens(2)[[0, 1, 1, 1]]
    found = ours(x, states, at)
    assert torch.equal(found[1:], found[1:2].expand(3, -1))
    assert_close(found, net(x, expected_states, at), scale=16)
    assert_close(states, expected_states, scale=16)


@pytest.mark.parametrize("name", MIXERS)
def test_single_tokens_beside_prompts_are_computed_as_alone(name: str) -> None:
    net, ours = mixers(name)
    expected_states = after_prompts(net, torch.float32)
    states = expected_states.clone()
    at, x = layout((16, 1, TABLES[5]), (0, 9, TABLES[0])), tokens(10)
    assert_close(ours(x, states, at), net(x, expected_states, at), scale=16)
    assert_close(states, expected_states, scale=16)
