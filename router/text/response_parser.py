"""Parses a model's output while it is written into reasoning, content and tool calls.

`regions.py` finds the regions of a text; what becomes of a region is decided here. Nothing is lost: what can't be read
as a call is shown as content, word by word. A response that is not streamed goes the same way, so both say the same.
However long a response is, it takes time by its length: nothing here looks at a text twice.
"""

import copy
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import TYPE_CHECKING, Any

import regex

from twostroke.protocol.errors import ConfigError, is_unicode
from twostroke.router.text.regions import SEARCH_S, Regions, RegionScanner, RegionText
from twostroke.router.text.written_calls import (
    BareCalls,
    CallStep,
    CallText,
    PythonCalls,
    TaggedCalls,
    WrittenCalls,
    call_text,
)

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate, ResponseTemplateField

CALLS = "tool_calls"
MARKS = "marks"
"""Field of bundled formats: the text around calls, which is no content."""
HEADERS = "headers"
"""Field of bundled formats: the text before content, where content without it is a mistake."""
ENDS = "ends"
"""Field of bundled formats: the text between all other parts."""
MAX_REGION_CHARS = 2**20
"""Characters of a call that is read when it has ended; a longer one is content."""

MAX_TEXTS = 1024
"""Most texts of one call in another format: transformers takes the square of their number."""
MAX_CHOICES = 16
"""Most alternatives of the type of an argument, for it to be cast where they are referred to."""
REASONING = frozenset(("reasoning_content", "reasoning", "thinking"))


@dataclass(frozen=True)
class CallDelta:
    """The part that is added to a tool call."""

    index: int  # of the call in the response
    name: str = ""  # in the first delta of a call
    arguments: str = ""  # JSON text; the deltas of a call put together are its arguments


