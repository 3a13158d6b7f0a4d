"""Schemas without `strict`: what answers can't be held to is left out, and told."""

import json
from typing import Any

import jsonschema
import pytest

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
    assert await checks.schema(schema, "schema", lenient=True) is schema
    assert checks.left_out == set()
