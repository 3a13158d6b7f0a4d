"""Grammars of llguidance for structured output: from JSON schemas, regular expressions, choices, and grammars in Lark
or GBNF; with checks that they can be followed.

A schema that is refused is taken apart until the place is known where it goes wrong.
"""

import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from twostroke.protocol.errors import RequestError
from twostroke.protocol.grammars import Grammars

MAX_SOURCE_BYTES = 64 * 1024
"""Most characters of a schema or grammar, written as JSON without spaces."""

WHITE_SPACE = r" |\r?\n[ \t]{0,32}"
"""White space allowed between the tokens of JSON: a model that may write any amount sometimes writes nothing else."""

_LEAVES_OUT = re.compile(r"\[\^|\\\\[PpxuU]|&&|--|~~|[^\x00-\x7f]")

MAX_MULTIPLES = 50_000
"""Largest product of all `multipleOf`: llguidance makes an automaton of so many states of each."""

MAX_GBNF_RULES = 256  # what reads them takes their square

RELAX_S = 2.0
"""Seconds that finding what must be left out of a lenient schema may take."""

SEARCH_S = 0.3
"""Seconds in which the place of a schema's fault has to be found."""

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


class GrammarChecks:
    """Checks the grammars of one request, and collects the keywords of schemas that answers are not held to."""

    def __init__(self, grammars: Grammars, *, salt: bytes = b"", client: bytes = b""):
        """`salt` and `client` as in the request to workers."""
        self._grammars = grammars
        self._salt = salt
        self._client = client
        self.left_out: set[str] = set()
        """Keywords of JSON Schema that a lenient schema has, and that are left out of its grammar."""

    async def check(self, grammar: str, param: str) -> str:
        """The grammar, which can be followed. Raises RequestError naming the field `param` where it can't."""
        try:
            matcher = await self._grammars.matcher(grammar, self._salt, self._client)
        except RequestError as error:
            raise named(error, param) from error
        self.left_out.update(_ignored(matcher.get_grammar_warnings()))
        return grammar

    async def schema(self, schema: Schema, param: str, *, lenient: bool, compact: bool = False) -> Schema:
        """Return the schema as answers can be held to it: of a `lenient` one, keywords that can't be are left out.

        Raises RequestError naming `param`, and the place in the schema as far as it can be found.
        """
        if _num_states(schema) > MAX_MULTIPLES:
            if not lenient:
                raise RequestError(f"{param}: multipleOf: its numbers are too large together", param=param)
            self.left_out.add("multipleOf")
            schema = _without("multipleOf", schema)
        numbers = _Numbers()
        schema = numbers.held(schema)
        if numbers.faults and not lenient:
            raise RequestError(
                f"{param}: {numbers.faults[0]}: integers beyond 2^53 that a double lacks, and numbers below -2^63, "
                "can't be followed",
                param=param,
                code="invalid_grammar",
            )
        self.left_out.update(fault.rpartition("/")[2] for fault in numbers.faults)
        fault = partial(self._fault, lenient=lenient, compact=compact)
        found = await fault(schema, is_kept=True)  # most are followed as they are
        if found is not None and lenient:
            schema = await self._relaxed(schema, time.monotonic() + RELAX_S)
            found = await fault(schema)
        until = time.monotonic() + SEARCH_S
        pointer = ""
        while found is not None:
            pointer, place = await _place(schema, found, fault, until)
            relaxed = None if not lenient else await self._relaxed_at(schema, pointer, place, found, fault)
            if relaxed is None or time.monotonic() >= until:
                raise RequestError(
                    f"{param}: {found}{f' (at #{pointer})' if pointer else ''}", param=param, code=found.code
                )
            schema = relaxed
            found = await fault(schema)
        return schema

    async def _fault(
        self, schema: Schema, *, lenient: bool, compact: bool = False, is_kept: bool = False
    ) -> RequestError | None:
        """Return the refusal of the schema, if any. `is_kept`: an answer is likely to follow it."""
        try:
            try_out = self._grammars.matcher if is_kept else self._grammars.try_out
            await try_out(of_schema(schema, lenient=lenient, compact=compact), self._salt, self._client)
        except RequestError as error:
            return error
        return None

    async def _relaxed(self, schema: Schema, until: float) -> dict[str, Any]:
        """The schema without the bounds and patterns that llguidance can't follow even by themselves.

        After `until` nothing more is tried out: the rest stays as it is.
        """
        part = dict(schema)
        if time.monotonic() >= until:
            return part
        bounds = {name: part[name] for name in _BOUNDS if name in part}
        kind = {"type": part["type"]} if "type" in part else {}
        while bounds and (told := await self._fault(kind | bounds, lenient=True)) is not None:
            if _is_contradiction(told):
                break
            alone = [
                name for name in bounds if await self._fault(kind | {name: bounds[name]}, lenient=True) is not None
            ]
            for name in alone or list(bounds):
                self.left_out.add(name)
                del bounds[name], part[name]
        patterns = part.get("patternProperties")
        if isinstance(patterns, Mapping):
            kept = {
                pattern: each
                for pattern, each in patterns.items()
                if await self._fault({"type": "string", "pattern": pattern}, lenient=True) is None
            }
            if len(kept) < len(patterns):
                self.left_out.add("patternProperties")
                part["patternProperties"] = kept
        for keyword in (*_BY_NAME, *_BY_INDEX, *_SINGLE):
            value = part.get(keyword)
            if keyword in _BY_NAME and isinstance(value, Mapping):
                part[keyword] = {name: await self._relaxed_part(each, until) for name, each in value.items()}
            elif keyword in _BY_INDEX and isinstance(value, list):
                part[keyword] = [await self._relaxed_part(each, until) for each in value]
            elif keyword in _SINGLE and isinstance(value, Mapping):
                part[keyword] = await self._relaxed(value, until)
        return part

    async def _relaxed_part(self, part: Any, until: float) -> Any:
        return await self._relaxed(part, until) if isinstance(part, Mapping) else part

    async def _relaxed_at(
        self, schema: Schema, pointer: str, place: Schema, found: RequestError, fault: "_Fault"
    ) -> Schema | None:
        """The schema without the keyword at `pointer` that its fault is of; None where no such keyword is known."""
        if _is_contradiction(found):
            return None
        for name in (*_BOUNDS, "patternProperties", "minProperties", "maxProperties"):
            if name not in place:
                continue
            rest = {key: value for key, value in place.items() if key != name}
            relaxed: Schema = _with_at(schema, pointer, rest)
            told = await fault(relaxed)
            if told is None or str(told) != str(found):
                self.left_out.add(name)
                return relaxed
        return None


