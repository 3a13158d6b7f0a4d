"""Workers in closed form agree with the exact simulation on small fleets, as docs/design/simulation.md states."""

import math
import random
from functools import cache

import pytest

from twostroke.loadtests.report.estimates import percentile
from twostroke.planning.coarse.fleet import CoarseFleet, run
from twostroke.planning.coarse.live_router import LiveRouter
from twostroke.planning.coarse.workers import CoarseRequest
from twostroke.planning.costs.profiles import SMALL
from twostroke.router.routing.chooser import Roles
from twostroke.router.slo.classes import SLOClass, SLOConfig
from twostroke.simulator.deployment import TracedRequest, serve
from twostroke.worker.profile import CALL_S

WARM = 50  # requests: until then a live router does not know what steps cost, and chooses by load
COUNT = 250


def lengths(count: int, rate: float, seed: int = 0) -> list[tuple[float, int, int]]:
    draw = random.Random(seed)
    at_s = 0.0
    found = []
    for _ in range(count):
        at_s += draw.expovariate(rate)
        prompt = max(2, min(6000, round(draw.lognormvariate(6.4, 0.8))))
        found.append((at_s, prompt, max(2, round(draw.lognormvariate(4.1, 0.6)))))
    return found


def coarse(
    trace: list[tuple[float, int, int]],
    prefill: int,
    decode: int,
    *,
    slo: SLOConfig | None = None,
    candidates: int = 4,
    roles: Roles = "flexible",
) -> list[CoarseRequest]:
    router = LiveRouter(slo or SLOConfig(), candidates=candidates, roles=roles)
    fleet = CoarseFleet(SMALL, 0.0, math.inf, math.inf, router=router)
    requests = [CoarseRequest(*one) for one in trace]
    run(fleet, requests, lambda _: (prefill, decode), (prefill, decode), requests[-1].at_s)
    return requests


@cache
def both(prefill: int, decode: int, rate: float, roles: Roles) -> dict[str, tuple[list[float], list[float]]]:
    """TTFTs and TPOTs, exact and coarse."""
    trace = lengths(COUNT, rate)
    draw = random.Random(1)
    asked = [TracedRequest(at_s, tuple(draw.choices(range(30_000), k=prompt)), out) for at_s, prompt, out in trace]
    exact = serve(
        asked,
        "kv_aware",
        SMALL,
        roles=roles,
        prefill=prefill,
        decode=decode,
        prefill_cache_tokens=SMALL.kv_tokens,
        decode_cache_tokens=SMALL.kv_tokens,
    ).served[WARM:]
    closed = coarse(trace, prefill, decode, roles=roles)[WARM:]
    return {
        "ttft": ([one.ttft_s for one in exact], [one.ttft_s + CALL_S for one in closed]),
        "tpot": ([one.tpot_s for one in exact], [one.tpot_s for one in closed]),
    }


@pytest.mark.parametrize(("figure", "bound"), [("ttft", 0.2), ("tpot", 0.12)])
@pytest.mark.parametrize(
    "fleet", [(2, 2, 4.0, "fixed"), (2, 2, 4.0, "flexible"), (1, 1, 2.5, "flexible"), (0, 2, 3.0, "fixed")]
)
def test_small_fleets_are_as_quick_as_event_by_event(
    fleet: tuple[int, int, float, Roles], figure: str, bound: float
) -> None:
    exact, closed = both(*fleet)[figure]
    assert sum(closed) == pytest.approx(sum(exact), rel=bound)
    for share in (50, 90):
        assert percentile(closed, share) == pytest.approx(percentile(exact, share), rel=bound)


def test_a_few_candidates_are_as_good_as_all() -> None:
    trace = lengths(1_000, 55.0)
    few, all_of_them = (coarse(trace, 24, 24, candidates=count) for count in (4, 24))
    for one in ("ttft_s", "tpot_s"):
        means = [sum(getattr(request, one) for request in run) / len(run) for run in (few, all_of_them)]
        assert means[0] == pytest.approx(means[1], rel=0.1)


def test_the_same_trace_gives_the_same_times() -> None:
    trace = lengths(300, 8.0)
    first, again = (coarse(trace, 2, 2) for _ in range(2))
    assert [one.last_s for one in first] == [one.last_s for one in again]


def test_the_live_admission_refuses_what_would_be_late() -> None:
    promised = SLOConfig(classes=(SLOClass(name="standard", ttft_s=1.0, tpot_s=0.05),))
    served = coarse(lengths(1_500, 30.0), 2, 2, slo=promised)
    refused = sum(one.is_refused for one in served)
    admitted = sorted(one.ttft_s for one in served if not one.is_refused)
    assert 0.2 * len(served) < refused < 0.95 * len(served)
    assert admitted[int(0.9 * len(admitted))] < 1.5
