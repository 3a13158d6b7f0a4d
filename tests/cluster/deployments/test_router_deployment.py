"""Routers among each other: what one fetches of the others for a scrape, and how all of them end."""

import asyncio

import pytest
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentBroadcastResponse

from twostroke.cluster.deployments import router as other_routers
from twostroke.cluster.deployments.router import OtherRouters, drain_routers
from twostroke.router.observe.scrape import RouterMetricsSample
from twostroke.simulator.virtual_loop import run_virtually


def reading(router):
    return RouterMetricsSample(router, (), (), frozenset())


class FakeRouters:
    """A deployment's handle; an answer is a reading, an error, None from a router that begins, or `hangs`."""

    def __init__(self, *answers, error=None):
        self.answers = answers
        self.error = error

    def broadcast(self, method):
        assert method == "reading"
        return self

    async def _fetch_replica_results_async(self):
        if self.error is not None:
            raise self.error
        return [FakeCall(answer) for answer in self.answers]


class FakeCall:
    def __init__(self, answer):
        self.answer = answer

    async def get_async(self):
        if self.answer == "hangs":
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def others_of(*answers, error=None):
    return [one.router for one in await OtherRouters(FakeRouters(*answers, error=error), "own").readings()]


async def test_all_routers_are_asked_and_all_but_the_own_told():
    assert await others_of(reading("a"), reading("own"), reading("b")) == ["a", "b"]


async def test_routers_that_die_hang_or_just_begin_cost_nobody_elses_numbers(monkeypatch):
    monkeypatch.setattr(other_routers, "ANSWER_S", 0.02)
    assert await others_of(reading("a"), RayServeException("gone"), "hangs", None, reading("b")) == ["a", "b"]


async def test_the_numbers_of_a_router_of_another_version_are_not_read():
    """Its workers' numbers are where this version looks for others."""
    older, newer = reading("older"), reading("newer")
    del older.__dict__["protocol"]
    object.__setattr__(newer, "protocol", "0" * 16)
    assert await others_of(older, reading("a"), newer) == ["a"]


@pytest.mark.parametrize("error", [RayServeException("no replicas"), TimeoutError()])
async def test_where_serve_names_no_routers_a_scrape_tells_of_the_own_one(error):
    assert await others_of(error=error) == []


def test_ray_still_has_what_is_used_though_it_is_not_public():
    assert callable(DeploymentBroadcastResponse._fetch_replica_results_async)


def drained(counts: list[int], *, grace_s: float = 10.0, notice_s: float = 0.0) -> tuple[list[str], list[str], float]:
    """(what the routers were asked, what people were told, seconds) where `counts` are under way from look to look."""
    asked: list[str] = []
    told: list[str] = []

    async def ask(method: str) -> int:
        asked.append(method)
        return counts.pop(0) if len(counts) > 1 else counts[0]

    async def script() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await drain_routers(ask, grace_s, notice_s, told.append, loop.time)
        return loop.time() - began

    took_s = run_virtually(script())
    return asked, told, took_s


def test_idle_routers_end_at_once_and_nothing_is_said() -> None:
    asked, told, took_s = drained([0])
    assert ("cut" in asked, told, took_s) == (False, [], 0.0)


def test_load_balancers_get_their_time_to_notice() -> None:
    assert 3.0 <= drained([0], notice_s=3.0)[2] < 3.5


def test_answers_that_end_in_time_are_waited_for_and_not_cut() -> None:
    asked, told, took_s = drained([2, 2, 1, 0])
    assert told == ["Waiting up to 10 s for 2 answers under way ..."]
    assert "cut" not in asked
    assert took_s < 1.0


def test_answers_that_do_not_end_are_cut_shortly_before_the_end_and_counted() -> None:
    asked, told, took_s = drained([3, 1])
    assert told == [
        "Waiting up to 10 s for 3 answers under way ...",
        "Cut 1 answer that had not ended in time.",
    ]
    assert asked.count("cut") == 1
    assert 9.5 <= took_s <= 10.5


def test_a_server_whose_answers_are_cut_ends_when_their_clients_have_been_told() -> None:
    assert 9.4 <= drained([1] * 51 + [0])[2] <= 9.9
