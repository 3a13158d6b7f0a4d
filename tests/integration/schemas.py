"""500 JSON schemas, written from the specification (draft 2020-12), keyword by keyword and then combined.

All are bounded, so that a model that draws at random comes to an end.
"""

import itertools
import json
import random
from typing import Any

import jsonschema
import jsonschema_rs

Schema = dict[str, Any]

FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "duration", "uri")
PATTERNS = (
    "^[a-z]{1,4}$", "^(on|off)$", "^\\d{3}-\\d{4}$", "^[A-F0-9]{2}(:[A-F0-9]{2}){2}$", "ab?c", "^$|^x+y{2,3}$",
    "^\\S{2,5}$", "^(?:a|bc|d{2}){1,3}$", "^[^\"\\\\]{1,6}$", "^é[à-ü]{1,3}$",
)  # fmt: skip


def an_object(required: int | None = None, closed: bool = True, **properties: Schema) -> Schema:
    """Return the schema of an object with these properties, of which the first `required` are required; None: all."""
    names = list(properties)
    schema: Schema = {"type": "object", "properties": properties, "required": names[:required]}
    return {**schema, "additionalProperties": False} if closed else schema


def an_array(items: Schema, least: int = 0, most: int = 3) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


TEXT: Schema = {"type": "string", "maxLength": 6}
NUMBER: Schema = {"type": "integer", "minimum": -50, "maximum": 50}
FLAG: Schema = {"type": "boolean"}


def types() -> list[Schema]:
    plain = [TEXT, NUMBER, FLAG, {"type": "null"}, {"type": "number", "minimum": 0, "maximum": 9}]
    both = [{"type": list(two), "maxLength": 4} for two in itertools.combinations(("string", "boolean", "null"), 2)]
    return [*plain, *both, {"type": "object", "maxProperties": 0}, {"type": "array", "maxItems": 0}]


def constants() -> list[Schema]:
    values: list[Any] = [
        None, True, False, 0, -7, 3.5, 1e21, "", "a", "two words", "\"quoted\"", "back\\slash", "tab\there", "é ü 漢",
        [], [1, "a"], {}, {"a": {"b": [None]}}, [[[]]], "\u2028", "</script>", "a" * 30,
    ]  # fmt: skip
    enums: list[list[Any]] = [values[i : i + 4] for i in range(0, 20)]
    return [{"const": value} for value in values] + [{"enum": some} for some in enums]


def strings() -> list[Schema]:
    lengths = [(least, most) for least in range(0, 6) for most in range(least, 8, 2)]
    found: list[Schema] = [{"type": "string", "minLength": least, "maxLength": most} for least, most in lengths]
    found += [{"type": "string", "pattern": pattern, "maxLength": 12} for pattern in PATTERNS]
    found += [{"type": "string", "pattern": pattern} for pattern in PATTERNS if pattern != "ab?c"]
    found += [{"type": "string", "format": name} for name in FORMATS if name != "uri"]
    return found


