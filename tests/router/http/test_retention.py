"""Clients' wishes to have a prompt's KV kept, in the words of each API, and what usage tells of them."""

import msgspec
import pytest
import pytest_asyncio

CHAT = [{"role": "user", "content": "hello"}]
FIELDS = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": CHAT},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4},
}
OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


def mark(**fields):
    return {"cache_control": {"type": "ephemeral", **fields}}


def text(words="hello", **fields):
    return {"type": "text", "text": words, **fields}


@pytest_asyncio.fixture
async def site(site_of):
    async with site_of(1, 1) as site:
        yield site


async def post(site, path, **fields):
    return await site.http.post(path, json={"model": "fake", **FIELDS[path], **fields})


async def kept_s(site, path, **fields):
    """The wish that reaches both workers."""
    answer = await post(site, path, **fields)
    assert answer.status_code == 200, answer.text
    asked = {site.rig[name].seen[-1].keep_s for name in ("p0", "d0")}
    assert len(asked) == 1
    return asked.pop()


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0),
        ({"prompt_cache_key": None, "prompt_cache_retention": None}, 0),
        ({"prompt_cache_key": ""}, 0),
        ({"prompt_cache_key": "of my application"}, 300),
        ({"prompt_cache_retention": "in_memory"}, 300),
        ({"prompt_cache_retention": "in-memory"}, 300),
        ({"prompt_cache_retention": "24h"}, 86400),
        ({"prompt_cache_key": "x", "prompt_cache_retention": "24h"}, 86400),
    ],
)
async def test_openais_fields_reach_the_workers_as_seconds(site, path, fields, seconds):
    assert await kept_s(site, path, **fields) == seconds


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({}, 0),
        ({"cache_control": None}, 0),
        (mark(), 300),
        (mark(ttl="5m"), 300),
        (mark(ttl="1h"), 3600),
        ({"system": [text()]}, 0),
        ({"system": [text(), text(**mark(ttl="1h"))]}, 3600),
        ({"messages": [{"role": "user", "content": [text(**mark())]}]}, 300),
        ({"tools": [{"name": "f", "input_schema": {}, **mark(ttl="1h")}]}, 3600),
        ({"system": [text(**mark(ttl="1h"))], "messages": [{"role": "user", "content": [text(**mark())]}]}, 3600),
        (
            {
                "messages": [
                    *CHAT,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c", "content": [text(**mark(ttl="1h"))]}],
                    },
                ]
            },
            3600,
        ),
        (
            {
                "messages": [
                    *CHAT,
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm"},
                            {"type": "tool_use", "id": "c", "name": "f", "input": {}, **mark()},
                        ],
                    },
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "x"}]},
                ]
            },
            300,
        ),
    ],
)
async def test_the_longest_of_anthropics_marks_reaches_the_workers(site, fields, seconds):
    assert await kept_s(site, "/v1/messages", **fields) == seconds


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_cache_retention", "forever"),
        ("prompt_cache_retention", 24),
        ("prompt_cache_key", 7),
        ("prompt_cache_key", "x" * 513),
    ],
)
async def test_a_wrong_wish_of_openais_clients_is_refused_by_name(site, path, field, value):
    answer = await post(site, path, **{field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("fields", "beginning"),
    [
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl: must be '5m' or '1h'"),
        ({"cache_control": {"type": "persistent"}}, "cache_control.type: must be 'ephemeral'"),
        ({"cache_control": "ephemeral"}, "cache_control: must be an object"),
        ({"cache_control": {"type": "ephemeral", "ttl": ["5m"]}}, "cache_control.ttl: must be '5m' or '1h'"),
        ({"system": [text(**mark(ttl="2h"))]}, "system.0.cache_control.ttl: must be"),
        (
            {"messages": [{"role": "user", "content": [text(**mark(ttl=5))]}]},
            "messages.0.content.0.cache_control.ttl: must be '5m' or '1h'",
        ),
        ({"tools": [{"name": "f", "input_schema": {}, **mark(ttl="x")}]}, "tools.0.cache_control.ttl: must be"),
    ],
)
async def test_a_wrong_mark_is_refused_by_its_place(site, fields, beginning):
    answer = await post(site, "/v1/messages", **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(beginning)


async def test_what_a_marked_prompt_computed_is_told_as_written_to_the_cache(site):
    plain = (await post(site, "/v1/messages")).json()["usage"]
    assert plain["cache_creation_input_tokens"] == 0 < plain["input_tokens"]
    marked = (await post(site, "/v1/messages", **mark())).json()["usage"]
    assert marked["input_tokens"] == 0
    assert marked["cache_creation_input_tokens"] == plain["input_tokens"]
    assert marked["cache_read_input_tokens"] == plain["cache_read_input_tokens"] > 0


def with_tier_tokens(site, role, number):
    """Have the workers of a role reply that so many cached tokens came from a tier."""
    call = getattr(site.rig.fleet, role)

    async def told(*arguments):
        return msgspec.structs.replace(await call(*arguments), tier_tokens=number)

    setattr(site.rig.fleet, role, told)


@pytest.mark.parametrize(("num_prefill", "role", "cached"), [(1, "prefill", 3), (0, "decode", 5)])
async def test_usage_tells_what_came_from_tiers(site_of, num_prefill, role, cached):
    async with site_of(num_prefill, 1) as site:
        details = (await post(site, "/v1/chat/completions")).json()["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": cached}
        for number, tiers in ((2, 2), (9, cached)):
            with_tier_tokens(site, role, number)
            details = (await post(site, "/v1/chat/completions")).json()["usage"]["prompt_tokens_details"]
            by_place = {"memory": cached - tiers, "tiers": tiers}
            assert details == {"cached_tokens": cached, "cached_tokens_details": by_place}
