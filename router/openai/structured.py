"""Structured output as clients ask for it: `response_format`, vLLM's `structured_outputs`, and the names that older
clients and other servers have for the same. All become one grammar.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.protocol.errors import RequestError
from twostroke.router.openai.fields import StrictModel, check_values
from twostroke.router.text import grammar

MAX_ALTERNATIVES = 1024  # of a choice
MAX_NESTING = 64  # of a schema

Schema = dict[str, Any]
_Source = Annotated[str, Field(max_length=grammar.MAX_SOURCE_BYTES)]  # an empty one asks for nothing
_JsonSchema = Schema | bool | _Source
_Choices = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=4096)]],
    Field(fail_fast=True, min_length=1, max_length=MAX_ALTERNATIVES),
]


class JsonSchemaFormat(StrictModel):
    """`response_format.json_schema`."""

    name: Annotated[str, Field(max_length=512)] | None = None
    description: str | None = None
    schema_: Annotated[Schema | bool | None, Field(alias="schema")] = None  # None: any object
    strict: bool | None = None  # what an answer can't be held to is refused; else it is left out


class ResponseFormat(StrictModel):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[Schema | bool | None, Field(alias="schema")] = None  # of json_object, as other servers take it


class StructuredOutputs(StrictModel):
    """vLLM's `structured_outputs`."""

    json_: Annotated[_JsonSchema | None, Field(alias="json")] = None
    regex: _Source | None = None
    choice: _Choices | None = None
    grammar: _Source | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class StructuredFields(StrictModel):
    """The fields of completions and chat that say what an answer is to look like; at most one of them may."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _JsonSchema | None = None  # vLLM's, before they were one
    guided_regex: _Source | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Source | None = None
    json_schema: _JsonSchema | None = None  # SGLang's and llama.cpp's
    regex: _Source | None = None
    ebnf: _Source | None = None
    grammar: _Source | None = None


_Kind = Literal["json", "regex", "choice", "grammar"]
_FIELDS: dict[str, _Kind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
ANY_OBJECT: Schema = {"type": "object"}


async def grammar_of(body: StructuredFields, checks: grammar.GrammarChecks) -> str:
    """The grammar of what is asked for; empty where nothing is.

    Raises RequestError naming the field, and where it is a schema the place in it, for what can't be.
    """
    wanted = list(_wanted(body))
    if not wanted:
        return ""
    if len(wanted) > 1:
        raise RequestError(f"{wanted[1][0]}: {wanted[0][0]} is given already: one of them", param=wanted[1][0])
    ((param, kind, value),) = wanted
    if kind == "json":
        strict = body.response_format is None or bool(
            body.response_format.json_schema and body.response_format.json_schema.strict
        )
        compact = body.structured_outputs is not None and bool(body.structured_outputs.disable_any_whitespace)
        schema = await checks.schema(_schema(value, param), param, lenient=not strict, compact=compact)
        return await checks.check(grammar.of_schema(schema, lenient=not strict, compact=compact), param)
    if kind == "regex":
        made = grammar.of_regex(value)
    elif kind == "choice":
        made = grammar.of_choices(value)
    else:
        try:
            made = await asyncio.to_thread(grammar.of_text, value)
        except RequestError as error:
            raise grammar.named(error, param) from error
    return await checks.check(made, param)


def _wanted(body: StructuredFields) -> Iterator[tuple[str, _Kind, Any]]:
    """(field, kind, value) of all that are given."""
    form = body.response_format
    if form is not None and form.type == "json_object":
        yield "response_format.schema", "json", ANY_OBJECT if form.schema_ is None else form.schema_
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise RequestError("response_format.json_schema: is required", param="response_format.json_schema")
        schema = form.json_schema.schema_
        yield "response_format.json_schema.schema", "json", ANY_OBJECT if schema is None else schema
    outputs = body.structured_outputs
    if outputs is not None:
        if outputs.json_object:
            yield "structured_outputs.json_object", "json", ANY_OBJECT
        values: dict[_Kind, Any] = {
            "json": outputs.json_,
            "regex": outputs.regex,
            "choice": outputs.choice,
            "grammar": outputs.grammar,
        }
        for kind, value in values.items():
            if _is_given(value):
                yield f"structured_outputs.{kind}", kind, value
    for name, kind in _FIELDS.items():
        if _is_given(value := getattr(body, name)):
            yield name, kind, value


def _is_given(value: Any) -> bool:
    return value is not None and value != ""


def _schema(value: Schema | bool | str, param: str) -> Schema:
    """The schema that is meant. Raises RequestError."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param}: is no JSON: {error}", param=param) from error
        if _is_deeper(value, MAX_NESTING):
            raise _too_deep(param)
        check_values(value, param)
    if isinstance(value, bool):
        return {} if value else {"enum": []}
    if not isinstance(value, dict):
        raise RequestError(f"{param}: a schema is an object, true or false", param=param)
    if _is_deeper(value, MAX_NESTING):
        raise _too_deep(param)
    size = len(json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(errors="replace"))
    if size > grammar.MAX_SOURCE_BYTES:
        raise RequestError(f"{param}: takes {size} bytes: at most {grammar.MAX_SOURCE_BYTES} are taken", param=param)
    return value


def _too_deep(param: str) -> RequestError:
    return RequestError(f"{param}: a schema may be nested {MAX_NESTING} levels deep", param=param)


def _is_deeper(value: Any, most: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    return most == 0 or any(_is_deeper(one, most - 1) for one in (value.values() if isinstance(value, dict) else value))
