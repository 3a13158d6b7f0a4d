"""Workers in closed form agree with the exact simulation on small fleets, as docs/design/simulation.md states."""

import math
import random
from functools import cache

import pytest

from twostroke.loadtests.report.estimates import percentile
from twostroke.planning.coarse.fleet import CoarseFleet, run
from twostroke.planning.coarse.simulated_router import SimulatedRouter
from twostroke.planning.coarse.workers import CoarseDecodeWorker, CoarseRequest
from twostroke.planning.costs.profiles import SMALL
from twostroke.router.routing.chooser import Roles
from twostroke.router.slo.classes import SLOClass, SLOConfig
from twostroke.simulator.deployment import TracedRequest, serve
from twostroke.worker.profile import CALL_S, WorkerProfile

WARM = 50  # requests: until then a live router does not know what steps cost, and chooses by load
COUNT = 250
Fleet = tuple[int, int, float, Roles] | tuple[int, int, float, Roles, float, float]
"""Prefill and decode workers, requests a second, and the logarithms of usual prompts and answers."""
LONG_PROMPTS: Fleet = (1, 1, 2.0, "flexible", 6.4, 5.5)
LONG_ANSWERS: Fleet = (2, 1, 4.0, "flexible", 5.0, 5.5)


def lengths(
    count: int, rate: float, seed: int = 0, log_prompt: float = 6.4, log_answer: float = 4.1
) -> list[tuple[float, int, int]]:
    draw = random.Random(seed)
    at_s = 0.0
    found = []
    for _ in range(count):
        at_s += draw.expovariate(rate)
        prompt = max(2, min(6000, round(draw.lognormvariate(log_prompt, 0.8))))
        found.append((at_s, prompt, max(2, round(draw.lognormvariate(log_answer, 0.6)))))
    return found


def coarse(
    trace: list[tuple[float, int, int]],
    prefill: int,
    decode: int,
    *,
    slo: SLOConfig | None = None,
    candidates: int = 4,
    roles: Roles = "flexible",
    profile: WorkerProfile = SMALL,
) -> list[CoarseRequest]:
    router = SimulatedRouter(slo or SLOConfig(), candidates=candidates, roles=roles)
    fleet = CoarseFleet(profile, 0.0, math.inf, math.inf, router=router)
    requests = [CoarseRequest(*one) for one in trace]
    run(fleet, requests, lambda _: (prefill, decode), (prefill, decode), requests[-1].at_s)
    return requests


@cache
def both(
    prefill: int, decode: int, rate: float, roles: Roles, log_prompt: float = 6.4, log_answer: float = 4.1
) -> dict[str, tuple[list[float], list[float]]]:
    """TTFTs, TPOTs, answers that prefill workers ended, and moves of streams: exact and coarse."""
    trace = lengths(COUNT, rate, log_prompt=log_prompt, log_answer=log_answer)
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
        "by prefill": ([one.ended_at == "prefill" for one in exact], [one.ended_at == "prefill" for one in closed]),
        "moves": ([one.num_moves for one in exact], [one.num_moves for one in closed]),
    }


@pytest.mark.parametrize(("figure", "bound"), [("ttft", 0.2), ("tpot", 0.12)])
@pytest.mark.parametrize("fleet", [(2, 2, 4.0, "fixed"), (0, 2, 3.0, "fixed"), LONG_PROMPTS, LONG_ANSWERS])
def test_small_fleets_are_as_quick_as_event_by_event(fleet: Fleet, figure: str, bound: float) -> None:
    exact, closed = both(*fleet)[figure]
    assert sum(closed) == pytest.approx(sum(exact), rel=bound)
    for share in (50, 90):
        assert percentile(closed, share) == pytest.approx(percentile(exact, share), rel=bound)


@pytest.mark.parametrize("fleet", [LONG_PROMPTS, LONG_ANSWERS])
def test_prefill_workers_write_as_many_answers_as_event_by_event(fleet: Fleet) -> None:
    exact, closed = both(*fleet)["by prefill"]
    assert sum(closed) / len(closed) == pytest.approx(sum(exact) / len(exact), abs=0.08)
    assert sum(exact) / len(exact) > 0.1


def test_about_as_many_streams_move_away_from_prompts_as_event_by_event() -> None:
    exact, closed = both(*LONG_PROMPTS)["moves"]
    assert 0.5 * sum(exact) < sum(closed) < 1.2 * sum(exact)
    assert sum(exact) > 20


def test_a_stream_that_moves_stands_still_for_a_part_of_a_blocks_prefill() -> None:
    """One stream, whose prefill worker gets a prompt after two seconds: the decode worker is idle."""
    stream, prompt = CoarseRequest(0.0, 100, 1_000), CoarseRequest(2.0, 4_000, 2)
    router = SimulatedRouter(SLOConfig())
    fleet = CoarseFleet(SMALL, 0.0, math.inf, math.inf, router=router)
    fleet.scale(1, 1, 0.0)
    router.follow(fleet.prefill, fleet.decode, 0.0)
    router.choose = lambda request, now_s: (fleet.prefill[0],) * 2  # type: ignore[method-assign]
    run(fleet, [stream, prompt], lambda _: (1, 1), (1, 1), 2.0)
    alone = CoarseDecodeWorker(SMALL, 0.0, 0.0)
    alone.join(CoarseRequest(0.0, 100, 1_000), 0.0)
    waited_s = SMALL.costs.prefill_s(4_000, 0, SMALL.step_tokens)
    assert (stream.num_moves, stream.ended_at, prompt.ended_at) == (1, "decode", "prefill")
    late_s = stream.last_s - stream.first_s - alone.next_end_s()
    assert 0.005 < late_s < 0.6 * waited_s  # of a step of prompts, until it moved, and of the move


def test_a_draining_workers_streams_go_on_at_others_at_once() -> None:
    def scaler(fleet: CoarseFleet) -> tuple[int, int]:
        return 0, 2 if fleet.now_s < 5 else 1

    hours = []
    for moves in (False, True):
        fleet = CoarseFleet(SMALL, 0.0, math.inf, math.inf, SimulatedRouter(SLOConfig(), moves=moves))
        requests = [CoarseRequest(0.1 * number, 50, 3_000) for number in range(10)]
        run(fleet, requests, scaler, (0, 2), 30.0)
        assert fleet.moved == (5 if moves else 0)
        assert all(one.last_s < math.inf for one in requests)
        hours.append(fleet.worker_s())
    assert hours[1] == pytest.approx(30 + 5, abs=1.5)
    assert hours[1] < hours[0] - 5


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
