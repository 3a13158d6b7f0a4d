"""The endpoints of OpenAI's API, and small parameters of requests."""

import asyncio
import json
from functools import partial

import pytest

from twostroke.router.text.generation_config import SamplingDefaults


async def complete(site, **fields):
    response = await site.http.post(
        "/v1/completions", json={"model": "fake", "prompt": "import os", "max_tokens": 24, "seed": 5, **fields}
    )
    assert response.status_code == 200, response.text
    return response.json()


async def events(site, path="/v1/completions", **fields):
    """The data of each server-sent event, decoded; [DONE] as None."""
    body = {"model": "fake", "max_tokens": 24, "seed": 5, "stream": True, **fields}
    if path == "/v1/completions":
        body = {"prompt": "import os", **body}
    response = await site.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [None if block == "data: [DONE]" else json.loads(block[6:]) for block in blocks]


async def test_the_app_says_what_it_is(site_of):
    async with site_of(1, 1) as site:
        assert (await site.http.get("/health")).json() == {"status": "ok"}
        assert (await site.http.head("/health")).status_code == 200
        assert (await site.http.get("/version")).json() == {"version": site.service.config.version}
        models = (await site.http.get("/v1/models")).json()
        assert models["object"] == "list"
        assert models["data"][0]["id"] == "fake"
        assert models["data"][0]["max_model_len"] == 512
        assert models["data"][0]["vocab_size"] == site.service.tokenizer.vocab_size
        assert models["data"][0]["sampling_defaults"] == site.service.sampling_defaults.model_dump()
        assert models["data"][0]["end_token_ids"] == list(site.service.tokenizer.eos_token_ids)
        assert (await site.http.get("/v1/models/fake")).json() == models["data"][0]
        assert (await site.http.get("/v1/models/other/name")).status_code == 404


@pytest.mark.parametrize(
    ("num_prefill", "lost", "ready"), [(1, "p0", False), (1, "d0", False), (1, None, True), (0, None, True)]
)
async def test_ready_means_that_a_whole_path_is_there(site_of, until, num_prefill, lost, ready):
    async with site_of(num_prefill, 1) as site:
        if lost:
            await site.rig[lost].die()
        connected = {name: worker.info.peer for name, worker in site.rig.fleet.all.items()}
        await until(
            lambda: all(site.rig.channels.is_connected(connected[name]) == (name != lost) for name in connected)
        )
        assert ((await site.http.get("/ready")).status_code == 200) == ready


async def test_workers_of_another_version_are_told_of(site_of, until):
    async with site_of(1, 1) as site:
        site.service.other_versions = lambda: {"prefill": ["p7", "p6"], "decode": []}
        await site.rig["p0"].die()
        await until(lambda: site.service.missing())
        assert (await site.http.get("/status")).json()["other_versions"] == {"prefill": ["p6", "p7"]}
        told = (await site.http.get("/ready")).json()["error"]["message"]
        assert "no prefill worker can be reached (2 of another version)" in told
        metrics = (await site.http.get("/metrics")).text
        assert 'twostroke:workers_of_another_version{role="prefill",router="router"} 2.0' in metrics


async def test_status_lists_the_workers_and_their_numbers(site_of, until):
    async with site_of(1, 1) as site:
        await until(lambda: not site.service.missing())
        await complete(site)
        status = (await site.http.get("/status")).json()
        assert status["ready"]
        assert status["places_held"] == 0
        assert [worker["role"] for worker in status["workers"]] == ["prefill", "decode"]
        assert [worker["node"] for worker in status["workers"]] == ["127.0.0.1", "127.0.0.1"]
        assert status["workers"][1]["stats"]["total_blocks"] == 100


