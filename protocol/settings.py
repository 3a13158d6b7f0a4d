"""What a part's section of the configuration file is: a frozen pydantic model beside whatever it configures.

`cluster/config` composes the sections, reads them from YAML, and tells what is wrong as a ConfigError with the
setting's path. Built directly, as by tests, a section raises pydantic's ValidationError, which is a ValueError.

A validator that finds fields contradicting each other raises ValueError, and begins its message with the name of the
field to change: `max_batch: 8 must be ...`.
"""

from typing import Annotated, Any, TypeVar

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict, model_validator

S = TypeVar("S", bound="Section")

Count = Annotated[int, Ge(1)]
Interval = Annotated[float, Ge(0.001)]
"""Seconds that are waited for again and again."""


class Section(BaseModel):
    """Values have the very types that are declared ('16' is no number), and a field's docstring describes it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _of_nothing(cls, raw: Any) -> Any:
        """A section with all of its lines commented out has the defaults."""
        return {} if raw is None else raw

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
