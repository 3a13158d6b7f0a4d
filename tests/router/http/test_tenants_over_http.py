"""API keys and SLO classes as clients meet them."""

import json
import re

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from twostroke.router.http.middleware import OPEN_PATHS
from twostroke.router.http.tenants import KeyConfig, Tenants, new_key
from twostroke.router.slo.admission import Overloaded
from twostroke.router.slo.classes import SLOClass, SLOConfig
from twostroke.router.text.grammar import GrammarChecks

KEY, HASH = new_key()
ADMIN, ADMIN_HASH = new_key()
SLO = SLOConfig(
    classes=(SLOClass(name="gold", ttft_s=5.0, tpot_s=1.0, priority=10, share=0.3), SLOClass(name="bulk")),
    default="bulk",
)
ASK = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 4, "seed": 1}


def tenants(**limits) -> Tenants:
    keys = [KeyConfig(name="alice", sha256=HASH, **limits), KeyConfig(name="root", sha256=ADMIN_HASH, admin=True)]
    return Tenants(keys, clock=lambda: 0.0)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_without_a_key_nothing_answers_but_health_and_ready(site_of, until) -> None:
    async with site_of(1, 1, tenants=tenants()) as site:
        await until(lambda: not site.service.missing())
        described = site.app.openapi()["paths"].items()
        operations = [(path, method) for path, methods in described for method in methods]
        for path, method in [*operations, ("/openapi.json", "get"), ("/docs", "get")]:
            for headers in ({}, bearer("ts-wrong")):
                answer = await site.http.request(method, path.replace("{name}", "fake"), headers=headers)
                assert answer.status_code == (200 if path in OPEN_PATHS else 401), path
                assert "x-request-id" in answer.headers
                assert answer.headers.get("www-authenticate") == (None if path in OPEN_PATHS else "Bearer"), path
        for path in ("/events", "/none", "/health/", "/page", "/v1"):
            assert (await site.http.get(path)).status_code == 401, path
        assert (await site.http.get("/none", headers=bearer(KEY))).status_code == 404
        body = (await site.http.post("/v1/completions", json=ASK)).json()
        assert body["error"]["code"] == "invalid_api_key"
        assert body["error"]["type"] == "invalid_request_error"


async def test_keys_change_while_the_server_runs(site_of) -> None:
    later, sha256 = new_key()
    known = tenants()
    async with site_of(1, 1, tenants=known) as site:
        known.replace([KeyConfig(name="later", sha256=sha256)])
        for key, status in ((KEY, 401), (later, 200)):
            assert (await site.http.post("/v1/completions", json=ASK, headers=bearer(key))).status_code == status
        known.replace([])
        assert (await site.http.post("/v1/completions", json=ASK)).status_code == 401  # nobody, not everybody


RIGHTS = {
    "nobody's": ["GET /health", "GET /ready", "GET /", "GET /page/{name}"],
    "a key's": [
        *(f"POST /v1/{name}" for name in ("completions", "chat/completions", "responses", "embeddings", "messages")),
        *("POST /v1/messages/count_tokens", "POST /tokenize", "POST /detokenize"),
        *("GET /v1/models", "GET /v1/models/", "GET /v1/models/{name:path}", "GET /tokenizer_info"),
        *("GET /version", "GET /events"),
        *("GET /openapi.json", "GET /docs"),
    ],
    "metrics": ["GET /metrics", "GET /status"],
    "admin": ["GET /doctor", "POST /workers/{worker_id:path}"],
}


def routes_of(app: FastAPI) -> set[str]:
    """The methods and paths of all routes, without the heads that go with GET."""
    found: set[str] = set()
    waiting = list(app.routes)
    while waiting:
        route = waiting.pop()
        if (included := getattr(route, "original_router", None)) is not None:
            waiting += included.routes
            continue
        assert isinstance(route, Route), f"{route} is no route whose right is known"
        found |= {f"{method} {route.path}" for method in route.methods or ()}
    return {one for one in found if not one.startswith("HEAD ") or f"GET {one.split()[1]}" not in found}


