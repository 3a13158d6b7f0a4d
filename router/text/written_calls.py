"""Tool calls out of the JSON that a model writes, while it writes: arguments are shown as they come.

A call whose name is known is a call, whatever becomes of its arguments: they are handed on as they were written. What
is no JSON (`TaggedCalls`, `BareCalls`, `PythonCalls`) is read when its region has ended. All of it takes the text's
length, once.

Calls may be written as Python: `[rain(city="Oslo", days=2), sun()]`. Values are literals of Python or of JSON.
Templates put texts between quotes without escapes, so a quote ends a text only where a value may end. Everything is
read once, from left to right.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twostroke.protocol.errors import is_unicode

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField


MAX_HELD_CHARS = 2**20
"""Characters of an object that are held until it is known what it calls; beyond them it is no call."""

# Each takes a piece of text once, and never a part of it again.
_GAP = re.compile(r"[ \t\r\n,]*+")
_WHITE = re.compile(r"[ \t\r\n]*+")
_IN_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_SPACE = re.compile(r"\s*+")
_BARE_KEY = re.compile(r"(?<=[{,])(\w++):")
_SCALAR = re.compile(r'[^,}\]\[{"]*+')
_FLAT = re.compile(r'(?:[^"{}\[\]]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_PLACE = re.compile(r"\{(?:content\.)?(\w+)\}")


@dataclass(frozen=True)
class CallText:
    """The format of calls that are written as JSON."""

    name: str  # the key that has the function's name, or the group of the mark that has it
    arguments: str  # the key that has the arguments; empty: the region is nothing else


def call_text(field: "ResponseTemplateField") -> CallText | None:
    """Return the format of calls in this field; None where calls can't be parsed while they are written."""
    if field.content != "json" or set(field.content_args) - {"allow_non_json"}:
        return None
    shape = field.transform
    if isinstance(shape, dict):
        shape = shape.get("function", shape)
    if shape is None or shape == "{content}":
        return CallText("name", "arguments")
    if not isinstance(shape, dict):
        return None
    name, arguments = (_PLACE.fullmatch(str(shape.get(part))) for part in ("name", "arguments"))
    if name is None or arguments is None:
        return None
    return CallText(name[1], "" if arguments[0] == "{content}" else arguments[1])


@dataclass(frozen=True)
class TaggedCalls:
    """A format that writes each argument by itself, between marks."""

    name: str  # the group of the region's mark that has the function's name
    key_begin: str
    key_end: str
    value_begin: str  # empty: the value stands behind the key's mark
    value_end: str
    is_on_lines: bool = False  # the value stands on lines of its own
    text_mark: str = ""  # stands between the key and "false" where a value is JSON, "true" where it is a text

    def read(self, text: str) -> dict[str, Any]:
        """The arguments, as they were written. A mark that lacks its other half ends them."""
        found: dict[str, Any] = {}
        at = 0
        while (begin := text.find(self.key_begin, at)) >= 0:
            begin += len(self.key_begin)
            if (end := text.find(self.key_end, begin)) < 0:
                break
            key, at = text[begin:end].strip(), end + len(self.key_end)
            if self.value_begin:
                begin = _end(_SPACE, text, at)
                if not text.startswith(self.value_begin, begin):
                    continue
                at = begin + len(self.value_begin)
            elif "\n" in key:
                continue
            if (end := text.find(self.value_end, at)) < 0:
                break
            value, at = text[at:end], end + len(self.value_end)
            value = value.removeprefix("\n").removesuffix("\n") if self.is_on_lines else value
            is_json = False
            if self.text_mark:
                key, _, kind = key.partition(self.text_mark)
                is_json = kind == "false"
            found[key] = _plain([value], otherwise=value) if is_json else value
        return found


@dataclass(frozen=True)
class BareCalls:
    """A format that writes arguments as an object whose keys stand bare, and texts between marks of their own."""

    name: str  # the group of the region's mark that has the function's name
    quote: str

    def read(self, text: str) -> Any:
        """The arguments. Raises ValueError or RecursionError where they are none."""
        parts: list[str] = []
        at = 0
        while (begin := text.find(self.quote, at)) >= 0:
            end = text.find(self.quote, begin + len(self.quote))
            if end < 0:
                break
            parts.append(_BARE_KEY.sub(r'"\1":', text[at:begin]))
            parts.append(json.dumps(text[begin + len(self.quote) : end]))
            at = end + len(self.quote)
        parts.append(_BARE_KEY.sub(r'"\1":', text[at:]))
        return json.loads("".join(parts))


