"""A step over the stages of a pipeline (Huang et al. 2019).

Prompts are cut into micro-batches, which all stages take in order: one stage computes the next micro-batch while the
following stage computes the one before. With n stages and m micro-batches of equal length, each stage waits for
(n - 1) / (n - 1 + m) of a step. Micro-batches load the weights once each; steps of decodes alone stay whole.

Stage 0 has the embedding, the first layers, and what stands behind the last layer: final norm, LM head, sampling. The
stages are therefore a ring. Each rank sends its rows to the rank of its number in the next stage, since all ranks of a
stage have the same rows. The last stage sends back to stage 0 only the rows that draw or are scored. Nothing as wide
as a vocabulary travels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from twostroke.model.batch import Drawing, make_layouts, place
from twostroke.model.parallel.form import Stage
from twostroke.model.step import OnLayer, SequenceStep

if TYPE_CHECKING:  # both import this module's neighbours
    from twostroke.model.architectures.decoder import Decoder
    from twostroke.model.cache.kv_cache import KVCache


class StageLink:
    """A rank's connections with the ranks of its number in the stage before and in the next one.

    Sends don't wait for the receiver, nor do receives begin only when they are waited for. Each pair's come in order.
    """

    def __init__(self, group: Any, stage: Stage):
        """`group` is a process group of torch of one rank a stage, in their order."""
        self.stage = stage
        self._group = group
        self._next = (stage.index + 1) % stage.count
        self._before = (stage.index - 1) % stage.count
        self._sent: list[tuple[Any, Tensor]] = []  # with what has to stay as it is

    def send(self, rows: Tensor) -> None:
        """[N, hidden], contiguous, to the next stage, or from the last one to the first. Must not be written into."""
        self._sent.append((self._group.send([rows], self._next, 0), rows))

    def receive(self, count: int, width: int, dtype: torch.dtype, device: torch.device) -> "ComingRows":
        """[count, width] that the stage before sends."""
        rows = torch.empty((count, width), dtype=dtype, device=device)
        return ComingRows(self._group.recv([rows], self._before, 0), rows)

    def settle(self) -> None:
        """Wait until all that was sent is received; on GPUs the stream does, and not the host."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def abort(self) -> None:
        """End the group of GPUs, though others may wait in it."""
        self._group.abort()


@dataclass(frozen=True)
class ComingRows:
    """Rows that another stage is sending."""

    work: Any
    rows: Tensor

    def wait(self) -> Tensor:
        """Them, once they are here. Raises RuntimeError, as torch does, where the other rank is gone."""
        self.work.wait()
        return self.rows


MIN_TOKENS = 256
"""Minimum prompt tokens of a micro-batch: with fewer, products wait for weights to be loaded."""
MAX_OF_A_STAGE = 4
"""Micro-batches for each stage: of 2 stages each waits a ninth of the step then, of 8 a sixth."""


@dataclass(frozen=True)
class MicroBatch:
    """A part of a step, which is a step itself: no sequence is in it twice."""

    steps: list[SequenceStep]  # those of single tokens first
    entries: list[int]  # of the whole step: whose part each is

    @property
    def num_tokens(self) -> int:
        return sum(len(step.token_ids) for step in self.steps)

    @property
    def drawing(self) -> list[int]:
        """Indices of the `steps` that draw."""
        return [index for index, step in enumerate(self.steps) if step.draw is not None]

    @property
    def drawn_rows(self) -> list[int]:
        """The rows of their last tokens."""
        ends = list(accumulate(len(step.token_ids) for step in self.steps))
        return [ends[index] - 1 for index in self.drawing]

    @property
    def needs_all_rows(self) -> bool:
        """True if all rows are needed, and not only those that draw."""
        return any(step.scorer is not None for step in self.steps)

    @property
    def num_needed(self) -> int:
        """Number of rows that are needed behind the last layer."""
        return self.num_tokens if self.needs_all_rows else len(self.drawing)


