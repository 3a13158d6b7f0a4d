"""Grammars of llguidance that answers are held to, with checks that they can be followed.

Contents come from JSON schemas, regular expressions, choices, and grammars in Lark or GBNF. A schema that is refused is
taken apart until the place is known where it goes wrong. `AnswerGrammar` makes the grammar of a whole answer: calls
that must be made, arguments that must be valid, and the reasoning before them.

Control tokens are named by their ids: llguidance lets no text stand for them. Gemma writes objects with bare keys and
texts between its own marks; llguidance writes JSON only, so `BareObject` makes rules of a schema, one for each object
and list. Texts are restricted by `enum` and `const` alone.
"""

import json
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any
from urllib.parse import unquote

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from twostroke.protocol.errors import RequestError
from twostroke.protocol.grammars import Grammars
from twostroke.router.text.output_format import ArgumentSyntax, CallSyntax, ThinkingSyntax
from twostroke.router.text.response_parser import with_types

MAX_SOURCE_BYTES = 64 * 1024
"""Most characters of a schema or grammar, written as JSON without spaces."""

WHITE_SPACE = r" |\r?\n[ \t]{0,32}"
"""White space allowed between the tokens of JSON: a model that may write any amount sometimes writes nothing else."""

_LEAVES_OUT = re.compile(r"\[\^|\\\\[PpxuU]|&&|--|~~|[^\x00-\x7f]")

MAX_MULTIPLES = 50_000
"""Largest product of all `multipleOf`: llguidance makes an automaton of so many states of each."""

MAX_GBNF_RULES = 256
"""Most rules of a GBNF grammar, whose parser takes their square."""

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
        while bounds and (error := await self._fault(kind | bounds, lenient=True)) is not None:
            if _is_contradiction(error):
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
            error = await fault(relaxed)
            if error is None or str(error) != str(found):
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
        error = await fault({**part, **shared})
        if error is not None and str(error) == str(found):  # of the part alone the same is said
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


_TEXT = r"/(.|\n)*/"
_NOTHING = '""'
_CONTROL = re.compile(r"<\|\w+\|>")


@dataclass(frozen=True)
class CallableFunction:
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool


