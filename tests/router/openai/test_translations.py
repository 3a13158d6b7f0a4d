"""Requests of other APIs as the chats that they are, and what chats bring in the words of those APIs."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from twostroke.protocol.errors import RequestError, WorkerLost
from twostroke.protocol.requests import GenerateRequest, SamplingParams
from twostroke.router.openai.answers import ChoiceDelta, ToolCallDelta
from twostroke.router.openai.fields import explain
from twostroke.router.openai.messages import UNREAD, MessagesRequest, MessagesWriter
from twostroke.router.openai.responses import ResponsesRequest, ResponsesWriter
from twostroke.router.openai.schemas import UnknownFields
from twostroke.router.request_state import ChoiceJob

USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 2},
}
JOB = ChoiceJob(GenerateRequest("", "", (1,), 1, SamplingParams(), 100))
RESPONSE_EVENT = TypeAdapter(ResponseStreamEvent)

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "weather", "description": "Of a city", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": SCHEMA}}
CHAT_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
NAMESPACE = {"type": "namespace", "name": "mcp__ulm__", "tools": [FUNCTION]}
OTHER_NAMESPACE = {"type": "namespace", "name": "mcp__bonn", "tools": [FUNCTION]}
CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Ulm"}'}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
PATCH_ITEM = {"type": "custom_tool_call", "call_id": "c2", "name": "p", "input": "x"}
PATCHED_ITEM = {"type": "custom_tool_call_output", "call_id": "c2", "output": "y"}
PATCH_TEXT = '{"type":"custom_tool_call","call_id":"c2","name":"p","input":"x"}'
PATCHED_TEXT = '{"type":"custom_tool_call_output","call_id":"c2","output":"y"}'
TEXT_PART = {"type": "text", "text": "hi"}


def chat_of(body):
    """The chat's fields that are set."""
    return body.draft().chat().model_dump(exclude_unset=True, exclude_none=True, by_alias=True)


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"input": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}),
        (
            {
                "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
                "instructions": "Be brief",
            },
            {"messages": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": [TEXT_PART]}]},
        ),
        (
            {
                "input": [
                    {"role": "user", "content": "Ulm?"},
                    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
                    {
                        "type": "function_call",
                        "call_id": "c1",
                        "name": "weather",
                        "arguments": '{"city": "Ulm"}',
                    },
                    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
                ]
            },
            {
                "messages": [
                    {"role": "user", "content": "Ulm?"},
                    {
                        "role": "assistant",
                        "reasoning_content": "hm",
                        "content": [TEXT_PART],
                        "tool_calls": [CHAT_CALL],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                ]
            },
        ),
        ({"max_output_tokens": 5, "seed": 3}, {"max_completion_tokens": 5, "seed": 3}),
        ({"include": ["message.output_text.logprobs"]}, {"logprobs": True}),
        ({"include": ["reasoning.encrypted_content"]}, {}),
        ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 2}),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "weather"}},
            {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
        ({"tools": [FUNCTION], "tool_choice": "required"}, {"tools": [CHAT_TOOL], "tool_choice": "required"}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "city", "schema": SCHEMA, "strict": True},
                }
            },
        ),
    ],
    ids=lambda value: "-".join(value),
)
def test_a_response_is_a_chat(fields, chat):
    made = chat_of(ResponsesRequest.model_validate({"input": "hi", **fields}))
    assert {"messages": [{"role": "user", "content": "hi"}], **chat} == made


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ([CALL_ITEM, PATCH_ITEM], [PATCH_TEXT]),
        ([PATCH_ITEM, CALL_ITEM], [PATCH_TEXT]),
        ([{"role": "assistant", "content": "hm"}, PATCH_ITEM, CALL_ITEM, PATCH_ITEM], ["hm", PATCH_TEXT, PATCH_TEXT]),
        ([CALL_ITEM, {"role": "assistant", "content": "hm"}], ["hm"]),
    ],
)
@pytest.mark.parametrize("outputs", [[OUTPUT_ITEM, PATCHED_ITEM], [PATCHED_ITEM, OUTPUT_ITEM]])
def test_results_of_functions_are_right_behind_the_calls_whatever_else_the_turn_has(calls, says, outputs):
    user = {"role": "user", "content": "Ulm?"}
    made = chat_of(ResponsesRequest.model_validate({"input": [user, *calls, *outputs, user]}))
    parts = [{"type": "text", "text": text} for text in says]
    assert made["messages"] == [
        user,
        {"role": "assistant", "content": parts, "tool_calls": [CHAT_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "user", "content": PATCHED_TEXT},
        user,
    ]


def test_a_turn_with_more_parts_than_a_message_may_have_is_several_messages():
    made = chat_of(ResponsesRequest.model_validate({"input": [PATCH_ITEM] * 600}))
    assert [len(one["content"]) for one in made["messages"]] == [256, 256, 88]


@pytest.mark.parametrize(
    ("tools", "named", "full"),
    [
        ([NAMESPACE], {"name": "weather"}, "mcp__ulm__weather"),
        ([NAMESPACE], {"name": "mcp__ulm__weather"}, "mcp__ulm__weather"),
        ([OTHER_NAMESPACE, NAMESPACE], {"name": "weather", "namespace": "mcp__ulm__"}, "mcp__ulm__weather"),
        ([NAMESPACE, FUNCTION], {"name": "weather"}, "weather"),
    ],
)
def test_a_function_within_a_namespace_is_chosen_by_its_own_name(tools, named, full):
    chosen = {"type": "function", **named}
    body = ResponsesRequest.model_validate({"input": "hi", "tools": tools, "tool_choice": chosen})
    assert chat_of(body)["tool_choice"] == {"type": "function", "function": {"name": full}}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [chosen]}
    body = ResponsesRequest.model_validate({"input": "hi", "tools": tools, "tool_choice": allowed})
    (tool,) = chat_of(body)["tool_choice"]["allowed_tools"]["tools"]
    assert tool["function"]["name"] == full


