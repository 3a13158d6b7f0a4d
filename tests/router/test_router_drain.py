"""A router that is about to end says so first, and lets its streams end."""

import asyncio
import json

import httpx

ASKED = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 8}


async def test_it_is_not_ready_and_takes_requests_until_load_balancers_have_noticed(site_of, until):
    async with site_of(0, 1) as site:
        await until(lambda: not site.service.missing())
        site.service.gate.drain(notice_s=1000.0)
        assert (await site.http.get("/ready")).status_code == 503
        assert (await site.http.get("/health")).status_code == 200
        assert (await site.http.post("/v1/completions", json=ASKED)).status_code == 200


async def test_after_that_it_takes_nothing_new_and_finishes_what_it_has(site_of, until):
    async with site_of(0, 1) as site:
        worker = site.rig["d0"]
        worker.gate = asyncio.Semaphore(2)
        begun = asyncio.create_task(site.http.post("/v1/completions", json=ASKED))
        await until(lambda: worker.owned)
        site.service.gate.drain(notice_s=0.0)
        late = await site.http.post("/v1/completions", json=ASKED)
        assert late.status_code == 503
        assert "retry-after" in late.headers
        assert site.service.gate.num_choices == 1
        for _ in range(8):
            worker.gate.release()
        assert (await begun).status_code == 200
        assert site.service.gate.num_choices == 0


def _is_shutting_down(error):
    return (error["code"], error["type"]) == ("shutting_down", "server_error")


async def test_what_has_not_ended_in_time_ends_with_an_error_that_says_so(site_of, until):
    async with site_of(0, 1) as site:
        worker = site.rig["d0"]
        worker.gate = asyncio.Semaphore(2)
        begun = asyncio.create_task(site.http.post("/v1/completions", json=ASKED))
        await until(worker.gate.locked)
        site.service.gate.drain(notice_s=0.0)
        assert site.service.gate.cut() == 1
        answer = await begun
        assert answer.status_code == 503
        assert _is_shutting_down(answer.json()["error"])
        assert site.service.gate.num_choices == 0
        assert site.service.gate.cut() == 0


async def test_a_stream_that_has_not_ended_in_time_ends_with_an_error_as_its_last_event(site_of):
    async with site_of(0, 1, listen=True) as site, httpx.AsyncClient() as http:
        site.rig["d0"].gate = asyncio.Semaphore(2)
        asked = {**ASKED, "stream": True, "return_token_ids": True}
        async with http.stream("POST", f"{site.url}/v1/completions", json=asked) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            site.service.gate.drain(notice_s=0.0)
            assert site.service.gate.cut() == 1
            *_, last = [line async for line in lines if line]
        assert answer.status_code == 200
        assert _is_shutting_down(json.loads(last.removeprefix("data: "))["error"])
        assert site.service.gate.num_choices == 0
        assert site.service.gate.cut() == 0


async def test_a_request_that_has_no_token_yet_is_refused_when_the_server_is_cut(site_of, until):
    async with site_of(0, 1) as site:
        worker = site.rig["d0"]
        worker.gate = asyncio.Semaphore(0)
        begun = asyncio.create_task(site.http.post("/v1/completions", json={**ASKED, "stream": True}))
        await until(lambda: worker.owned)
        site.service.gate.cut()
        answer = await begun
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert "retry-after" in answer.headers
        assert (await site.http.post("/v1/completions", json=ASKED)).status_code == 503
