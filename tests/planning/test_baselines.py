"""Ways to batch, and orders, against what the literature found them to do."""

import random
from itertools import pairwise

import pytest
from msgspec.structs import replace

from twostroke.loadtests.plan import SLO, Plan, Poisson, Synthetic
from twostroke.planning.baselines import (
    CHUNKED,
    WAYS,
    BaselineMemory,
    BaselineResult,
    Tokens,
    Way,
    compare_baselines,
    serve_way,
)
from twostroke.planning.costs.profiles import SMALL
from twostroke.planning.exact import VOCABULARY, simulate_plan
from twostroke.planning.layouts import Layout
from twostroke.worker.config import QueuePolicy
from twostroke.worker.profile import WorkerProfile

TIGHT: WorkerProfile = replace(SMALL, kv_tokens=14_000)


def trace(count: int = 250, rate: float = 5.0) -> list[Tokens]:
    draw = random.Random(3)
    at_s = 0.0
    found: list[Tokens] = []
    for _ in range(count):
        at_s += draw.expovariate(rate)
        found.append(
            (at_s, min(4000, round(draw.lognormvariate(6.4, 0.8))), round(draw.lognormvariate(4.6, 1.0)) + 1, "")
        )
    return found


def served(way: Way, order: str = "fcfs", profile: WorkerProfile = TIGHT, count: int = 250) -> BaselineResult:
    return serve_way(trace(count), profile, way, order, SLO(ttft_s=1.0), 2)


def of_name(name: str) -> Way:
    return next(way for way in WAYS if way.name == name)


def test_the_more_is_known_of_an_answer_the_less_memory_is_wasted() -> None:
    names = ("contiguous: largest", "contiguous: power of two", "contiguous: oracle")
    wastes = [served(of_name(f"iteration, {name}")).waste or 0.0 for name in names]
    wastes.append(served(of_name("iteration, paged")).waste or 0.0)
    assert wastes == sorted(wastes, reverse=True)
    assert wastes[0] > 0.5
    assert wastes[-1] < 0.05


def test_requests_that_join_between_steps_wait_less_than_those_that_wait_for_a_batch() -> None:
    wide = replace(SMALL, kv_tokens=60_000)
    static, iteration = (
        served(of_name(name), profile=wide) for name in ("static batching", "iteration, contiguous: largest")
    )
    assert static.ttft_mean_s > 2 * iteration.ttft_mean_s
    assert static.output_rate <= iteration.output_rate


def test_without_a_cache_every_token_costs_a_prompt() -> None:
    without, with_cache = (served(of_name(name), count=30) for name in ("no KV cache", "iteration, paged"))
    assert without.tpot_mean_s > 10 * with_cache.tpot_mean_s
    assert without.waste is None


def test_chunks_shorten_the_longest_waits_between_tokens_and_pairs_of_workers_more_so() -> None:
    profile = replace(SMALL, kv_tokens=200_000)
    whole, pair = (served(of_name(name), profile=profile) for name in ("iteration, paged", "disaggregated, paged"))
    assert pair.tpot_p90_s < whole.tpot_p90_s


@pytest.mark.parametrize("order", ["sjf", "sjf oracle"])
def test_short_answers_first_shorten_the_mean_wait_where_memory_is_short(order: str) -> None:
    scarce = replace(SMALL, kv_tokens=9_000)
    fcfs, sjf = (served(CHUNKED, one, scarce, count=600) for one in ("fcfs", order))
    assert sjf.ttft_mean_s < 0.9 * fcfs.ttft_mean_s


def test_the_server_itself_makes_the_mean_wait_shorter_by_short_answers_first_where_memory_is_short() -> None:
    azure = Synthetic(shape="azure-conv")
    plan = Plan("simulated", "", 8192, Poisson(7.0), azure, SLO(), 1e9, seed=2, vocabulary=VOCABULARY)
    layout = Layout("aggregated", replace(SMALL, kv_tokens=12_000), 2)
    means_s: list[float] = []
    order: tuple[QueuePolicy, ...] = ("fcfs", "sjf")
    for queue in order:
        records = simulate_plan(plan, layout, most=150, queue=queue)
        means_s.append(sum(one.ttft_s or 0.0 for one in records))
    assert means_s[1] < 0.9 * means_s[0]


def test_pieces_of_memory_never_overlap_and_come_back_whole() -> None:
    draw = random.Random(4)
    memory = BaselineMemory(1000)
    held: list[tuple[int, int]] = []
    for _ in range(2000):
        if held and draw.random() < 0.5:
            memory.give_back(held.pop(draw.randrange(len(held))))
        elif (place := memory.take(draw.randint(1, 200))) is not None:
            held.append(place)
        ends = sorted(held)
        assert all(begin + size <= after for (begin, size), (after, _) in pairwise(ends))
        assert memory.reserved == sum(size for _, size in held)
    for place in held:
        memory.give_back(place)
    assert memory.take(1000) == (0, 1000)


def test_the_table_has_every_way_and_every_order() -> None:
    lines: list[str] = []
    told = compare_baselines(trace(20), SMALL, SLO(), 2, lines.append)
    assert len(told["baselines"]) == len(lines) - 1 == len(WAYS) + 3
