"""Log lines: one for each request, sound in both formats, and never a word of what clients wrote or got."""

import json
import logging
import time
from contextlib import aclosing

import pytest

from twostroke.protocol.errors import RequestError, WorkerLost
from twostroke.protocol.requests import FIELDS, LOG_CONTEXT, NO_REQUEST, LogContext, about
from twostroke.router.http.tenants import KeyConfig, Tenants, new_key
from twostroke.router.observe.log_format import JsonLines, TextLines

SECRET = "the princess's whereabouts"
BODY = {"model": "fake", "prompt": SECRET, "max_tokens": 8, "seed": 3, "ignore_eos": True}


@pytest.fixture
def logged(caplog, monkeypatch):
    """Call it for all that our packages have logged, as lines of JSON."""
    caplog.set_level("DEBUG", logger="twostroke")
    monkeypatch.setattr(caplog.handler, "formatter", JsonLines({}))
    return lambda: caplog.text


def access(text):
    lines = map(json.loads, text.splitlines())
    return [line for line in lines if line["logger"] == "twostroke.router.observe.request_log"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_makes_one_line_with_its_numbers_and_none_of_its_text(site_of, logged, stream):
    async with site_of(1, 1) as site:
        answer = await site.http.post(
            "/v1/completions",
            json={**BODY, "stream": stream, "n": 2},
            headers={"x-request-id": "label-1", "authorization": "Bearer a-key"},
        )
        assert answer.status_code == 200
    (line,) = access(logged())
    assert (line["message"], line["request_id"], LOG_CONTEXT.get()) == ("POST /v1/completions", "label-1", NO_REQUEST)
    assert (line["status"], line["choices"], line["output_tokens"], line["attempts"]) == (200, 2, 16, 1)
    assert line["slo_class"] == "standard"
    assert 0 < line["ttft_s"] <= line["e2e_s"]
    everything = logged()
    for private in (SECRET, "whereabouts", "a-key"):
        assert private not in everything


async def test_refusals_are_logged_too_and_what_is_asked_for_every_second_is_not(site_of, logged):
    async with site_of(1, 1) as site:
        await site.http.post("/v1/completions", json={**BODY, SECRET: 1, "n": SECRET})
        await site.http.get("/nowhere%0a%1b[31m")
        await site.http.get("/health")
    lines = access(logged())
    told = [(line["status"], line.get("code"), line["level"]) for line in lines]
    assert told == [(400, "invalid_value", "info"), (404, "not_found", "info"), (200, None, "debug")]
    assert SECRET not in logged()


async def test_a_stream_that_fails_before_or_after_it_began_is_told_by_its_code(site_of, logged, monkeypatch):
    failure = RequestError("the request took too long", code="timeout", status=504)

    async def failing(num_deltas):
        async with site_of(0, 1) as site:
            whole = site.service.runner.deltas

            async def generate(state):
                async with aclosing(whole(state)) as deltas:
                    for _ in range(num_deltas):
                        yield await anext(deltas)
                raise failure

            monkeypatch.setattr(site.service.runner, "deltas", generate)
            await site.http.post("/v1/completions", json={**BODY, "stream": True, "return_token_ids": True})

    await failing(num_deltas=0)
    await failing(num_deltas=1)
    assert [(line["status"], line["code"]) for line in access(logged())] == [(504, "timeout"), (200, "timeout")]
    (warned,) = [line for line in map(json.loads, logged().splitlines()) if "after it had begun" in line["message"]]
    assert (warned["request_id"], warned["attempt"]) == (access(logged())[-1]["request_id"], 1)


async def test_who_asked_is_told_by_the_name_of_the_key(site_of, logged):
    key, sha256 = new_key()
    alice = KeyConfig(name="alice", sha256=sha256, requests_per_minute=1)
    async with site_of(1, 1, tenants=Tenants([alice], clock=time.monotonic)) as site:
        for authorization in (f"Bearer {key}", f"Bearer {key}", "Bearer wrong"):
            await site.http.post("/v1/completions", json=BODY, headers={"authorization": authorization})
    told = [(line["status"], line.get("tenant"), line.get("code")) for line in access(logged())]
    assert told == [(200, "alice", None), (429, "alice", "rate_limit_exceeded"), (401, None, "invalid_api_key")]
    assert key not in logged()


async def test_every_line_about_a_request_names_it_its_trace_its_attempt_and_its_workers(site_of, logged):
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"x-request-id": "label-1", "traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    async with site_of(1, 2) as site:
        site.rig["d0"].refusal = WorkerLost("it has just died")
        answers = [await site.http.post("/v1/completions", json=BODY, headers=headers) for _ in range(4)]
        assert {answer.status_code for answer in answers} == {200}
    lines = [json.loads(line) for line in logged().splitlines() if "label-1" in line]
    (failed, *_) = [line for line in lines if line["level"] == "warning"]
    (resumed, *_) = [line for line in lines if "goes on" in line["message"]]
    attempts = [(line["attempt"], line["prefill_worker"], line["decode_worker"]) for line in (failed, resumed)]
    assert attempts == [(1, "p0", "d0"), (2, "p0", "d1")]
    assert failed["error"] == "WorkerLost"
    told = [line for line in access(logged()) if line["attempts"] == 2]
    assert (told[0]["prefill_workers"], told[0]["decode_workers"]) == (["p0"], ["d0", "d1"])
    assert {line["trace_id"] for line in lines} == {trace_id}


async def test_a_failed_attempt_is_told_without_what_was_asked(site_of, logged):
    async with site_of(0, 1) as site:
        site.rig["d0"].refusal = RequestError(f"Invalid type: {SECRET}", code="invalid_grammar")
        answer = await site.http.post("/v1/completions", json=BODY)
        assert answer.status_code == 400
    assert any(json.loads(line)["level"] == "warning" for line in logged().splitlines())
    assert SECRET not in logged()


def record(message, *values, **extra):
    made = logging.LogRecord("router.x", logging.WARNING, "x.py", 1, message, values, None)
    vars(made).update(extra)
    return made


def test_nothing_from_outside_can_break_a_line_or_paint_a_terminal():
    evil = "a\nb\x1b[31m\x00\u2028\x85\ud800"
    as_json = JsonLines({"worker_id": "w1"}).format(record("said %s", evil, **{FIELDS: {"who": evil}}))
    assert as_json.isascii()
    assert as_json.isprintable()
    assert json.loads(as_json)["who"] == evil
    assert json.loads(as_json)["worker_id"] == "w1"
    context = LogContext(evil, evil, 0, 1, evil, evil)
    assert TextLines().format(record("said", **about(context))).isprintable()
    assert JsonLines({}).format(record("said", **about(context))).isprintable()
    as_text = TextLines().format(record("said %s", evil, **{FIELDS: {"who": evil}}))
    assert as_text.isprintable()
    assert r"a\nb\x1b[31m\x00\u2028\x85\ud800" in as_text


def test_a_traceback_stays_one_line_of_json_and_is_indented_in_text():
    try:
        raise ValueError("first\nsecond\x1b[31m")
    except ValueError as error:
        failed = record("failed")
        failed.exc_info = (ValueError, error, error.__traceback__)
    assert "\n" not in JsonLines({}).format(failed)
    assert "second" in json.loads(JsonLines({}).format(failed))["exception"]
    first, *frames = TextLines().format(failed).splitlines()
    assert "failed" in first
    assert all(frame.startswith("    ") and frame.isprintable() for frame in frames)
