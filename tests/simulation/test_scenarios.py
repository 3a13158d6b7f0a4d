"""Eleven thousand seeds: workers, KV transfer and routers unchanged, on virtual time.

A failure names its seed: `python -m tests.simulation SEED [--faults]` replays it with a trace.
"""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.fault_plan import FAULTS
from tests.simulation.report import Report
from tests.simulation.run import run_scenario
from tests.simulation.scenario import make_scenario

ROOT = Path(__file__).parents[2]
RANDOM_BYTES = re.compile(r"b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\"")


def run_seeds(first: int, count: int, *, with_faults: bool = False) -> Report:
    total = Report()
    for seed in range(first, first + count):
        try:
            total.add(run_scenario(make_scenario(seed, with_faults=with_faults)))
        except Exception as error:
            error.add_note(f"replay with: python -m tests.simulation {seed}{' --faults' if with_faults else ''}")
            raise
    return total


@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_every_client_gets_its_tokens_and_nothing_is_left_over(first: int):
    report = run_seeds(first, 100)
    # Not every seed can show everything; a hundred of them do.
    assert report.finished > 250
    assert report.cancelled > 50
    assert report.preemptions > report.swaps > 0
    assert report.prefix_hits > 0
    assert report.transfers_done > 0
    assert report.pulled_tokens > report.pulled_by_decode > 0
    assert report.steps_ahead > 0
    assert report.links_lost == 0
    assert report.retries == report.prefill_failures == 0


@pytest.mark.parametrize("first", range(0, 10_000, 400))
def test_requests_end_right_although_workers_routers_networks_and_calls_fail(first: int):
    report = run_seeds(first, 400, with_faults=True)
    assert report.finished > 800
    assert {kind for kind, times in report.fired.items() if times} == set(FAULTS), "a fault never struck"
    assert report.refused > 0
    assert report.mistaken <= 3
    assert report.third_deaths <= 1
    assert report.retries > 0
    assert report.prefill_failures > 0
    assert report.transfers_failed > 0
    assert report.digest_failures > 0
    assert report.links_lost > 0


def test_some_requests_lose_their_router_and_leave_nothing_at_workers():
    total = Report()
    scenarios = (make_scenario(seed, with_faults=True) for seed in itertools.count())
    losing = (one for one in scenarios if any(fault.kind == "lose_router" for fault in one.faults))
    for scenario in itertools.islice(losing, 60):
        total.add(run_scenario(scenario))
    assert total.orphaned > 0


def trace_of(seed: int, *, with_faults: bool) -> list[str]:
    lines: list[str] = []
    run_scenario(make_scenario(seed, with_faults=with_faults), lambda line: lines.append(RANDOM_BYTES.sub("", line)))
    return lines


@pytest.mark.parametrize("with_faults", [False, True])
def test_a_seed_replays_exactly(with_faults: bool):
    for seed in (3, 17, 108):
        assert trace_of(seed, with_faults=with_faults) == trace_of(seed, with_faults=with_faults)


def test_a_seed_replays_exactly_in_another_process_whose_hashes_differ():
    def trace(hash_seed: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "tests.simulation", "17", "--faults"],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    first = trace("1")
    assert " gets " in first, "a trace tells what clients get"
    assert first == trace("2")
