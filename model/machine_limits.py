"""Limits of this machine's CPU: the rates of torch's own products, and of reads of its memory.

A row of the table of hardware has products in the numbers that an engine computes bf16 checkpoints in here. A shared
machine's bandwidth jumps (docs/results/index.md), so that the medians of some rounds are the row.
"""

import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.nn import functional

from twostroke.model.cache.memory import available_bytes
from twostroke.model.costs.operations import MachineLimits
from twostroke.model.engine_config import resolve_dtype
from twostroke.model.published.hardware import HARDWARE, Hardware, Number

CPU = torch.device("cpu")
NUMBERS: dict[torch.dtype, Number] = {torch.bfloat16: "bf16", torch.float32: "fp32"}
ROUNDS = 7
GEMM_SIZE = 2048  # [1024, 2048] x [2048, 2048], three times: 26 GFLOP
READ_BYTES = 512 * 2**20  # far more than any cache holds


class LimitsMeter:
    """Measures the limits with torch's own kernels, on as many threads as torch uses here."""

    def __init__(self, shapes: Sequence[tuple[int, int, int]] = (), dtype: torch.dtype = torch.bfloat16):
        """`shapes`: (rows, columns in, columns out) of the products that the GEMM rate is measured with."""
        self._products = [
            (torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype))
            for rows, inner, outer in shapes or [(1024, GEMM_SIZE, GEMM_SIZE)]
        ]
        self._operations = 2.0 * sum(left.numel() * len(right) for left, right in self._products)
        self._memory = torch.ones(READ_BYTES // 4, dtype=torch.float32)
        self.measured: list[MachineLimits] = []
        self.measure()

    def measure(self) -> MachineLimits:
        """Return the limits of now; the best of a few passes each."""
        gemm_s = min(timed(self._multiply) for _ in range(3))
        read_s = min(timed(lambda: self._memory.sum()) for _ in range(2))
        self.measured.append(MachineLimits(gemm=self._operations / gemm_s, read=READ_BYTES / read_s))
        return self.measured[-1]

    def median(self) -> MachineLimits:
        """Return the medians of all that was measured, after the first time."""
        gemm, read = ([getattr(one, name) for one in self.measured[1:]] for name in ("gemm", "read"))
        return MachineLimits(statistics.median(gemm), statistics.median(read))

    def _multiply(self) -> None:
        for left, right in self._products:
            functional.linear(left, right)


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def gpu_here() -> Hardware | None:
    """Return the table's row of this machine's first GPU; None where it has none that the table has."""
    if not torch.cuda.is_available():
        return None
    return published_gpu(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)


def measure_rounds(rounds: int, say: Callable[[str], None]) -> tuple[list[MachineLimits], torch.dtype]:
    """Return this machine's limits by round, and the number format that they were measured in."""
    dtype = resolve_dtype("auto", torch.bfloat16, CPU)
    machine, measured = LimitsMeter(dtype=dtype), list[MachineLimits]()
    for number in range(rounds):
        measured.append(now := machine.measure())
        say(f"round {number + 1} of {rounds}: {now.gemm / 1e9:.0f} GFLOP/s, {now.read / 1e9:.1f} GB/s")
    return measured, dtype


def hardware_row(
    measured: Sequence[MachineLimits], dtype: torch.dtype, name: str, usd_per_hour: float, cpu: str = ""
) -> Hardware:
    """Medians; ranks of one host sum up through its memory, where each byte is written and read."""
    read = statistics.median(one.read for one in measured)
    return Hardware(
        name=name,
        title=f"{cpu or platform.machine()}, {torch.get_num_threads()} threads",
        memory_bytes=available_bytes(CPU),
        read_bytes_per_s=read,
        flops_per_s={NUMBERS[dtype]: statistics.median(one.gemm for one in measured)},
        link_bytes_per_s=read / 2,
        usd_per_hour=usd_per_hour,
        source=f"twostroke bench machine, medians of {len(measured)} rounds",
        is_gpu=False,
    )


_READ_BYTES = 128 * 2**20
_ENOUGH_S = 0.05
_CPU_PRODUCT = (128, 1024)  # rows, and features in and out
_GPU_PRODUCT = (4096, 4096)
_OTHER_BOARDS = {"pcie", "nvl"}
"""The table has the boards with sockets: those on cards read more slowly."""


@cache
def machine_limits(device: torch.device, dtype: torch.dtype, threads: int) -> MachineLimits:
    """The limits of one rank, whose products are of `dtype`; a CPU's of the `threads` that torch uses here."""
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
        if (found := published_gpu(name, memory)) is not None:
            return MachineLimits(found.flops_per_s["bf16"], found.read_bytes_per_s)
    rows, features = _CPU_PRODUCT if device.type == "cpu" else _GPU_PRODUCT
    left, right = (torch.ones(count, features, dtype=dtype, device=device) for count in (rows, features))
    memory_read = torch.ones(_READ_BYTES // 4, device=device)
    product_s = _least_s(device, lambda: functional.linear(left, right))
    return MachineLimits(2.0 * rows * features**2 / product_s, _READ_BYTES / _least_s(device, memory_read.sum))


def published_gpu(name: str, memory_bytes: int) -> Hardware | None:
    """The table's row of a GPU, by the name that its driver tells. None: it is not in the table."""
    words = set(re.split(r"[\s-]+", name.lower()))
    rows = [one for one in HARDWARE.values() if one.name.split("-")[0] in words]
    if not rows or words & _OTHER_BOARDS:
        return None
    return min(rows, key=lambda one: abs(one.memory_bytes - memory_bytes))


def _least_s(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls, the first of which does not count; fewer on a machine in use."""
    run()
    times: list[float] = []
    while not times or (len(times) < 3 and sum(times) < _ENOUGH_S):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)
