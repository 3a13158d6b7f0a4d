"""Chats with tools, as the official `openai` client meets them: the model's words are scripted."""

import json
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from llguidance import LLMatcher, LLTokenizer

from twostroke.router.text.tokenizer import TextTokenizer

MODEL_FOLDER = Path(__file__).parents[3] / "model" / "bundled"
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is not false %}<think>\n{% endif %}"
    "{% endif %}{# </think> #}"
)
RAIN = {
    "type": "function",
    "function": {
        "name": "rain",
        "description": "Whether it rains.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "rain", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "Oslo is far.\n</think>\n\n"


@pytest.fixture(scope="module")
def speaker():
    return TextTokenizer.load(MODEL_FOLDER, TEMPLATE)


@pytest_asyncio.fixture
async def site(site_of, speaker):
    async with site_of(1, 1, listen=True, speaks=speaker) as site:
        yield site


@pytest_asyncio.fixture
async def client(site):
    async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def plays(site, speaker, text):
    script = [*speaker._encode(text, False), speaker.eos_token_ids[0]]
    for worker in site.rig.fleet.all.values():
        worker.script = script
    return len(script)


async def ask(client, *, streams, messages=({"role": "user", "content": "Rain in Oslo?"},), **fields):
    """The choice, whole; and what a stream told is put together."""
    body = {"model": "fake", "messages": [*messages], **fields}
    if not streams:
        return (await client.chat.completions.create(**body)).choices[0]
    async with client.chat.completions.stream(**body) as stream:
        async for _ in stream:
            pass
        return (await stream.get_final_completion()).choices[0]


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_is_told_beside_what_was_thought_and_said(site, client, speaker, streams):
    plays(site, speaker, f"{THOUGHT}I look it up.\n\n{CALL}\n{CALL}")
    choice = await ask(client, streams=streams, tools=[RAIN])
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look it up."
    assert choice.message.model_extra["reasoning_content"] == "Oslo is far."
    assert choice.message.model_extra["reasoning"] == "Oslo is far."
    assert [call.function.name for call in choice.message.tool_calls] == ["rain", "rain"]
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Oslo"}] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2


async def test_arguments_are_streamed_while_they_are_written(site, client, speaker):
    plays(site, speaker, THOUGHT + CALL)
    body = {"model": "fake", "messages": [{"role": "user", "content": "?"}], "tools": [RAIN], "stream": True}
    pieces = []
    async for chunk in await client.chat.completions.create(**body):
        for call in chunk.choices[0].delta.tool_calls or []:
            pieces.append(call.function.arguments)
    assert len(pieces) > 3
    assert json.loads("".join(pieces)) == {"city": "Oslo"}


@pytest.mark.parametrize("fields", [{}, {"tools": [RAIN], "tool_choice": "none"}], ids=["no tools", "none"])
async def test_without_tools_nothing_is_a_call(site, client, speaker, fields):
    plays(site, speaker, THOUGHT + CALL)
    choice = await ask(client, streams=False, **fields)
    assert choice.finish_reason == "stop"
    assert choice.message.content == CALL
    assert "<tools>" not in speaker.decode(site.rig["p0"].seen[0].token_ids)


@pytest.mark.parametrize("choice", ["auto", {"name": "rain"}], ids=str)
@pytest.mark.parametrize("streams", [False, True])
async def test_functions_are_tools_by_their_old_name_and_a_call_is_told_by_it(site, client, speaker, streams, choice):
    plays(site, speaker, f"{THOUGHT}I look.\n{CALL}\n{CALL}")
    called = {"name": "rain", "arguments": '{"city": "Bergen"}'}
    history = [
        {"role": "user", "content": "Rain in Bergen?"},
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "rain", "content": "yes"},
        {"role": "user", "content": "And in Oslo?"},
    ]
    body = {"messages": history, "functions": [RAIN["function"]], "function_call": choice}
    if streams:
        told, reasons, content = [], [], ""
        async for chunk in await client.chat.completions.create(model="fake", stream=True, **body):
            delta = chunk.choices[0].delta
            assert not delta.tool_calls
            content += delta.content or ""
            told += [delta.function_call] if delta.function_call else []
            reasons += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
        name, arguments = told[0].name, "".join(one.arguments for one in told)
        assert not any(one.name for one in told[1:])
        assert reasons == ["function_call"]
    else:
        answered = (await client.chat.completions.create(model="fake", **body)).choices[0]
        assert answered.message.tool_calls is None
        assert answered.finish_reason == "function_call"
        content, name = answered.message.content, answered.message.function_call.name
        arguments = answered.message.function_call.arguments
    said = "I look." if choice == "auto" else ""  # a forced answer has no content
    assert (content or "", name, json.loads(arguments)) == (said, "rain", {"city": "Oslo"})
    seen = site.rig["p0"].seen[0]
    prompt = speaker.decode(seen.token_ids)
    assert '"name": "rain", "description": "Whether it rains."' in prompt
    assert '<tool_call>{"name": "rain", "arguments": {"city": "Bergen"}}</tool_call>' in prompt
    assert "<|im_start|>tool\nyes" in prompt
    assert bool(seen.grammar) == (choice != "auto")
    if choice != "auto":
        assert follows(speaker, seen.grammar, THOUGHT + CALL)
        assert not follows(speaker, seen.grammar, f"{THOUGHT}{CALL}\n{CALL}")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "a"}, {"name": "a"}]}, "functions.1.name"),
        ({"functions": [{"name": "a b"}]}, "functions.0.name"),
        ({"functions": [{"name": "a"}], "function_call": {"name": "b"}}, "function_call.name"),
        ({"functions": [{"name": "a"}], "tools": [RAIN]}, "functions"),
        ({"functions": [{"name": "a"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [RAIN], "function_call": {"name": "rain"}}, "function_call"),
        (
            {"functions": [{"name": "a", "parameters": {"type": "x"}}], "function_call": {"name": "a"}},
            "functions.0.parameters",
        ),
    ],
    ids=str,
)
async def test_what_is_wrong_with_functions_is_told_by_their_name(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, streams=False, extra_body=fields)
    assert caught.value.body["param"] == param