def numbers() -> list[Schema]:
    bounds: list[Schema] = []
    for low, high in (
        (0, 0),
        (0, 9),
        (-9, 0),
        (5, 1000),
        (-1000, -5),
        (99, 101),
        (-1, 1),
        (0, 10**6),
        (10**15, 10**15 + 9),
    ):
        bounds.append({"type": "integer", "minimum": low, "maximum": high})
        bounds.append({"type": "integer", "exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1})
    for low_real, high_real in ((0, 1), (-0.5, 0.5), (0.001, 0.002), (-1e3, 1e3), (1.25, 1.5)):
        bounds.append({"type": "number", "minimum": low_real, "maximum": high_real})
        bounds.append({"type": "number", "exclusiveMinimum": low_real, "exclusiveMaximum": high_real})
    multiples: list[Schema] = [
        {"type": "integer", "multipleOf": n, "minimum": 0, "maximum": 500} for n in (1, 2, 5, 10, 25, 100)
    ]
    return bounds + multiples + [{"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9}]


def arrays() -> list[Schema]:
    items = [TEXT, NUMBER, FLAG, {"enum": ["a", 1, None]}, an_array(FLAG, 0, 2)]
    found = [an_array(item, least, most) for item in items for least, most in ((0, 1), (1, 1), (2, 3), (0, 4))]
    tuples: list[Schema] = [
        {"type": "array", "prefixItems": items[:n], "items": False, "minItems": least}
        for n in (1, 2, 3, 4)
        for least in (0, n)
    ]
    rest: list[Schema] = [
        {"type": "array", "prefixItems": items[:n], "items": FLAG, "minItems": n, "maxItems": n + 2} for n in (1, 2, 3)
    ]
    return found + tuples + rest + [{"type": "array", "items": NUMBER, "maxItems": 4, "uniqueItems": True}]


def objects() -> list[Schema]:
    parts: dict[str, Schema] = {"a": TEXT, "b c": NUMBER, "é": FLAG, "d": an_array(NUMBER), 'e"f': {"const": 1}}
    found = []
    for count, required, closed in itertools.product(range(1, 6), range(0, 6), (True, False)):
        if required <= count and not (not closed and count % 2):
            some = dict(list(parts.items())[:count])
            schema = an_object(required, **some)
            found.append(schema if closed else {**schema, "additionalProperties": FLAG, "maxProperties": 6})
    found += [
        {"type": "object", "additionalProperties": NUMBER, "maxProperties": most, "minProperties": least}
        for least, most in ((0, 1), (1, 2), (2, 3))
    ]
    found += [
        {
            "type": "object",
            "patternProperties": {"^x[0-9]{1,2}$": value},
            "additionalProperties": False,
            "maxProperties": 3,
        }
        for value in (TEXT, NUMBER, FLAG)
    ]
    found += [{"type": "object", "properties": {"a": TEXT}, "dependentRequired": {"a": ["b"]}}]
    found += [{"type": "object", "propertyNames": {"maxLength": 3}, "maxProperties": 2}]
    return found


def unions() -> list[Schema]:
    parts = [
        TEXT,
        NUMBER,
        FLAG,
        {"type": "null"},
        an_array(NUMBER),
        an_object(a=FLAG),
        {"const": "x"},
        {"enum": [1.5, "y"]},
    ]
    found: list[Schema] = [{"anyOf": list(two)} for two in itertools.combinations(parts, 2)]
    found += [{"oneOf": list(two)} for two in itertools.combinations(parts[:6], 2)]
    found += [{"oneOf": [an_object(kind={"const": "a"}, x=NUMBER), an_object(kind={"const": "b"}, y=TEXT)]}]
    found += [
        {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 10}]},
        {"not": {"type": "string"}},
    ]
    found += [{"if": {"const": 1}, "then": {"const": 1}, "else": {"const": 2}}]
    return found


def intersections() -> list[Schema]:
    return [
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
        {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]},
        {"allOf": [{"type": "string", "pattern": "^[ab]+$"}, {"maxLength": 4}]},
        {"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]},
        {"allOf": [{"type": ["string", "null"], "maxLength": 3}, {"type": ["null", "integer"]}]},
        {"allOf": [an_object(a=NUMBER, closed=False), an_object(b=FLAG, closed=False)], "maxProperties": 2},
        {
            "allOf": [
                {"properties": {"a": {"type": "integer"}}},
                an_object(a={"type": "number", "minimum": 0, "maximum": 5}),
            ]
        },
        {"allOf": [{"anyOf": [TEXT, NUMBER]}, {"anyOf": [NUMBER, FLAG]}]},
        {"type": "array", "allOf": [{"minItems": 1}, {"maxItems": 2}], "items": FLAG},
        {"allOf": [{"type": "integer", "multipleOf": 2}, {"multipleOf": 3}], "minimum": 0, "maximum": 60},
        {"type": "integer", "allOf": [{"type": "string"}]},
        {"minimum": 5, "maximum": 4, "type": "integer"},
    ]


def references() -> list[Schema]:
    tree = an_object(value=NUMBER, children=an_array({"$ref": "#/$defs/tree"}, 0, 2))
    chain: Schema = {"anyOf": [{"type": "null"}, an_object(head=FLAG, tail={"$ref": "#/$defs/chain"})]}
    sums: Schema = {"anyOf": [NUMBER, an_object(plus=an_array({"$ref": "#/$defs/sums"}, 2, 2))]}
    even = an_object(0, odd={"$ref": "#/$defs/odd"})
    odd = an_object(0, even={"$ref": "#/$defs/even"})
    defs: Schema = {"tree": tree, "chain": chain, "sums": sums, "even": even, "odd": odd, "text": TEXT, "a/b~c": FLAG}
    targets = ["tree", "chain", "sums", "even", "odd", "text", "a~1b~0c"]
    found: list[Schema] = [{"$ref": f"#/$defs/{name}", "$defs": defs} for name in targets]
    found += [an_object(one={"$ref": f"#/$defs/{name}"}, two=FLAG) | {"$defs": defs} for name in targets]
    found += [an_array({"$ref": f"#/$defs/{name}"}, 1, 2) | {"$defs": defs} for name in targets]
    found += [{"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}]
    found += [
        an_object(a=NUMBER, b={"$ref": "#/properties/a"}),
        {"$ref": "#/definitions/x", "definitions": {"x": FLAG}},
    ]
    return found


def annotated() -> list[Schema]:
    """Return schemas with keywords that say nothing about values."""
    words: Schema = {
        "title": "T",
        "description": "d",
        "default": 5,
        "examples": [1],
        "$comment": "c",
        "deprecated": True,
    }
    return [{**schema, **words} for schema in (TEXT, NUMBER, FLAG, an_array(FLAG), an_object(a=TEXT))]


def combined(count: int) -> list[Schema]:
    """Nested at random, out of everything else."""
    draw = random.Random(14)
    leaves = [*strings()[:30], *numbers()[:20], *constants()[:30], FLAG, {"type": "null"}]

    def a_schema(depth: int) -> Schema:
        kind = draw.randrange(5) if depth else 4
        if kind == 0:
            return an_array(a_schema(depth - 1), draw.randrange(2), 2)
        if kind == 1:
            parts = {f"p{i}": a_schema(depth - 1) for i in range(draw.randrange(1, 4))}
            return an_object(draw.randrange(len(parts) + 1), **parts)
        if kind == 2:
            return {"anyOf": [a_schema(depth - 1) for _ in range(draw.randrange(1, 4))]}
        if kind == 3:
            return {
                "type": "array",
                "prefixItems": [a_schema(depth - 1) for _ in range(2)],
                "items": False,
                "minItems": 2,
            }
        return draw.choice(leaves)

    return [a_schema(draw.randrange(1, 4)) for _ in range(count)]


def all_schemas(count: int = 500) -> list[Schema]:
    """The same in each run."""
    kinds = (types, constants, strings, numbers, arrays, objects, unions, intersections, references, annotated)
    found = [schema for kind in kinds for schema in kind()]
    return found + combined(count - len(found))


def takes(schema: Schema, text: str) -> bool:
    """Return whether the text is JSON of the schema, by two libraries: one knows few formats, the other all that we
    do."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    one = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    other = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    return one.is_valid(value) and other.is_valid(value)
