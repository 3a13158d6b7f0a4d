"""The joint policy where decode workers read the prompts, too (`prefill.replicas: 0`)."""

from dataclasses import replace

import pytest

from tests.cluster.autoscaling.load import COSTS, MINUTE_S, System
from twostroke.cluster.autoscaling.readings import Reason, RoleSignals
from twostroke.cluster.config.autoscaling import AutoscalingConfig, RoleLimits
from twostroke.protocol.stats import StepCosts

CONFIG = AutoscalingConfig(prefill=RoleLimits(min=0, max=0), decode=RoleLimits(min=1, max=16), cooldown_s=300.0)


def aggregated() -> System:
    """One worker, and no prefill worker ever."""
    return System(config=CONFIG, prefill=RoleSignals(0, 0), decode=RoleSignals(1, 1, costs=COSTS))


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


def test_prompts_that_wait_ask_for_workers_though_nothing_arrives_any_more() -> None:
    system = aggregated()
    system.goes_on(MINUTE_S, rate=5)
    before = system.counts
    system.decode = replace(system.decode, queued_requests=200, queued_tokens=1_800_000)
    system.goes_on(5)
    assert system.decode.target > before[1]
    assert Reason.BACKLOG in system.reasons()


def test_it_goes_back_when_the_load_does_and_to_the_fewest_when_it_ends() -> None:
    system = aggregated()
    system.goes_on(10 * MINUTE_S, rate=40)
    most = system.decode.target
    system.goes_on(11 * MINUTE_S, rate=10)
    assert 1 < system.decode.target < most
    system.goes_on(2 * CONFIG.cooldown_s)
    assert system.counts == (0, 1)
    assert {Reason.SPARE, Reason.IDLE} <= system.reasons()


def test_without_any_costs_only_those_that_wait_count() -> None:
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
