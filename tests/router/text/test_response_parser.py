# ruff: noqa: E501
"""Outputs of models, format by format: parsed whole, and cut in two at every character."""

import json
import random
import re
from functools import cache

import pytest

from twostroke.router.text.output_format import pick_output_format

TOOLS = {
    "rain": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "sun": {"type": "object", "properties": {}},
}
ARGUMENTS = {"city": 'Oslo "{x}" ☂', "days": 2}
BODY = json.dumps(ARGUMENTS, ensure_ascii=False)
OBJECT = f'{{"name": "rain", "arguments": {BODY}}}'
SUN = '{"name": "sun", "arguments": {}}'

# format, the end of the prompt, what the model writes, (content, reasoning, names)
TRANSCRIPTS = [
    ("hermes", "", f"<tool_call>\n{OBJECT}\n</tool_call>", ("", "", ["rain"])),
    ("hermes", "", f"Let me look.\n<tool_call>{OBJECT}</tool_call>\n<tool_call>\n{SUN}\n</tool_call>\n", ("Let me look.", "", ["rain", "sun"])),
    ("hermes+think", "<think>\n", f"Hm.\n</think>\n\n<tool_call>\n{OBJECT}\n</tool_call>", ("", "Hm.", ["rain"])),
    ("hermes+think", "", "<think>\nHm.\n</think>\n\nHello.\n", ("Hello.\n", "Hm.", [])),
    ("hermes+think", "<think>\n\n</think>\n\n", " Hello, see <think>.", ("Hello, see <think>.", "", [])),
    ("hermes", "", "  plain text, <tool_cal and <b>\n", ("  plain text, <tool_cal and <b>\n", "", [])),
    ("hermes", "", "The <tool_call> mark", ("The <tool_call> mark", "", [])),
    ("hermes", "", '<tool_call>{"name": "snow", "arguments": {}}</tool_call>', ('<tool_call>{"name": "snow", "arguments": {}}</tool_call>', "", [])),
    ("hermes", "", "<tool_call>[1, 2</tool_call> so", ("<tool_call>[1, 2</tool_call> so", "", [])),
    ("hermes", "", f"<tool_call>{OBJECT}\n{SUN}</tool_call>", ("", "", ["rain", "sun"])),
    ("llama3", "", f'{OBJECT.replace("arguments", "parameters")}\n{SUN.replace("arguments", "parameters")}', ("", "", ["rain", "sun"])),
    ("qwen3_coder", "", '<tool_call>\n<function=rain>\n<parameter=city>\nOslo "{x}" ☂\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>', ("", "", ["rain"])),
    ("glm4+think", "", '<think>Hm.</think>\n<tool_call>rain\n<arg_key>city</arg_key>\n<arg_value>Oslo "{x}" ☂</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>', ("", "Hm.", ["rain"])),
    ("qwen3_coder+think", "<think>\n", 'Hm.\n</think>\n\n<tool_call>\n<function=rain>\n<parameter=city>\nOslo "{x}" ☂\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=sun>\n</function>\n</tool_call>', ("", "Hm.", ["rain", "sun"])),
    ("qwen3_coder+think", "<think>\n\n</think>\n\n", "It rains.", ("It rains.", "", [])),
    ("glm47+think", "<think>", 'Hm.</think>Now.<tool_call>rain<arg_key>city</arg_key><arg_value>Oslo "{x}" ☂</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>sun</tool_call>', ("Now.", "Hm.", ["rain", "sun"])),
    ("glm47+think", "</think>", "It rains, see <think>.", ("It rains, see <think>.", "", [])),
    ("minimax_m2+think", "<think>\n", 'Hm.\n</think>\n\nNow.\n<minimax:tool_call>\n<invoke name="rain">\n<parameter name="city">Oslo "{x}" ☂</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n<invoke name="sun">\n</invoke>\n</minimax:tool_call>', ("Now.", "Hm.", ["rain", "sun"])),
    ("kimi_k2+think", "<think>", f"Hm.</think>Now.<|tool_calls_section_begin|><|tool_call_begin|>functions.rain:0<|tool_call_argument_begin|>{BODY}<|tool_call_end|><|tool_call_begin|>functions.sun:1<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>", ("Now.", "Hm.", ["rain", "sun"])),
    ("kimi_k2", "", f"<|tool_calls_section_begin|><|tool_call_begin|>rain:0 <|tool_call_argument_begin|> {BODY}<|tool_call_end|><|tool_calls_section_end|>", ("", "", ["rain"])),
    ("deepseek_v32+think", "<think>", 'Hm.</think>Now.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="rain">\n<｜DSML｜parameter name="city" string="true">Oslo "{x}" ☂</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="sun">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', ("Now.", "Hm.", ["rain", "sun"])),
    ("lfm2+think", "", "<think>Hm.</think><|tool_call_start|>[rain(city='Oslo \"{x}\" ☂', days=2), sun()]<|tool_call_end|>It may.", ("It may.", "Hm.", ["rain", "sun"])),
    ("lfm2", "", f"<|tool_call_start|>[{OBJECT}]<|tool_call_end|>", ("", "", ["rain"])),
    ("pythonic", "", '[rain(city="Oslo \\"{x}\\" \\u2602", days=2), sun()]', ("", "", ["rain", "sun"])),
    ("pythonic", "", '<|python_start|>[rain(city="Oslo "{x}" ☂", days="2")]<|python_end|>', ("", "", ["rain"])),
    ("pythonic", "", "[rain(city=Oslo)] it is", ("[rain(city=Oslo)] it is", "", [])),
    ("pythonic", "", "[rain](https://rain.no), [sun]", ("[rain](https://rain.no), [sun]", "", [])),
    ("nemotron+think", "<think>\n\n", f"Hm.\n</think>\n\n<TOOLCALL>[{OBJECT}, {SUN}]</TOOLCALL>", ("", "Hm.", ["rain", "sun"])),
    ("llama3", "", f'<|python_start|>{OBJECT.replace("arguments", "parameters")}<|python_end|>', ("", "", ["rain"])),
    ("mistral", "", f"[TOOL_CALLS] [{OBJECT}, {SUN}]", ("", "", ["rain", "sun"])),
    ("mistral", "", f"[TOOL_CALLS] [{OBJECT[:-1]}, {SUN[1:]}]", ("", "", ["rain", "sun"])),
    ("mistral_args", "", f"Now.[TOOL_CALLS]rain[ARGS]{BODY}[TOOL_CALLS]sun[ARGS]{{}}", ("Now.", "", ["rain", "sun"])),
    ("mistral_args+think_mistral", "", f"[THINK]Hm.[/THINK][TOOL_CALLS]rain[ARGS]{BODY}", ("", "Hm.", ["rain"])),
    ("deepseek_v3+think", "<think>\n", f"Hm.</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>rain\n```json\n{BODY}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>sun\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ("", "Hm.", ["rain", "sun"])),
    ("deepseek_v31", "", f"Now.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rain<｜tool▁sep｜>{BODY}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ("Now.", "", ["rain"])),
    ("granite", "", f"<|tool_call|>[{OBJECT}]", ("", "", ["rain"])),
    ("llama3", "", OBJECT.replace("arguments", "parameters"), ("", "", ["rain"])),
    ("llama3", "", f'<|python_tag|>{OBJECT.replace("arguments", "parameters")}; {SUN.replace("arguments", "parameters")}', ("", "", ["rain", "sun"])),
    ("llama3", "", 'It is {"name": "rain"}', ('It is {"name": "rain"}', "", [])),
    ("gemma", "", '<start_function_call>call:rain{city:<escape>Oslo "{x}" ☂<escape>,days:2}<end_function_call>', ("", "", ["rain"])),
    ("gemma", "", f'<start_function_call>call:rain{{city:{json.dumps(ARGUMENTS["city"], ensure_ascii=False)},days:2}}<end_function_call>', ("", "", ["rain"])),
    ("gemma4", "", '<|channel>thought\nHm.<channel|><|tool_call>call:rain{city:<|"|>Oslo "{x}" ☂<|"|>,days:2}<tool_call|>', ("", "Hm.", ["rain"])),
    ("gemma4", "", f'<|tool_call>call:rain{{city:{json.dumps(ARGUMENTS["city"], ensure_ascii=False)},days:2}}<tool_call|>', ("", "", ["rain"])),
    ("harmony", "", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.rain <|constrain|>json<|message|>{BODY}<|call|>", ("", "Hm.", ["rain"])),
    ("harmony", "", f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.rain<|channel|>commentary json<|message|>{BODY}", ("", "Hm.", ["rain"])),
    ("harmony", "", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.", ("Hello.", "Hm.", [])),
    ("harmony", "", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commen: rain<|message|>Hello.", ("<|channel|>commen: rain<|message|>Hello.", "Hm.", [])),
    ("harmony", "", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>fin", ("", "Hm.", [])),
    ("harmony", "", "no channel at all", ("no channel at all", "", [])),
]  # fmt: skip
IDS = [f"{name}-{i}" for i, (name, *_) in enumerate(TRANSCRIPTS)]


@cache
def format_of(name):
    return pick_output_format(name, None, "", "")


def read(name, opening, pieces, tools=TOOLS):
    parser = format_of(name).language.parser(f"<|im_start|>assistant\n{opening}", tools)
    content, reasoning, calls = "", "", {}
    for parsed in [*map(parser.add, pieces), parser.finish()]:
        content += parsed.content
        reasoning += parsed.reasoning
        for call in parsed.calls:
            assert bool(call.name) == (call.index not in calls)
            name, arguments = calls.get(call.index, (call.name, ""))
            calls[call.index] = (name, arguments + call.arguments)
        for text in (
            parsed.content,
            parsed.reasoning,
            *(text for call in parsed.calls for text in (call.name, call.arguments)),
        ):
            text.encode()  # as it is when it is sent
    return content, reasoning, [*calls.values()]


CALLING = [one for one in TRANSCRIPTS if one[3][2]]


def content_of_cut(name, opening, text, **how):
    """The content of an answer that ends by `length`."""
    parser = format_of(name).language.parser(f"<|im_start|>assistant\n{opening}", TOOLS, **how)
    return parser.add(text).content + parser.finish(is_cut=True).content


@pytest.mark.parametrize(("name", "opening", "text", "expected"), CALLING)
def test_of_calls_that_are_cut_nothing_is_content_once_their_mark_is_whole(name, opening, text, expected):
    trigger = format_of(name).call.trigger
    begin = text.find(trigger) + len(trigger) if trigger else len(text)
    for at in range(begin, len(text) + 1):
        assert expected[0].startswith(content_of_cut(name, opening, text[:at], trigger=trigger)), text[:at]


@pytest.mark.parametrize(("name", "opening", "text", "expected"), CALLING)
def test_forced_calls_have_no_content_wherever_they_are_cut(name, opening, text, expected):
    for at in range(len(text) + 1):
        assert content_of_cut(name, opening, text[:at], is_forced=True) == "", text[:at]


@pytest.mark.parametrize(("name", "opening", "text", "expected"), TRANSCRIPTS, ids=IDS)
def test_transcripts_read_the_same_wherever_they_are_cut(name, opening, text, expected):
    whole = read(name, opening, [text])
    content, reasoning, names = expected
    assert (whole[0], whole[1], [call for call, _ in whole[2]]) == (content, reasoning, names)
    assert [json.loads(arguments) for _, arguments in whole[2]] == [
        ARGUMENTS if call == "rain" else {} for call in names
    ]
    assert read(name, opening, list(text)) == whole
    for at in range(1, len(text)):
        assert read(name, opening, [text[:at], text[at:]]) == whole, text[:at]


@pytest.mark.parametrize(("name", "opening", "text", "expected"), TRANSCRIPTS, ids=IDS)
def test_without_tools_no_word_is_lost_to_calls(name, opening, text, expected):
    content, reasoning, calls = read(name, opening, [text], tools=None)
    assert calls == []
    assert reasoning == expected[1]
    if expected[2]:
        assert "rain" in content


def mutated(text, draw):
    """The text with some of its pieces dropped, doubled, swapped or broken."""
    for _ in range(draw.randint(1, 4)):
        at, length = draw.randrange(len(text) + 1), draw.randint(0, 12)
        other = draw.choice(TRANSCRIPTS)[2]
        begin = draw.randrange(len(other))
        put = draw.choice(
            [
                "",
                "\\",
                "\\ud800",
                '"\\ud800"',
                '"',
                "{",
                "}",
                "\x01",
                "9" * 400,
                text[at : at + length] * 2,
                other[begin : begin + length],
            ]
        )
        text = text[:at] + put + text[at + draw.choice([0, length]) :]
    return text


WORD = "@@kept@@"


def check_mutations(count, seed, name=None):
    """Read as many mutated answers whole, in three pieces and by characters: nothing is raised, all say the same, no
    word is lost, and no mark is searched for again and again."""
    draw = random.Random(seed)
    transcripts = [one for one in TRANSCRIPTS if name in (None, one[0])]
    for _ in range(count):
        name, opening, text, _ = draw.choice(transcripts)
        text = mutated(text, draw)
        at = draw.randrange(len(text) + 1)
        text = text[:at] + WORD + text[at:]
        whole = read(name, opening, [text])
        content, reasoning, calls = whole
        assert calls or WORD in content + reasoning, f"{name}: {text!r}"
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(2))
        pieces = [text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]]
        assert read(name, opening, pieces) == whole, f"{name}: {text!r}"
        assert read(name, opening, [*text]) == whole, f"{name}: {text!r}"
        parser = format_of(name).language.parser(opening, TOOLS)
        parser.add(text)
        parser.finish()
        # Each of a format's marks, once, and once again from where it may have begun.
        assert parser._scanner.num_searched < 16 * len(text) + 8192, f"{name}: {text!r}"


NAMES = sorted({name for name, *_ in TRANSCRIPTS})


@pytest.mark.parametrize("name", NAMES)
def test_mutated_answers_are_read_without_an_error_and_wherever_they_are_cut(name):
    check_mutations(250, seed=14, name=name)


@pytest.mark.wide
@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_mutated_answers_of_each_format_are_read_wherever_they_are_cut(name):
    check_mutations(10_000, seed=100, name=name)


@pytest.mark.wide
@pytest.mark.parametrize("part", range(20))
def test_a_hundred_thousand_mutated_answers_are_read_without_an_error(part):
    check_mutations(5_000, seed=200 + part)


@pytest.mark.parametrize(
    "value", [r'"\ud800"', r'{"a": "\ud800"}', r'{"\udfff": 1, "a": "\ud83d\ude00"}', r'["\udc00\ud800"]']
)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>{"name": "rain", "arguments": %s}</tool_call>'),
        ("granite", '<|tool_call|>[{"name": "rain", "arguments": %s}]'),
        ("llama3", '{"name": "rain", "parameters": %s}'),
        ("deepseek_v31", "<｜tool▁call▁begin｜>rain<｜tool▁sep｜>%s<｜tool▁call▁end｜>"),
        ("gemma", "<start_function_call>call:rain%s<end_function_call>"),
        ("gemma", "<start_function_call>call:rain{place:%s}<end_function_call>"),
        ("gemma4", "<|tool_call>call:rain%s<tool_call|>"),
        ("gemma4", "<|tool_call>call:rain{place:%s}<tool_call|>"),
        ("lfm2", "<|tool_call_start|>[rain(place=%s)]<|tool_call_end|>"),
        ("glm4", "<tool_call>rain\n<arg_key>place</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=rain>\n<parameter=place>\n%s\n</parameter>\n</function>\n</tool_call>"),
    ],
)
def test_half_a_surrogate_pair_in_arguments_stays_escaped(name, call, value):
    tools = {"rain": {"type": "object", "properties": {"place": {"type": ["object", "array"]}}}}
    text = call % value
    for pieces in ([text], [*text]):
        content, _, calls = read(name, "", pieces, tools)
        assert (content, [name for name, _ in calls]) == ("", ["rain"])
        read_back = json.loads(calls[0][1])
        value_back = read_back.get("place", read_back) if isinstance(read_back, dict) else read_back
        assert value_back in (value, json.loads(value))


def test_a_closing_mark_within_a_text_is_a_part_of_the_text():
    said = 'Write "</tool_call>" behind it; {x}.'
    call = json.dumps({"name": "rain", "arguments": {"city": said}})
    for pieces in ([f"<tool_call>{call}</tool_call>Done."], [*f"<tool_call>{call}</tool_call>Done."]):
        content, _, calls = read("hermes", "", pieces)
        assert (content, [(name, json.loads(arguments)) for name, arguments in calls]) == (
            "Done.",
            [("rain", {"city": said})],
        )
    broken = '<tool_call>\n{"name": "rain", "arguments": {"city": "Oslo}}\n</tool_call>\nIt is dry.'
    assert read("hermes", "", [broken])[0] == "It is dry.", "no text of JSON has a line break in it"
    parser = format_of("hermes").language.parser("", TOOLS)
    parser.add('<tool_call>{"name": "rain", "arguments": {"city": "Oslo}}')
    parser.add("</tool_call>", is_control=True)
    assert parser.add("It is dry.").content == "It is dry."


ANY = {"f": {"properties": {"s": {"type": "string"}, "n": {"type": "number"}, "b": {"type": "boolean"}}}}
DSML = '<｜DSML｜invoke name="f"><｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter></｜DSML｜invoke>'


@pytest.mark.parametrize(
    ("name", "call", "meant"),
    [
        ("minimax_m2", '<invoke name="f"><parameter name="s">\n1\n</parameter></invoke>', {"s": "\n1\n"}),
        ("minimax_m2", '<invoke name="f"><parameter name="b">True</parameter></invoke>', {"b": True}),
        ("qwen3_coder", "<tool_call><function=f><parameter=s>\n[1]\n</parameter></function></tool_call>", {"s": "[1]"}),
        ("qwen3_coder", "<tool_call><function=f><parameter=n>2.5</parameter></function></tool_call>", {"n": 2.5}),
        ("deepseek_v32", DSML.format("x", "false", '{"y": [1]}'), {"x": {"y": [1]}}),
        ("deepseek_v32", DSML.format("x", "true", "[1]"), {"x": "[1]"}),
        ("deepseek_v32", DSML.format("x", "false", "[1"), {"x": "[1"}),
        ("deepseek_v32", DSML.format("n", "true", "2"), {"n": 2}),
        ("lfm2", "<|tool_call_start|>[f(s='it's', n=-1e3, b=True,)]<|tool_call_end|>", {"s": "it's", "n": -1000.0, "b": True}),
        ("lfm2", "<|tool_call_start|>f(s='a\nb', x={'y': [1, (None,)]})<|tool_call_end|>", {"s": "a\nb", "x": {"y": [1, [None]]}}),
        ("pythonic", r"""[f(s="\"\n\x41\u2602\/\d", b=false, x=null, class='a')]""", {"s": '"\nA☂/\\d', "b": False, "x": None, "class": "a"}),
    ],
)  # fmt: skip
def test_arguments_have_the_types_that_the_schema_and_the_format_give_them(name, call, meant):
    ((_, arguments),) = read(name, "", [*call], ANY)[2]
    assert json.loads(arguments) == meant


@pytest.mark.parametrize(
    "call",
    [
        *("[f(]", "[f(s=)]", "[f(s=1 n=2)]", "[f(s='a]", "[f(1)]", "[f(s={1: 2})]", "[f(s=[1, 2)]", "[f()", "[f()] f"),
        *("[f(s=" + "[" * 100_000 + ")]", "[f(s=1e999)]", "[g()]", "[f(), g()]", "[f(s=0x1)]", "[f(s='a', 's'='b')]"),
    ],
    ids=range(15),
)
def test_what_is_no_call_in_python_is_content(call):
    for name, text in (("lfm2", f"<|tool_call_start|>{call}<|tool_call_end|>"), ("pythonic", call)):
        assert read(name, "", [text], ANY) == (text, "", [])


def test_a_call_that_the_prompt_has_begun_is_told_whole():
    content, _, calls = read("hermes", '<tool_call>{"name": "rain", "argum', ['ents": {"city": "Oslo"}}</tool_call>'])
    assert (content, calls) == ("", [("rain", '{"city": "Oslo"}')])
    content, _, calls = read("hermes", '<tool_call>{"name": "snow", "argum', ['ents": {}}</tool_call>'])
    assert (content, calls) == ('ents": {}}</tool_call>', []), "what the client wrote is not told again"


@pytest.mark.parametrize(("name", "opening", "text", "expected"), TRANSCRIPTS, ids=IDS)
def test_where_one_call_is_allowed_the_answer_is_over_with_it(name, opening, text, expected):
    for pieces in ([text], [*text]):
        parser = format_of(name).language.parser(f"<|im_start|>assistant\n{opening}", TOOLS, is_parallel=False)
        told = [*map(parser.add, pieces), parser.finish()]
        names = [call.name for one in told for call in one.calls if call.name]
        assert names == expected[2][:1]
        assert parser.is_over or len(expected[2]) < 2
        assert all(
            json.loads("".join(call.arguments for one in told for call in one.calls)) == ARGUMENTS for _ in names
        )


@pytest.mark.parametrize(("name", "opening", "text", "expected"), TRANSCRIPTS, ids=IDS)
def test_copies_of_a_parser_go_on_by_themselves(name, opening, text, expected):
    whole = read(name, opening, [text])
    for at in range(0, len(text), 7):
        first = format_of(name).language.parser(f"<|im_start|>assistant\n{opening}{text[:at]}", TOOLS)
        second = first.copy()
        for parser in (first, second):
            told = [*map(parser.add, text[at:]), parser.finish()]
            names = [call.name for one in told for call in one.calls if call.name]
            assert names == [name for name, _ in whole[2]], text[:at]
            assert whole[0].rstrip().endswith("".join(one.content for one in told).strip())


@pytest.mark.parametrize(
    ("name", "call", "said"),
    [
        ("glm4", "<tool_call>rain\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>", "a</tool_call>b"),
        (
            "qwen3_coder",
            "<tool_call>\n<function=rain>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>",
            "a</function>\n</tool_call></function></tool_call>b",
        ),
        (
            "gemma",
            "<start_function_call>call:rain{{city:<escape>{}<escape>}}<end_function_call>",
            "a<end_function_call>",
        ),
        ("gemma4", '<|tool_call>call:rain{{city:<|"|>{}<|"|>}}<tool_call|>', "<tool_call|>"),
        (
            "minimax_m2",
            '<invoke name="rain">\n<parameter name="city">{}</parameter>\n</invoke>',
            "a</invoke>\n</minimax:tool_call>b\n",
        ),
        (
            "deepseek_v32",
            '<｜DSML｜invoke name="rain">\n<｜DSML｜parameter name="city" string="true">{}</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>",
            "\na</｜DSML｜invoke>b",
        ),
    ],
)
def test_a_closing_mark_within_a_value_is_a_part_of_the_value(name, call, said):
    text = call.format(said) + call.format("Oslo") + "Done."
    for pieces in ([text], [*text]):
        content, _, calls = read(name, "", pieces)
        assert (content, [json.loads(arguments)["city"] for _, arguments in calls]) == ("Done.", [said, "Oslo"])
    broken = re.sub(r"</arg_value>|\n?</(｜DSML｜)?parameter>", "", call)
    if broken == call:  # its marks are the same at both ends
        return
    text = broken.format("Oslo") + call.format("Bergen") + "Done."
    for pieces in ([text], [*text]):  # a value that has lost its end takes no other call with it
        content, _, calls = read(name, "", pieces)
        assert (content, [json.loads(arguments) for _, arguments in calls]) == ("Done.", [{}, {"city": "Bergen"}])
    parser = format_of(name).language.parser("", TOOLS)
    told = [parser.add(broken.format("Oslo")), parser.add("x" * 20_000), parser.finish()]
    assert [call.name for one in told for call in one.calls] == ["rain"]
    assert "".join(one.content for one in told) == "x" * 20_000
