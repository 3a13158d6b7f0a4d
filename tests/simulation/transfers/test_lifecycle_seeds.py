"""Ten thousand lifecycles of transfers on virtual time, with faults of every kind and not one violation.

A failure names its seed: `python -m tests.simulation.transfers SEED` replays it with a trace.
"""

import logging
import multiprocessing
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.simulation.transfers.plan import FAULTS, SOURCE_ACTS, TARGET_ACTS, make_plan
from tests.simulation.transfers.run import Report, run_plan, run_seed

SEEDS = 10_000
SHARD = 250
PROCESSES = 2
ROOT = Path(__file__).parents[3]
RANDOM_BYTES = re.compile(r"b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\"")


def run_shard(first: int) -> tuple[Report, list[str]]:
    """SHARD seeds from `first` on: what they did, and what was wrong."""
    logging.disable()  # warnings of aborted transfers are what a simulation is made of
    total, failures = Report(), []
    for seed in range(first, first + SHARD):
        try:
            total.add(run_seed(seed))
        except Exception as error:
            failures.append(f"seed {seed}: {type(error).__name__}: {error}")
    return total, failures


@pytest.fixture(scope="module")
def all_seeds() -> tuple[Report, list[str]]:
    total, failures = Report(), []
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        for report, broken in pool.map(run_shard, range(0, SEEDS, SHARD)):
            total.add(report)
            failures += broken
    return total, failures


def test_ten_thousand_lifecycles_break_nothing(all_seeds: tuple[Report, list[str]]):
    report, failures = all_seeds
    print(report)
    assert not failures, "\n".join(
        [
            f"{len(failures)} of {SEEDS} seeds fail; replay with: python -m tests.simulation.transfers SEED",
            *failures[:20],
        ]
    )


def test_the_seeds_reach_what_they_are_meant_to_reach(all_seeds: tuple[Report, list[str]]):
    report, _ = all_seeds
    for kind in FAULTS:
        assert report.fired[kind] >= 50, f"{kind} hardly struck"
    for message in ("Hello", "Welcome", "Offer", "Grant", "Chunk", "Commit", "Verified"):
        times = sum(times for (_, victim), times in report.mangled.items() if victim == message)
        assert times > 0, f"no {message} was ever mangled"
    for side, acts in (("source", SOURCE_ACTS), ("target", TARGET_ACTS)):
        for act in acts:
            assert report.acts[f"{side}: {act}"] >= 200, f"hardly a {side} came to {act}"
    assert report.acts["forger"] >= 200
    assert report.outcomes["target verified"] > SEEDS * 0.5
    assert report.outcomes["target failed"] > SEEDS * 0.2
    assert report.late > 400
    assert report.digest_failures > 1000
    assert report.links_lost > 300


def trace_of(seed: int) -> list[str]:
    lines: list[str] = []
    run_plan(make_plan(seed), lambda line: lines.append(RANDOM_BYTES.sub("", line)))
    return lines


def test_a_lifecycle_replays_exactly():
    for seed in range(20):
        assert trace_of(seed) == trace_of(seed)


def test_a_lifecycle_replays_exactly_in_another_process_whose_hashes_differ():
    def trace(hash_seed: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "tests.simulation.transfers", "8"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    first = trace("1")
    assert "Chunk(" in first, "a trace tells what the two sides say"
    assert first == trace("2")
