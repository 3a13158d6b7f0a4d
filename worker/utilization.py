"""Shares of its machine's limits that a worker gets: model FLOPs and model bandwidth utilisation (MFU, MBU). No torch.

MFU is the FLOPs that a model's tokens take (Chowdhery et al., PaLM, 2022, appendix B), over what the machine could have
computed in that time, idle time included. MBU is the same of the bytes of weights and KV that steps read.
"""

from collections import deque
from typing import Any

from twostroke.model.costs.operations import MachineLimits, StepWork
from twostroke.protocol.clock import Clock
from twostroke.worker.step_costs import StepContent

WINDOW_S = 10.0
MARK_S = 1.0


class Utilization:
    """Adds up what steps compute and read. `shares` are those of the last WINDOW_S."""

    def __init__(self, work: StepWork | None, limits: MachineLimits | None, clock: Clock):
        """Without `work` or `limits` the shares are unknown."""
        self._work = work
        self._limits = limits
        self._clock = clock
        self.flops = 0.0
        self.read_bytes = 0.0
        self._marks = deque([(clock(), 0.0, 0.0)])  # times, and both counters then

    def add(self, content: StepContent) -> None:
        """A step has run."""
        if self._work is not None:
            self.flops += self._work.flops(*content)
            self.read_bytes += self._work.read_bytes(content.prompt_tokens, content.rows, content.context_tokens)

    def told(self) -> dict[str, Any]:
        """Return the fields of WorkerStats that tell of it."""
        limits, (mfu, mbu) = self._limits, self.shares() or (None, None)
        return {
            "flops": self.flops,
            "read_bytes": self.read_bytes,
            "peak_flops_per_s": 0.0 if limits is None else limits.gemm,
            "peak_bytes_per_s": 0.0 if limits is None else limits.read,
            "mfu": mfu,
            "mbu": mbu,
        }

    def shares(self) -> tuple[float, float] | None:
        """MFU and MBU, 0 to 1; None where they are not known."""
        if self._work is None or self._limits is None:
            return None
        now, marks = self._clock(), self._marks
        while len(marks) > 1 and marks[1][0] <= now - WINDOW_S:
            marks.popleft()
        began, flops, read_bytes = marks[0]
        if now - marks[-1][0] >= MARK_S:
            marks.append((now, self.flops, self.read_bytes))
        seconds = max(now - began, MARK_S)
        return (
            (self.flops - flops) / seconds / self._limits.gemm,
            (self.read_bytes - read_bytes) / seconds / self._limits.read,
        )
