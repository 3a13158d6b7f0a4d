"""Twelve thousand seeds, the first 600 in `make test`: workers, KV transfer and routers unchanged, on virtual time.

A failure names its seed: `python -m tests.simulation SEED [--faults] [--moves]` replays it with a trace.
"""

from functools import partial

import pytest

from tests.simulation.replay import run_seeds, starts, trace_elsewhere, trace_of
from tests.simulation.scenarios.run import MAKERS, Report, run_scenario, run_seed
from tests.simulation.scenarios.scenario import FAULTS, MAX_STEP_S, make_scenario
from tests.simulation.scenarios.tiered import STORAGE_FAULTS


@pytest.mark.parametrize("first", starts(1000, 100, at_once=100))
def test_every_client_gets_its_tokens_and_nothing_is_left_over(first: int):
    report = run_seeds(run_seed, range(first, first + 100), Report())
    # Not every seed can show everything; a hundred of them do.
    assert report.finished > 250
    assert report.cancelled > 50
    assert report.preemptions > report.swaps > 0
    assert report.prefix_hits > 0
    assert report.transfers_done > 0
    assert report.pulled_tokens > report.pulled_by_decode > 0
    assert report.steps_ahead > 0
    assert report.copied > 10
    assert report.links_lost == 0
    assert report.retries == report.prefill_failures == 0


@pytest.mark.parametrize("first", starts(6000, 400, at_once=400))
def test_requests_end_right_although_workers_routers_networks_and_calls_fail(first: int):
    report = run_seeds(partial(run_seed, with_faults=True), range(first, first + 400), Report())
    assert report.finished > 800
    assert {kind for kind, times in report.fired.items() if times} == set(FAULTS), "a fault never struck"
    assert report.refused > 0
    assert report.mistaken <= 3
    assert report.retries > 0
    assert report.prefill_failures > 0
    assert report.transfers_failed > 0
    assert report.digest_failures > 0
    assert report.links_lost > 0


def test_no_stream_stands_still_for_longer_than_a_hung_step_may_take_and_three_seconds():
    scenarios = (make_scenario(seed, with_faults=True) for seed in range(3000))
    hanging = [one for one in scenarios if {fault.kind for fault in one.faults} == {"hang_engine"}]
    reports = [run_scenario(one) for one in hanging[:20]]
    assert sum(report.fired["hang_engine"] for report in reports) > 10
    waits = [report.longest_wait_s for report in reports if report.fired["hang_engine"]]
    assert max(waits) > MAX_STEP_S / 2, "some streams have stood still"
    assert max(waits) <= MAX_STEP_S + 3.0


@pytest.mark.parametrize("first", starts(1000, 50, at_once=50))
def test_streams_move_and_every_client_gets_its_tokens(first: int):
    report = run_seeds(partial(run_seed, kind="moves"), range(first, first + 50), Report())
    assert report.moved > 20
    assert report.not_moved == 0
    assert set(report.reasons) == {"drain", "crowded", "prompts"}
    assert report.pulled_by_decode > 500


@pytest.mark.parametrize("first", starts(4000, 50, at_once=50))
def test_streams_move_right_although_workers_routers_networks_and_calls_fail(first: int):
    report = run_seeds(partial(run_seed, with_faults=True, kind="moves"), range(first, first + 50), Report())
    assert report.moved > 20
    assert report.fired.total() > 30


@pytest.mark.parametrize("first", starts(1000, 50, at_once=50))
def test_prompts_come_from_tiers_after_restarts_and_every_client_gets_its_tokens(first: int):
    report = run_seeds(partial(run_seed, kind="tiers"), range(first, first + 50), Report())
    assert report.tier_objects > 500
    assert report.tier_hit_tokens > 100
    assert report.tier_quarantined == report.tier_errors == 0


@pytest.mark.parametrize("first", starts(4000, 50, at_once=50))
def test_requests_end_right_although_storage_fails(first: int):
    report = run_seeds(partial(run_seed, with_faults=True, kind="tiers"), range(first, first + 50), Report())
    assert {kind for kind, times in report.fired.items() if times} >= set(STORAGE_FAULTS), "a fault never struck"
    assert report.tier_hit_tokens > 50
    assert report.tier_quarantined > 0
    assert report.tier_errors > 0


def test_some_requests_lose_their_router():
    scenarios = (make_scenario(seed, with_faults=True) for seed in range(2000))
    losing = (one for one in scenarios if any(fault.kind == "lose_router" for fault in one.faults))
    assert any(run_scenario(scenario).orphaned for scenario in losing)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("with_faults", [False, True])
def test_a_seed_replays_exactly(with_faults: bool, kind: str):
    run = partial(run_seed, with_faults=with_faults, kind=kind)
    for seed in (3, 17, 108):
        assert trace_of(run, seed) == trace_of(run, seed)


def test_a_seed_replays_exactly_in_another_process_whose_hashes_differ():
    first = trace_elsewhere("1", "tests.simulation", "17", "--faults")
    assert " gets " in first, "a trace tells what clients get"
    assert first == trace_elsewhere("2", "tests.simulation", "17", "--faults")
