"""Aggregated workers: the simulated one against its steps one by one, and the joint policy that scales it."""

from collections import deque

import pytest

from tests.simulation.autoscaling.aggregated import SAFETY, AggregatedWorker
from tests.simulation.autoscaling.compare import Setting, fleet_for_busiest, serve, serve_with_fleet
from tests.simulation.autoscaling.kinds import SMALL
from tests.simulation.autoscaling.scalers import Fixed, Ours
from tests.simulation.autoscaling.traffic import diurnal, steps
from tests.simulation.autoscaling.workers import Kind, Request
from twostroke.cluster.config.autoscaling import AutoscalingConfig, RoleLimits
from twostroke.protocol.stats import StepCosts

TPOT_S = 0.05
COSTS = StepCosts(base_s=5e-3, token_s=1e-4, pair_s=0.0, row_s=1e-3, context_s=1e-6)
KIND = Kind("steps", COSTS, 1.0, 10**6, 1e12, 512, 256, "")


def step_by_step(requests: list[Request]) -> None:
    """All come at 0. Each step: rows, then tokens of the first prompts for as long as the pace allows."""
    waiting = deque((request, request.prompt_tokens) for request in requests)
    rows: list[tuple[Request, int]] = []  # with the tokens that are still to come
    now_s = 0.0
    while waiting or rows:
        context = sum(one.prompt_tokens + one.output_tokens - left for one, left in rows)
        step_s = COSTS.base_s + COSTS.decode_s(len(rows), context)
        room = KIND.step_tokens - len(rows)
        if rows:
            room = min(room, int((TPOT_S * SAFETY - step_s) / COSTS.token_s))
        read: list[Request] = []
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
    one_by_one, closed = ([Request(0.0, *length) for length in lengths] for _ in range(2))
    step_by_step(one_by_one)
    worker = AggregatedWorker(KIND, 0.0, 0.0, TPOT_S)
    for request in closed:
        worker.read(request, 0.0)
    while worker.num_requests:
        worker.end_one(worker.next_end_s())
    for expected, found in zip(one_by_one, closed, strict=True):
        assert found.first_s == pytest.approx(expected.first_s, rel=0.03, abs=TPOT_S)
        assert found.last_s == pytest.approx(expected.last_s, rel=0.03, abs=TPOT_S)
    assert worker.held_tokens == 0
    assert worker.unread_s == pytest.approx(0.0, abs=1e-9)


SETTING = Setting(SMALL, ttft_s=5.0, tpot_s=0.02, startup_s=45.0, is_aggregated=True)


def test_an_aggregated_fleet_follows_a_day_for_part_of_a_fixed_fleets_hours() -> None:
    trace = diurnal(1, 1800.0, 0.5, 8.0)
    most = fleet_for_busiest(trace, SETTING, AutoscalingConfig())
    fixed = serve(trace, SETTING, Fixed(*most), most)
    config = AutoscalingConfig(
        prefill=RoleLimits(min=0, max=0), decode=RoleLimits(min=1, max=most[1]), cooldown_s=300.0
    )
    ours = serve(trace, SETTING, Ours(config), (0, 1))
    assert ours.attainment >= fixed.attainment - 0.03
    assert ours.worker_hours <= 0.6 * fixed.worker_hours
    assert ours.decode_reversals <= 2


def test_after_its_traffic_has_ended_one_worker_is_left() -> None:
    config = AutoscalingConfig(prefill=RoleLimits(min=0, max=0), decode=RoleLimits(min=1, max=8), cooldown_s=200.0)
    _, fleet = serve_with_fleet(steps(0, ((0.0, 6.0),), 300.0), SETTING, Ours(config), (0, 4), after_s=400.0)
    assert (fleet.prefill_target, fleet.decode_target) == (0, 1)
    assert len(fleet.decode) == 1
