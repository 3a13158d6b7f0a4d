"""What a model writes, taken apart while it is written: what it thinks, what it says, and the tools that it calls.

`transformers` finds the regions of a text (its `ResponseParser`, driven by a `response_template`); what becomes of a
region is decided here. Positions are those of the whole text, so that nothing is lost: what can't be read as a call is
told as content, word by word. A response that is not streamed goes the same way, so both say the same.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import TYPE_CHECKING, Any

from twostroke.protocol.errors import ConfigError
from twostroke.router.text.written_calls import CallText, Step, WrittenCalls, call_text

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

CALLS = "tool_calls"
MARKS = "marks"  # a field of our own files: what stands around calls, and says nothing
HEADERS = "headers"  # likewise: what stands before content, in formats where content without it is a mistake
ENDS = "ends"  # likewise: what stands between all else
MAX_CHOICES = 16  # of an argument's type, for it to be cast where they are referred to
REASONING = frozenset(("reasoning_content", "reasoning", "thinking"))


@dataclass(frozen=True)
class CallDelta:
    """What is added to a tool call."""

    index: int  # of the call in the response
    name: str = ""  # in the first delta of a call
    arguments: str = ""  # JSON text; the deltas of a call put together are its arguments


@dataclass
class Parsed:
    """What some text adds to a response."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ResponseLanguage:
    """A `response_template`, compiled. The first one imports transformers (without torch): a second or two."""

    def __init__(self, template: Mapping[str, Any], *, origin: str):
        """Raises ConfigError naming `origin`."""
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            self._spec = load_response_template(dict(template))
        except (ValueError, TypeError, KeyError, AttributeError, re.error) as error:
            raise ConfigError(f"{origin}: response_template is broken: {error}") from error
        self._call_text = call_text(self._spec.fields[CALLS]) if CALLS in self._spec.fields else None
        self._regions = _of_text(self._spec, with_calls=True)
        self._regions_without_calls = _of_text(self._spec, with_calls=False)

    @property
    def has_calls(self) -> bool:
        """Whether it tells how tools are called."""
        return CALLS in self._spec.fields

    @property
    def has_reasoning(self) -> bool:
        """Whether it tells what is thought."""
        return not REASONING.isdisjoint(self._spec.fields)

    def opened_by(self, prompt: str) -> str:
        """The end of a prompt that belongs to the response already, because the template writes it."""
        end = max((match.end() for match in self._spec.start_anchor_re.finditer(prompt)), default=len(prompt))
        return prompt[end:]

    def parser(self, prompt: str, tools: Mapping[str, Any] | None) -> "ResponseParser":
        """For one response to `prompt`. `tools` are JSON schemas of arguments by name; None: nothing is a call."""
        regions = self._regions_without_calls if tools is None else self._regions
        return ResponseParser(regions, self._spec, self._call_text, self.opened_by(prompt), tools or {})


def _of_text(spec: "ResponseTemplate", *, with_calls: bool) -> "ResponseTemplate":
    """The template with regions of plain text: what they mean is found out here, where an error can be borne."""
    plain = {
        name: replace(one, content="text", content_args={}, transform=None, repeats=True, join=None, optional=True)
        for name, one in spec.fields.items()
        if with_calls or name not in (CALLS, MARKS)
    }
    return replace(spec, fields=plain, defaults={})


