"""Batches over a paged cache in which everything that no kernel may read is NaN."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from tests.rigs import reference
from twostroke.model.architectures.context_index import write_index_keys
from twostroke.model.backend import (
    AS_THEY_ARE,
    AttentionForm,
    Experts,
    ExpertWeights,
    HeadNorms,
    KVScales,
    Linear,
    MLAAttention,
    MLAHeads,
)
from twostroke.model.batch import BatchLayout, local_lengths
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.config import Activation, Quantization
from twostroke.model.cpu.linears import PlainLinear, embed
from twostroke.model.parallel.form import Shard
from twostroke.model.parallel.tensor_parallel import ContextParts, GroupRanks, Rendezvous
from twostroke.protocol.kv_layout import first_seen

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Tolerances of values of about 1: a few units in the last place."""


@dataclass(frozen=True)
class PagedCase:
    q: Tensor  # [T, H, D]
    kv_layer: Tensor  # [num_blocks, 2, G, block_size, D]; NaN but for slots that are read, or may be
    layout: BatchLayout
    form: AttentionForm


def assert_close(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Equal within the dtype's tolerance for values of about `scale`; NaN equals NaN alone."""
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def make_layout(lengths: Sequence[tuple[int, int]], block_size: int, device: str = "cpu") -> tuple[BatchLayout, int]:
    """A layout of sequences (query length, context length), and how many blocks a cache for it has.

    Sequences of one query are decodes where none of several stands before them, and else chunks.

    Blocks are handed out in a scattered order; block 0 belongs to nobody and is what the tables' unused entries name.
    """
    generator = torch.Generator().manual_seed(len(lengths))
    used = [-(-context // block_size) for _, context in lengths]
    free = (torch.randperm(sum(used), generator=generator) + 1).tolist()
    tables = torch.zeros((len(lengths), max(used) + 1), dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    for row, (query, context) in enumerate(lengths):
        blocks = [free.pop() for _ in range(used[row])]
        tables[row, : used[row]] = torch.tensor(blocks, dtype=torch.int32)
        positions.extend(range(context - query, context))
        slots.extend(blocks[p // block_size] * block_size + p % block_size for p in range(context - query, context))
    queries = torch.tensor([0, *(query for query, _ in lengths)], device=device)
    layout = BatchLayout(
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        query_starts=queries.cumsum(0).to(torch.int32),
        context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        num_decodes=len(list(takewhile(lambda length: length[0] == 1, lengths))),
        max_query_len=max(query for query, _ in lengths),
        max_context_len=max(context for _, context in lengths),
    )
    return layout, sum(used) + 1


def paged_case(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: int = 4,
    groups: int = 2,
    dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    window: int = 0,
    soft_cap: float = 0.0,
    has_sinks: bool = False,
) -> PagedCase:
    """Random queries, and keys and values for every slot of a context that its queries' windows cover.

    Tables name block 0 for blocks before them; slots before them in their first block are written, as they would be.
    """
    layout, num_blocks = make_layout(lengths, block_size, device)
    generator = torch.Generator().manual_seed(dim)
    kv_layer = torch.full((num_blocks, 2, groups, block_size, dim), float("nan"), dtype=dtype)
    for row, (query, context) in enumerate(lengths):
        keys = torch.arange(context)
        if window:
            unread = first_seen(window, context - query) // block_size
            layout.block_tables[row, :unread] = 0
            keys = keys[unread * block_size :]
        blocks = layout.block_tables[row].cpu()[keys // block_size].long()
        kv_layer[blocks, :, :, keys % block_size] = torch.randn((len(keys), 2, groups, dim), generator=generator).to(
            dtype
        )
    q = torch.randn((int(layout.query_starts[-1]), heads, dim), generator=generator).to(dtype)
    sinks = torch.randn(heads, generator=generator).to(device) if has_sinks else None
    return PagedCase(q.to(device), kv_layer.to(device), layout, AttentionForm(dim**-0.5, window, soft_cap, sinks))


def in_fp8(case: PagedCase) -> PagedCase:
    """The case over a cache in FP8, with scales of its own for keys and for values, and a value beyond the range of
    it."""
    scales = KVScales(0.375, 0.01)
    keys, values = case.kv_layer.unbind(1)
    values[int(case.layout.block_tables[-1, (int(case.layout.context_lens[-1]) - 1) // values.shape[2]]), 0, 0, 0] = 9
    kinds = torch.stack([reference.to_fp8(keys, scales.key), reference.to_fp8(values, scales.value)], dim=1)
    return replace(case, kv_layer=kinds, form=replace(case.form, kv_scales=scales))


@dataclass(frozen=True)
class MLACase:
    q: Tensor  # [T, H (N + P)]
    heads: MLAHeads
    kv_layer: Tensor  # [num_blocks, 1, 1, block_size, R + P]; NaN but for slots of a context
    cos_sin: Tensor
    layout: BatchLayout

    def expected(self, chosen: Tensor | None = None) -> Tensor:
        return reference.attend_to_latents(self.q, self.heads, self.cos_sin, self.kv_layer, self.layout, chosen)

    def some(self, count: int) -> Tensor:
        """Return slots of so many random tokens for each query, those that it sees first."""
        layout, size = self.layout, self.kv_layer.shape[3]
        generator = torch.Generator().manual_seed(count)
        chosen = []
        sequences = torch.repeat_interleave(torch.arange(len(layout.context_lens)), layout.query_starts.diff())
        for sequence, position in zip(sequences.tolist(), layout.positions.tolist(), strict=True):
            tokens = torch.randperm(position + 1, generator=generator)[:count]
            tokens = torch.cat((tokens, tokens.new_zeros(count - len(tokens))))
            chosen.append(layout.block_tables[sequence, tokens // size] * size + tokens % size)
        return torch.stack(chosen).int()


def latent_case(
    lengths: Sequence[tuple[int, int]],
    *,
    heads: int = 3,
    rank: int = 48,
    rotary: int = 16,
    key: int = 20,
    value: int = 24,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    behind: int = 0,
) -> MLACase:
    """Random queries, weights and latents, with scores of about 1. `behind` a row there is more in the cache."""
    layout, num_blocks = make_layout(lengths, block_size)
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    kv_layer = torch.full((num_blocks, 1, 1, block_size, rank + rotary + behind), float("nan"), dtype=dtype)
    for row, (_, context) in enumerate(lengths):
        tokens = torch.arange(context)
        blocks = layout.block_tables[row][tokens // block_size].long()
        kv_layer[blocks, 0, 0, tokens % block_size, : rank + rotary] = random(context, rank + rotary)
    q = random(int(layout.query_starts[-1]), heads * (key + rotary))
    weights = MLAHeads(
        random(heads, key, rank, scale=rank**-0.5), random(heads, rank, value, scale=rank**-0.5), (key + rotary) ** -0.5
    )
    longest = max(context for _, context in lengths)
    angles = torch.outer(torch.arange(longest), 0.7 ** torch.arange(rotary // 2))
    return MLACase(q, weights, kv_layer, torch.cat((angles.cos(), angles.sin()), dim=1), layout)


def over_ranks(case: MLACase, size: int, attend: Callable[[MLACase, GroupRanks], Tensor]) -> Tensor:
    """Return the result of `size` ranks that share each block's tokens, each for its part of the heads, as threads."""
    rendezvous, block_size, all_heads = Rendezvous("127.0.0.1"), case.kv_layer.shape[3], len(case.heads.keys)
    q = case.q.view(len(case.q), all_heads, -1)

    def one(rank: int) -> Tensor:
        shard = Shard(rank, size)
        heads, held = shard.part(all_heads), range(block_size)[shard.part(block_size)]
        local_lens = local_lengths(case.layout.context_lens.long().numpy(), block_size, held)
        part = replace(
            case,
            q=q[:, heads].flatten(1).contiguous(),
            heads=replace(case.heads, keys=case.heads.keys[heads], values=case.heads.values[heads]),
            kv_layer=case.kv_layer[:, :, :, held.start : held.stop].contiguous(),
            layout=replace(case.layout, local_lens=torch.from_numpy(local_lens).int()),
        )
        return attend(part, GroupRanks(shard, rendezvous.address, torch.device("cpu")))

    with ThreadPoolExecutor(size) as threads:
        return torch.cat(list(threads.map(one, range(size))), dim=1)


class ReferenceBackend:
    """Implements `Backend` in plain torch, on any device."""

    def make_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, quantization: Quantization, dtype: torch.dtype
    ) -> Linear:
        assert isinstance(weight, Tensor)
        return PlainLinear(weight, bias)

    def embed(self, token_ids: Tensor, table: Tensor | Linear, first: int, dtype: torch.dtype) -> Tensor:
        return (
            embed(token_ids, table, first, dtype) if isinstance(table, Tensor) else table.embed(token_ids, first, dtype)
        )

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        kv_layer: Tensor,
        layout: BatchLayout,
        norms: HeadNorms | None = None,
        kv_scales: KVScales = AS_THEY_ARE,
        query_scales: Tensor | None = None,
    ) -> Tensor:
        places = layout.positions, layout.slots
        return reference.rope_and_write_kv(qkv, cos_sin, kv_layer, *places, norms, kv_scales, query_scales)

    def write_latents(
        self, rows: Tensor, norm: Tensor, eps: float, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout
    ) -> None:
        reference.write_latents(rows, norm, eps, cos_sin, kv_layer, layout.positions, layout.slots)

    def make_mla(self, heads: MLAHeads, parts: ContextParts | None = None) -> MLAAttention:
        assert parts is None

        def attend(
            q: Tensor, cos_sin: Tensor, kv_layer: Tensor, layout: BatchLayout, chosen: Tensor | None = None
        ) -> Tensor:
            return reference.attend_to_latents(q, heads, cos_sin, kv_layer, layout, chosen)

        return attend

    write_index_keys = staticmethod(write_index_keys)
    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    add = staticmethod(reference.add)
    scale = staticmethod(reference.scale)
    scale_by_position = staticmethod(reference.scale_by_position)
    soft_cap = staticmethod(reference.soft_cap)
    square_sums = staticmethod(reference.square_sums)
    norm_rows = staticmethod(reference.norm_rows)
    attention = staticmethod(reference.attention)

    def gated(self, x: Tensor, gate_up: Linear, activation: Activation) -> Tensor:
        return reference.gate(gate_up(x), activation)

    def feed_forward(self, x: Tensor, gate_up: Linear, down: Linear, activation: Activation) -> Tensor:
        return down(self.gated(x, gate_up, activation))

    route = staticmethod(reference.route)
    gate_by_sigmoid = staticmethod(reference.gate_by_sigmoid)

    def make_experts(
        self, weights: ExpertWeights, activation: Activation, quantization: Quantization, dtype: torch.dtype
    ) -> Experts:
        return lambda x, chosen: reference.experts(x, chosen, weights, activation)  # type: ignore[return-value]
