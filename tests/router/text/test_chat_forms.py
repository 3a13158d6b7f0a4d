# ruff: noqa: E501
"""Calls, rules and tools in chat templates. The templates have the shapes of public ones, and no more."""

import json

import pytest

from twostroke.protocol.errors import RequestError
from twostroke.router.text.chat_forms import ChatForms, ChatTemplate
from twostroke.router.text.output_format import pick_output_format, with_calls

CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
QWEN = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}"
    "<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><tool_call></tool_call><|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or (m.role == 'assistant' and not m.tool_calls) %}" + CHATML +
    "{%- elif m.role == 'assistant' %}<|im_start|>assistant{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{%- for call in m.tool_calls %}{% set call = call.function %}{{ '\n<tool_call>\n{\"name\": \"' + call.name + '\", \"arguments\": ' }}{{ ARGUMENTS }}{{ '}\n</tool_call>' }}{% endfor %}<|im_end|>\n"
    "{%- elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n{%- endif %}{% endfor %}"
)  # fmt: skip
DEEPSEEK = (
    "{%- set ns = namespace(rules='') %}{%- for m in messages %}{%- if m['role'] == 'system' %}{% set ns.rules = ns.rules + m['content'] %}{%- endif %}{% endfor %}{{ ns.rules }}"
    "{%- for m in messages %}{%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}{%- endif %}CALLS"
    "{%- if m['role'] == 'tool' %}{{ '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}{%- endif %}{% endfor %}"
)
DEEPSEEK_R1 = DEEPSEEK.replace(
    "CALLS",
    "{%- if m['role'] == 'assistant' and m['content'] is none %}{%- for tool in m['tool_calls'] %}"
    "{{ '<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"
    "{%- endfor %}{%- endif %}{%- if m['role'] == 'assistant' and m['content'] is not none %}{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}{%- endif %}",
)
DEEPSEEK_V31 = DEEPSEEK.replace(
    "CALLS",
    "{%- if m['role'] == 'assistant' and m['tool_calls'] is defined and m['tool_calls'] is not none %}{{ '<｜Assistant｜></think>' }}{%- for tool in m['tool_calls'] %}"
    "{%- if m['content'] is none %}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}"
    "{%- else %}{{ m['content'] + '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] + '<｜tool▁call▁end｜>' }}{%- endif %}"
    "{%- endfor %}{{ '<｜tool▁calls▁end｜>' }}{%- elif m['role'] == 'assistant' %}{{ '<｜Assistant｜></think>' + m['content'] }}{%- endif %}",
)
MISTRAL = (
    "{%- set rule = messages[0].content if messages[0].role == 'system' else none %}{% set ns = namespace(turn=0) %}{%- for m in (messages[1:] if rule else messages) | rejectattr('role', 'equalto', 'tool') | selectattr('tool_calls', 'undefined') %}"
    "{% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.turn = ns.turn + 1 %}{% endfor %}{%- for m in (messages[1:] if rule else messages) %}"
    "{%- if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{% if rule and loop.last %}{{ rule + '\n\n' }}{% endif %}{{ m.content }}[/INST]"
    "{%- elif m.tool_calls %}CALLS{%- elif m.role == 'assistant' %}{{ ' ' + m.content | trim }}</s>"
    "{%- elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}[TOOL_RESULTS]{{ {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]"
    "{%- else %}{{ raise_exception('Only user and assistant roles are supported') }}{%- endif %}{% endfor %}"
)
GEMMA = (
    "{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{%- endif %}{%- for m in messages %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{%- endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
)
TURN = "{%- for m in messages %}{% if m.role not in ROLES %}{{ raise_exception('role') }}{% endif %}<|{{ m.role }}|>{{ m.content or '' }}{% for call in m.tool_calls or [] %}{% set call = call.function %}CALLS{% endfor %}{% endfor %}{{ tools | tojson if tools }}"


def turns(calls, roles="['system', 'user', 'assistant', 'tool']"):
    return TURN.replace("CALLS", calls).replace("ROLES", roles)


