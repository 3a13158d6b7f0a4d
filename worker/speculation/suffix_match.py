"""Search for earlier occurrences of a text's last tokens, whose continuation is likely to come again. Pure.

A sequence's own tokens are searched by one comparison of an array, 4 us for 8,000 tokens: there is nothing to build,
and nothing to hold but 16 bytes per token, after a hand-over either. Earlier answers are many more tokens, and have a
table.

The longest match is chosen, and the latest of several (Oliaro et al., SuffixDecoding, 2024; prompt look-up, Saxena
2023). While a match goes on to predict the right tokens it stays the longest one, so nothing is searched.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

MIN_MATCH = 3
"""Tokens that must agree before a continuation is worth a guess."""
MAX_MATCH = 24
"""Longer matches are no better."""
END = -1
"""Stands behind a text that nothing continues."""
_BITS = 21  # of a token id: three make the key of a table
_KEY = (1 << 3 * _BITS) - 1


class TokenSource(Protocol):
    """Tokens that a match stands in."""

    def token_at(self, place: int) -> int | None:
        """Return the token at a place; None behind the last."""

    def is_growing(self, place: int) -> bool:
        """Return True where the place is the next one of a text that goes on."""


@dataclass(slots=True)
class Match:
    """An earlier occurrence of a text's last `length` tokens."""

    source: TokenSource
    next_place: int  # of the token behind the occurrence
    length: int

    def predict(self, most: int) -> list[int]:
        """Return the tokens expected next. A match that reaches the end of its own text repeats itself."""
        found: list[int] = []
        for step in range(most):
            token = self.source.token_at(self.next_place + step)
            if token is None:
                break
            found.append(token)
        if found and len(found) < most and self.source.is_growing(self.next_place + len(found)):
            found = [found[step % len(found)] for step in range(most)]
        return found

    def follow(self) -> None:
        """Go on by one token, which was the predicted one."""
        self.next_place += 1
        self.length = min(self.length + 1, MAX_MATCH)


class SuffixTokens:
    """The tokens of one sequence, which grows. Token ids are below 2 ** 21."""

    def __init__(self, token_ids: Sequence[int]):
        self._count = 0
        self._tokens = np.empty(0, np.int64)
        self._keys = np.empty(0, np.int64)  # of each token and the two before it
        self.extend(token_ids)

    def __len__(self) -> int:
        return self._count

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        begin, end = self._count, self._count + len(token_ids)
        if end > len(self._tokens):
            room = end + end // 4 + 64
            self._tokens = np.concatenate((self._tokens[:begin], np.zeros(room - begin, np.int64)))
            self._keys = np.concatenate((self._keys[:begin], np.zeros(room - begin, np.int64)))
        self._tokens[begin:end] = token_ids
        self._count = end
        first = max(begin, MIN_MATCH - 1)
        if first < end:
            wide = self._tokens[first - 2 : end]
            self._keys[first:end] = wide[:-2] << 2 * _BITS | wide[1:-1] << _BITS | wide[2:]
        self._keys[begin : min(end, MIN_MATCH - 1)] = -1

    def token_at(self, place: int) -> int | None:
        """Implement TokenSource."""
        token = int(self._tokens[place]) if place < self._count else END
        return None if token == END else token

    def is_growing(self, place: int) -> bool:
        """Implement TokenSource."""
        return place == self._count

    def last(self, count: int) -> list[int]:
        """Return the last tokens, in order."""
        tail: list[int] = self._tokens[max(0, self._count - count) : self._count].tolist()
        return tail

    def longest_match(self) -> Match | None:
        """Return the longest earlier occurrence of the last tokens, the latest of several."""
        count = self._count
        if count <= MIN_MATCH or (key := self._keys[count - 1]) < 0:
            return None
        ends = np.flatnonzero(self._keys[: count - 1] == key)
        if not len(ends):
            return None
        length = MIN_MATCH
        while length < min(MAX_MATCH, count - 1):
            longer = ends[ends >= length]
            longer = longer[self._tokens[longer - length] == self._tokens[count - 1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return Match(self, int(ends[-1]) + 1, length)


class _Answers:
    """Answers behind each other, and the place behind each three tokens' last occurrence."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def token_at(self, place: int) -> int | None:
        """Implement TokenSource."""
        token = self._tokens[place] if place < len(self._tokens) else END
        return None if token == END else token

    def is_growing(self, place: int) -> bool:
        """Implement TokenSource."""
        return False

    def add(self, token_ids: Sequence[int]) -> None:
        """Append an answer."""
        key, begin = 0, len(self._tokens)
        self._tokens += token_ids
        for offset, token_id in enumerate(token_ids):
            key = (key << _BITS | token_id) & _KEY
            if offset >= MIN_MATCH - 1:
                self._places[key] = begin + offset + 1
        self._tokens.append(END)  # no match goes over into the next answer

    def longest_match(self, tail: Sequence[int]) -> Match | None:
        """Return the last occurrence of the end of `tail`."""
        key = 0
        for token_id in tail[-MIN_MATCH:]:
            key = key << _BITS | token_id
        place = self._places.get(key)
        if place is None or self.token_at(place) is None:
            return None
        length = MIN_MATCH
        while length < min(len(tail), place) and self._tokens[place - 1 - length] == tail[-1 - length]:
            length += 1
        return Match(self, place, length)


class AnswerCorpus:
    """Earlier answers of each tenant, the latest ones. A tenant is told apart by its requests' cache salt.

    Each tenant has a young and an old part; the old one is dropped once the young one is full. Over the bound of all
    tenants, the one that has been idle longest is dropped.
    """

    def __init__(self, most_tokens: int):
        """`most_tokens` bounds all tenants together; one may have half of them."""
        self._most = most_tokens
        self._tenants: OrderedDict[bytes, tuple[_Answers, _Answers]] = OrderedDict()  # young, old
        self.num_tokens = 0

    def add(self, salt: bytes, token_ids: Sequence[int]) -> None:
        """Keep an answer. One that is too short to be found, or larger than a part, is not kept."""
        part = self._most // 4
        if not MIN_MATCH < len(token_ids) < part:
            return
        young, old = self._tenants.pop(salt) if salt in self._tenants else (_Answers(), _Answers())
        if len(young) + len(token_ids) >= part:
            self.num_tokens -= len(old)
            young, old = _Answers(), young
        before = len(young)
        young.add(token_ids)
        self.num_tokens += len(young) - before
        self._tenants[salt] = young, old
        while self.num_tokens > self._most:
            _, idle = self._tenants.popitem(last=False)
            self.num_tokens -= sum(map(len, idle))

    def longest_match(self, salt: bytes, tail: Sequence[int]) -> Match | None:
        """Return the occurrence of the end of `tail` in the tenant's answers, a young one first."""
        if len(tail) < MIN_MATCH or salt not in self._tenants:
            return None
        self._tenants.move_to_end(salt)
        young, old = self._tenants[salt]
        return young.longest_match(tail) or old.longest_match(tail)
