"""Decode steps recorded once for each batch size and replayed: no launch, and nothing of the model's Python, per step.

A replay reads its inputs where the recording found them, so each step's are written into the same memory. On CPUs a
recording is a Program (model/cpu/captured_steps.py), on CUDA a graph (model/cuda/graphs.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from twostroke.model.architectures.decoder import Decoder
from twostroke.model.batch import BatchLayout, Drawing, StepDecoder, StepInput, local_lengths, token_slots
from twostroke.model.cache.kv_cache import KVCache
from twostroke.model.step import SequenceStep
from twostroke.protocol.kv_layout import ONE_GROUP, KVGroups


class CapturedSteps(Protocol):
    """Whole decode steps without the host's cost."""

    def logits(self, batch: Sequence[SequenceStep], earlier: Tensor | None = None) -> Tensor | None:
        """fp32 [N, vocab], until the next call; None for a batch that must run eagerly.

        All of `batch` bring one token each, and draw. `earlier` int64: the tokens of the step before by its entries,
        on the device, which those of `batch` have that `follows` one; None where all are in the batch.
        """

    def mtp_logits(self, drawn: Tensor) -> Tensor:
        """Return fp32 [N, vocab] of the tokens behind `drawn` int64 [N], which the rows of the last call of `logits`
        drew, by the decoder's MTP head."""


class CapturedPrompts(Protocol):
    """Whole small steps with prompts without the host's cost."""

    def logits(self, steps: Sequence[SequenceStep], drawing: Sequence[int], earlier: Tensor | None) -> Tensor | None:
        """Return logits as CapturedSteps.logits does, of the entries `drawing` of a step whose single tokens come
        first."""


class NothingCaptured:
    """Implements CapturedSteps and CapturedPrompts where every step runs eagerly."""

    def logits(self, *_: Any, **__: Any) -> None:
        return None

    def mtp_logits(self, drawn: Tensor) -> Tensor:
        raise RuntimeError("no step was captured that the tokens could be of")


NOTHING_CAPTURED = NothingCaptured()


@dataclass(frozen=True)
class StepReplays:
    """The captured steps of an engine, over its decoder and cache."""

    decodes: CapturedSteps = NOTHING_CAPTURED
    prompts: CapturedPrompts = NOTHING_CAPTURED


ALL_EAGER = StepReplays()


