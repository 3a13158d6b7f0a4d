"""What answers are to look like, as llguidance's grammars: JSON schemas, regular expressions, choices, and grammars in
Lark or GBNF; and whether they can be followed.

A schema that is refused is taken apart until the place is known where it goes wrong.
"""

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from twostroke.protocol.errors import RequestError
from twostroke.protocol.grammars import Grammars

MAX_SOURCE_BYTES = 64 * 1024
"""Of a schema or grammar, written as JSON without spaces."""

WHITE_SPACE = r" |\r?\n[ \t]{0,32}"
"""What may stand between the tokens of JSON: a model that may write any amount sometimes writes nothing else."""

_LEAVES_OUT = re.compile(r"\[\^|\\\\[PpxuU]|&&|--|~~|[^\x00-\x7f]")

MAX_MULTIPLES = 50_000
"""What the numbers of all `multipleOf` may come to: llguidance makes an automaton of so many states of each."""

MAX_GBNF_RULES = 256  # what reads them takes their square

SEARCH_S = 0.3
"""How long it may take to find the place of a schema's fault."""

Schema = Mapping[str, Any]


def of_schema(schema: Schema, *, lenient: bool = False, compact: bool = False) -> str:
    """JSON that the schema takes; `compact` is without any white space.

    A `lenient` grammar leaves out what llguidance can't hold an answer to; it takes no notice of `x-guidance`, which
    could say otherwise. Raises RequestError, which names no field, for numbers beyond a double.
    """
    plain = {name: value for name, value in schema.items() if name != "x-guidance"}
    text = json.dumps(plain, separators=(",", ":"), ensure_ascii=False)
    # llguidance lets escaped quotes and backslashes through classes of characters that leave them out: there are none.
    is_open = '"pattern' in text and _LEAVES_OUT.search(text) is not None
    try:
        return LLMatcher.grammar_from_json_schema(
            text,
            overrides={
                "lenient": lenient,
                "json_allowed_escapes": "nrtbf" if is_open else None,
                "whitespace_flexible": not compact,
                "whitespace_pattern": None if compact else WHITE_SPACE,
            },
        )
    except ValueError as error:
        raise RequestError(f"can't be read as a schema: {str(error)[:300]}", code="invalid_grammar") from error


def of_regex(pattern: str) -> str:
    """The whole answer matches, in the syntax of Rust's `regex`."""
    return LLMatcher.grammar_from_regex(pattern)


def of_choices(choices: Sequence[str]) -> str:
    """One of these texts."""
    return of_lark("start: " + " | ".join(map(lark_text, choices)))


def lark_text(text: str) -> str:
    """Return a string literal of llguidance's Lark. It takes JSON's, but for a bare U+007F."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def of_lark(text: str) -> str:
    """A grammar in llguidance's Lark."""
    return LLMatcher.grammar_from_lark(text)


def of_text(text: str) -> str:
    """A grammar in Lark or GBNF. Raises RequestError, which names no field, for a GBNF that can't be read."""
    if "%json" in text:  # its schemas would escape what is asked of others
        raise RequestError("can't have %json: give the schema as json", code="invalid_grammar")
    if "::=" not in text:
        return of_lark(text)
    if text.count("::=") > MAX_GBNF_RULES:
        raise RequestError(f"has more than {MAX_GBNF_RULES} rules: write it in Lark", code="invalid_grammar")
    try:
        return of_lark(gbnf_to_lark(text))
    except Exception as error:  # it raises bare exceptions for whatever is wrong
        raise RequestError(f"can't be read as GBNF: {str(error)[:300]}", code="invalid_grammar") from error


async def check(grammars: Grammars, grammar: str, param: str) -> str:
    """The grammar, which can be followed. Raises RequestError naming the field `param` where it can't."""
    try:
        await grammars.matcher(grammar)
    except RequestError as error:
        raise named(error, param) from error
    return grammar


async def check_schema(grammars: Grammars, schema: Schema, param: str, *, lenient: bool, compact: bool = False) -> str:
    """As `check`, of `of_schema`. The error says where in the schema its fault is, as far as that can be found."""

    async def fault(part: Schema) -> RequestError | None:
        try:
            await grammars.matcher(of_schema(part, lenient=lenient, compact=compact))
        except RequestError as error:
            return named(error, param)
        return None

    if _num_states(schema) > MAX_MULTIPLES:
        raise RequestError(f"{param}: multipleOf: its numbers are too large together", param=param)
    found = await fault(schema)
    if found is None:
        return of_schema(schema, lenient=lenient, compact=compact)
    # A part of which alone the same is said has the fault, or a part of it.
    pointer, place, until = "", schema, time.monotonic() + SEARCH_S
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    parts = _parts(schema)
    while time.monotonic() < until and (named_part := next(parts, None)) is not None:
        name, part = named_part
        told = await fault({**part, **shared})
        if told is not None and str(told) == str(found):
            pointer, place = pointer + name, part
            parts = _parts(place)
    raise RequestError(f"{found}{f' (at #{pointer})' if pointer else ''}", param=param, code=found.code)


def named(error: RequestError, param: str) -> RequestError:
    """The error of the field `param`."""
    return RequestError(f"{param}: {error}", param=param, code=error.code, status=error.status)


def _num_states(schema: Schema) -> float:
    """At least as many states as the schema's `multipleOf` take: each may meet all others, at each `$ref`."""
    numbers: list[Decimal] = []
    num_refs = 0
    rest: list[Any] = [schema]
    while rest:
        one = rest.pop()
        if isinstance(one, Mapping):
            rest += one.values()
            num_refs += "$ref" in one
            if isinstance(number := one.get("multipleOf"), int | float) and not isinstance(number, bool):
                numbers.append(Decimal(str(number)))
        elif isinstance(one, list):
            rest += one
    if not numbers:
        return 0
    if any(abs(number.adjusted()) > 15 or number <= 0 for number in numbers):
        return math.inf
    scale = max(0, *[-int(number.as_tuple().exponent) for number in numbers], 0)
    return math.lcm(*[int(number.scaleb(scale)) for number in numbers]) * len(numbers) * (1 + num_refs)


_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = (*_DEFINITIONS, "properties", "patternProperties")
_BY_INDEX = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def _parts(schema: Schema) -> Iterator[tuple[str, Schema]]:
    """The schemas right inside one, with the ends of their JSON pointers."""
    for keyword, value in [(name, schema[name]) for name in (*_BY_NAME, *_BY_INDEX, *_SINGLE) if name in schema]:
        members: Iterable[tuple[object, Any]] = ()
        if keyword in _BY_NAME and isinstance(value, Mapping):
            members = value.items()
        elif keyword in _BY_INDEX and isinstance(value, list):
            members = enumerate(value)
        for name, part in members:
            if isinstance(part, Mapping):
                yield f"/{keyword}/" + str(name).replace("~", "~0").replace("/", "~1"), part
        if keyword in _SINGLE and isinstance(value, Mapping):
            yield f"/{keyword}", value