@dataclass
class Parsed:
    """The parts that some text adds to a response."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ResponseLanguage:
    """A model's way to write, compiled: `regions` as our own files say them, or a response template of transformers'.

    The first template imports transformers (without torch): a second or two.
    """

    def __init__(self, template: Mapping[str, Any], *, origin: str):
        """Raises ConfigError naming `origin`."""
        self.calls: CallText | TaggedCalls | BareCalls | PythonCalls | ResponseTemplateField | None
        if "regions" in template:
            self.regions = Regions.of_format(template["regions"])
            said = template["regions"].get(CALLS)
            self.calls = None if said is None else _calls_of_format(**said["calls"])
            self._anchor = regex.compile("|".join(map(regex.escape, template["anchors"])))
            self._anchor_s: float | None = None
        else:
            spec = _response_template(template, origin)
            self.regions = Regions.of_template(spec)
            of_calls = spec.fields.get(CALLS)
            self.calls = None if of_calls is None else call_text(of_calls) or of_calls
            self._anchor, self._anchor_s = spec.start_anchor_re, SEARCH_S
        names = {one.name for one in self.regions.explicit}
        self._has_reasoning = not REASONING.isdisjoint(
            names | ({self.regions.implicit.name} if self.regions.implicit else set())
        )
        self.has_headers = HEADERS in names
        self.without_calls = self.regions.without((CALLS, MARKS))

    def __deepcopy__(self, memo: object) -> "ResponseLanguage":
        return self  # parsers are copied, what they are of is not

    @property
    def has_calls(self) -> bool:
        """Return whether the format has tool calls."""
        return self.calls is not None

    @property
    def has_reasoning(self) -> bool:
        """Return whether the format has reasoning."""
        return self._has_reasoning

    def opened_by(self, prompt: str) -> str:
        """The end of a prompt that belongs to the response already, because the template writes it."""
        end = len(prompt)
        try:
            for match in self._anchor.finditer(prompt, timeout=self._anchor_s):
                end = match.end()
        except TimeoutError:
            return ""
        return prompt[end:]

    def parser(
        self,
        prompt: str,
        tools: Mapping[str, Any] | None,
        *,
        is_parallel: bool = True,
        is_forced: bool = False,
        trigger: str = "",
    ) -> "ResponseParser":
        """A parser of one response to `prompt`. `tools` are JSON schemas of arguments by name; None: nothing is a call.

        Without `is_parallel` the response is over with its first call. One that `is_forced` to be calls has no content.
        `trigger`: the text that begins all calls, where there is one.
        """
        return ResponseParser(
            self, self.opened_by(prompt), tools, is_parallel=is_parallel, is_forced=is_forced, trigger=trigger
        )


def _response_template(template: Mapping[str, Any], origin: str) -> "ResponseTemplate":
    from transformers.utils.chat_parsing.response_templates import load_response_template

    try:
        return load_response_template(dict(template))
    except (ValueError, TypeError, KeyError, AttributeError, re.error) as error:
        raise ConfigError(f"{origin}: response_template is broken: {error}") from error


def _calls_of_format(
    *,
    name: str = "",
    arguments: str = "",
    tags: list[str] | None = None,
    is_on_lines: bool = False,
    text_mark: str = "",
    quote: str = "",
    is_python: bool = False,
) -> CallText | TaggedCalls | BareCalls | PythonCalls:
    if is_python:
        return PythonCalls()
    if tags is not None:
        key_begin, key_end, value_begin, value_end = tags
        return TaggedCalls(name, key_begin, key_end, value_begin, value_end, is_on_lines, text_mark)
    return BareCalls(name, quote) if quote else CallText(name, arguments)


@dataclass
class _PendingText:
    """A part of the text that no event has shown yet."""

    text: str
    is_control: bool = False
    is_opening: bool = False
    at: int = 0  # all before it was shown


@dataclass(frozen=True)
class _Stretch:
    """The text of an event."""

    raw: str
    readable: str  # without control tokens
    shown: str  # without control tokens, and without what was in the prompt


class ResponseParser:
    """Takes one response apart, as it comes."""

    num_unparsed = 0
    """Regions that look like calls and can't be read as such."""

    is_over = False
    """The response has the only call that it may have, and nothing may follow."""

    def __init__(
        self,
        language: ResponseLanguage,
        opening: str,
        tools: Mapping[str, Any] | None,
        *,
        is_parallel: bool = True,
        is_forced: bool = False,
        trigger: str = "",
    ):
        self.opening = opening
        """The end of the prompt that is the response's beginning."""
        self._language = language
        self._tools = tools or {}
        self._is_parallel = is_parallel
        self._is_forced = is_forced
        self._trigger = trigger
        self._has_begun_calls = False  # and nothing else has followed
        self._scanner = RegionScanner(language.regions if tools is not None else language.without_calls)
        self._pieces: deque[_PendingText] = deque()
        self._region = ""  # the region that is being written; empty: none, or content
        self._held: list[_Stretch] = []  # the region so far, which may be a call or not
        self._num_held = 0  # characters
        self._groups: Mapping[str, str | None] = {}  # those of the region's mark
        self._calls: WrittenCalls | None = None  # None: the region is shown as content, or read at its end
        self._is_read_at_end = False
        self._num_calls = 0
        self._out = _Out()
        self._content = _Trimmed()
        self._reasoning = _Trimmed()
        self._all: list[str] | None = [] if language.regions.implicit is None else None
        self._is_bare = True  # content alone so far
        self._ends_with_content = True
        self._lacks_header = language.has_headers
        self._typed: dict[str, Mapping[str, Any]] = {}  # schemas, as arguments are cast by them
        if opening:
            self._follow(_PendingText(opening, is_opening=True))

    def copy(self) -> "ResponseParser":
        """A parser of another response that begins as this one has."""
        return copy.deepcopy(self, {id(self._tools): self._tools})

    @property
    def has_reasoning(self) -> bool:
        """True where the format tells what is thought."""
        return self._language.has_reasoning

    @property
    def is_reasoning(self) -> bool:
        """Return whether the next text is reasoning, as far as is known."""
        return self._region in REASONING

    def add(self, text: str, *, is_control: bool = False) -> Parsed:
        """Return what `text` adds. Control tokens count as marks, and are never shown."""
        if text:
            self._follow(_PendingText(text, is_control=is_control))
        parsed = self._out.taken()
        return replace(parsed, content="") if self._is_forced else parsed

    def finish(self, *, is_cut: bool = False) -> Parsed:
        """Return the text that was held back, at the end. Of an answer that `is_cut` in a call that part is dropped."""
        is_in_call = is_cut and (self._has_begun_calls or self._holds_trigger())
        if not self.is_over:
            self._events(self._scanner.end())
        if self._ends_with_content and not self.is_over:
            self._out.content.append(self._content.held)
        parsed = self._out.taken()
        if self._all is not None and not (self._content.has_told or self._reasoning.has_told or self._num_calls):
            parsed.content = "".join(self._all)  # the format has no place for what was written
            self.num_unparsed += bool(parsed.content.strip())
        return replace(parsed, content="") if self._is_forced or is_in_call else parsed

    def _holds_trigger(self) -> bool:
        """Return whether the text that may yet become a mark begins with what surely is a part of one."""
        held = "".join(piece.text[piece.at :] for piece in self._pieces)
        is_trigger = bool(self._trigger) and held.startswith(self._trigger)
        return is_trigger or any(piece.is_control for piece in self._pieces)

    def _follow(self, piece: _PendingText) -> None:
        if self.is_over:
            return
        self._pieces.append(piece)
        if self._all is not None and not (piece.is_control or piece.is_opening):
            self._all.append(piece.text)
        self._events(self._scanner.add(piece.text, is_control=piece.is_control))

    def _events(self, events: Iterator[RegionText]) -> None:
        for event in events:
            stretch = self._stretch(len(event.text))
            if event.kind == "open":
                self._open(event, stretch)
            elif event.kind == "text":
                self._tell(event.region, stretch)
            else:
                self._close(event.region, stretch)
            self._scanner.is_inside_value = self._calls is not None and self._calls.is_inside_value
            if self.is_over:
                return

    def _stretch(self, length: int) -> _Stretch:
        """The next characters of the text."""
        parts: list[tuple[str, _PendingText]] = []
        while length:
            piece = self._pieces[0]
            text = piece.text[piece.at : piece.at + length]
            piece.at += len(text)
            length -= len(text)
            parts.append((text, piece))
            if piece.at == len(piece.text):
                self._pieces.popleft()
        return _Stretch(
            "".join(text for text, _ in parts),
            "".join(text for text, piece in parts if not piece.is_control),
            "".join(text for text, piece in parts if not (piece.is_control or piece.is_opening)),
        )

    def _open(self, event: RegionText, mark: _Stretch) -> None:
        self._region, self._groups = event.region, event.groups
        self._is_bare = self._ends_with_content = False
        self._lacks_header = self._language.has_headers and event.region != HEADERS
        if event.region != ENDS:
            self._has_begun_calls = event.region in (CALLS, MARKS)
        if event.region != CALLS:
            return
        self._held, self._num_held = [mark], len(mark.raw)
        if isinstance(self._language.calls, CallText):
            self._calls = WrittenCalls(self._language.calls, event.groups, self._tools)
            self._called(self._calls.begin())
        else:
            self._is_read_at_end = True

    def _tell(self, name: str, text: _Stretch) -> None:
        if self._calls is not None:
            self._hold(text)
            self._called(self._calls.add(text.readable))
            if self._calls is not None and self._num_held > MAX_REGION_CHARS and not self._calls.has_called:
                self._calls = None
                self._give_up()
        elif self._is_read_at_end:
            self._hold(text)
            if self._num_held > MAX_REGION_CHARS:
                self._give_up()
        elif name in REASONING:
            self._out.reasoning.append(self._reasoning.add(text.shown, trims_begin=True))
        elif name and name not in (MARKS, HEADERS, ENDS):
            self.num_unparsed += self._lacks_header
            self._lacks_header = False
            self._has_begun_calls = self._has_begun_calls and not text.shown.strip()
            self._say(text)

    def _close(self, name: str, mark: _Stretch) -> None:
        if self._calls is not None:
            self._hold(mark)
            self._called(self._calls.end())
            self._calls = None
            self.is_over = self._num_calls > 0 and not self._is_parallel
        elif self._is_read_at_end:
            self._held.append(mark)
            self._read("".join(one.raw for one in self._held[1:-1]))
        elif name == CALLS:
            self._say(mark)  # the mark at the end of what is no call
        self._held, self._region, self._is_read_at_end = [], "", False

    def _hold(self, text: _Stretch) -> None:
        """Keep the text of a region as long as all of it may turn out to be content."""
        if self._calls is not None and self._calls.has_called:
            self._held = []
            return
        self._held.append(text)
        self._num_held += len(text.raw)

    def _called(self, steps: list[CallStep]) -> None:
        """Tell what a region of calls has come to say; where it turns out to be none, all of it is content."""
        for step in steps:
            if step.is_content:
                self._out.content.append(self._content.add(step.text, trims_begin=True))
                self.num_unparsed += 1
                continue
            if step.is_name and self._num_calls and not self._is_parallel:
                self.is_over = True
                return
            self._num_calls += step.is_name
            self._out.call(self._num_calls - 1, step.text, is_name=step.is_name)
        if self._calls is not None and self._calls.is_none:
            self._calls = None
            self._give_up()

    def _read(self, body: str) -> None:
        """Read a region that has ended, and cast arguments to their types."""
        try:
            calls = self._read_calls(body)
        # A model may write anything.
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, TimeoutError):
            calls = []
        if not calls or any(name not in self._tools for name, _ in calls):
            self._give_up()
            return
        for name, arguments in calls if self._is_parallel else calls[:1]:
            self._out.call(self._num_calls, name, is_name=True)
            self._out.call(self._num_calls, arguments)
            self._num_calls += 1
        self.is_over = not self._is_parallel

    def _read_calls(self, body: str) -> list[tuple[str, str]]:
        """The names of the calls in a region, and their arguments as JSON."""
        how = self._language.calls
        if isinstance(how, PythonCalls):
            return [(name, _as_json(self._cast(name, arguments))) for name, arguments in how.read(body)]
        if isinstance(how, TaggedCalls | BareCalls):
            name = self._groups.get(how.name) or ""
            return [(name, _as_json(self._cast(name, how.read(body))))]
        read = _read_field(how, body, self._groups)
        called = [one.get("function", one) for one in (read if isinstance(read, list) else [read])]
        return [(one["name"], _as_json(self._cast(one["name"], one.get("arguments")))) for one in called]

    def _cast(self, name: str, arguments: Any) -> Any:
        """The arguments of a function, texts as the types that its schema gives them."""
        if not isinstance(arguments, dict) or name not in self._tools:
            return arguments
        if name not in self._typed:
            self._typed[name] = with_types(self._tools[name]).get("properties") or {}
        properties = self._typed[name]
        return {
            key: _cast(value, properties.get(key)) if isinstance(value, str) else value
            for key, value in arguments.items()
        }

    def _give_up(self) -> None:
        """The region so far is content."""
        self.num_unparsed += 1
        self._is_read_at_end = False
        held, self._held = self._held, []
        for text in held:
            self._say(text)

    def _say(self, text: _Stretch) -> None:
        shown = self._content.add(text.shown, trims_begin=not self._is_bare)
        self._out.content.append(shown)
        self._ends_with_content |= bool(shown)