async def test_the_template_sees_tools_and_earlier_calls(site, client, speaker):
    plays(site, speaker, "It rains.")
    called = {"id": "c1", "type": "function", "function": {"name": "rain", "arguments": '{"city": "Oslo"}'}}
    history = [
        {"role": "user", "content": "Rain in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "yes"},
    ]
    choice = await ask(
        client,
        streams=False,
        messages=history,
        tools=[RAIN],
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert choice.message.content == "It rains."
    prompt = speaker.decode(site.rig["p0"].seen[0].token_ids)
    assert '"name": "rain", "description": "Whether it rains."' in prompt
    assert '<tool_call>{"name": "rain", "arguments": {"city": "Oslo"}}</tool_call>' in prompt


@pytest.mark.parametrize("arguments", [r'{"city": "\ud800"}', '{"city": 1e999}'])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/responses", "function_call"])
async def test_arguments_that_no_prompt_can_show_are_no_bug_of_the_server(site, speaker, path, arguments):
    plays(site, speaker, "It rains.")
    function = {"name": "rain", "arguments": arguments}
    call = {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "yes"}
    if path == "function_call":
        path, call, result = (
            "/v1/chat/completions",
            {path: function},
            {"role": "function", "name": "rain", "content": ""},
        )
    history = [{"role": "user", "content": "?"}, {"role": "assistant", "content": None, **call}, result]
    body = {"model": "fake", "messages": history}
    if path == "/v1/responses":
        output = {"type": "function_call_output", "call_id": "c1", "output": "yes"}
        body = {"model": "fake", "input": [history[0], {"type": "function_call", "call_id": "c1", **function}, output]}
    answered = await site.http.post(path, json=body)
    assert answered.status_code == 200, answered.text
    tokens = answered.json()["tokens"] if path == "/tokenize" else site.rig["p0"].seen[0].token_ids
    prompt = speaker.decode(tokens)
    assert '"name": "rain"' in prompt
    assert "Infinity" not in prompt


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_half_a_surrogate_pair_that_a_model_writes_is_no_bug_of_the_server(site, speaker, path, streams):
    plays(site, speaker, THOUGHT + r'<tool_call>{"name": "rain", "arguments": "\ud800"}</tool_call>')
    messages = [{"role": "user", "content": "Rain in Oslo?"}]
    if path == "/v1/responses":
        body = {"input": messages, "tools": [{"type": "function", **RAIN["function"]}]}
    elif path == "/v1/messages":
        tool = {"name": "rain", "input_schema": RAIN["function"]["parameters"]}
        body = {"messages": messages, "tools": [tool], "max_tokens": 300}
    else:
        body = {"messages": messages, "tools": [RAIN]}
    answered = await site.http.post(path, json={"model": "fake", "stream": streams, **body})
    assert answered.status_code == 200, answered.text
    assert r"\ud800" in answered.text
    assert "error" not in answered.text.replace('"error":null', "")


async def test_usage_tells_the_tokens_that_were_thought_and_effort_none_asks_for_none(site, client, speaker):
    plays(site, speaker, f"{THOUGHT}Yes.")
    body = {"model": "fake", "messages": [{"role": "user", "content": "?"}]}
    answer = await client.chat.completions.create(**body)
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert 0 < thought < answer.usage.completion_tokens
    plays(site, speaker, "Yes.")
    answer = await client.chat.completions.create(**body, reasoning_effort="none")
    assert answer.choices[0].message.content == "Yes."
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


async def test_of_thoughts_that_are_cut_no_more_tokens_are_told_than_there_are(site, client, speaker):
    plays(site, speaker, THOUGHT)
    body = {"model": "fake", "messages": [{"role": "user", "content": "?"}], "max_tokens": 3}
    usage = (await client.chat.completions.create(**body)).usage
    assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (3, 3)
    answer = await client.responses.create(model="fake", input="?", max_output_tokens=3)
    assert answer.usage.output_tokens_details.reasoning_tokens == 3


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "rain"}}], ids=str)
async def test_a_call_that_must_be_made_is_held_to_a_grammar(site, client, speaker, choice):
    plays(site, speaker, THOUGHT + CALL)
    answer = await ask(client, streams=False, tools=[RAIN], tool_choice=choice, parallel_tool_calls=False)
    assert answer.message.tool_calls
    grammar = site.rig["p0"].seen[0].grammar
    assert follows(speaker, grammar, THOUGHT + CALL)
    assert not follows(speaker, grammar, f"{THOUGHT}Hello.")
    assert not follows(speaker, grammar, f"{THOUGHT}{CALL}\n{CALL}")
    assert not follows(speaker, grammar, THOUGHT + CALL.replace("rain", "snow"))
    # Models that may write any amount of white space sometimes write nothing else.
    assert follows(speaker, grammar, THOUGHT + CALL.replace('{"city"', '{\n  "city"'))
    assert not follows(speaker, grammar, THOUGHT + CALL.replace('{"city"', "{" + "\n" * 40 + '"city"'))