async def test_the_models_sampling_defaults_reach_the_workers_and_are_told(site_of, until):
    defaults = SamplingDefaults(temperature=0.25, top_k=20)
    async with site_of(1, 1, defaults=defaults) as site:
        await until(lambda: not site.service.missing())
        await complete(site)
        await complete(site, temperature=0.5)
        drawn = [request.sampling for request in site.rig["d0"].seen]
        assert [(one.temperature, one.top_k) for one in drawn] == [(0.25, 20), (0.5, 20)]
        status = (await site.http.get("/status")).json()
        (card,) = (await site.http.get("/v1/models")).json()["data"]
        assert status["sampling_defaults"] == card["sampling_defaults"] == defaults.model_dump()


async def test_metrics_count_requests_and_show_the_workers(site_of, until):
    async with site_of(1, 1) as site:
        await until(lambda: not site.service.missing())
        await complete(site, ignore_eos=True)
        await site.http.post("/v1/completions", content=b"{")
        text = (await site.http.get("/metrics")).text
        for line in (
            'twostroke:request_success_total{finished_reason="length",model_name="fake",router="router"} 1.0',
            'twostroke:generation_tokens_total{model_name="fake",router="router"} 24.0',
            'twostroke:time_to_first_token_seconds_count{model_name="fake",router="router"} 1.0',
            'twostroke:request_prefill_time_seconds_sum{model_name="fake",router="router"} 0.02',
            'twostroke:requests_refused_total{code="invalid_json",model_name="fake",router="router",status="400"} 1.0',
            'twostroke:router_requests_in_flight{model_name="fake",router="router"} 0.0',
            'twostroke:router_decision_time_seconds_count{model_name="fake",router="router"} 1.0',
            'twostroke:kv_blocks_total{role="decode",worker="d0"} 100.0',
            'twostroke:kv_cache_usage_perc{role="prefill",worker="p0"} 0.0',
        ):
            assert line in text.splitlines(), line


@pytest.mark.parametrize(("given", "echoed"), [("abc-1.2:3", True), ("bad id", False), ("x" * 129, False)])
async def test_a_sound_request_id_is_echoed_and_another_is_minted(site_of, given, echoed):
    async with site_of(0, 1) as site:
        ids = [
            (await site.http.request(method, path, headers={"x-request-id": given})).headers["x-request-id"]
            for method, path in (("GET", "/health"), ("POST", "/v1/completions"), ("GET", "/nowhere"))
        ]
        assert all((one == given) == echoed and one for one in ids)


async def test_echo_puts_the_prompt_first_streamed_or_not(site_of):
    async with site_of(1, 1) as site:
        plain = (await complete(site))["choices"][0]["text"]
        echoed = (await complete(site, echo=True))["choices"][0]["text"]
        assert echoed == "import os" + plain
        chunks = await events(site, echo=True)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk) == echoed


async def test_a_stop_string_ends_the_choice_and_the_workers_are_told(site_of, until):
    async with site_of(1, 1) as site:
        whole = await complete(site, ignore_eos=True)
        text = whole["choices"][0]["text"]
        stop = text[5:8]
        site.rig["d0"].gate = asyncio.Semaphore(20)
        stopped = await complete(site, ignore_eos=True, stop=[stop, "never to be seen"], max_tokens=200)
        assert stopped["choices"][0]["text"] == text[: text.index(stop)]
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["usage"]["completion_tokens"] < 24
        await until(lambda: site.rig["d0"].cancelled)
        site.rig["d0"].gate = None
        chunks = await events(site, ignore_eos=True, stop=stop)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk) == text[: text.index(stop)]


async def test_the_token_that_stops_is_counted_but_not_shown(site_of):
    async with site_of(1, 1) as site:
        fields = {"return_token_ids": True, "logprobs": 0, "ignore_eos": True}
        whole = (await complete(site, **fields))["choices"][0]
        stop_id = whole["token_ids"][6]
        first = whole["token_ids"].index(stop_id)
        stopped = await complete(site, **fields, stop_token_ids=[stop_id])
        choice = stopped["choices"][0]
        assert choice["token_ids"] == whole["token_ids"][: first + 1]
        assert choice["prompt_token_ids"] == list(site.rig["d0"].seen[-1].token_ids)
        assert stopped["usage"]["completion_tokens"] == first + 1
        assert choice["logprobs"]["tokens"] == whole["logprobs"]["tokens"][:first]
        assert choice["finish_reason"] == "stop"