def _read_field(how: Any, body: str, groups: Mapping[str, str | None]) -> Any:
    """Read a region by the template's own means. Raises TimeoutError where these take too long, ValueError and others
    where it can't be read."""
    from transformers.utils.chat_parsing.content_parsers import process_field

    if how.content == "xml-inline":
        for _ in regex.finditer(how.content_args["tag_pattern"], body, flags=regex.DOTALL, timeout=SEARCH_S):
            pass
    if sum(body.count(mark) for pair in how.content_args.get("string_delims", ()) for mark in pair) > MAX_TEXTS:
        raise ValueError("too many texts")
    return process_field(body, how, {name: text for name, text in groups.items() if text is not None})


class _Out:
    """Collects text to be shown next, in pieces: texts that grow piece by piece would be copied each time."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self._calls: list[tuple[int, list[str], list[str]]] = []  # (index, names, arguments)

    def call(self, index: int, text: str, *, is_name: bool = False) -> None:
        """Tell the name of a call, or a piece of its arguments."""
        if not self._calls or self._calls[-1][0] != index:
            self._calls.append((index, [], []))
        _, names, arguments = self._calls[-1]
        (names if is_name else arguments).append(text)

    def taken(self) -> Parsed:
        """All of it, once."""
        calls = [CallDelta(index, "".join(names), "".join(arguments)) for index, names, arguments in self._calls]
        parsed = Parsed("".join(self.content), "".join(self.reasoning), calls)
        self.content, self.reasoning, self._calls = [], [], []
        return parsed


class _Trimmed:
    """Text without the white space at its end, which may turn out to stand inside."""

    def __init__(self) -> None:
        self.has_told = False
        self._held: list[str] = []

    @property
    def held(self) -> str:
        """The white space at the end."""
        return "".join(self._held)

    def add(self, text: str, *, trims_begin: bool) -> str:
        """Return the text that can be shown now; `trims_begin` drops white space before the first word."""
        if not text or text.isspace():
            if text and not (trims_begin and not self.has_told):
                self._held.append(text)
            return ""
        text = self.held + text
        if trims_begin and not self.has_told:
            text = text.lstrip()
        shown = text.rstrip()
        self._held = [text[len(shown) :]] if len(shown) < len(text) else []
        self.has_told = True
        return shown


def with_types(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a function's parameters, where each says its type itself: what casts them follows no `$ref`, and
    infers nothing from `enum` and `const`."""

    def found(part: Any, hops: int = 8, *, is_choice: bool = False) -> Any:
        if not isinstance(part, dict) or not hops:
            return part
        if isinstance(part.get("$ref"), str):
            _, _, path = part["$ref"].partition("#/")
            target: Any = schema
            for name in path.split("/"):
                target = target.get(name) if isinstance(target, Mapping) else None
            return found(target, hops - 1, is_choice=is_choice)
        unions = {name: part[name] for name in ("anyOf", "oneOf") if isinstance(part.get(name), list)}
        if is_choice or any(len(union) > MAX_CHOICES for union in unions.values()):
            return part  # unions of unions could be written to take for ever
        choices = [part["const"]] if "const" in part else part.get("enum")
        if "type" not in part and not unions and isinstance(choices, list):
            return {**part, "type": sorted({_TYPE_OF.get(type(choice), "string") for choice in choices})}
        return part | {name: [found(choice, is_choice=True) for choice in union] for name, union in unions.items()}

    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return schema
    return {**schema, "properties": {name: found(part) for name, part in properties.items()}}


