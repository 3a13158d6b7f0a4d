"""Demand as a router counts it: all that arrives, and the workers that can take it."""

import msgspec
import pytest

from tests.router.routing.knowing import Clock, info
from twostroke.protocol.requests import Promise
from twostroke.protocol.stats import QueuedWork, StepCosts, WorkerStats
from twostroke.router.slo.classes import ASKED_S, Demand, SLOClass, SLOConfig, fleet_numbers

CLASSES = (SLOClass(name="fast", ttft_s=0.2, tpot_s=0.02), SLOClass(name="slow", ttft_s=2.0), SLOClass(name="batch"))


@pytest.fixture
def time():
    return Clock()


@pytest.fixture
def demand(time):
    return Demand(CLASSES, time)


def of_class(request, name):
    return msgspec.structs.replace(request, promise=Promise(class_name=name))


def test_all_that_arrives_counts_and_of_answers_what_has_ended(demand, a_request):
    for _ in range(3):
        demand.arrived(a_request())
    demand.ended(4, 7)
    numbers = demand.numbers()
    assert {name: numbers[name] for name in ("requests", "prompt_tokens")} == {"requests": 3, "prompt_tokens": 15}
    assert (numbers["ended"], numbers["cached_tokens"], numbers["output_tokens"]) == (1, 4, 7)


def test_what_is_turned_away_unread_counts_like_the_others(demand, a_request):
    demand.turned_away(1)  # nothing is known of prompts yet
    assert demand.numbers()["prompt_tokens"] == 0
    demand.arrived(a_request())
    demand.turned_away(2)
    assert demand.numbers()["requests"] == 4
    assert demand.numbers()["prompt_tokens"] == pytest.approx(5 + 2 * 5 / 2)


def test_attention_to_what_was_cached_is_taken_off_the_prompts_that_come_next(demand, a_request):
    long = msgspec.structs.replace(a_request(), num_prompt_tokens=100)
    demand.arrived(long)
    assert demand.numbers()["prompt_pairs"] == 5000
    demand.ended(110, 0)
    demand.arrived(long)
    assert demand.numbers()["prompt_pairs"] == 5000  # a counter never falls
    demand.arrived(long)
    assert demand.numbers()["prompt_pairs"] == 5000 + 5000 - (110**2 / 2 - 5000)


def test_the_tightest_promise_is_that_of_a_class_which_is_asked_for(demand, time, a_request):
    assert demand.numbers()["ttft_s"] == demand.numbers()["tpot_s"] == 0.0
    demand.arrived(of_class(a_request(), "fast"))
    demand.arrived(of_class(a_request(), "slow"))
    assert (demand.numbers()["ttft_s"], demand.numbers()["tpot_s"]) == (0.2, 0.02)
    time.now += ASKED_S - 1
    demand.arrived(of_class(a_request(), "slow"))
    time.now += 2
    assert (demand.numbers()["ttft_s"], demand.numbers()["tpot_s"]) == (2.0, 0.0)


def test_workers_are_summed_up_and_those_that_leave_are_left_out():
    costs = [StepCosts(base, 1e-5, 1e-8, 2e-5, 1e-7, num_samples=int(100 * base)) for base in (1.0, 2.0, 4.0)]
    busy = WorkerStats(num_waiting=1, num_running=3, num_waiting_tokens=50, queued=(QueuedWork("fast", 0, 0.0, 50, 2),))
    stats = [
        msgspec.structs.replace(busy, context_tokens=10, owned_blocks=5, total_blocks=60, costs=costs[0]),
        msgspec.structs.replace(busy, context_tokens=30, owned_blocks=1, total_blocks=60, costs=costs[2]),
        msgspec.structs.replace(busy, costs=costs[1], is_draining=True),
    ]
    numbers = fleet_numbers((info(f"d{i}"), one) for i, one in enumerate(stats))
    told = {name.removeprefix("decode."): value for name, value in numbers.items() if name.startswith("decode.")}
    assert told == {
        "running": 2,
        "queued_requests": 4,
        "queued_tokens": 100,
        "num_decoding": 4,
        "context_tokens": 40,
        "owned_tokens": 96,
        "total_tokens": 1920,
        "max_batch": 32,
        "step_tokens": 500,
        "base_s": 1.0,
        "token_s": 1e-5,
        "pair_s": 1e-8,
        "row_s": 2e-5,
        "context_s": 1e-7,
        "num_samples": 100,
        "experts_s": 0.0,
        "expert_share": 0.0,
    }
    assert numbers["prefill.running"] == 0
    assert "prefill.base_s" not in numbers


async def test_a_refused_request_is_demand_and_no_answer(site_of):
    async with site_of(1, 1, slo=SLOConfig(classes=CLASSES), max_choices_in_flight=1) as site:
        body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        assert (await site.http.post("/v1/completions", json=body)).status_code == 200
        refused = await site.http.post("/v1/completions", json=body | {"n": 2})
        assert refused.status_code == 429
        told = site.service.demand()
    assert (told["requests"], told["prompt_tokens"], told["ended"], told["output_tokens"]) == (3, 9, 1, 4)
    assert (told["prefill.running"], told["decode.running"], told["ttft_s"]) == (1, 1, 0.2)
