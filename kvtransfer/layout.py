"""The layout of a transfer: which rank sends which layers and heads to which rank, in what pieces and order. Pure.

A rank pair joins one rank of the source worker to one rank of the target worker, which have layers and heads in common:
a RankPair. The transfer on it is a PairTransfer (kvtransfer/transfer.py). All rank pairs of a transfer are independent:
each has its own control connection, link, grant, checksums and commit. The transfer succeeds when all of them have.

The piece that travels is the unit: the K and V of a rank pair's heads, or the latents, for `unit_tokens` tokens of one
layer, on the wire [kinds, num_heads, unit_tokens, head_dim]. `unit_tokens` divides what a rank has of a block on either
side, so a unit lies within one block of one rank. A unit's id in a store is `block id * units a block + its place among
those that the rank has`; where a block is one unit, unit ids are block ids.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from twostroke.protocol.kv_layout import DTYPE_BYTES, NO_BLOCK, Encoding, KVGroups, KVLayout, group_table
from twostroke.protocol.messages import Run

SCALE_BYTES = 2  # bf16, one for each row: a (token, head) of K or of V, or a latent


@dataclass(frozen=True, slots=True)
class Share:
    """Every `of`-th of a request's units, from `index` on. A rank pair numbers the units of its share from 0."""

    index: int = 0
    of: int = 1

    def below(self, num_units: int) -> int:
        """Return how many of the first `num_units` units belong to the share."""
        return (num_units - self.index + self.of - 1) // self.of


ALL_UNITS = Share()


@dataclass(frozen=True, slots=True)
class RankPair:
    """One pair of ranks, and what goes from one to the other: of these layers and KV heads (the model's numbers) these
    units."""

    source_rank: int
    target_rank: int
    layers: range
    first_head: int
    num_heads: int
    share: Share = ALL_UNITS


@dataclass(frozen=True, slots=True)
class Segment:
    """Units of one layer in one side's store, in the order of the wire."""

    layer: int  # the model's number; KVShard.tensor_index returns its tensor in the store
    unit_ids: tuple[int, ...]


