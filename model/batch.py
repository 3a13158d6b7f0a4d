"""A step's batch as tensors: where its tokens stand in their sequences and in the cache, and which of them draw."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.model.step import OnLayer, SequenceStep
from twostroke.protocol.kv_layout import NO_BLOCK, ONE_GROUP, KVGroups


@dataclass(frozen=True)
class BatchLayout:
    """Positions, slots and block tables of a step's tokens, for the layers of one of KVGroups.tables. Tensors are on
    the engine's device.

    Where these layers' rows are several blocks, each is a block here, with its part of the tokens.

    Sequences that bring exactly one token (decodes) come first, then the others (prefill chunks): so that each kind
    is one kernel call. The runner sorts the batch and puts the results back in the caller's order.
    """

    positions: Tensor  # int64 [T]: position of each token in its sequence
    slots: Tensor  # int64 [T]: where its KV goes, block id * block_size + offset; negative: nowhere here
    query_starts: Tensor  # int32 [B + 1]: token range of sequence b is [query_starts[b], query_starts[b + 1])
    context_lens: Tensor  # int32 [B]: tokens of context including this step's own
    block_tables: Tensor  # int32 [B, blocks of the longest]: 0 where there is none; those entries are never used
    num_decodes: int  # the first `num_decodes` sequences have one token each
    max_query_len: int
    max_context_len: int
    # Where ranks share each block's tokens (protocol/kv_layout.py), int32 [B]: of the context those that this one has.
    # Slots are then of blocks of its part.
    local_lens: Tensor | None = None

    @classmethod
    def of_decodes(
        cls,
        positions: Tensor,
        slots: Tensor,
        context_lens: Tensor,
        block_tables: Tensor,
        max_context_len: int,
        local_lens: Tensor | None = None,
    ) -> "BatchLayout":
        """The layout of sequences that bring one token each."""
        starts = torch.arange(positions.numel() + 1, dtype=torch.int32, device=positions.device)
        count = positions.numel()
        return cls(positions, slots, starts, context_lens, block_tables, count, 1, max_context_len, local_lens)

    @classmethod
    def of_nothing(cls, device: torch.device, max_context_len: int = 1) -> "BatchLayout":
        """Return the layout of one empty sequence, with which kernels are compiled; counts as a decode."""
        nothing = torch.zeros(2, dtype=torch.int32, device=device)
        one = nothing[:1]
        return cls(nothing, nothing, nothing, one, one.view(1, 1), 1, 1, max_context_len, one)

    def of_last_tokens(self, drawing: "Drawing") -> "BatchLayout":
        """The layout of the tokens that draw alone, whose KV is in the cache: all are decodes."""
        return BatchLayout.of_decodes(
            self.positions[drawing.rows],
            self.slots[drawing.rows],
            self.context_lens[drawing.sequences],
            self.block_tables[drawing.sequences],
            self.max_context_len,
            None if self.local_lens is None else self.local_lens[drawing.sequences],
        )


@dataclass(frozen=True)
class Drawing:
    """Tokens of a step after which a token is drawn: at most one of each sequence, its last."""

    rows: Tensor  # int64 [N]: ascending, of T
    sequences: Tensor  # int64 [N]: theirs


@dataclass(frozen=True)
class StepInput:
    """Inputs of a decoder's step, all on its device."""

    token_ids: Tensor  # int64 [T]
    layouts: Sequence[BatchLayout]  # of each of KVGroups.tables
    kv_tensors: Sequence[Tensor]  # [num_blocks, 2, G, block_size, D] each
    drawing: Drawing
    # Gets [T, hidden] from behind the last norm, on every rank, and may ask for logits of some. Without it only rows
    # that draw come so far.
    on_hidden: Callable[[Tensor], object] | None = None


