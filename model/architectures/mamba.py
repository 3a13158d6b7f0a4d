"""Mamba-2: layers that keep, for each head, a matrix that decays and takes up every token (Dao and Gu 2024,
"Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality").

With a token's x of the head, its step dt, and its group's B and C, the matrix S [head, state] becomes

    S = exp(-A dt) S + dt x B^T,    and the token's output is S C + D x, times the SiLU of its gate.

x, B and C pass through a short convolution over the tokens before. Prompts are computed in chunks, within which tokens
meet as in attention (the same paper, section 6); decodes token by token. A norm of groups follows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.architectures.states import StateMixer
from twostroke.model.backend import GroupNorm, Linear, StateKernels
from twostroke.model.state_sizes import MambaSizes

CHUNK = 64
"""Tokens that meet as in attention: the scan over chunks does as many steps less, a chunk costs the square."""


@dataclass(frozen=True)
class MambaWeights:
    """Weights of one rank's heads. All but the projections are fp32."""

    inputs: Linear  # hidden -> gates, x, B, C
    time_steps: Linear  # hidden -> dt of each head
    conv: Tensor  # [conv width, taps]
    conv_bias: Tensor | None  # [conv width]
    decay: Tensor  # [heads], A: exp of the checkpoint's logarithm
    skip: Tensor  # [heads], D
    step_bias: Tensor  # [heads]
    step_limits: tuple[float, float]  # of dt, the second may be infinite
    norm: GroupNorm
    sizes: MambaSizes  # this rank's heads


class Mamba(StateMixer[MambaWeights]):
    """One rank's heads of a Mamba-2 layer, over loaded weights."""

    def __init__(self, weights: MambaWeights, kernels: StateKernels | None = None):
        super().__init__(weights, kernels)
        self.norm = weights.norm

    def products(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.weights.inputs(x), self.weights.time_steps(x, out_dtype=torch.float32)

    def conv_inputs(self, products: Sequence[Tensor]) -> Tensor:
        return products[0][:, self.weights.sizes.output_width :].float()

    def scan(self, convolved: Tensor, products: Sequence[Tensor], matrix: Tensor) -> tuple[Tensor, Tensor]:
        x, b, c = (part.transpose(0, 1) for part in self._split(convolved))
        steps, decay = (part.T for part in self._steps_and_decay(products[1]))
        found, matrix = scan_chunks(x * steps[:, :, None], decay, b, c, matrix)
        return self._gated((found + x * self.weights.skip[:, None, None]).transpose(0, 1), products[0]), matrix

    def step(self, convolved: Tensor, products: Sequence[Tensor], matrix: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self.weights.sizes
        x, b, c = self._split(convolved)
        steps, decay = self._steps_and_decay(products[1])
        b, c = (part.repeat_interleave(sizes.heads // sizes.groups, dim=1) for part in (b, c))
        matrix = matrix * decay.exp()[:, :, None, None] + (x * steps[:, :, None])[:, :, :, None] * b[:, :, None]
        found = torch.einsum("bhps,bhs->bhp", matrix, c) + x * self.weights.skip[:, None]
        return self._gated(found, products[0]), matrix

    def _steps_and_decay(self, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Return steps and the logarithms of decays, [T, heads] each."""
        steps = functional.softplus(steps + self.weights.step_bias).clamp(*self.weights.step_limits)
        return steps, -self.weights.decay * steps

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x of each head [T, heads, head], and B and C of each group [T, groups, state]."""
        sizes = self.weights.sizes
        widths = [sizes.output_width, sizes.group_width, sizes.group_width]
        x, b, c = torch.split(functional.silu(convolved), widths, dim=1)
        b, c = (part.reshape(len(part), sizes.groups, sizes.state) for part in (b, c))
        return x.reshape(len(x), sizes.heads, sizes.head), b, c

    def _gated(self, out: Tensor, inputs: Tensor) -> Tensor:
        """[T, heads, head] -> [T, output width], times the SiLU of its gate."""
        gate = inputs[:, : self.weights.sizes.output_width]
        return out.reshape(len(out), -1) * functional.silu(gate.float())


def scan_chunks(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Run tokens of one sequence through the recurrence. Return S C of each [heads, T, head] and the last matrices.

    x [heads, T, head], times the steps; the logarithms of decays [heads, T]; b, c [groups, T, state]; `matrix` [heads,
    head, state] before the first one; all fp32.

    Within a chunk let t be the sum of decays up to a token. Then the output is sum over j <= i of
    (c_i . b_j) exp(t_i - t_j) x_j, and exp(t_i) S c_i of the matrix before; the next chunk's S = exp(t_last) S + sum
    of exp(t_last - t_j) x_j b_j^T.
    """
    (heads, count, width), (groups, _, state) = x.shape, b.shape
    padding = -count % CHUNK if count > CHUNK else 0
    if padding:  # tokens that change nothing
        x, b, c = (functional.pad(part, (0, 0, 0, padding)) for part in (x, b, c))
        decay = functional.pad(decay, (0, padding))
    size, each = min(CHUNK, count), heads // groups
    x = x.reshape(groups, each, -1, size, width)
    total = decay.reshape(groups, each, -1, size).cumsum(3)
    b, c = (part.reshape(groups, -1, size, state) for part in (b, c))
    apart = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    outputs = ((c @ b.transpose(2, 3))[:, None] * apart) @ x
    taken = x * (total[..., -1:] - total).exp()[..., None]
    seen, kept = total.exp(), total[..., -1].exp()[..., None, None]
    matrix = matrix.reshape(groups, each, width, state)
    for chunk in range(x.shape[2]):
        before = c[:, chunk] @ matrix.flatten(1, 2).transpose(1, 2)  # [groups, size, each * width]
        before = before.view(groups, size, each, width).transpose(1, 2)
        outputs[:, :, chunk] += before * seen[:, :, chunk, :, None]
        added = taken[:, :, chunk].transpose(2, 3).flatten(1, 2) @ b[:, chunk]
        matrix = matrix * kept[:, :, chunk] + added.view(groups, each, width, state)
    return outputs.reshape(heads, -1, width)[:, :count], matrix.reshape(heads, width, state)
