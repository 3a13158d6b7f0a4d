"""Fitted step costs, from steps whose costs are known."""

import math
import random
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.model.step import SequenceStep
from twostroke.protocol.stats import StepCosts
from twostroke.worker.step_costs import COLD_STEPS, FIRST_SAMPLES, MEMORY, StepContent, StepCostFit, _least

GPU = StepCosts(6e-3, 1.6e-5, 1e-9, 4e-5, 8e-8)  # about 8B parameters on a large one
CPU = StepCosts(15e-3, 6e-4, 4e-8, 9e-4, 2e-6)  # about 160M on two cores
MOE = StepCosts(2e-3, 2e-5, 1e-9, 4e-5, 8e-8, experts_s=18e-3, expert_share=8 / 128)  # 30B, of which 3B are active
Draw = Callable[[random.Random], StepContent]


def prompts(draw: random.Random) -> StepContent:
    num_tokens = int(10 ** draw.uniform(0.5, 3.3))
    num_before = draw.choice((0, draw.randrange(8000)))
    return StepContent(num_tokens, num_tokens * (num_before + num_tokens / 2), 0, 0)


def rows(draw: random.Random) -> StepContent:
    num_rows = int(10 ** draw.uniform(0, 2))
    return StepContent(0, 0.0, num_rows, sum(draw.randrange(10, 4000) for _ in range(num_rows)))


def both(draw: random.Random) -> StepContent:
    prompt, row = prompts(draw), rows(draw)
    return StepContent(prompt.prompt_tokens, prompt.pairs, row.rows, row.context_tokens)


ALL: tuple[Draw, ...] = (prompts, rows, both)


def seconds(costs: StepCosts, content: StepContent) -> float:
    values = (costs.base_s, costs.token_s, costs.pair_s, costs.row_s, costs.context_s)
    missed = math.exp((content.prompt_tokens + content.rows) * math.log1p(-costs.expert_share))
    others = sum(cost * feature for cost, feature in zip(values, (1, *content), strict=True))
    return others + costs.experts_s * (1 - missed)


def times(costs: StepCosts, factor: float) -> StepCosts:
    return StepCosts(
        *(factor * value for value in (costs.base_s, costs.token_s, costs.pair_s, costs.row_s, costs.context_s))
    )


def run(
    fit: StepCostFit,
    costs: StepCosts,
    kinds: Sequence[Draw],
    steps: int,
    *,
    noise: float = 0.1,
    strays: float = 0.02,
    is_plain: bool = True,
) -> None:
    """Add steps with times off by `noise`, and a share of them far off."""
    draw = random.Random(steps)
    for _ in range(steps):
        content = draw.choice(kinds)(draw)
        stray = draw.choice((0.1, 3, 10, 30)) if draw.random() < strays else 1
        fit.add(content, seconds(costs, content) * stray * math.exp(draw.gauss(0, noise)), is_plain=is_plain)


def warm(expert_share: float = 0.0) -> StepCostFit:
    """One that has its cold steps behind it."""
    fit = StepCostFit(expert_share)
    for _ in range(COLD_STEPS):
        fit.add(StepContent(1, 1.0, 0, 0), 1.0)
    return fit


def known(fit: StepCostFit) -> StepCosts:
    """The costs so far."""
    costs = fit.costs()
    assert costs is not None
    return costs


def error(fit: StepCostFit, costs: StepCosts, kinds: Sequence[Draw], share: float = 0.5) -> float:
    """The relative error that `share` of other steps than those of `run` don't exceed."""
    draw, fitted = random.Random(-1), known(fit)
    contents = [draw.choice(kinds)(draw) for _ in range(300)]
    return sorted(abs(seconds(fitted, one) / seconds(costs, one) - 1) for one in contents)[int(share * 300)]


@pytest.mark.parametrize("truth", [GPU, CPU, MOE], ids=["gpu", "cpu", "moe"])
@pytest.mark.parametrize("kinds", [(prompts,), (rows,), ALL], ids=["prompts", "rows", "all"])
@pytest.mark.parametrize("steps", [150, 2000])
def test_other_steps_are_predicted_within_a_tenth_despite_noise_and_strays(
    truth: StepCosts, kinds: Sequence[Draw], steps: int
) -> None:
    fit = warm(truth.expert_share)
    run(fit, truth, kinds, steps)
    assert error(fit, truth, kinds) < 0.05
    assert error(fit, truth, kinds, 0.9) < 0.1


