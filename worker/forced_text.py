"""Tokens of the text that a request's grammar forces: keys of objects in a fixed order, punctuation, the rest of enums.

The grammar is followed byte by byte on a matcher of its own, which shares nothing with the one that answers are held
to: what is tried out here changes no answer, and takes only so many bytes. A text is looked for once, and is kept while
the answer follows it. Where white space is optional, as between tokens of JSON, the text goes on as this answer has
written it before. The text is split as the tokenizer splits it; a model that splits otherwise costs rows, and the rates
of acceptance learn it.
"""

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from twostroke.protocol.clock import Clock
from twostroke.worker.speculator import AcceptanceRates, OwnAcceptance

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_BYTES = 96
"""Longest text that is looked for at once; each byte takes about 3 us."""
MAX_BETWEEN = 20
"""Most bytes beside white space that may begin a token of JSON. Inside of a string there are more."""
MAX_DRAWN = 2048
"""Most tokens that are taken in at once: a longer answer that goes on after a hand-over has no forced text any more."""
SLOW_S, MOST_SLOW = 0.002, 3
"""A request goes on without where taking in its tokens took so long so often. Usual grammars take 0.1 to 0.2 ms."""
MAX_TAIL = 48
"""Last bytes of the answer that gaps are found in."""
_WHITE = b" \t\r\n"
_WHITE_BITS = sum(1 << byte for byte in _WHITE)
_ALL_BITS = (1 << 256) - 1
_GAP = re.compile(rb'([\[\]{}:,"])([ \t\r\n]*)(?=([^ \t\r\n]))')
_FIRST_GAPS: dict[tuple[bytes, bytes], bytes | int] = {(b":", b""): b" ", (b",", b""): b" "}
_MEMORY = 0.9  # weight of all earlier steps after one more
_NUM_FREE, _NUM_LED, _FIRST_LENGTH = 3.0, 1.0, 5.0  # what is supposed of a request at first

_log = logging.getLogger(__name__)


