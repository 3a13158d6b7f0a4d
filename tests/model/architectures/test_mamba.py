"""Mamba-2's scan over chunks is the plain recurrence, and norms of groups are those of all ranks."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.architectures import states
from twostroke.model.architectures.mamba import CHUNK, scan_chunks
from twostroke.model.backend import GroupNorm
from twostroke.model.cpu.backend import CpuBackend


def recurrence(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence token by token, in fp64."""
    x, decay, b, c, matrix = (part.double() for part in (x, decay, b, c, matrix))
    b, c = (part.repeat_interleave(len(x) // len(part), 0) for part in (b, c))
    outputs = []
    for token in range(x.shape[1]):
        matrix = matrix * decay[:, token].exp()[:, None, None] + x[:, token, :, None] * b[:, token, None]
        outputs.append((matrix * c[:, token, None]).sum(2))
    return torch.stack(outputs, 1), matrix


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("count", [1, CHUNK - 1, CHUNK, CHUNK + 1, 200])
def test_chunks_give_what_the_recurrence_gives(count: int, groups: int) -> None:
    generator = torch.Generator().manual_seed(count)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, b, c, matrix = draw(4, count, 6), draw(groups, count, 8), draw(groups, count, 8), draw(4, 6, 8)
    decay = -functional.softplus(draw(4, count))
    found, state = scan_chunks(x, decay, b, c, matrix)
    expected, last = recurrence(x, decay, b, c, matrix)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_normalise_groups_by_the_sums_of_all(ranks: int, groups: int, dtype: torch.dtype) -> None:
    width, tokens = 48, 5
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(tokens, width, generator=generator), torch.randn(width, generator=generator)
    whole = GroupNorm(weight, width // groups, 1e-5)
    normal = x.view(tokens, groups, -1) * (x.view(tokens, groups, -1).square().mean(2, keepdim=True) + 1e-5).rsqrt()
    expected, parts = (normal.view(tokens, width) * weight).to(dtype), list(range(ranks))
    shared = groups if groups < ranks else 0
    norms = [
        GroupNorm(part, whole.size, 1e-5, shared, rank * groups // ranks if shared else 0)
        for rank, part in enumerate(weight.chunk(ranks))
    ]
    for backend in (CpuBackend(), states):
        xs = [part.contiguous() for part in x.chunk(ranks, dim=1)]
        sums = [backend.group_square_sums(xs[rank], norms[rank]) for rank in parts]
        total = torch.stack(sums).sum(0)
        found = [backend.norm_groups(xs[rank], total if shared else sums[rank], norms[rank], dtype) for rank in parts]
        torch.testing.assert_close(
            torch.cat(found, dim=1), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6
        )
