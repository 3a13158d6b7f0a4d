import json
import random
from collections import Counter
from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from tests.integration.schemas import all_schemas, takes
from twostroke.protocol.errors import RequestError
from twostroke.router.text.grammar import AnswerGrammar, CallableFunction, of_schema
from twostroke.router.text.output_format import CallSyntax, ThinkingSyntax, pick_output_format

MODEL_FOLDER = Path(__file__).parents[3] / "model" / "bundled"
THINKING = ThinkingSyntax("<think>", "</think>")
CALLS = CallSyntax(
    trigger="<tool_call>", begin='\n{"name": "{name}", "arguments": ', end="}\n</tool_call>", between="\n"
)
TOKENS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<start_function_call>", "<end_function_call>", "<escape>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    *("<|channel>", "<channel|>", "<|python_tag|>"),
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
)
CONTROLS = {token: 4096 + i for i, token in enumerate(TOKENS)}
RAIN = CallableFunction(
    "rain", {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]}, True
)


@pytest.fixture(scope="module")
def texts():
    """The bundled tokenizer, with tokens around thoughts and calls; its own end has another name than harmony's."""
    said = json.loads((MODEL_FOLDER / "tokenizer.json").read_text(encoding="utf-8").replace("<|end|>", "<|stop|>"))
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
    grammar = rules.of_answer(THINKING, rules.anything(THINKING), is_open=True, most_tokens=8)
    assert follows(texts, grammar, written) == follows_it


MUCH = "word " * 20


@pytest.mark.parametrize(
    ("form", "thoughts", "answer"),
    [
        ("think", "<think>{}</think>", "Yes, {}"),
        ("gemma4", "<|channel>thought\n{}<channel|>", "Yes, {}"),
        (
            "harmony",
            "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
            "<|channel|>final<|message|>The analysis: {}",
        ),
    ],
)
def test_a_budget_binds_thoughts_that_the_model_itself_begins_and_no_others_follow(texts, form, thoughts, answer):
    rules, thinking = AnswerGrammar(CONTROLS), pick_output_format(form, None, "", "").thinking
    grammar = rules.of_answer(thinking, rules.anything(thinking), is_open=False, most_tokens=8)
    few, many, answer = thoughts.format("short"), thoughts.format(MUCH), answer.format(MUCH)
    assert follows(texts, grammar, answer)
    assert follows(texts, grammar, few + answer)
    assert not follows(texts, grammar, many + answer)
    assert not follows(texts, grammar, few + many + answer)


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
    grammar = grammar_of_auto(rules, CALLS, [RAIN])
    assert follows(texts, grammar, written) == follows_it


def grammar_of_auto(rules, call, functions, thinking=None, budget=None):
    calls = rules.of_calls(call, functions, is_parallel=True, is_free=True)
    rest = f"{calls}\n{rules.until_calls(call, functions, thinking, is_bounded=budget is not None)}"
    return rules.of_answer(thinking, rest, is_open=False, most_tokens=budget)


ANY = CallableFunction("sun", {}, False)
LLAMA3 = '{"name": "rain", "parameters": {"day": 1}}'
HARMONY = "<|channel|>commentary to=functions.rain <|constrain|>json<|message|>{}"
TO_HARMONY = "<|start|>assistant to=functions.rain<|channel|>commentary json<|message|>{}"
THOUGHT = "<|channel|>analysis<|message|>Say to=functions.rain {}.<|end|>"


