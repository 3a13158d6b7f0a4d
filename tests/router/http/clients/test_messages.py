"""/v1/messages over HTTP: what Anthropic's own client sends and reads, written out."""

import json

import pytest
import pytest_asyncio

from twostroke.router.http.tenants import KeyConfig, Tenants, new_key

FIELDS = {"model": "fake", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 24, "seed": 7}


@pytest_asyncio.fixture
async def site(site_of):
    async with site_of(1, 1) as site:
        yield site


async def post(site, body, path="/v1/messages", **headers):
    return await site.http.post(path, json=body, headers={"anthropic-version": "2023-06-01", **headers})


def events_of(text):
    """(name, data) of a stream's events."""
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        yield name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_a_message_says_what_the_chat_says(site):
    message = (await post(site, {**FIELDS, "system": "Be brief."})).json()
    messages = [{"role": "system", "content": "Be brief."}, *FIELDS["messages"]]
    chat = (await post(site, {**FIELDS, "messages": messages}, "/v1/chat/completions")).json()
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"] == 24


async def test_a_stream_has_the_same_text_in_its_events(site):
    whole = (await post(site, FIELDS)).json()
    events = list(events_of((await post(site, {**FIELDS, "stream": True})).text))
    assert all(name == told["type"] for name, told in events)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start, end = events[0][1]["message"], events[-2][1]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 1)
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert "".join(told["delta"]["text"] for _, told in events[2:-3]) == whole["content"][0]["text"]
    assert end == {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": whole["usage"],
    }


async def test_the_stop_sequence_that_ended_a_message_is_told(site):
    text = (await post(site, FIELDS)).json()["content"][0]["text"]
    stops = ["never seen", text[5:9]]
    message = (await post(site, {**FIELDS, "stop_sequences": stops})).json()
    assert message["content"][0]["text"] == text[: text.index(text[5:9])]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[5:9])
    events = dict(events_of((await post(site, {**FIELDS, "stop_sequences": stops, "stream": True})).text))
    assert events["message_delta"]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": text[5:9]}


async def test_tokens_are_counted_without_a_worker(site):
    counted = (await post(site, {"messages": FIELDS["messages"]}, "/v1/messages/count_tokens")).json()
    assert not site.rig["p0"].seen
    usage = (await post(site, FIELDS)).json()["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


@pytest.mark.parametrize(
    ("body", "status", "kind", "begin"),
    [
        ({**FIELDS, "max_tokens": None}, 400, "invalid_request_error", "max_tokens: "),
        ({**FIELDS, "max_tokens": 4096}, 400, "invalid_request_error", "input length and `max_tokens` exceed context"),
        ({**FIELDS, "model": "another"}, 404, "not_found_error", "model: "),
        (
            {**FIELDS, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            *(400, "invalid_request_error", "messages.0.content.0: the type 'image' is not supported"),
        ),
    ],
)
async def test_errors_have_the_shape_of_the_api(site, body, status, kind, begin):
    answer = await post(site, body)
    assert answer.status_code == status
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert told["error"]["message"].startswith(begin)


async def test_a_stream_that_fails_later_ends_with_an_error(site, monkeypatch):
    site.rig.pipeline._config = type(site.rig.pipeline._config)(retries=0)
    seen = []

    def die(tokens):
        seen.append(len(tokens))
        return len(seen) > 5

    site.rig["d0"].poison = die
    events = list(events_of((await post(site, {**FIELDS, "stream": True})).text))
    assert events[0][0] == "message_start"
    assert events[-1][1]["error"]["type"] == "overloaded_error"
    assert "message_stop" not in dict(events)


async def test_a_key_may_come_in_the_clients_own_header(site_of):
    key, digest = new_key()
    tenants = Tenants([KeyConfig(name="alice", sha256=digest)], clock=lambda: 0.0)
    async with site_of(1, 1, tenants=tenants) as site:
        assert (await post(site, FIELDS, **{"x-api-key": key})).status_code == 200
        assert (await post(site, FIELDS, authorization=f"Bearer {key}")).status_code == 200
        refusal = await post(site, FIELDS, **{"x-api-key": "another"})
        assert (refusal.status_code, refusal.json()["error"]["type"]) == (401, "authentication_error")
