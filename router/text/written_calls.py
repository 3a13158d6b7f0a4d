"""Tool calls out of the JSON that a model writes, while it writes: arguments are told as they come.

A call whose name is known is a call, whatever becomes of its arguments: they are handed on as they were written.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

_WHITE = " \t\r\n"
_PLACE = re.compile(r"\{(?:content\.)?(\w+)\}")


@dataclass(frozen=True)
class CallText:
    """How a format writes its calls, where that is JSON."""

    name: str  # the key that has the function's name, or the group of the mark that has it
    arguments: str  # the key that has the arguments; empty: the region is nothing else


def call_text(field: "ResponseTemplateField") -> CallText | None:
    """How this field writes calls; None: in no way that can be followed while it is written."""
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
class Step:
    """One thing that a region of calls says."""

    text: str
    is_name: bool = False  # of a call that begins; else a piece of the last one's arguments
    is_content: bool = False  # no call: a function that nobody offered


class WrittenCalls:
    """Reads one region: an object, or a list of them. Nothing but nesting, strings and keys is looked at."""

    def __init__(self, how: CallText, marked: Mapping[str, str | None], tools: Collection[str]):
        """`marked`: the groups of the region's mark."""
        self.is_none = False
        """It is no call, and all of it is content."""
        self._how = how
        self._marked = marked
        self._tools = tools
        self._steps: list[Step] = []
        self._has_called = False
        self._state = "outside" if how.arguments else "bare"
        self._is_list = False
        self._object: list[str] = []  # as it was written
        self._depth = 0  # inside the value
        self._is_string = self._is_escaped = False
        self._key: Any = ""
        self._value: list[str] = []
        self._name: str | None = None
        self._arguments: list[str] = []  # not told yet
        self._has_arguments = False

    def begin(self) -> list[Step]:
        """What the mark says."""
        if not self._how.arguments:
            self._named(self._marked.get(self._how.name) or "")
        return self._taken()

    def add(self, text: str) -> list[Step]:
        """What `text` says."""
        if self._state == "bare":
            self._argue(text if self._has_arguments else text.lstrip())
            return self._taken()
        for char in text:
            if self.is_none or self._state == "over":
                break
            self._object.append(char)
            self._read(char)
        return self._taken()

    def end(self) -> list[Step]:
        """What is left to say at the region's end."""
        if not self._has_called:
            self.is_none = True
        elif self._state not in ("outside", "over") and not self._has_arguments:
            self._argue("{}")
        return self._taken()

    def _taken(self) -> list[Step]:
        self._flush()
        steps, self._steps = self._steps, []
        return steps

    def _flush(self) -> None:
        if self._arguments and self._name in self._tools:
            self._steps.append(Step("".join(self._arguments)))
            self._arguments = []

    def _named(self, name: Any) -> None:
        if self._name in self._tools:
            self._end_call()  # an object that has two names has lost the bracket between two calls
        self._name = name if isinstance(name, str) else ""
        if self._name in self._tools:
            self._has_called = True
            self._steps.append(Step(self._name, is_name=True))
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

    def _read(self, char: str) -> None:
        """One character of JSON."""
        match self._state:
            case "outside":
                self._between_objects(char)
            case "inside":
                if char == '"':
                    self._state, self._value, self._is_string = "key", [char], True
                elif char == "}":
                    self._end_object()
                elif char not in _WHITE + ",":
                    self._break()
            case "key":
                self._value.append(char)
                if not self._is_inside_string(char):
                    self._key, self._state = _plain(self._value), "colon"
            case "colon":
                if char == ":":
                    self._state, self._value = "value", []
                elif char not in _WHITE:
                    self._break()
            case "value":
                self._read_value(char)

    def _between_objects(self, char: str) -> None:
        if char == "{":
            self._state, self._object, self._name, self._has_arguments = "inside", [char], None, False
        elif char == "[" and not self._is_list:
            self._is_list = True
        elif char == "]" and self._is_list:
            self._state = "over"
        elif char not in _WHITE + ",":
            self._break()

    def _read_value(self, char: str) -> None:
        if self._is_string:
            self._keep(char)
            if not self._is_inside_string(char) and not self._depth:
                self._end_value()
            return
        if not self._depth and (char in ",}" or (char in _WHITE and not self._value)):
            if char not in _WHITE:  # the value was a number or a word
                self._end_value()
                self._read(char)
            return
        self._is_string = char == '"'
        self._depth += (char in "{[") - (char in "}]")
        self._keep(char)
        if not self._depth and char in "}]":
            self._end_value()

    def _keep(self, char: str) -> None:
        """A character of the value; arguments that are an object need not wait for their end."""
        if self._key == self._how.arguments and (self._value[:1] or [char]) == ["{"]:
            self._value = ["{"]
            self._argue(char)
        else:
            self._value.append(char)

    def _is_inside_string(self, char: str) -> bool:
        """Whether the string goes on after `char`."""
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_string = False
        return self._is_string

    def _end_value(self) -> None:
        self._state = "inside"
        if self._key == self._how.name:
            self._named(_plain(self._value))
        elif self._key == self._how.arguments and not self._has_arguments:
            value = _plain(self._value)  # of a string the text is meant, of null nothing
            self._argue(value if isinstance(value, str) else "{}" if value is None else "".join(self._value))

    def _end_object(self) -> None:
        self._state = "outside" if self._is_list else "over"
        if self._name in self._tools:
            self._end_call()
        elif self._has_called:
            self._steps.append(Step("".join(self._object), is_content=True))
        else:
            self.is_none = True
        self._arguments = []

    def _end_call(self) -> None:
        if not self._has_arguments:
            self._argue("{}")
        self._flush()
        self._has_arguments = False


def _plain(written: list[str]) -> Any:
    """The value of this JSON; None where it is none."""
    try:
        return json.loads("".join(written))
    except (ValueError, RecursionError):
        return None
