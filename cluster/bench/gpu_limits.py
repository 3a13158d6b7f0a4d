"""What a GPU can do, measured in the run that holds the engine against it, and how its time is taken."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

MEASURED_S = 0.02  # that each repetition calls the subject for, roughly
REPETITIONS = 5


class Clock(Protocol):
    """Seconds of work on a device."""

    def seconds(self, run: Callable[[], object]) -> float:
        """What one call takes, of many that are queued one behind the other: the least of some repetitions."""

    def queued_seconds(self, run: Callable[[], object]) -> float:
        """What the device takes for one call when the host has launched all of it before the device begins."""


class CudaClock:
    """Implements Clock by events on the current stream."""

    SLEEP_CYCLES = 40_000_000  # about 20 ms, in which the host launches what is to be timed

    def seconds(self, run: Callable[[], object]) -> float:
        run()  # compiles
        count = max(1, min(1000, int(MEASURED_S / max(1e-6, self._elapsed_s(run, 1)))))
        return min(self._elapsed_s(run, count) for _ in range(REPETITIONS)) / count

    def queued_seconds(self, run: Callable[[], object]) -> float:
        times = []
        for _ in range(REPETITIONS):
            torch.cuda._sleep(self.SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            times.append(self._elapsed_s(run, 1))
        return statistics.median(times)

    def _elapsed_s(self, run: Callable[[], object], count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


@dataclass(frozen=True)
class GpuLimits:
    """What the GPU did just now."""

    read: float  # bytes a second
    copy: float  # bytes a second, each counted once
    gemm: float  # bf16 operations a second


def measure_limits(clock: Clock, device: torch.device, num_bytes: int, size: int) -> GpuLimits:
    """`num_bytes` are read and copied, more than caches hold; matrices of the product are [size, size]."""
    read, copy = _bandwidths(clock, device, num_bytes)
    return GpuLimits(read, copy, _gemm_rate(clock, device, size))


def _bandwidths(clock: Clock, device: torch.device, num_bytes: int) -> tuple[float, float]:
    words = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(words)
    copy_s = clock.seconds(lambda: target.copy_(words))
    # The fastest that torch has: none is always the best. A copy moves its bytes twice.
    read_s = min(clock.seconds(words.sum), clock.seconds(words.amax), copy_s / 2)
    return num_bytes / read_s, num_bytes / copy_s


def _gemm_rate(clock: Clock, device: torch.device, size: int) -> float:
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2.0 * size**3 / clock.seconds(lambda: torch.mm(left, right))
