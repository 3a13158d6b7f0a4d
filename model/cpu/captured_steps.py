"""Decode steps as Programs (model/cpu/kernels/program.py): one parallel region a step, for any number of layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from twostroke.model.batch import StepDecoder
from twostroke.model.cache.kv_cache import KVCache
from twostroke.model.captured_steps import DecodeInputs, decode_step
from twostroke.model.cpu.kernels.program import Launcher, NotRecordable, Program
from twostroke.model.step import SequenceStep

MAX_BATCH = 64
"""Larger batches run eagerly: their launches cost little beside their work, and their logits take much room.
Recording takes milliseconds, so each size is recorded as it is, when it first comes; none is padded to another."""


class CpuCapturedSteps:
    """Implements CapturedSteps over the kernels that a launcher records. Used on the engine's thread."""

    def __init__(self, decoder: StepDecoder, launcher: Launcher, kv_cache: KVCache, max_context: int):
        """Records the largest batch, which makes the room that all others share.

        Where the backend leaves an operation to torch, nothing can be recorded, and all batches run eagerly.
        """
        self._decoder = decoder
        self._launcher = launcher
        self._kv_cache = kv_cache
        self._max_batch = min(MAX_BATCH, kv_cache.num_blocks)
        self._inputs = DecodeInputs(self._max_batch, max_context, kv_cache.block_size, groups=kv_cache.groups)
        self._programs: dict[int, tuple[Program, Tensor]] = {}
        try:
            self._record(self._max_batch)
        except NotRecordable:
            self._max_batch = 0

    def logits(self, batch: Sequence[SequenceStep], earlier: Tensor | None = None) -> Tensor | None:
        """Implement CapturedSteps.logits; no token is ever on a device."""
        del earlier
        count = len(batch)
        if count > self._max_batch or not self._inputs.hold(batch):
            return None
        program, logits = self._programs.get(count) or self._record(count)
        self._inputs.fill(batch)
        self._launcher.replay(program)
        return logits

    def _record(self, count: int) -> tuple[Program, Tensor]:
        """The program of batches of `count`, and where it leaves their logits."""
        run = decode_step(self._decoder, self._kv_cache, self._inputs, count)
        with torch.inference_mode(), self._launcher.recording() as program:
            logits = run()
        self._programs[count] = program, self._launcher.arena.borrow(logits)
        return self._programs[count]
