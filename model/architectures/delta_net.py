"""Gated delta nets: layers that keep, for each head, a matrix that every token rewrites (Yang, Kautz and Hatamizadeh
2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule").

With the decay a, the strength b, the key k and the value v of a token, the matrix S [key, value] becomes

    S = a S + b k (v - a S^T k)^T,    and the token's output is S^T q.

Queries, keys and values pass through a short convolution over the tokens before. Prompts are computed in chunks, within
which the updates of all tokens are one triangular system (the same paper, section 3.3); decodes token by token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.architectures.states import StateMixer
from twostroke.model.backend import Linear
from twostroke.model.state_sizes import DeltaSizes

CHUNK = 64
"""Tokens of a triangular system: the scan over chunks does as many steps less, a system costs the square."""
_ROWS = 8
"""Rows of a system that are solved one after the other."""
NORM_EPS = 1e-6  # of queries' and keys' lengths


@dataclass(frozen=True)
class DeltaWeights:
    """Weights of one rank's heads. All but the projections are fp32."""

    inputs: Linear  # hidden -> queries, keys, values, gates
    strengths: Linear  # hidden -> beta, decay of each value head
    conv: Tensor  # [conv width, taps]
    decay: Tensor  # [value heads]: exp of the checkpoint's logarithm
    decay_bias: Tensor  # [value heads]
    norm: Tensor  # [value]
    eps: float
    sizes: DeltaSizes  # this rank's heads
    conv_bias: Tensor | None = None


