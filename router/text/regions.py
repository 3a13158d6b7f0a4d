"""The scanner that finds the regions of an answer in one pass, however the answer is cut into pieces.

A mark is searched for from a position that never goes back. Text that may yet become one is held, MAX_MARK_CHARS at
most: a longer mark is none. Each pattern of our own formats begins with a literal text and repeats nothing that could
be repeated in another way, so each search takes the text's length: a pattern with an optional beginning would have
`regex` look through the rest of the text at each character. Patterns of others may take longer: those that take
SEARCH_S make no mark any more, and what follows them belongs to the region that is open.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import regex

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

MAX_MARK_CHARS = 256
"""Characters of a mark, and of what its pattern looks ahead at."""

SEARCH_S = 0.05
"""Seconds that a search of one pattern of others may take."""

MAX_LOOK_CHARS = 2**14
"""Characters behind a closing mark within a value, in which the value has to end: else the mark counts."""

_KEPT_BEFORE = 64
"""Characters that are kept before the position, for patterns that look behind."""
_CUT_AT = 2048
"""Emitted characters from which on they are cut off; cutting each time would cost more than keeping them."""


@dataclass(frozen=True)
class Mark:
    """Text that opens or closes a region."""

    pattern: Any  # a pattern of the module `regex`
    can_grow: bool = True  # a match at the end of the text may become longer
    is_first: bool = False  # it counts only where nothing but white space stands before it
    search_s: float | None = None  # seconds that a search may take; None: it takes the text's length, whatever it says

    def __deepcopy__(self, memo: object) -> "Mark":
        return self  # a copy of a scanner is of the same marks

    @classmethod
    def of_texts(cls, texts: Sequence[str], *, is_first: bool = False) -> "Mark":
        """The mark that is one of these texts."""
        longest_first = sorted(set(texts), key=len, reverse=True)
        can_grow = any(one != other and other.startswith(one) for one in texts for other in texts)
        return cls(regex.compile("|".join(map(regex.escape, longest_first))), can_grow, is_first)


@dataclass(frozen=True)
class ValueMarks:
    """Texts around the values within a region, in which its closing mark may stand as a part of a value."""

    begin: str
    end: str
    broken_by: tuple[str, ...]  # texts that stand in no value: a value that has one has lost its end


@dataclass(frozen=True)
class Region:
    """A kind of text between marks."""

    name: str
    opens: tuple[Mark, ...] = ()
    closes: tuple[Mark, ...] = ()  # none: it goes on to the end
    is_empty: bool = False  # it ends where it begins
    closes_always: bool = False  # its closing mark is none that a value would have in it
    values: ValueMarks | None = None

    def __deepcopy__(self, memo: object) -> "Region":
        return self


@dataclass(frozen=True)
class Regions:
    """All kinds of regions that an answer may have."""

    explicit: tuple[Region, ...]
    implicit: Region | None  # text outside of all others; None: it is dropped

    @classmethod
    def of_format(cls, said: Mapping[str, Any]) -> "Regions":
        """Read the `regions` of a file in `output_formats`."""
        regions = [
            Region(
                name,
                _marks(one.get("open", ())),
                _marks(one.get("close", ())),
                is_empty=one.get("is_empty", False),
                closes_always=one.get("closes_always", False),
                values=None if "values" not in one else _values(*one["values"]),
            )
            for name, one in said.items()
        ]
        return cls(tuple(one for one in regions if one.opens), next((one for one in regions if not one.opens), None))

    @classmethod
    def of_template(cls, spec: "ResponseTemplate") -> "Regions":
        """Take the regions of a response template in transformers' language."""

        def marks(pattern: Any, texts: list[str] | None, can_extend: bool) -> tuple[Mark, ...]:
            if pattern is None:
                return ()
            return (Mark(pattern, texts is None or can_extend, search_s=SEARCH_S if texts is None else None),)

        regions = [
            Region(
                one.name,
                marks(one.open_re, one.open_literals, one.open_literal_can_extend),
                marks(one.close_re, one.close_literals, one.close_literal_can_extend),
            )
            for one in spec.fields.values()
        ]
        return cls(tuple(one for one in regions if one.opens), next((one for one in regions if not one.opens), None))

    def without(self, names: Sequence[str]) -> "Regions":
        """These regions but for those of some names."""
        return Regions(tuple(one for one in self.explicit if one.name not in names), self.implicit)


