import json

import pytest

from twostroke.protocol.requests import GenerateRequest, SamplingParams
from twostroke.router.openai.answers import ChatWriter, ChoiceDelta, ToolCallDelta
from twostroke.router.openai.schemas import ChatRequest
from twostroke.router.request_state import ChoiceJob

DELTAS = [
    ChoiceDelta(0, "", (1,), (), None, reasoning="They ask "),
    ChoiceDelta(0, "", (2,), (), None, reasoning="for rain."),
    ChoiceDelta(0, "Let me look.", (3,), (), None),
    ChoiceDelta(0, "", (4,), (), None, tool_calls=(ToolCallDelta(0, "call_1", "rain"),)),
    ChoiceDelta(0, "", (5,), (), None, tool_calls=(ToolCallDelta(0, arguments='{"at": '),)),
    ChoiceDelta(
        0, "", (6,), (), None, tool_calls=(ToolCallDelta(0, arguments='"Oslo"}'), ToolCallDelta(1, "call_2", "sun"))
    ),
    ChoiceDelta(0, "", (7,), (), "tool_calls", tool_calls=(ToolCallDelta(1, arguments="{}"),)),
]
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "rain", "arguments": '{"at": "Oslo"}'}},
    {"id": "call_2", "type": "function", "function": {"name": "sun", "arguments": "{}"}},
]


@pytest.fixture
def form(tokenizer):
    fields = ChatRequest.model_validate({"messages": [{"role": "user", "content": "?"}]})
    jobs = [ChoiceJob(GenerateRequest("", "", (1,), 1, SamplingParams(), 100))]
    return ChatWriter(fields, jobs, tokenizer, model="m", created=1, service_tier=None)


def test_a_whole_chat_has_reasoning_and_calls_beside_its_content(form):
    answer = json.loads(form.whole([DELTAS], {}))
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "Let me look.",
        "refusal": None,
        "reasoning_content": "They ask for rain.",
        "reasoning": "They ask for rain.",
        "tool_calls": CALLS,
    }


def test_calls_alone_leave_no_content(form):
    [choice] = json.loads(form.whole([DELTAS[3:]], {}))["choices"]
    assert choice["message"]["content"] is None


def test_a_stream_tells_each_call_once_and_then_its_arguments(form):
    written = b"".join(form.events(delta) for delta in DELTAS)
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in written.split(b"\n\n") if line]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1] == {"reasoning_content": "They ask ", "reasoning": "They ask "}
    assert deltas[3] == {"content": "Let me look."}
    opening = {"id": "call_1", "type": "function", "function": {"name": "rain", "arguments": ""}}
    assert deltas[4] == {"tool_calls": [{"index": 0, **opening}]}
    assert deltas[5] == {"tool_calls": [{"index": 0, "function": {"arguments": '{"at": '}}]}
    assert deltas[7] == {"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}
