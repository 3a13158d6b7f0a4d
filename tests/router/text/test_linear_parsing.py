# ruff: noqa: E501
"""No answer takes a parser more than its length: every mark of every format, repeated, at two sizes."""

import json
import re
import time
from importlib.resources import files

import pytest

from twostroke.router.text.output_format import pick_output_format
from twostroke.router.text.regions import MAX_MARK_CHARS
from twostroke.router.text.response_parser import ResponseLanguage

FORMATS = sorted(
    path.name.removesuffix(".json") for path in files("twostroke.router.text").joinpath("output_formats").iterdir()
)
TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
LINES = ["\n", " ", "x", '"', "\\", "{", "[", "}", ";", '{"name": "f"', '{"name": "f"}; ', '"a": 1, ', '{"a": [', "a:"]
MARKS = {
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "\n```<｜tool▁call▁end｜>", "\n```"],
    "deepseek_v31": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>"],
    "deepseek_v32": ["<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", '<｜DSML｜parameter name="a" string="true">', "</｜DSML｜parameter>", "<｜DSML｜"],
    "gemma": ["<start_function_call>", "<start_function_call>call:f", "<end_function_call>", "<escape>", "{a:<escape>", "call:"],
    "gemma4": ["<|tool_call>", "<|tool_call>call:f", "<tool_call|>", '<|"|>', '{a:<|"|>', "<|channel>thought\n", "<channel|>"],
    "glm4": ["<tool_call>", "<tool_call>f\n", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>a</arg_key>\n<arg_value>"],
    "glm47": ["<tool_call>", "<tool_call>f", "</tool_call>", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "<arg_key>a</arg_key><arg_value>"],
    "granite": ["<|tool_call|>", '<|tool_call|>[{"name": "f"'],
    "harmony": ["<|start|>", "<|start|>assistant", "<|channel|>", " to=", " to=functions.f", "<|channel|>analysis", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", " json", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"],
    "hermes": ["<tool_call>", "</tool_call>", '<tool_call>{"name": "f"', '<tool_call>{"name": "f", "arguments": {'],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.f:0 "],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_start|>[f(a='", "[f(a=1), ", "f(", "'", "a=[", "<|tool_call_end|>"],
    "llama3": ["<|python_tag|>", '<|python_tag|>{"name": "f", "parameters": {', '; {"name":'],
    "minimax_m2": ["<minimax:tool_call>", '<invoke name="f">', "</invoke>", '<parameter name="a">', "</parameter>", "<parameter name="],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [", '[TOOL_CALLS][{"name": "f", "arguments": {'],
    "mistral_args": ["[TOOL_CALLS]", "[TOOL_CALLS]f", "[CALL_ID]", "[ARGS]", "[TOOL_CALLS]f[ARGS]{"],
    "nemotron": ["<TOOLCALL>", "</TOOLCALL>", '<TOOLCALL>[{"name": "f"', '<TOOLCALL>[{"name": "f", "arguments": {'],
    "pythonic": ["[f(", "[f(a='", "<|python_start|>", "<|python_start|>[f(a=1, ", "a=[", "a={'b': ", "'", "), ", "<|python_end|>"],
    "qwen3_coder": ["<tool_call>", "<tool_call>\n<function=f>", "<function=", "<parameter=a>\n", "<parameter=", "</parameter>", "</function>", "</function>\n</tool_call>", ">"],
    "think": ["<think>", "</think>"],
    "think_mistral": ["[THINK]", "[/THINK]"],
}  # fmt: skip


OPENINGS = {
    name: ["", *(mark for mark in marks if "f" in mark.replace("function", ""))] for name, marks in MARKS.items()
}


def parser_of(name, opening):
    return pick_output_format(name, None, "", "").language.parser("<|im_start|>assistant\n" + opening, TOOLS)


