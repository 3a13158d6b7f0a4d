"""Clients of other projects against the server, used as their documentation says.

A small model does not choose well, so tools are demanded (`required`, or by name) and answers are held to a schema:
what comes is what the grammar lets through, whatever the model. Whether it calls one under `auto` is its own affair.
"""

import json
from typing import Any, Literal

import anthropic
import instructor
import litellm
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "Name the capital of France."
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
ROOM = 128  # tokens, more than any of the answers below can take
CITIES = ("Paris", "Rome", "Oslo")
GREEDY: Any = {"extra_body": {"temperature": 0}}  # anthropic has no field for it any more


class Answer(BaseModel, extra="forbid"):
    """All that its fields can be is short."""

    city: Literal["Paris", "Rome", "Oslo"]
    is_sure: bool


class Weather(BaseModel):
    """Tell the weather of a city."""

    city: Literal["Paris", "Rome", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


SCHEMA = {**Weather.model_json_schema(), "additionalProperties": False}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Tell the weather of a city.", "parameters": SCHEMA},
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def claude(server: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def chain(server: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="unused", model=server.model, temperature=0, max_tokens=ROOM, max_retries=0
    )


@pytest.fixture
def asked(server: Any) -> dict[str, Any]:
    """The prompt of every chat."""
    return {"model": server.model, "messages": MESSAGES, "temperature": 0, "max_tokens": ROOM}


def check_call(function: Any) -> None:
    assert function.name == "get_weather"
    Weather.model_validate_json(function.arguments)


# --- openai: chat ---


def test_openai_parses_a_chats_answer(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    (choice,) = client.chat.completions.parse(**asked, response_format=Answer).choices
    assert isinstance(choice.message.parsed, Answer)
    assert choice.finish_reason == "stop"


def test_openai_parses_a_streamed_answer(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    with client.chat.completions.stream(**asked, response_format=Answer) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Answer)
    assert {"chunk", "content.delta", "content.done"} <= kinds


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_openai_calls_a_tool(choice: Any, client: openai.OpenAI, asked: dict[str, Any]) -> None:
    forced: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    (answer,) = client.chat.completions.create(**asked, **forced).choices
    assert answer.finish_reason in ("tool_calls", "stop")  # of a named one OpenAI says `stop`
    assert answer.message.tool_calls
    for call in answer.message.tool_calls:
        check_call(call.function)
    # The call and its result go back as the client has them.
    call = answer.message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    told = [*MESSAGES, answer.message, result]
    (answer,) = client.chat.completions.create(**{**asked, "messages": told}, tools=[TOOL], tool_choice="none").choices
    assert answer.message.content
    assert not answer.message.tool_calls


def test_openai_calls_a_tool_in_a_stream(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    tools = [openai.pydantic_function_tool(Weather, name="get_weather")]
    with client.chat.completions.stream(
        **asked, tools=tools, tool_choice="required", parallel_tool_calls=False
    ) as stream:
        kinds = {event.type for event in stream}
        (choice,) = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.done" in kinds
    assert choice.message.tool_calls
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Weather)


def test_openai_leaves_it_to_the_model(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    (choice,) = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="auto").choices
    assert choice.message.content or choice.message.tool_calls


# --- openai: responses ---


def test_openai_asks_for_a_response(client: openai.OpenAI, server: Any) -> None:
    answer = client.responses.create(model=server.model, input=QUESTION, temperature=0, max_output_tokens=ROOM)
    assert answer.output_text
    assert answer.status in ("completed", "incomplete")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_openai_streams_a_response(client: openai.OpenAI, server: Any) -> None:
    asked = {"model": server.model, "input": MESSAGES, "temperature": 0, "max_output_tokens": ROOM}
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text


def test_openai_parses_a_response(client: openai.OpenAI, server: Any) -> None:
    answer = client.responses.parse(
        model=server.model, input=QUESTION, text_format=Answer, temperature=0, max_output_tokens=ROOM
    )
    assert isinstance(answer.output_parsed, Answer)


def test_openai_calls_a_tool_in_a_response(client: openai.OpenAI, server: Any) -> None:
    flat: Any = {"type": "function", "strict": True, **TOOL["function"]}
    asked: dict[str, Any] = {"model": server.model, "tools": [flat], "temperature": 0, "max_output_tokens": ROOM}
    answer = client.responses.create(input=QUESTION, tool_choice="required", **asked)
    call = next(item for item in answer.output if item.type == "function_call")
    check_call(call)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    told: Any = [*MESSAGES, call.model_dump(exclude_none=True), result]
    assert client.responses.create(input=told, tool_choice="none", **asked).output_text


# --- anthropic ---


def test_anthropic_sends_messages(claude: anthropic.Anthropic, server: Any) -> None:
    told: Any = {"model": server.model, "max_tokens": 24, "messages": MESSAGES, "system": "Be brief.", **GREEDY}
    answer = claude.messages.create(**told)
    (block,) = answer.content
    assert block.type == "text"
    assert answer.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(**told) as stream:
        assert "".join(stream.text_stream) == block.text
        assert stream.get_final_message().usage.output_tokens == answer.usage.output_tokens


@pytest.mark.parametrize("is_streamed", [False, True])
def test_anthropic_uses_a_tool(is_streamed: bool, claude: anthropic.Anthropic, server: Any) -> None:
    tools: Any = [{"name": "get_weather", "description": "Tell the weather.", "input_schema": SCHEMA}]
    told: Any = {"model": server.model, "max_tokens": ROOM, "tools": tools, **GREEDY}
    chosen: Any = {"type": "tool", "name": "get_weather"}
    if is_streamed:
        with claude.messages.stream(messages=MESSAGES, tool_choice=chosen, **told) as stream:
            answer = stream.get_final_message()
    else:
        answer = claude.messages.create(messages=MESSAGES, tool_choice=chosen, **told)
    assert answer.stop_reason == "tool_use"
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert use.name == "get_weather"
    Weather.model_validate(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "21 degrees"}
    more: Any = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(messages=more, tool_choice={"type": "none"}, **told).content


# --- langchain-openai ---


@tool
def get_weather(city: Literal["Paris", "Rome", "Oslo"], unit: Literal["celsius", "fahrenheit"]) -> str:
    """Tell the weather of a city."""
    return f"21 degrees {unit} in {city}"


def test_langchain_chats(chain: ChatOpenAI) -> None:
    whole = chain.invoke(QUESTION)
    assert whole.text
    assert "".join(chunk.text for chunk in chain.stream(QUESTION)) == whole.text


@pytest.mark.parametrize("choice", ["any", "get_weather"])
def test_langchain_binds_tools(choice: str, chain: ChatOpenAI) -> None:
    answer = chain.bind_tools([get_weather], tool_choice=choice).invoke(QUESTION)
    assert isinstance(answer, AIMessage)
    call = answer.tool_calls[0]
    Weather.model_validate(call["args"])
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    told = [HumanMessage(QUESTION), answer, result]
    if len(answer.tool_calls) == 1:
        assert chain.bind_tools([get_weather], tool_choice="none").invoke(told).text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gives_structured_output(method: Any, chain: ChatOpenAI) -> None:
    assert isinstance(chain.with_structured_output(Answer, method=method).invoke(QUESTION), Answer)


# --- litellm ---


@pytest.fixture
def through_litellm(server: Any, asked: dict[str, Any]) -> dict[str, Any]:
    return {**asked, "model": f"openai/{server.model}", "api_base": f"{server.url}/v1", "api_key": "unused"}


def test_litellm_completes(through_litellm: dict[str, Any]) -> None:
    whole = litellm.completion(**through_litellm).choices[0].message.content
    assert whole
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**through_litellm, stream=True)]
    assert "".join(parts) == whole


def test_litellm_calls_a_tool_and_holds_to_a_schema(through_litellm: dict[str, Any]) -> None:
    called = litellm.completion(**through_litellm, tools=[TOOL], tool_choice="required").choices[0].message
    check_call(called.tool_calls[0].function)
    held = litellm.completion(**through_litellm, response_format=Answer).choices[0].message
    Answer.model_validate_json(held.content)


# --- instructor ---


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor_makes_a_model(mode: instructor.Mode, client: openai.OpenAI, asked: dict[str, Any]) -> None:
    made = instructor.from_openai(client, mode=mode).chat.completions.create(
        **asked, response_model=Answer, max_retries=0
    )
    assert isinstance(made, Answer)
    assert json.loads(made.model_dump_json())["city"] in CITIES