class AnswerGrammar:
    """Writes the grammars of one model's answers."""

    def __init__(self, controls: Mapping[str, int]):
        """`controls`: the tokens that are not text, with their ids."""
        self._controls = controls
        longest_first = sorted(controls, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if controls else None

    def of_calls(
        self, how: CallSyntax, functions: Sequence[CallableFunction], *, is_parallel: bool, is_free: bool = False
    ) -> str:
        """The rules of `calls`: one call, or where `is_parallel` one or more.

        `is_free`: they may begin in whichever way is read as a call, as they have to stand behind `until_calls`.
        Raises RequestError for a schema that they can't be held to.
        """
        rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
        for i, one in enumerate(functions):
            begin = " /[0-9]+/ ".join(map(self._literal, how.begin.replace("{name}", one.name).split("{index}")))
            if is_free and how.mark is not None:
                begins = (self._pattern(form.replace("{name}", one.name)) for form in how.mark.begins)
                begin = f"({' | '.join(begins)})"
            arguments = f"arguments_{i}"
            if how.argument is not None and how.argument.is_python:
                rules += self._keyword_arguments(arguments, how.argument, one)
            elif how.argument is not None:
                rules += self._arguments(arguments, how.argument, one)
            elif how.quote:
                rules += self._bare_object(arguments, how.quote, one)
            else:
                arguments = _json(one.parameters or {"type": "object"}, one)
            rules.append(f"call_{i}: {begin} {arguments} {self._literal(how.end)}")
        trigger, between = self._literal(how.trigger), self._literal(how.between)
        more = f"({between} {'' if how.last else trigger} call)*" if is_parallel and not how.is_single else ""
        rules.append(f"calls: {trigger} {self._literal(how.first)} call {more} {self._literal(how.last)}")
        return "\n".join(rules)

    def _arguments(self, rule: str, how: ArgumentSyntax, function: CallableFunction) -> list[str]:
        """The rules of arguments that stand one by one, in the schema's order; any, where it names none.

        Texts are held to `enum` and `const` alone.
        """
        schema, end, rules = function.parameters, self._literal(how.end), self._text_until(rule, how.end)
        if "properties" not in schema:
            before, after = how.begin.split("{key}")
            kinds = {self._literal(after.replace("{is_text}", kind)) for kind in ("true", "false")}
            key = f'{self._literal(before)} /[^<>\\n"]+/ ({" | ".join(sorted(kinds))})'
            return [f"{rule}: ({key} {rule}_text)*", *rules]
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        parts = []
        required = schema.get("required", ())
        properties = with_types(schema)["properties"]
        for key, part in {**properties, **{name: {} for name in required if name not in properties}}.items():
            said = part if isinstance(part, dict) else {}
            choices = [said["const"]] if "const" in said else said.get("enum")
            is_text = isinstance(choices[0], str) if choices else not said or _may_be_text(said)
            if choices:
                texts = (choice if isinstance(choice, str) else json.dumps(choice) for choice in choices)
                value = f"({' | '.join(self._literal(text) or _NOTHING for text in texts)}) {end}"
            elif is_text:
                value = f"{rule}_text"
            else:
                value = f"{_json({**said, **shared}, function)} {end}"
            begin = how.begin.replace("{key}", key).replace("{is_text}", str(is_text).lower())
            argument = f"{self._literal(begin)} {value}"
            parts.append(argument if key in required else f"({argument})?")
        return [f"{rule}: {' '.join(parts) or _NOTHING}", *rules]

    def _keyword_arguments(self, rule: str, how: ArgumentSyntax, function: CallableFunction) -> list[str]:
        """The rules of arguments with their names, as in Python, whose values are JSON; any, where it names none."""
        schema, between, rules = function.parameters, self._literal(how.between), list[str]()
        if "properties" not in schema:
            argument = f"/[A-Za-z_][A-Za-z0-9_]*/ {self._literal(how.begin.replace('{key}', ''))} {_json({}, function)}"
            return [f"{rule}: ({rule}_any ({between} {rule}_any)*)?", f"{rule}_any: {argument}"]

        def written(body: str) -> str:
            rules.append(f"{rule}_{len(rules)}: {body}")
            return f"{rule}_{len(rules) - 1}"

        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        required = schema.get("required", ())
        properties = {**schema["properties"], **{name: {} for name in required if name not in schema["properties"]}}
        members = [
            (
                f"{self._literal(how.begin.replace('{key}', key))} {_json(_with(part, shared), function)}",
                key in required,
            )
            for key, part in properties.items()
        ]
        return [f"{rule}: {_sequence(members, between, written) or _NOTHING}", *rules]

    def _bare_object(self, rule: str, quote: str, function: CallableFunction) -> list[str]:
        """The rules of arguments that are an object whose keys stand bare, and its texts between two of `quote`."""
        whole = BareObject(
            rule,
            function.parameters,
            mark=quote,
            text=f"{rule}_text",
            literal=self._literal,
            scalar=lambda schema: _json(schema, function),
            is_strict=function.is_strict,
        )
        return [*whole.rules(), *self._text_until(rule, quote)]

    def _text_until(self, rule: str, end: str) -> list[str]:
        """The rules of any text with `end` behind it, which are named after `rule`."""
        if any(end.startswith(token) for token in self._controls):
            return [f"{rule}_text: {rule}_any {self._literal(end)}", f"{rule}_any: {_TEXT}"]
        return [f"{rule}_text[lazy]: {_TEXT} {self._literal(end)}"]

    def marks_calls(self, how: CallSyntax) -> bool:
        """Return whether calls differ from text by their beginning."""
        if how.mark is None:
            return how.trigger in self._controls
        needed = {token for form in how.mark.begins for token in _CONTROL.findall(form)}
        return self._controls.keys() >= needed

    def ends_thoughts(self, how: ThinkingSyntax) -> bool:
        """Return whether reasoning ends with a token of its own, so that it can be cut off by its number of tokens."""
        return any(how.end.startswith(token) for token in self._controls)

    def of_answer(
        self, how: ThinkingSyntax | None, rest: str, *, is_open: bool, most_tokens: int | None, answer: str = ""
    ) -> str:
        """A grammar: thoughts, `most_tokens` at most, then `rest`, which are rules with the name `rest`.

        `is_open`: the prompt has begun them; without `how` there are none. `answer`: the grammar that `rest` calls
        @answer.
        """
        lark = f"start: rest\n{rest}"
        if how is not None:
            end, is_token = self._literal(how.end), self.ends_thoughts(how)
            limit = "" if most_tokens is None else f"[max_tokens={most_tokens}]"
            rule = f"thoughts{limit}: {_TEXT}" if is_token else f"thoughts[lazy]: {_TEXT} {end}"
            inside = f"thoughts {end}" if is_token else "thoughts"
            thoughts = inside if is_open else f"({self._literal(how.begin)} {inside})?"
            lark = f"start: {thoughts} rest\n{rule}\n{rest}"
        if not answer:
            return of_lark(lark)
        first, *others = json.loads(answer)["grammars"]
        return json.dumps({"grammars": [{"lark_grammar": lark}, {**first, "name": "answer"}, *others]})

    def _literal(self, text: str) -> str:
        """This text as a sequence of Lark."""
        return " ".join(
            f"<[{self._controls[part]}]>" if part in self._controls else lark_text(part) for part in self._parts(text)
        )

    def anything(self, thinking: ThinkingSyntax) -> str:
        """The rule of `rest` that takes whatever a model writes, but for thoughts."""
        return f"rest: free\n{self._free(None, (), thinking, is_bounded=True)}"

    def until_calls(
        self,
        how: CallSyntax,
        functions: Sequence[CallableFunction],
        thinking: ThinkingSyntax | None,
        *,
        is_bounded: bool,
    ) -> str:
        """The rule of `rest` that takes text, and behind it `calls` that are free, or none; of calls that it
        `marks_calls` of. Where thoughts are bounded the text has none."""
        return f"rest: free calls?\n{self._free(how, functions, thinking, is_bounded=is_bounded)}"

    def _free(
        self,
        call: CallSyntax | None,
        functions: Sequence[CallableFunction],
        thinking: ThinkingSyntax | None,
        *,
        is_bounded: bool,
    ) -> str:
        """The rule `free`: text, and control tokens, but what begins calls or bounded thoughts.

        Texts stand side by side nowhere: two would be what one must not.
        """
        left_out, unlike, body = set[str](), list[str](), ""
        if call is not None and call.mark is not None:
            unlike.append(call.mark.begun.replace("{names}", "|".join(one.name for one in functions)))
            body = call.mark.body
        elif call is not None:
            left_out.add(call.trigger)
        if thinking is not None and is_bounded:
            first, *rest = self._parts(thinking.begin)
            if rest and rest[-1] in self._controls:  # what stands between the two tells thoughts
                unlike.append(rf"\s*{re.escape(''.join(rest[:-1]))}\s*")
                body = rest[-1]
            else:
                left_out.add(first)
        # A token by itself and the same among others are two things to llguidance, of which it follows one.
        marks = [body, *(call.mark.begins if call is not None and call.mark is not None else ())]
        marks += [thinking.begin, thinking.end] if thinking is not None else []
        named = {token for token in self._controls for mark in marks if token in mark} - left_out
        others = ",".join(str(self._controls[token]) for token in sorted(self._controls.keys() - left_out - named))
        after = [f"<[{others}]> TEXT?"] if others else []
        after += [f"{self._literal(token)} {'BODY?' if token == body else 'TEXT?'}" for token in sorted(named)]
        rules = [f"free: TEXT? ({' | '.join(after)})*" if after else "free: TEXT?"]
        rules += ["TEXT: /(.|\\n)+/" + "".join(f" & ~/{one}/" for one in unlike), "BODY: /(.|\\n)+/"]
        return "\n".join(rules)

    def _parts(self, text: str) -> list[str]:
        """The text's control tokens, and what stands between them."""
        return [part for part in ([text] if self._split is None else self._split.split(text)) if part]

    def _pattern(self, form: str) -> str:
        """This regular expression with control tokens in it, which may be followed by `?`, as a sequence of Lark."""
        written: list[str] = []
        for part in self._parts(form):
            if part in self._controls:
                written.append(self._literal(part))
                continue
            if written and part.startswith("?"):
                written.append(f"{written.pop()}?")
            written.append(f"/{part.removeprefix('?')}/")
        return " ".join(written)


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    types = schema.get("type", [])
    unions = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return "string" in ([types] if isinstance(types, str) else types) or any(
        _may_be_text(choice) for choice in unions if isinstance(choice, dict)
    )


def _json(schema: Mapping[str, Any], function: CallableFunction) -> str:
    """JSON that the schema takes, in Lark."""
    options = {"lenient": not function.is_strict, "whitespace_pattern": WHITE_SPACE}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _with(schema: Any, shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of one argument with the definitions that it may refer to."""
    return {**schema, **shared} if isinstance(schema, Mapping) else {"anyOf": [schema], **shared}


def _sequence(members: Sequence[tuple[str, bool]], between: str, written: Callable[[str], str]) -> str:
    """Members in their order, those that are not required or absent, with `between` between them.

    `written` makes a rule of its own of a text and returns its name.
    """
    firsts, rest = [""], ""  # from the last one forwards, so that each is written once
    for member, is_required in reversed(members):
        one = written(member)
        if is_required:
            firsts = [f"{one} {rest}"]
            rest = written(f"{between} {one} {rest}")
        else:
            firsts.append(f"{one} {rest}")
            rest = written(f"({between} {one})? {rest}")
    first = " | ".join(one for one in firsts if one)
    return f"({first}){'' if firsts[0] else '?'}" if first else ""


_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_UNHELD = ("patternProperties", "minProperties", "maxProperties", "prefixItems")
_SHAPES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that decide a whole value; earlier ones come first."""


class BareObject:
    """Writes the rules of one function's arguments."""

    def __init__(
        self,
        name: str,
        schema: Mapping[str, Any],
        *,
        mark: str,
        text: str,
        literal: Callable[[str], str],
        scalar: Callable[[Mapping[str, Any]], str],
        is_strict: bool,
    ):
        """The rules' names begin with `name`. `mark` is around texts, and `text` the rule of one with the mark behind.

        `literal` and `scalar` write a text, and JSON of a schema, in Lark.
        """
        self._name = name
        self._schema = schema
        self._mark = mark
        self._text = text
        self._literal = literal
        self._scalar = scalar
        self._is_strict = is_strict
        self._rules: list[str] = []
        self._references: dict[str, str] = {}  # to rules

    def rules(self) -> list[str]:
        """The rule `name`, and those that it refers to. Raises RequestError for what can't be held, where it must."""
        top = self._of_type("object", self._schema) if "$ref" not in self._schema else self._value(self._schema)
        written = [f"{self._name}: {top}"]
        done = 0
        while done < len(self._references):  # which may refer to others
            pointer, rule = list(self._references.items())[done]
            written.append(f"{rule}: {self._value(self._found(pointer))}")
            done += 1
        written += self._rules
        return [*written, *self._anything()] if any(self._any in rule for rule in written) else written

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            if schema is False and self._is_strict:
                raise self._unheld("false")
            return self._any
        said = [name for name in _SHAPES if name in schema]
        if self._is_strict and (len(said) > 1 or (said and said[0] not in ("const", "enum") and "type" in schema)):
            raise self._unheld(said[0])
        if "$ref" in schema:
            return self._references.setdefault(schema["$ref"], f"{self._name}_ref{len(self._references)}")
        if "const" in schema or "enum" in schema:
            choices = [schema["const"]] if "const" in schema else schema["enum"]
            return f"({' | '.join(self._literal(self._written(choice)) for choice in choices)})"
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return f"({' | '.join(self._value(choice) for choice in schema[name])})"
        if len(schema.get("allOf", ())) == 1:
            return self._value(schema["allOf"][0])
        if "allOf" in schema and self._is_strict:
            raise self._unheld("allOf")
        types = schema.get("type", "object" if "properties" in schema else "array" if "items" in schema else [])
        types = [types] if isinstance(types, str) else types
        return f"({' | '.join(self._of_type(one, schema) for one in types)})" if types else self._any

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        if self._is_strict and (unheld := [name for name in _UNHELD if name in schema]):
            raise self._unheld(unheld[0])
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind == "string":
            return f"{self._literal(self._mark)} {self._text}"
        return self._scalar({"type": kind} | {name: schema[name] for name in _OF_NUMBERS if name in schema})

    def _object(self, schema: Mapping[str, Any]) -> str:
        required = schema.get("required", ())
        properties = {**schema.get("properties", {})}
        properties |= {name: {} for name in required if name not in properties}
        if not properties:
            others = schema.get("additionalProperties", True)
            if others is False:
                return '"{}"'
            member = self._rule(f'/[A-Za-z0-9_]+/ ":" {self._value(others)}')
            return f'"{{" ({member} ("," {member})*)? "}}"'
        members = [self._literal(f"{self._key(name)}:") + " " + self._value(part) for name, part in properties.items()]
        are_required = [name in required for name in properties]
        inside = _sequence([*zip(members, are_required, strict=True)], '","', self._rule)
        return f'"{{" {inside} "}}"'

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        item = self._rule(self._value(schema.get("items", {})))
        more = f'{item} ("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}' if most != 1 else item
        return f'"[" ({more}){"" if least else "?"} "]"'

    def _rule(self, body: str) -> str:
        """A rule of its own, so that it can be named twice and is written once."""
        name = f"{self._name}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    @property
    def _any(self) -> str:
        return f"{self._name}_value"

    def _anything(self) -> list[str]:
        """The rules of a value of which nothing is said."""
        one, scalar = self._any, self._scalar({"type": ["number", "boolean", "null"]})
        member = f'/[A-Za-z0-9_]+/ ":" {one}'
        return [
            f"{one}: {self._literal(self._mark)} {self._text} | {scalar} | {one}_list | {one}_object",
            f'{one}_list: "[" ({one} ("," {one})*)? "]"',
            f'{one}_object: "{{" ({member} ("," {member})*)? "}}"',
        ]

    def _found(self, pointer: str) -> Any:
        found: Any = self._schema
        for part in unquote(pointer).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        return found

    def _key(self, name: str) -> str:
        return name if re.fullmatch(r"\w+", name) else f"{self._mark}{name}{self._mark}"

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._mark}{value}{self._mark}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{self._key(name)}:{self._written(one)}' for name, one in value.items())}}}"
        return json.dumps(value)

    def _unheld(self, keyword: str) -> RequestError:
        return RequestError(
            f"tools: calls of this model can't be held to {keyword} here: write it in other words, or without strict",
            param="tools",
        )
