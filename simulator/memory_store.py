"""A KV store of plain bytes, laid out as a real one, that notices who touches what when they must not.

A position's KV is 8 bytes for each layer: 4 of K and 4 of V, 2 of each belong to each of two heads. In memory they lie
as the engine's do, [num_blocks, 2 (K, V), heads of this rank, block_size, head_dim]: so other block sizes and other
shares of the heads cut the same 8 bytes in other ways.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from twostroke.kvtransfer.layout import KVShard
from twostroke.model.step import BlockCopy
from twostroke.protocol.clock import Clock
from twostroke.protocol.kv_layout import NO_BLOCK, KVLayout, first_seen, group_table
from twostroke.worker.scheduling.block_pool import BlockPool

KV_HEADS = 2
GARBAGE = 0xEEEE

Array = np.ndarray[Any, np.dtype[np.uint16]]
Grip = tuple[int, ...]
"""Allocations of some blocks that a reader or writer was let into."""


def fake_layout(
    *,
    num_layers: int,
    block_size: int,
    tp_size: int = 1,
    pp_size: int = 1,
    num_kv_heads: int = KV_HEADS,
    windows: tuple[int, ...] = (),
    kinds: int = 2,
    context_ranks: int = 1,
) -> KVLayout:
    """A layout of 2-byte values with a head dimension of 1."""
    return KVLayout(
        "fake",
        "bfloat16",
        num_layers,
        num_kv_heads,
        1,
        block_size,
        tp_size,
        windows=windows,
        kinds=kinds,
        pp_size=pp_size,
        context_ranks=context_ranks,
    )


class FakeStore:
    """A HostStore. `is_owned` says whether somebody holds a block now; without it, nobody watches."""

    def __init__(self, layout: KVLayout, *, num_blocks: int, rank: int = 0):
        self.layout = layout
        self.rank = rank
        self.num_blocks = num_blocks
        self.is_owned: Callable[[int], bool] | None = None
        self.protected: set[int] = set()  # blocks whose KV is there already: nobody writes into them
        self.violations: list[str] = []
        shape = (num_blocks, layout.kinds, layout.heads_per_rank, layout.rank_tokens, layout.head_dim)
        self._groups = layout.groups_of(rank)
        self._first_layer = layout.layers_of(rank).start
        self.layers: list[Array] = [np.full(shape, GARBAGE, np.uint16) for _ in range(self._groups.num_tensors)]
        self._allocations = [0] * num_blocks  # how often each block has been allocated
        self._units: dict[KVShard, list[Array]] = {}

    def layer_bytes(self, layer: int) -> memoryview:
        return memoryview(self.layers[layer]).cast("B")  # type: ignore[arg-type]

    def allocated(self, block_ids: Sequence[int]) -> None:
        """These blocks belong to somebody new, who finds garbage in them: nobody may rely on what was there."""
        for block_id in block_ids:
            self._allocations[block_id] += 1
        self.spoil(block_ids)

    def spoil(self, block_ids: Sequence[int]) -> None:
        """Overwrite blocks with garbage."""
        for memory in self.layers:
            for block_id in block_ids:
                memory[block_id] = GARBAGE

    def grip(self, block_ids: Sequence[int]) -> Grip:
        """Return the grip to show at each later `touch`. Blocks that were allocated anew meanwhile belong to
        somebody else."""
        return tuple([self._allocations[block_id] for block_id in block_ids])

    def in_use(self, table: Sequence[int], start: int, end: int) -> list[int]:
        """The blocks of a table that tokens from `start` up to `end` attend to, or write into."""
        size, groups = self.layout.block_size, self._groups
        return [
            table[row * groups.count + group]
            for group in range(groups.count)
            for row in range(groups.first_kept(group, start) // size, -(-end // size))
        ]

    def touch(self, block_ids: Sequence[int], what: str, grip: Grip | None = None) -> None:
        """Note where somebody reads or writes blocks that nobody owns, or that have changed hands since `grip`."""
        if self.is_owned is None:
            return
        stray = [block_id for block_id in block_ids if block_id == NO_BLOCK or not self.is_owned(block_id)]
        if stray:
            self.violations.append(f"{what} blocks {stray}, which nobody owns")
        elif grip is not None and grip != self.grip(block_ids):
            self.violations.append(f"{what} blocks {list(block_ids)}, which are another's by now")

    def touch_to_write(self, block_ids: Sequence[int], what: str, grip: Grip) -> None:
        """The same for a writer, who must leave protected blocks alone."""
        self.touch(block_ids, what, grip)
        if self.protected.intersection(block_ids):
            self.violations.append(f"{what} blocks {list(block_ids)}, some of which hold what it is not to send")

    # --- for whoever computes: positions of a sequence ---

    def read(self, layer: int, block_ids: Sequence[int], num_positions: int) -> bytes:
        """KV of a sequence's first positions, 8 bytes each where one rank has all heads; of a window its own alone."""
        return self.values(layer, block_ids, num_positions).tobytes()

    def values(self, layer: int, block_ids: Sequence[int], num_positions: int) -> Array:
        """The same as an array [position, 2, heads, head_dim]; garbage where other ranks have the position."""
        num_blocks = -(-num_positions // self.layout.block_size)
        memory, blocks_of = self._place(layer, block_ids)
        blocks = memory[list(blocks_of[:num_blocks])].transpose(0, 3, 1, 2, 4)
        if self.layout.context_ranks > 1:
            whole = np.full((len(blocks), self.layout.block_size, *blocks.shape[2:]), GARBAGE, np.uint16)
            held = self.layout.tokens_of(self.rank)
            whole[:, held.start : held.stop] = blocks
            blocks = whole
        first = first_seen(self._groups.layer_windows[layer - self._first_layer], num_positions - 1)
        return blocks.reshape(-1, *blocks.shape[2:])[first:num_positions]

    def position(self, layer: int, block_ids: Sequence[int], position: int) -> bytes:
        """KV of one position that is here, as in `read`."""
        block, offset = divmod(position, self.layout.block_size)
        memory, blocks = self._place(layer, block_ids)
        place = self.layout.tokens_of(self.rank).index(offset)
        return memory[blocks[block], :, :, place].tobytes()

    def write(self, layer: int, block_ids: Sequence[int], first_position: int, kv: bytes) -> None:
        """Store the KV of consecutive positions."""
        shape = (-1, 2, self.layout.heads_per_rank, self.layout.head_dim)
        self.write_values(layer, block_ids, first_position, np.frombuffer(kv, np.uint16).reshape(shape))

    def write_values(self, layer: int, block_ids: Sequence[int], first_position: int, values: Array) -> None:
        """The same from an array [position, 2, heads, head_dim], of which the rank keeps what it is to have."""
        memory, table = self._place(layer, block_ids)
        size, held = self.layout.block_size, self.layout.tokens_of(self.rank)
        if len(values) == 1 and len(held) == size:
            block, offset = divmod(first_position, size)
            memory[table[block], :, :, offset] = values[0]
            return
        positions = range(first_position, first_position + len(values))
        kept = [index for index, position in enumerate(positions) if position % size in held]
        blocks = [table[positions[index] // size] for index in kept]
        offsets = [positions[index] % size - held.start for index in kept]
        memory[blocks, :, :, offsets] = values[kept]

    def _place(self, layer: int, block_ids: Sequence[int]) -> tuple[Array, Sequence[int]]:
        """Return where a layer's KV lies: its tensor and its group's part of the block table."""
        groups, place = self._groups, layer - self._first_layer
        table = group_table(block_ids, groups.of_layer[place], groups.count)
        return self.layers[groups.tensor_of_layer[place]], table

    def copy_block(self, source: int, target: int) -> None:
        """Copy all layers' KV of a block into another."""
        for memory in self.layers:
            memory[target] = memory[source]

    # --- for links: units of a rank pair ---

    def read_units(self, layer: int, unit_ids: Sequence[int], shard: KVShard) -> bytes:
        """Units as they travel, [2, heads of the rank pair, unit_tokens, head_dim] each."""
        ids = np.asarray(unit_ids)
        units: bytes = self._cut(shard)[shard.tensor_index(layer)][
            ids // shard.units_per_block, ids % shard.units_per_block
        ].tobytes()
        return units

    def write_units(self, layer: int, unit_ids: Sequence[int], shard: KVShard, data: bytes | bytearray) -> None:
        """The opposite of `read_units`."""
        ids = np.asarray(unit_ids)
        target = self._cut(shard)[shard.tensor_index(layer)]
        values = np.frombuffer(data, np.uint16).reshape(len(ids), *target.shape[2:])
        target[ids // shard.units_per_block, ids % shard.units_per_block] = values

    def _cut(self, shard: KVShard) -> list[Array]:
        """Views of all layers as [block, part of it, 2, heads of the rank pair, unit_tokens, head_dim]."""
        views = self._units.get(shard)
        if views is None:
            layout, last = self.layout, shard.first_head + shard.num_heads
            heads, parts, tokens = layout.heads_per_rank, shard.units_per_block, shard.unit_tokens
            shape = (self.num_blocks, layout.kinds, heads, parts, tokens, layout.head_dim)
            views = self._units[shard] = [
                memory.reshape(shape).transpose(0, 3, 1, 2, 4, 5)[:, :, :, shard.first_head : last]
                for memory in self.layers
            ]
        return views


class FakeSwapSpace:
    """More blocks beside a store's, which copies fill. Garbage at first."""

    def __init__(self, store: FakeStore, *, num_blocks: int, bytes_per_s: float = 1e5):
        self.num_blocks = num_blocks
        self.block_bytes = sum(memory[0].nbytes for memory in store.layers)
        self.num_bytes = 0
        self.seconds = 0.0
        self._store = store
        self._bytes_per_s = bytes_per_s
        self._layers = [np.full((num_blocks, *memory.shape[1:]), GARBAGE, np.uint16) for memory in store.layers]

    def time_for(self, copy: BlockCopy) -> float:
        """Seconds that a copy takes."""
        return float(len(copy.cache_blocks) * self.block_bytes / self._bytes_per_s)

    def copy(self, copy: BlockCopy) -> None:
        """Make it at once."""
        cache, host = list(copy.cache_blocks), list(copy.host_blocks)
        for here, there in zip(self._store.layers, self._layers, strict=True):
            if copy.is_out:
                there[host] = here[cache]
            else:
                here[cache] = there[host]
        self.num_bytes += len(cache) * self.block_bytes
        self.seconds += self.time_for(copy)


class SpoilingPool(BlockPool):
    """A pool that tells its store whose blocks are whose."""

    def __init__(self, store: FakeStore, clock: Clock):
        super().__init__(store.num_blocks, store.layout.block_size, store.layout.groups, clock)
        self._store = store
        store.is_owned = lambda block_id: self.references(block_id) > 0

    def allocate(self, count: int) -> list[int]:
        block_ids = super().allocate(count)
        self._store.allocated(block_ids)
        return block_ids
