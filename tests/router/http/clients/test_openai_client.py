"""Errors as the official `openai` client meets them. Successes: tests/e2e."""

import asyncio

import openai
import pytest
import pytest_asyncio


@pytest_asyncio.fixture
async def site(site_of):
    async with site_of(1, 2, listen=True) as site:
        yield site


@pytest_asyncio.fixture
async def client(site):
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="any", max_retries=0) as client:
        yield client


async def test_no_workers_is_503_with_a_time_to_come_back(site, client):
    for worker in site.rig.fleet.all.values():
        await worker.die()
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model="fake", prompt="a", stream=True)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"


async def test_a_failure_after_the_stream_began_is_an_error_event(site, client):
    for name in ("d0", "d1"):
        site.rig[name].gate = asyncio.Semaphore(3)
    site.rig.pipeline._config = type(site.rig.pipeline._config)(retries=0)
    stream = await client.completions.create(model="fake", prompt="a", max_tokens=30, stream=True, seed=8)
    await anext(stream)
    for name in ("d0", "d1"):
        await site.rig[name].die()
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "worker_lost"


@pytest.mark.parametrize("streaming", [True, False])
async def test_a_client_that_leaves_is_cancelled_at_the_workers(site, client, streaming, until):
    for name in ("d0", "d1"):
        site.rig[name].gate = asyncio.Semaphore(3)
    asking = asyncio.create_task(_ask(client, streaming))
    await until(lambda: site.rig.fleet.owned and any(site.rig[name].gate.locked() for name in ("d0", "d1")))
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    started = asyncio.get_running_loop().time()
    await until(lambda: not site.rig.fleet.owned)
    await until(lambda: site.rig.pipeline.in_flight == site.service.gate.num_choices == 0)
    assert asyncio.get_running_loop().time() - started < 1


async def _ask(client, streaming):
    asked = {"model": "fake", "prompt": "a", "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    answer = await client.completions.create(**asked, stream=streaming)
    if streaming:
        async for _ in answer:
            pass


async def test_an_answer_can_be_sent_back_as_history(client):
    from openai.types.chat import ChatCompletionMessage

    message = ChatCompletionMessage(role="assistant", content="print()")
    for echoed in (message.model_dump(), {**message.model_dump(), "tool_calls": [], "annotations": []}):
        history = [{"role": "user", "content": "a"}, echoed, {"role": "user", "content": "b"}]
        answer = await client.chat.completions.create(model="fake", messages=history, max_tokens=2)
        assert answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": None, "function_call": None, "prediction": None, "audio": None, "reasoning_effort": None},
        {"tools": [], "tool_choice": "auto", "functions": []},
        {"tools": None, "tool_choice": "none"},
        {"stop": ""},
        {"stop": []},
        {"top_p": 0},
        {"logprobs": None, "top_logprobs": 0},
        {"logit_bias": {}, "metadata": {}, "user": None},
    ],
    ids=str,
)
async def test_what_openai_takes_for_nothing_is_nothing(client, fields):
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    answer = await client.chat.completions.create(model="fake", **chat, extra_body=fields)
    assert answer.choices