def _values(begin: str, end: str, *broken_by: str) -> ValueMarks:
    return ValueMarks(begin, end, broken_by)


def _marks(said: Sequence[Any]) -> tuple[Mark, ...]:
    texts = [one for one in said if isinstance(one, str)]
    marks = [Mark.of_texts(texts)] if texts else []
    for one in said:
        if isinstance(one, str):
            continue
        is_first = one.get("is_first", False)
        if "text" in one:
            marks.append(Mark.of_texts([one["text"]], is_first=is_first))
        else:
            marks.append(Mark(regex.compile(one["pattern"], regex.DOTALL), is_first=is_first))
    return tuple(marks)


@dataclass(frozen=True)
class RegionText:
    """A stretch of the answer; stretches follow one another without gaps."""

    kind: Literal["text", "open", "close"]
    region: str  # empty: text that no region has a place for
    text: str
    groups: Mapping[str, str | None] = field(default_factory=dict)  # those of the mark that opens


class RegionScanner:
    """Takes one answer apart into events."""

    def __init__(self, regions: Regions):
        self.is_inside_value = False
        """True while the open region, as far as its text was emitted, is inside a value, which may contain marks."""
        self.num_searched = 0
        """Characters that patterns were tried on, each as often as it was."""
        self._regions = regions
        self._text = ""  # from a little before the position on
        self._at = 0  # the position, in `_text`; all before it was emitted
        self._from = 0  # no mark begins before it, in `_text`
        self._open: Region | None = regions.implicit
        self._watched: list[tuple[Region, Mark]] = []
        self._next: dict[int, tuple[int, bool]] = {}  # by id of a mark: where it may begin, or how far it does not
        self._slow: set[int] = set()  # ids of marks that took too long
        self._is_blank = True  # nothing but white space so far
        self._controls: list[int] = []  # beginnings of control tokens, in `_text`
        self._last_empty = -1  # the last position where a mark without text opened a region
        self._in_value = False  # the open region is in a value, as far as `_value_at`
        self._value_at = 0
        self._watch()

    def add(self, text: str, *, is_control: bool = False) -> Iterator[RegionText]:
        """The events that `text` brings; all are to be taken before anything else is added."""
        if is_control:
            self._controls.append(len(self._text))
        self._text += text
        yield from self._events(ends=False)
        if self._at > _CUT_AT:
            cut = self._at - _KEPT_BEFORE
            self._text = self._text[cut:]
            self._at -= cut
            self._from -= cut
            self._last_empty -= cut
            self._value_at -= cut
            self._next = {mark: (begin - cut, is_found) for mark, (begin, is_found) in self._next.items()}
            self._controls = [begin - cut for begin in self._controls if begin >= cut]

    def end(self) -> Iterator[RegionText]:
        """The events of what was held, at the end of the answer."""
        self._next.clear()
        yield from self._events(ends=True)
        if self._open is not None and self._open is not self._regions.implicit:
            yield RegionText("close", self._open.name, "")

    def _watch(self) -> None:
        """Look for the marks that count where the position is."""
        implicit = self._regions.implicit
        if self._open is not implicit and self._open is not None:
            self._watched = [(self._open, mark) for mark in self._open.closes]
            return
        opens = [(one, mark) for one in self._regions.explicit for mark in one.opens]
        self._watched = [one for one in opens if self._is_blank or not one[1].is_first]
        self._watched += [(implicit, mark) for mark in implicit.closes] if implicit is not None else []

    def _events(self, *, ends: bool) -> Iterator[RegionText]:
        while True:
            begin = min((self._nearest(mark, ends) for _, mark in self._watched), default=len(self._text))
            yield from self._told(begin)
            if begin == len(self._text):
                return
            if not self._is_blank and any(mark.is_first for _, mark in self._watched):
                self._watch()
                continue
            matches = [
                (region, self._match(mark, begin, ends))
                for region, mark in self._watched
                if self._next[id(mark)] == (begin, True)
            ]
            if any(match is _HELD for _, match in matches):
                return
            found = [(region, match) for region, match in matches if match is not None]
            longest = max(found, key=lambda one: int(one[1].end()), default=None)
            if longest is None:
                self._from = begin + 1
                continue
            text_until = self._text_until(longest[0], begin, longest[1].end(), ends)
            if text_until is None:
                return
            if text_until > begin:
                self._from = text_until
            else:
                yield from self._marked(*longest)

    def _text_until(self, region: Region, begin: int, end: int, ends: bool) -> int | None:
        """Return the end of the text that a mark is part of: `begin` where it counts, None where more text decides."""
        if region is not self._open:
            if begin == end and begin == self._last_empty:
                return begin + 1  # regions would open and close here for ever
            self._last_empty = begin if begin == end else -1
            return begin
        if region.closes_always or any(begin <= one < end for one in self._controls):
            return begin
        if region.values is not None:
            return self._value_until(region.values, begin, ends)
        return begin + 1 if self.is_inside_value else begin

    def _value_until(self, values: ValueMarks, begin: int, ends: bool) -> int | None:
        """Return the end of the value that this position is in, as `_text_until` does."""
        self._follow_values(values, begin)
        if not self._in_value:
            return begin
        window = min(len(self._text), begin + MAX_LOOK_CHARS)
        found = [at for mark in values.broken_by if (at := self._text.find(mark, begin, window)) >= 0]
        end = self._text.find(values.end, begin, min(found, default=window))
        if end >= 0:
            return end + len(values.end)
        return begin if found or ends or window == begin + MAX_LOOK_CHARS else None

    def _follow_values(self, values: ValueMarks, end: int) -> None:
        """Find out whether `end` is in a value."""
        while True:
            mark = values.end if self._in_value else values.begin
            found = self._text.find(mark, self._value_at, end)
            if found < 0:
                self._value_at = max(self._value_at, end - len(mark) + 1)
                return
            self._value_at, self._in_value = found + len(mark), not self._in_value

    def _marked(self, region: Region, match: Any) -> Iterator[RegionText]:
        text = self._text[self._at : match.end()]
        self._at = self._from = match.end()
        self._is_blank = False
        is_close = region is self._open
        self._open = self._regions.implicit if is_close or region.is_empty else region
        self._in_value, self._value_at = False, self._at
        self._watch()
        yield RegionText("close" if is_close else "open", region.name, text, {} if is_close else match.groupdict())
        if region.is_empty:
            yield RegionText("close", region.name, "")

    def _told(self, end: int) -> Iterator[RegionText]:
        """Tell the text before `end`."""
        if end > self._at:
            text = self._text[self._at : end]
            self._at, self._from = end, max(self._from, end)
            self._is_blank = self._is_blank and text.isspace()
            if self._open is not None and self._open.values is not None:
                self._follow_values(self._open.values, end)
            yield RegionText("text", "" if self._open is None else self._open.name, text)

    def _nearest(self, mark: Mark, ends: bool) -> int:
        """Return the next position at which the mark may begin; the text's length where there is none yet."""
        begin, is_found = self._next.get(id(mark), (0, False))
        if id(mark) in self._slow or (begin >= self._from and (is_found or begin == len(self._text))):
            return len(self._text) if id(mark) in self._slow else begin
        try:
            match = mark.pattern.search(self._text, max(begin, self._from), partial=not ends, timeout=mark.search_s)
        except TimeoutError:
            self._slow.add(id(mark))
            match = None
        self.num_searched -= max(begin, self._from)
        begin = len(self._text) if match is None else match.start()
        self.num_searched += begin
        self._next[id(mark)] = (begin, begin < len(self._text))
        return begin

    def _match(self, mark: Mark, begin: int, ends: bool) -> Any:
        """The mark at this position; _HELD where more text decides, None where it is not there."""
        window = min(len(self._text), begin + MAX_MARK_CHARS)
        is_end = ends and window == len(self._text)
        self.num_searched += window - begin
        try:
            match = mark.pattern.match(self._text, begin, window, partial=not is_end, timeout=mark.search_s)
        except TimeoutError:
            return None
        if match is None or is_end:
            return match
        if match.partial or (match.end() == window and (mark.can_grow or match.end() == begin)):
            return _HELD if window < begin + MAX_MARK_CHARS else None
        return match


_HELD = object()
