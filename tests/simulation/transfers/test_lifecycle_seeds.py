"""Ten thousand lifecycles of transfers, 1,000 of them in `make test`, on virtual time, with faults of every kind and
not one violation.

A failure names its seed: `python -m tests.simulation.transfers SEED` replays it with a trace.
"""

import pytest

from tests.simulation.replay import run_seeds, starts, trace_elsewhere, trace_of
from tests.simulation.transfers.plan import FAULTS, SOURCE_ACTS, TARGET_ACTS
from tests.simulation.transfers.run import Report, run_seed


@pytest.mark.parametrize("first", starts(10_000, 1000, at_once=1000))
def test_lifecycles_break_nothing_and_reach_what_they_are_meant_to_reach(first: int):
    report = run_seeds(run_seed, range(first, first + 1000), Report())
    for kind in FAULTS:
        assert report.fired[kind] >= 5, f"{kind} hardly struck"
    for message in ("Hello", "Welcome", "Offer", "Grant", "Chunk", "Commit", "Verified"):
        times = sum(times for (_, victim), times in report.mangled.items() if victim == message)
        assert times > 0, f"no {message} was ever mangled"
    for side, acts in (("source", SOURCE_ACTS), ("target", TARGET_ACTS)):
        for act in acts:
            assert report.acts[f"{side}: {act}"] >= 10, f"hardly a {side} came to {act}"
    assert report.acts["forger"] >= 10
    assert report.outcomes["target verified"] > 400
    assert report.outcomes["target failed"] > 150
    assert report.late > 30
    assert report.digest_failures > 80
    assert report.links_lost > 20


def test_a_lifecycle_replays_exactly():
    for seed in range(20):
        assert trace_of(run_seed, seed) == trace_of(run_seed, seed)


def test_a_lifecycle_replays_exactly_in_another_process_whose_hashes_differ():
    first = trace_elsewhere("1", "tests.simulation.transfers", "8")
    assert "Chunk(" in first, "a trace tells what the two sides say"
    assert first == trace_elsewhere("2", "tests.simulation.transfers", "8")
