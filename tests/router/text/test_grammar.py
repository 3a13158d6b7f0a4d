"""Schemas without `strict`: what answers can't be held to is left out, and told."""

import json
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher

from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.protocol.errors import RequestError
from twostroke.protocol.grammars import Grammars, Vocabulary
from twostroke.router.text.grammar import GrammarChecks, of_schema

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # as pydantic writes its Decimal
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"  # zod's

BEYOND: dict[str, tuple[dict[str, Any], set[str]]] = {
    "a decimal": ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}, {"pattern"}),
    "an email": ({"type": "object", "properties": {"mail": {"type": "string", "pattern": EMAIL}}}, {"pattern"}),
    "a back reference": ({"type": "string", "pattern": r"^(a)\1$", "maxLength": 3}, {"pattern"}),
    "a word's edge": ({"type": "array", "items": {"type": "string", "pattern": r"\bfoo\b"}}, {"pattern"}),
    "within a definition": ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "pattern": "(?=a)"}}}, {"pattern"}),
    "a property's pattern": ({"type": "object", "patternProperties": {"^(?!_)": {}, "^b": {}}}, {"patternProperties"}),
    "64 bits": ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, {"minimum"}),
    "a double's range": ({"type": "number", "minimum": -1e308, "maximum": 1.79e308}, {"minimum", "maximum"}),
    "a fine multiple": ({"type": "number", "multipleOf": 1e-300}, {"multipleOf"}),
    "a huge text": ({"type": "string", "minLength": 2**40}, {"minLength"}),
    "what is not implemented": (
        {"type": "array", "uniqueItems": True, "items": {"format": "x"}},
        {"uniqueItems", "format"},
    ),
    "alternatives": ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, {"oneOf"}),
    "a bound beside a pattern": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": -(2**63)}},
            "patternProperties": {"^a": {"type": "integer", "maximum": 5}},
        },
        {"minimum"},
    ),
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    text = (BUNDLED_MODEL_DIR / "tokenizer.json").read_text(encoding="utf-8")
    return Grammars(lambda: Vocabulary(text, 4096, (1,)))


@pytest.mark.parametrize("name", BEYOND)
async def test_what_can_not_be_held_is_left_out_of_a_schema_that_is_not_strict(grammars: Grammars, name: str) -> None:
    schema, left_out = BEYOND[name]
    checks = GrammarChecks(grammars)
    before = json.dumps(schema)
    followed = await checks.schema(schema, "schema", lenient=True)
    await checks.check(of_schema(followed, lenient=True), "schema")
    assert checks.left_out == left_out
    assert json.dumps(schema) == before, "the client's own is not changed"
    jsonschema.Draft202012Validator.check_schema(dict(followed))
    with pytest.raises(RequestError, match=r"^schema: "):
        await GrammarChecks(grammars).schema(schema, "schema", lenient=False)


LEAST = -(2**63)
ENDS_THE_PROCESS = [
    {"const": LEAST},
    {"enum": [1, LEAST + 1]},
    {"const": {"a": [LEAST]}},
    {"type": "integer", "enum": [-9.3e18]},
    {"type": "integer", "minimum": LEAST, "maximum": LEAST},
    {"type": "integer", "minimum": -1e300, "maximum": LEAST + 10},
    {"type": "object", "properties": {"const": {"const": LEAST}}, "required": ["const"]},
    {"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"const": LEAST}}},
    {"allOf": [{"type": "integer", "minimum": LEAST}, {"maximum": LEAST}]},
]


@pytest.mark.parametrize("schema", ENDS_THE_PROCESS, ids=json.dumps)
async def test_numbers_that_end_llguidances_process_never_reach_it(grammars: Grammars, schema: dict[str, Any]) -> None:
    """A crash of llguidance would end this process, too."""
    with pytest.raises(RequestError, match=r"^schema: #/.*below -2\^63"):
        await GrammarChecks(grammars).schema(schema, "schema", lenient=False)
    checks = GrammarChecks(grammars)
    followed = await checks.schema(schema, "schema", lenient=True)
    assert checks.left_out <= {"const", "enum", "minimum", "maximum"}
    assert checks.left_out
    await checks.check(of_schema(followed, lenient=True), "schema")


def follows(grammars: Grammars, matcher: LLMatcher, text: str) -> bool:
    tokenizer = grammars._tokenizer
    assert tokenizer is not None
    ids = [tokenizer.tokenize_bytes(bytes([byte]))[0] for byte in text.encode()]
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("number", [2**53 + 1, 123456789012345678, -(2**60) - 1, 2**63 - 1])
async def test_an_integer_that_no_double_is_does_not_become_another_one(grammars: Grammars, number: int) -> None:
    only = {"type": "integer", "minimum": number, "maximum": number}
    for schema in ({"const": number}, {"type": "integer", "enum": [number]}, only):
        checks = GrammarChecks(grammars)
        await checks.schema(schema, "schema", lenient=True)
        assert checks.left_out & {"const", "enum", "minimum"}
        with pytest.raises(RequestError, match=r"2\^53"):
            await GrammarChecks(grammars).schema(schema, "schema", lenient=False)
    for bounds in ({"minimum": number}, {"maximum": number}):
        schema = {"type": "integer", **bounds}
        try:
            followed = await GrammarChecks(grammars).schema(schema, "schema", lenient=False)
        except RequestError:  # llguidance can't make a range of it
            continue
        grammar = of_schema(followed)
        for said in range(number - 3, number + 4):
            if follows(grammars, await grammars.matcher(grammar), str(said)):
                jsonschema.validate(said, schema)


async def test_numbers_that_doubles_are_stay_as_they_are(grammars: Grammars) -> None:
    schema = {"enum": [0.1, -5, 2**60, 1.5, True], "properties": {"minimum": {"minimum": 0.5, "maximum": 2**53}}}
    checks = GrammarChecks(grammars)
    assert await checks.schema(schema, "schema", lenient=True) == schema
    assert checks.left_out == set()


async def test_what_is_left_out_in_several_places_is_told_once(grammars: Grammars) -> None:
    many = {"type": "array", "items": {"type": "string", "format": "a"}, "uniqueItems": True, "not": {"type": "object"}}
    schema = {"type": "object", "properties": {name: {**many, "if": {}, "then": {}} for name in "abc"}}
    checks = GrammarChecks(grammars)
    await checks.check(of_schema(await checks.schema(schema, "schema", lenient=True), lenient=True), "schema")
    assert checks.left_out == {"uniqueItems", "not", "format", "if", "then"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"type": "object", "properties": {"a": {"type": "integer", "minimum": 5, "maximum": 2}}, "required": ["a"]},
        {"$ref": "https://example.org/x"},
        {"type": "nonsense"},
    ],
)
async def test_what_no_value_satisfies_is_refused_though_it_is_not_strict(
    grammars: Grammars, schema: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as caught:
        await GrammarChecks(grammars).schema(schema, "schema", lenient=True)
    assert caught.value.code == "invalid_grammar"


async def test_a_schema_that_can_be_held_is_followed_as_it_is(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 2**62}}}
    checks = GrammarChecks(grammars)
    assert await checks.schema(schema, "schema", lenient=True) == schema
    assert checks.left_out == set()
