"""Clients that send half of a body, or take nothing of their answer: each is given so long, and then costs nothing."""

import asyncio
import json
import logging

import pytest

from twostroke.router.http import middleware

PATH = "/v1/completions"
BODY = json.dumps({"model": "fake", "prompt": "import os", "max_tokens": 24, "seed": 5}).encode()


class Client:
    """One request at the level of ASGI: its body comes in `parts`, and then nothing until the client is told to go.

    `takes` is how many messages of the answer it takes; the next one waits for ever.
    """

    def __init__(self, *parts, takes=None, path=PATH, headers=(), more=True, method="POST"):
        self.scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"host", b"127.0.0.1:8000"), *headers],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 1),
            "root_path": "",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
        }
        self.parts = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        if not more:
            self.parts[-1]["more_body"] = False
        self.takes = takes
        self.taken = []
        self.reads = 0

    async def receive(self):
        self.reads += 1
        if self.parts:
            return self.parts.pop(0)
        return await asyncio.Event().wait()

    async def send(self, message):
        if self.takes is not None and len(self.taken) >= self.takes:
            await asyncio.Event().wait()
        self.taken.append(message)

    async def ask(self, app):
        async with asyncio.timeout(20):
            await app(self.scope, self.receive, self.send)
        return self

    @property
    def status(self):
        return self.taken[0]["status"]

    @property
    def closes(self):
        return (b"connection", b"close") in self.taken[0]["headers"]

    @property
    def code(self):
        return json.loads(self.taken[1]["body"])["error"]["code"]


async def test_a_body_that_comes_by_halves_is_refused_in_time_and_its_connection_closed(site_of):
    async with site_of(1, 1, body_timeout_s=0.05) as site:
        client = await Client(BODY[:20]).ask(site.app)
        assert (client.status, client.code, client.closes) == (408, "request_timeout", True)
        metrics = (await site.http.get("/metrics")).text
    assert (
        'requests_refused_total{code="request_timeout",model_name="fake",router="router",status="408"} 1.0' in metrics
    )


async def test_a_body_that_trickles_gets_no_more_time_than_one_that_stops(site_of):
    """Each byte is in time, the whole is not."""

    class Trickle(Client):
        async def receive(self):
            await asyncio.sleep(0.01)
            return {"type": "http.request", "body": b" ", "more_body": True}

    async with site_of(1, 1, body_timeout_s=0.1) as site:
        client = await Trickle().ask(site.app)
        assert (client.status, client.code) == (408, "request_timeout")


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/nowhere", 404), ("GET", "/health", 200)])
async def test_whoever_is_answered_before_the_body_has_ended_does_not_keep_the_connection(
    site_of, method, path, status
):
    async with site_of(1, 1, body_timeout_s=0.05) as site:
        client = await Client(b"{", method=method, path=path).ask(site.app)
        assert (client.status, client.closes) == (status, True)
        whole = await Client(b"{", b"}", method=method, path=path, more=False).ask(site.app)
        assert (whole.status, whole.closes) == (status, False)
        assert whole.parts == []


async def test_of_a_body_that_nobody_wants_a_bounded_part_is_read(site_of, monkeypatch):
    monkeypatch.setattr(middleware, "MAX_DISCARDED_BYTES", 1000)

    class Endless(Client):
        async def receive(self):
            self.reads += 1
            return {"type": "http.request", "body": bytes(100), "more_body": True}

    async with site_of(1, 1, max_body_mib=0.001) as site:
        client = await Endless().ask(site.app)
        assert (client.status, client.code, client.closes) == (413, "request_too_large", True)
        assert client.reads <= 20


async def test_a_client_that_waits_to_be_told_to_send_is_answered_at_once(site_of):
    async with site_of(1, 1) as site:
        client = await Client(path="/nowhere", headers=[(b"expect", b"100-continue")]).ask(site.app)
        assert (client.status, client.closes, client.reads) == (404, True, 0)


@pytest.mark.parametrize("takes", [0, 1, 5])
async def test_a_stream_that_nobody_takes_ends_and_frees_its_request(site_of, until, caplog, takes):
    body = json.dumps({**json.loads(BODY), "stream": True, "ignore_eos": True, "max_tokens": 400}).encode()
    async with site_of(1, 1, send_timeout_s=0.05) as site:
        await until(lambda: not site.service.missing())
        with caplog.at_level(logging.INFO):
            client = await Client(body, more=False, takes=takes).ask(site.app)
        assert len(client.taken) == takes
        assert site.service.pipeline.in_flight == 0
        assert site.service.gate.num_choices == 0
        await until(lambda: not site.rig.fleet.owned)
        (line,) = [record for record in caplog.records if record.getMessage() == f"POST {PATH}"]
    assert line.fields["code"] == "client_stalled"


async def test_an_answer_in_one_piece_that_nobody_takes_ends_too(site_of, until):
    async with site_of(1, 1, send_timeout_s=0.05) as site:
        await until(lambda: not site.service.missing())
        await Client(BODY, more=False, takes=1).ask(site.app)
        assert site.service.gate.num_choices == 0


async def test_a_client_that_takes_its_time_within_the_deadline_gets_all_of_it(site_of, until):
    class Slow(Client):
        async def send(self, message):
            await asyncio.sleep(0.002)
            self.taken.append(message)

    body = json.dumps({**json.loads(BODY), "stream": True}).encode()
    async with site_of(1, 1, send_timeout_s=5.0) as site:
        await until(lambda: not site.service.missing())
        client = await Slow(body, more=False).ask(site.app)
    assert b"[DONE]" in b"".join(message.get("body", b"") for message in client.taken)


async def test_whoever_cancels_a_request_that_waits_to_send_is_not_mistaken_for_the_deadline(site_of, until):
    body = json.dumps({**json.loads(BODY), "stream": True}).encode()
    async with site_of(1, 1, send_timeout_s=60.0) as site:
        await until(lambda: not site.service.missing())
        client = Client(body, more=False, takes=2)
        request = asyncio.create_task(client.ask(site.app))
        await until(lambda: len(client.taken) == 2)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert site.service.gate.num_choices == 0
