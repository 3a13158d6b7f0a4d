"""`python -m twostroke.benchmarks.linears`: the CPU's projections by shape and number of rows, as shares of its limits.

Limit and subject take turns, as in benchmarks/engine.py. Up to 64 rows the floor is max(bytes of the weights / read
bandwidth, operations / torch.mm's rate at 512 rows); beyond, torch.mm with the same operands. Weights are read from
memory each time: there are more of them than caches hold. As in the engine's steps, all of them are one program.

One thread is timed by its own clock, which stands still while neighbours have the core. Two or more wait for each other
at each projection's end, so their times mean something only on a machine that nobody else uses.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.benchmarks.arguments import positive
from twostroke.model.cpu.kernels.program import Launcher, Program
from twostroke.model.cpu.linears import CpuLinear, is_supported
from twostroke.protocol.errors import ConfigError

SHAPES = {  # (out, in)
    "1b.qkv": (3072, 2048),
    "1b.o": (2048, 2048),
    "1b.gate_up": (16384, 2048),
    "1b.down": (2048, 8192),
    "1b.head": (128256, 2048),
    "160m.qkv": (1280, 768),
    "160m.o": (768, 768),
    "160m.gate_up": (4096, 768),
    "160m.down": (768, 2048),
    "160m.head": (32000, 768),
}
ROWS = (1, 4, 8, 16, 32, 64, 128, 512, 2048)
MOST_FLOORED_ROWS = 64
GEMM_ROWS = 512
READ_BYTES = 256 * 2**20
RING_BYTES = 192 * 2**20  # of weights of one shape, several times what an L3 cache holds
MEASURED_S = 0.05  # that each turn calls limit and subject, at least twice; the fastest call counts


@dataclass(frozen=True)
class Turn:
    """One limit and one subject, in seconds."""

    floor_s: float
    ours_s: float


def main() -> int:
    """Measure and print; the last line of stdout is one JSON object of median ratios, floor / time."""
    parser = argparse.ArgumentParser(prog="python -m twostroke.benchmarks.linears", description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=positive, default=list(ROWS))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=positive, default=7, help="turns of limit and subject; medians are reported")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    if not is_supported(dtype):
        raise ConfigError(f"this CPU has no kernels for --dtype {args.dtype}: torch makes its projections")
    ratios: dict[str, dict[int, float]] = {}
    memory = torch.ones(READ_BYTES // 4)
    for name in args.shapes:
        ratios[name] = {}
        ring = _Ring(*SHAPES[name], dtype)
        for rows in args.rows:
            turns = [_turn(ring, memory, rows) for _ in range(args.rounds)]
            ratios[name][rows] = round(statistics.median(turn.floor_s / turn.ours_s for turn in turns), 3)
            rate = 2.0 * rows * ring.elements / min(turn.ours_s for turn in turns)
            bandwidth = ring.elements * dtype.itemsize / min(turn.ours_s for turn in turns)
            limit = "floor" if rows <= MOST_FLOORED_ROWS else "torch.mm"
            print(
                f"{name:14}{rows:>6} rows{ratios[name][rows]:>8.2f} of {limit:10}"
                f"best {bandwidth / 1e9:>6.1f} GB/s, {rate / 1e9:>6.0f} GFLOP/s",
                flush=True,
            )
    print(json.dumps({"threads": args.threads, "dtype": args.dtype, "ratios": ratios}))
    return 0


class _Ring:
    """Weights of one shape, several of them, so that each is out of the caches when its turn comes again."""

    def __init__(self, out_features: int, in_features: int, dtype: torch.dtype):
        self.elements = out_features * in_features
        count = max(1, RING_BYTES // (self.elements * dtype.itemsize))
        self.plain = torch.randn(out_features, in_features).to(dtype)
        self._launcher = Launcher()
        self.packed = [CpuLinear(self.plain, None, self._launcher) for _ in range(count)]

    def program(self, x: Tensor) -> Program:
        """All of them, recorded."""
        with self._launcher.recording() as program:
            for linear in self.packed:
                linear(x)
        return program


def _turn(ring: _Ring, memory: Tensor, rows: int) -> Turn:
    x = torch.randn(max(rows, GEMM_ROWS), ring.plain.shape[1]).to(ring.plain.dtype)
    if rows > MOST_FLOORED_ROWS:
        floor_s = _best(lambda: torch.mm(x[:rows], ring.plain.t()))
        return Turn(floor_s, _best(lambda: ring.packed[0](x[:rows])))
    gemm_s = _best(lambda: torch.mm(x[:GEMM_ROWS], ring.plain.t())) * rows / GEMM_ROWS
    read_s = _best(memory.sum) * ring.plain.nbytes / READ_BYTES
    few = x[:rows]
    ours_s = _best(ring.program(few).replay) / len(ring.packed)
    read_s = min(read_s, _best(memory.sum) * ring.plain.nbytes / READ_BYTES)
    return Turn(max(gemm_s, read_s), ours_s)


def _best(function: Callable[[], object]) -> float:
    """Seconds of the fastest of several calls, which take MEASURED_S together."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: list[float] = []
    while len(times) < 2 or sum(times) < MEASURED_S:
        begin = clock()
        function()
        times.append(clock() - begin)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