class DecodeInputs:
    """The inputs of decode steps of up to `max_batch` sequences, always in the same memory of one device."""

    def __init__(
        self,
        max_batch: int,
        max_context: int,
        block_size: int,
        *,
        groups: KVGroups = ONE_GROUP,
        local_tokens: range | None = None,
        device: torch.device | None = None,
        pinned: bool = False,
    ):
        """Allocate the inputs, on the host where no device is named; a GPU copies from `pinned` host memory by itself.
        `local_tokens` as to make_layouts."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        self._block_size = block_size
        self._groups = groups
        self._local_tokens = local_tokens
        self._max_context = max_context
        # What each sequence has one of lies together, so that one copy brings all of it. Rows begin at multiples of 16
        # bytes, where kernels read faster.
        self.width = -(-max_batch // 4) * 4
        num_longs, num_ints = 4 + len(groups.tables), 2
        self.packed = zeros(torch.int64, num_longs * self.width + num_ints * self.width // 2)
        ints = self.packed[num_longs * self.width :].view(torch.int32).view(num_ints, self.width)
        longs = self.packed[: num_longs * self.width].view(num_longs, self.width)
        self.context_lens = ints[0, :max_batch].fill_(1)
        self.token_ids, self.drawn, self.sources, self.positions = longs[:4, :max_batch]
        self.candidates = longs[:2].view(-1)
        """int64 [2 * width]: `token_ids`, and behind them `drawn`, the tokens of the step before."""
        self.sources.copy_(torch.arange(max_batch))
        self.slots = longs[4:, :max_batch]
        rows = -(-max_context // block_size)
        self.block_tables = [zeros(torch.int32, max_batch, rows, len(of)) for of in groups.tables]
        """Tables of blocks, int32 [max_batch, rows, parts], one for each of KVGroups.tables."""
        self._written: list[tuple[Sequence[int], int]] = []  # of each row of the last batch: its table, and how far
        self._local_lens: Tensor | None = None
        if local_tokens is not None:
            of_one = local_lengths(np.ones(1, np.int64), block_size, local_tokens)
            self._local_lens = ints[1, :max_batch].fill_(int(of_one[0]))

    def hold(self, batch: Sequence[SequenceStep]) -> bool:
        """Return True if no context of the batch is longer than the longest that there is room for."""
        return max(step.start for step in batch) < self._max_context

    def fill(self, batch: Sequence[SequenceStep]) -> None:
        """Write a batch that `twostroke.model.batch.check_batch` lets pass into the first rows, on the host."""
        count, size, num_groups = len(batch), self._block_size, self._groups.count
        of_each = self.token_ids, self.positions, self.context_lens
        token_ids, positions, context_lens = (rows.numpy()[:count] for rows in of_each)
        slots = self.slots.numpy()[:, :count]
        token_ids[:] = [step.token_ids[0] for step in batch]
        positions[:] = [step.start for step in batch]
        np.add(positions, 1, out=context_lens, casting="unsafe")
        last_blocks = positions // size
        lengths = ((last_blocks + 1) * num_groups).tolist()  # a table may hold more, for tokens to come
        num_rows = max(lengths) // num_groups
        tables = [table.numpy()[:count, :num_rows] for table in self.block_tables]
        if not self._extend_tables(batch, lengths, tables[0]):
            used = chain.from_iterable(step.block_ids[:n] for step, n in zip(batch, lengths, strict=True))
            blocks = np.fromiter(used, np.int32, sum(lengths)).reshape(-1, num_groups)
            if self._groups.windowed:
                np.maximum(blocks, 0, out=blocks)
            written = np.arange(num_rows) <= last_blocks[:, None]
            for table, of in zip(tables, self._groups.tables, strict=True):
                table[written] = blocks[:, of]
        for found, table in zip(slots, tables, strict=True):
            part = size // table.shape[2]
            last = table[np.arange(count), last_blocks, positions % size // part]
            found[:] = token_slots(last.astype(np.int64), positions, part, self._local_tokens or range(part))
        if self._local_tokens is not None and self._local_lens is not None:
            self._local_lens.numpy()[:count] = local_lengths(positions + 1, size, self._local_tokens)

    def _extend_tables(self, batch: Sequence[SequenceStep], lengths: Sequence[int], table: NDArray[np.int32]) -> bool:
        """Write what rows of the table lack that they had at the last call; False where that is most of it.

        A sequence's blocks are one list, which only grows, but where there are windows. So of long contexts a step
        brings next to nothing.
        """
        if self._groups.count > 1 or self._groups.windowed:
            return False
        tables = [step.block_ids for step in batch]
        known = [done if of is blocks else 0 for (of, done), blocks in zip(self._written, tables, strict=False)]
        known += [0] * (len(tables) - len(known))
        self._written = list(zip(tables, lengths, strict=True))
        if 2 * sum(known) < sum(lengths):
            return False
        for row, (blocks, done, length) in enumerate(zip(tables, known, lengths, strict=True)):
            if done < length:
                table[row, done:length, 0] = blocks[done:length]
        return True

    def follow(self, batch: Sequence[SequenceStep]) -> None:
        """Write which of `candidates` is each row's token, on the host: what the step before has drawn where a row of
        `batch` follows it, else the one that `fill` has written."""
        self.sources.numpy()[: len(batch)] = [
            row if step.follows is None else self.width + step.follows for row, step in enumerate(batch)
        ]

    def layouts(self, count: int) -> tuple[BatchLayout, ...]:
        """Return the layouts of the first `count` rows, over this object's own memory. Tables are as wide as any can
        get."""
        positions, context_lens = self.positions[:count], self.context_lens[:count]
        local_tokens = None if self._local_lens is None else self._local_lens[:count]
        return tuple(
            BatchLayout.of_decodes(
                positions, slots[:count], context_lens, tables[:count].flatten(1), self._max_context, local_tokens
            )
            for slots, tables in zip(self.slots, self.block_tables, strict=True)
        )


def decode_input(
    kv_cache: KVCache,
    inputs: DecodeInputs,
    token_ids: Tensor,
    on_hidden: Callable[[Tensor], object] | None = None,
) -> StepInput:
    """Return the step of the first rows of `inputs`, with the tokens `token_ids` int64 [rows]. A decoder reads it at
    the same places whenever it computes it."""
    rows = torch.arange(len(token_ids), device=token_ids.device)
    return StepInput(token_ids, inputs.layouts(len(rows)), kv_cache.tensors, Drawing(rows, rows), on_hidden)


def drawn_logits(decoder: StepDecoder, step: StepInput) -> Tensor:
    """fp32 [N, vocab] of a step that draws. Raises ValueError for one that does not."""
    return _drawn(decoder.forward(step))


def drawn_mtp_logits(decoder: Decoder, step: StepInput, hidden: Tensor) -> Tensor:
    """fp32 [N, vocab] as Decoder.mtp_logits. Raises ValueError for a step that draws nothing."""
    return _drawn(decoder.mtp_logits(step, hidden))


def _drawn(logits: Tensor | None) -> Tensor:
    if logits is None:
        raise ValueError("a step that draws nothing has no logits")
    return logits