_Fault = Callable[..., Awaitable[RequestError | None]]
_BOUNDS = (
    *("pattern", "format", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems"),
)
"""Keywords without which a schema takes more values, and none less."""


async def _place(schema: Schema, found: RequestError, fault: _Fault, until: float) -> tuple[str, Schema]:
    """The JSON pointer, and the part of the schema, that has the fault which was `found`, or a part of it."""
    pointer, place = "", schema
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    parts = _parts(schema)
    while time.monotonic() < until and (named_part := next(parts, None)) is not None:
        name, part = named_part
        told = await fault({**part, **shared})
        if told is not None and str(told) == str(found):  # of the part alone the same is said
            pointer, place = pointer + name, part
            parts = _parts(place)
    return pointer, place


def _is_contradiction(error: RequestError) -> bool:
    """Return whether no value is of the schema: to leave something out of it would change what it says."""
    return str(error).startswith("Unsatisfiable")


def _ignored(warnings: Iterable[str]) -> Iterator[str]:
    """The keywords that llguidance tells it takes no notice of. Formats are the client's own words, and not told."""
    for warning in warnings:
        kind, _, rest = warning.partition(": ")
        if kind == "Unimplemented keys":
            yield from re.findall(r'"(\w+)"', rest)
        elif kind == "Unknown format":
            yield "format"
        elif kind.startswith("oneOf "):
            yield "oneOf"


class _Numbers:
    """Makes the numbers of a schema ones that llguidance reads rightly: it takes them for doubles, and ends the process
    where both bounds of an integer are about -2^63."""

    _LEAST = -(2.0**63) + 1024  # the double above -2^63

    def __init__(self) -> None:
        self.faults: list[str] = []
        """JSON pointers of the keywords that were left out, since they can't be followed."""

    def held(self, schema: Schema, pointer: str = "#") -> dict[str, Any]:
        """The schema without such keywords. Bounds beyond 2^53 are moved inward to the next double."""
        held: dict[str, Any] = {}
        for name, value in schema.items():
            here = f"{pointer}/{name}"
            if name in ("const", "enum"):
                is_right = self._is_exact(value)
            elif name in _LOWER or name in _UPPER:
                is_right = not _is_number(value) or value >= self._LEAST
            else:
                is_right = True
            if not is_right:
                self.faults.append(here)
            elif name in _LOWER + _UPPER and isinstance(value, int) and abs(value) > 2**53:
                held[name] = _inward(value, is_lower=name in _LOWER)
            elif name in _MAPS and isinstance(value, Mapping):
                held[name] = {key: self._part(part, f"{here}/{key}") for key, part in value.items()}
            elif name in ("const", "enum"):
                held[name] = value
            elif isinstance(value, list):
                held[name] = [self._part(part, f"{here}/{index}") for index, part in enumerate(value)]
            else:
                held[name] = self._part(value, here)
        if _is_empty(held) and not _is_empty(schema):  # there is no double between its bounds
            moved = [name for name in _LOWER + _UPPER if name in held]
            self.faults += [f"{pointer}/{name}" for name in moved]
            held = {name: value for name, value in held.items() if name not in moved}
        return held

    def _part(self, part: Any, pointer: str) -> Any:
        return self.held(part, pointer) if isinstance(part, Mapping) else part

    def _is_exact(self, value: Any) -> bool:
        if isinstance(value, Mapping):
            return all(map(self._is_exact, value.values()))
        if isinstance(value, list):
            return all(map(self._is_exact, value))
        if not _is_number(value):
            return True
        return abs(value) < 2**1023 and int(float(value)) == int(value) and value >= self._LEAST


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_empty(schema: Schema) -> bool:
    """Return whether a lower bound is above an upper one."""
    lower, upper = ([schema[name] for name in names if _is_number(schema.get(name))] for names in (_LOWER, _UPPER))
    return bool(lower and upper) and max(lower) > min(upper)


def _inward(bound: int, *, is_lower: bool) -> int | float:
    """The double next to a bound, on its inner side."""
    if abs(bound) >= 2**1023:
        return bound
    near = float(bound)
    if int(near) != bound and (int(near) < bound) == is_lower:
        near = math.nextafter(near, math.inf if is_lower else -math.inf)
    return int(near)


def _without(keyword: str, value: Any) -> Any:
    """The schema without this keyword, wherever it stands."""
    if isinstance(value, Mapping):
        return {name: _without(keyword, one) for name, one in value.items() if name != keyword}
    return [_without(keyword, one) for one in value] if isinstance(value, list) else value


def _with_at(value: Any, pointer: str, part: Mapping[str, Any]) -> Any:
    """The schema with `part` in place of what is at the JSON pointer."""
    if not pointer:
        return part
    first, _, rest = pointer[1:].partition("/")
    rest = f"/{rest}" if rest else ""
    if isinstance(value, list):
        return [_with_at(one, rest, part) if str(i) == first else one for i, one in enumerate(value)]
    key = first.replace("~1", "/").replace("~0", "~")
    return {name: _with_at(one, rest, part) if name == key else one for name, one in value.items()}


def named(error: RequestError, param: str) -> RequestError:
    """The error of the field `param`."""
    return RequestError(f"{param}: {error}", param=param, code=error.code, status=error.status)


def _num_states(schema: Schema) -> float:
    """Return a bound on the states of the schema's `multipleOf`: each may meet all others, at each `$ref`."""
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


_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_DEFINITIONS = ("$defs", "definitions")
_MAPS = (*_DEFINITIONS, "properties", "patternProperties", "dependentSchemas")
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
