"""Base of a section of the configuration file: a frozen pydantic model beside the code that it configures.

`cluster/config` composes the sections, reads them from YAML, and tells what is wrong as a ConfigError with the
setting's path. Built directly, as by tests, a section raises pydantic's ValidationError, which is a ValueError.

A validator that finds fields contradicting each other raises ValueError, and begins its message with the name of the
field to change: `max_batch: 8 must be ...`.
"""

import difflib
import re
from typing import Annotated, Any, Final, TypeVar

from annotated_types import Ge
from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

S = TypeVar("S", bound="Section")

Count = Annotated[int, Ge(1)]
Interval = Annotated[float, Ge(0.001)]
"""Seconds that are waited for again and again."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGTP]i?)?B?")
_POWERS = {letter: power for power, letter in enumerate("KMGTP", 1)}


def parse_size(text: str) -> int:
    """Return the bytes of a text such as `4GiB` (of 2**30) or `1.5 TB` (of 10**12).

    Raises ValueError for a text that is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size: write a number of bytes, or a text such as 4GiB or 500MB")
    unit = found[2] or ""
    return int(float(found[1]) * (1024 if unit.endswith("i") else 1000) ** _POWERS.get(unit[:1].upper(), 0))


MIN_PLAIN_BYTES = 1024


def _bytes(value: Any) -> Any:
    """Return the bytes of a text. A small number without a unit was meant in another: it raises ValueError."""
    plain = str(value).strip().removesuffix(".0")
    if plain.isdecimal() and 0 < int(plain) < MIN_PLAIN_BYTES:
        raise ValueError(f"{value} would be bytes: write a unit, such as {plain}GiB")
    return parse_size(value) if isinstance(value, str) else value


ByteSize = Annotated[
    int,
    Ge(0),
    BeforeValidator(_bytes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": _SIZE.pattern, "examples": ["4GiB"]},
                {"type": "integer", "minimum": 0},
            ]
        }
    ),
]
"""Bytes, which a configuration may write as a text with a unit."""

_COUNT = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)([kKmM]?)")
_MULTIPLES = {"": 1, "k": 1000, "K": 2**10, "m": 10**6, "M": 2**20}


def parse_count(text: str) -> int:
    """Return a number of tokens as vLLM writes it: 8192, 8k (thousands), 8K (of 1,024). Raises ValueError."""
    found = _COUNT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no number of tokens: write 8192, 8k or 8K")
    return int(float(found[1]) * _MULTIPLES[found[2]])


TokenCount = Annotated[
    int,
    Ge(1),
    BeforeValidator(lambda value: parse_count(value) if isinstance(value, str) else value),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": _COUNT.pattern, "examples": ["8k"]},
                {"type": "integer", "minimum": 1},
            ]
        }
    ),
]
"""Tokens, which a configuration may write as 8k or 8K."""

UNKNOWN_SETTING: Final = "unknown_setting"
"""The type of pydantic's error where a section has no setting of a name."""


class Section(BaseModel):
    """Values have the very types that are declared ('16' is no number), and a field's docstring describes it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _check_settings(cls, raw: Any) -> Any:
        """A section with all of its lines commented out has the defaults; one with a name that it lacks is refused."""
        if not isinstance(raw, dict):
            return {} if raw is None else raw
        for name in raw:
            if name not in cls.model_fields:
                close = difflib.get_close_matches(str(name), cls.model_fields, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(cls.model_fields))}"
                context = {"name": str(name), "hint": hint, "is_near": bool(close)}
                raise PydanticCustomError(UNKNOWN_SETTING, "{name}: there is no such setting; {hint}", context)
        return raw

    def part(self, kind: type[S]) -> S:
        """The settings of one part, in a section that has the keys of several parts side by side."""
        return kind(**{name: getattr(self, name) for name in kind.model_fields})


def to_plain(section: object) -> object:
    """msgspec's `enc_hook` for messages to our own processes that have sections within."""
    if isinstance(section, Section):
        return section.model_dump(mode="json")
    raise NotImplementedError


def from_plain(kind: type[Any], raw: Any) -> Any:
    """msgspec's `dec_hook`, the reverse."""
    if issubclass(kind, Section):
        return kind.model_validate(raw)
    raise NotImplementedError
