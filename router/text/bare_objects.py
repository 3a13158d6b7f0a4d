"""Grammars of objects as Gemma writes them: keys stand bare, and texts as they are between marks of their own.

llguidance writes JSON only, so a schema becomes rules here, a rule for each object and list: no schema takes more than
its own length. Texts are held to `enum` and `const` alone.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from twostroke.protocol.errors import RequestError

_OF_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_UNHELD = ("patternProperties", "minProperties", "maxProperties", "prefixItems")
_SHAPES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""What says all of a value, the first before the others."""


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
        firsts, rest = [""], ""  # from the last one forwards, so that each is written once
        for name, member in reversed([*zip(properties, members, strict=True)]):
            one = self._rule(member)
            if name in required:
                firsts = [f"{one} {rest}"]
                rest = self._rule(f'"," {one} {rest}')
            else:
                firsts.append(f"{one} {rest}")
                rest = self._rule(f'("," {one})? {rest}')
        first = " | ".join(one for one in firsts if one)
        return f'"{{" ({first}){"" if firsts[0] else "?"} "}}"'

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