def num_micro_batches(steps: Sequence[SequenceStep], num_stages: int) -> int:
    """Into how many micro-batches a step is cut, by its prompts' tokens."""
    tokens = sum(len(step.token_ids) for step in steps if len(step.token_ids) > 1)
    return max(1, min(MAX_OF_A_STAGE * num_stages, tokens // MIN_TOKENS))


def micro_batches(steps: Sequence[SequenceStep], count: int) -> list[MicroBatch]:
    """Cut a step into `count` parts of as many tokens, or one less or more, but for parts that would have none.

    A sequence's tokens are in consecutive parts, in order; only the last of them draws.
    """
    total, starts = sum(len(step.token_ids) for step in steps), [0]
    starts.extend(accumulate(len(step.token_ids) for step in steps))
    found: list[MicroBatch] = []
    for part in range(count):
        first, end = part * total // count, (part + 1) * total // count
        pieces = [
            (_piece(step, max(first - start, 0), min(end - start, len(step.token_ids))), entry)
            for entry, (step, start) in enumerate(zip(steps, starts, strict=False))
            if start < end and first < start + len(step.token_ids)
        ]
        pieces.sort(key=lambda piece: len(piece[0].token_ids) != 1)
        if pieces:
            found.append(MicroBatch([step for step, _ in pieces], [entry for _, entry in pieces]))
    return found


def _piece(step: SequenceStep, first: int, end: int) -> SequenceStep:
    """Return a step of the sequence's tokens [first, end), after a step of all tokens before them."""
    if first == 0 and end == len(step.token_ids):
        return step
    draw = step.draw if end == len(step.token_ids) else None
    return SequenceStep(step.token_ids[first:end], step.start + first, step.block_ids, draw, scorer=step.scorer)


@dataclass(frozen=True)
class NeededRows:
    """Rows of a micro-batch that the first stage needs, behind the final norm."""

    batch: MicroBatch
    hidden: Tensor  # [num_needed, hidden]: all of the micro-batch's, or only those that draw

    @property
    def drawn(self) -> Tensor:
        """[rows that draw, hidden]."""
        return self.hidden[self.batch.drawn_rows] if self.batch.needs_all_rows else self.hidden


class PipelinedSteps:
    """One rank's part of each step. Used on the engine's thread."""

    def __init__(self, decoder: "Decoder", kv_cache: "KVCache", link: StageLink):
        """Join a rank of the decoder's stage with those of its number in the other stages."""
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._device = kv_cache.tensors[0].device
        self._link = link

    def run(
        self,
        steps: Sequence[SequenceStep],
        token_ids: Callable[[Sequence[SequenceStep]], Tensor],
        on_layer: OnLayer | None = None,
    ) -> list[NeededRows]:
        """Compute a step, which all stages get, and wait for the rows that come back: on the first stage, in order,
        each micro-batch of which rows are needed; nothing on others.

        `token_ids` gives int64 [T] on the device; only the first stage asks. `on_layer` is called as by StepDecoder's
        forward, while the last micro-batch is computed.
        """
        decoder, link, stage = self._decoder, self._link, self._link.stage
        batches = micro_batches(steps, num_micro_batches(steps, stage.count))
        shape = decoder.hidden_size, decoder.dtype, self._device
        link.settle()  # the step before: no more than one is kept on its way
        coming = [] if stage.is_first else [link.receive(batch.num_tokens, *shape) for batch in batches]
        for index, batch in enumerate(batches):
            hidden = decoder.embed(token_ids(batch.steps)) if stage.is_first else coming[index].wait()
            cache = self._kv_cache
            layouts = make_layouts(batch.steps, cache.block_size, self._device, cache.groups, cache.local_tokens)
            announce = on_layer if index == len(batches) - 1 else None
            needed = self._needed_rows(batch) if stage.is_last else None
            rows = decoder.run_layers(hidden, layouts, self._kv_cache.tensors, needed, announce)
            if rows is not None:
                link.send(rows)
        if not stage.is_first:
            return []
        return [
            NeededRows(batch, decoder.final_norm(link.receive(batch.num_needed, *shape).wait()))
            for batch in batches
            if batch.num_needed
        ]

    def _needed_rows(self, batch: MicroBatch) -> Drawing | None:
        """Return the rows that the first stage needs, as Decoder.run_layers takes them."""
        if batch.num_needed == batch.num_tokens:
            return None
        rows, sequences = (np.array(places, np.int64) for places in (batch.drawn_rows, batch.drawing))
        return Drawing(place(rows, self._device), place(sequences, self._device))