class StepDecoder(Protocol):
    """Computes a step: model/architectures/decoder.py, and transformers_decoder.py for families of others."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits of all ranks together."""

    @property
    def logits_width(self) -> int:
        """Width of this rank's logits, which are its part of the vocabulary: `Shard.vocabulary`."""

    def forward(self, step: StepInput, on_layer: OnLayer | None = None) -> Tensor | None:
        """Return this rank's logits fp32 [N, logits_width] of the rows that draw, None where none does.

        `on_layer(i)` is called, in order, once layer i's KV is in the cache, on CUDA once what writes it is launched.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [N, logits_width] of rows that `StepInput.on_hidden` got."""


def place(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, in the order of the current stream; on a CPU a tensor over the same memory.

    Nothing waits for what the device is still doing. A copy out of ordinary memory would: torch ends it with a
    synchronisation. One out of pinned memory is queued, and torch keeps that memory until it has been made.
    """
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def take_drawn(token_ids: Tensor, steps: Sequence[SequenceStep], drawn: Tensor) -> None:
    """Write what the step before drew, int64 [its entries] on the device, in the rows of the steps that follow it."""
    following = [(row, step.follows) for row, step in enumerate(steps) if step.follows is not None]
    if following:
        places = place(np.array(following, np.int64).T, token_ids.device)
        token_ids.index_copy_(0, places[0], drawn[places[1]])


class CheckedTables:
    """Remembers how far the block tables of a step have been checked, for the next one.

    A sequence's blocks are one list that only grows, but where there are windows. So of long contexts a step has next
    to nothing to check.
    """

    def __init__(self) -> None:
        self._checked: dict[int, tuple[Sequence[int], int]] = {}  # of each table of the last step

    def check(self, batch: Sequence[SequenceStep], lowest: int, num_blocks: int) -> None:
        """Raises ValueError where a table has a block below `lowest`, or beyond a cache of `num_blocks`."""
        before, self._checked = self._checked, {}  # none after an error
        checked = {}
        for step in batch:
            table, length = step.block_ids, len(step.block_ids)
            known, done = before.get(id(table), (None, 0))
            blocks = table[done:length] if known is table else table
            if len(blocks) and (min(blocks) < lowest or max(blocks) >= num_blocks):
                raise ValueError(f"a block table names a block outside the {num_blocks} of the cache")
            checked[id(table)] = table, length
        self._checked = checked


def check_batch(
    batch: Sequence[SequenceStep],
    block_size: int,
    num_blocks: int,
    max_context: int,
    groups: KVGroups = ONE_GROUP,
    tables: CheckedTables | None = None,
) -> None:
    """Raises ValueError where following the batch would read or write where it must not.

    `tables` remember what was checked of the step before.
    """
    lowest = NO_BLOCK if groups.windowed else 0
    if not batch:
        raise ValueError("an engine step needs at least one sequence")
    for step in batch:
        end = step.start + len(step.token_ids)
        if not len(step.token_ids) or step.start < 0:
            raise ValueError(f"a sequence step of {len(step.token_ids)} tokens at position {step.start}")
        if end > max_context:
            raise ValueError(f"a sequence of {end} tokens is over the context of {max_context}")
        if len(step.block_ids) * block_size < end * groups.count:
            raise ValueError(f"{len(step.block_ids)} blocks of {block_size} tokens don't hold {end} tokens")
    (CheckedTables() if tables is None or groups.windowed else tables).check(batch, lowest, num_blocks)


def make_layout(steps: Sequence[SequenceStep], block_size: int, device: torch.device) -> BatchLayout:
    """The layout of a batch whose single-token sequences come first, where all layers are one group."""
    return make_layouts(steps, block_size, device, ONE_GROUP)[0]


def local_lengths(positions: npt.NDArray[np.int64], block_size: int, local_tokens: range) -> npt.NDArray[np.int64]:
    """Return how many of the first `positions` tokens of a context a rank has that holds the tokens `local_tokens` of
    each block."""
    blocks, rest = np.divmod(positions, block_size)
    local_lens: npt.NDArray[np.int64] = blocks * len(local_tokens) + np.clip(
        rest - local_tokens.start, 0, len(local_tokens)
    )
    return local_lens


def token_slots(
    blocks: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], block_size: int, local_tokens: range
) -> npt.NDArray[np.int64]:
    """Return the slots of tokens at `positions` of their sequences, with blocks [..., T], on a rank that holds the
    tokens `local_tokens` of each block; negative where the rank does not hold the token."""
    places = positions % block_size - local_tokens.start
    return np.where((places >= 0) & (places < len(local_tokens)), blocks * len(local_tokens) + places, -1)


def parts_in_turn(tables: npt.NDArray[np.int32], groups: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return the table [B, parts * rows] of layers whose rows' parts are in these groups' tables [groups, B, rows]."""
    if len(groups) == 1:
        return tables[groups[0]]  # type: ignore[no-any-return]
    return tables[list(groups)].transpose(1, 2, 0).reshape(tables.shape[1], -1)


def make_layouts(
    steps: Sequence[SequenceStep],
    block_size: int,
    device: torch.device,
    groups: KVGroups,
    local_tokens: range | None = None,
) -> tuple[BatchLayout, ...]:
    """Return the layout for each of the groups' tables of a batch whose single-token sequences come first.

    `local_tokens` are those tokens of each block that this rank has, where there are others.
    Raises ValueError where a token's KV has no block to go to.
    """
    lengths = np.fromiter((len(step.token_ids) for step in steps), np.int64, len(steps))
    starts = np.fromiter((step.start for step in steps), np.int64, len(steps))
    context_lens = starts + lengths
    rows = -(-context_lens // block_size)  # a table may hold more, for tokens to come
    tables = np.zeros((groups.count, len(steps), int(rows.max())), np.int32)
    used = chain.from_iterable(
        step.block_ids[:n] for step, n in zip(steps, (rows * groups.count).tolist(), strict=True)
    )
    blocks = np.fromiter(used, np.int32, int(rows.sum()) * groups.count).reshape(-1, groups.count)
    tables[:, np.arange(tables.shape[2]) < rows[:, None]] = blocks.T

    query_starts = np.zeros(len(steps) + 1, np.int64)
    np.cumsum(lengths, out=query_starts[1:])
    sequence_of = np.repeat(np.arange(len(steps)), lengths)
    positions = np.arange(query_starts[-1]) - query_starts[sequence_of] + starts[sequence_of]
    if groups.windowed:
        if tables[:, sequence_of, positions // block_size].min() < 0:
            raise ValueError("a block table has no block for a token of the step")
        np.maximum(tables, 0, out=tables)
    read = [parts_in_turn(tables, of) for of in groups.tables]
    slots = np.empty((len(read), len(positions)), np.int64)
    for found, table, of in zip(slots, read, groups.tables, strict=True):
        size = block_size // len(of)
        blocks = table[sequence_of, positions // size].astype(np.int64)
        found[:] = token_slots(blocks, positions, size, local_tokens or range(size))
    local_lens = None
    if local_tokens is not None:
        local_lens = place(local_lengths(context_lens, block_size, local_tokens).astype(np.int32), device)

    placed_slots = place(slots, device)
    flat = place(np.concatenate([table.reshape(-1) for table in read]), device)
    placed_tables = [part.view(len(steps), -1) for part in torch.split(flat, [table.size for table in read])]
    first = BatchLayout(
        positions=place(positions, device),
        slots=placed_slots[0],
        query_starts=place(query_starts.astype(np.int32), device),
        context_lens=place(context_lens.astype(np.int32), device),
        block_tables=placed_tables[0],
        num_decodes=int((lengths == 1).sum()),
        max_query_len=int(lengths.max()),
        max_context_len=int(context_lens.max()),
        local_lens=local_lens,
    )
    others = zip(placed_slots[1:], placed_tables[1:], strict=True)
    return first, *(replace(first, slots=token_slots, block_tables=tables_of) for token_slots, tables_of in others)
