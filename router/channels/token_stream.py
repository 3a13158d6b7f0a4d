"""The events of one request on their way from a token channel to the pipeline."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from twostroke.protocol.errors import RequestError, TwostrokeError, WorkerFailed, WorkerLost
from twostroke.protocol.requests import SampledToken, TokenEvent

MAX_UNREAD = 16384
"""Tokens, and alternatives to them, that may wait for a client which does not read: a few MB."""


class TokenStream:
    """The events of one request, in the order they came. Read by one consumer; closed by it, always.

    Others may `push` what they learn by another way (the first token of a prefill reply) or `fail` it.
    """

    def __init__(self, max_tokens: int, on_close: Callable[[], None], on_unread: Callable[[], None]):
        """`on_unread` is called where too much waits to be read: the stream takes no more then, and fails."""
        self._on_close = on_close
        self._on_unread = on_unread
        self._unread = 0
        self._events: deque[TokenEvent] = deque()
        self._error: TwostrokeError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # A sound worker sends one token an event at least, and token 0 may come twice; the end may come alone.
        self._events_left = max_tokens + 2
        self.heard = False
        """True once the decode worker has sent anything for this request."""

    def push(self, event: TokenEvent) -> None:
        """Queue `event` behind those before it."""
        self._events.append(event)
        self._wake()

    def fail(self, error: TwostrokeError) -> None:
        """Let the reader have what is queued, then raise `error`. The first failure counts."""
        if self._error is None:
            self._error = error
            self._wake()

    def fail_in(self, delay_s: float, error: TwostrokeError) -> None:
        """Fail later, unless the stream is closed by then."""
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.fail, error)

    def close(self) -> None:
        """Take no more events of this request. May be called more than once."""
        self._on_close()
        if self._timer is not None:
            self._timer.cancel()
        self._events.clear()
        self.fail(WorkerLost("the stream is closed"))

    def receive(self, event: TokenEvent) -> None:
        """Take an event off the channel; a worker that sends more than was asked for has failed."""
        self.heard = True
        self._events_left -= 1
        if self._events_left < 0:
            self.fail(WorkerFailed("the worker sent more tokens than the request asked for"))
            return
        for token in event.tokens:
            self._unread += 1 + len(token.top)
        if self._unread > MAX_UNREAD:
            self._on_close()
            self._on_unread()
            self.fail(RequestError("the client does not read the answer", code="client_too_slow", status=408))
        else:
            self.push(event)

    def take_queued(self) -> list[TokenEvent]:
        """All that has come already, without waiting; a slow reader catches up in one go."""
        events = list(self._events)
        self._events.clear()
        self._unread = 0
        return events

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> TokenEvent:
        """The next event. Raises WorkerLost when the channel drops; never ends by itself."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if len(self._events) == 1:
            self._unread = 0
        return self._events.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def join_fresh(events: Sequence[TokenEvent], sent: Sequence[int]) -> TokenEvent | None:
    """`events` as one that goes on where `sent` (all output so far) ends; None if nothing is new.

    A token may come twice: the first from the prefill worker and from the decode worker. Raises WorkerFailed for a gap
    and for a token that differs from what was sent in its place (what follows would go on from another text), and
    WorkerLost where the worker gave the request up.
    """
    tokens: list[SampledToken] = []
    begin = len(sent)
    num_cached = None
    for event in events:
        num_cached = event.num_cached_tokens if num_cached is None else num_cached
        if event.error is not None:
            raise WorkerLost(f"the worker gave the request up: {event.error}")
        next_index = begin + len(tokens)
        if not 0 <= event.index <= next_index:
            raise WorkerFailed(f"token {next_index} is missing: the next to come was {event.index}")
        if num_known := next_index - event.index:
            for i, token in enumerate(event.tokens[:num_known], event.index):
                if token.token_id != (sent[i] if i < begin else tokens[i - begin].token_id):
                    raise WorkerFailed(f"token {i} came again, and as another one")
        tokens.extend(event.tokens[num_known:])
        if event.finish_reason is not None and event.index + len(event.tokens) == begin + len(tokens):
            return TokenEvent(event.request_id, begin, tuple(tokens), event.finish_reason, None, num_cached)
    return TokenEvent(events[0].request_id, begin, tuple(tokens), None, None, num_cached) if tokens else None
