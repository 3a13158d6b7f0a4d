"""The feed of what goes on, which the page shows: sequences on their way through the workers, and the workers.

Nothing on a token's way calls the feed. A subscriber's loop looks at the state of running requests ten times a second,
and sends what has changed since its last look. Without subscribers it costs nothing; a sequence has ten events a second
at most, however many tokens it gets; a slow subscriber looks less often, and nothing queues up for it. Requests that
ended meanwhile are in a ring; the subscriber is told how many have fallen out of it.

No event has a word of a prompt, an answer or a key: numbers, names of workers, and labels of our own.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.observe.request_log import RequestLog
from twostroke.router.request_state import RequestState

LOOK_S = 0.1
"""Seconds between two looks of a subscriber."""
WORKERS_S = 0.25
"""Workers' numbers are no more frequent than that."""
QUIET_S = 5.0
"""A sign of life where nothing happens, so that proxies leave the connection open."""
MAX_S = 30.0
MAX_SUBSCRIBERS = 16
MAX_OF_ONE_KEY = 4
MAX_SEQUENCES = 256
"""Most requests that a subscriber gets at a time, the oldest; of the others it gets the number."""
MAX_ENDED = 512
"""Sequences that the ring holds."""
RECENT_S = 30.0
"""Seconds for which ended requests are still sent to a new subscriber."""

Event = Mapping[str, Any]
WorkerRows = Callable[[], list[dict[str, Any]]]

_write = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Ended:
    """A sequence that is over."""

    at: float
    tenant: str | None
    name: str
    fields: Event


class Feed:
    """The requests that one router has under way or ended lately. `workers` returns the workers' numbers now."""

    def __init__(self, router: str, workers: WorkerRows, clock: Clock, is_over: Callable[[], bool]):
        """`is_over` returns whether the router is about to end, and its subscribers are to go elsewhere."""
        self._router = router
        self._is_over = is_over
        self._workers = workers
        self._clock = clock
        self._numbers = count(1)
        self._under_way: dict[RequestLog, int | None] = {}  # with their numbers, once they generate
        self._ended: deque[Ended] = deque(maxlen=MAX_ENDED)
        self._num_ended = 0  # those that have fallen out of the ring, too
        self._subscribers: Counter[str | None] = Counter()

    def began(self, log: RequestLog) -> None:
        """A request has come. It has no sequences unless it is to generate some, and has been understood."""
        self._under_way[log] = None

    def over(self, log: RequestLog) -> None:
        """The request is over."""
        for name, state in self._sequences(log):
            fields = _fields(log, state) | {"state": "over", "end": _end(log, state)}
            self._ended.append(Ended(log.ended, log.tenant, name, fields))
            self._num_ended += 1
        del self._under_way[log]

    @contextmanager
    def _place(self, tenant: str | None) -> Iterator[None]:
        """Take a place for a subscriber, by the name of its API key. Raises RequestError (429) where all are taken."""
        if self._subscribers.total() >= MAX_SUBSCRIBERS or (
            tenant is not None and self._subscribers[tenant] >= MAX_OF_ONE_KEY
        ):
            raise RequestError("too many listen to the feed", code="rate_limit_exceeded", status=429, retry_after_s=5)
        self._subscribers[tenant] += 1
        try:
            yield
        finally:
            self._subscribers[tenant] -= 1

    async def events(self, tenant: str | None, *, sees_all: bool) -> AsyncGenerator[bytes, None]:
        """Server-sent events; always `aclose` it. A `tenant` sees its own requests alone, unless it `sees_all`.

        They end after MAX_S, and before the router ends, which waits for them: subscribers then connect again.
        Raises RequestError (429) before the first where there are too many subscribers.
        """
        with self._place(tenant):
            async with aclosing(self._looks(tenant, sees_all=sees_all)) as looks:
                async for one in looks:
                    yield one

    async def _looks(self, tenant: str | None, *, sees_all: bool) -> AsyncGenerator[bytes, None]:
        now = began = self._clock()
        sent: dict[str, Event] = {}
        workers: list[dict[str, Any]] | None = None
        workers_at = spoke_at = now
        seen = self._num_ended - sum(one.at >= now - RECENT_S for one in self._ended)
        yield _event("hello", now, router=self._router, sees="all" if sees_all else "own")
        while True:
            now = self._clock()
            if now - began >= MAX_S or self._is_over():
                return
            events: list[bytes] = []
            missed = self._num_ended - seen - len(self._ended)
            if missed > 0:
                events.append(_event("lagged", now, missed=missed))
                seen += missed
            fresh = islice(self._ended, len(self._ended) - (self._num_ended - seen), None)
            ended = [(one.name, one.fields) for one in fresh if sees_all or one.tenant == tenant]
            seen = self._num_ended
            live, hidden = self._live(tenant, sees_all=sees_all)
            for name, fields in chain(ended, live):
                known = sent.get(name, {})
                news = {key: value for key, value in fields.items() if key not in known or known[key] != value}
                if news:
                    events.append(_event("sequence", now, id=name, **news))
            sent = dict(live)  # what has ended changes no more, and what fell out of the ring is forgotten
            if sees_all and (workers is None or now - workers_at >= WORKERS_S):
                rows = self._workers()
                if rows != workers or now - spoke_at >= QUIET_S:
                    events.append(_event("workers", now, workers=rows, hidden=hidden))
                workers, workers_at = rows, now
            if not events and now - spoke_at >= QUIET_S:
                events.append(_event("quiet", now))
            if events:
                spoke_at = now
                yield b"".join(events)
            await asyncio.sleep(LOOK_S)

    def _live(self, tenant: str | None, *, sees_all: bool) -> tuple[list[tuple[str, dict[str, Any]]], int]:
        """The oldest sequences under way, and how many more there are."""
        mine = (
            (log, one)
            for log in self._under_way
            if log.choices and (sees_all or log.tenant == tenant)
            for one in self._sequences(log)
        )
        shown = [(name, _fields(log, state)) for log, (name, state) in islice(mine, MAX_SEQUENCES)]
        return shown, sum(1 for _ in mine)

    def _sequences(self, log: RequestLog) -> Iterator[tuple[str, RequestState]]:
        """Those of a request, each with its name in the feed."""
        number = self._under_way[log]
        if number is None and log.choices:
            number = self._under_way[log] = next(self._numbers)
        for choice, state in enumerate(log.choices):
            yield f"{number}.{choice}", state


