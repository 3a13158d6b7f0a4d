"""Seeds, however they are simulated: one again with a trace, many with a report, and whether one is the same each time.

A simulation of a seed is `run(seed, trace)`; without a trace it is quicker.
"""

import argparse
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import pytest

from twostroke.simulator.memory_network import Trace

ROOT = Path(__file__).parents[2]
_RANDOM_BYTES = re.compile(r"b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\"")


@dataclass
class Counts:
    """Counts of what one run did, or many, to see that they reach what they are meant to reach."""

    def add(self, other: Self) -> None:
        """Sum up."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def starts(num_seeds: int, of_one: int, *, at_once: int) -> list[Any]:
    """Return where each test's seeds begin: those below `at_once` are of `make test`, all others of `make
    test-wide`."""
    firsts = range(0, num_seeds, of_one)
    return [pytest.param(first, marks=[pytest.mark.wide] if first >= at_once else []) for first in firsts]


C = TypeVar("C", bound=Counts)
R = TypeVar("R", bound=Counts, covariant=True)


class Run(Protocol[R]):
    """Simulates a seed. Raises what is wrong."""

    def __call__(self, seed: int, trace: Trace | None = None, /) -> R: ...


def quiet_logs() -> None:
    """Warnings of aborted transfers and lost routers are what a simulation is made of."""
    logging.getLogger("twostroke").setLevel(logging.CRITICAL)


def run_seeds(run: Run[C], seeds: Iterable[int], total: C) -> C:
    """The sum of what they did, in `total`. What one raises has its seed in a note."""
    for seed in seeds:
        try:
            total.add(run(seed))
        except Exception as error:
            error.add_note(f"seed {seed}: replay it with `python -m`, as the simulation's __main__.py tells")
            raise
    return total


def replay(run: Run[C], options: argparse.Namespace, total: C) -> int:
    """`options.seed` with a trace, or `options.count` seeds from it on without; returns the exit code."""
    quiet_logs()
    if options.count == 1:
        print(run(options.seed, lambda line: print(_RANDOM_BYTES.sub("...", line))))
        return 0
    failed = 0
    began = time.perf_counter()
    for seed in range(options.seed, options.seed + options.count):
        try:
            total.add(run(seed))
        except Exception as error:
            failed += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            for note in getattr(error, "__notes__", ())[:12]:
                print(f"    {note}")
    seconds = time.perf_counter() - began
    print(total)
    print(f"{options.count} seeds in {seconds:.1f} s: {options.count / seconds:.0f} a second, {failed} failed")
    return 1 if failed else 0


def seed_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options that `replay` takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1)
    return parser


def trace_of(run: Callable[[int, Trace], object], seed: int) -> list[str]:
    """Return the trace of a seed's run, without random bytes."""
    lines: list[str] = []
    run(seed, lambda line: lines.append(_RANDOM_BYTES.sub("", line)))
    return lines


def trace_elsewhere(hash_seed: str, *command: str) -> str:
    """Return what `python -m command` prints in a process whose hashes are of this seed."""
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
