"""The layout of a KV cache, and which layouts can exchange KV. Pure.

A cache is some tensors of [num_blocks, kinds, heads of this rank, block_size, head_dim] on each of the worker's ranks,
and a block is its part of all of them. Of kinds there are two, keys and values, or one: rows of latents, of which both
are made, for one head that all ranks hold (multi-head latent attention).

The ranks are pipeline stages times tensor-parallel ranks: a stage has some layers, one after the other, and each of its
ranks some heads. Rank r of the worker is rank r % tp_size of stage r // tp_size.

Where a stage's ranks would all hold the same latents they may divide the tokens instead (context parallelism): of each
block each has one part, the first rank the first tokens. Tables and block sizes are as if there were one rank.

Layers that keep a state of fixed size instead of rows (delta nets, state-space models) put it into blocks of the same
size, in each of the block's parts for a kind and a head its share, as fp32 numbers: STATE_WINDOW.

Where all layers keep everything there is one tensor a layer. Where some keep a window, layers are cut into groups of
equal size that keep alike, and a tensor is for one layer of each group: any block can be any group's, so no memory is
set apart for either. Each stage cuts its own layers so, into as many groups, with the same windows.

Layers may have keys and values of different widths, where wide ones divide by the narrowest. A row of a wide layer's
tokens then is several blocks, each with its part of the tokens: `parts`. Everything here takes each part for a layer of
its own, a KV layer, with blocks in a group of its own; kernels are given the blocks of all parts in turn, in one table
(KVGroups.tables). Layers that attend to another layer's keys and values are no KV layers.

A window may also be a chunk: a token attends to those of its own chunk, which begins at a multiple of the chunk's size.
Its number is the negative size: the same numbers that say what attention sees then say what is kept.

A request has a block table with a row for each `block_size` tokens, and in each row one block id for every group, or
NO_BLOCK where the group's window has left the row behind, or has not come to it. A table is one flat list, row by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import msgspec

Encoding = Literal["raw", "int8", "fp8"]
"""KV on the wire: as it is stored, or one byte a value with a bf16 scale for each (token, head) of K and of V."""

FP8 = "float8_e4m3fn"
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, FP8: 1}

NO_BLOCK = -1

STATE_WINDOW = 2
"""Window of layers that keep a state instead of rows. A block holds the state behind the last computed token of its row
of the table, and the next token goes on from that of the token before it: so much a window of two tokens keeps. A state
behind a full row stays as it is, and is a prefix's as the row's keys and values are."""

TYPICAL_TOKENS = 2048
"""Tokens of a request whose length is not known."""


def first_seen(window: int, position: int) -> int:
    """Return the first position that the token at `position` attends to.

    `window`: 0 for all, else the last tokens, itself included, or of a chunk the negative size.
    """
    if window < 0:
        return position - position % -window
    return max(0, position + 1 - window) if window else 0


def mean_seen(window: int, context: float) -> float:
    """Return how many of `context` tokens the last one attends to: behind the first chunk, half a chunk on average."""
    if window < 0 and context > -window:
        return -window / 2
    return min(context, abs(window) or context)


@dataclass(frozen=True)
class KVGroups:
    """The layers that share block tables, and the tensor of the cache that each writes into."""

    windows: tuple[int, ...]  # of each group: what its layers attend to, as to `first_seen`
    of_layer: tuple[int, ...]  # each layer's group
    tensor_of_layer: tuple[int, ...]
    # Of each table that kernels read, its groups: several where each has a part of a row's tokens. Where none has, each
    # group is a table.
    tables: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return len(self.windows)

    @cached_property
    def num_tensors(self) -> int:
        """Layers of a group, which is also the number of tensors of the cache. The last of a kind may have fewer."""
        return max(self.tensor_of_layer) + 1

    @cached_property
    def tensors_of_group(self) -> tuple[tuple[int, ...], ...]:
        """The tensors that each group's layers write into: all, but for the last group of a kind."""
        found: list[set[int]] = [set() for _ in self.windows]
        for group, tensor in zip(self.of_layer, self.tensor_of_layer, strict=True):
            found[group].add(tensor)
        return tuple(tuple(sorted(tensors)) for tensors in found)

    @cached_property
    def table_of_layer(self) -> tuple[int, ...]:
        """Return each layer's place in `tables`."""
        of_group = {group: place for place, groups in enumerate(self.tables) for group in groups}
        return tuple(of_group[group] for group in self.of_layer)

    @cached_property
    def windowed(self) -> tuple[int, ...]:
        """The groups that keep a window."""
        return tuple(group for group, window in enumerate(self.windows) if window)

    @cached_property
    def layer_windows(self) -> tuple[int, ...]:
        return tuple(self.windows[group] for group in self.of_layer)

    def first_kept(self, group: int, num_tokens: int) -> int:
        """The first token that the one after `num_tokens` others attends to in this group's layers."""
        return first_seen(self.windows[group], num_tokens)

    def most_rows(self, group: int, block_size: int, step_tokens: int) -> int:
        """Return the table rows that a group with a window needs at once, a step of `step_tokens` included."""
        return (abs(self.windows[group]) + step_tokens + block_size - 2) // block_size + 1

    def blocks_of(self, num_tokens: int, block_size: int, step_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` tokens takes at once, in steps of so many at most."""
        rows = -(-num_tokens // block_size)
        kept = sum(min(rows, self.most_rows(group, block_size, step_tokens)) for group in self.windowed)
        return rows * (self.count - len(self.windowed)) + kept

    def tokens_in(self, num_blocks: int, block_size: int, step_tokens: int) -> int:
        """The longest request that so many blocks hold: `blocks_of` the other way round."""
        low, high = 0, num_blocks  # rows
        if len(self.windowed) == self.count and self.blocks_of(1 << 40, block_size, step_tokens) <= num_blocks:
            return 1 << 40  # windows alone: any length
        while low < high:
            rows = (low + high + 1) // 2
            if self.blocks_of(rows * block_size, block_size, step_tokens) <= num_blocks:
                low = rows
            else:
                high = rows - 1
        return low * block_size

    def tokens_a_block(self, block_size: int, num_tokens: float = TYPICAL_TOKENS) -> float:
        """Return the tokens of a request for each of its blocks, if it has `num_tokens`."""
        if not self.windowed:
            return block_size / self.count
        rows = max(1.0, num_tokens / block_size)
        kept = sum(min(rows, self.most_rows(group, block_size, 1)) for group in self.windowed)
        return rows * block_size / (rows * (self.count - len(self.windowed)) + kept)


@lru_cache
def group_layers(windows: tuple[int, ...], parts: tuple[int, ...] = ()) -> KVGroups:
    """Cut layers with these windows (as to `first_seen`) into groups, each as large as the smallest kind of layers.

    So what groups lack to be equally large is memory that nobody uses: some percent where kinds have odd numbers. The
    first group is one that keeps everything, where there is one: its blocks are what a prefix is known by. `parts` are
    KVLayout.parts; those of one layer of the model lie in the same tensor.
    """
    of_each = list(zip(windows, parts or (0,) * len(windows), strict=True))
    kinds = sorted(set(of_each), key=lambda kind: (abs(kind[0]), kind[1]))
    size = min(of_each.count(kind) for kind in kinds)
    of_layer, tensors, of_groups = [0] * len(windows), [0] * len(windows), list[int]()
    tables: dict[tuple[int, int], list[int]] = {}  # by window, and place among the groups with it
    for kind in kinds:
        layers = [layer for layer, found in enumerate(of_each) if found == kind]
        for place, layer in enumerate(layers):
            of_layer[layer], tensors[layer] = len(of_groups) + place // size, place % size
        for place in range(-(-len(layers) // size)):
            tables.setdefault((kind[0], place), []).append(len(of_groups))
            of_groups.append(kind[0])
    return KVGroups(tuple(of_groups), tuple(of_layer), tuple(tensors), tuple(map(tuple, tables.values())))


ONE_GROUP = group_layers((0,))
"""The groups of models whose layers keep all tokens: tables have one block a row."""


def group_table(block_ids: Sequence[int], group: int, num_groups: int) -> Sequence[int]:
    """One group's part of a block table."""
    return block_ids if num_groups == 1 else block_ids[group::num_groups]


def stage_layers(num_layers: int, num_stages: int, stage: int) -> range:
    """The layers of one of the stages that share a model's: as many as any other has, or one less or more."""
    return range(stage * num_layers // num_stages, (stage + 1) * num_layers // num_stages)


class RankCut(msgspec.Struct, frozen=True, array_like=True):
    """The division of a cache among a worker's ranks."""

    ranks: int = 1  # of all stages
    stages: int = 1
    context_ranks: int = 1  # as KVLayout.context_ranks

    def __str__(self) -> str:
        context = f", of which {self.context_ranks} share each block" if self.context_ranks > 1 else ""
        return f"{self.ranks} ranks in {self.stages} stages{context}"


ONE_RANK = RankCut()


class KVLayout(msgspec.Struct, frozen=True, array_like=True):
    """The KV layout of the whole model, equal on all ranks. Two workers compare theirs before they exchange KV."""

    model: str  # digest of configuration and weights
    dtype: str  # as torch names it, without the prefix
    num_layers: int
    num_kv_heads: int  # of the whole model
    head_dim: int
    block_size: int  # tokens
    tp_size: int = 1
    version: int = 1  # of this very arrangement
    windows: tuple[int, ...] = ()  # of each layer, as to `first_seen`; (): all keep all
    kinds: int = 2  # of rows: keys and values; 1: latents
    pp_size: int = 1
    context_ranks: int = 1  # of a stage, that share each block's tokens; 1: all of its ranks hold all of them
    state_numbers: int = 0  # fp32, of a state for each kind and KV head; 0: no layer keeps a state
    # Of each layer: which part of a row's tokens its blocks have. Layers with the same window have as many parts.
    # (): all have whole rows.
    parts: tuple[int, ...] = ()

    @property
    def groups(self) -> KVGroups:
        """Return the groups of the whole model's layers: the windows of each stage are the same."""
        return self._groups_of(range(self.num_layers))

    @property
    def num_ranks(self) -> int:
        return self.pp_size * self.tp_size

    @property
    def cut(self) -> RankCut:
        return RankCut(self.num_ranks, self.pp_size, self.context_ranks)

    def over(self, cut: RankCut) -> "KVLayout":
        """The same cache cut otherwise. Raises ValueError where stages can't have equally many ranks."""
        if cut.stages < 1 or cut.ranks % cut.stages:
            raise ValueError(f"{cut.stages} stages can't share {cut.ranks} ranks")
        return msgspec.structs.replace(
            self, tp_size=cut.ranks // cut.stages, pp_size=cut.stages, context_ranks=cut.context_ranks
        )

    def layers_of(self, rank: int) -> range:
        """The model's layers that `rank` holds."""
        return stage_layers(self.num_layers, self.pp_size, rank // self.tp_size)

    def groups_of(self, rank: int) -> KVGroups:
        """Return the groups of `rank`'s layers, which are numbered from 0 there."""
        return self._groups_of(self.layers_of(rank))

    def _groups_of(self, layers: range) -> KVGroups:
        part = slice(layers.start, layers.stop)
        return group_layers(self.windows[part] or (0,) * len(layers), self.parts[part])

    @property
    def has_plain_rows(self) -> bool:
        """Return True if blocks hold nothing but rows of `head_dim` numbers, each of one token."""
        return not self.state_numbers and not any(self.parts)

    @property
    def num_tensors(self) -> int:
        """Tensors of a rank's cache, where there is one stage."""
        return self.groups.num_tensors

    @property
    def heads_per_rank(self) -> int:
        """KV heads in one rank's cache: 1 where there are more ranks than heads, which then hold copies."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def rank_tokens(self) -> int:
        """Tokens of a block that one rank holds."""
        return self.block_size // self.context_ranks

    def tokens_of(self, rank: int) -> range:
        """Return the tokens of a block that the rank holds."""
        first = rank % self.context_ranks * self.rank_tokens
        return range(first, first + self.rank_tokens)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer on one rank."""
        return self.kinds * self.heads_per_rank * self.rank_tokens * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers and heads, heads that several ranks hold counted once."""
        return self.kinds * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def sent_bytes(self, num_tokens: int) -> int:
        """Return the bytes that a transfer of a prompt of so many tokens sends, heads that several ranks hold counted
        once: whole blocks, and of layers with a window or a state those that follow-ups need."""
        rows = -(-num_tokens // self.block_size)
        windows = self.windows or (0,) * self.num_layers
        blocks = sum(rows - first_seen(window, num_tokens) // self.block_size for window in windows)
        return blocks * self.block_size * self.token_bytes // self.num_layers

    def first_head(self, rank: int) -> int:
        """The first of the model's KV heads that `rank` holds."""
        return rank % self.tp_size * self.num_kv_heads // self.tp_size

    def __str__(self) -> str:
        return (
            f"model={self.model} dtype={self.dtype} layers={self.num_layers} kv_heads={self.num_kv_heads} "
            f"head_dim={self.head_dim} block_size={self.block_size} tp={self.tp_size} pp={self.pp_size} "
            f"layout={self.version} windows={sorted(set(self.windows))} kinds={self.kinds} cp={self.context_ranks}"
        )


def least_block_tokens(state_numbers: int, head_dim: int, itemsize: int) -> int:
    """Return the fewest tokens of a block that has room for a layer's state; 1 where there is none."""
    return max(1, -(-state_numbers * DTYPE_BYTES["float32"] // (head_dim * itemsize)))


def incompatibility(source: KVLayout, target: KVLayout, encoding: Encoding = "raw") -> str | None:
    """Return why KV can't go from `source` to `target`, with both sides' values; None where it can.

    Block sizes and numbers of ranks and stages may differ; dtypes only where KV is encoded on its way, and none is FP8.
    """
    for name, what in (
        ("model", "model"),
        ("num_layers", "number of layers"),
        ("num_kv_heads", "number of KV heads"),
        ("head_dim", "head dimension"),
        ("kinds", "kinds of rows"),
        ("version", "layout version"),
        ("windows", "layers' windows"),
        ("state_numbers", "size of a layer's state"),
        ("parts", "division of layers' rows into blocks"),
    ):
        ours, theirs = getattr(source, name), getattr(target, name)
        if ours != theirs:
            return f"the {what} differs: {ours} at the source, {theirs} at the target"
    if source.dtype != target.dtype and (encoding == "raw" or FP8 in (source.dtype, target.dtype)):
        return f"the KV dtype differs: {source.dtype} at the source, {target.dtype} at the target"
    if encoding != "raw" and source.dtype == FP8:
        return f"KV in {FP8} has one byte a value already: it is sent as it is stored, not as {encoding}"
    if encoding != "raw" and not source.has_plain_rows:
        return (
            f"the model's blocks hold more than rows of one width: they are sent as they are stored, not as {encoding}"
        )
    if any(source.windows) and source.block_size != target.block_size:
        return (  # a window would begin within one side's block, which could never be found again as a prefix
            "the model has layers with a window, which need the same block size on both sides: it is "
            f"{source.block_size} at the source, {target.block_size} at the target"
        )
    for side, layout in (("source", source), ("target", target)):
        fault = _fault(layout)
        if fault is not None:
            return f"the {side}'s layout can't be: {fault}"
    if not parts_fit((source.block_size, target.block_size), (source.context_ranks, target.context_ranks)):
        return (
            "ranks share the tokens of blocks, of which each part must be whole on the other side: "
            f"blocks have {source.block_size} tokens at the source, {source.rank_tokens} of them on a rank, and "
            f"{target.block_size} at the target, {target.rank_tokens} of them on a rank: set the same block_size"
        )
    return None


def parts_fit(block_sizes: tuple[int, int], context_ranks: tuple[int, int]) -> bool:
    """Return whether a transfer between ranks takes evenly spaced units of the larger of both parts.

    Where one side alone shares, the other's block size must also do for its number of ranks: each side plans lanes with
    its own.
    """
    (one, other), (ranks, of_other) = block_sizes, context_ranks
    if min(context_ranks) > 1:
        return one == other and max(context_ranks) % min(context_ranks) == 0
    if ranks > 1:
        return other % (one // ranks) == 0 and other % ranks == 0
    return of_other == 1 or (one % (other // of_other) == 0 and one % of_other == 0)


def _fault(layout: KVLayout) -> str | None:
    if layout.dtype not in DTYPE_BYTES:
        return f"there is no KV dtype {layout.dtype}"
    sizes = layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size
    ranks = layout.tp_size, layout.pp_size, layout.context_ranks
    if min(*sizes, *ranks) < 1:
        return f"a size is not positive in {layout}"
    if layout.context_ranks != 1:
        if layout.kinds != 1 or layout.context_ranks != layout.tp_size:
            what = "latents" if layout.kinds == 1 else "keys and values"
            return f"{layout.context_ranks} of {layout.tp_size} ranks can't share the tokens of {what}"
        if layout.block_size % layout.context_ranks:
            return f"{layout.context_ranks} ranks can't share blocks of {layout.block_size} tokens evenly"
    if layout.pp_size > layout.num_layers:
        return f"{layout.pp_size} pipeline stages can't share {layout.num_layers} layers"
    if layout.kinds not in (1, 2):
        return f"there are no caches of {layout.kinds} kinds of rows"
    if layout.state_numbers:
        if layout.kinds != 2 or layout.tp_size > layout.num_kv_heads:
            return f"{layout.tp_size} tensor-parallel ranks can't share states by {layout.num_kv_heads} KV heads"
        needed = least_block_tokens(layout.state_numbers, layout.head_dim, DTYPE_BYTES[layout.dtype])
        if layout.block_size < needed:
            return f"blocks of {layout.block_size} tokens have no room for a state, which takes {needed}"
    if layout.windows and len(layout.windows) != layout.num_layers:
        return f"the windows are not those of {layout.num_layers} layers"
    small, large = sorted((layout.tp_size, layout.num_kv_heads))
    if large % small:
        return f"{layout.tp_size} tensor-parallel ranks can't share {layout.num_kv_heads} KV heads evenly"
    if any(
        layout.groups_of(stage * layout.tp_size).windows != layout.groups.windows for stage in range(layout.pp_size)
    ):
        return f"{layout.pp_size} pipeline stages do not each have every kind of layer in the model's proportion"
    return None