OTHER_TOOLS = (
    *("web_search_preview_2025_03_11", "web_search_2025_08_26", "file_search", "code_interpreter", "mcp"),
    *("apply_patch", "shell", "computer_use_preview", "web_search", "local_shell", "image_generation"),
)


@pytest.mark.parametrize("kind", OTHER_TOOLS)
def test_tools_that_no_server_of_ours_offers_are_left_out_with_their_items(kind):
    body = ResponsesRequest.model_validate({"input": "hi", "tools": [FUNCTION, {"type": kind}]})
    assert body.left_out_tools == [kind]
    assert chat_of(body)["tools"] == [CHAT_TOOL]


@pytest.mark.parametrize(
    "kind",
    ["file_search_call", "code_interpreter_call", "mcp_call", "mcp_list_tools", "apply_patch_call", "shell_call"],
)
def test_items_of_such_tools_are_the_models_text(kind):
    (message,) = chat_of(ResponsesRequest.model_validate({"input": [{"type": kind, "id": "a", "name": "b"}]}))[
        "messages"
    ]
    assert message["role"] == "assistant"
    assert message["content"][0]["text"] == f'{{"type":"{kind}","name":"b"}}'


def test_an_answers_header_names_a_bounded_number_of_types():
    tools = [{"type": f"web_search_20{i:02}_01_01"} for i in range(100)]
    assert len(ResponsesRequest.model_validate({"input": "hi", "tools": tools}).left_out_tools) == 32


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        (
            {"system": [TEXT_PART]},
            {"messages": [{"role": "system", "content": [TEXT_PART]}, {"role": "user", "content": "hi"}]},
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "Ulm?"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "hm", "signature": ""},
                            TEXT_PART,
                            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Ulm"}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rain"}, TEXT_PART],
                    },
                ]
            },
            {
                "messages": [
                    {"role": "user", "content": "Ulm?"},
                    {
                        "role": "assistant",
                        "reasoning_content": "hm",
                        "content": [TEXT_PART],
                        "tool_calls": [CHAT_CALL],
                    },
                    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
                    {"role": "user", "content": [TEXT_PART]},
                ]
            },
        ),
        ({"stop_sequences": ["x"]}, {"stop": ["x"]}),
        ({"service_tier": "standard_only"}, {"service_tier": "default"}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {
                "tools": [{"name": "weather", "description": "Of a city", "input_schema": SCHEMA}],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            },
            {"tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        ),
    ],
    ids=lambda value: "-".join(value),
)
def test_a_message_is_a_chat(fields, chat):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
    made = chat_of(MessagesRequest.model_validate({**body, **fields}))
    assert {"messages": body["messages"], "max_tokens": 9, **chat} == made


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the items"),
        ({"conversation": "conv_1"}, "conversation", "send the items"),
        ({"store": True}, "store", "store: false"),
        ({"background": True}, "background", "use stream"),
        ({"truncation": "auto"}, "truncation", "leave out old items"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "'item_reference' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0", "'input_image'"),
        ({"tools": [FUNCTION, {"type": "web_searches"}]}, "tools.1", "run it yourself"),
        ({"tools": [FUNCTION, {"type": "web_search_2025"}]}, "tools.1", "run it yourself"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice", "type web_search are left out"),
        (
            {"tools": [{"type": "mcp"}, {"type": "shell"}], "tool_choice": "required"},
            "tool_choice",
            "type mcp, shell are left out",
        ),
        (
            {
                "tools": [FUNCTION],
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "file_search"}]},
            },
            "tool_choice.tools",
            "type file_search are left out",
        ),
        (
            {"tools": [NAMESPACE, OTHER_NAMESPACE], "tool_choice": {"type": "function", "name": "weather"}},
            "tool_choice.name",
            "give its namespace",
        ),
        (
            {"tools": [FUNCTION, {**NAMESPACE, "name": "n" * 60, "tools": [{**FUNCTION, "name": "f" * 67}]}]},
            "tools.1.tools.0.name",
            "namespace and name together have at most 126 characters",
        ),
        ({"stream": True, "stream_options": {"include_obfuscation": 3}}, "stream_options.include_obfuscation", "true"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options", "stream: true"),
        ({"tools": [{**FUNCTION, "name": "no name"}]}, "tools.0.name", "pattern"),
        ({"input": [{"role": "king", "content": "a"}]}, "input.0.role", "'user'"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "'low'"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools.1.name", "tools.0"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_refusal_names_what_the_client_sent(fields, param, says):
    with pytest.raises(RequestError) as caught:
        refused({"input": "hi", **fields})
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")
    assert says in str(caught.value)


def refused(fields):
    try:
        draft = ResponsesRequest.model_validate(fields).draft()
    except ValidationError as error:
        raise explain(error.errors(), fields) from None
    with draft.naming():
        draft.chat()


def test_what_is_without_effect_is_taken_where_the_router_is_strict():
    strict = UnknownFields(strict=True)
    strict.check(ResponsesRequest.model_validate({"input": "a", "user": 1, "prompt_cache_key": "k", "store": False}))
    with pytest.raises(RequestError, match="instructoins: is not a known field: did you mean instructions"):
        strict.check(ResponsesRequest.model_validate({"input": "a", "instructoins": "x"}))


def response_format(tokenizer):
    body = ResponsesRequest.model_validate({"input": "hi"})
    fields = {"model": "fake", "created": 5, "service_tier": None}
    return ResponsesWriter(body, body.draft().chat(), [JOB], tokenizer, **fields)


def message_format(tokenizer):
    body = MessagesRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9})
    return MessagesWriter(body.draft().chat(), [JOB], tokenizer, model="fake", created=5, service_tier=None)


