"""What all traces tell of a request."""

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from twostroke.loadtests.errors import LoadTestError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request, in the trace's own tokens and time."""

    at_s: float  # by the trace's clock; only differences mean something
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # equal numbers: equal blocks of the prompt, from its beginning


@dataclass(frozen=True, slots=True)
class Line:
    """Where a row was read, for errors."""

    path: Path
    number: int  # from 1

    def wrong(self, what: str) -> NoReturn:
        """Raises LoadTestError."""
        raise LoadTestError(f"{self.path}, line {self.number}: {what}; correct or remove the line")

    def count(self, field: str, value: object) -> int:
        """A number of tokens, from JSON or from a CSV cell. Raises LoadTestError for anything else."""
        if isinstance(value, str) and value.isdecimal():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
        self.wrong(f"{field} is {value!r}, not a number of tokens")

    def seconds(self, field: str, value: object) -> float:
        """A time in whatever unit the format has. Raises LoadTestError for what is no number."""
        try:
            return float(value)  # type: ignore[arg-type]  # what float does not take, it says
        except (TypeError, ValueError):
            self.wrong(f"{field} is {value!r}, not a number")
