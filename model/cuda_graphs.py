"""Decode steps as CUDA graphs: one launch a step, whatever the number of layers.

A graph is captured for each of some batch sizes; a batch is padded to the next of them with copies of its last row,
which compute and write the same once more. Inputs go from pinned memory into the graphs' own tensors on the stream, so
the host may prepare a step while the one before runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.backend import BatchLayout
from model.captured_steps import DecodeInputs
from model.decoder import Decoder, Drawing
from model.kv_cache import KVCache
from model.step import SequenceStep


@dataclass(frozen=True)
class _Staging:
    """Pinned inputs of one step, and when their copy has left them."""

    inputs: DecodeInputs
    copied: torch.cuda.Event


class CudaGraphSteps:
    """Implements CapturedSteps. Used on the engine's thread, on its current stream."""

    def __init__(self, decoder: Decoder, kv_cache: KVCache, max_context: int, max_batch: int):
        """Captures all graphs: some tenths of a second each, largest first, so that all share its memory."""
        self._device = kv_cache.tensors[0].device
        self._sizes = batch_sizes(min(max_batch, kv_cache.num_blocks))
        largest = self._sizes[-1]
        # Two, by turns: the host may be filling one while the copy out of the other is still to run.
        self._staging = [
            _Staging(DecodeInputs(largest, max_context, kv_cache.block_size, pinned=True), _event()) for _ in range(2)
        ]
        blank = self._staging[0].inputs
        self._placed = {name: torch.from_numpy(array).to(self._device) for name, array in blank.arrays().items()}
        self._max_context = max_context
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            self._graphs[size] = self._capture(decoder, kv_cache, size, pool)

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
        staging.inputs.fill([*batch, *[batch[-1]] * (size - count)])
        for name, array in staging.inputs.arrays().items():
            self._placed[name][:size].copy_(torch.from_numpy(array[:size]), non_blocking=True)
        staging.copied.record()
        if earlier is not None:
            self._follow(batch, size, earlier)
        graph, logits = self._graphs[size]
        graph.replay()
        return logits[:count]

    def _follow(self, batch: Sequence[SequenceStep], size: int, earlier: Tensor) -> None:
        follows = [step.follows for step in batch]
        follows += [follows[-1]] * (size - len(batch))
        rows = [row for row, one in enumerate(follows) if one is not None]
        if not rows:
            return
        both = torch.tensor([rows, [one for one in follows if one is not None]], pin_memory=True)
        places = both.to(self._device, non_blocking=True)
        self._placed["token_ids"].index_copy_(0, places[0], earlier[places[1]])

    def _capture(
        self, decoder: Decoder, kv_cache: KVCache, size: int, pool: Any
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """The graph of batches of `size`, and where it leaves their logits fp32 [size, vocab]."""
        placed = {name: tensor[:size] for name, tensor in self._placed.items()}
        layout = BatchLayout(
            positions=placed["positions"],
            slots=placed["slots"],
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=self._device),
            context_lens=placed["context_lens"],
            block_tables=placed["block_tables"],
            num_decodes=size,
            max_query_len=1,
            max_context_len=self._max_context,
        )
        rows = torch.arange(size, device=self._device)
        drawing = Drawing(rows, rows)

        def run() -> Tensor:
            logits = decoder.forward(placed["token_ids"], layout, kv_cache.tensors, drawing)
            if logits is None:
                raise ValueError("a batch whose sequences all draw has no logits")
            return logits

        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            run()  # compiles what this size needs, which can't be captured
            torch.cuda.synchronize(self._device)
            with torch.cuda.graph(graph, pool=pool):
                logits = run()
        return graph, logits


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return event


def batch_sizes(largest: int) -> list[int]:
    """For which batches graphs are captured: dense where a padded row costs most, at most a fifth too many beyond 8."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < largest:
        step = max(8, 1 << (sizes[-1].bit_length() - 3))
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < largest] + [largest]