_TYPE_OF = {int: "integer", float: "number", bool: "boolean", NoneType: "null", list: "array", dict: "object"}


def _as_json(arguments: Any) -> str:
    if arguments is None:
        return "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(arguments, allow_nan=False)  # half a surrogate pair stays escaped


def _cast(text: str, schema: Any) -> Any:
    """The value that a text stands for; the text itself where the schema has no type that it is of."""
    for kind in _types_of(schema):
        try:
            return _CASTS[kind](text)
        except (KeyError, ValueError):
            continue
    return text


def _types_of(schema: Any) -> list[str]:
    if not isinstance(schema, dict):
        return []
    said = schema.get("type")
    types = [said] if isinstance(said, str) else [one for one in said or () if isinstance(one, str)]
    for union in ("anyOf", "oneOf"):
        types += [kind for choice in schema.get(union) or () for kind in _types_of(choice)]
    return [*types, "null"] if schema.get("nullable") else types


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)  # 3.0 is an integer of JSON schemas
        if not number.is_integer():
            raise
        return int(number)


def _number(text: str) -> int | float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("no number of JSON")
    return int(number) if number.is_integer() and "." not in text else number


def _word(text: str, meanings: Mapping[str, Any]) -> Any:
    word = text.strip()
    if word not in meanings:
        raise ValueError("another word")
    return meanings[word]


def _value(text: str, kind: type) -> Any:
    value = json.loads(text)
    if not isinstance(value, kind):
        raise ValueError("of another type")
    return value


_CASTS: Mapping[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: _word(text.lower(), {"true": True, "1": True, "false": False, "0": False}),
    "null": lambda text: _word(text, {"null": None, "None": None}),
    "object": lambda text: _value(text, dict),
    "array": lambda text: _value(text, list),
}
"""Texts to values, by the types of JSON schemas. Those that are of another type raise ValueError."""