def events_of(written):
    for event in written.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert name == f"event: {told['type']}"
        yield told


def streamed(form, deltas):
    return list(events_of(b"".join(form.events(delta, USAGE) for delta in deltas) + form.ending(USAGE)))


@st.composite
def answers(draw):
    """The deltas of a choice: thoughts, texts and calls, a piece at a time."""
    text = st.text(min_size=1, max_size=4)
    deltas = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "text", "call", "nothing"]), max_size=8)):
        if kind == "call":
            pieces = draw(st.lists(text, max_size=3))
            calls = [ToolCallDelta(num_calls, f"c{num_calls}", "weather")]
            calls += [ToolCallDelta(num_calls, arguments=piece) for piece in pieces]
            deltas += [ChoiceDelta(0, "", (), (), None, tool_calls=(call,)) for call in calls]
            num_calls += 1
        elif kind == "nothing":
            deltas.append(ChoiceDelta(0, "", (), (), None))
        else:
            said = draw(text)
            deltas.append(
                ChoiceDelta(0, "", (), (), None, said) if kind == "reasoning" else ChoiceDelta(0, said, (), (), None)
            )
    return [
        *deltas,
        ChoiceDelta(0, draw(st.text(max_size=2)), (), (), draw(st.sampled_from(["stop", "length", "tool_calls"]))),
    ]


def without_ids(value):
    if isinstance(value, dict):
        return {name: without_ids(one) for name, one in value.items() if name != "id"}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


@settings(max_examples=150, deadline=None)
@given(deltas=answers())
def test_a_responses_events_put_together_are_the_whole(tokenizer, deltas):
    events = streamed(response_format(tokenizer), deltas)
    whole = json.loads(response_format(tokenizer).whole([deltas], USAGE))
    Response.model_validate(whole)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    items = {}
    for event in events:
        RESPONSE_EVENT.validate_python(event)
        index = event.get("output_index")
        match event["type"]:
            case "response.output_item.added":
                assert index == len(items)
                items[index] = ""
            case "response.output_item.done":
                part = event["item"].get("content", [event["item"]])[0]
                assert items[index] == part.get("text", part.get("arguments"))
            case kind if kind.endswith(".delta"):
                assert index == len(items) - 1
                items[index] += event["delta"]
    last = events[-1]
    assert last["type"] == ("response.incomplete" if deltas[-1].finish_reason == "length" else "response.completed")
    assert without_ids(last["response"]) == without_ids(whole)


@settings(max_examples=150, deadline=None)
@given(deltas=answers())
def test_a_messages_events_put_together_are_the_whole(tokenizer, deltas):
    events = streamed(message_format(tokenizer), deltas)
    whole = json.loads(message_format(tokenizer).whole([deltas], USAGE))
    blocks, texts = [], []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"])
                texts.append("")
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                texts[-1] += next(text for name, text in event["delta"].items() if name != "type")
    for block, text, told in zip(blocks, texts, whole["content"], strict=True):
        if block["type"] == "tool_use":
            assert told["input"] in ({UNREAD: text}, json.loads(text or "{}") if told["input"] != {UNREAD: text} else 0)
        else:
            block[block["type"]] = text
            assert block == told
    assert events[-2]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}


def test_a_response_that_fails_says_so_and_keeps_what_it_has(tokenizer):
    form = response_format(tokenizer)
    form.events(ChoiceDelta(0, "half", (), (), None))
    *_, error, failed = events_of(form.failure(WorkerLost("d0 at 10.0.0.7")))
    assert (error["type"], error["code"]) == ("error", "worker_lost")
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "worker_lost"
    assert failed["response"]["output"][0]["content"][0]["text"] == "half"
    assert "10.0.0.7" not in json.dumps([error, failed])
