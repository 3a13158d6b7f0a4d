"""Decode steps recorded once for each batch size and replayed: no launch, and nothing of the model's Python, per step.

A replay reads its inputs where the recording found them, so each step's are written into the same arrays. On CPUs a
recording is a Program (model/cpu/captured_steps.py), on CUDA a graph (model/cuda/graphs.py).
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.model.backend import BatchLayout
from twostroke.model.step import SequenceStep


class CapturedSteps(Protocol):
    """Whole decode steps without the host's cost."""

    def logits(self, batch: Sequence[SequenceStep], earlier: Tensor | None = None) -> Tensor | None:
        """fp32 [N, vocab], until the next call; None for a batch that must run eagerly.

        All of `batch` bring one token each, and draw. `earlier` int64: the tokens of the step before by its entries,
        on the device, which those of `batch` have that `follows` one; None where all are in the batch.
        """


class DecodeInputs:
    """The inputs of decode steps of up to `max_batch` sequences, always in the same memory."""

    def __init__(self, max_batch: int, max_context: int, block_size: int, *, pinned: bool = False):
        """`pinned` memory is what a GPU can copy from by itself."""

        def zeros(dtype: torch.dtype, *shape: int) -> npt.NDArray[Any]:
            array: npt.NDArray[Any] = torch.zeros(shape, dtype=dtype, pin_memory=pinned).numpy()
            return array

        self._block_size = block_size
        self._max_context = max_context
        self._rows = np.arange(max_batch)
        self.token_ids = zeros(torch.int64, max_batch)
        self.positions = zeros(torch.int64, max_batch)
        self.slots = zeros(torch.int64, max_batch)
        self.context_lens = zeros(torch.int32, max_batch)
        self.block_tables = zeros(torch.int32, max_batch, -(-max_context // block_size))
        self.context_lens.fill(1)

    def fill(self, batch: Sequence[SequenceStep]) -> None:
        """Write a batch that `twostroke.model.runner.check_batch` lets pass into the first rows."""
        count, size = len(batch), self._block_size
        rows, positions, slots = self._rows[:count], self.positions[:count], self.slots[:count]
        self.token_ids[:count] = [step.token_ids[0] for step in batch]
        positions[:] = [step.start for step in batch]
        np.add(positions, 1, out=self.context_lens[:count], casting="unsafe")
        last_blocks = positions // size
        lengths = (last_blocks + 1).tolist()  # a table may hold more, for tokens to come
        used = chain.from_iterable(step.block_ids[:n] for step, n in zip(batch, lengths, strict=True))
        width = max(lengths)
        tables = self.block_tables[:count, :width]
        tables[np.arange(width) <= last_blocks[:, None]] = np.fromiter(used, np.int32, sum(lengths))
        np.multiply(tables[rows, last_blocks], size, out=slots)
        slots += positions % size

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All of them by name; rows first."""
        return {
            "token_ids": self.token_ids,
            "positions": self.positions,
            "slots": self.slots,
            "context_lens": self.context_lens,
            "block_tables": self.block_tables,
        }

    def layout(self, count: int) -> BatchLayout:
        """Of the first `count` rows, over this object's own memory. Tables are as wide as any can get."""
        return BatchLayout(
            positions=torch.from_numpy(self.positions[:count]),
            slots=torch.from_numpy(self.slots[:count]),
            query_starts=torch.arange(count + 1, dtype=torch.int32),
            context_lens=torch.from_numpy(self.context_lens[:count]),
            block_tables=torch.from_numpy(self.block_tables[:count]),
            num_decodes=count,
            max_query_len=1,
            max_context_len=self._max_context,
        )
