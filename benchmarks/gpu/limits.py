"""Sizes of `twostroke bench gpu`, the place where it runs, and the GPU's limits in the same run."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from twostroke.benchmarks.random_model import MODELS
from twostroke.model.checkpoint.config_file import parse_model_config
from twostroke.model.config import ModelConfig
from twostroke.model.cuda.graphs import Recorder
from twostroke.model.cuda.kernels.launch import GpuTarget

MEASURED_S = 0.02  # that each repetition calls the subject for, roughly
REPETITIONS = 5


class Clock(Protocol):
    """Seconds of work on a device."""

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call among many queued ones: the least of some repetitions."""

    def queued_seconds(self, run: Callable[[], object]) -> float:
        """Return the device's seconds of one call, where the host has launched all before the device begins."""


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
    """Limits of the GPU, measured in this run."""

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


_LLAMA_8B = parse_model_config(
    {
        **MODELS["1.2b"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    },
    "the 8B shape",
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is measured. The defaults are Llama-3.1-8B's shape on a GPU of 80 GB."""

    model: ModelConfig = _LLAMA_8B
    block_size: int = 128  # tokens
    read_bytes: int = 2**31
    gemm_size: int = 8192
    attention_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    attention_tokens: int = 16384  # of a batch of prompts that short
    prefix: int = 6144  # tokens that are cached before a chunk
    chunk: int = 2048
    prompts: tuple[int, ...] = (1024, 4096, 8192)
    # Tokens, and the predicted part of the step that the GPU works.
    small_prompts: tuple[tuple[int, float], ...] = ((32, 0.93), (128, 0.93), (512, 0.95))
    decode_batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    decode_context: int = 1024
    decode_steps: int = 32
    turns: int = 3  # of a step, the best of which counts
    long_decodes: tuple[tuple[int, int], ...] = ((32, 4096), (32, 16384), (128, 4096))  # batch, context
    skewed_decode: tuple[int, tuple[int, int]] = (131072, (63, 1024))  # a context, and beside it: how many, how long
    gated_tokens: tuple[int, ...] = (1, 16, 64)
    gated_prompts: tuple[int, ...] = (512, 4096)
    fp8_tokens: tuple[int, ...] = (1, 64, 1024, 8192)
    experts: tuple[int, int, int, int] = (128, 8, 768, 2048)  # their number, a token's, features inside and out
    expert_tokens: tuple[int, ...] = (32, 512, 8192)
    window: int = 1024  # tokens; Gemma 3's
    windowed_prompt: int = 8192
    windowed_decodes: tuple[tuple[int, int], ...] = (
        (1, 32800),
        (32, 32800),
    )  # batch, context; windows begin within a step
    sampled_rows: tuple[int, ...] = (64, 1, 256)  # the most telling first
    pack_blocks: tuple[int, ...] = (16, 32, 64, 128)
    pack_bytes: int = 2**28
    started: str = "1.2b"  # of `twostroke bench engine`'s shapes, which a process starts with

    @property
    def max_context(self) -> int:
        """Longest context, in whole blocks."""
        most = max(*self.prompts, self.decode_context + self.decode_steps)
        return -(-most // self.block_size) * self.block_size


@dataclass(frozen=True)
class GpuPlace:
    """The device, and what a test replaces on a host without one."""

    device: torch.device
    target: GpuTarget
    clock: Clock
    recorder: Callable[[], Recorder]


@dataclass(frozen=True)
class LimitRow:
    """One line of the table."""

    name: str
    ratio: float  # of what it is held against: 1 is as good
    aim: float | None  # of the ratio
    figure: str  # the absolute figure, with its unit
    against: str  # what the ratio is of
    predicted: float | None = None  # the ratio that reasoning gives


Measure = Callable[[Sizes, GpuPlace, GpuLimits], Iterator[LimitRow]]
"""Gives rows as they are measured, the most telling first."""
