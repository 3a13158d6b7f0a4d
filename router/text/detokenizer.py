"""Tokens to text, a few at a time: never half a character, never the beginning of a stop string."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.router.text.tokenizer import TextTokenizer

_REPLACEMENT = "�"
_LONGEST_REST = 3
"""Most bytes that complete a character that has begun; a token has one at least."""
_MAX_HELD = 8


class ByteDetokenizer:
    """Detokenizer for byte-level vocabularies: an incremental UTF-8 decoder holds back half a character."""

    def __init__(self, tokenizer: TextTokenizer, *, shows_special: bool = False):
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        if self._shows_special and self._tokenizer.is_special(token_id):
            return self._decoder.decode((self._tokenizer.token(token_id) or "").encode())
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return the text that was held back, at the end."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizer for any other vocabulary, for instance sentencepiece with byte fallback.

    A token's text may depend on the one before (a leading space is stripped at the very beginning only), so a window of
    tokens is decoded with and without the new ones, and the difference is their text. While it ends in a byte token or
    in U+FFFD, later tokens may still change it: the last few of them, as U+FFFD can be a token, too, and a client can
    have a model write nothing else.
    """

    def __init__(self, tokenizer: TextTokenizer, *, shows_special: bool = False):
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._ids: list[int] = []
        self._begin = 0  # of the window
        self._told = 0  # tokens before this are out

    def add(self, token_id: int) -> str:
        """The text that `token_id` completes."""
        is_hidden = self._tokenizer.is_special(token_id) and not self._shows_special
        if is_hidden or self._tokenizer.token(token_id) is None:
            return ""
        self._ids.append(token_id)
        if self._is_byte(token_id):
            return ""
        end = len(self._ids)
        text = self._untold(end)
        if text.endswith(_REPLACEMENT):
            if end - self._told <= _MAX_HELD:
                return ""
            end -= _LONGEST_REST
            while self._is_byte(self._ids[end - 1]) or not text.startswith(self._untold(end)):
                end -= 1
            text = self._untold(end)
        self._advance(end)
        return text

    def flush(self) -> str:
        """Return the text that was held back, at the end."""
        text = self._untold(len(self._ids))
        self._advance(len(self._ids))
        return text

    def _untold(self, end: int) -> str:
        """The text of the tokens before `end` that is not out yet."""
        skips = not self._shows_special
        before = self._tokenizer.decode(self._ids[self._begin : self._told], skip_special_tokens=skips)
        return self._tokenizer.decode(self._ids[self._begin : end], skip_special_tokens=skips)[len(before) :]

    def _advance(self, end: int) -> None:
        """All before `end` is out. Let the window begin at the last token that surely is a whole piece of text."""
        begin = self._told
        self._told = end
        while begin < self._told - 1 and self._is_byte(self._ids[begin]):
            begin += 1
        if begin < self._told:
            self._begin = begin

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.token(token_id)
        return token is not None and len(token) == 6 and token.startswith("<0x") and token.endswith(">")


Detokenizer = ByteDetokenizer | WindowDetokenizer


def new_detokenizer(tokenizer: TextTokenizer, *, shows_special: bool = False) -> Detokenizer:
    """The right kind for this vocabulary. `shows_special`: special tokens have a text, too: their own names."""
    kind = ByteDetokenizer if tokenizer.is_byte_level else WindowDetokenizer
    return kind(tokenizer, shows_special=shows_special)


@dataclass
class StopStrings:
    """Lets text through up to the stop string that is whole first, the longest of those that are whole at once.

    Holds back only an end that may begin one. However the text is cut into pieces, the same is let through.
    """

    stops: Sequence[str]
    shows_stop: bool = False  # the one that was found is let through, too
    found: str = ""  # the one that ended the text
    _held: str = field(default="", init=False)

    @property
    def stopped(self) -> bool:
        """Return whether a stop string was found."""
        return bool(self.found)

    def add(self, text: str) -> str:
        """Return the text that may be shown now; nothing after a stop string was found."""
        if self.stopped:
            return ""
        if not self.stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if found:
            end, begin, self.found = min(found)
            self._held = ""
            return text[: end if self.shows_stop else begin]
        keep = max(_overlap(text, stop) for stop in self.stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return the text that was held back, at the end: it began no stop string after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