async def test_usage_tells_the_stages_on_request(site_of):
    async with site_of(1, 1) as site:
        assert "stages" not in (await complete(site))["usage"]
        usage = (await complete(site, return_stages=True, n=2))["usage"]
        assert len(usage["stages"]) == 2
        assert usage["stages"][0]["prefill_s"] == 0.02
        assert usage["stages"][0]["transfer_s"] == 0.03
        assert 0 < usage["stages"][0]["ttft_s"] <= usage["stages"][0]["e2e_s"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_a_stream_of_several_choices_ends_each_once(site_of):
    async with site_of(1, 2) as site:
        fields = {"prompt": ["a", "b"], "n": 2}
        whole = await complete(site, **fields)
        chunks = await events(site, **fields, stream_options={"include_usage": True})
        assert chunks.pop() is None
        usage = chunks.pop()
        assert usage["choices"] == []
        assert usage["usage"] == whole["usage"]
        for index in range(4):
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in own) == whole["choices"][index]["text"]
            assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == [
                whole["choices"][index]["finish_reason"]
            ]
            assert own[-1]["finish_reason"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_every_chunk_has_the_usage_so_far_where_that_is_asked_for(site_of, path):
    async with site_of(1, 1) as site:
        fields = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {}
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last, done = await events(site, path, **fields, ignore_eos=True, stream_options=options)
        assert done is None
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert len(set(counts)) > 2
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == counts[-1] == 24
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
        chunks = await events(site, path, **fields, stream_options={"continuous_usage_stats": True})
        assert all("usage" not in chunk for chunk in chunks[:-1])  # as in vLLM, it needs include_usage


async def test_chat_opens_each_choice_with_the_role(site_of):
    async with site_of(1, 1) as site:
        messages = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]},
        ]
        chunks = await events(site, "/v1/chat/completions", messages=messages, n=2, logprobs=True, top_logprobs=2)
        assert chunks.pop() is None
        for index in range(2):
            own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert "role" not in own[1]["delta"]
            assert len(own[1]["logprobs"]["content"][0]["top_logprobs"]) == 2
        prompt = site.service.tokenizer.decode(site.rig["p0"].seen[0].token_ids, skip_special_tokens=False)
        assert prompt == "<|begin|><|system|>\nbe brief<|end|><|user|>\nhello\nthere<|end|><|assistant|>\n"


async def test_one_failing_choice_fails_the_request_and_ends_the_others(site_of):
    async with site_of(0, 1) as site:
        site.rig["d0"].gate = asyncio.Semaphore(5)
        original = site.rig.fleet.decode

        async def second_fails(worker, request, ticket, pull):
            if site.rig["d0"].seen:
                from twostroke.protocol.errors import RequestError

                raise RequestError("not this one", param="seed")
            return await original(worker, request, ticket, pull)

        site.rig.fleet.decode = second_fails
        response = await site.http.post("/v1/completions", json={"model": "fake", "prompt": "a", "n": 4})
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "not this one"
        assert not site.rig.fleet.owned
        assert site.rig.pipeline.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_places_are_taken_before_the_choices_start_and_given_back(site_of, until, stream):
    async with site_of(1, 1, max_choices_in_flight=4) as site:
        site.rig["p0"].prefill_gate = asyncio.Event()
        fields = {"model": "fake", "prompt": "x", "n": 4, "max_tokens": 2, "stream": stream}
        first = asyncio.create_task(site.http.post("/v1/completions", json=fields))
        await until(lambda: site.rig["p0"].owned)
        refused = await site.http.post("/v1/completions", json={**fields, "n": 1})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        assert (await site.http.post("/v1/chat/completions", json=chat)).status_code == 429
        site.rig["p0"].prefill_gate.set()
        assert (await first).status_code == 200
        assert (await site.http.post("/v1/completions", json={**fields, "max_tokens": 10**6})).status_code == 400
        assert (await site.http.post("/v1/completions", json=fields)).status_code == 200