@dataclass(frozen=True)
class KVShard:
    """One rank's end of a rank pair: how its store is cut into units."""

    layout: KVLayout  # this side's
    rank: int
    layers: range  # the rank pair's, with the model's numbers
    first_head: int  # of the rank pair's, counted within this rank's cache
    num_heads: int
    unit_tokens: int
    encoding: Encoding
    share: Share = ALL_UNITS

    @property
    def units_per_block(self) -> int:
        """Units of a block, counting those that the rank has."""
        return self.layout.rank_tokens // self.unit_tokens

    @property
    def is_whole_blocks(self) -> bool:
        """True where a unit on the wire is a block of the store, byte by byte: nothing has to be packed."""
        return self.units_per_block == 1 and self.num_heads == self.layout.heads_per_rank and self.encoding == "raw"

    @property
    def stored_unit_bytes(self) -> int:
        """Bytes of a unit in this side's store."""
        return self._rows * self.layout.head_dim * DTYPE_BYTES[self.layout.dtype]

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit on the wire, scales included."""
        return self.stored_unit_bytes if self.encoding == "raw" else self._rows * (self.layout.head_dim + SCALE_BYTES)

    @property
    def _rows(self) -> int:
        return self.layout.kinds * self.num_heads * self.unit_tokens

    @cached_property
    def num_tensors(self) -> int:
        """Tensors of this rank's store, including those that the rank pair does not use."""
        return self._groups.num_tensors

    def tensor_index(self, layer: int) -> int:
        """Return the index of the store's tensor that holds the KV of one of the rank pair's layers."""
        return self._groups.tensor_of_layer[layer - self._first_layer]

    @cached_property
    def _groups(self) -> KVGroups:
        return self.layout.groups_of(self.rank)

    @cached_property
    def _first_layer(self) -> int:
        return self.layout.layers_of(self.rank).start

    def segments(self, runs: Iterable[Run], block_ids: tuple[int, ...]) -> tuple[Segment, ...]:
        """Return the places of the runs' units in this side's store, for a request with this block table."""
        return tuple(Segment(run.layer, tuple(self._unit_ids(run, block_ids))) for run in runs)

    def _unit_ids(self, run: Run, block_ids: tuple[int, ...]) -> Sequence[int]:
        parts, groups = self.units_per_block, self._groups
        count, group = groups.count, groups.of_layer[run.layer - self._first_layer]
        first, step = self.share.index + run.first_unit * self.share.of, self.share.of
        units = range(first, first + run.num_units * step, step)
        if parts == 1 and self.layout.context_ranks == 1:
            return block_ids[units.start * count + group : units.stop * count : count * step]
        in_block = self.layout.block_size // self.unit_tokens
        before = self.layout.tokens_of(self.rank).start // self.unit_tokens  # on other ranks, of each block
        return [block_ids[unit // in_block * count + group] * parts + unit % in_block - before for unit in units]


def check_table(
    block_ids: Sequence[int], num_tokens: int, skip_tokens: int, layout: KVLayout, num_blocks: int
) -> tuple[int, ...]:
    """Return the rows of a block table that hold `num_tokens` tokens.

    Raises ValueError where a block is missing that takes tokens behind the first `skip_tokens` to which later tokens
    attend, or where blocks are not distinct ones of `num_blocks`.
    """
    groups, rows = layout.groups, -(-num_tokens // layout.block_size)
    table = tuple(block_ids[: rows * groups.count])
    needed = [
        block_id
        for group in range(groups.count)
        for block_id in group_table(table, group, groups.count)[
            max(skip_tokens, groups.first_kept(group, num_tokens)) // layout.block_size :
        ]
    ]
    if len(table) < rows * groups.count or NO_BLOCK in needed:
        raise ValueError(
            f"{num_tokens} tokens do not fit a table of {len(block_ids)} blocks: some that follow-ups need are missing"
        )
    wrong = [one for one, times in Counter(needed).items() if times > 1 or not 0 <= one < num_blocks]
    if wrong:
        raise ValueError(f"a table needs distinct blocks of {num_blocks}: {wrong[0]} is none, or there twice")
    return table


def rank_pairs(source: KVLayout, target: KVLayout) -> tuple[RankPair, ...]:
    """Return the rank pairs of a transfer: each unit of each layer and head of a target rank comes from one source
    rank.

    Where a stage has more ranks than heads, ranks hold copies: each copy at the target is filled, and the source's
    copies share the work. Where the source has several times as many copies as the target, each target rank has rank
    pairs from several, alternating from unit to unit. Where ranks share each block's tokens, a unit goes from the rank
    that has it to the rank that needs it. Raises ValueError where ranks can't share the heads, layers or tokens evenly.
    """
    for layout in (source, target):
        small, large = sorted((layout.tp_size, layout.num_kv_heads))
        if small < 1 or large % small:
            raise ValueError(f"{layout.tp_size} ranks can't share {layout.num_kv_heads} KV heads evenly")
        if not 1 <= layout.pp_size <= layout.num_layers:
            raise ValueError(f"{layout.pp_size} stages can't share {layout.num_layers} layers")
        if layout.context_ranks < 1 or layout.block_size % layout.context_ranks:
            raise ValueError(f"{layout.context_ranks} ranks can't share blocks of {layout.block_size} tokens")
    pairs: list[RankPair] = []
    for target_rank in range(target.num_ranks):
        wanted = target.layers_of(target_rank)
        for stage in range(source.pp_size):
            held = source.layers_of(stage * source.tp_size)
            layers = range(max(wanted.start, held.start), min(wanted.stop, held.stop))
            if layers and max(source.context_ranks, target.context_ranks) > 1:
                pairs += _of_parts(source, stage, target, target_rank, layers)
            elif layers:
                pairs += _from_stage(source, stage, target, target_rank, layers)
    return tuple(pairs)


def _of_parts(source: KVLayout, stage: int, target: KVLayout, target_rank: int, layers: range) -> Iterator[RankPair]:
    """Yield the rank pairs of latents from one stage where the ranks of a side have parts of blocks."""
    unit_tokens = _unit_tokens(source, target)
    # After these tokens the pattern repeats.
    period = max(side.block_size for side in (source, target) if side.context_ranks > 1)
    wanted = target.tokens_of(target_rank)
    for token in range(0, period, unit_tokens):
        if token % target.block_size not in wanted:
            continue
        if source.context_ranks > 1:
            owner = token % source.block_size // source.rank_tokens
        else:  # all of the stage's ranks have it
            owner = target_rank % source.tp_size
        share = Share(token // unit_tokens, period // unit_tokens)
        yield RankPair(stage * source.tp_size + owner, target_rank, layers, 0, 1, share)


def _from_stage(source: KVLayout, stage: int, target: KVLayout, target_rank: int, layers: range) -> Iterator[RankPair]:
    """Yield the rank pairs that bring one target rank these layers, which a stage of the source has."""
    source_tp, target_tp, num_kv_heads = source.tp_size, target.tp_size, source.num_kv_heads
    source_copies = max(1, source_tp // num_kv_heads)  # ranks of a stage that hold the same head
    target_copies = max(1, target_tp // num_kv_heads)
    shares = max(1, source_copies // target_copies)
    first = target.first_head(target_rank)
    end = first + target.heads_per_rank
    while first < end:
        count = min(end - first, source.heads_per_rank - first % source.heads_per_rank)
        for index in range(shares):
            copy = (target_rank % target_tp % target_copies + index * target_copies) % source_copies
            source_rank = stage * source_tp + first * source_tp // num_kv_heads + copy
            yield RankPair(source_rank, target_rank, layers, first, count, Share(index, shares))
        first += count


def pair_shards(pair: RankPair, source: KVLayout, target: KVLayout, encoding: Encoding) -> tuple[KVShard, KVShard]:
    """Return the pair's ends at the source and at the target."""
    unit_tokens = _unit_tokens(source, target)

    def end(layout: KVLayout, rank: int) -> KVShard:
        first = pair.first_head - layout.first_head(rank)
        return KVShard(layout, rank, pair.layers, first, pair.num_heads, unit_tokens, encoding, pair.share)

    return end(source, pair.source_rank), end(target, pair.target_rank)


def _unit_tokens(source: KVLayout, target: KVLayout) -> int:
    return math.gcd(source.rank_tokens, target.rank_tokens)


def first_units(
    groups: KVGroups, layers: range, num_tokens: int, unit_tokens: int, skip_tokens: int, share: Share
) -> dict[int, int]:
    """Return for each layer the first unit of the share that is sent; the number of units where none is.

    `groups` are the whole model's. The target has the first `skip_tokens`, and no token attends to units before a
    layer's window.
    """
    skipped = -(-skip_tokens // unit_tokens) if skip_tokens == num_tokens else skip_tokens // unit_tokens
    kept = [groups.first_kept(group, num_tokens) // unit_tokens for group in range(groups.count)]
    return {layer: share.below(max(skipped, kept[groups.of_layer[layer]])) for layer in layers}


class ChunkPlan:
    """Plans the chunks of a rank pair: every unit of its layers once, except skipped ones, and none before it is full.

    For a layer with a window these are only the units that the token after the last attends to.

    Runs are made when they are requested: units that become ready while the link is busy, or before the grant, go in as
    few chunks as their size allows, several layers in one.
    """

    def __init__(self, *, groups: KVGroups, layers: range, num_tokens: int, num_ready_tokens: int):
        """`groups` are the whole model's; `layers`, with the model's numbers, are those to send."""
        self.layers = layers
        self._num_tokens = num_tokens
        self._groups = groups
        self._ready = dict.fromkeys(layers, num_ready_tokens)  # tokens, from the first on
        self._num_unready = 0 if num_ready_tokens == num_tokens else len(layers)  # layers
        self._unit_tokens = 0  # until `begin`
        self._share = ALL_UNITS
        self._num_units = 0
        self._taken = dict.fromkeys(layers, 0)  # units, from the first on
        self._num_untaken = len(layers)
        self._waiting: deque[int] = deque()  # layers with full units, in the order in which they became full

    def begin(self, unit_tokens: int, skip_tokens: int, share: Share = ALL_UNITS) -> None:
        """Set the size of units, and skip those of the first `skip_tokens`. Called once, before the first run.

        Raises ValueError for more tokens than there are, and for part of a unit.
        """
        if not 0 <= skip_tokens <= self._num_tokens:
            raise ValueError(f"{skip_tokens} tokens are skipped of {self._num_tokens}")
        if skip_tokens % unit_tokens and skip_tokens != self._num_tokens:
            raise ValueError(f"{skip_tokens} skipped tokens end within a unit of {unit_tokens}")
        self._unit_tokens, self._share = unit_tokens, share
        self._num_units = share.below(-(-self._num_tokens // unit_tokens))
        self._taken = first_units(self._groups, self.layers, self._num_tokens, unit_tokens, skip_tokens, share)
        self._num_untaken = sum(taken < self._num_units for taken in self._taken.values())
        self._waiting.extend(
            layer for layer, ready in self._ready.items() if self._full_units(ready) > self._taken[layer]
        )

    def add_ready(self, layer: int, num_tokens: int) -> None:
        """Note that the first `num_tokens` tokens of `layer` are in the blocks.

        Raises ValueError for more tokens than there are, and for a layer that is not to be sent.
        """
        if layer not in self.layers:
            raise ValueError(f"layer {layer} is none of {self.layers}")
        if not 0 <= num_tokens <= self._num_tokens:
            raise ValueError(f"{num_tokens} tokens are ready of {self._num_tokens}")
        before, taken = self._ready[layer], self._taken[layer]
        if num_tokens <= before:
            return
        self._ready[layer] = num_tokens
        self._num_unready -= num_tokens == self._num_tokens
        if self._unit_tokens and self._full_units(before) <= taken < self._full_units(num_tokens):
            self._waiting.append(layer)

    def next_runs(self, max_units: int) -> tuple[Run, ...]:
        """Take the runs of the next chunk, of at most `max_units` units; none where no unit is full now."""
        runs: list[Run] = []
        while self._waiting and max_units:
            layer = self._waiting[0]
            first, full = self._taken[layer], self._full_units(self._ready[layer])
            count = min(full - first, max_units)
            runs.append(Run(layer, first, count))
            max_units -= count
            self._taken[layer] = first + count
            self._num_untaken -= first + count == self._num_units
            if first + count == full:
                self._waiting.popleft()
        return tuple(runs)

    @property
    def has_runs(self) -> bool:
        """True where a unit is full and not taken."""
        return bool(self._waiting)

    @property
    def all_ready(self) -> bool:
        """True where every token of every layer is in its block."""
        return self._num_unready == 0

    @property
    def all_taken(self) -> bool:
        """True where every unit of every layer was taken or skipped."""
        return self._num_untaken == 0

    def _full_units(self, num_tokens: int) -> int:
        return self._num_units if num_tokens == self._num_tokens else self._share.below(num_tokens // self._unit_tokens)
