"""Requests that common clients send first: Claude Code, Codex, openai-agents, LiteLLM and others."""

import json
from pathlib import Path

import pytest
import pytest_asyncio
from llguidance import LLMatcher, LLTokenizer

from twostroke.router.text.tokenizer import TextTokenizer

MODEL_FOLDER = Path(__file__).parents[4] / "model" / "bundled"
TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RAIN = {"type": "function", "function": {"name": "rain", "parameters": SCHEMA}}
SNOW = {"type": "function", "function": {"name": "snow", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "rain", "arguments": {"city": "Oslo"}}\n</tool_call>'
USER = {"role": "user", "content": "Rain in Oslo?"}
MESSAGE = {"messages": [USER], "max_tokens": 8}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def speaker():
    return TextTokenizer.load(MODEL_FOLDER, TEMPLATE)


@pytest_asyncio.fixture
async def site(site_of, speaker):
    async with site_of(1, 1, speaks=speaker) as site:
        yield site


async def post(site, path, body, **headers):
    return await site.http.post(path, json=body, headers=headers)


def prompt_of(site, speaker):
    """The last prompt that a worker was given."""
    return speaker.decode(site.rig["p0"].seen[-1].token_ids)


def plays(site, speaker, text):
    """Have the workers write this text; returns its number of tokens."""
    script = [*speaker._encode(text, False), speaker.eos_token_ids[0]]
    for worker in site.rig.fleet.all.values():
        worker.script = script
    return len(script) - 1


def follows(speaker, grammar, text):
    tokens = LLTokenizer(speaker.vocabulary.tokenizer, n_vocab=speaker.vocab_size, eos_token=[1])
    matcher = LLMatcher(tokens, grammar)
    ids = speaker._encode(text, False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


# --- Claude Code ---


@pytest.mark.parametrize(
    ("edits", "status"),
    [
        ([{"type": "clear_thinking_20251015", "keep": "all"}], 200),
        ([], 200),
        (None, 200),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}], 400),
        ([{"type": "clear_tool_uses_20250919"}], 400),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
async def test_a_management_of_the_context_that_asks_for_nothing_is_taken(site, path, edits, status):
    body = {"messages": [USER], "context_management": {"edits": edits}}
    answer = await post(site, path, body | ({"max_tokens": 8} if path == MESSAGES else {}))
    assert answer.status_code == status, answer.text
    assert status == 200 or answer.json()["error"]["message"].startswith("context_management: ")


async def test_the_block_about_bills_does_not_reach_the_prompt(site, speaker):
    prompts = []
    for number in (1, 2):
        bill = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number};"}
        system = [bill, {"type": "text", "text": "Be brief."}]
        assert (await post(site, MESSAGES, {**MESSAGE, "system": system})).status_code == 200
        prompts.append(prompt_of(site, speaker))
    assert prompts[0] == prompts[1]
    assert prompts[0].startswith("<|im_start|>system\nBe brief.")
    assert (await post(site, MESSAGES, {**MESSAGE, "system": [bill]})).status_code == 200
    assert "system" not in prompt_of(site, speaker)


async def test_the_older_name_of_a_format_binds_the_answer(site, speaker):
    form = {"type": "json_schema", "schema": {"const": 7}}
    assert (await post(site, MESSAGES, {**MESSAGE, "output_format": form})).status_code == 200
    assert follows(speaker, site.rig["p0"].seen[-1].grammar, "7")
    assert not follows(speaker, site.rig["p0"].seen[-1].grammar, "8")
    wrong = await post(site, MESSAGES, {**MESSAGE, "output_format": {"type": "json_schema", "schema": {"type": "x"}}})
    assert wrong.json()["error"]["message"].startswith("output_format.schema: ")


async def test_a_budget_of_thinking_is_taken_by_a_model_that_does_not_think(site):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = await post(site, MESSAGES, {**MESSAGE, "thinking": thinking})
    assert answer.status_code == 200, answer.text
    plain = await post(site, CHAT, {**MESSAGE, "thinking_token_budget": 1024})
    assert (plain.status_code, plain.json()["error"]["param"]) == (400, "thinking_token_budget")


