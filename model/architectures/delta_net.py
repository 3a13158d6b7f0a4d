"""Gated delta nets: layers that keep, for each head, a matrix that every token rewrites (Yang, Kautz and Hatamizadeh
2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule").

With the decay a, the strength b, the key k and the value v of a token, the matrix S [key, value] becomes

    S = a S + b k (v - a S^T k)^T,    and the token's output is S^T q.

Queries, keys and values pass through a short convolution over the tokens before. Prompts are computed in chunks, within
which the updates of all tokens are one triangular system (the same paper, section 3.3); decodes token by token.

States lie in the KV cache's blocks (protocol/kv_layout.py's STATE_WINDOW): of a row of a block table the one behind its
last computed token. A chunk that crosses rows leaves one in each of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.model.backend import Linear
from twostroke.model.batch import BatchLayout
from twostroke.model.config import DeltaSizes

CHUNK = 64
"""Tokens of a triangular system: the scan over chunks does as many steps less, a system costs the square."""
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


class DeltaNet:
    """One rank's heads of a layer's gated delta net, over loaded weights."""

    def __init__(self, weights: DeltaWeights):
        self.weights = weights

    def __call__(self, x: Tensor, kv_layer: Tensor, layout: BatchLayout) -> Tensor:
        """x [T, hidden] -> [T, value width], before the output's projection.

        Reads the states of the tokens before, and leaves those of the step's tokens, in the cache's tensor kv_layer
        [num_blocks, 2, G, block_size, D]. A state that has not seen all tokens before the step's gives NaN.
        """
        weights, sizes, first = self.weights, self.weights.sizes, layout.num_decodes
        inputs, strengths = weights.inputs(x), weights.strengths(x, out_dtype=torch.float32)
        out = self.empty((len(x), sizes.value_width), x.dtype, x.device)
        if first:
            self.decode(inputs, strengths, kv_layer, layout, out)
        if first < layout.context_lens.numel():
            mixed, gate = torch.split(inputs, [sizes.conv_width, sizes.value_width], dim=1)
            mixed, (beta, decay) = mixed.float(), self._beta_and_decay(strengths)
            states = _States(kv_layer, sizes)
            starts, ends = layout.query_starts.tolist(), layout.context_lens.tolist()
            for index in range(first, len(ends)):
                rows, table = slice(starts[index], starts[index + 1]), layout.block_tables[index].long()
                found = self._prefill(mixed[rows], beta[rows], decay[rows], states, table, ends[index])
                out[rows] = self._normalised(found, gate[rows]).to(x.dtype)
        return out

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for results."""
        return torch.empty(shape, dtype=dtype, device=device)

    def decode(self, inputs: Tensor, strengths: Tensor, kv_layer: Tensor, layout: BatchLayout, out: Tensor) -> None:
        """Compute the sequences that bring one token each, the first ones of the step, into the first rows of `out`.

        inputs [T, conv width + value width], strengths [T, 2 value heads], out [T, value width].
        """
        weights, count, sizes = self.weights, layout.num_decodes, self.weights.sizes
        states = _States(kv_layer, sizes)
        mixed, gate = torch.split(inputs[:count], [sizes.conv_width, sizes.value_width], dim=1)
        beta, decay = self._beta_and_decay(strengths[:count])
        positions, tables, size = layout.positions[:count], layout.block_tables[:count].long(), states.block_size
        rows = torch.arange(count, device=mixed.device)
        matrix, last = states.load(tables[rows, (positions - 1).clamp_min(0) // size], positions)
        last = torch.cat((last, mixed.float()[:, :, None]), dim=2)
        q, k, v = self._split((last * weights.conv).sum(2))
        matrix = matrix * decay.exp()[:, :, None, None]
        known = torch.einsum("bhkv,bhk->bhv", matrix, k)
        update = (v - known) * beta[:, :, None]
        matrix = matrix + k[:, :, :, None] * update[:, :, None]
        out[:count] = self._normalised(torch.einsum("bhkv,bhk->bhv", matrix, q), gate).to(out.dtype)
        states.store(tables[rows, positions // size], matrix, last[:, :, 1:], positions + 1)

    def _beta_and_decay(self, strengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return the strengths of updates and the logarithms of decays, [T, value heads] each."""
        beta, decay = strengths.chunk(2, dim=1)
        return beta.sigmoid(), -self.weights.decay * functional.softplus(decay + self.weights.decay_bias)

    def _prefill(
        self, mixed: Tensor, beta: Tensor, decay: Tensor, states: "_States", table: Tensor, end: int
    ) -> Tensor:
        """Compute one sequence's chunk, which ends at `end`, row by row of its block table: [T, value heads, value]."""
        weights, taps, size = self.weights, self.weights.sizes.taps, states.block_size
        start = end - len(mixed)
        before = torch.tensor([start], device=mixed.device)
        matrix, inputs = states.load(table[max(start - 1, 0) // size][None], before)
        inputs = torch.cat((inputs[0], mixed.T), dim=1)  # [conv width, taps - 1 + tokens]
        convolved = functional.conv1d(inputs[None], weights.conv[:, None], groups=len(inputs))[0].T
        q, k, v = self._split(convolved)
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        beta, decay = beta.T, decay.T
        matrix = matrix[0]
        outputs: list[Tensor] = []
        for row in range(start // size, -(-end // size)):
            first, last = max(row * size, start) - start, min((row + 1) * size, end) - start
            part = slice(first, last)
            found, matrix = delta_rule(q[:, part], k[:, part], v[:, part], beta[:, part], decay[:, part], matrix)
            outputs.append(found.transpose(0, 1))
            seen = torch.tensor([start + last], device=mixed.device)
            states.store(table[row][None], matrix[None], inputs[None, :, last : last + taps - 1], seen)
        return torch.cat(outputs)

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

    def _normalised(self, out: Tensor, gate: Tensor) -> Tensor:
        """[T, heads, value] -> [T, value width]: each head normalised, times the SiLU of its gate."""
        weights = self.weights
        out = out * (out.square().mean(-1, keepdim=True) + weights.eps).rsqrt() * weights.norm
        return out.view(len(out), -1) * functional.silu(gate.float())


class _States:
    """The states in a tensor of the cache, as fp32 numbers of each block's parts (DeltaSizes.numbers_in)."""

    def __init__(self, kv_layer: Tensor, sizes: DeltaSizes):
        self.block_size = kv_layer.shape[3]
        self._parts = kv_layer.view(*kv_layer.shape[:3], -1).view(torch.float32)  # [blocks, 2, kv heads, numbers]
        self._sizes = sizes
        self._kv_heads = kv_layer.shape[2]
        self._matrices = sizes.matrix_numbers_in(self._kv_heads)

    def load(self, blocks: Tensor, num_tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the matrices [B, value heads, key, value] and the convolution's last inputs [B, conv width, taps - 1]
        behind the first `num_tokens` [B] tokens, which are 0 before the first one."""
        sizes, groups, parts = self._sizes, self._kv_heads, self._parts[blocks]
        half = (len(blocks), 2, groups, sizes.value_heads // groups, sizes.key // 2, sizes.value)
        matrix = parts[..., : self._matrices].reshape(half).permute(0, 2, 3, 1, 4, 5)
        matrix = matrix.reshape(len(blocks), sizes.value_heads, sizes.key, sizes.value)
        before = sizes.taps - 1
        keys = parts[:, 0, :, self._matrices : self._matrices + 2 * sizes.key_width // groups * before]
        keys = keys.reshape(len(blocks), groups, 2, -1, before).transpose(1, 2)  # queries, keys
        keys = keys.reshape(len(blocks), 2 * sizes.key_width, before)
        end = self._matrices + sizes.value_width // groups * before
        values = parts[:, 1, :, self._matrices : end].reshape(len(blocks), sizes.value_width, before)
        seen = parts[:, 1, 0, end]
        # What has seen other tokens is no state of this sequence: better no number than a wrong one.
        factor = torch.where(seen == num_tokens, 1.0, torch.nan)
        is_first = num_tokens == 0
        return (
            torch.where(is_first[:, None, None, None], 0.0, matrix * factor[:, None, None, None]),
            torch.where(is_first[:, None, None], 0.0, torch.cat((keys, values), dim=1)),
        )

    def store(self, blocks: Tensor, matrix: Tensor, inputs: Tensor, num_tokens: Tensor) -> None:
        """Write states as `load` returns them."""
        sizes, groups, count = self._sizes, self._kv_heads, len(blocks)
        halves = matrix.reshape(count, groups, sizes.value_heads // groups, 2, -1).permute(3, 0, 1, 2, 4)
        halves = halves.reshape(2, count, groups, -1)
        keys, values = torch.split(inputs, [2 * sizes.key_width, sizes.value_width], dim=1)
        keys = keys.reshape(count, 2, groups, -1).transpose(1, 2).reshape(count, groups, -1)
        values = values.reshape(count, groups, -1)
        seen = num_tokens.to(torch.float32)[:, None, None].expand(-1, groups, 1)
        for kind, rest in enumerate(((keys,), (values, seen))):
            numbers = torch.cat((halves[kind], *rest), dim=2)
            self._parts[blocks, kind, :, : numbers.shape[2]] = numbers


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
    system = ((beta[..., None] * k) @ k.transpose(2, 3)) * apart  # the diagonal is taken for ones
    both = torch.cat((beta[..., None] * v, (beta * total.exp())[..., None] * k), dim=3)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    values, keys = torch.split(solved, [v.shape[3], k.shape[3]], dim=3)
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
