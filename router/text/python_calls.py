"""Tool calls that a model writes as Python: `[rain(city="Oslo", days=2), sun()]`.

Values are literals of Python or of JSON. Templates put texts between quotes without escapes, so a quote ends a text
only where a value may end. Everything is read once, from left to right.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

_WHITE = re.compile(r"\s*+")
_NAME = re.compile(r"\s*+([A-Za-z_][A-Za-z0-9_-]*+)\s*+")
_KEY = re.compile(r"\s*+([^\s=,()\[\]{}'\"]++)\s*+=")
_SINGLE = re.compile(r"'((?:[^'\\]|\\.|'(?!\s*+(?:[,)\]}:]|\Z)))*+)'", re.DOTALL)
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.|"(?!\s*+(?:[,)\]}:]|\Z)))*+)"', re.DOTALL)
_SCALAR = re.compile(r"[^\s,)\]}:]++")
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)

_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_MEANINGS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_VERBATIM = frozenset("\\'\"/")


@dataclass(frozen=True)
class PythonCalls:
    """The format of calls that are written as Python."""

    def read(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        """Return names and arguments. Raises ValueError or RecursionError where the text is no list of calls."""
        if text.lstrip("[ \n").startswith("{"):
            return _written_as_json(text)
        reader = _PythonReader(text)
        calls = reader.calls()
        reader.skip_white()
        if not reader.is_at_end:
            raise ValueError("text behind the calls")
        return calls


def _written_as_json(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Read calls that a template shows as JSON between the same marks, as llama.cpp's of LFM2 does."""
    value = json.loads(text)
    return [(one["name"], one["arguments"]) for one in (value if isinstance(value, list) else [value])]


class _PythonReader:
    """A position in a text, which only moves on."""

    def __init__(self, text: str):
        self._text = text
        self._at = 0

    @property
    def is_at_end(self) -> bool:
        return self._at == len(self._text)

    def skip_white(self) -> None:
        self._take(_WHITE)

    def calls(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the calls of a list, or one call without brackets."""
        if not self._has("["):
            return [self._call()]
        return self._until("]", self._call)

    def _call(self) -> tuple[str, dict[str, Any]]:
        name = self._take(_NAME)[1]
        self._expect("(")
        return name, dict(self._until(")", self._argument))

    def _argument(self) -> tuple[str, Any]:
        return self._take(_KEY)[1], self._value()

    def _pair(self) -> tuple[str, Any]:
        key = self._value()
        if not isinstance(key, str):
            raise ValueError("a key that is no text")
        self._expect(":")
        return key, self._value()

    def _value(self) -> Any:
        if self._has("["):
            return self._until("]", self._value)
        if self._has("("):
            return self._until(")", self._value)
        if self._has("{"):
            return dict(self._until("}", self._pair))
        quote = self._text[self._at : self._at + 1]
        if quote in ("'", '"'):
            return _ESCAPE.sub(_meaning, self._take(_SINGLE if quote == "'" else _DOUBLE)[1])
        word = self._take(_SCALAR)[0]
        return _WORDS[word] if word in _WORDS else _number(word)

    def _until(self, end: str, item: Any) -> list[Any]:
        """Return the items up to the closing bracket, behind commas, of which the last one may be followed by none."""
        items: list[Any] = []
        while not self._has(end):
            if items:
                self._expect(",")
                if self._has(end):
                    break
            items.append(item())
        return items

    def _has(self, text: str) -> bool:
        """Move behind this text, if it is next after white space."""
        self.skip_white()
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _expect(self, text: str) -> None:
        if not self._has(text):
            raise ValueError(f"no {text} where one must be")

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError("no such value")
        self._at = match.end()
        return match


def _number(word: str) -> int | float:
    value = json.loads(word)
    if not isinstance(value, int | float):
        raise ValueError("no number")
    return value


def _meaning(escape: re.Match[str]) -> str:
    written = escape[1]
    if len(written) > 1:
        return chr(int(written[1:], 16))
    return _MEANINGS.get(written, written if written in _VERBATIM else escape[0])