def test_without_noise_the_costs_themselves_are_found() -> None:
    fit = warm()
    run(fit, CPU, ALL, 2000, noise=0.0)
    fitted = known(fit)
    for field in ("base_s", "token_s", "pair_s", "row_s", "context_s"):
        assert getattr(fitted, field) == pytest.approx(getattr(CPU, field), rel=0.1), field


def test_a_mixtures_small_batches_are_predicted_though_hardly_any_were_seen() -> None:
    fit, line = warm(MOE.expert_share), warm()
    draw = random.Random(3)
    for number in range(1000):
        num_rows = 1 + number % 3 if number % 50 == 0 else draw.randrange(16, 65)
        content = StepContent(0, 0.0, num_rows, 500 * num_rows)
        for one in (fit, line):
            one.add(content, seconds(MOE, content))
    for num_rows in (1, 2, 4, 8, 16, 64):
        content = StepContent(0, 0.0, num_rows, 500 * num_rows)
        assert content.expected_s(known(fit)) == pytest.approx(seconds(MOE, content), rel=0.1), num_rows
    lone = StepContent(0, 0.0, 1, 500)
    assert lone.expected_s(known(line)) > 2 * seconds(MOE, lone)  # a constant, and so much more a row
    assert (known(line).experts_s, known(line).expert_share) == (0.0, 0.0)


def test_no_costs_are_known_before_some_warm_steps_and_costs_soon_after() -> None:
    fit = StepCostFit()
    run(fit, CPU, ALL, COLD_STEPS + FIRST_SAMPLES - 1)
    assert fit.costs() is None
    run(fit, CPU, ALL, 1)
    costs = known(fit)
    assert costs.num_samples == FIRST_SAMPLES


def test_cold_steps_count_for_nothing() -> None:
    cold, fit = StepCostFit(), warm()
    draw = random.Random(1)
    for _ in range(COLD_STEPS):
        cold.add(prompts(draw), 1000.0)
    for one in (cold, fit):
        run(one, CPU, (prompts,), 500)
    assert cold.costs() == fit.costs()


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_machine_that_has_changed_is_followed_within_some_hundred_steps(factor: float) -> None:
    fit = warm()
    run(fit, CPU, ALL, 1000)
    run(fit, times(CPU, factor), ALL, 500)
    assert error(fit, times(CPU, factor), ALL, 0.9) < 0.1


def test_strays_alone_move_little() -> None:
    fit = warm()
    run(fit, CPU, ALL, 1000)
    before = fit.costs()
    draw = random.Random(5)
    for _ in range(3):
        fit.add(rows(draw), 60.0)  # as while a CUDA graph is recorded
    run(fit, CPU, ALL, 29)
    assert fit.costs() != before
    assert error(fit, CPU, ALL, 0.9) < 0.1


def test_prompts_are_guessed_at_before_any_was_seen_and_then_learnt_at_once() -> None:
    fit = warm()
    run(fit, GPU, (rows,), 1000)
    guessed = known(fit)
    assert GPU.token_s / 10 < guessed.token_s < GPU.token_s * 10
    run(fit, GPU, (rows, rows, rows, prompts), 64)
    assert error(fit, GPU, (prompts,)) < 0.1


def test_steps_with_more_than_their_content_count_only_without_plain_ones() -> None:
    more = times(GPU, 1.5)
    fit = warm()
    run(fit, GPU, (prompts,), 64)
    told = fit.costs()
    run(fit, more, (prompts,), 64, is_plain=False)
    assert fit.costs() == told
    fit = StepCostFit()
    run(fit, more, (prompts,), 64, is_plain=False)
    assert error(fit, more, (prompts,)) < 0.1
    run(fit, GPU, (prompts,), 400)
    assert error(fit, GPU, (prompts,)) < 0.1


