"""The delta rule in chunks is the plain recurrence."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.architectures.delta_net import CHUNK, delta_rule, inverse_of_unit_lower
from twostroke.model.state_sizes import DeltaSizes

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


@pytest.mark.parametrize("size", [1, 5, 8, 37, 64])
@pytest.mark.parametrize("is_worst", [False, True])
def test_systems_are_inverted_as_torch_solves_them(size: int, is_worst: bool) -> None:
    """The worst system is that of a token repeated without decay: its powers would be beyond fp32."""
    lower = torch.rand(2, 3, size, size) - 0.5
    if is_worst:
        lower = torch.ones(2, 3, size, size)
    identity = torch.eye(size, dtype=torch.float64).expand(2, 3, size, size)
    expected = torch.linalg.solve_triangular(lower.double(), identity, upper=False, unitriangular=True)
    torch.testing.assert_close(inverse_of_unit_lower(lower).double(), expected, rtol=1e-4, atol=1e-4)
