"""The size of the batch, and of the prompt chunks beside it: numbers worked out by hand."""

import msgspec
import pytest

from tests.worker.scheduling.scheduler_rig import a_step_budget as step_budget
from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.policy import DecodePolicy
from twostroke.protocol.requests import GenerateRequest, Promise, SamplingParams
from twostroke.protocol.stats import StepCosts
from twostroke.worker.scheduling.job import SequenceState, WorkerJob
from twostroke.worker.scheduling.step_policy import CAUTIOUS_CHUNK, MIN_STALL_S, tokens_in

# 10 ms a step, 1 ms a prompt token, 10 us a pair, 2 ms a row, 10 us a token of context
COSTS = StepCosts(base_s=0.010, token_s=0.001, pair_s=0.00001, row_s=0.002, context_s=0.00001)


def job(tpot_s: float | None = None, context: int = 100) -> WorkerJob:
    request = GenerateRequest(
        "", "", tuple(range(context)), context, SamplingParams(), 1, promise=Promise(tpot_s=tpot_s)
    )
    return WorkerJob(SequenceState(request, 16), 0.0)


def fitting(tpot_s: float | None, newcomer_tpot_s: float | None = None, *, safety: float = 1.0) -> int:
    """Number of requests with one promise, and a newcomer with another, that have places together."""
    places = step_budget(costs=COSTS, tpot_safety=safety).places()
    for number in range(100):
        if not places.allow(job(newcomer_tpot_s)):
            return number + 1
        places.take(job(tpot_s))
    return 100


def test_the_batch_grows_as_far_as_the_tightest_promise_allows() -> None:
    # Each row takes 2 ms + 100 x 10 us = 3 ms: 40 ms are 10 + 10 x 3.
    assert fitting(0.040, 0.040) == 10 + 1
    assert fitting(None, 0.040) == 10 + 1
    assert fitting(0.040, None) == 10 + 1
    assert fitting(0.040, 0.040, safety=0.5) == 3 + 1


def test_without_a_promise_and_without_known_costs_no_request_waits() -> None:
    assert fitting(None) == 100
    places = step_budget().places()
    for _ in range(5):
        assert places.allow(job(0.000001))
        places.take(job(0.000001))


def test_a_promise_that_can_not_be_kept_lets_the_step_grow_by_half() -> None:
    # Alone it takes 13 ms, half as much again is 19.5: 10 + 3 x 3.
    assert fitting(0.001, 0.001) == 3 + 1


def test_rows_pay_for_the_experts_that_they_hit_and_a_chunk_for_all() -> None:
    # Two rows: 10 + 2 x 3 ms, and 3/4 of 20. A chunk has the other quarter read: 36 ms.
    costs = msgspec.structs.replace(COSTS, experts_s=0.020, expert_share=0.5, pair_s=0.0)
    places = step_budget(costs=costs, tpot_safety=1.0).places()
    places.take(job(0.032))
    assert places.allow(job(0.032))
    places.take(job(0.032))
    assert not places.allow(job(0.032))  # 10 + 3 x 3 + 17.5
    budget = step_budget(512, costs).for_prompts([job(0.080), job(0.080)])
    assert budget.take(500, 0) == 32  # of 44 ms, in whole sixteens
    # Nothing promised: not 1.75 times what the rows take alone, or experts would leave a prompt nothing.
    slow = msgspec.structs.replace(costs, experts_s=2.0, token_s=0.01)
    assert (
        step_budget(512, slow, stall_factor=None).for_prompts([job()]).take(500, 0) == 144
    )  # (10 + 3 + 2,000) x 0.75 ms


def test_chunks_fill_what_the_tightest_promise_leaves() -> None:
    # Two rows: 16 ms; 34 ms more are n + n^2 / 200 ms: 29.6 tokens.
    budget = step_budget(512, COSTS).for_prompts([job(0.050), job(0.090)])
    assert budget.take(500, 0) == 16
    # 34 - 16 - 256 / 200 = 16.72 ms are left: reading 1,000 tokens takes 10, and each after them 11 and more.
    assert budget.take(500, 1000) == 0
    assert budget.take(10, 0) == 10, "the end of a prompt may be of any length"