def test_much_longer_prompts_than_ever_before_are_learnt_from() -> None:
    def short(draw: random.Random) -> StepContent:
        num_tokens = draw.randrange(2, 60)
        return StepContent(num_tokens, num_tokens**2 / 2, 0, 0)

    def long(draw: random.Random) -> StepContent:
        num_tokens = draw.randrange(10_000, 16_000)
        return StepContent(num_tokens, num_tokens**2 / 2, 0, 0)

    truth = StepCosts(15e-3, 6e-4, 4e-6, 0.0, 0.0)
    fit = warm()
    run(fit, truth, (short,), 1000)
    run(fit, truth, (short, short, short, long), 64)
    assert error(fit, truth, (long,)) < 0.1


def prompt(num_tokens: int, num_before: int = 0) -> StepContent:
    return StepContent(num_tokens, num_tokens * (num_before + num_tokens / 2), 0, 0)


LIVE = StepCosts(2e-3, 6e-5, 1.6e-8, 6e-5, 1e-7)  # a small model on one core
LONG = (prompt(2048), prompt(952, 2048))  # 3,000 tokens as a prefill worker computes them


def long_prompt_ratio(fit: StepCostFit, truth: StepCosts) -> float:
    """The predicted time of 3,000 tokens over their true time."""
    costs = known(fit)
    return sum(seconds(costs, one) for one in LONG) / sum(seconds(truth, one) for one in LONG)


@pytest.mark.parametrize("truth", [LIVE, CPU])
@pytest.mark.parametrize("seed", range(20))
def test_short_prompts_predict_long_ones_and_a_few_long_ones_correct_that(truth: StepCosts, seed: int) -> None:
    fit, draw = warm(), random.Random(seed)

    def take(one: StepContent) -> None:
        fit.add(one, seconds(truth, one) * math.exp(draw.gauss(0, 0.15)))

    for _ in range(40):
        take(prompt(draw.randint(5, 60)))
    fit.take_in()
    assert 1 / 2 < long_prompt_ratio(fit, truth) < 2
    for _ in range(5):
        for one in LONG:
            take(one)
    fit.take_in()
    assert 1 / 1.25 < long_prompt_ratio(fit, truth) < 1.25


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_start_is_forgotten_with_the_first_long_prompts(seed: int) -> None:
    fit, draw = warm(), random.Random(seed)
    for _ in range(40):
        one = prompt(draw.randint(3, 106))
        fit.add(one, 10 * seconds(LIVE, one) * math.exp(draw.gauss(0, 0.15)))
    for _ in range(5):
        for one in LONG:
            fit.add(one, seconds(LIVE, one))
    fit.take_in()
    assert 1 / 1.25 < long_prompt_ratio(fit, LIVE) < 1.25


@pytest.mark.parametrize("late_s", [0.0, 3e-3, 8e-3, 0.1])
@pytest.mark.parametrize("then", [0, 1000])
def test_a_tiny_prompt_that_was_held_up_says_nothing_of_long_ones(late_s: float, then: int) -> None:
    fit, draw = warm(), random.Random(1)

    def decode(steps: int) -> None:
        for number in range(steps):
            one = StepContent(0, 0.0, 1, 300 + number)
            fit.add(one, seconds(LIVE, one) * draw.uniform(0.9, 1.1))

    decode(200)
    fit.add(prompt(6), seconds(LIVE, prompt(6)) + late_s)
    fit.take_in()
    decode(then)
    assert long_prompt_ratio(fit, LIVE) < 3


def test_nothing_is_fitted_without_new_steps() -> None:
    fit = warm()
    run(fit, CPU, ALL, FIRST_SAMPLES + 1)
    before = fit.costs()
    fit.take_in()
    costs = fit.costs()
    assert costs is not before
    fit.take_in()
    assert fit.costs() is costs


def test_costs_that_recent_steps_hardly_distinguish_stay_as_they_were() -> None:
    def nearly_the_same(draw: random.Random) -> StepContent:
        return StepContent(0, 0.0, draw.choice((15, 16, 17)), 16_000 + draw.randrange(100))

    fit = warm()
    run(fit, GPU, (rows,), 500, strays=0.0)
    run(fit, GPU, (nearly_the_same,), int(30 * MEMORY), strays=0.0)
    assert error(fit, GPU, (rows,)) < 0.1


