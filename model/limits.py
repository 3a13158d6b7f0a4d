"""Limits of this worker's device: operations a second of products, and bytes a second of its memory.

GPUs that are in the table of published figures (model/published/hardware.py) have these. All others, and CPUs, are
measured by two products and two sums over memory, which takes about a tenth of a second.
"""

import re
import time
from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional

from twostroke.model.operations import MachineLimits
from twostroke.model.published.hardware import HARDWARE, Hardware

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
