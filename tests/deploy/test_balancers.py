"""deploy/haproxy.cfg and deploy/nginx.conf in the real programs, in front of two entry points that do as the test says.

With real servers, under load and with one of them killed: python -m tests.deploy.balancers
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from tests.deploy.programs import DEPLOY, environment, haproxies, needed, run
from tests.deploy.proxies import Proxy, adapted, haproxy_config, nginx_command, nginx_config, running, started
from tests.deploy.stub_entry import StubEntry, two_entries
from tests.rigs.processes import comes
from twostroke.cluster.local.ray import free_ports

PATH = "/v1/completions"
WAIT_S = 10.0  # for what must come; nothing waits so long where all is well
MAX_BODY = 8 * 2**20


@dataclass
class Site:
    """A balancer, what is behind it, and a client in front."""

    kind: str
    proxy: Proxy
    one: StubEntry
    two: StubEntry
    client: httpx.AsyncClient

    async def ask(self, **more) -> httpx.Response:
        return await self.client.post(PATH, **{"json": {"prompt": "x"}, **more})

    async def reached(self) -> tuple[StubEntry, StubEntry]:
        """The entry point that the only request so far has reached, and the other."""
        assert await comes(lambda: self.one.asked or self.two.asked, WAIT_S)
        return (self.one, self.two) if self.one.asked else (self.two, self.one)


@pytest.fixture(params=["haproxy", "nginx"])
async def site(request, tmp_path) -> AsyncIterator[Site]:
    program = needed(request.param)
    async with two_entries() as (one, two), httpx.AsyncClient(timeout=WAIT_S, verify=False) as client:
        balancer = running(request.param, program, [one.port, two.port], tmp_path, check="50ms")
        proxy = await asyncio.to_thread(balancer.__enter__)  # which waits, while both are asked whether they are ready
        try:
            client.base_url = proxy.url
            yield Site(request.param, proxy, one, two, client)
        finally:
            await asyncio.to_thread(balancer.__exit__, None, None, None)


def test_haproxy_takes_the_file_as_it_is():
    needed("haproxy")
    for program in haproxies():
        done = run(program, "-c", "-f", str(DEPLOY / "haproxy.cfg"), env=environment())
        assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr


def test_nginx_takes_the_file(tmp_path):
    config = tmp_path / "nginx.conf"
    config.write_text(nginx_config([8001, 8002], 8080, 8081, tmp_path), encoding="utf-8")
    done = run(*nginx_command(needed("nginx"), config, "-t"), env=environment())
    assert (done.returncode, "warn" in done.stderr) == (0, False), done.stderr


async def test_each_event_leaves_before_the_next_is_there(site):
    site.one.manner = site.two.manner = "stream"
    async with site.client.stream("POST", PATH, json={"stream": True}) as answer:
        entry, _ = await site.reached()
        parts = answer.aiter_raw()
        for number in range(5):
            entry.events.put_nowait(b"data: %d\n\n" % number)
            assert await anext(parts) == b"data: %d\n\n" % number
        entry.events.put_nowait(None)
        assert [part async for part in parts] == []


async def test_a_client_that_leaves_is_gone_for_the_entry_point_too(site):
    site.one.manner = site.two.manner = "stream"
    async with site.client.stream("POST", PATH, json={"stream": True}):
        entry, _ = await site.reached()
        entry.events.put_nowait(b"data: 1\n\n")
    async with asyncio.timeout(WAIT_S):
        await entry.client_gone.wait()


@pytest.mark.parametrize(("kind", "patience"), [("haproxy", "timeout client 60s"), ("nginx", "    send_timeout 60s")])
async def test_a_client_that_takes_nothing_is_cut_off(kind, patience, tmp_path):
    """A client that waits for long for its answer is not cut off."""
    program = needed(kind)
    async with two_entries() as (one, two):
        one.manner = two.manner = "stream"
        config = {"haproxy": haproxy_config, "nginx": nginx_config}[kind]
        clients, operators = free_ports(2)
        text = config([one.port, two.port], clients, operators, tmp_path)
        file = tmp_path / "config"
        file.write_text(adapted(text, {patience: patience.replace("60s", "1s")}), encoding="utf-8")
        command = [program, "-db", "-f", str(file)] if kind == "haproxy" else nginx_command(program, file)
        balancer = started(command, (clients, operators), tmp_path / "log")
        await asyncio.to_thread(balancer.__enter__)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", clients)
            writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
            assert await comes(lambda: one.asked or two.asked, WAIT_S)
            entry = one if one.asked else two
            await asyncio.sleep(1.5)  # silent for longer than a client may be that has something to take
            entry.events.put_nowait(b"data: 1\n\n")
            assert b"200" in await reader.readline()
            writer.transport.pause_reading()
            for _ in range(20):
                entry.events.put_nowait(bytes(2**20))
            async with asyncio.timeout(WAIT_S):
                await entry.client_gone.wait()
            writer.transport.abort()
        finally:
            await asyncio.to_thread(balancer.__exit__, None, None, None)


async def test_no_request_fails_when_an_entry_point_is_dead(site):
    await site.one.stop()
    answers = [await site.ask() for _ in range(6)]
    answers += await asyncio.gather(*(site.ask() for _ in range(6)))
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, "two")] * 12
    assert len(site.two.asked) == 12


async def test_requests_go_where_the_fewest_are_under_way(site):
    site.one.manner = site.two.manner = "stream"
    async with site.client.stream("POST", PATH, json={"stream": True}):
        busy, idle = await site.reached()
        busy.manner = idle.manner = "answer"
        assert {(await site.ask()).text for _ in range(4)} == {idle.name}
        busy.events.put_nowait(None)


async def test_an_entry_point_that_drains_gets_nothing_new_and_its_streams_go_on(site):
    site.one.manner = site.two.manner = "stream"
    async with site.client.stream("POST", PATH, json={"stream": True}) as answer:
        draining, other = await site.reached()
        draining.manner, draining.is_ready, other.manner = "refuse", False, "answer"
        if site.kind == "haproxy":  # it asks; nginx finds out by being refused
            checks = draining.checks
            assert await comes(lambda: draining.checks >= checks + 3, WAIT_S)
        answers = await asyncio.gather(*(site.ask() for _ in range(8)))
        assert [(answer.status_code, answer.text) for answer in answers] == [(200, other.name)] * 8
        if site.kind == "haproxy":
            assert len(draining.asked) == 1
        draining.events.put_nowait(b"data: still here\n\n")
        draining.events.put_nowait(None)
        assert await answer.aread() == b"data: still here\n\n"


async def test_what_one_entry_point_refuses_is_asked_of_the_other(site):
    site.one.manner = "refuse"
    assert {(await site.ask()).text for _ in range(4)} == {"two"}
    site.two.manner = "refuse"
    refused = await site.ask()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


async def test_an_entry_point_that_knows_no_application_yet_costs_nobody_an_answer(site):
    site.one.manner = "new"
    assert {(await site.ask()).text for _ in range(4)} == {"two"}
    site.two.manner = "new"
    assert (await site.ask()).status_code == 404


async def test_haproxy_never_repeats_what_may_have_been_computed_and_nginx_does_so_once(site):
    site.one.manner = site.two.manner = "break"
    answer = await site.ask()
    times = len(site.one.asked) + len(site.two.asked)
    assert (answer.status_code, times) == ((502, 1) if site.kind == "haproxy" else (503, 2))
    assert answer.json()["error"]["type"] == "server_error"


async def test_a_stream_that_has_begun_is_never_asked_for_again(site):
    site.one.manner = site.two.manner = "stream"
    async with site.client.stream("POST", PATH, json={"stream": True}) as answer:
        entry, other = await site.reached()
        entry.events.put_nowait(b"data: 1\n\n")
        parts = answer.aiter_raw()
        assert await anext(parts) == b"data: 1\n\n"
        await entry.stop()
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(parts)
    assert other.asked == []


async def test_labels_and_traces_pass_and_a_client_cannot_say_where_it_comes_from(site):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    given = {"X-Request-Id": "mine-1", "traceparent": trace, "tracestate": "a=b", "X-Forwarded-For": "192.0.2.9"}
    await site.ask(headers={**given, "Authorization": "Bearer key"})
    await site.ask()
    first, second = sorted([*site.one.asked, *site.two.asked], key=lambda asked: "traceparent" not in asked.headers)
    wanted = {"x-request-id": "mine-1", "traceparent": trace, "tracestate": "a=b", "authorization": "Bearer key"}
    assert wanted.items() <= first.headers.items()
    assert first.headers["x-forwarded-for"] == second.headers["x-forwarded-for"] == "127.0.0.1"
    assert first.headers["x-forwarded-proto"] == "http"
    assert len(second.headers["x-request-id"]) in (32, 36)


async def test_the_longest_body_passes_and_nginx_refuses_longer_ones_as_the_router_does(site):
    assert (await site.ask(json=None, content=b"x" * MAX_BODY)).status_code == 200
    (asked,) = [*site.one.asked, *site.two.asked]
    assert asked.body == b"x" * MAX_BODY
    longer = await site.ask(json=None, content=b"x" * (MAX_BODY + 1))
    if site.kind == "haproxy":
        assert longer.status_code == 200  # it would break off; the router reads on, so that its answer is seen
    else:
        assert (longer.status_code, longer.json()["error"]["code"]) == (413, "request_too_large")


async def test_what_operators_ask_for_has_a_listener_of_its_own(site):
    for path in ("/metrics", "/status", "/doctor", "/-/routes"):
        refused = await site.client.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")
        assert [*site.one.asked, *site.two.asked] == []
    assert (await site.client.get(f"{site.proxy.operators_url}/metrics")).text in ("one", "two")
    assert (await site.client.get(f"{site.proxy.operators_url}/v1/models")).status_code == 404


DOTTED = ("/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/..%2fmetrics")
"""Routers take no such path for another one: tests/router/http/test_app.py. So these may pass, as they are."""
HIDDEN = [
    *("/metrics", "/status", "/doctor", "/docs", "/openapi.json", "/events", "/tokenize", "/detokenize", "/version"),
    *("/", "/page/app.js", "/-/routes", "/-/healthz", "/nowhere"),
    # An entry point takes each of these for one of the above.
    *("/%6detrics", "/%73tatus", "/%2d/routes", "/metric%73", "/%64octor", "/doc%73", "/%2D/healthz", "/event%73"),
    *("/metrics?x=/v1/", "/metrics/", "//metrics", "/./metrics", *DOTTED),
    *("/V1/models", "/v1", "/v1.html", "/health/", "/healthy", "/ready/x", "http://x/metrics", "/metrics#/v1/"),
]
"""Targets that clients must not reach, in several spellings."""


async def status_of(url: str, target: str) -> int:
    """Return the status of a GET with this very request target, which clients would normalise."""
    parts = httpx.URL(url)
    reader, writer = await asyncio.open_connection(parts.host, parts.port)
    try:
        writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(WAIT_S):
            return int((await reader.readline()).split()[1])
    finally:
        writer.close()
        await writer.wait_closed()


async def test_strangers_reach_the_api_and_nothing_else_however_they_spell_it(site):
    told = {path: await status_of(site.proxy.url, path) for path in HIDDEN}
    passed = {asked.path for asked in (*site.one.asked, *site.two.asked)}
    assert passed <= set(DOTTED)
    assert {path: status for path, status in told.items() if status not in (400, 404)} == dict.fromkeys(passed, 200)
    for path in ("/v1/models", "/v1/models/a%2Fb", "/health", "/ready", "/v1/completions?x=1"):
        assert await status_of(site.proxy.url, path) == 200, path


@pytest.mark.parametrize(("kind", "commented"), [("haproxy", "#acl for_clients"), ("nginx", "#location ~ ^/($")])
async def test_the_page_is_there_once_its_lines_are_no_comment_any_more(kind, commented, tmp_path):
    program, page = needed(kind), {path: 200 for path in ("/", "/page/app.js", "/events")}
    async with two_entries() as (one, two):
        config = {"haproxy": haproxy_config, "nginx": nginx_config}[kind]
        clients, operators = free_ports(2)
        text = config([one.port, two.port], clients, operators, tmp_path)
        assert commented in text
        file = tmp_path / "config"
        file.write_text(text.replace(commented, commented.removeprefix("#")), encoding="utf-8")
        command = [program, "-db", "-f", str(file)] if kind == "haproxy" else nginx_command(program, file)
        balancer = started(command, (clients, operators), tmp_path / "log")
        await asyncio.to_thread(balancer.__enter__)
        try:
            url = f"http://127.0.0.1:{clients}"
            assert {path: await status_of(url, path) for path in page} == page
            assert await status_of(url, "/metrics") == 404
        finally:
            await asyncio.to_thread(balancer.__exit__, None, None, None)


async def test_nobody_behind_is_said_in_the_apis_words(site):
    await site.one.stop()
    await site.two.stop()
    answer = await site.ask()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == "no_entry_point"
