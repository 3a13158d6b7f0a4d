"""Decode steps recorded once for each batch size and replayed: no launch, and nothing of the model's Python, per step.

A replay reads its inputs where the recording found them, so each step's are written into the same memory. On CPUs a
recording is a Program (model/cpu/captured_steps.py), on CUDA a graph (model/cuda/graphs.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from twostroke.model.batch import BatchLayout, Drawing, StepDecoder, StepInput, held_of, slots_of
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


class DecodeInputs:
    """The inputs of decode steps of up to `max_batch` sequences, always in the same memory of one device."""

    def __init__(
        self,
        max_batch: int,
        max_context: int,
        block_size: int,
        *,
        groups: KVGroups = ONE_GROUP,
        held: range | None = None,
        device: torch.device | None = None,
        pinned: bool = False,
    ):
        """On the host where no device is named; `pinned` memory there is what a GPU can copy from by itself. `held` as
        to make_layouts."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        self._block_size = block_size
        self._groups = groups
        self._held = held
        self._max_context = max_context
        self.token_ids = zeros(torch.int64, max_batch)
        self.positions = zeros(torch.int64, max_batch)
        self.context_lens = zeros(torch.int32, max_batch).fill_(1)
        self.slots = zeros(torch.int64, groups.count, max_batch)
        self.block_tables = zeros(torch.int32, groups.count, max_batch, -(-max_context // block_size))
        # What each sequence has one of.
        self.rows = (self.token_ids, self.positions, self.context_lens, *self.slots)
        self._held_lens: Tensor | None = None
        if held is not None:
            of_one = held_of(np.ones(1, np.int64), block_size, held)
            self._held_lens = zeros(torch.int32, max_batch).fill_(int(of_one[0]))
            self.rows = (*self.rows, self._held_lens)

    def fill(self, batch: Sequence[SequenceStep]) -> None:
        """Write a batch that `twostroke.model.batch.check_batch` lets pass into the first rows, on the host."""
        count, size, num_groups = len(batch), self._block_size, self._groups.count
        token_ids, positions, context_lens = (rows.numpy()[:count] for rows in self.rows[:3])
        slots = self.slots.numpy()[:, :count]
        token_ids[:] = [step.token_ids[0] for step in batch]
        positions[:] = [step.start for step in batch]
        np.add(positions, 1, out=context_lens, casting="unsafe")
        last_blocks = positions // size
        lengths = ((last_blocks + 1) * num_groups).tolist()  # a table may hold more, for tokens to come
        used = chain.from_iterable(step.block_ids[:n] for step, n in zip(batch, lengths, strict=True))
        width = max(lengths) // num_groups
        tables = self.block_tables.numpy()[:, :count, :width]
        blocks = np.fromiter(used, np.int32, sum(lengths)).reshape(-1, num_groups)
        tables[:, np.arange(width) <= last_blocks[:, None]] = blocks.T
        if self._groups.windowed:
            np.maximum(tables, 0, out=tables)
        last = tables[:, np.arange(count), last_blocks]
        if self._held is None or self._held_lens is None:
            np.multiply(last, size, out=slots)
            slots += positions % size
        else:
            slots[:] = slots_of(last.astype(np.int64), positions, size, self._held)
            self._held_lens.numpy()[:count] = held_of(positions + 1, size, self._held)

    def layouts(self, count: int) -> tuple[BatchLayout, ...]:
        """Of the first `count` rows, over this object's own memory. Tables are as wide as any can get."""
        positions, context_lens = self.positions[:count], self.context_lens[:count]
        held = None if self._held_lens is None else self._held_lens[:count]
        return tuple(
            BatchLayout.of_decodes(positions, slots[:count], context_lens, tables[:count], self._max_context, held)
            for slots, tables in zip(self.slots, self.block_tables, strict=True)
        )


def decode_step(decoder: StepDecoder, kv_cache: KVCache, inputs: DecodeInputs, count: int) -> Callable[[], Tensor]:
    """What computes the logits of the first `count` of `inputs`. It reads at the same places whenever it runs, and
    keeps all tensors that it reads alive."""
    token_ids = inputs.token_ids[:count]
    rows = torch.arange(count, device=token_ids.device)
    step = StepInput(token_ids, inputs.layouts(count), kv_cache.tensors, Drawing(rows, rows))

    return partial(drawn_logits, decoder, step)


def drawn_logits(decoder: StepDecoder, step: StepInput) -> Tensor:
    """fp32 [N, vocab] of a step that draws. Raises ValueError for one that does not."""
    logits = decoder.forward(step)
    if logits is None:
        raise ValueError("a step that draws nothing has no logits")
    return logits
