"""What a server's requests of known steps tell of its costs."""

import msgspec
import pytest

from twostroke.loadtests.run_folder import Record
from twostroke.planning.modes import Counts, Timed, beside_of, beside_others, fit, server_in, slowed, steps_of
from twostroke.planning.profiles import SMALL
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import StepCosts
from twostroke.worker.step_costs import StepContent

COSTS = StepCosts(base_s=0.004, token_s=2e-4, pair_s=1e-7, row_s=5e-4, context_s=1e-6)
PROMPT_S = 0.003


def timed(costs: StepCosts = COSTS) -> list[Timed]:
    prompts = [StepContent(tokens, tokens * tokens / 2, 0, 0) for tokens in (32, 128, 400, 900)]
    steps = [StepContent(0, 0.0, rows, context) for rows, context in ((1, 40), (6, 300), (3, 1300))]
    return [Timed(one, one.expected_s(costs) + PROMPT_S) for one in prompts] + [
        Timed(one, one.expected_s(costs)) for one in steps
    ]


def test_costs_and_what_any_prompt_takes_come_out_of_steps_that_were_made_of_them() -> None:
    found, prompt_s = fit(timed())
    assert prompt_s == pytest.approx(PROMPT_S, rel=0.1)
    for content in (StepContent(256, 256 * 128, 4, 2000), StepContent(0, 0.0, 8, 900)):
        assert content.expected_s(found) == pytest.approx(content.expected_s(COSTS), rel=0.02)


def test_no_cost_is_negative_though_the_best_fit_were() -> None:
    odd = [*timed(StepCosts(0.004, 2e-4, 0.0, 5e-4, 0.0)), Timed(StepContent(0, 0.0, 3, 9000), 0.003)]
    found, prompt_s = fit(odd)
    assert min(prompt_s, found.base_s, found.token_s, found.pair_s, found.row_s, found.context_s) >= 0.0


def stream(*token_s: float) -> Record:
    return Record(0, 0, 0.0, 0.0, token_s[-1], "ok", input_tokens=10, output_tokens=len(token_s), token_s=token_s)


def test_only_steps_in_which_all_streams_write_count() -> None:
    step = steps_of([stream(0.0, 1.0, 3.0, 5.0, 7.0), stream(2.5, 3.0, 5.0, 7.0, 8.0)])
    assert step is not None
    assert (step.content.rows, step.seconds) == (2, 2.0)  # from 3 to 7: before and after one writes alone
    assert steps_of([stream(0.0, 1.0), stream(2.0, 3.0)]) is None


def test_a_few_shaken_steps_do_not_make_context_a_hundred_times_too_dear() -> None:
    true = StepCosts(base_s=0.03, token_s=2e-3, pair_s=1e-7, row_s=3e-3, context_s=1.5e-6)
    shaken = [Timed(one.content, one.seconds * (1.15 if number % 2 else 0.9)) for number, one in enumerate(timed(true))]
    found, _ = fit(shaken)
    assert found.context_s < 10 * true.context_s
    many = StepContent(0, 0.0, 6, 6 * 600)
    assert many.expected_s(found) == pytest.approx(many.expected_s(true), rel=0.25)


def test_prompts_and_steps_beside_others_are_slower_by_a_factor_each() -> None:
    prompts = [Timed(one.content, 1.5 * one.seconds) for one in timed() if one.content.prompt_tokens]
    steps = [Timed(one.content, 2.0 * one.seconds) for one in timed() if not one.content.prompt_tokens]
    beside = beside_of(COSTS, PROMPT_S, [*prompts, *steps])
    assert beside.token_s / COSTS.token_s == pytest.approx(1.5)
    assert beside.row_s / COSTS.row_s == pytest.approx(2.0)


def test_more_threads_of_others_leave_less_of_the_cores_to_two_workers_than_to_one() -> None:
    profile = msgspec.structs.replace(SMALL, beside=slowed(SMALL.costs, 1.5, 1.5), others=0.0)
    there = beside_others(profile, others=1.0, cores=2)
    content = StepContent(100, 5000.0, 3, 900)
    assert there.step_s(content) == pytest.approx(profile.step_s(content))  # one thread of its own, and one more
    assert there.step_s(content, is_beside=True) == pytest.approx(1.5 * profile.step_s(content, is_beside=True))
    assert beside_others(there, others=0.0, cores=2) == profile


def test_a_server_that_can_not_start_says_why() -> None:
    settings = {"model": {"path": "/no-such-folder"}}
    with pytest.raises(ConfigError, match="no-such-folder"), server_in("aggregated", Counts(0, 1), settings):
        raise AssertionError("it has started")


def test_held_up_steps_count_as_the_mean_has_them() -> None:
    steady = timed()
    shaken = [*steady, *(Timed(one.content, 3 * one.seconds) for one in steady)]
    found, _ = fit(shaken)
    assert StepContent(0, 0.0, 4, 400).expected_s(found) == pytest.approx(
        2 * StepContent(0, 0.0, 4, 400).expected_s(COSTS), rel=0.02
    )
