"""The policy as a whole; the first tests are what other autoscalers got wrong (docs/autoscaling.md)."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec.structs import replace as replace_costs

from tests.cluster.autoscaling.load import COSTS, EIGHT_EACH, MINUTE_S, System
from twostroke.cluster.autoscaling.demand import decode_capacity
from twostroke.cluster.autoscaling.samples import Arrived, Reason, RoleSignals, Signals
from twostroke.cluster.autoscaling.scaling_decision import HOUR_S, decide
from twostroke.cluster.config.autoscaling import AutoscalingConfig, RoleLimits
from twostroke.protocol.stats import StepCosts, typical


def test_demand_is_what_arrives_even_when_nothing_ends() -> None:
    system = System()
    system.goes_on(MINUTE_S, rate=5)
    system.goes_on(2 * MINUTE_S, rate=40, ends=False)
    assert system.prefill.target == 5  # 40 a second x 0.1 s, and 15% to spare


def test_a_queue_asks_for_workers_though_nothing_arrives_any_more() -> None:
    system = System()
    system.goes_on(MINUTE_S, rate=5)
    system.prefill = replace(system.prefill, queued_requests=2000, queued_tokens=1_800_000)
    system.goes_on(5)
    assert system.prefill.target > 4
    assert Reason.BACKLOG in system.reasons()


@pytest.mark.parametrize("seed", range(3))
def test_a_load_between_one_worker_and_two_does_not_make_them_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    system = System(config=EIGHT_EACH.model_copy(update={"cooldown_s": 60.0}))
    counts = []
    for _ in range(2 * int(HOUR_S) // 5):
        system.goes_on(5, rate=sum(rng.random() < 0.09 for _ in range(500)) / 5)  # 9 a second: 0.9 of a worker
        counts.append(system.prefill.target)
    turns = sum(before != after for before, after in pairwise(counts))
    assert set(counts) == {1, 2}
    assert turns <= 2 * 2 + 1


def test_when_traffic_ends_only_the_fewest_stay_after_two_cooldowns() -> None:
    system = System()
    system.goes_on(20 * MINUTE_S, rate=60, output=400)
    assert system.prefill.target > 4
    assert system.decode.target > 1
    system.goes_on(2 * EIGHT_EACH.cooldown_s)
    assert system.counts == (1, 1)


def test_traffic_that_has_ended_is_no_reason_to_stay_though_the_role_has_turned_often() -> None:
    system = System()
    for _ in range(3):
        system.goes_on(10 * MINUTE_S, rate=60)
        system.goes_on(10 * MINUTE_S)
    assert system.prefill.target == 1
    assert Reason.IDLE in system.reasons()


def test_cold_workers_costs_count_for_nothing() -> None:
    slow = StepCosts(base_s=5.0, token_s=0.1, pair_s=0.0, row_s=1.0, context_s=0.0)
    assert typical([None, COSTS, None]) is COSTS
    assert typical([None]) is None
    assert typical([COSTS, slow, COSTS]) is COSTS  # one that is off, warm or not, changes nothing
    system = System()
    system.goes_on(10 * MINUTE_S, rate=20)
    before = system.counts
    system.prefill = replace(system.prefill, costs=None)  # all workers were replaced: what is known stays known
    system.goes_on(10 * MINUTE_S, rate=20)
    assert system.counts == before


def test_without_any_costs_only_those_that_wait_count() -> None:
    system = System()
    system.prefill, system.decode = replace(system.prefill, costs=None), replace(system.decode, costs=None)
    system.goes_on(10 * MINUTE_S, rate=100)
    assert system.counts == (1, 1)
    system.prefill = replace(system.prefill, queued_requests=3)
    system.goes_on(5, rate=100)
    assert system.counts == (2, 1)
    assert Reason.COSTS_UNKNOWN in system.reasons()


def test_both_roles_follow_the_load_in_the_ratio_of_their_work() -> None:
    system = System()
    system.goes_on(10 * MINUTE_S, rate=10, output=400)
    few = system.counts
    system.goes_on(10 * MINUTE_S, rate=40, output=400)
    assert few == (2, 2)
    assert system.counts == (5, 5)


def test_longer_answers_ask_for_decode_workers_alone() -> None:
    system = System()
    system.goes_on(10 * MINUTE_S, rate=10, output=100)
    before = system.counts
    system.goes_on(10 * MINUTE_S, rate=10, output=1600)
    assert system.prefill.target == before[0]
    assert system.decode.target > before[1]


def test_decode_workers_see_a_burst_as_slowly_as_it_is_prefilled() -> None:
    slow_prompts = replace(System().prefill, costs=StepCosts(0.01, 2e-3, 0.0, 0.0, 0.0))
    behind_few, behind_many = System(), System()
    for system, most in ((behind_few, 2), (behind_many, 64)):
        system.config = AutoscalingConfig(prefill=RoleLimits(min=most, max=most), decode=RoleLimits(min=1, max=8))
        system.prefill = replace(slow_prompts, running=most, target=most)
        system.goes_on(MINUTE_S, rate=0.1, output=400)
        system.goes_on(3, rate=200, output=400, every_s=1.0)
        system.goes_on(30, rate=0.1, output=400)
    assert behind_few.decode.target < behind_many.decode.target


def test_a_short_burst_in_a_quiet_hour_does_not_order_all_there_are() -> None:
    system = System(config=EIGHT_EACH.model_copy(update={"prefill": RoleLimits(min=1, max=64)}))
    system.goes_on(10 * MINUTE_S, rate=5)
    system.goes_on(2, rate=100, every_s=1.0)
    system.goes_on(MINUTE_S, rate=5)
    assert system.prefill.target < 12


def test_a_role_shrinks_to_what_the_whole_cooldown_needed_and_not_before_it_is_over() -> None:
    system = System()
    system.goes_on(10 * MINUTE_S, rate=40)
    system.goes_on(4 * MINUTE_S, rate=10)
    assert system.prefill.target == 5
    system.goes_on(7 * MINUTE_S, rate=10)
    assert system.prefill.target == 2
    assert Reason.SPARE in system.reasons()


def test_nothing_shrinks_while_a_change_is_under_way_but_more_may_be_asked_for() -> None:
    system = System(workers_come=False)
    system.goes_on(MINUTE_S, rate=5)
    system.goes_on(MINUTE_S, rate=40)
    first = system.prefill.target
    assert first > system.prefill.running
    system.goes_on(MINUTE_S, rate=60)
    assert system.prefill.target > first
    most = system.prefill.target
    system.goes_on(4 * MINUTE_S, rate=1)
    assert system.prefill.target == most


def test_a_role_that_went_down_and_up_again_stays_up_for_an_hour() -> None:
    system = System()
    system.goes_on(10 * MINUTE_S, rate=40)
    system.goes_on(12 * MINUTE_S, rate=10)  # the first reversal
    assert system.prefill.target == 2
    system.goes_on(2 * MINUTE_S, rate=40)  # the second
    system.goes_on(50 * MINUTE_S, rate=10)
    assert system.prefill.target == 5
    assert Reason.REVERSALS in system.reasons()
    system.goes_on(20 * MINUTE_S, rate=10)
    assert system.prefill.target == 2


def test_where_gpus_are_few_both_roles_are_served_alike() -> None:
    system = System(config=EIGHT_EACH.model_copy(update={"budget": 6.0}))
    system.prefill = replace(system.prefill, gpus_each=1.0)
    system.decode = replace(system.decode, gpus_each=1.0)
    system.goes_on(10 * MINUTE_S, rate=80, output=800)
    assert sum(system.counts) == 6
    assert min(system.counts) >= 2
    assert Reason.BUDGET in system.reasons()


def test_a_gpu_changes_roles_within_one_decision() -> None:
    system = System(config=EIGHT_EACH.model_copy(update={"budget": 6.0}))
    system.goes_on(10 * MINUTE_S, rate=40, output=10)
    assert system.counts == (5, 1)
    for _ in range(120):
        system.goes_on(5, rate=10, output=1600)
        assert sum(system.counts) <= 6
        if system.decisions[-1].decode_reason is Reason.TAKEN:
            break
    assert system.decisions[-1].prefill_reason is Reason.GIVEN
    assert system.decode.target > 1
    assert system.prefill.target < 5


@pytest.mark.parametrize("changes", [True, False])
def test_a_role_takes_what_the_other_can_spare_before_any_worker_starts(changes: bool) -> None:
    system = System(config=EIGHT_EACH.model_copy(update={"change_roles": changes}))
    for minutes, rate in ((10, 40), (12, 10), (2, 40), (20, 10)):
        system.goes_on(minutes * MINUTE_S, rate=rate, output=10)
    before = system.counts
    assert system.decisions[-1].prefill_reason is Reason.REVERSALS, "they stay, though nobody needs them"
    while system.decode.target == before[1]:
        system.goes_on(5, rate=10, output=1600)
    assert (system.decisions[-1].prefill_reason is Reason.GIVEN) == changes
    assert (sum(system.counts) == sum(before)) == changes
    assert (system.memory.decode.went_up is None) == changes, "a change of roles is no start"


def test_a_budget_that_decode_workers_use_up_leaves_prompts_to_them() -> None:
    system = System(config=EIGHT_EACH.model_copy(update={"prefill": RoleLimits(min=0, max=8), "budget": 1.0}))
    system.prefill = replace(system.prefill, running=0, target=0)
    system.goes_on(10 * MINUTE_S, rate=40)
    assert system.counts == (0, 1)
    assert system.decisions[-1].prefill_reason in (Reason.BUDGET, Reason.BETWEEN)


def test_the_limits_hold_whatever_the_load() -> None:
    system = System()
    system.goes_on(10 * MINUTE_S, rate=1000, output=1000)
    assert system.counts == (8, 8)
    assert Reason.LIMIT in system.reasons()
    system.config = EIGHT_EACH.model_copy(
        update={"prefill": RoleLimits(min=1, max=3), "decode": RoleLimits(min=1, max=4)}
    )
    system.goes_on(5, rate=1000)
    assert system.counts == (3, 4)
    system.config = EIGHT_EACH.model_copy(
        update={"prefill": RoleLimits(min=6, max=8), "decode": RoleLimits(min=5, max=8)}
    )
    system.goes_on(5, rate=1)
    assert system.counts == (6, 5)
    assert {Reason.ABOVE_MAX, Reason.BELOW_MIN} <= system.reasons()


def test_all_prefill_workers_may_go_and_come_back_from_what_decode_workers_tell() -> None:
    system = System(config=EIGHT_EACH.model_copy(update={"prefill": RoleLimits(min=0, max=8)}))
    system.goes_on(20 * MINUTE_S, rate=0.5)
    assert system.counts == (0, 1)
    system.memory = replace(system.memory, prefill=replace(system.memory.prefill, costs=None))
    system.prefill = replace(system.prefill, costs=None)
    system.goes_on(2 * MINUTE_S, rate=30)
    assert system.prefill.target > 1


def test_a_decision_is_made_every_interval_and_not_in_between() -> None:
    system = System()
    system.goes_on(12, rate=1, every_s=1.0)
    between = [one.prefill_reason is Reason.BETWEEN for one in system.decisions]
    assert between == [False, True, True, True, True, False, True, True, True, True, False, True]


def test_counters_that_fall_count_as_standing_still() -> None:
    system = System()
    system.goes_on(10 * MINUTE_S, rate=20)
    before = system.counts
    system.arrived = Arrived()  # the router was replaced
    system.goes_on(10 * MINUTE_S, rate=20)
    assert system.counts == before


def test_looks_out_of_order_change_nothing() -> None:
    system = System()
    system.goes_on(MINUTE_S, rate=20)
    late = Signals(system.now_s - 30, Arrived(), system.prefill, system.decode)
    decision, memory = decide(late, system.memory, system.config)
    assert memory.history == system.memory.history
    assert (decision.prefill, decision.decode) == system.counts


# --- where decode workers read the prompts, too (`prefill.replicas: 0`) ---

AGGREGATED = AutoscalingConfig(prefill=RoleLimits(min=0, max=0), decode=RoleLimits(min=1, max=16), cooldown_s=300.0)


def aggregated() -> System:
    """One worker, and no prefill worker ever."""
    return System(config=AGGREGATED, prefill=RoleSignals(0, 0), decode=RoleSignals(1, 1, costs=COSTS))


# Steps of 42.5 ms, of which 10 ms are their constant: 76% of a worker's time is for the rest, and 85% of it are used.
@pytest.mark.parametrize(
    ("prompt", "output", "workers"),
    [
        (900, 1, 3),  # 20 x 90 ms of prompts
        (1, 200, 1),  # 20 x 200 tokens of 0.12 ms
        (900, 200, 5),  # both, and each token takes 0.21 ms, since there is a prompt before it
        (900, 400, 6),
    ],
)
def test_prompts_and_answers_share_a_workers_time(prompt: int, output: int, workers: int) -> None:
    system = aggregated()
    system.goes_on(10 * MINUTE_S, rate=20, prompt=prompt, output=output)
    assert system.counts == (0, workers)


def test_prompts_that_wait_there_ask_for_workers_though_nothing_arrives_any_more() -> None:
    system = aggregated()
    system.goes_on(MINUTE_S, rate=5)
    before = system.counts
    system.decode = replace(system.decode, queued_requests=200, queued_tokens=1_800_000)
    system.goes_on(5)
    assert system.decode.target > before[1]
    assert Reason.BACKLOG in system.reasons()


def test_an_aggregated_server_goes_back_when_the_load_does_and_to_the_fewest_when_it_ends() -> None:
    system = aggregated()
    system.goes_on(10 * MINUTE_S, rate=40)
    most = system.decode.target
    system.goes_on(11 * MINUTE_S, rate=10)
    assert 1 < system.decode.target < most
    system.goes_on(2 * AGGREGATED.cooldown_s)
    assert system.counts == (0, 1)
    assert {Reason.SPARE, Reason.IDLE} <= system.reasons()


def test_workers_of_a_mixture_take_more_rows_than_a_straight_line_from_a_single_one_tells() -> None:
    costs = replace_costs(COSTS, experts_s=0.02, expert_share=1 / 16, context_s=0.0)
    each = decode_capacity(costs, context=0.0, tpot_s=0.04, kv_tokens=0.0, max_batch=1000, spare=0.0)
    assert each.step_s == pytest.approx(0.04)
    assert each.rows == pytest.approx(100, rel=0.01)  # 10 ms, 20 ms of experts nearly all, 100 x 0.1 ms
    few = decode_capacity(costs, context=0.0, tpot_s=0.02, kv_tokens=0.0, max_batch=1000, spare=0.0)
    assert few.step_s == pytest.approx(0.02)
    assert 10 + 20 * (1 - (15 / 16) ** few.rows) + few.rows / 10 == pytest.approx(20)
    assert decode_capacity(costs, 0.0, 0.04, 0.0, max_batch=8, spare=0.0).rows == 8
    assert decode_capacity(costs, 0.0, None, 0.0, max_batch=10**6, spare=0.1).step_s == pytest.approx(0.3)


def test_prompts_have_all_experts_read() -> None:
    mixture = replace_costs(COSTS, experts_s=0.3, expert_share=1 / 16)
    system = System()
    system.prefill = replace(system.prefill, costs=mixture)
    system.goes_on(MINUTE_S, rate=5)
    assert system.prefill.target == 3  # 5 a second x 0.4 s, and 15% to spare

    def beside(base_s: float, experts_s: float) -> int:
        both = aggregated()
        costs = replace_costs(COSTS, base_s=base_s, experts_s=experts_s, expert_share=1 / 16)
        both.decode = replace(both.decode, costs=costs)
        both.goes_on(10 * MINUTE_S, rate=20, prompt=900, output=200)
        return both.decode.target

    assert beside(0.01, 0.02) == beside(0.03, 0.0) > beside(0.01, 0.0)


def test_without_any_costs_an_aggregated_server_counts_only_those_that_wait() -> None:
    system = aggregated()
    system.decode = replace(system.decode, costs=None, queued_requests=3)
    system.goes_on(5, rate=100)
    assert system.counts == (0, 2)
    assert Reason.COSTS_UNKNOWN in system.reasons()


def test_steps_without_a_constant_and_without_a_promise_have_their_work_all_the_same() -> None:
    system = aggregated()
    system.ttft_s = system.tpot_s = None
    system.decode = replace(system.decode, costs=StepCosts(0.0, 1e-4, 0.0, 1e-4, 0.0))
    system.goes_on(10 * MINUTE_S, rate=20, prompt=900, output=200)
    assert system.counts == (0, 3)  # 20 x (90 ms + 20 ms), of which 15% are to be spared