def test_equal_steps_are_predicted_from_the_first_fit_on() -> None:
    fit = warm()
    content = StepContent(100, 5000.0, 0, 0)
    for _ in range(FIRST_SAMPLES):
        fit.add(content, 0.2)
    costs = known(fit)
    assert seconds(costs, content) == pytest.approx(0.2, rel=0.01)


def test_of_a_step_with_decodes_only_what_its_prompts_add_is_theirs() -> None:
    costs = StepCosts(0.010, 0.001, 0.0, 0.002, 0.0)
    assert StepContent(20, 200.0, 5, 100).prompts_part(costs) == pytest.approx(0.5)
    assert StepContent(20, 200.0, 0, 0).prompts_part(costs) == 1.0
    assert StepContent(20, 200.0, 5, 100).prompts_part(None) == 1.0


@pytest.mark.parametrize("kind", [prompts, rows, both])
def test_steps_that_seem_to_have_taken_no_time_leave_nothing_that_lasts(kind: Draw) -> None:
    """The second of two steps that ended while the event loop was busy seems to take no time."""
    for seed in range(10):
        fit, draw = warm(), random.Random(seed)
        for _ in range(100):
            content = kind(draw)
            fit.add(content, draw.choice((2e-5, 1e-4)) if draw.random() < 0.1 else seconds(GPU, content))
        run(fit, GPU, [kind], 500)
        assert error(fit, GPU, [kind]) < 0.3


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_costs_are_finite_and_never_negative_whatever_the_steps(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice((0.0, 0.0, 10 ** draw.uniform(0, 8))) for _ in range(4)]
    fit = StepCostFit()
    for _ in range(300):
        if draw.random() < 0.05:
            sizes[draw.randrange(4)] = 10 ** draw.uniform(0, 8)
        tokens, pairs, num_rows, context = (size * draw.choice((0, 1, draw.random())) for size in sizes)
        fit.add(
            StepContent(int(tokens), pairs, int(num_rows), int(context)),
            draw.choice((-1.0, 0.0, 1e-12, 10 ** draw.uniform(-9, 4))),
        )
    costs = known(fit)
    for value in (costs.base_s, costs.token_s, costs.pair_s, costs.row_s, costs.context_s):
        assert math.isfinite(value)
        assert value >= 0


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_the_least_is_that_of_the_best_choice_of_what_is_zero(seed: int) -> None:
    draw = np.random.default_rng(seed)
    root = draw.normal(size=(5, 5)) * 10.0 ** draw.integers(-3, 4, size=5)
    left, right = root.T @ root + np.diag(np.diag(root.T @ root)) * 0.01, root.T @ draw.normal(size=5)

    def height(x: np.ndarray) -> float:
        return float(x @ left @ x / 2 - right @ x)

    best = 0.0
    for chosen in product((False, True), repeat=5):
        free = np.array(chosen)
        x = np.zeros(5)
        if free.any():
            x[free] = np.linalg.solve(left[np.ix_(free, free)], right[free])
        if (x >= 0).all():
            best = min(best, height(x))
    found = _least(left, right)
    assert (found >= 0).all()
    assert height(found) == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_a_step_contains_prompts_in_pairs_and_rows_in_contexts() -> None:
    batch = [
        SequenceStep(range(10), 0, (), None),
        SequenceStep(range(4), 100, (), None),
        SequenceStep((7,), 41, (), None),
        SequenceStep((0,), 9, (), None, follows=0),
    ]
    assert StepContent.of(batch) == StepContent(14, 50 + 4 * 102, 2, 100 + 42 + 10)


def test_a_step_is_familiar_only_at_a_context_like_those_that_it_had() -> None:
    """Costs that short contexts do not tell would bound a long one's step too tightly, and call it hung."""
    fit = StepCostFit()
    for _ in range(200):
        fit.add(StepContent(2048, 2048 * 1024.0, 0, 100), 0.2, is_plain=True)
    fit.take_in()
    assert fit.familiar_s(StepContent(2048, 2048 * 1024.0, 0, 100)) == pytest.approx(0.2, rel=0.2)
    assert fit.familiar_s(StepContent(2048, 2048 * 120_000.0, 0, 119_000)) is None