def _fields(log: RequestLog, state: RequestState) -> dict[str, Any]:
    """Return the known facts of a sequence; None: has not happened, or not yet. Moments are those of events' `now`."""
    request, path, last = state.request, state.path, state.last
    prefill = None if path is None or path.prefill is None else path.prefill
    return {
        "label": log.request_id if log.has_minted_id else None,
        "class": request.promise.class_name,
        "state": _phase(state),
        "attempt": len(state.attempts),
        "prefill_failures": state.prefill_failures,
        "prefill": None if prefill is None else prefill.peer.worker_id,
        "decode": None if path is None else path.decode.peer.worker_id,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": state.num_cached_tokens,
        "output_tokens": state.num_output_tokens,
        "output_steps": state.num_output_steps,
        "kv_bytes": None
        if prefill is None or last is None
        else _kv_bytes(prefill, request.num_prompt_tokens - last.num_skipped_tokens),
        "preemptions": state.num_preemptions,
        "moves": [(_ms(one.at), one.source, one.target) for one in state.moves],
        "arrived": _ms(state.arrive),
        "begun": _ms(None if last is None else last.begin),
        "prompt_done": _ms(None if last is None else last.prompt_done),
        "first_token": _ms(state.first_token),
        "decoding": _ms(None if last is None else last.decoding),
        "finished": _ms(state.finish),
        "prefill_queue_s": _ms(state.prefill_queue_s),
        "prefill_s": _ms(state.prefill_s),
        "chunks": [_ms(one) for one in (last.chunk_ends_s if last else ())],
        "transfer_s": _ms(state.transfer_s),
        "decode_queue_s": _ms(state.decode_queue_s),
    }


def _phase(state: RequestState) -> str:
    if not state.attempts:
        return "waiting"
    if state.finish is not None:
        return "finished"
    return "prompt" if state.first_token is None else "decoding"


def _end(log: RequestLog, state: RequestState) -> str:
    """Return how it ended: a finish reason, the code of an error, or `left` where its client did."""
    if log.code is not None:
        return log.code
    return state.finish_reason or "left"


def _kv_bytes(info: WorkerInfo, num_tokens: int) -> int:
    """Return the bytes of so many tokens' KV as it is stored; an encoding makes it less on the wire."""
    return info.layout.sent_bytes(num_tokens)


def _ms(seconds: float | None) -> float | None:
    """Seconds, to the tenth of a millisecond."""
    return None if seconds is None else round(seconds, 4)


def _event(kind: str, now: float, **fields: Any) -> bytes:
    return b"data: " + _write({"kind": kind, "now": round(now, 4), **fields}) + b"\n\n"