@dataclass(frozen=True)
class CallStep:
    """One thing that a region of calls says."""

    text: str
    is_name: bool = False  # of a call that begins; else a piece of the last one's arguments
    is_content: bool = False  # no call: a function that nobody offered


class WrittenCalls:
    """Reads one region: objects, or lists of them. Nothing but nesting, strings and keys is looked at."""

    def __init__(self, how: CallText, marked: Mapping[str, str | None], tools: Collection[str]):
        """`marked`: the groups of the region's mark."""
        self.is_none = False
        """It is no call, and all of it is content."""
        self._how = how
        self._marked = marked
        self._tools = tools
        self._steps: list[CallStep] = []
        self._has_called = False
        self._state = "outside" if how.arguments else "bare"
        self._is_list = False
        self._object: list[str] = []  # as it was written
        self._num_held = 0  # characters of the object
        self._depth = 0  # inside the value
        self._is_string = self._is_escaped = self._has_break = False
        self._key: Any = ""
        self._value: list[str] = []
        self._name: str | None = None
        self._arguments: list[str] = []  # not shown yet
        self._has_arguments = False

    @property
    def has_called(self) -> bool:
        """True when it is surely a call."""
        return self._has_called

    @property
    def is_inside_value(self) -> bool:
        """True while it is inside a text, as far as it was read: no text of JSON has a line break in it."""
        return self._is_string and not self._has_break and not self.is_none and self._state != "over"

    def begin(self) -> list[CallStep]:
        """Return what the mark adds."""
        if not self._how.arguments:
            self._named(self._marked.get(self._how.name) or "")
        return self._taken()

    def add(self, text: str) -> list[CallStep]:
        """Return what `text` adds."""
        at = 0
        if self._state == "bare":
            self._argue(text if self._has_arguments else text.lstrip())
            while at < len(text):
                at = self._in_string(text, at) if self._is_string else self._to_string(text, at)
            return self._taken()
        while at < len(text) and not self.is_none and self._state != "over":
            was_outside = self._state == "outside"
            end = self._read(text, at)
            if not was_outside and self._state != "outside":
                self._hold(text[at:end])
            at = end
        return self._taken()

    def end(self) -> list[CallStep]:
        """Return what is left at the region's end."""
        if not self._has_called:
            self.is_none = True
        elif self._name in self._tools and not self._has_arguments:
            self._argue("{}")
        return self._taken()

    def _taken(self) -> list[CallStep]:
        self._flush()
        steps, self._steps = self._steps, []
        return steps

    def _flush(self) -> None:
        if self._arguments and self._name in self._tools:
            self._steps.append(CallStep("".join(self._arguments)))
            self._arguments = []

    def _named(self, name: Any) -> None:
        if self._name in self._tools:
            self._end_call()  # an object that has two names has lost the bracket between two calls
        self._name = name if isinstance(name, str) else ""
        if self._name in self._tools:
            self._has_called = True
            self._steps.append(CallStep(self._name, is_name=True))
        elif not self._has_called:
            self.is_none = True

    def _argue(self, text: str) -> None:
        if text:
            self._has_arguments = True
            self._arguments.append(text)

    def _break(self) -> None:
        """This is no JSON."""
        self._state = "over"
        self.is_none = not self._has_called

    def _hold(self, text: str) -> None:
        """Keep the object as it is written, in case that it is shown as content."""
        self._object.append(text)
        self._num_held += len(text)
        if self._num_held > MAX_HELD_CHARS and self._name in self._tools:
            self._object, self._num_held = [], 0
        elif self._num_held > MAX_HELD_CHARS:
            self._break()

    def _to_string(self, text: str, at: int) -> int:
        """Go on to the string that begins next."""
        found = text.find('"', at)
        self._is_string, self._has_break = found >= 0, False
        return len(text) if found < 0 else found + 1

    def _in_string(self, text: str, at: int) -> int:
        """Go on to the end of the string, behind its mark."""
        begin = at
        if self._is_escaped:
            self._is_escaped = False
            at += 1
        end = _end(_IN_STRING, text, at)
        self._has_break = self._has_break or text.find("\n", begin, end) >= 0
        if end == len(text):
            return end
        self._is_escaped = text[end] == "\\"  # the last character, whose other half is to come
        self._is_string = self._is_escaped
        return end + 1

    def _read(self, text: str, at: int) -> int:
        """Read what stands at this position, and return where it ends."""
        match self._state:
            case "outside":
                return self._between_objects(text, at)
            case "inside":
                end = _end(_GAP, text, at)
                if end == len(text):
                    return end
                if text[end] == '"':
                    self._state, self._value = "key", ['"']
                    self._is_string, self._has_break = True, False
                elif text[end] == "}":
                    self._end_object(text[at : end + 1])
                else:
                    self._break()
                return end + 1
            case "key":
                end = self._in_string(text, at)
                self._value.append(text[at:end])
                if not self._is_string:
                    self._key, self._state = _plain(self._value), "colon"
                return end
            case "colon":
                end = _end(_WHITE, text, at)
                if end < len(text) and text[end] == ":":
                    self._state, self._value, self._depth = "value", [], 0
                elif end < len(text):
                    self._break()
                return min(end + 1, len(text))
            case _:
                return self._read_value(text, at)

    def _between_objects(self, text: str, at: int) -> int:
        end = _end(_GAP, text, at)
        if end == len(text):
            return end
        if text[end] == "{":
            self._state, self._name, self._has_arguments = "inside", None, False
            self._object, self._num_held = ["{"], 1
        elif text[end] == "[" and not self._is_list:
            self._is_list = True
        elif text[end] == "]" and self._is_list:
            self._is_list = False
        else:
            self._break()
        return end + 1

    def _read_value(self, text: str, at: int) -> int:
        """A value goes on, or begins, at this position."""
        if self._is_string:
            end = self._in_string(text, at)
            self._keep(text[at:end])
            if not self._is_string and not self._depth:
                self._end_value()
            return end
        if self._depth:
            return self._read_nested(text, at)
        end = _end(_SCALAR, text, at)
        written = text[at:end] if self._value else text[at:end].lstrip()
        if written:
            self._value.append(written)  # a number or a word
        if end == len(text):
            return end
        if text[end] in ",}":
            self._end_value()
            return end
        if text[end] == "]" or self._value:
            self._break()
            return end + 1
        self._keep(text[end])
        if text[end] == '"':
            self._is_string, self._has_break = True, False
        else:
            self._depth = 1
        return end + 1

    def _read_nested(self, text: str, at: int) -> int:
        """The inside of an object or a list goes on at this position."""
        end = _end(_FLAT, text, at)
        if end < len(text) and text[end] == '"':  # a string that does not end in this piece
            self._is_string, self._has_break = True, False
        elif end < len(text):
            self._depth += 1 if text[end] in "{[" else -1
        end = min(end + 1, len(text))
        self._keep(text[at:end])
        if not self._depth:
            self._end_value()
        return end

    def _keep(self, text: str) -> None:
        """A piece of the value; arguments that are an object need not wait for their end."""
        if self._key == self._how.arguments and (self._value[:1] or [text[:1]]) == ["{"]:
            self._value = ["{"]
            self._argue(text)
        else:
            self._value.append(text)

    def _end_value(self) -> None:
        self._state = "inside"
        if self._key == self._how.name:
            self._named(_plain(self._value))
        elif self._key == self._how.arguments and not self._has_arguments:
            value = _plain(self._value)  # of a string the text is meant, of null nothing
            is_text = isinstance(value, str) and is_unicode(value)
            self._argue(value if is_text else "{}" if value is None else "".join(self._value))

    def _end_object(self, text: str) -> None:
        self._state = "outside"
        if self._name in self._tools:
            self._end_call()
            self._name = None
        elif self._has_called:
            self._steps.append(CallStep("".join(self._object) + text, is_content=True))
        else:
            self.is_none = True
        self._arguments = []

    def _end_call(self) -> None:
        if not self._has_arguments:
            self._argue("{}")
        self._flush()
        self._has_arguments = False


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of a match at this position; the pattern matches nothing, too."""
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _plain(written: list[str], otherwise: Any = None) -> Any:
    """The value of this JSON; `otherwise` where it is none."""
    try:
        return json.loads("".join(written))
    except (ValueError, RecursionError):
        return otherwise


_PYTHON_WHITE = re.compile(r"\s*+")
_NAME = re.compile(r"\s*+([A-Za-z_][A-Za-z0-9_-]*+)\s*+")
_KEY = re.compile(r"\s*+([^\s=,()\[\]{}'\"]++)\s*+=")
_SINGLE = re.compile(r"'((?:[^'\\]|\\.|'(?!\s*+(?:[,)\]}:]|\Z)))*+)'", re.DOTALL)
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.|"(?!\s*+(?:[,)\]}:]|\Z)))*+)"', re.DOTALL)
_PYTHON_SCALAR = re.compile(r"[^\s,)\]}:]++")
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
        self._take(_PYTHON_WHITE)

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
        word = self._take(_PYTHON_SCALAR)[0]
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