@pytest.mark.parametrize(("length", "status"), [(128, 200), (129, 400)])
async def test_names_of_tools_have_128_characters(site, length, status):
    tool = {"name": "n" * length, "input_schema": SCHEMA}
    assert (await post(site, MESSAGES, {**MESSAGE, "tools": [tool]})).status_code == status
    tool = {"type": "function", "function": {"name": "n" * length}}
    assert (await post(site, CHAT, {**MESSAGE, "tools": [tool]})).status_code == status


@pytest.mark.parametrize("role", ["user", "assistant"])
async def test_a_message_may_have_no_content(site, role):
    for path in (MESSAGES, CHAT):
        answer = await post(site, path, {**MESSAGE, "messages": [USER, {"role": role, "content": []}, USER]})
        assert answer.status_code == 200, answer.text
    assert (await post(site, MESSAGES, {**MESSAGE, "messages": [{"role": "user", "content": []}]})).status_code == 200


async def test_documents_of_text_are_a_part_of_the_prompt(site, speaker):
    plain = {"type": "text", "media_type": "text/plain", "data": "Rivers run."}
    parts = {"type": "content", "content": [{"type": "text", "text": "Hills"}, {"type": "text", "text": "stand."}]}
    documents = [
        {"type": "document", "source": plain, "title": "Rivers", "context": "A poem."},
        {"type": "document", "source": parts, "citations": {"enabled": False}, "cache_control": {"type": "ephemeral"}},
    ]
    call = {"type": "tool_use", "id": "c1", "name": "rain", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": documents}
    for said in (
        ([USER, {"role": "user", "content": documents}],),
        ([USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}],),
    ):
        answer = await post(site, MESSAGES, {**MESSAGE, "messages": said[0]})
        assert answer.status_code == 200, answer.text
        assert "Rivers\n\nA poem.\n\nRivers run.\nHills\nstand." in prompt_of(site, speaker)
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
    refusal = await post(site, MESSAGES, {**MESSAGE, "messages": [{"role": "user", "content": [pdf]}]})
    assert refusal.json()["error"]["message"].startswith("messages.0.content.0.source: the type 'base64' is not")


@pytest.mark.parametrize(("kind", "name"), [("text", "data"), ("content", "content")])
async def test_a_document_without_its_text_is_refused(site, kind, name):
    document = {"type": "document", "source": {"type": kind}}
    refusal = await post(site, MESSAGES, {**MESSAGE, "messages": [{"role": "user", "content": [document]}]})
    assert refusal.json()["error"]["message"] == f"messages.0.content.0.source.{name}: is required"


async def test_answers_of_anthropics_api_have_their_id_under_its_name(site):
    for path, body in ((MESSAGES, MESSAGE), (MESSAGES, {**MESSAGE, "stream": True}), (MESSAGES, {"max_tokens": 0})):
        answer = await post(site, path, body, **{"x-request-id": "r-1"})
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == "r-1"
    assert "request-id" not in (await post(site, CHAT, MESSAGE)).headers


async def test_models_are_listed_in_anthropics_form_where_its_header_asks(site):
    version = {"anthropic-version": "2023-06-01"}
    for path in ("/v1/models", "/v1/models/"):
        told = (await site.http.get(path, headers=version)).json()
        assert {name: told[name] for name in ("has_more", "first_id", "last_id")} == {
            "has_more": False,
            "first_id": "fake",
            "last_id": "fake",
        }
        (card,) = told["data"]
        assert (card["type"], card["id"], card["display_name"]) == ("model", "fake", "fake")
        assert card["created_at"].endswith("Z")
        assert (await site.http.get("/v1/models/fake", headers=version)).json() == card
        assert (await site.http.get(path)).json()["data"][0]["object"] == "model"
    lacks = await site.http.get("/v1/models/other", headers=version)
    assert (lacks.status_code, lacks.json()["error"]["type"]) == (404, "not_found_error")


# --- Codex ---

CODEX_TOOLS = [
    {"type": "function", "name": "shell", "parameters": SCHEMA, "strict": False},
    {"type": "web_search", "external_web_access": False},
    {"type": "local_shell"},
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
    },
    {"type": "tool_search", "execution": "client", "description": "Search", "parameters": SCHEMA},
    {
        "type": "namespace",
        "name": "mcp__weather__",
        "description": "The weather.",
        "tools": [{"type": "function", "name": "rain", "parameters": SCHEMA}, {"type": "custom", "name": "raw"}],
    },
]
LEFT_OUT = "web_search, local_shell, custom, tool_search"