class DeltaNet(StateMixer[DeltaWeights]):
    """One rank's heads of a layer's gated delta net, over loaded weights."""

    def products(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.weights.inputs(x), self.weights.strengths(x, out_dtype=torch.float32)

    def conv_inputs(self, products: Sequence[Tensor]) -> Tensor:
        return products[0][:, : self.weights.sizes.conv_width].float()

    def scan(self, convolved: Tensor, products: Sequence[Tensor], matrix: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (part.transpose(0, 1) for part in self._split(convolved))
        beta, decay = (part.T for part in self._beta_and_decay(products[1]))
        found, matrix = delta_rule(q, k, v, beta, decay, matrix)
        return self._normalised(found.transpose(0, 1), products[0]), matrix

    def step(self, convolved: Tensor, products: Sequence[Tensor], matrix: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self._split(convolved)
        beta, decay = self._beta_and_decay(products[1])
        matrix = matrix * decay.exp()[:, :, None, None]
        known = torch.einsum("bhkv,bhk->bhv", matrix, k)
        update = (v - known) * beta[:, :, None]
        matrix = matrix + k[:, :, :, None] * update[:, :, None]
        return self._normalised(torch.einsum("bhkv,bhk->bhv", matrix, q), products[0]), matrix

    def _beta_and_decay(self, strengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the strengths of updates and the logarithms of decays, [T, value heads] each."""
        beta, decay = strengths.chunk(2, dim=1)
        return beta.sigmoid(), -self.weights.decay * functional.softplus(decay + self.weights.decay_bias)

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of each value head [T, heads, key or value] of the convolution's results."""
        sizes = self.weights.sizes
        q, k, v = torch.split(functional.silu(convolved), [sizes.key_width, sizes.key_width, sizes.value_width], dim=1)
        each = sizes.value_heads // sizes.key_heads

        def of_value_heads(rows: Tensor) -> Tensor:
            heads = rows.reshape(len(rows), sizes.key_heads, sizes.key)
            heads = heads * (heads.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
            return heads.repeat_interleave(each, dim=1)

        return of_value_heads(q) * sizes.key**-0.5, of_value_heads(k), v.reshape(-1, sizes.value_heads, sizes.value)

    def _normalised(self, out: Tensor, inputs: Tensor) -> Tensor:
        """[T, heads, value] -> [T, value width]: each head normalised, times the SiLU of its gate."""
        weights, gate = self.weights, inputs[:, self.weights.sizes.conv_width :]
        out = out * (out.square().mean(-1, keepdim=True) + weights.eps).rsqrt() * weights.norm
        return out.reshape(len(out), -1) * functional.silu(gate.float())


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Run tokens of one sequence through the rule. Return their outputs [heads, T, value] and the matrices behind them.

    q, k [heads, T, key], v [heads, T, value], beta and the logarithms of decays [heads, T], `matrix` [heads, key,
    value] before the first one; all fp32.

    Within a chunk let c be the sum of decays up to a token, and A[i, j] = beta_i (k_i . k_j) exp(c_i - c_j) for j < i.
    Then (I + A) U = beta (v - exp(c) k S) has the updates U of all tokens, with which each output is a masked product
    as in attention, and the next chunk's S = exp(c_last) S + sum_i exp(c_last - c_i) k_i U_i^T.
    """
    heads, count = beta.shape
    padding = -count % CHUNK if count > CHUNK else 0
    if padding:  # tokens that change nothing
        q, k, v = (functional.pad(part, (0, 0, 0, padding)) for part in (q, k, v))
        beta, decay = (functional.pad(part, (0, padding)) for part in (beta, decay))
    size = min(CHUNK, count)
    q, k, v, beta, decay = (part.reshape(heads, -1, size, *part.shape[2:]) for part in (q, k, v, beta, decay))
    total = decay.cumsum(2)
    apart = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    system = ((beta[..., None] * k) @ k.transpose(2, 3)) * apart
    both = torch.cat((beta[..., None] * v, (beta * total.exp())[..., None] * k), dim=3)
    values, keys = torch.split(inverse_of_unit_lower(system) @ both, [v.shape[3], k.shape[3]], dim=3)
    scores = (q @ k.transpose(2, 3)) * apart
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    outputs = torch.empty_like(v)
    for chunk in range(q.shape[1]):
        updates = values[:, chunk] - keys[:, chunk] @ matrix
        outputs[:, chunk] = q[:, chunk] @ matrix + scores[:, chunk] @ updates
        matrix = matrix * kept[:, chunk] + k[:, chunk].transpose(1, 2) @ updates
    return outputs.reshape(heads, -1, v.shape[3])[:, :count], matrix


def inverse_of_unit_lower(lower: Tensor) -> Tensor:
    """Return the inverses of I + L, where L are the parts of `lower` [..., C, C] below the diagonal.

    Blocks of _ROWS rows are inverted row by row, and halves put together: [[A, 0], [B, D]] has the inverse
    [[A', 0], [-D' B A', D']]. All are products over the whole batch. torch solves triangular systems one by one, on
    threads that wait for each other: on two busy cores two took 3 s for what one does in 0.04.
    """
    size, whole = lower.shape[-1], _ROWS
    while whole < size:
        whole *= 2
    padded = functional.pad(lower, (0, whole - size, 0, whole - size)).flatten(0, -3)
    blocks = _diagonal_blocks(padded, _ROWS)
    found = torch.eye(_ROWS, dtype=lower.dtype, device=lower.device).expand(blocks.shape).clone()
    for row in range(1, _ROWS):
        found[..., row, :row] = -(blocks[..., row, None, :row] @ found[..., :row, :row])[..., 0, :]
    step = _ROWS
    while step < whole:
        below = _diagonal_blocks(padded, 2 * step)[..., step:, :step]
        first, second = found.view(len(found), -1, 2, step, step).unbind(2)
        found = functional.pad(torch.cat((first, -(second @ below @ first)), dim=2), (0, step))
        found[..., step:, step:] = second
        step *= 2
    return found[:, 0, :size, :size].reshape(lower.shape)


def _diagonal_blocks(matrices: Tensor, size: int) -> Tensor:
    """[N, C, C] -> [N, C / size, size, size]."""
    count, number = len(matrices), matrices.shape[1] // size
    return matrices.view(count, number, size, number, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
