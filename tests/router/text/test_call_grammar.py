import json
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from twostroke.router.text.call_grammar import AnswerGrammar, Function
from twostroke.router.text.output_format import CallSyntax, ThinkingSyntax, pick_output_format

MODEL_FOLDER = Path(__file__).parents[3] / "model" / "bundled"
THINKING = ThinkingSyntax("<think>", "</think>")
CALLS = CallSyntax(
    trigger="<tool_call>", begin='\n{"name": "{name}", "arguments": ', end="}\n</tool_call>", between="\n"
)
CONTROLS = {"<think>": 4096, "</think>": 4097, "<tool_call>": 4098, "</tool_call>": 4099}
RAIN = Function("rain", {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]}, True)


@pytest.fixture(scope="module")
def texts():
    """The bundled tokenizer, with tokens around thoughts and calls."""
    said = json.loads((MODEL_FOLDER / "tokenizer.json").read_text(encoding="utf-8"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    said["added_tokens"] += [{"id": token_id, "content": text, **flags} for text, token_id in CONTROLS.items()]
    return json.dumps(said)


@pytest.mark.parametrize(
    ("written", "follows_it"),
    [
        ("short</think>Anything, and more of it.", True),
        ("</think>Yes", True),
        ("word " * 20 + "</think>Yes", False),
        ("never ends", False),
    ],
)
def test_thoughts_end_when_their_budget_is_spent(texts, written, follows_it):
    rules = AnswerGrammar(CONTROLS)
    grammar = rules.of_answer(THINKING, rules.anything, is_open=True, most_tokens=8)
    assert follows(texts, grammar, written) == follows_it


CALL = '<tool_call>\n{"name": "rain", "arguments": {"day": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("written", "follows_it"),
    [
        ("It is dry.", True),
        ("", True),
        ("I look it up.\n" + CALL, True),
        (f"{CALL}\n{CALL}", True),
        (CALL.replace("1", '"one"'), False),
        ("<tool_call>nothing", False),
        (CALL.replace("</tool_call>", ""), False),
        (CALL + "It is dry.", False),
    ],
)
def test_calls_that_may_be_made_are_held_to_their_schemas_and_text_to_nothing(texts, written, follows_it):
    rules = AnswerGrammar(CONTROLS)
    assert rules.marks_calls(CALLS)
    rest = f"{rules.of_calls(CALLS, [RAIN], is_parallel=True)}\n{rules.until_calls(CALLS)}"
    grammar = rules.of_answer(None, rest, is_open=False, most_tokens=None)
    assert follows(texts, grammar, written) == follows_it


def follows(texts, grammar, written):
    matcher = LLMatcher(LLTokenizer(texts, n_vocab=4100, eos_token=[1]), grammar)
    ids = Tokenizer.from_str(texts).encode(written, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


FORECAST = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/days"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "note": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "null"}]},
        "hour": {"enum": [6, 18]},
        "limits": {"anyOf": [{"$ref": "#/$defs/days"}, {"type": "null"}]},
    },
    "required": ["city", "days", "place"],
    "$defs": {"text": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
}
WRITTEN = {
    **{"city": "Oslo,\n<b>", "days": "[1, 2]", "unit": "C", "note": "It's so", "hour": "18", "limits": "[3]"},
    "place": "anywhere",
}
MEANT = {
    **{"city": "Oslo,\n<b>", "days": [1, 2], "unit": "C", "note": "It's so", "hour": 18, "limits": [3]},
    "place": "anywhere",
}
QWEN3_CODER = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in WRITTEN.items())
GLM4 = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in WRITTEN.items())
BY_ITSELF = {
    "qwen3_coder": f"<tool_call>\n<function=rain>\n{QWEN3_CODER}</function>\n</tool_call>",
    "glm4": f"<tool_call>rain\n{GLM4}</tool_call>",
}


@pytest.mark.parametrize("name", BY_ITSELF)
def test_arguments_that_stand_by_themselves_are_held_to_their_schemas(texts, name):
    form, written = pick_output_format(name, None, "", ""), BY_ITSELF[name]
    rules = AnswerGrammar(CONTROLS)
    calls = rules.of_calls(form.call, [Function("rain", FORECAST, True)], is_parallel=False)
    grammar = rules.of_answer(None, f"{calls}\nrest: calls", is_open=False, most_tokens=None)
    assert follows(texts, grammar, written)
    assert not follows(texts, grammar, written.replace("[1, 2]", "[1, two]"))
    assert not follows(texts, grammar, written.replace("18", "17"))
    assert not follows(texts, grammar, written.replace("place", "day"))
    assert not follows(texts, grammar, written.replace("days", "hours"))
    assert not follows(texts, grammar, written.replace("\nC", "\nK").replace(">C", ">K"))
    parser = form.language.parser("", {"rain": FORECAST})
    deltas = [*parser.add(written).calls, *parser.finish().calls]
    assert json.loads("".join(delta.arguments for delta in deltas)) == MEANT


@pytest.mark.parametrize("name", BY_ITSELF)
def test_a_function_whose_arguments_nobody_named_takes_any(texts, name):
    form = pick_output_format(name, None, "", "")
    rules = AnswerGrammar(CONTROLS)
    calls = rules.of_calls(form.call, [Function("rain", {}, False)], is_parallel=False)
    grammar = rules.of_answer(None, f"{calls}\nrest: calls", is_open=False, most_tokens=None)
    assert follows(texts, grammar, BY_ITSELF[name])