class ResponseParser:
    """Takes one response apart, as it comes."""

    num_unread = 0
    """Regions that look like calls and can't be read as such."""

    def __init__(
        self,
        regions: "ResponseTemplate",
        spec: "ResponseTemplate",
        calls_as: CallText | None,
        opening: str,
        tools: Mapping[str, Any],
    ):
        from transformers.utils.chat_parsing import ResponseParser as RegionParser

        self._spec = spec
        self._calls_as = calls_as
        self._tools = tools
        self._regions = RegionParser(regions, prefix=opening)
        self._text = opening
        self._begin = len(opening)  # what is before was in the prompt
        self._at = 0
        self._controls: list[tuple[int, int]] = []  # where control tokens stand
        self._region = ""  # the field that is being written; empty: none, or content
        self._region_begin = 0  # with its mark
        self._calls: WrittenCalls | None = None  # of the region; None: it is told as content
        self._num_calls = 0
        self._content = _Trimmed()
        self._reasoning = _Trimmed()
        self._is_bare = True  # content alone so far
        self._ends_with_content = True
        self._lacks_header = HEADERS in spec.fields
        self._follow(self._regions.initial_events, Parsed())

    @property
    def is_reasoning(self) -> bool:
        """Whether the model is thinking, as far as is known."""
        return self._region in REASONING

    def add(self, text: str, *, is_control: bool = False) -> Parsed:
        """What `text` adds. Control tokens are read as marks, and never told."""
        if is_control:
            self._controls.append((len(self._text), len(self._text) + len(text)))
        self._text += text
        parsed = Parsed()
        self._follow(self._regions.feed(text), parsed)
        return parsed

    def finish(self) -> Parsed:
        """What was held back, at the end."""
        parsed = Parsed()
        self._follow(self._regions.finalize()[1], parsed)
        if self._ends_with_content:
            parsed.content += self._content.held
        if self._is_silent:  # the template has no place for what was written
            parsed.content = self._shown(self._begin, len(self._text))
            self.num_unread += bool(parsed.content.strip())
        return parsed

    @property
    def _is_silent(self) -> bool:
        has_told = self._content.has_told or self._reasoning.has_told or self._num_calls
        return self._spec.implicit is None and not has_told

    def _follow(self, events: list[dict[str, Any]], parsed: Parsed) -> None:
        """The events of regions, which tell neither where they are nor their marks: both are looked up."""
        for event in events:
            name = event["field"]
            if event["type"] == "region_open":
                self._open(name, parsed)
            elif event["type"] == "region_chunk":
                begin = self._text.index(event["text"], self._at)
                self._at = begin + len(event["text"])
                self._tell(name, begin, self._at, parsed)
            else:
                self._close(name, parsed)

    def _open(self, name: str, parsed: Parsed) -> None:
        mark = self._spec.fields[name].open_re
        if mark is None:
            return
        found = mark.search(self._text, self._at)
        self._region, self._region_begin, self._at = name, found.start(), found.end()
        self._is_bare = self._ends_with_content = False
        self._lacks_header = HEADERS in self._spec.fields and name != HEADERS
        if name == CALLS and self._calls_as is not None:
            self._calls = WrittenCalls(self._calls_as, found.groupdict(), self._tools)
            self._called(self._calls.begin(), parsed)

    def _tell(self, name: str, begin: int, end: int, parsed: Parsed) -> None:
        if name in REASONING:
            parsed.reasoning += self._reasoning.add(self._shown(begin, end), trims_begin=True)
        elif self._calls is not None:
            self._called(self._calls.add(self._shown(begin, end)), parsed)
        elif name not in (MARKS, HEADERS, ENDS) and not (name == CALLS and self._calls_as is None):
            self.num_unread += self._lacks_header
            self._lacks_header = False
            self._say(begin, end, parsed)

    def _close(self, name: str, parsed: Parsed) -> None:
        of_field = self._spec.fields[name]
        found = None if of_field.close_re is None else of_field.close_re.match(self._text, self._at)
        begin, self._at = self._at, self._at if found is None else found.end()
        if self._calls is not None:
            self._called(self._calls.end(), parsed)
            self._calls = None
        elif name == CALLS and self._calls_as is None:
            self._read(parsed)
        elif name == CALLS:
            self._say(begin, self._at, parsed)  # the mark at the end of what is no call
        self._region = ""

    def _called(self, steps: list[Step], parsed: Parsed) -> None:
        """Tell what a region of calls has come to say; where it turns out to be none, all of it is content."""
        for step in steps:
            if step.is_content:
                parsed.content += self._content.add(step.text, trims_begin=True)
                self.num_unread += 1
                continue
            self._num_calls += step.is_name
            self._call(CallDelta(self._num_calls - 1, **{"name" if step.is_name else "arguments": step.text}), parsed)
        if self._calls is not None and self._calls.is_none:
            self._calls = None
            self._give_up(parsed)

    def _read(self, parsed: Parsed) -> None:
        """Read a region that has ended, by the template's own means, which cast arguments to their types."""
        from transformers.utils.chat_parsing import parse_response

        tools = [{"name": name, "parameters": with_types(schema)} for name, schema in self._tools.items()]
        try:
            text = self._text[self._region_begin : self._at]
            read = parse_response(text, self._spec, prefix="", tools=tools).get(CALLS, [])
            called = [one.get("function", one) for one in (read if type(read) is list else [read])]
            calls = [(one["name"], _as_json(one.get("arguments"))) for one in called]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # a model may write anything
            calls = []
        if not calls or any(name not in self._tools for name, _ in calls):
            self._give_up(parsed)
            return
        for name, arguments in calls:
            self._call(CallDelta(self._num_calls, name, arguments), parsed)
            self._num_calls += 1

    def _call(self, delta: CallDelta, parsed: Parsed) -> None:
        last = parsed.calls[-1] if parsed.calls else None
        if last is not None and last.index == delta.index:
            parsed.calls[-1] = CallDelta(last.index, last.name, last.arguments + delta.arguments)
        else:
            parsed.calls.append(delta)

    def _give_up(self, parsed: Parsed) -> None:
        """The region so far is content."""
        self.num_unread += 1
        self._say(self._region_begin, self._at, parsed)

    def _say(self, begin: int, end: int, parsed: Parsed) -> None:
        told = self._content.add(self._shown(begin, end), trims_begin=not self._is_bare)
        parsed.content += told
        self._ends_with_content |= bool(told)

    def _shown(self, begin: int, end: int) -> str:
        """The text between two positions, without control tokens and without what was in the prompt."""
        parts, at = [], max(begin, self._begin)
        for control_begin, control_end in self._controls:
            if control_begin >= at and control_begin < end:
                parts.append(self._text[at:control_begin])
                at = control_end
        return "".join(parts) + self._text[at:end]


class _Trimmed:
    """Text without the white space at its end, which may turn out to stand inside."""

    def __init__(self) -> None:
        self.held = ""
        self.has_told = False

    def add(self, text: str, *, trims_begin: bool) -> str:
        """What can be told now; with `trims_begin` white space before the first word is none of the text."""
        text = self.held + text
        if trims_begin and not self.has_told:
            text = text.lstrip()
        told = text.rstrip()
        self.held = text[len(told) :]
        self.has_told |= bool(told)
        return told


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
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
