"""Requests that have taken workers down: how processes tell each other of them, and how long they remember.

A request is known by its fingerprint, a hash that its router makes, so neither messages nor what a worker remembers for
later routers reveal a prompt. Nothing here does I/O.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from typing import Annotated

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.requests import GenerateRequest

FINGERPRINT_BYTES = 16
MAX_IN_MESSAGE = 1024
"""Blocked requests in one message, which is 30 KB then."""
LONGEST_S = 86_400.0
"""Longest time for which a message may block a request: a day."""

_SAME_S = 1.0
"""Smallest extension, in seconds, that counts as news: a repeated message was under way for less."""


class BlockedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request to refuse for `left_s` from now on. The rest travels and not the end, since clocks differ."""

    fingerprint: Annotated[bytes, msgspec.Meta(min_length=FINGERPRINT_BYTES, max_length=FINGERPRINT_BYTES)]
    left_s: Annotated[float, msgspec.Meta(gt=0.0, le=LONGEST_S)]


class BlockedRequests:
    """The requests that one process knows to be blocked: at most `most`, each for at most `longest_s`.

    The oldest are dropped first.
    """

    def __init__(self, clock: Clock, *, most: int = MAX_IN_MESSAGE, longest_s: float = LONGEST_S):
        self._clock = clock
        self._most = most
        self._longest_s = longest_s
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def learn(self, requests: Iterable[BlockedRequest]) -> tuple[BlockedRequest, ...]:
        """Add these and return those that are news. Known ones, to the second, are not: no message goes in circles."""
        return tuple(request for request in requests if self._add(request))

    def blocks(self, fingerprint: bytes) -> bool:
        """Return whether the request is to be refused now."""
        until = self._until.get(fingerprint)
        if until is None:
            return False
        if self._clock() < until:
            return True
        del self._until[fingerprint]
        return False

    def latest(self) -> tuple[BlockedRequest, ...]:
        """Return the latest blocked requests, as many as one message takes, with the time that each has left."""
        now = self._clock()
        latest = list(self._until.items())[-MAX_IN_MESSAGE:]
        return tuple(BlockedRequest(one, min(until - now, LONGEST_S)) for one, until in latest if until > now)

    def _add(self, request: BlockedRequest) -> bool:
        now = self._clock()
        until = now + min(request.left_s, self._longest_s)
        known = self._until.get(request.fingerprint, now)
        if until <= now or (known > now and until < known + _SAME_S):
            return False
        self._until[request.fingerprint] = until
        self._until.move_to_end(request.fingerprint)
        while len(self._until) > self._most:
            self._until.popitem(last=False)
        return True


def fingerprint_of(request: GenerateRequest) -> bytes:
    """Hash what makes a request the same as another: all that workers compute by, but neither seed nor length.

    A prompt that is scored or embedded is another request than the same prompt with an answer.
    """
    same = (
        request.token_ids,
        msgspec.structs.replace(request.sampling, seed=0),
        request.stop_token_ids,
        request.cache_salt,
        request.grammar,
        request.scoring,
    )
    return hashlib.sha256(msgspec.msgpack.encode(same)).digest()[:FINGERPRINT_BYTES]