@pytest.mark.parametrize("strict", [True, False])
async def test_tools_that_only_openai_runs_are_left_out_and_told(site_of, speaker, caplog, strict):
    async with site_of(1, 1, speaks=speaker, strict=strict) as site:
        for _ in range(2):
            body = {"input": "hi", "tools": CODEX_TOOLS, "max_output_tokens": 8, "client_metadata": {"a": "b"}}
            answer = await post(site, RESPONSES, body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-tools-left-out"] == LEFT_OUT
        prompt = prompt_of(site, speaker)
        assert [f'"name": "{name}"' in prompt for name in ("shell", "mcp__weather__rain", "apply_patch")] == [
            True,
            True,
            False,
        ]
        named = [record.args[0] for record in caplog.records if "left out" in record.getMessage()]
        assert named == LEFT_OUT.split(", ")
        plain = await post(site, RESPONSES, {"input": "hi", "tools": CODEX_TOOLS[:1], "max_output_tokens": 8})
        assert "x-tools-left-out" not in plain.headers


@pytest.mark.parametrize("streams", [True, False])
async def test_a_call_within_a_namespace_is_told_by_both_names_and_can_be_sent_back(site, speaker, streams):
    plays(site, speaker, CALL.replace("rain", "mcp__weather__rain"))
    body = {"input": [USER], "tools": CODEX_TOOLS, "stream": streams}
    answer = await post(site, RESPONSES, body)
    if streams:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        (item,) = events[-1]["response"]["output"]
        assert [one["item"]["namespace"] for one in events if one["type"] == "response.output_item.added"] == [
            "mcp__weather__"
        ]
    else:
        (item,) = answer.json()["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "rain", "mcp__weather__")
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "yes"}
    again = await post(site, RESPONSES, {**body, "input": [USER, item, output], "stream": False})
    assert again.status_code == 200, again.text
    assert '<tool_call>{"name": "mcp__weather__rain", "arguments": {"city": "Oslo"}}' in prompt_of(site, speaker)


async def test_items_of_tools_that_are_left_out_are_text_for_the_model(site, speaker):
    items = [
        USER,
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "rain"}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done!"},
        {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c2", "output": "a.txt"},
        {"type": "tool_search_call", "call_id": "c3", "execution": "client", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": "c3", "execution": "client", "status": "completed", "tools": []},
        USER,
    ]
    answer = await post(site, RESPONSES, {"input": items, "max_output_tokens": 8})
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(site, speaker)
    assert '<|im_start|>assistant\n{"type":"web_search_call","action":{"type":"search","query":"rain"}}' in prompt
    assert '<|im_start|>user\n{"type":"custom_tool_call_output","call_id":"c1","output":"Done!"}' in prompt
    assert "*** Begin Patch" in prompt
    assert "a.txt" in prompt


async def test_to_ask_for_what_left_out_tools_would_tell_is_no_error(site):
    include = ["reasoning.encrypted_content", "web_search_call.action.sources", "code_interpreter_call.outputs"]
    answer = await post(site, RESPONSES, {"input": "hi", "include": include, "max_output_tokens": 8})
    assert answer.status_code == 200, answer.text
    wrong = await post(site, RESPONSES, {"input": "hi", "include": ["everything"]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "include.0")


# --- openai-agents, instructor ---

SEVEN = {"type": "json_schema", "name": "n", "schema": {"const": 7}, "strict": True}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_forced_call_is_made_whatever_the_format_of_content_is(site, speaker, path):
    plays(site, speaker, CALL)
    body = {"messages": [USER], "tools": [RAIN], "tool_choice": "required"}
    body["response_format"] = {"type": "json_schema", "json_schema": SEVEN}
    if path == RESPONSES:
        tool = {"type": "function", **RAIN["function"]}
        body = {"input": [USER], "tools": [tool], "tool_choice": "required", "text": {"format": SEVEN}}
    answer = await post(site, path, body)
    assert answer.status_code == 200, answer.text
    assert '"rain"' in answer.text
    grammar = site.rig["p0"].seen[-1].grammar
    assert follows(speaker, grammar, CALL)
    assert not follows(speaker, grammar, "7")


# --- LiteLLM, aider, LangChain, OpenHands ---

LONG = [{"role": "user", "content": "word " * 600}]
BEGIN = "This model's maximum context length is 512 tokens. However, "


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        (CHAT, {"messages": LONG}, "messages", "your messages resulted in "),
        (CHAT, {"messages": [USER], "max_tokens": 512}, "max_tokens", "you requested "),
        (RESPONSES, {"input": "word " * 600}, "input", "your messages resulted in "),
        (RESPONSES, {"input": "hi", "max_output_tokens": 512}, "max_output_tokens", "you requested "),
        ("/v1/completions", {"prompt": [1] * 513}, "prompt", "your prompt resulted in 513 tokens"),
        ("/v1/completions", {"prompt": [1] * 512}, "prompt", "your prompt resulted in 512 tokens"),
        (
            "/v1/completions",
            {"prompt": [1] * 500, "max_tokens": 100},
            "max_tokens",
            "you requested 600 tokens (500 in the prompt, 100 in the completion). Please reduce the length of the "
            "prompt, or max_tokens to 12.",
        ),
        ("/v1/completions", {"prompt": "x" * 3_000_000}, "prompt", "your prompt resulted in "),
        ("/v1/embeddings", {"input": [1] * 513}, "input", "your input resulted in 513 tokens"),
        ("/tokenize", {"prompt": "x" * 3_000_000}, "prompt", "your prompt resulted in "),
    ],
)
async def test_a_prompt_that_is_too_long_is_told_in_openais_words(site, path, body, param, words):
    answer = await post(site, path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert error["message"].startswith(BEGIN + words)


async def test_a_prompt_that_is_too_long_is_told_in_anthropics_words(site):
    answer = await post(site, MESSAGES, {**MESSAGE, "messages": LONG})
    counted = await post(site, f"{MESSAGES}/count_tokens", {"messages": LONG})
    num = counted.json()["input_tokens"]
    error = {"type": "invalid_request_error", "message": f"prompt is too long: {num} tokens > 512 maximum"}
    assert (answer.status_code, answer.json()["error"]) == (400, error)
    answer = await post(site, MESSAGES, {**MESSAGE, "max_tokens": 4096})
    num = (await post(site, f"{MESSAGES}/count_tokens", {"messages": [USER]})).json()["input_tokens"]
    assert answer.json()["error"]["message"] == (
        f"input length and `max_tokens` exceed context limit: {num} + 4096 > 512, decrease input length or "
        "`max_tokens` and try again"
    )


# --- answers that are cut ---


def request_of(path, choice, num_tokens, streams):
    if path == CHAT:
        body = {"messages": [USER], "tools": [RAIN], "tool_choice": choice, "max_tokens": num_tokens}
    elif path == RESPONSES:
        tool = {"type": "function", **RAIN["function"]}
        body = {"input": [USER], "tools": [tool], "tool_choice": choice, "max_output_tokens": num_tokens}
    else:
        tool = {"name": "rain", "input_schema": SCHEMA}
        kind = {"required": "any"}.get(choice, choice)
        body = {"messages": [USER], "tools": [tool], "tool_choice": {"type": kind}, "max_tokens": num_tokens}
    return {**body, "stream": streams}


def content_of(path, answer, streams):
    """(content, number of calls) that a client gets, whole or out of a stream's events."""
    if path == CHAT and streams:
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        texts = [delta["content"] for delta in deltas if delta.get("content") is not None]
        calls = [call for delta in deltas for call in delta.get("tool_calls", []) if call.get("id")]
        return "".join(texts) if texts else None, len(calls)
    if path == CHAT:
        message = answer.json()["choices"][0]["message"]
        return message["content"], len(message.get("tool_calls", []))
    body = answer.json() if not streams else None
    if path == RESPONSES:
        output = body["output"] if body else json.loads(answer.text.strip().split("data: ")[-1])["response"]["output"]
        texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
        return "".join(texts) if texts else None, sum(item["type"] == "function_call" for item in output)
    if body:
        texts = [block["text"] for block in body["content"] if block["type"] == "text"]
        return "".join(texts) if texts else None, sum(block["type"] == "tool_use" for block in body["content"])
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    texts = [event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta"]
    return "".join(texts) if "text" in starts else None, starts.count("tool_use")


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_forced_answer_has_no_content_wherever_it_is_cut(site, speaker, path, streams):
    num_tokens = plays(site, speaker, f"{CALL}\n{CALL}")
    for most in range(1, num_tokens + 1):
        answer = await post(site, path, request_of(path, "required", most, streams))
        assert answer.status_code == 200, answer.text
        assert content_of(path, answer, streams)[0] is None, (most, answer.text)
        assert "tool_call>" not in answer.text


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_an_answer_that_is_cut_in_a_call_shows_nothing_of_its_marks(site, speaker, path, streams):
    begun = len(speaker._encode("I look.\n<tool_call>", False))
    num_tokens = plays(site, speaker, f"I look.\n{CALL}\n{CALL}")
    for most in range(begun, num_tokens + 1):
        answer = await post(site, path, request_of(path, "auto", most, streams))
        content, num_calls = content_of(path, answer, streams)
        assert content == "I look.", (most, answer.text)
        assert num_calls <= 2
    begun = len(speaker._encode("<tool_call>", False))
    num_tokens = plays(site, speaker, CALL)
    for most in range(begun, num_tokens):
        answer = await post(site, path, request_of(path, "auto", most, streams))
        assert content_of(path, answer, streams)[0] is None, (most, answer.text)


async def test_content_that_is_cut_where_a_mark_may_begin_is_told_whole(site, speaker):
    most = len(speaker._encode("1 <", False))
    plays(site, speaker, "1 < 2")
    answer = await post(site, CHAT, request_of(CHAT, "auto", most, False))
    assert answer.json()["choices"][0]["message"]["content"] == "1 <"


# --- what a refusal says ---


def message(**fields):
    return {"messages": [{"role": "user", "content": "a", **fields}]}


@pytest.mark.parametrize(
    ("path", "body", "begin"),
    [
        (CHAT, message(content=[{"type": "text", "text": 5}]), "messages.0.content.0.text: must be a string"),
        (CHAT, message(content=5), "messages.0.content: must be a string or a list"),
        (CHAT, message(content=[5]), "messages.0.content.0: must be an object"),
        (CHAT, message(content=[{"type": "text"}]), "messages.0.content.0.text: is required"),
        (CHAT, {"messages": ["a"]}, "messages.0: must be an object"),
        (
            CHAT,
            message(role="king"),
            "messages.0.role: must be 'system', 'developer', 'user', 'assistant', 'tool' or 'function'",
        ),
        (
            CHAT,
            message(content=[{"type": "input_text", "text": "a"}]),
            "messages.0.content.0: the type 'input_text' is not supported: text is of the type text here",
        ),
        (
            CHAT,
            message(tool_calls=[{"id": "a", "function": {"name": "f", "arguments": {}}}]),
            "messages.0.tool_calls.0.function.arguments: must be a string",
        ),
        (
            CHAT,
            {**message(), "tools": [RAIN], "tool_choice": 5},
            "tool_choice: must be 'auto', 'none' or 'required' or an object",
        ),
        (
            CHAT,
            {**message(), "tools": [RAIN], "tool_choice": {"type": "function"}},
            "tool_choice.function: is required",
        ),
        (
            CHAT,
            {**message(), "response_format": {"type": "json_schema", "json_schema": {"strict": "yes"}}},
            "response_format.json_schema.strict: must be true or false",
        ),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
            "input.0.content.0: the type 'text' is not supported: text is of the type input_text or output_text here",
        ),
        (RESPONSES, {"input": [{"role": "user", "content": 5}]}, "input.0.content: must be a string or a list"),
        (
            RESPONSES,
            {"input": "a", "tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": 5}]}]},
            "tools.0.tools.0.name: must be a string",
        ),
        (
            RESPONSES,
            {"input": "a", "text": {"format": {"type": "json_schema", "schema": []}}},
            "text.format.schema: must be an object",
        ),
        (
            MESSAGES,
            {**message(role="king"), "max_tokens": 8},
            "messages.0.role: must be 'user', 'assistant' or 'system'",
        ),
        (
            MESSAGES,
            {**message(content=[{"type": "tool_result", "tool_use_id": "a", "content": 5}]), "max_tokens": 8},
            "messages.0.content.0.content: must be a string or a list",
        ),
        (
            MESSAGES,
            {**message(content=[{"type": "input_text", "text": "a"}]), "max_tokens": 8},
            "messages.0.content.0: the type 'input_text' is not supported: text is of the type text here",
        ),
        (
            MESSAGES,
            {**message(), "max_tokens": 8, "tools": [{"name": "f", "input_schema": "a"}]},
            "tools.0.input_schema: must be an object",
        ),
        ("/v1/completions", {"prompt": 5}, "prompt: must be a string or a list"),
        (CHAT, {"stop": 5}, "stop: must be a string or a list"),
        (
            CHAT,
            {"tools": [RAIN], "tool_choice": {"type": "custom"}},
            "tool_choice: the type 'custom' is not supported: name a function, or allowed_tools",
        ),
        ("/tokenize", {"prompt": 5}, "prompt: must be a string"),
    ],
    ids=str,
)
async def test_a_refusal_names_the_place_and_the_forms_that_it_may_have(site, path, body, begin):
    answer = await post(site, path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith(begin)
    assert path == MESSAGES or error["param"] == begin.partition(":")[0]


# --- other fields ---


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_of_the_tools_those_that_are_allowed_may_be_called(site, speaker, path, mode):
    plays(site, speaker, CALL)
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "rain"}}]}
    body = {"messages": [USER], "tools": [SNOW, RAIN]}
    body["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
    if path == RESPONSES:
        tools = [{"type": "function", **tool["function"]} for tool in (SNOW, RAIN)]
        names = [{"type": "function", "name": "rain"}, {"type": "web_search"}]
        body = {"input": [USER], "tools": tools, "tool_choice": {"type": "allowed_tools", "mode": mode, "tools": names}}
    answer = await post(site, path, body)
    assert answer.status_code == 200, answer.text
    assert '"rain"' in answer.text
    assert path == CHAT or answer.json()["tool_choice"] == body["tool_choice"]
    assert "snow" not in prompt_of(site, speaker)
    grammar = site.rig["p0"].seen[-1].grammar
    assert bool(grammar) == (mode == "required")
    if mode == "required":
        assert follows(speaker, grammar, CALL)
        assert not follows(speaker, grammar, CALL.replace("rain", "snow"))


@pytest.mark.parametrize(
    ("path", "choice", "param"),
    [
        (
            CHAT,
            {"allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "hail"}}]}},
            "tool_choice.allowed_tools.tools.0.function.name",
        ),
        (CHAT, {"allowed_tools": {"mode": "any", "tools": []}}, "tool_choice.allowed_tools.mode"),
        (RESPONSES, {"mode": "auto", "tools": [{"type": "function", "name": "hail"}]}, "tool_choice.tools.0.name"),
        (RESPONSES, {"mode": "auto", "tools": [{"type": "web_search"}]}, "tool_choice.tools"),
    ],
)
async def test_a_wrong_choice_of_allowed_tools_is_named(site, path, choice, param):
    body = {"messages": [USER], "tools": [RAIN]}
    if path == RESPONSES:
        body = {"input": [USER], "tools": [{"type": "function", **RAIN["function"]}]}
    answer = await post(site, path, {**body, "tool_choice": {"type": "allowed_tools", **choice}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_the_tokenizer_is_told_as_vllm_tells_it(site, speaker):
    told = (await site.http.get("/tokenizer_info")).json()
    assert told["chat_template"] == TEMPLATE
    assert told["eos_token"] == speaker.token(speaker.eos_token_ids[0])
    assert "tokenizer_class" in told


async def test_annotations_of_an_answer_may_be_sent_back(site):
    citation = {"type": "url_citation", "url_citation": {"url": "https://example.org", "title": "Rain"}}
    said = {"role": "assistant", "content": "Yes.", "annotations": [citation]}
    assert (await post(site, CHAT, {"messages": [USER, said, USER], "max_tokens": 8})).status_code == 200


async def test_an_answer_goes_on_from_a_last_message_that_is_its_prefix(site, speaker):
    said = {"role": "assistant", "content": "It rains in Os", "prefix": True}
    assert (await post(site, CHAT, {"messages": [USER, said], "max_tokens": 8})).status_code == 200
    assert prompt_of(site, speaker).endswith("<|im_start|>assistant\nIt rains in Os")
    assert (await post(site, CHAT, {"messages": [USER, said, USER], "max_tokens": 8})).status_code == 200
    assert prompt_of(site, speaker).endswith("<|im_start|>assistant\n")
