"""Queueing formulas against cases whose answer is known, and against nothing getting better by more load."""

import math
import random
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from msgspec import structs

from twostroke.planning.layouts import Layout, Mode, batch_sizes, erlang_c, late_s, queue_wait, rows_s
from twostroke.planning.workload import SLOTargets, Workload, parse_promise
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import StepCosts
from twostroke.worker.profile import WorkerProfile

COSTS = StepCosts(base_s=2.9e-3, token_s=1.83e-4, pair_s=4.0e-8, row_s=2.0e-4, context_s=4.5e-7)
KIND = WorkerProfile("cpu", COSTS, 12_288.0, 200_000, 1e9, 2048, 256, "", num_layers=12, hardware="cpu")
PROMISE = SLOTargets(ttft_s=1.0, tpot_s=0.03)
WORKLOAD = Workload("two lengths", ((200, 40), (1200, 100)))


def test_one_server_waits_as_pollaczek_and_erlang_say() -> None:
    assert erlang_c(1, 0.7) == pytest.approx(0.7)
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)
    memoryless, constant = queue_wait(0.8, 1, 1.0, 2.0), queue_wait(0.8, 1, 1.0, 1.0)
    assert memoryless is not None
    assert constant is not None
    assert memoryless.mean_s == pytest.approx(4.0)
    assert constant.mean_s == pytest.approx(2.0)
    assert memoryless.share_within(np.array([3.0, -1.0])) == pytest.approx((1 - 0.8 * math.exp(-0.2 * 3.0)) / 2)
    assert queue_wait(1.0, 1, 1.0, 1.0) is None


def test_a_batch_is_poissons_where_steps_are_alike_and_geometric_where_rows_share_all_of_them() -> None:
    alike = structs.replace(KIND, costs=StepCosts(base_s=0.01, token_s=0.0, pair_s=0.0, row_s=0.0, context_s=0.0))
    poisson = batch_sizes(alike, WORKLOAD, rate=10.0)
    assert poisson is not None
    assert (poisson.mean, poisson.variance) == (pytest.approx(7.0), pytest.approx(7.0))
    shared = structs.replace(KIND, costs=StepCosts(base_s=0.0, token_s=0.0, pair_s=0.0, row_s=0.001, context_s=0.0))
    geometric = batch_sizes(shared, WORKLOAD, rate=10.0)  # busy for 0.7 of the time
    assert geometric is not None
    assert (geometric.mean, geometric.variance) == (pytest.approx(0.7 / 0.3), pytest.approx(0.7 / 0.3**2, rel=1e-4))
    assert batch_sizes(KIND, WORKLOAD, rate=1e4) is None


def test_a_batch_obeys_littles_law() -> None:
    batch = batch_sizes(KIND, WORKLOAD, rate=10.0)
    assert batch is not None
    step_s = rows_s(KIND, batch.mean + 1, WORKLOAD.mean_context)  # an answer's, beside those that it met
    assert batch.mean == pytest.approx(10.0 * WORKLOAD.mean_answer * step_s, rel=0.01)


def test_kv_that_the_link_cannot_carry_never_comes() -> None:
    slow = structs.replace(KIND, link_bytes_per_s=1e6)
    assert late_s(KIND, 1000, 1.0, 700.0) < late_s(slow, 1000, 0.01, 700.0) < math.inf
    assert math.isinf(late_s(slow, 1000, 1000.0, 700.0))


@pytest.mark.parametrize("mode", get_args(Mode))
def test_more_load_never_keeps_a_promise_better_and_more_workers_serve_more(mode: str) -> None:
    def of(prefill: int, decode: int) -> Layout:
        if mode == "aggregated":
            return Layout("aggregated", KIND, prefill + decode)
        return Layout(mode, KIND, decode, KIND, prefill)  # type: ignore[arg-type]

    met = [of(1, 1).met(WORKLOAD, PROMISE, rate) for rate in (0.5, 1, 2, 4, 8, 16)]
    for better, worse in pairwise(met):
        assert worse.ttft <= better.ttft + 1e-9
        assert worse.tpot <= better.tpot + 1e-9
        assert worse.room <= better.room + 1e-9
    assert of(1, 1).goodput(WORKLOAD, PROMISE) < of(2, 2).goodput(WORKLOAD, PROMISE)
    assert of(1, 1).goodput(WORKLOAD, replace(PROMISE, tpot_s=0.02)) <= of(1, 1).goodput(WORKLOAD, PROMISE)


def test_what_binds_is_what_was_made_scarce() -> None:
    def binds(profile: WorkerProfile, **more: float) -> str:
        layout = Layout("disaggregated", profile, 1, structs.replace(profile, **more), 1)  # type: ignore[arg-type]
        rate = layout.goodput(WORKLOAD, PROMISE)
        return layout.met(WORKLOAD, PROMISE, 1.05 * rate).binds(PROMISE)

    assert binds(KIND) == "FLOPs"
    quick = structs.replace(KIND, costs=StepCosts(2.9e-3, 1e-6, 0.0, 1e-6, 4.5e-7))
    assert binds(quick) == "bandwidth"
    assert binds(structs.replace(quick, kv_tokens=4000)) == "KV memory"
    assert binds(quick, link_bytes_per_s=2e7) == "link"


def test_a_workloads_few_requests_stand_for_all() -> None:
    draw = random.Random(0)
    lengths = tuple((draw.randint(1, 4000), draw.randint(1, 300)) for _ in range(1000))
    workload = Workload("drawn", lengths)
    few = workload.strata
    assert len(few) < 100
    assert sum(prompt for prompt, _ in few) / len(few) == pytest.approx(workload.mean_prompt, rel=0.02)


@pytest.mark.parametrize("text", ["ttft_p90_s=1", "ttft_p90_s=1,tpot_p90_s=0", "ttft_p20_s=1,tpot_p90_s=1", "ttft=1"])
def test_a_promise_that_says_too_little_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_promise(text)


def test_a_promise_is_read_with_its_percentiles() -> None:
    assert parse_promise("ttft_p99_s=2,tpot_p50_s=0.1") == SLOTargets(2.0, 0.1, 0.99, 0.5)


def test_idle_prefill_workers_write_answers_unless_roles_are_fixed() -> None:
    long_answers = Workload("long answers", ((64, 300), (200, 400)))
    fixed, hybrid = (Layout(mode, KIND, 1, KIND, 2) for mode in ("fixed", "hybrid"))
    promise = replace(PROMISE, tpot_s=0.008)
    served = fixed.goodput(long_answers, promise)
    assert 1.05 * served < hybrid.goodput(long_answers, promise) < 3 * served
    long_prompts = Workload("long prompts", ((3000, 4),))
    assert hybrid.goodput(long_prompts, PROMISE) == pytest.approx(fixed.goodput(long_prompts, PROMISE), rel=0.05)