@pytest.mark.parametrize(
    ("form", "written", "follows_it"),
    [
        ("llama3", "It is dry.", True),
        ("llama3", "", True),
        ("llama3", '{"name": "Oslo", "parameters": 1}', True),
        ("llama3", '{"city": {"name": "rain"}}', True),
        ("llama3", LLAMA3, True),
        ("llama3", f"<|python_tag|>{LLAMA3}", True),
        ("llama3", f"I look.<|python_tag|>{LLAMA3}", True),
        ("llama3", LLAMA3.replace('{"name', '\n{"type": "function", "name'), True),
        ("llama3", LLAMA3.replace("rain", "sun").replace(": 1", ': 1, "hour": 2'), True),
        ("llama3", f"{LLAMA3}; {LLAMA3}", True),
        ("llama3", LLAMA3.replace("1", '"one"'), False),
        ("llama3", f"<|python_tag|>{LLAMA3}".replace("1", '"one"'), False),
        ("llama3", f"{LLAMA3}; {LLAMA3}".replace("1}}; ", "2}}; ").replace("1", '"one"'), False),
        ("llama3", f"I look; {LLAMA3}".replace("1", '"one"'), False),
        ("llama3", LLAMA3.replace('{"name', '{"type": "function", "name').replace("1", '"one"'), False),
        ("llama3", LLAMA3.replace('{"name', '{"type": "x", "name'), False),
        ("llama3", f"{LLAMA3} It is dry.", False),
        ("harmony", "<|channel|>final<|message|>Not to=functions.rain now.", True),
        ("harmony", HARMONY.format('{"day": 1}'), True),
        ("harmony", THOUGHT + TO_HARMONY.format('{"day": 1}'), True),
        ("harmony", THOUGHT + "<|start|>assistant" + HARMONY.format('{"day": 1}'), True),
        ("harmony", THOUGHT + "<|start|>assistant" + HARMONY.format("[]").replace(".rain", ".sun"), False),
        ("harmony", THOUGHT + "<|start|>assistant" + HARMONY.format("{}").replace(".rain", ".sun"), True),
        ("harmony", THOUGHT + "<|start|>assistant" + HARMONY.format('{"day": "one"}'), False),
        ("harmony", HARMONY.replace("commentary", "analysis").format('{"day": "one"}'), False),
        ("harmony", TO_HARMONY.format('{"day": "one"}'), False),
    ],
)
def test_calls_told_by_how_they_begin_are_held_to_their_schemas_and_text_to_nothing(texts, form, written, follows_it):
    rules, picked = AnswerGrammar(CONTROLS), pick_output_format(form, None, "", "")
    assert rules.marks_calls(picked.call)
    for thinking in (picked.thinking, None):
        assert follows(texts, grammar_of_auto(rules, picked.call, [RAIN, ANY], thinking), written) == follows_it
    if follows_it:  # and is read as what it is
        parser = picked.language.parser("", {"rain": RAIN.parameters, "sun": {}})
        calls = [*parser.add(written).calls, *parser.finish().calls]
        assert bool(calls) == ("json" in written or '"parameters": {"day"' in written)
        assert all(json.loads(call.arguments) == {"day": 1} for call in calls if call.name == "rain")


def test_calls_may_follow_thoughts_that_have_a_budget_and_text(texts):
    rules, picked = AnswerGrammar(CONTROLS), pick_output_format("harmony", None, "", "")
    grammar = grammar_of_auto(rules, picked.call, [RAIN], picked.thinking, budget=20)
    said = "<|channel|>commentary<|message|>I look it up.<|end|>"
    assert follows(texts, grammar, THOUGHT + TO_HARMONY.format('{"day": 1}'))
    assert follows(texts, grammar, THOUGHT + "<|start|>assistant" + said + TO_HARMONY.format('{"day": 1}'))
    assert not follows(texts, grammar, THOUGHT + "<|start|>assistant" + said + TO_HARMONY.format('{"day": "one"}'))
    assert not follows(texts, grammar, THOUGHT + "<|start|>assistant" + THOUGHT + TO_HARMONY.format('{"day": 1}'))
    assert not follows(texts, grammar, THOUGHT.replace("Say", MUCH) + TO_HARMONY.format('{"day": 1}'))


def test_marks_of_tokens_that_the_model_lacks_tell_nothing():
    call = pick_output_format("llama3", None, "", "").call
    assert not AnswerGrammar({"<think>": 4096}).marks_calls(call)


def follows(texts, grammar, written):
    matcher = LLMatcher(LLTokenizer(texts, n_vocab=4096 + len(TOKENS), eos_token=[1]), grammar)
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
GLM47 = "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in WRITTEN.items())
MINIMAX_M2 = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in WRITTEN.items())
IS_TEXT = {key: "true" if isinstance(value, str) else "false" for key, value in MEANT.items()}
DSML = "".join(
    f'<｜DSML｜parameter name="{key}" string="{IS_TEXT[key]}">{value}</｜DSML｜parameter>\n'
    for key, value in WRITTEN.items()
)
PYTHON = ", ".join(f"{key}={json.dumps(value)}" for key, value in MEANT.items())
BY_ITSELF = {
    "glm47": f"<tool_call>rain{GLM47}</tool_call>",
    "minimax_m2": f'<minimax:tool_call>\n<invoke name="rain">\n{MINIMAX_M2}</invoke>\n</minimax:tool_call>',
    "deepseek_v32": (
        f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="rain">\n{DSML}</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    ),
    "lfm2": f"<|tool_call_start|>[rain({PYTHON})]<|tool_call_end|>",
    "pythonic": f"[rain({PYTHON})]",
    "qwen3_coder": f"<tool_call>\n<function=rain>\n{QWEN3_CODER}</function>\n</tool_call>",
    "glm4": f"<tool_call>rain\n{GLM4}</tool_call>",
}


