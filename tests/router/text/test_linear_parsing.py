"""No answer takes a parser more than its length: every mark of every format, repeated, at two sizes."""

import json
import time
from importlib.resources import files

import pytest

from twostroke.router.text.output_format import pick_output_format

FORMATS = sorted(
    path.name.removesuffix(".json") for path in files("twostroke.router.text").joinpath("output_formats").iterdir()
)
TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
LINES = ["\n", " ", "x", '"', "\\", "{", "[", "}", ";", '{"name": "f"', '{"name": "f"}; ', '"a": 1, ', '{"a": [', "a:"]
MARKS = {
    "deepseek_v3": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n", "\n```<｜tool▁call▁end｜>", "\n```"],
    "deepseek_v31": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>"],
    "gemma": ["<start_function_call>", "<start_function_call>call:f", "<end_function_call>", "<escape>", "{a:<escape>", "call:"],
    "gemma4": ["<|tool_call>", "<|tool_call>call:f", "<tool_call|>", '<|"|>', '{a:<|"|>', "<|channel>thought\n", "<channel|>"],
    "glm4": ["<tool_call>", "<tool_call>f\n", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>a</arg_key>\n<arg_value>"],
    "granite": ["<|tool_call|>", '<|tool_call|>[{"name": "f"'],
    "harmony": ["<|start|>", "<|start|>assistant", "<|channel|>", " to=", " to=functions.f", "<|channel|>analysis", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>", " json", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"],
    "hermes": ["<tool_call>", "</tool_call>", '<tool_call>{"name": "f"', '<tool_call>{"name": "f", "arguments": {'],
    "llama3": ["<|python_tag|>", '<|python_tag|>{"name": "f", "parameters": {', '; {"name":'],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] [", '[TOOL_CALLS][{"name": "f", "arguments": {'],
    "mistral_args": ["[TOOL_CALLS]", "[TOOL_CALLS]f", "[CALL_ID]", "[ARGS]", "[TOOL_CALLS]f[ARGS]{"],
    "qwen3_coder": ["<tool_call>", "<tool_call>\n<function=f>", "<function=", "<parameter=a>\n", "<parameter=", "</parameter>", "</function>", "</function>\n</tool_call>", ">"],
    "think": ["<think>", "</think>"],
    "think_mistral": ["[THINK]", "[/THINK]"],
}  # fmt: skip


def seconds(name, opening, unit, chars, piece):
    """Process time that an answer of so many characters takes, fed in pieces of `piece` units."""
    parser = pick_output_format(name, None, "", "").language.parser("<|im_start|>assistant\n" + opening, TOOLS)
    text = unit * piece
    begin = time.process_time()
    for _ in range(chars // len(text)):
        parser.add(text)
    parser.finish()
    return time.process_time() - begin


@pytest.mark.parametrize("name", FORMATS)
def test_repeated_marks_take_time_by_their_number_alone(name):
    assert MARKS.keys() == set(FORMATS)
    for opening in ["", *MARKS[name]]:
        for unit in [*LINES, *MARKS[name]]:
            for piece in (1, 40):
                # Fixed costs hide in 0.1 s; a parser that is quadratic takes 64 times as long for 8 times as much.
                short = seconds(name, opening, unit, 8_000, piece)
                assert short < 0.1, f"{opening!r}, {unit!r} x {piece}: {short} s"
                long = seconds(name, opening, unit, 64_000, piece)
                assert long < 24 * short + 0.05, f"{opening!r}, {unit!r} x {piece}: {short} s, {long} s"