@pytest.mark.parametrize("is_offered", [True, False])
async def test_an_answer_of_a_schema_may_be_a_call_where_tools_are_offered(site, client, speaker, is_offered):
    plays(site, speaker, THOUGHT + '{"n": 1}')
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    await ask(client, streams=False, response_format=form, **({"tools": [RAIN]} if is_offered else {}))
    grammar = site.rig["p0"].seen[0].grammar
    assert follows(speaker, grammar, THOUGHT + '{"n": 1}')
    assert follows(speaker, grammar, THOUGHT + CALL) == is_offered
    assert not follows(speaker, grammar, THOUGHT + "Hello.")


LARGE = {"type": "object", "properties": {"n": {"type": "integer", "multipleOf": 1_000_003}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ignore_eos": True}, "ignore_eos"),
        ({"bad_words": ["a"]}, "bad_words"),
        (
            {"tools": [RAIN, {"type": "function", "function": {"name": "n", "parameters": LARGE, "strict": True}}]},
            "tools.1.function.parameters",
        ),
    ],
)
async def test_what_a_forced_call_can_not_be_held_to_is_refused(site, fields, param):
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [RAIN], "tool_choice": "required"}
    answer = await site.http.post("/v1/chat/completions", json={**body, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_a_budget_of_thinking_is_refused_where_thoughts_end_with_no_token(site):
    body = {"messages": [{"role": "user", "content": "?"}], "thinking_token_budget": 8}
    answer = await site.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "thinking_token_budget"


def follows(speaker, grammar, text):
    tokens = LLTokenizer(speaker.vocabulary.tokenizer, n_vocab=speaker.vocab_size, eos_token=[1])
    matcher = LLMatcher(tokens, grammar)
    ids = speaker._encode(text, False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "rain"}}], ids=str)