async def test_a_bug_is_a_500_with_fixed_words(site_of, monkeypatch, caplog):
    async with site_of(0, 1) as site:

        def bug(*_):
            raise ZeroDivisionError("the insides")

        monkeypatch.setattr(site.service, "max_context", bug)
        response = await site.http.post("/v1/completions", json={"model": "fake", "prompt": "a"})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "insides" not in response.text
        assert "x-request-id" in response.headers
        assert "the insides" in caplog.text


async def test_a_bug_before_a_stream_began_is_a_500_and_later_an_error_event(site_of, monkeypatch):
    async with site_of(0, 1) as site:
        original = site.service.runner.deltas

        async def buggy(state, *, num_deltas):
            async for delta in original(state):
                if num_deltas == 0:
                    raise ZeroDivisionError("the insides")
                num_deltas -= 1
                yield delta

        monkeypatch.setattr(site.service.runner, "deltas", partial(buggy, num_deltas=0))
        response = await site.http.post("/v1/completions", json={"model": "fake", "prompt": "a", "stream": True})
        assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
        monkeypatch.setattr(site.service.runner, "deltas", partial(buggy, num_deltas=2))
        assert (await events(site, return_token_ids=True))[-1]["error"]["code"] == "internal_error"


async def test_text_goes_to_tokens_and_back(site_of):
    async with site_of(0, 1) as site:
        there = (await site.http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True})).json()
        assert there["count"] == len(there["tokens"]) == len(there["token_strs"])
        assert there["max_model_len"] == 512
        bare = (await site.http.post("/tokenize", json={"prompt": "héllo", "add_special_tokens": False})).json()
        assert there["tokens"] == [0, *bare["tokens"]]
        back = await site.http.post("/detokenize", json={"tokens": bare["tokens"]})
        assert back.json() == {"prompt": "héllo"}
        chat = await site.http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})
        assert chat.json()["tokens"][0] == 0
        none = await site.http.post("/tokenize", json={"prompt": ""})
        assert none.json()["tokens"] == [0]


@pytest.mark.parametrize(
    "path", ["/v1/../metrics", "/v1/./../status", "//metrics", "/./doctor", "/metrics/", "/v1//../events"]
)
async def test_a_path_is_taken_as_it_is_written(site_of, path):
    """Balancers let through what begins with /v1/, and no such path may be another one."""
    told = []
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        told.append(message)

    async with site_of(1, 1) as site:
        await site.app({**scope, "scheme": "http", "server": ("router", 80), "http_version": "1.1"}, receive, send)
    assert told[0]["status"] in (404, 307)
    assert b"twostroke:" not in b"".join(message.get("body", b"") for message in told)


async def test_a_look_at_the_fleet_that_fails_is_followed_by_the_next(site_of, until, monkeypatch, caplog):
    """A router that stops following never again learns of workers that come and go."""
    async with site_of(1, 1) as site:
        looks = []

        def follow(workers):
            looks.append(1)
            raise RuntimeError("a bug")

        monkeypatch.setattr(site.service.channels, "follow", follow)
        await until(lambda: len(looks) >= 2)
    assert "the fleet can't be followed" in caplog.text


PROMPT = {"prompt": "import os", "max_tokens": 12, "seed": 5}


async def choices(site, status=200, **fields):
    response = await site.http.post("/v1/completions", json={"model": "fake", **PROMPT, **fields})
    assert response.status_code == status, response.text
    return response.json() if status != 200 else response.json()["choices"]


async def test_the_best_of_several_candidates_have_the_likeliest_tokens(site_of):
    async with site_of(0, 1) as site:
        every = await choices(site, n=5, logprobs=0, prompt=["a", "b"])
        site.rig["d0"].seen.clear()
        best = await choices(site, n=2, best_of=5, prompt=["a", "b"])
        assert len(site.rig["d0"].seen) == 10
        assert [one["index"] for one in best] == [0, 1, 2, 3]
        assert all(one["logprobs"] is None for one in best)

        def mean(choice):
            logprobs = choice["logprobs"]["token_logprobs"]
            return sum(logprobs) / max(1, len(logprobs))

        for told, of_prompt in ((best[:2], every[:5]), (best[2:], every[5:])):
            ranked = sorted(of_prompt, key=mean, reverse=True)
            assert [one["text"] for one in told] == [one["text"] for one in ranked[:2]]


