"""Decode steps as Programs (model/cpu/kernels/launch.py): one parallel region a step, for any number of layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.model.architectures.decoder import Decoder
from twostroke.model.batch import StepDecoder
from twostroke.model.cache.kv_cache import KVCache
from twostroke.model.captured_steps import DecodeInputs, decode_input, drawn_logits, drawn_mtp_logits
from twostroke.model.cpu.kernels.launch import Launcher, NotRecordable, Program
from twostroke.model.step import SequenceStep

MAX_BATCH = 64
"""Larger batches run eagerly: their launches cost little beside their work, and their logits take much room.
Recording takes milliseconds, so each size is recorded as it is, when it first comes; none is padded to another."""


@dataclass(frozen=True)
class _Recorded:
    """Programs of batches of one size, and where they leave logits."""

    program: Program
    logits: Tensor
    mtp: Program | None = None
    mtp_logits: Tensor | None = None


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
        self._mtp = decoder if isinstance(decoder, Decoder) and decoder.has_mtp else None
        self._drawn = torch.zeros(self._max_batch, dtype=torch.int64)
        self._programs: dict[int, _Recorded] = {}
        self._count = 0  # of the last batch
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
        recorded = self._programs.get(count) or self._record(count)
        self._inputs.fill(batch)
        self._launcher.replay(recorded.program)
        self._count = count
        return recorded.logits

    def mtp_logits(self, drawn: Tensor) -> Tensor:
        """Implement CapturedSteps.mtp_logits."""
        recorded = self._programs[self._count]
        if recorded.mtp is None or recorded.mtp_logits is None:
            raise RuntimeError("the model has no MTP head")
        self._drawn[: self._count] = drawn
        self._launcher.replay(recorded.mtp)
        return recorded.mtp_logits

    def _record(self, count: int) -> _Recorded:
        """Record what batches of `count` compute."""
        hidden: list[Tensor] = []
        keep = None if self._mtp is None else hidden.append
        step = decode_input(self._kv_cache, self._inputs, self._inputs.token_ids[:count], keep)
        with torch.inference_mode(), self._launcher.recording() as program:
            logits = drawn_logits(self._decoder, step)
        recorded = _Recorded(program, self._launcher.arena.borrow(logits))
        if self._mtp is not None:
            # The hidden states' place is still taken, so that nothing else of this program lies there.
            behind = decode_input(self._kv_cache, self._inputs, self._drawn[:count])
            with torch.inference_mode(), self._launcher.recording() as mtp:
                logits = drawn_mtp_logits(self._mtp, behind, hidden[0])
            recorded = _Recorded(program, recorded.logits, mtp, self._launcher.arena.borrow(logits))
        self._programs[count] = recorded
        return recorded
