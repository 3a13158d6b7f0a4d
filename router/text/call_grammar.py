"""Grammars of whole answers: calls that must be made, arguments that must be valid, and the reasoning before them.

Control tokens are named by their ids: llguidance lets no text stand for them. Gemma writes objects with bare keys and
texts between its own marks; llguidance writes JSON only, so `BareObject` makes rules of a schema, one for each object
and list. Texts are restricted by `enum` and `const` alone.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from twostroke.protocol.errors import RequestError
from twostroke.router.text.grammar import WHITE_SPACE, lark_text, of_lark
from twostroke.router.text.output_format import ArgumentSyntax, CallSyntax, ThinkingSyntax
from twostroke.router.text.response_parser import with_types

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