def chunk(stall_factor: float | None = None, max_stall_s: float | None = None, costs: StepCosts = COSTS) -> int:
    """Prompt tokens beside a request that was promised nothing; alone it takes 13 ms."""
    budget = step_budget(512, costs, stall_factor=stall_factor, max_stall_s=max_stall_s)
    return budget.for_prompts([job()]).take(500, 0)


def test_without_promises_a_step_may_take_as_long_as_is_set() -> None:
    assert chunk(stall_factor=3.0) == 16, "39 ms: 26 more are 23.4 tokens"
    assert chunk(stall_factor=9.0) == 64, "117 ms: 104 more are 77.0 tokens"
    assert chunk(max_stall_s=0.039) == 16
    assert chunk(stall_factor=9.0, max_stall_s=0.039) == chunk(stall_factor=3.0, max_stall_s=9.0) == 16
    assert chunk(max_stall_s=0.001) == 1, "the least that they get on by"


def test_where_nothing_is_set_a_step_takes_what_a_long_chunk_takes_within_what_people_notice() -> None:
    usual_stall_s = step_budget(512, COSTS).usual_stall_s
    # 10 ms and 384 tokens of 0.5 ms each
    assert usual_stall_s(StepCosts(0.010, 0.0005, 0.0, 0.002, 0.00001)) == pytest.approx(0.202)
    assert usual_stall_s(COSTS) == DecodePolicy.most_stall_s, "384 tokens and their pairs take more than 0.59 s"
    assert usual_stall_s(StepCosts(0.005, 0.00001, 0.0, 0.0, 0.0)) == MIN_STALL_S
    assert chunk() == 128, "250 ms: 237 more are 139.6 tokens"


def test_a_step_that_is_long_by_itself_grows_by_three_quarters() -> None:
    slow = StepCosts(base_s=1.0, token_s=0.01, pair_s=0.0, row_s=0.0, context_s=0.0)
    assert chunk(costs=slow) == 64, "0.75 s are 75 tokens"


@pytest.mark.parametrize("setting", [{"max_stall_s": 0.0}, {"stall_factor": 0.5}])
def test_bounds_that_can_not_be_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        DecodeConfig(**setting)  # type: ignore[arg-type]


def test_prompts_get_on_however_long_it_takes_but_not_by_more_than_the_least() -> None:
    budget = step_budget(512, COSTS, min_chunk_tokens=24).for_prompts([job(0.001)])
    assert not budget.is_spent
    assert [budget.take(20, 9000), budget.take(20, 0), budget.take(20, 0)] == [20, 4, 0]
    assert budget.is_spent


def test_a_step_without_decodes_is_filled_and_one_of_unknown_costs_takes_small_chunks() -> None:
    assert step_budget(512, COSTS).for_prompts([]).take(9999, 0) == 512
    assert step_budget(512).for_prompts([job(0.001)]).take(9999, 0) == CAUTIOUS_CHUNK
    assert step_budget(40).for_prompts([job()]).take(9999, 0) == 39


@pytest.mark.parametrize("num_before", [0, 100, 10_000])
@pytest.mark.parametrize("pair_s", [0.0, 1e-9, 1e-5])
def test_so_many_tokens_as_fit_a_time_take_no_longer(num_before: int, pair_s: float) -> None:
    costs = StepCosts(0.0, 0.001, pair_s, 0.0, 0.0)
    for seconds in (0.0005, 0.01, 0.5):
        num_tokens = tokens_in(costs, seconds, num_before)
        assert costs.prompt_s(num_tokens, num_before) <= seconds * 1.0001
        assert costs.prompt_s(num_tokens + 1, num_before) > seconds * 0.9999
    assert tokens_in(costs, -1.0, 0) == 0


def test_tokens_that_cost_nothing_fit_any_time() -> None:
    assert tokens_in(StepCosts(0.0, 0.0, 0.0, 0.0, 0.0), 1.0, 0) > 1_000_000
