"""Orders to one worker over HTTP: it has obeyed when the answer comes, and somebody is left who writes answers."""

import asyncio
from functools import partial

import pytest

from tests.router.conftest import PATIENCE
from twostroke.protocol.messages import Drain
from twostroke.router.http import worker_orders

FLEXIBLE = PATIENCE.model_copy(update={"roles": "flexible"})
ASK = {"model": "fake", "prompt": "abc", "max_tokens": 3, "ignore_eos": True}


@pytest.fixture
def flexible_site_of(site_of):
    return partial(site_of, pipeline_config=FLEXIBLE)


def is_known(site, *names: str) -> bool:
    """Return whether the router has numbers of each of these workers: orders are judged by them."""
    known = {info.peer.worker_id for info in site.service.fleet.workers() if site.service.channels.stats(info.peer)}
    return known.issuperset(names)


async def obeyed(site, name: str, **order) -> dict:
    answer = await site.http.post(f"/workers/{name}", json=order)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def refused(site, name: str, **order) -> tuple[int, str]:
    answer = await site.http.post(f"/workers/{name}", json=order)
    error = answer.json()["error"]
    return answer.status_code, error["code"]


async def test_a_worker_that_is_to_drain_gets_nothing_until_it_is_to_resume(flexible_site_of, until) -> None:
    async with flexible_site_of(0, 2) as site:
        await until(lambda: is_known(site, "d0", "d1"))
        row = await obeyed(site, "d0", draining=True)
        assert (row["worker_id"], row["stats"]["is_draining"]) == ("d0", True)
        for _ in range(4):
            assert (await site.http.post("/v1/completions", json=ASK)).status_code == 200
        assert not site.rig["d0"].seen
        assert not (await obeyed(site, "d0", draining=False))["stats"]["is_draining"]
        assert await refused(site, "d9", draining=True) == (404, "worker_not_found")


async def test_the_last_that_writes_answers_keeps_doing_so(flexible_site_of, until) -> None:
    async with flexible_site_of(1, 2) as site:
        await until(lambda: is_known(site, "p0", "d0", "d1"))
        await obeyed(site, "d0", role="prefill")
        assert await refused(site, "d1", role="prefill") == (409, "last_decode_worker")
        assert await refused(site, "d1", draining=True) == (409, "last_decode_worker")
        await obeyed(site, "p0", role="even")
        await obeyed(site, "d1", draining=True)


async def test_a_worker_that_changed_its_role_is_chosen_by_the_new_one(flexible_site_of, until) -> None:
    async with flexible_site_of(1, 1) as site:
        await until(lambda: is_known(site, "p0", "d0"))
        await obeyed(site, "p0", role="decode")
        await obeyed(site, "d0", role="prefill")
        assert (await site.http.post("/v1/completions", json=ASK)).status_code == 200
        assert [request.num_prompt_tokens for request in site.rig["p0"].seen], "the answer is written there"
        numbers = site.service.demand()
        assert (numbers["prefill.running"], numbers["decode.running"]) == (1.0, 1.0)


async def test_of_two_orders_at_once_one_leaves_somebody_who_writes(flexible_site_of, until) -> None:
    async with flexible_site_of(0, 2) as site:
        await until(lambda: is_known(site, "d0", "d1"))
        orders = [site.http.post(f"/workers/{name}", json={"draining": True}) for name in ("d0", "d1")]
        assert [answer.status_code for answer in await asyncio.gather(*orders)] == [200, 409]


@pytest.mark.parametrize("order", [{"draining": True}, {"role": "prefill"}])
async def test_of_two_routers_orders_at_once_none_leaves_nobody_who_writes(
    flexible_site_of, until, monkeypatch, order
) -> None:
    obeyed_here = worker_orders._obeyed

    async def obeyed_while_another_router_orders(own, info, service) -> None:
        await obeyed_here(own, info, service)
        (other,) = [one.peer for one in service.fleet.workers() if one.peer != info.peer]
        service.channels.send(other, Drain(is_ordered=True))

    monkeypatch.setattr(worker_orders, "_obeyed", obeyed_while_another_router_orders)
    async with flexible_site_of(0, 2) as site:
        await until(lambda: is_known(site, "d0", "d1"))
        assert await refused(site, "d0", **order) == (409, "last_decode_worker")
        peer = next(info.peer for info in site.service.fleet.workers() if info.peer.worker_id == "d0")
        await until(lambda: not site.service.channels.stats(peer).is_draining)
        await until(lambda: site.service.channels.stats(peer).step_role != "prefill")


async def test_flexible_workers_serve_though_no_decode_worker_is_left(flexible_site_of, until) -> None:
    async with flexible_site_of(1, 1) as site:
        await until(lambda: is_known(site, "p0", "d0"))
        await site.rig["d0"].die()
        assert (await site.http.get("/ready")).status_code == 200
        answer = await site.http.post("/v1/completions", json={**ASK, "return_stages": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["stages"][0]["path"] == "prefill"
        status = (await site.http.get("/status")).json()
        assert status["paths"] == {"prefill": 1}


async def test_fixed_roles_and_wrong_orders_are_refused(site_of, flexible_site_of, until) -> None:
    async with site_of(1, 1) as site:
        await until(lambda: not site.service.missing())
        assert await refused(site, "p0", role="decode") == (409, "roles_are_fixed")
    async with flexible_site_of(1, 1) as site:
        for order in ({}, {"role": "both"}, {"draining": True, "drained": 1}):
            answer = await site.http.post("/workers/p0", json=order)
            assert answer.status_code == 400, answer.text


async def test_a_worker_that_does_not_obey_is_told(flexible_site_of, until, monkeypatch) -> None:
    monkeypatch.setattr(worker_orders, "ANSWER_S", 0.05)
    async with flexible_site_of(1, 1) as site:
        await until(lambda: not site.service.missing())
        site.rig["p0"].obeys = False
        assert await refused(site, "p0", role="decode") == (503, "worker_silent")
