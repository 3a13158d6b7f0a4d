"""What a router fetches of the others for a scrape, whatever becomes of them."""

import asyncio

import pytest
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentBroadcastResponse

from twostroke.cluster.deployments import router as other_routers
from twostroke.cluster.deployments.router import OtherRouters
from twostroke.router.observe.scrape import RouterReading


def reading(router):
    return RouterReading(router, (), (), frozenset())


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


@pytest.mark.parametrize("error", [RayServeException("no replicas"), TimeoutError()])
async def test_where_serve_names_no_routers_a_scrape_tells_of_the_own_one(error):
    assert await others_of(error=error) == []


def test_ray_still_has_what_is_used_though_it_is_not_public():
    assert callable(DeploymentBroadcastResponse._fetch_replica_results_async)