async def test_every_route_asks_for_the_right_that_it_should(site_of) -> None:
    prometheus, sha256 = new_key()
    known = tenants()
    known.replace([*(tenant.key for _, tenant in known._tenants), KeyConfig(name="p", sha256=sha256, metrics=True)])
    async with site_of(1, 1, tenants=known) as site:
        assert routes_of(site.app) == {route for routes in RIGHTS.values() for route in routes}, (
            "a new route has a right"
        )
        for right, routes in RIGHTS.items():
            holders = {"metrics": (prometheus, ADMIN), "admin": (ADMIN,)}.get(right, (KEY, prometheus, ADMIN))
            for method, path in (route.split() for route in routes):
                if path == "/events":  # has no end
                    continue
                heads = method == "GET" and path not in ("/openapi.json", "/docs")
                for verb in ("HEAD", method) if heads else (method,):
                    for key in (None, KEY, prometheus, ADMIN):
                        may = right == "nobody's" or key in holders
                        if may and (verb, path) == ("GET", "/doctor"):  # tries out the links of workers that are played
                            continue
                        headers = {} if key is None else bearer(key)
                        sent = {"json": {}} if verb == "POST" else {}
                        answer = await site.http.request(
                            verb, re.sub(r"{\w+(:path)?}", "x", path), headers=headers, **sent
                        )
                        refused = None if may else 401 if key is None else 403
                        told = answer.status_code if answer.status_code in (401, 403) else None
                        assert told == refused, f"{verb} {path}: {answer.status_code}"


async def test_what_only_counts_compiles_no_grammar_and_takes_a_place(site_of, monkeypatch) -> None:
    async def no_grammar(*_, **__) -> None:
        raise AssertionError("a grammar is compiled")

    monkeypatch.setattr(GrammarChecks, "schema", no_grammar)
    monkeypatch.setattr(GrammarChecks, "check", no_grammar)
    schema = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "string"}}}}
    message = {"model": "fake", "messages": [{"role": "user", "content": "a"}]}
    calls = {
        "/v1/messages/count_tokens": message | {"output_config": {"format": schema}},
        "/tokenize": {"messages": message["messages"]},
        "/detokenize": {"tokens": [1]},
    }
    known = tenants(max_in_flight=1)
    async with site_of(1, 1, tenants=known) as site:
        for path, body in calls.items():
            answer = await site.http.post(path, json=body, headers=bearer(KEY))
            assert answer.status_code == 200, (path, answer.text)
        with known.of(f"Bearer {KEY}").in_flight(1):
            for path, body in calls.items():
                assert (await site.http.post(path, json=body, headers=bearer(KEY))).status_code == 429, path
        with site.service.gate.room(site.service.config.http.max_choices_in_flight):
            for path, body in calls.items():
                assert (await site.http.post(path, json=body, headers=bearer(ADMIN))).status_code == 429, path
        long = message | {"messages": [{"role": "user", "content": "x" * 3_000_000}]}
        refused = await site.http.post("/v1/messages/count_tokens", json=long, headers=bearer(KEY))
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_tenants_prefixes_are_salted_apart(site_of) -> None:
    async with site_of(1, 1, tenants=tenants()) as site:
        for key in (KEY, ADMIN, KEY):
            assert (await site.http.post("/v1/completions", json=ASK, headers=bearer(key))).status_code == 200
        salts = [request.cache_salt for request in site.rig["d0"].seen]
        assert salts[0] == salts[2] != salts[1]
        assert b"" not in salts
        for own in ("a", "b"):
            await site.http.post("/v1/completions", json=ASK | {"cache_salt": own}, headers=bearer(KEY))
        *_, one, other = site.rig["d0"].seen
        assert one.cache_salt != other.cache_salt
        assert one.client == other.client == site.rig["d0"].seen[0].client, "whatever its salts, it has one turn"


async def test_unused_tokens_come_back_and_others_are_refused_when_they_are_used_up(site_of) -> None:
    async with site_of(1, 1, tenants=tenants(tokens_per_minute=100)) as site:
        many = {**ASK, "max_tokens": 90, "stop_token_ids": list(range(60)), "ignore_eos": True}
        answer = await site.http.post("/v1/completions", json=many, headers=bearer(KEY))
        used = answer.json()["usage"]["total_tokens"]
        assert used < 90
        rest = {**ASK, "max_tokens": 100 - used - 3 + 1}
        refused = await site.http.post("/v1/completions", json=rest, headers=bearer(KEY))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) == 1
        rest["max_tokens"] -= 1
        assert (await site.http.post("/v1/completions", json=rest, headers=bearer(KEY))).status_code == 200


async def test_requests_and_choices_at_a_time_are_limited(site_of) -> None:
    async with site_of(1, 1, tenants=tenants(requests_per_minute=2, max_in_flight=2)) as site:
        refused = await site.http.post("/v1/completions", json={**ASK, "n": 3}, headers=bearer(KEY))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")  # would be so at any time
        assert (await site.http.post("/v1/completions", json={**ASK, "n": 2}, headers=bearer(KEY))).status_code == 200
        refused = await site.http.post("/tokenize", json={"prompt": "a"}, headers=bearer(KEY))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "30")
        assert (await site.http.get("/v1/models", headers=bearer(KEY))).status_code == 200


