"""Decode steps as CUDA graphs: one launch a step, whatever the number of layers.

A graph is captured for each of some batch sizes; a batch is padded to the next of them with copies of its last row,
which compute and write the same once more. Inputs go from pinned memory into the graphs' own tensors on the stream, so
the host may prepare a step while the one before runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from twostroke.model.architectures.decoder import Decoder
from twostroke.model.batch import StepDecoder
from twostroke.model.cache.kv_cache import KVCache
from twostroke.model.captured_steps import DecodeInputs, decode_input, drawn_logits, drawn_mtp_logits
from twostroke.model.step import SequenceStep

GRAPH_BYTES = 8 * 2**20
"""Memory that the driver may take for one graph of a step, beside the memory of its kernels. The estimate covers the
small graphs of draws: with 50 graphs of steps and 55 of draws, 0.9 GiB of a worker's share were left on an H200."""


class Recorder:
    """Records graphs whose kernels share memory: they must not run at the same time, nor outlive one another's use."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays `run` on the current stream. Runs it once before: compiling can't be
        captured."""
        run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, may go on talking to the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def event(self) -> torch.cuda.Event:
        """Return an event to record and to wait for."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]


class _WithTables(Protocol):
    block_tables: list[Tensor]  # int32 [sequences, rows, parts], for each of KVGroups.tables


Inputs = TypeVar("Inputs", bound=_WithTables)


@dataclass(frozen=True)
class _Staging(Generic[Inputs]):
    """Pinned inputs of one step, and when their copy has left them."""

    inputs: Inputs
    tables: Tensor  # int32, flat: the tables' entries in use, without what lies between them
    copied: torch.cuda.Event


class StagedInputs(Generic[Inputs]):
    """Inputs where graphs read them, `placed`, and how the host fills them without waiting for the step before."""

    def __init__(self, make: Callable[[torch.device | None, bool], Inputs], device: torch.device, recorder: Recorder):
        """`make` is called with a device, or None for the host, and whether its memory is to be pinned."""
        on_gpu = device.type == "cuda"

        def staging() -> _Staging[Inputs]:
            inputs = make(None, on_gpu)
            numbers = sum(table.numel() for table in inputs.block_tables)
            tables = torch.zeros(numbers, dtype=torch.int32, pin_memory=on_gpu)
            return _Staging(inputs, tables, recorder.event())

        # Two, by turns: the host may be filling one while the copy out of the other is still to run.
        self._staging = [staging(), staging()]
        # What lies on the device.
        self._placed_tables = [table.numpy().copy() for table in self._staging[0].inputs.block_tables]
        self._tables = torch.empty_like(self._staging[0].tables, device=device)
        self.placed = make(device, False)

    @contextmanager
    def next(self) -> Iterator[Inputs]:
        """Yield the host's inputs to be filled and copied to `placed` before the end. Waits for the copy of the step
        before last."""
        self._staging.reverse()
        staging = self._staging[0]
        staging.copied.synchronize()
        yield staging.inputs
        staging.copied.record()

    def place_tables(self, rows: int, width: int) -> None:
        """Copy so much of the tables of the inputs that `next` gave: whole tables would be megabytes a step.

        Nothing is copied where they are as before: a sequence has a further block once in `block_size` steps.
        """
        staging = self._staging[0]
        tables = [table[:rows, :width] for table in staging.inputs.block_tables]
        before = [table[:rows, :width] for table in self._placed_tables]
        if all(np.array_equal(*pair) for pair in zip(before, tables, strict=True)):
            return
        sizes = [table.numel() for table in tables]
        host, there = staging.tables[: sum(sizes)], self._tables[: sum(sizes)]
        for known, table, part in zip(before, tables, torch.split(host, sizes), strict=True):
            known[:] = table.numpy()
            part.view(table.shape).copy_(table)
        there.copy_(host, non_blocking=True)
        for table, part in zip(self.placed.block_tables, torch.split(there, sizes), strict=True):
            placed = table[:rows, :width]
            placed.copy_(part.view(placed.shape))


class CudaGraphSteps:
    """Implements CapturedSteps. Used on the engine's thread, on its current stream."""

    def __init__(
        self,
        decoder: StepDecoder,
        kv_cache: KVCache,
        max_context: int,
        max_batch: int,
        recorder: Recorder | None = None,
    ):
        """Captures all graphs: some tenths of a second each, largest first, so that all share its memory."""
        device = kv_cache.tensors[0].device
        recorder = Recorder(device) if recorder is None else recorder
        self.sizes = batch_sizes(min(max_batch, kv_cache.num_blocks))
        """Sizes of the batches that have a graph, ascending."""
        largest, self._block_size = self.sizes[-1], kv_cache.block_size

        def inputs(device: torch.device | None, pinned: bool) -> DecodeInputs:
            return DecodeInputs(
                largest,
                max_context,
                kv_cache.block_size,
                groups=kv_cache.groups,
                local_tokens=kv_cache.local_tokens,
                device=device,
                pinned=pinned,
            )

        self._inputs = StagedInputs(inputs, device, recorder)
        # Of all graphs: results of their own would be kept for each, and those of all batch sizes are gigabytes.
        self.all_logits = torch.empty((largest, decoder.logits_width), dtype=torch.float32, device=device)
        """fp32 [largest, V]: the first rows are those of the last step."""
        self._token_ids = torch.empty(largest, dtype=torch.int64, device=device)
        mtp = decoder if isinstance(decoder, Decoder) and decoder.has_mtp else None
        self._hidden: Tensor | None = None
        if mtp is not None:
            self._hidden = torch.empty((largest, mtp.hidden_size), dtype=mtp.dtype, device=device)
        # Kept with all tensors in them: a graph remembers places alone.
        self._steps = {size: self._step(decoder, kv_cache, size) for size in reversed(self.sizes)}
        self._mtp_steps = {} if mtp is None else {size: self._mtp_step(mtp, kv_cache, size) for size in self._steps}
        with torch.inference_mode():
            self._replays = {size: recorder.record(step) for size, step in self._steps.items()}
            self._mtp_replays = {size: recorder.record(step) for size, step in self._mtp_steps.items()}
        self._count = self._size = 0  # of the last batch, and of its graph

    def logits(self, batch: Sequence[SequenceStep], earlier: Tensor | None = None) -> Tensor | None:
        """Implement CapturedSteps.logits; `earlier` int64 [any] are the tokens that the step before drew, on the
        device.

        A step that `follows` one of them takes its token from there. Never waits for the device but for the inputs of
        the last step but one.
        """
        count = len(batch)
        size = next((size for size in self.sizes if size >= count), None)
        if size is None or (earlier is not None and len(earlier) > self.sizes[-1]):
            return None
        if not self._inputs.placed.hold(batch):
            return None
        padded = [*batch, *[batch[-1]] * (size - count)]
        placed = self._inputs.placed
        with self._inputs.next() as inputs:
            inputs.fill(padded)
            inputs.follow(padded)
            placed.packed.copy_(inputs.packed, non_blocking=True)
            self._inputs.place_tables(size, max(step.start for step in batch) // self._block_size + 1)
        if earlier is not None:
            placed.drawn[: len(earlier)].copy_(earlier)
        self._replays[size]()
        self._count, self._size = count, size
        return self.all_logits[:count]

    def mtp_logits(self, drawn: Tensor) -> Tensor:
        """Implement CapturedSteps.mtp_logits. The result takes the place of the step's logits."""
        count = self._count
        self._token_ids[:count].copy_(drawn)
        self._token_ids[count : self._size].copy_(drawn[-1:].expand(self._size - count))
        self._mtp_replays[self._size]()
        return self.all_logits[:count]

    def _step(self, decoder: StepDecoder, kv_cache: KVCache, size: int) -> Callable[[], None]:
        """Return a function that computes the logits of a batch of `size` into the place that all graphs share."""
        placed, token_ids = self._inputs.placed, self._token_ids[:size]
        hidden = None if self._hidden is None else self._hidden[:size].copy_
        step = decode_input(kv_cache, placed, token_ids, hidden)

        def compute() -> None:
            torch.index_select(placed.candidates, 0, placed.sources[:size], out=token_ids)
            self.all_logits[:size].copy_(drawn_logits(decoder, step))

        return compute

    def _mtp_step(self, decoder: Decoder, kv_cache: KVCache, size: int) -> Callable[[], None]:
        """Return a function that computes the MTP head's logits behind the tokens that a batch of `size` drew."""
        assert self._hidden is not None
        step, hidden = decode_input(kv_cache, self._inputs.placed, self._token_ids[:size]), self._hidden[:size]

        def compute() -> None:
            self.all_logits[:size].copy_(drawn_mtp_logits(decoder, step, hidden))

        return compute


def batch_sizes(largest: int) -> list[int]:
    """Return the sizes of batches that get a graph: dense where a padded row costs most, at most a fifth too many
    beyond 8."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < largest:
        step = max(8, 1 << (sizes[-1].bit_length() - 3))
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < largest] + [largest]