class ForcedText:
    """Predicts one request's next tokens where its grammar leaves no choice, and learns how often that is right."""

    def __init__(self, matcher: "LLMatcher", tokenizer: "LLTokenizer", clock: Clock):
        """`matcher` is at the grammar's beginning, over single bytes, and this object's; `tokenizer` is the model's."""
        self._matcher: LLMatcher | None = None if matcher.is_error() else matcher
        self._tokenizer = tokenizer
        self._has_begun = False
        self._num_outputs = 0  # tokens of the answer that this knows
        self._text, self._is_cut = b"", False  # what comes next, and whether it goes on
        self._expected: list[int] = []  # the tokens of the text, the last one first
        self._pending = b""  # the end of the answer, which the matcher has not seen
        self._tail = b""  # the end of the answer before that
        self._indent = 0  # of the line that the tail begins in
        # White space by the bytes around it, b"" for any byte. A number: a new line, indented by so much more.
        self._gaps = dict(_FIRST_GAPS)
        self._own = OwnAcceptance()
        self._clock = clock
        self._num_slow = 0  # calls
        self._num_free, self._num_led, self._length = _NUM_FREE, _NUM_LED, _FIRST_LENGTH

    def catch_up(self, token_ids: Sequence[int], num_prompt_tokens: int, rates: AcceptanceRates) -> None:
        """Take in the answer's tokens since the last call. `token_ids` are all, the prompt's first."""
        drawn = token_ids[num_prompt_tokens + self._num_outputs :]
        if self._matcher is None or (self._has_begun and not drawn):
            return
        began_s, was_free = self._clock(), self._has_begun and not self._expected
        self._num_outputs, self._has_begun = self._num_outputs + len(drawn), True
        try:
            self._take(self._matcher, drawn, rates)
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # llguidance may panic, which is no Exception
            _log.exception("a grammar's forced text can't be followed; its request goes on without")
            self._matcher, self._expected = None, []
        self._num_slow += self._clock() - began_s > SLOW_S
        if self._num_slow >= MOST_SLOW:  # a grammar may be made so, and others wait meanwhile
            self._matcher, self._expected = None, []
        if was_free:
            self._num_free = _MEMORY * self._num_free + 1.0
            self._num_led = _MEMORY * self._num_led + bool(self._expected)
            if self._expected:
                self._length += (len(self._expected) - self._length) * (1.0 - _MEMORY)

    def predict(self, most: int, rates: AcceptanceRates) -> list[tuple[int, float]]:
        """Return the next tokens, each with the chance that it is right if those before it are."""
        count = len(self._expected)
        return [
            (token_id, self._own.chance(rates.rate("grammar", _length_of(count - place))))
            for place, token_id in enumerate(self._expected[: -most - 1 : -1])
        ]

    def chances_soon(self) -> list[float]:
        """Return the chances of tokens that will be forced behind the next one, which is not known yet."""
        if self._matcher is None or not self._has_begun:
            return []
        return [self._num_led / self._num_free] * int(self._length)

    def _take(self, matcher: "LLMatcher", drawn: Sequence[int], rates: AcceptanceRates) -> None:
        if len(drawn) > MAX_DRAWN:
            self._matcher = None
            return
        for token_id in drawn:
            if not self._expected:
                break
            length = _length_of(len(self._expected))
            is_right = self._expected.pop() == token_id
            self._own.note(rates.rate("grammar", length), is_right=is_right)
            rates.note("grammar", length, is_right=is_right)
            if not is_right:
                self._expected.clear()
        data = self._tokenizer.decode_bytes(list(drawn))
        self._pending += data
        self._text = self._text[len(data) :] if self._text.startswith(data) else b""
        if not self._text or (self._is_cut and len(self._text) < MAX_BYTES // 2):
            self._follow(matcher)
            self._text = b"" if matcher.is_error() else self._search(matcher)
            matcher.rollback(len(self._text))
            self._is_cut = len(self._text) >= MAX_BYTES
            self._expected.clear()
        if not self._expected and self._text:
            self._expected = self._split(self._text)

    def _follow(self, matcher: "LLMatcher") -> None:
        """Have the matcher take in the answer, and learn what white space stands in it."""
        matcher.consume_tokens(list(self._pending))
        tail, self._pending = self._tail + self._pending, b""
        for found in _GAP.finditer(tail):
            before, white_space, after = found.groups()
            gap: bytes | int = white_space
            if white_space.startswith(b"\n"):
                gap = len(white_space) - 1 - _indent(tail[: found.end(1)], self._indent)
                if before in b"{[" and gap:  # so do the other lines, most likely
                    self._gaps |= {(b",", b""): 0, (b"", b"}"): -gap, (b"", b"]"): -gap}
            self._gaps[before, after] = gap
            if before != b'"':  # which may begin a string
                self._gaps[before, b""] = gap
        end = len(tail) - len(tail[-MAX_TAIL:].lstrip(_WHITE))  # no indentation is cut in two
        self._indent, self._tail = _indent(tail[:end], self._indent), tail[end:]

    def _split(self, text: bytes) -> list[int]:
        """Return the text's tokens, the last one first."""
        token_ids = self._tokenizer.tokenize_bytes(text)
        if self._is_cut:
            token_ids.pop()  # the text goes on, so it may be a part of one
        # Text that spells a special token is drawn as other tokens, which no tokenizer tells.
        end = next((n for n, token_id in enumerate(token_ids) if self._tokenizer.is_special_token(token_id)), None)
        return token_ids[:end][::-1]

    def _search(self, matcher: "LLMatcher") -> bytes:
        """Return what the grammar forces from where `matcher` is, up to MAX_BYTES and a gap. The matcher takes it in.

        A copy of it would take longer the longer the answer is.
        """
        text, last = bytearray(), self._tail[-1:]
        while len(text) < MAX_BYTES and not matcher.is_stopped():
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed, may_end = mask & _ALL_BITS, mask > _ALL_BITS
            others = allowed & ~_WHITE_BITS
            only = others or allowed
            follows = b"" if may_end or only.bit_count() != 1 else bytes((only.bit_length() - 1,))
            if others != allowed and others and last not in _WHITE and others.bit_count() <= MAX_BETWEEN:
                follows = self._gap(last, follows, text) or follows
            if not follows or not matcher.consume_tokens(list(follows)):
                break
            text += follows
            last = follows[-1:]
        return bytes(text)

    def _gap(self, before: bytes, after: bytes, text: bytes | bytearray) -> bytes:
        """Return the white space that this answer is likely to write behind `text`, between two bytes."""
        gaps = self._gaps
        gap = gaps.get((before, after), gaps.get((b"", after), gaps.get((before, b""), b"")))
        if isinstance(gap, bytes):
            return gap
        return b"\n" + b" " * (_indent(self._tail + text, self._indent) + gap)


def _indent(text: bytes, indent: int) -> int:
    """Return by how much the last line of `text` is indented, the first one by `indent`."""
    _, is_new, line = text.rpartition(b"\n")
    return len(line) - len(line.lstrip(_WHITE)) if is_new else indent


def _length_of(num_left: int) -> int:
    """Return what AcceptanceRates calls the length of a match: the last tokens may merge with what follows them."""
    return 2 + num_left