@pytest.mark.parametrize("streams", [False, True])
async def test_a_model_whose_template_knows_no_tools_is_told_of_them_and_calls_them(site_of, choice, streams):
    speaker = TextTokenizer.load(MODEL_FOLDER, PLAIN)
    assert speaker.response_template is None
    async with site_of(1, 1, listen=True, speaks=speaker) as site:
        plays(site, speaker, CALL)
        called = {"id": "c1", "type": "function", "function": {"name": "rain", "arguments": '{"city": "Bergen"}'}}
        history = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Rain in Bergen?"},
            {"role": "assistant", "content": "I look.", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "c1", "content": "yes"},
            {"role": "user", "content": "And in Oslo?"},
        ]
        async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key="any", max_retries=0) as client:
            answer = await ask(client, streams=streams, messages=history, tools=[RAIN], tool_choice=choice)
        assert answer.finish_reason == "tool_calls"
        assert [json.loads(call.function.arguments) for call in answer.message.tool_calls] == [{"city": "Oslo"}]
        seen = site.rig["p0"].seen[0]
        prompt = speaker.decode(seen.token_ids)
        assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions.")
        assert '{"name": "rain", "description": "Whether it rains."' in prompt
        assert 'I look.\n<tool_call>\n{"name": "rain", "arguments": {"city": "Bergen"}}\n</tool_call>' in prompt
        assert "<|im_start|>tool\nyes" in prompt
        assert bool(seen.grammar) == (choice != "auto")
        if choice != "auto":
            assert follows(speaker, seen.grammar, CALL)
            assert not follows(speaker, seen.grammar, "It rains.")


@pytest.mark.parametrize("streams", [False, True])
async def test_without_parallel_calls_an_answer_is_over_with_its_first(site, client, speaker, streams):
    plays(site, speaker, f"{THOUGHT}I look.\n{CALL}\n{CALL}And so on, for long.")
    choice = await ask(client, streams=streams, tools=[RAIN], parallel_tool_calls=False)
    assert choice.finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Oslo"}]
    assert choice.message.content == "I look."
    body = {"model": "fake", "max_tokens": 99, "messages": [{"role": "user", "content": "?"}]}
    body |= {"tools": [{"name": "rain", "input_schema": RAIN["function"]["parameters"]}]}
    body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    answer = (await site.http.post("/v1/messages", json=body)).json()
    assert [block["type"] for block in answer["content"]].count("tool_use") == 1
    assert answer["stop_reason"] == "tool_use"


async def test_an_answer_goes_on_from_the_last_message(site, client, speaker):
    plays(site, speaker, "lo.")
    said = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "It rains in Os"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    choice = await ask(client, streams=False, messages=said, extra_body=extra)
    assert choice.message.content == "lo."
    assert speaker.decode(site.rig["p0"].seen[0].token_ids).endswith("<|im_start|>assistant\nIt rains in Os")


async def test_a_last_message_without_text_cannot_be_gone_on_from(client):
    called = {"id": "c1", "type": "function", "function": {"name": "rain", "arguments": "{}"}}
    said = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": None, "tool_calls": [called]}]
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        await ask(client, streams=False, messages=said, extra_body={"continue_final_message": True})


async def test_a_prompt_may_end_without_the_head_of_an_answer(site, client, speaker):
    plays(site, speaker, "Yes.")
    await ask(client, streams=False, extra_body={"add_generation_prompt": False})
    assert speaker.decode(site.rig["p0"].seen[0].token_ids).endswith("Rain in Oslo?")


async def test_tokens_of_a_chat_are_counted_with_its_tools(site, client, speaker):
    plays(site, speaker, "Yes.")
    body = {"model": "fake", "messages": [{"role": "user", "content": "Rain in Oslo?"}], "tools": [RAIN]}
    counted = (await site.http.post("/tokenize", json=body)).json()
    await ask(client, streams=False, tools=[RAIN])
    assert counted["tokens"] == list(site.rig["p0"].seen[0].token_ids)


@pytest.mark.parametrize(
    "content", ["Yes. And no.", [{"type": "text", "text": "Yes. "}, {"type": "text", "text": "And no."}]]
)
async def test_usage_tells_how_much_of_a_prediction_came_true(site, client, speaker, content):
    plays(site, speaker, "Yes. And more.")
    body = {"model": "fake", "messages": [{"role": "user", "content": "?"}]}
    answer = await client.chat.completions.create(**body, prediction={"type": "content", "content": content})
    details = answer.usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens < answer.usage.completion_tokens
    assert details.rejected_prediction_tokens > 0
    seen = [request for name in ("p0", "d0") for request in site.rig[name].seen]
    assert seen
    assert all(request.prediction for request in seen)


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ({"type": "content", "content": "word " * 5000}, "prediction"),
        ({"type": "guess", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "prediction.content"),
        ("Yes.", "prediction"),
    ],
)
async def test_a_prediction_that_is_none_is_refused_by_name(site, prediction, field):
    body = {"model": "fake", "messages": [{"role": "user", "content": "?"}], "prediction": prediction}
    answer = await site.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field), answer.text