@pytest.mark.parametrize("name", BY_ITSELF)
def test_arguments_that_stand_by_themselves_are_held_to_their_schemas(texts, name):
    form, written = pick_output_format(name, None, "", ""), BY_ITSELF[name]
    rules = AnswerGrammar(CONTROLS)
    calls = rules.of_calls(form.call, [CallableFunction("rain", FORECAST, True)], is_parallel=False)
    grammar = rules.of_answer(None, f"{calls}\nrest: calls", is_open=False, most_tokens=None)
    assert follows(texts, grammar, written)
    assert not follows(texts, grammar, written.replace("[1, 2]", "[1, two]"))
    assert not follows(texts, grammar, written.replace("18", "17"))
    assert not follows(texts, grammar, written.replace("place", "day"))
    assert not follows(texts, grammar, written.replace("days", "hours"))
    assert not follows(texts, grammar, written.replace("\nC", "\nK").replace(">C", ">K").replace('"C"', '"K"'))
    parser = form.language.parser("", {"rain": FORECAST})
    deltas = [*parser.add(written).calls, *parser.finish().calls]
    assert json.loads("".join(delta.arguments for delta in deltas)) == MEANT


@pytest.mark.parametrize("name", BY_ITSELF)
def test_a_function_whose_arguments_nobody_named_takes_any(texts, name):
    form = pick_output_format(name, None, "", "")
    rules = AnswerGrammar(CONTROLS)
    calls = rules.of_calls(form.call, [CallableFunction("rain", {}, False)], is_parallel=False)
    grammar = rules.of_answer(None, f"{calls}\nrest: calls", is_open=False, most_tokens=None)
    assert follows(texts, grammar, BY_ITSELF[name])


NESTED = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F", None]},
        "place": {
            "type": "object",
            "properties": {"at": {"$ref": "#/$defs/point"}, "the name": {"type": "string"}},
            "required": ["the name"],
        },
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1, "maxItems": 3},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "more": {},
    },
    "required": ["city", "place"],
    "$defs": {
        "point": {"type": "array", "items": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/point"}]}},
    },
}
BARE = "city:~Oslo,x:{1}~,unit:~C~,place:{at:[1.5,[2]],~the name~:~Hav}n~},days:[1,2],note:null,more:{a:[true,~b~]}"
BARE_MEANT = {
    **{"city": "Oslo,x:{1}", "unit": "C", "place": {"at": [1.5, [2]], "the name": "Hav}n"}, "days": [1, 2]},
    **{"note": None, "more": {"a": [True, "b"]}},
}


@pytest.mark.parametrize(
    ("form", "around", "quote"),
    [
        ("gemma", "<start_function_call>call:rain{{{}}}<end_function_call>", "<escape>"),
        ("gemma4", "<|tool_call>call:rain{{{}}}<tool_call|>", '<|"|>'),
    ],
)
@pytest.mark.parametrize("has_tokens", [True, False])
def test_objects_with_bare_keys_are_held_to_their_schemas(texts, form, around, quote, has_tokens):
    picked = pick_output_format(form, None, "", "")
    rules = AnswerGrammar(CONTROLS if has_tokens else {})
    calls = rules.of_calls(picked.call, [CallableFunction("rain", NESTED, True)], is_parallel=True)
    grammar = rules.of_answer(None, f"{calls}\nrest: calls", is_open=False, most_tokens=None)
    texts = texts if has_tokens else (MODEL_FOLDER / "tokenizer.json").read_text(encoding="utf-8")

    def takes(bare):
        return follows(texts, grammar, around.format(bare.replace("~", quote)))

    assert takes(BARE)
    assert takes("city:~~,place:{~the name~:~~}")
    assert takes("city:~Oslo~,place:{~the name~:~~},note:~dry~,more:~a~")
    assert not takes(BARE.replace("city:", "~city~:"))
    assert not takes("place:{~the name~:~~}")
    assert not takes(BARE.replace("~C~", "~K~"))
    assert not takes(BARE.replace("[1,2]", "[0,2]"))
    assert not takes(BARE.replace("[1,2]", "[]"))
    assert not takes(BARE.replace("[1,2]", "[1,2,3,4]"))
    assert not takes(BARE.replace("[1.5,[2]]", "[1.5,[true]]"))
    assert not takes(BARE.replace("note:null", "note:1"))
    assert not takes(BARE + ",less:1")
    written = around.format(BARE.replace("~", quote))
    assert follows(texts, grammar, written * 2)
    parser = picked.language.parser("", {"rain": NESTED})
    deltas = [*parser.add(written).calls, *parser.finish().calls]
    assert json.loads("".join(delta.arguments for delta in deltas)) == BARE_MEANT