KIMI = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|im_{{ m.role }}|>{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
    "{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}{% endif %}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
)
AS_JSON = '{"city": "Oslo", "days": 2}'
NAMED = '{"name": "rain", "arguments": ' + AS_JSON + "}"
# family: (template, what a call becomes)
FAMILIES = {
    "hermes: Qwen2.5": (QWEN.replace("ARGUMENTS", "call.arguments | tojson"), f"<tool_call>\n{NAMED}\n</tool_call>"),
    "hermes: Qwen3": (QWEN.replace("ARGUMENTS", "call.arguments if call.arguments is string else call.arguments | tojson"), f"<tool_call>\n{NAMED}\n</tool_call>"),
    "deepseek_v3: R1": (DEEPSEEK_R1, f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>rain\n```json\n{AS_JSON}\n```<｜tool▁call▁end｜>"),
    "deepseek_v31": (DEEPSEEK_V31, f"<｜tool▁call▁begin｜>rain<｜tool▁sep｜>{AS_JSON}<｜tool▁call▁end｜>"),
    "mistral": (MISTRAL.replace("CALLS", "[TOOL_CALLS] [{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}]</s>"), f"[TOOL_CALLS] [{NAMED}]</s>"),
    "mistral_args": (MISTRAL.replace("CALLS", "{{ m.content }}{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}{% endfor %}"), f"[TOOL_CALLS]rain[ARGS]{AS_JSON}"),
    "llama3": ("{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}{% endfor %}<|start_header_id|>" + turns('{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}'), f'{{"name": "rain", "parameters": {AS_JSON}}}'),
    "granite": (turns("<|tool_call|>[{{ call | tojson }}]"), f"<|tool_call|>[{NAMED}]"),
    "glm4": (turns("<tool_call>{{ call.name }}\n{% for k, v in call.arguments | items %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"), "<tool_call>rain\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"),
    "qwen3_coder": (turns("<tool_call>\n<function={{ call.name }}>\n{% for k in call.arguments %}<parameter={{ k }}>\n{{ call.arguments[k] }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"), "<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"),
    "glm47": (turns("<tool_call>{{ call.name }}{% for k, v in call.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v | tojson if v is not string else v }}</arg_value>{% endfor %}</tool_call>"), "<tool_call>rain<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"),
    "minimax_m2": (turns("\n<minimax:tool_call>\n<invoke name=\"{{ call.name }}\">\n{% for k, v in call.arguments | items %}<parameter name=\"{{ k }}\">{{ v | tojson if v is not string else v }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>"), '<parameter name="city">Oslo</parameter>\n<parameter name="days">2</parameter>\n'),
    "deepseek_v32": (turns("<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"{{ call.name }}\">\n{% if call.arguments is mapping %}{% for k, v in call.arguments.items() %}<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">{{ v if v is string else v | tojson }}</｜DSML｜parameter>\n{% endfor %}{% endif %}</｜DSML｜invoke>\n</｜DSML｜function_calls>"), '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'),
    "kimi_k2": (KIMI, f"<|tool_call_begin|>functions.rain:0<|tool_call_argument_begin|>{AS_JSON}<|tool_call_end|>"),
    "lfm2": (turns("<|tool_call_start|>[{{ call.name }}({% for k, v in call.arguments.items() %}{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}{{ ', ' if not loop.last }}{% endfor %})]<|tool_call_end|>"), "<|tool_call_start|>[rain(city='Oslo', days=2)]<|tool_call_end|>"),
    "lfm2 without calls": ("{# <|tool_list_start|> #}{{ tools | tojson if tools }}{% for m in messages %}" + CHATML + "{% endfor %}", "<|tool_call_start|>[rain(city='Oslo', days=2)"),
    "nemotron": (turns("<TOOLCALL>[{{ call | tojson }}]</TOOLCALL>"), f"<TOOLCALL>[{NAMED}]</TOOLCALL>"),
    "gemma": (turns("<start_function_call>call:{{ call.name }}{% raw %}{{% endraw %}{% for k, v in call.arguments | dictsort %}{{ k }}:{% if v is string %}<escape>{{ v }}<escape>{% else %}{{ v }}{% endif %}{{ ',' if not loop.last }}{% endfor %}}<end_function_call>"), "call:rain{city:<escape>Oslo<escape>,days:2}<end_function_call>"),
    "gemma4": (turns("<|tool_call>call:{{ call.name }}{% raw %}{{% endraw %}{% for k, v in call.arguments | items %}{{ k }}:{% if v is string %}<|\"|>{{ v }}<|\"|>{% else %}{{ v }}{% endif %}{{ ',' if not loop.last }}{% endfor %}}<tool_call|>"), 'call:rain{city:<|"|>Oslo<|"|>,days:2}<tool_call|>'),
    "harmony": (turns("<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>", "['system', 'developer', 'user', 'assistant', 'tool']"), f"to=functions.rain<|channel|>commentary json<|message|>{AS_JSON}<|call|>"),
    "text alone": (turns("<call>{{ call.name + ' ' + call.arguments }}</call>"), f"<call>rain {AS_JSON}</call>"),
    "no calls, as SmolLM2": ("{% for m in messages %}" + CHATML + "{% endfor %}", f"<tool_call>\n{NAMED}\n</tool_call>"),
    "no calls, turns alternate, as Gemma": (GEMMA, f"<tool_call>\n{NAMED}\n</tool_call>"),
}  # fmt: skip
NO_TOOLS = ("deepseek_v3: R1", "deepseek_v31", "text alone")
TOOLS = [{"type": "function", "function": {"name": "rain", "description": "Whether it rains.", "parameters": {}}}]


def forms_of(family):
    template = ChatTemplate(FAMILIES[family][0], origin="here", special_tokens={})
    form = pick_output_format(None, None, "", template.source)
    is_own = form is not None and form.call is not None
    return template, ChatForms(template, (form if is_own else with_calls(None)).call, is_own=is_own)


def rendered(family, messages, tools=None):
    template, forms = forms_of(family)
    told, tools = forms.settled(messages, tools)
    return template.render(told, tools=tools)


def called(arguments=AS_JSON, says=""):
    function = {"name": "rain", "arguments": arguments}
    return {"role": "assistant", "content": says, "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": function}]}  # fmt: skip


ASKED = {"role": "user", "content": "Rain in Oslo?"}
RESULT = {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "rain", "content": "It pours."}
MORE = {"role": "user", "content": "And now?"}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("says", ["", "I look it up."])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_of_an_earlier_turn_is_shown_as_the_model_writes_it(family, says, tools):
    more = [{"role": "assistant", "content": "It does."}, MORE] if family.startswith("mistral") else [MORE]
    prompt = rendered(family, [ASKED, called(says=says), RESULT, *more], tools)
    # What answers are read by is what the model is shown: with tools, where its own way is not known, that is ours.
    call = FAMILIES["no calls, as SmolLM2" if tools and family == "text alone" else family][1]
    says = "" if family == "mistral" else says  # its template has no place for it, and turns alternate
    at = [prompt.find(part) for part in ("Rain in Oslo?", says, call, "It pours.", "And now?")]
    assert -1 not in at, prompt
    assert at[2:] == sorted(at[2:]), prompt
    assert "None" not in prompt
    assert "Whether it rains." in prompt or tools is None


@pytest.mark.parametrize("says", ["", "I look it up."])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_calls_of_one_turn_are_shown(family, says):
    two = called(says=says)
    two["tool_calls"] += called('{"city": "Bergen"}')["tool_calls"]
    prompt = rendered(family, [ASKED, two, RESULT, {**RESULT, "content": "It is dry."}])
    at = [prompt.find(part) for part in ("Rain in Oslo?", "Bergen", "It pours.", "It is dry.")]
    assert -1 not in at, prompt
    assert at == sorted(at), prompt
    assert FAMILIES[family][1] in prompt or family == "mistral"


@pytest.mark.parametrize("arguments", ["", "null", " ", '{"city": "Os', "[1]"])
@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_that_are_no_object_stand_as_they_were_or_are_none(family, arguments):
    prompt = rendered(family, [ASKED, called(arguments), RESULT])
    assert "rain" in prompt
    assert '\\"' not in prompt, "text within JSON teaches the model to write it"
    if not arguments.strip() and '{"name"' in FAMILIES[family][1] and "parameters" not in FAMILIES[family][1]:
        assert '"arguments": {}' in prompt
    if (
        family in ("hermes: Qwen3", "deepseek_v3: R1", "deepseek_v31", "mistral_args", "text alone")
        and arguments.strip()
    ):
        assert arguments in prompt


@pytest.mark.parametrize("value", [r'"\ud800"', r'{"\udfff": 1}', "[1e999]", "-1e999", "NaN"])
@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_that_no_prompt_can_show_stand_as_they_were_or_are_none(family, value):
    arguments = f'{{"city": {value}}}'
    prompt = rendered(family, [ASKED, called(arguments), RESULT])
    prompt.encode()
    assert "rain" in prompt
    # The text stands where templates show text; elsewhere nothing of it does.
    assert arguments in prompt or not any(one in prompt for one in ("city", "Infinity", "inf", "NaN", "nan"))


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_are_told_by_the_template_or_else_by_a_rule(family):
    rules = [] if "Gemma" in family else [{"role": "system", "content": "Be brief."}]
    prompt = rendered(family, [*rules, ASKED], TOOLS)
    assert "Whether it rains." in prompt
    assert ("You may call functions" in prompt) == ("no calls" in family or family in NO_TOOLS)
    assert "Be brief." in prompt or not rules


def test_ids_name_functions_where_a_template_shows_ids_alone():
    two = called()
    two["tool_calls"] += [{**called('{"city": "Bergen"}')["tool_calls"][0], "id": "b"}]
    results = [RESULT, {**RESULT, "tool_call_id": "b"}, {**RESULT, "tool_call_id": "of no call"}]
    prompt = rendered("kimi_k2", [ASKED, two, *results, called(), RESULT], TOOLS)
    assert [prompt.count(f"functions.rain:{i}") for i in range(4)] == [2, 2, 2, 0]
    assert "Return of functions.rain:1\n" in prompt
    assert "Return of of no call\n" in prompt


RULE, OTHER = {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be kind."}
TEMPLATES = {name: template for name, (template, _) in FAMILIES.items()} | {
    "drops system": "{% for m in messages %}{% if m.role in ('user', 'assistant') %}" + CHATML + "{% endif %}{% endfor %}",
    "Phi": "{% for m in messages %}{% if m.role == 'system' %}<|system|>{{ m.content }}<|end|>{% elif m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}<|end|>{% endif %}{% endfor %}",
    "Nemotron": "{% set rule = messages[0].content if messages[0].role == 'system' else '' %}<extra_id_0>System\n{{ rule }}\n{% for m in (messages[1:] if messages[0].role == 'system' else messages) %}{% if m.role == 'user' %}<extra_id_1>User\n{{ m.content }}\n{% elif m.role == 'assistant' %}<extra_id_1>Assistant\n{{ m.content }}\n{% endif %}{% endfor %}",
    "gpt-oss": "{% if messages[0].role in ('developer', 'system') %}<|start|>developer<|message|>{{ messages[0].content }}<|end|>{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}{% if m.role in ('user', 'assistant') %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}",
    "knows both": "{# the roles: system, developer, user, assistant #}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize(
    "messages",
    [
        [OTHER, ASKED],
        [RULE, OTHER, ASKED],
        [OTHER, RULE, ASKED],
        [RULE, ASKED, {"role": "assistant", "content": "Yes."}, OTHER, MORE],
        [RULE, ASKED],
    ],
    ids=["developer", "both", "both, the other way", "later", "system"],
)
@pytest.mark.parametrize("family", TEMPLATES)
def test_rules_of_developers_and_the_system_are_not_dropped(family, messages):
    template = ChatTemplate(TEMPLATES[family], origin="here", special_tokens={})
    told, _ = ChatForms(template, with_calls(None).call, is_own=False).settled(messages, None)
    if "Gemma" in family:  # the template says itself that it has no place for rules
        with pytest.raises(RequestError, match="System role not supported"):
            template.render(told)
        return
    prompt = template.render(told)
    for message in messages:
        assert message["content"] in prompt, prompt
    if family == "knows both":
        assert told == messages


def test_developers_are_the_system_for_a_template_that_does_not_name_them():
    source = (
        "{% for m in messages %}{% if loop.first and messages[0].role != 'system' %}<|system|>I am SmolLM.{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(source, origin="here", special_tokens={})
    told, _ = ChatForms(template, with_calls(None).call, is_own=False).settled([OTHER, ASKED], None)
    assert template.render(told).startswith("<|system|>Be kind.<|user|>")


def test_what_the_template_takes_goes_to_it_as_it_is():
    template = ChatTemplate(TEMPLATES["knows both"], origin="here", special_tokens={})
    messages = [RULE, ASKED, {"role": "assistant", "content": ""}, MORE]
    told, tools = ChatForms(template, with_calls(None).call, is_own=True).settled(messages, None)
    assert (told, tools) == (messages, None)


def test_json_in_a_rule_about_tools_is_whole():
    prompt = rendered("no calls, as SmolLM2", [ASKED], TOOLS)
    (line,) = [line for line in prompt.splitlines() if line.startswith('{"name": "rain"')]
    assert json.loads(line) == TOOLS[0]["function"]


def test_a_template_is_asked_once_however_many_rules_a_chat_has(monkeypatch):
    template, forms = forms_of("hermes: Qwen3")
    forms.settled([RULE, OTHER, ASKED, RULE, MORE], TOOLS)
    renders = []
    monkeypatch.setattr(template, "render", lambda *_, **__: renders.append(1))
    told, _ = forms.settled([RULE, OTHER] * 1000 + [ASKED, RULE, OTHER, MORE], TOOLS)
    assert len(told) == 2004
    assert not renders
