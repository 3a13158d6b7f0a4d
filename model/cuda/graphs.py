"""Decode steps as CUDA graphs: one launch a step, whatever the number of layers.

A graph is captured for each of some batch sizes; a batch is padded to the next of them with copies of its last row,
which compute and write the same once more. Inputs go from pinned memory into the graphs' own tensors on the stream, so
the host may prepare a step while the one before runs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.model.batch import StepDecoder, take_drawn
from twostroke.model.cache.kv_cache import KVCache
from twostroke.model.captured_steps import DecodeInputs, decode_step
from twostroke.model.step import SequenceStep

GRAPH_BYTES = 8 * 2**20
"""What the driver is allowed for one graph, beside the memory that its kernels use: an estimate."""


class Recorder:
    """Records graphs whose kernels share memory: they must not run at the same time, nor outlive one another's use."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What replays `run` on the current stream. Runs it once before, since what must compile can't be captured."""
        run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, may go on talking to the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay

    def event(self) -> torch.cuda.Event:
        """To be recorded, and waited for."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Staging:
    """Pinned inputs of one step, and when their copy has left them."""

    inputs: DecodeInputs
    tables: Tensor  # int32, flat: the tables' entries in use, without what lies between them
    copied: torch.cuda.Event


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
        self._device = kv_cache.tensors[0].device
        recorder = Recorder(self._device) if recorder is None else recorder
        self._sizes = batch_sizes(min(max_batch, kv_cache.num_blocks))
        largest, pinned = self._sizes[-1], self._device.type == "cuda"
        self._block_size, self._groups = kv_cache.block_size, kv_cache.groups

        def staging() -> _Staging:
            inputs = DecodeInputs(largest, max_context, self._block_size, groups=self._groups, pinned=pinned)
            tables = torch.zeros(inputs.block_tables.numel(), dtype=torch.int32, pin_memory=pinned)
            return _Staging(inputs, tables, recorder.event())

        # Two, by turns: the host may be filling one while the copy out of the other is still to run.
        self._staging = [staging(), staging()]
        self._tables = torch.empty_like(self._staging[0].tables, device=self._device)
        self._placed = DecodeInputs(largest, max_context, self._block_size, groups=self._groups, device=self._device)
        # Of all graphs: results of their own would be kept for each, and those of all batch sizes are gigabytes.
        self._logits = torch.empty((largest, decoder.vocab_size), dtype=torch.float32, device=self._device)
        # Kept with all tensors in them: a graph remembers places alone.
        self._steps = {size: self._step(decoder, kv_cache, size) for size in reversed(self._sizes)}
        with torch.inference_mode():
            self._replays = {size: recorder.record(step) for size, step in self._steps.items()}

    def logits(self, batch: Sequence[SequenceStep], earlier: Tensor | None = None) -> Tensor | None:
        """As CapturedSteps.logits; `earlier` int64 [any]: the tokens that the step before drew, on the device.

        A step that `follows` one of them takes its token from there. Never waits for the device but for the inputs of
        the last step but one.
        """
        count = len(batch)
        size = next((size for size in self._sizes if size >= count), None)
        if size is None:
            return None
        staging = self._staging[0]
        self._staging.reverse()
        staging.copied.synchronize()
        padded = [*batch, *[batch[-1]] * (size - count)]
        staging.inputs.fill(padded)
        for placed, rows in zip(self._placed.rows, staging.inputs.rows, strict=True):
            placed[:size].copy_(rows[:size], non_blocking=True)
        self._place_tables(staging, size, max(step.start for step in batch) // self._block_size + 1)
        staging.copied.record()
        if earlier is not None:
            take_drawn(self._placed.token_ids, padded, earlier)
        self._replays[size]()
        return self._logits[:count]

    def _place_tables(self, staging: _Staging, size: int, width: int) -> None:
        """Whole tables would be megabytes a step: as wide as the longest context to come, times the batch."""
        shape = self._groups.count, size, width
        host, there = (tables[: math.prod(shape)].view(shape) for tables in (staging.tables, self._tables))
        host.copy_(staging.inputs.block_tables[:, :size, :width])
        there.copy_(host, non_blocking=True)
        self._placed.block_tables[:, :size, :width].copy_(there)

    def _step(self, decoder: StepDecoder, kv_cache: KVCache, size: int) -> Callable[[], None]:
        """What leaves the logits of a batch of `size` where all graphs do."""
        run = decode_step(decoder, kv_cache, self._placed, size)

        def compute() -> None:
            logits = run()
            self._logits[:size, : logits.shape[1]].copy_(logits)

        return compute


def batch_sizes(largest: int) -> list[int]:
    """For which batches graphs are captured: dense where a padded row costs most, at most a fifth too many beyond 8."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < largest:
        step = max(8, 1 << (sizes[-1].bit_length() - 3))
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < largest] + [largest]
