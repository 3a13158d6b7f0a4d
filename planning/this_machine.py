"""What this machine's CPU can do, as a row of the table of hardware.

Products are in the numbers that an engine computes bf16 checkpoints in here. A shared machine's bandwidth jumps
(docs/performance-log.md), so that the medians of some rounds are the row.
"""

import platform
import statistics
from collections.abc import Callable, Sequence

import torch

from twostroke.loadtests.generator.run_facts import machine_facts
from twostroke.model.cache.memory import available_bytes
from twostroke.model.engine_config import resolve_dtype
from twostroke.model.machine_limits import Machine
from twostroke.model.operations import Limits
from twostroke.model.published.hardware import Hardware, Number

CPU = torch.device("cpu")
NUMBERS: dict[torch.dtype, Number] = {torch.bfloat16: "bf16", torch.float32: "fp32"}
ROUNDS = 7


def measure_rounds(rounds: int, say: Callable[[str], None]) -> tuple[list[Limits], torch.dtype]:
    """This machine's limits, round by round, and the numbers that they were measured in."""
    dtype = resolve_dtype("auto", torch.bfloat16, CPU)
    machine, measured = Machine(dtype=dtype), list[Limits]()
    for number in range(rounds):
        measured.append(machine.measure())
        say(
            f"round {number + 1} of {rounds}: {measured[-1].gemm / 1e9:.0f} GFLOP/s, {measured[-1].read / 1e9:.1f} GB/s"
        )
    return measured, dtype


def row_of(measured: Sequence[Limits], dtype: torch.dtype, name: str, usd_per_hour: float) -> Hardware:
    """Medians; ranks of one host sum up through its memory, where each byte is written and read."""
    read = statistics.median(one.read for one in measured)
    return Hardware(
        name=name,
        title=f"{machine_facts()['cpu'] or platform.machine()}, {torch.get_num_threads()} threads",
        memory_bytes=available_bytes(CPU),
        read_bytes_per_s=read,
        flops_per_s={NUMBERS[dtype]: statistics.median(one.gemm for one in measured)},
        link_bytes_per_s=read / 2,
        usd_per_hour=usd_per_hour,
        source=f"twostroke bench hardware, medians of {len(measured)} rounds",
        is_gpu=False,
    )