async def test_a_stop_string_is_shown_where_that_is_asked_for(site_of):
    async with site_of(0, 1) as site:
        ((plain,), (stopped,), (shown,)) = [
            await choices(site, **fields)
            for fields in ({}, {"stop": "e"}, {"stop": "e", "include_stop_str_in_output": True})
        ]
        assert "e" in plain["text"], "choose another stop string"
        assert shown["text"] == stopped["text"] + "e" == plain["text"].split("e")[0] + "e"


async def test_special_tokens_have_their_names_where_that_is_asked_for(site_of, tokenizer):
    special = next(one for one in range(tokenizer.vocab_size) if tokenizer.is_special(one))
    async with site_of(0, 1) as site:
        site.rig["d0"].corrupt = lambda event: event
        fields = {"prompt": [special, 40], "echo": True, "max_tokens": 1}
        (hidden,), (plain,) = [await choices(site, **fields, skip_special_tokens=skips) for skips in (True, False)]
        assert (hidden["text"] == plain["text"]) != (tokenizer.token(special) in plain["text"])


async def test_the_workers_are_told_what_may_be_drawn_and_who_shares_prefixes(site_of, tokenizer):
    async with site_of(0, 1) as site:
        await choices(site, allowed_token_ids=[5, 5, 9], bad_words=["os"], cache_salt="mine")
        await choices(site, cache_salt="")
        first, second = site.rig["d0"].seen
        assert first.sampling.allowed_token_ids == (5, 9)
        ways = {tuple(tokenizer.encode_word(way)) for way in ("os", " os")}
        assert set(first.sampling.bad_words) == ways
        assert len(first.cache_salt) == 16
        assert second.cache_salt == b""
        assert second.sampling.bad_words == ()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
        ({"n": 1, "best_of": 33, "prompt": ["a", "b"]}, "n"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [2**30]}, "allowed_token_ids"),
        ({"bad_words": ["x" * 65]}, "bad_words.0"),
        ({"bad_words": ["x"], "response_format": {"type": "json_object"}}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "prompt"),
        ({"suffix": "x"}, "suffix"),
    ],
)
async def test_what_can_not_be_is_refused_by_name(site_of, fields, param):
    async with site_of(0, 1) as site:
        assert (await choices(site, status=400, **fields))["error"]["param"] == param


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("n", {"n": 9}),
        ("n", {"prompt": ["a"] * 9}),
        ("logprobs", {"logprobs": 7, "max_tokens": 12}),
        ("prompt_logprobs", {"prompt_logprobs": 9, "prompt": [5] * 10, "max_tokens": 1}),
        ("prompt_logprobs", {"prompt_logprobs": 4, "prompt": [[5] * 10, [6] * 10], "max_tokens": 1}),
        ("prompt_logprobs", {"echo": True, "logprobs": 10, "prompt": [5] * 10, "max_tokens": 0}),
    ],
)
async def test_choices_times_tokens_times_logprobs_have_a_bound(site_of, param, fields):
    async with site_of(0, 1, max_response_items=100) as site:
        refused = await choices(site, 400, **fields)
        assert refused["error"]["param"] == param
        assert "router.max_response_items" in refused["error"]["message"]
        assert site.rig["d0"].seen == []
        if not (fields.get("prompt_logprobs") or fields.get("echo")):
            response = await site.http.post(
                "/v1/completions", json={"model": "fake", **PROMPT, **fields, "stream": True}
            )
            assert response.status_code == 200, "a stream holds nothing of what it has sent"
        (fits,) = await choices(site, logprobs=6)
        assert fits["text"]