def searched(name, opening, unit, chars):
    """Characters that patterns are tried on in an answer of so many, which comes unit by unit."""
    parser = parser_of(name, opening)
    for _ in range(chars // len(unit)):
        parser.add(unit)
    parser.finish()
    return parser._scanner.num_searched


@pytest.mark.parametrize("name", FORMATS)
def test_marks_are_searched_for_once_however_often_they_are_repeated(name):
    assert MARKS.keys() == set(FORMATS)
    for opening in OPENINGS[name]:
        for unit in [*LINES, *MARKS[name]]:
            short, long = (searched(name, opening, unit, MAX_MARK_CHARS * size) for size in (2, 8))
            assert long < 6 * short + 64 * MAX_MARK_CHARS, f"{opening!r}, {unit!r}: {short}, {long}"


def seconds(name, opening, unit, chars):
    """Process time that an answer of so many characters takes, which comes in a few pieces."""
    parser = parser_of(name, opening)
    text = unit * (chars // len(unit) // 4)
    begin = time.process_time()
    for _ in range(4):
        parser.add(text)
    parser.finish()
    return time.process_time() - begin


@pytest.mark.parametrize("name", FORMATS)
def test_repeated_marks_take_time_by_their_number_alone(name):
    characters = sorted({one for mark in MARKS[name] for one in mark} | {"\t"})
    for opening in OPENINGS[name]:
        for unit in [*LINES, *MARKS[name], *([] if opening else characters)]:
            # Text that takes the square of its length takes 64 times as long where it is 8 times as long.
            long = seconds(name, opening, unit, 2**17)
            short = min(seconds(name, opening, unit, 2**14) for _ in range(2)) if long > 0.03 else 0
            if long >= 24 * short + 0.03:
                long = min(long, seconds(name, opening, unit, 2**17))
            assert long < 24 * short + 0.03, f"{opening!r}, {unit!r}: {short} s, {long} s"


def patterns_of(name):
    said = json.loads(files("twostroke.router.text").joinpath("output_formats", f"{name}.json").read_text("utf-8"))
    marks = [mark for one in said["regions"].values() for end in ("open", "close") for mark in one.get(end, ())]
    return [mark["pattern"] for mark in marks if "pattern" in mark]


@pytest.mark.parametrize("name", FORMATS)
def test_patterns_of_formats_begin_with_a_literal_text(name):
    """A search for another beginning tries the whole rest of the text at each of its characters."""
    for pattern in patterns_of(name):
        begin = re.match(r"(?:\(\?=)?(?:\\[^A-Za-z0-9]|[^\\.^$*+?{}()\[\]|])(?![*+?{])", pattern)
        assert begin, pattern
        plain = re.sub(r"\\.|\[[^]]*+\]", "", pattern)
        while (inner := re.sub(r"\([^()]*+\)", "", plain)) != plain:
            plain = inner
        assert "|" not in plain, f"{pattern}: each choice is a pattern of its own"


@pytest.mark.parametrize(
    ("name", "opening", "unit", "num"),
    [
        ("glm4", "<tool_call>f\n<arg_key>", " ", 20_000),
        ("qwen3_coder", "<tool_call>\n<function=f>\n", "<parameter=a>\n", 20_000),
        ("llama3", "", " " * 80, 400),
        ("hermes", "<tool_call>", " " * 80, 4_000),
        ("hermes", "Yes.", " " * 80, 20_000),
        ("gemma4", "<|tool_call>call:f{", 'a:<|"|>b<|"|>,', 20_000),
        ("harmony", "", "<|start|>assistant to=functions.", 5_000),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', "</tool_call>", 20_000),
    ],
)
def test_what_took_minutes_takes_a_second_at_most(name, opening, unit, num):
    begin = time.process_time()
    parser = parser_of(name, opening + unit * (num // 2))
    for _ in range(num // 2):
        parser.add(unit)
    parser.add("x")
    parser.finish()
    assert time.process_time() - begin < 2


def test_patterns_of_a_checkpoint_that_take_too_long_make_no_mark_any_more():
    own = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open_pattern": "(?:a*)*b", "close": "</hm>"},
            "tool_calls": {
                "open_pattern": r"<do>\s*",
                "close_pattern": r"\s*</do>",
                "content": "xml-inline",
                "content_args": {"tag_pattern": r"<k>\s*(?P<key>.*?)\s*</k>\s*<v>(?P<value>.*?)</v>"},
            },
            "content": {},
        },
    }
    language = ResponseLanguage(own, origin="here")  # it imports transformers
    begin = time.process_time()
    for text in ("a" * 20_000, " " * 20_000, "<do><k>" + " " * 5_000 + "</do>", "<do>" + " " * 20_000):
        parser = language.parser("", TOOLS)
        told = [parser.add(text), parser.add("The end."), parser.finish()]
        assert "".join(one.content + one.reasoning for one in told).endswith("The end.")
    assert time.process_time() - begin < 4


def test_a_call_that_goes_on_and_on_is_content():
    parser = parser_of("glm4", "")
    told = [parser.add("<tool_call>f\n"), *(parser.add("x" * 2**16) for _ in range(20))]
    content = "".join(one.content for one in [*told, parser.add("</tool_call>"), parser.finish()])
    assert content == "<tool_call>f\n" + "x" * 2**16 * 20 + "</tool_call>"
    assert parser.num_unparsed == 1