def names_of(schema):
    """All names and texts in a schema."""
    if isinstance(schema, dict):
        return {*schema}.union(*map(names_of, schema.values()))
    return set().union(*map(names_of, schema)) if isinstance(schema, list) else {str(schema)}


def test_objects_with_bare_keys_drawn_at_random_are_read_and_valid(texts):
    """Arguments of a strict function follow its schema, apart from bounds of texts; or the schema is refused."""
    rules, call = AnswerGrammar(CONTROLS), pick_output_format("gemma", None, "", "").call
    language = pick_output_format("gemma", None, "", "").language
    tokenizer, names = LLTokenizer(texts, n_vocab=4096 + len(TOKENS), eos_token=[1]), Tokenizer.from_str(texts)
    draw, outcomes = random.Random(14), Counter()
    for part in all_schemas()[::2]:
        if not {"pattern", "format", "minLength", "maxLength", "#"}.isdisjoint(names_of(part)):
            continue
        shared = {name: part[name] for name in ("$defs", "definitions") if name in part}
        schema = {
            "type": "object",
            "properties": {"v": part},
            "required": ["v"],
            "additionalProperties": False,
            **shared,
        }
        if LLMatcher(tokenizer, of_schema(schema)).is_error():
            continue
        try:
            calls = rules.of_calls(call, [CallableFunction("rain", schema, True)], is_parallel=False)
        except RequestError:
            outcomes["refused"] += 1
            continue
        grammar = rules.of_answer(None, f"{calls}\nrest: calls", is_open=False, most_tokens=None)
        matcher = LLMatcher(tokenizer, grammar)
        assert not matcher.is_error(), f"{part} {matcher.get_error()}"
        written = drawn(matcher, names, draw)
        outcomes["read" if written else "too long"] += 1
        if written:
            parser = language.parser("", {"rain": schema})
            told = [*parser.add(written).calls, *parser.finish().calls]
            assert takes(schema, "".join(call.arguments for call in told)), f"{part} {written!r}"
    assert outcomes["read"] > 4 * (outcomes["too long"] + outcomes["refused"])


def drawn(matcher, names, draw):
    """A random answer, which ends what it can at every second chance; empty where it does not end in time."""
    ids = []
    for _ in range(200):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(len(mask) * 8) if mask[i // 8] >> i % 8 & 1]
        ends = [i for i in allowed if names.id_to_token(i) in ("<escape>", "}", "]", ",", "<end_function_call>")]
        token_id = draw.choice(ends if ends and draw.random() < 0.5 else allowed)
        if token_id == 1:
            return names.decode(ids, skip_special_tokens=False)
        assert matcher.consume_token(token_id)
        ids.append(token_id)
    return ""


@pytest.mark.parametrize(
    "part",
    [
        {"type": "array", "prefixItems": [{"type": "string"}]},
        {"allOf": [{"type": "object"}, {"required": ["a"]}]},
        {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        False,
    ],
)
def test_what_objects_with_bare_keys_can_not_be_held_to_is_refused_where_it_must_be(texts, part):
    call, rules = pick_output_format("gemma", None, "", "").call, AnswerGrammar(CONTROLS)
    schema = {"type": "object", "properties": {"a": part}}
    with pytest.raises(RequestError, match=r"can't be held to (prefixItems|allOf|anyOf|false) here"):
        rules.of_calls(call, [CallableFunction("rain", schema, True)], is_parallel=False)
    calls = rules.of_calls(call, [CallableFunction("rain", schema, False)], is_parallel=False)
    grammar = rules.of_answer(None, f"{calls}\nrest: calls", is_open=False, most_tokens=None)
    assert follows(texts, grammar, "<start_function_call>call:rain{}<end_function_call>")
