"""/v1/responses as the official `openai` client reads it."""

import openai
import pytest
import pytest_asyncio


@pytest_asyncio.fixture
async def site(site_of):
    async with site_of(1, 1, listen=True) as site:
        yield site


@pytest_asyncio.fixture
async def client(site):
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="any", max_retries=0) as client:
        yield client


BODY = {"model": "fake", "input": "hello", "max_output_tokens": 24, "extra_body": {"seed": 7}}


async def test_a_response_says_what_the_chat_says_and_that_it_is_not_kept(client):
    response = await client.responses.create(**BODY, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    chat = await client.chat.completions.create(model="fake", messages=messages, max_tokens=24, seed=7, temperature=0.5)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens == 24
    assert response.usage.total_tokens == chat.usage.total_tokens
    assert response.usage.input_tokens_details.cached_tokens == chat.usage.prompt_tokens_details.cached_tokens
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.5)
    assert response.model_extra["store"] is False


async def test_a_stream_has_the_same_text_and_its_events_are_numbered(client):
    whole = await client.responses.create(**BODY)
    events = [event async for event in await client.responses.create(**BODY, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert told == events[-4].text == events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage == whole.usage


async def test_the_clients_own_accumulator_takes_the_stream(site, client):
    stop_at = (await client.responses.create(**BODY)).output_text[5:9]
    body = {**BODY, "extra_body": {"seed": 7, "stop": stop_at}}
    async with client.responses.stream(**body) as stream:
        response = await stream.get_final_response()
    whole = await client.responses.create(**body)
    assert response.status == "completed"
    assert response.output_text == whole.output_text


async def test_log_probabilities_come_with_their_text(client):
    body = {**BODY, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await client.responses.create(**body)
    logprobs = whole.output[0].content[0].logprobs
    assert len(logprobs) == 24
    assert len(logprobs[0].top_logprobs) == 2
    events = [event async for event in await client.responses.create(**body, stream=True)]
    told = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert [(one.token, one.logprob) for one in told] == [(one.token, one.logprob) for one in logprobs]
    assert events[-1].response.output[0].content[0].logprobs == logprobs


async def test_an_answer_can_be_sent_back_as_history(client):
    response = await client.responses.create(**BODY)
    for item in (response.output[0], response.output[0].model_dump()):
        history = [{"role": "user", "content": "hello"}, item, {"role": "user", "content": "more"}]
        again = await client.responses.create(**{**BODY, "input": history})
        assert again.usage.input_tokens > response.usage.input_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": 5}, "input"),
    ],
)
async def test_a_refusal_names_the_field_that_the_client_sent(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(**{**BODY, **fields})
    assert caught.value.param == param
    assert caught.value.body["message"].startswith(f"{param}: ")