async def test_the_class_is_told_and_goes_to_the_workers(site_of) -> None:
    async with site_of(1, 1, slo=SLO) as site:
        answer = await site.http.post("/v1/completions", json={**ASK, "service_tier": "gold", "priority": 2})
        assert answer.json()["service_tier"] == "gold"
        promise = site.rig["d0"].seen[-1].promise
        assert (promise.class_name, promise.priority, promise.share, promise.tpot_s) == ("gold", 8, 0.3, 1.0)
        assert 0 < promise.ttft_left_s < 5.0
        chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": True}
        told = (await site.http.post("/v1/chat/completions", json=chat, headers={"x-slo-class": "bulk"})).text
        chunks = [json.loads(line[6:]) for line in told.splitlines() if line.startswith("data: {")]
        assert {chunk["service_tier"] for chunk in chunks} == {"bulk"}
        wrong = await site.http.post("/v1/completions", json=ASK, headers={"x-slo-class": "silver"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-slo-class")


async def test_without_classes_nothing_is_told_of_one(site_of) -> None:
    async with site_of(1, 1) as site:
        assert "service_tier" not in (await site.http.post("/v1/completions", json=ASK)).json()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_would_be_late_is_refused_before_any_worker_hears_of_it(
    site_of, monkeypatch, stream: bool
) -> None:
    fields: list[object] = []

    def refuse(*about: object) -> None:
        fields.append(about)
        raise Overloaded("too late; try again in 7 s", limit="ttft", retry_after_s=7)

    async with site_of(1, 1, slo=SLO) as site:
        monkeypatch.setattr(site.rig.pipeline, "_admit", refuse)
        answer: httpx.Response = await site.http.post("/v1/completions", json={**ASK, "n": 2, "stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert site.rig["p0"].seen == site.rig["d0"].seen == []
        assert len(fields) == 1  # nowhere else, and not again
        metrics = (await site.http.get("/metrics")).text
        assert 'slo_requests_total{model_name="fake",router="router",slo_class="bulk",verdict="refused"} 1.0' in metrics
        assert 'slo_refusals_total{limit="ttft",model_name="fake",router="router",slo_class="bulk"} 1.0' in metrics
        assert 'slo_attainment{model_name="fake",router="router",slo_class="bulk"} 0.0' in metrics


async def test_kept_and_broken_promises_are_counted(site_of) -> None:
    async with site_of(1, 1, slo=SLO) as site:
        for headers in ({}, {"x-slo-ttft-ms": "0.001"}):
            await site.http.post("/v1/completions", json={**ASK, "service_tier": "gold"}, headers=headers)
        metrics = (await site.http.get("/metrics")).text
        assert 'slo_requests_total{model_name="fake",router="router",slo_class="gold",verdict="met"} 1.0' in metrics
        assert 'slo_requests_total{model_name="fake",router="router",slo_class="gold",verdict="missed"} 1.0' in metrics
        assert 'ttft_prediction_correction{model_name="fake",router="router",slo_class="gold"} 1.0' in metrics


async def test_a_bug_is_counted_as_an_error_and_a_broken_promise(site_of, monkeypatch) -> None:
    def bug(*about: object) -> None:
        raise ZeroDivisionError

    async with site_of(1, 1, slo=SLO) as site:
        monkeypatch.setattr(site.rig.pipeline, "_admit", bug)
        assert (await site.http.post("/v1/completions", json=ASK)).status_code == 500
        metrics = (await site.http.get("/metrics")).text
        assert 'request_success_total{finished_reason="error",model_name="fake",router="router"} 1.0' in metrics
        assert 'slo_requests_total{model_name="fake",router="router",slo_class="bulk",verdict="missed"} 1.0' in metrics


async def test_a_response_is_judged_by_its_longest_prompt(site_of, monkeypatch) -> None:
    judged: list[int] = []

    def admit(request, path, waited_s, follows) -> None:
        if not follows:
            judged.append(request.num_prompt_tokens)

    async with site_of(1, 1, slo=SLO) as site:
        monkeypatch.setattr(site.rig.pipeline, "_admit", admit)
        fields = {**ASK, "prompt": [[7], [7] * 20, [7] * 5], "n": 2}
        assert (await site.http.post("/v1/completions", json=fields)).status_code == 200
        assert judged == [20], "a short one first would let in whatever comes behind it"
