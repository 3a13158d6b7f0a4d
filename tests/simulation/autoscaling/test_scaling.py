"""The policy holds its promises on synthetic traces."""

from collections import deque

import pytest

from tests.simulation.autoscaling.compare import (
    Fixed,
    Ours,
    Outcome,
    Setting,
    fleet_for_busiest,
    serve,
    serve_with_fleet,
)
from tests.simulation.autoscaling.traffic import Trace, bursts, diurnal, steps
from twostroke.cluster.config.autoscaling import AutoscalingConfig, RoleLimits
from twostroke.planning.coarse.workers import SETTINGS, CoarseDecodeWorker, CoarseRequest
from twostroke.planning.costs.profiles import SMALL
from twostroke.protocol.stats import StepCosts
from twostroke.worker.profile import WorkerProfile

SETTING = Setting(SMALL, ttft_s=5.0, tpot_s=0.02, startup_s=45.0, mode="disaggregated")


def limited_to(fleet: tuple[int, int], cooldown_s: float) -> AutoscalingConfig:
    """No more workers than a fleet for the peak has."""
    return AutoscalingConfig(
        prefill=RoleLimits(min=1, max=fleet[0]), decode=RoleLimits(min=1, max=fleet[1]), cooldown_s=cooldown_s
    )


def for_the_busiest(trace: Trace) -> tuple[tuple[int, int], Outcome]:
    """An over-provisioned fixed fleet, and what comes of it."""
    fleet = fleet_for_busiest(trace, SETTING, AutoscalingConfig())
    return fleet, serve(trace, SETTING, Fixed(*fleet), fleet)


# Of an hour of bursts, the first 20 minutes go by before any worker may go.
@pytest.mark.parametrize(
    ("trace", "cooldown_s", "hours"),
    [(bursts(1, 3600.0), 1200.0, 0.8), (diurnal(1, 5400.0, 1.0, 12.0), 600.0, 0.6)],
    ids=["bursts", "diurnal"],
)
def test_nearly_as_much_is_in_time_as_with_a_fleet_for_the_peak_for_part_of_its_hours(
    trace: Trace, cooldown_s: float, hours: float
) -> None:
    fleet, fixed = for_the_busiest(trace)
    start = fleet if trace.name == "bursts" else (1, 1)
    ours = serve(trace, SETTING, Ours(limited_to(fleet, cooldown_s)), start)
    assert ours.attainment >= fixed.attainment - 0.03
    assert ours.worker_hours <= hours * fixed.worker_hours
    assert max(ours.prefill_reversals, ours.decode_reversals) <= 2


def test_four_times_the_load_brings_both_roles_out_and_its_end_brings_them_back() -> None:
    trace = steps(0, ((0.0, 2.0), (300.0, 8.0), (900.0, 2.0)), 1800.0, prompt=920, output=250)
    scaler = Ours(limited_to((8, 8), 300.0))
    result, fleet = serve_with_fleet(trace, SETTING, scaler, (1, 1))
    growing = [one for one in scaler.decisions if 300 <= one[0] < 900]
    assert growing[0][0] < 340
    assert growing[-1][1].prefill >= 2
    assert growing[-1][1].decode >= 2
    assert (fleet.prefill_target, fleet.decode_target) == (1, 1)
    assert result.attainment > 0.85


def test_two_cooldowns_after_traffic_has_ended_the_fewest_workers_are_left() -> None:
    trace = steps(0, ((0.0, 12.0),), 900.0)
    config = limited_to((8, 8), 200.0)
    _, fleet = serve_with_fleet(trace, SETTING, Ours(config), (4, 3), after_s=2 * config.cooldown_s)
    assert (fleet.prefill_target, fleet.decode_target) == (1, 1)
    assert len(fleet.prefill) + len(fleet.decode) == 2


# --- aggregated workers ---


TPOT_S = 0.05
COSTS = StepCosts(base_s=5e-3, token_s=1e-4, pair_s=0.0, row_s=1e-3, context_s=1e-6)
KIND = WorkerProfile("steps", COSTS, 1.0, 10**6, 1e12, 512, 256, "")


def step_by_step(requests: list[CoarseRequest]) -> None:
    """All come at 0. Each step: rows, then tokens of the first prompts for as long as the pace allows."""
    waiting = deque((request, request.prompt_tokens) for request in requests)
    rows: list[tuple[CoarseRequest, int]] = []  # with the tokens that are still to come
    now_s = 0.0
    while waiting or rows:
        context = sum(one.prompt_tokens + one.output_tokens - left for one, left in rows)
        step_s = COSTS.base_s + COSTS.decode_s(len(rows), context)
        room = KIND.step_tokens - len(rows)
        if rows:
            room = min(room, int((TPOT_S * SETTINGS.tpot_safety - step_s) / COSTS.token_s))
        read: list[CoarseRequest] = []
        while waiting and room > 0:
            request, left = waiting.popleft()
            chunk = min(left, room)
            room -= chunk
            step_s += COSTS.prompt_s(chunk)
            if chunk < left:
                waiting.appendleft((request, left - chunk))
            else:
                read.append(request)
        now_s += step_s
        for request, left in rows:
            if left == 1:
                request.last_s = now_s
        rows = [(request, left - 1) for request, left in rows if left > 1]
        for request in read:
            request.first_s = now_s
            rows.append((request, request.output_tokens - 1))


def test_prompts_and_answers_share_steps_as_they_do_one_by_one() -> None:
    lengths = [(3000, 40), (500, 120), (2000, 20), (900, 200), (4000, 10), (300, 60)]
    one_by_one, closed = ([CoarseRequest(0.0, *length) for length in lengths] for _ in range(2))
    step_by_step(one_by_one)
    worker = CoarseDecodeWorker(KIND, 0.0, 0.0, TPOT_S)
    for request in closed:
        worker.read(request, 0.0)
    while worker.num_requests:
        worker.end_some(worker.next_end_s())
    for expected, found in zip(one_by_one, closed, strict=True):
        assert found.first_s == pytest.approx(expected.first_s, rel=0.03, abs=TPOT_S)
        assert found.last_s == pytest.approx(expected.last_s, rel=0.03, abs=TPOT_S)
    assert worker.held_tokens == 0


AGGREGATED = Setting(SMALL, ttft_s=5.0, tpot_s=0.02, startup_s=45.0, mode="aggregated")


def test_an_aggregated_fleet_follows_a_day_for_part_of_a_fixed_fleets_hours() -> None:
    trace = diurnal(1, 1800.0, 0.5, 8.0)
    most = fleet_for_busiest(trace, AGGREGATED, AutoscalingConfig())
    fixed = serve(trace, AGGREGATED, Fixed(*most), most)
    config = AutoscalingConfig(
        prefill=RoleLimits(min=0, max=0), decode=RoleLimits(min=1, max=most[1]), cooldown_s=300.0
    )
    ours = serve(trace, AGGREGATED, Ours(config), (0, 1))
    assert ours.attainment >= fixed.attainment - 0.03
    assert ours.worker_hours <= 0.6 * fixed.worker_hours
    assert ours.decode_reversals <= 2


def test_after_its_traffic_has_ended_one_worker_is_left() -> None:
    config = AutoscalingConfig(prefill=RoleLimits(min=0, max=0), decode=RoleLimits(min=1, max=8), cooldown_s=200.0)
    _, fleet = serve_with_fleet(steps(0, ((0.0, 6.0),), 300.0), AGGREGATED, Ours(config), (0, 4), after_s=400.0)
    assert (fleet.prefill_target, fleet.decode_target) == (0, 1)
    assert len(fleet.decode) == 1
