"""The feed of what goes on, which the page shows: sequences on their way through the workers, and the workers.

Nothing on a token's way calls the feed. A subscriber's loop looks at the stages of running requests ten times a second,
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
from twostroke.protocol.requests import GenerateRequest
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.observe.access_log import HttpExchange
from twostroke.router.observe.stages import SequenceStages

LOOK_S = 0.1
"""Seconds between two looks of a subscriber."""
WORKERS_S = 0.25
"""Workers' numbers are no more frequent than that."""
QUIET_S = 5.0
"""A sign of life where nothing happens, so that proxies leave the connection open."""
MOST_S = 30.0
MOST_SUBSCRIBERS = 16
MOST_OF_ONE_KEY = 4
MOST_SEQUENCES = 256
"""Most requests that a subscriber gets at a time, the oldest; of the others it gets the number."""
MOST_ENDED = 512
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
        self._under_way: dict[HttpExchange, int | None] = {}  # with their numbers, once they generate
        self._ended: deque[Ended] = deque(maxlen=MOST_ENDED)
        self._num_ended = 0  # those that have fallen out of the ring, too
        self._subscribers: Counter[str | None] = Counter()

    def began(self, exchange: HttpExchange) -> None:
        """A request has come. It has no sequences unless it is to generate some, and has been understood."""
        self._under_way[exchange] = None

    def over(self, exchange: HttpExchange) -> None:
        """The request is over."""
        for name, request, stages in self._sequences(exchange):
            fields = _fields(exchange, request, stages) | {"state": "over", "end": _end(exchange, stages)}
            self._ended.append(Ended(exchange.ended, exchange.tenant, name, fields))
            self._num_ended += 1
        del self._under_way[exchange]

    @contextmanager
    def _place(self, tenant: str | None) -> Iterator[None]:
        """Take a place for a subscriber, by the name of its API key. Raises RequestError (429) where all are taken."""
        if self._subscribers.total() >= MOST_SUBSCRIBERS or (
            tenant is not None and self._subscribers[tenant] >= MOST_OF_ONE_KEY
        ):
            raise RequestError("too many listen to the feed", code="rate_limit_exceeded", status=429, retry_after_s=5)
        self._subscribers[tenant] += 1
        try:
            yield
        finally:
            self._subscribers[tenant] -= 1

    async def events(self, tenant: str | None, *, sees_all: bool) -> AsyncGenerator[bytes, None]:
        """Server-sent events; always `aclose` it. A `tenant` sees its own requests alone, unless it `sees_all`.

        They end after MOST_S, and before the router ends, which waits for them: subscribers then connect again.
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
            if now - began >= MOST_S or self._is_over():
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
            (exchange, one)
            for exchange in self._under_way
            if exchange.requests and (sees_all or exchange.tenant == tenant)
            for one in self._sequences(exchange)
        )
        shown = [
            (name, _fields(exchange, request, stages))
            for exchange, (name, request, stages) in islice(mine, MOST_SEQUENCES)
        ]
        return shown, sum(1 for _ in mine)

    def _sequences(self, exchange: HttpExchange) -> Iterator[tuple[str, GenerateRequest, SequenceStages]]:
        """Those of a request, each with its name in the feed."""
        number = self._under_way[exchange]
        if number is None and exchange.requests:
            number = self._under_way[exchange] = next(self._numbers)
        for choice, (request, stages) in enumerate(zip(exchange.requests, exchange.stages, strict=True)):
            yield f"{number}.{choice}", request, stages


def _fields(exchange: HttpExchange, request: GenerateRequest, stages: SequenceStages) -> dict[str, Any]:
    """Return the known facts of a sequence; None: has not happened, or not yet. Moments are those of events' `now`."""
    path = stages.path
    prefill = None if path is None or path.prefill is None else path.prefill
    return {
        "label": exchange.request_id if exchange.has_minted_id else None,
        "class": request.promise.class_name,
        "state": _state(stages),
        "attempt": stages.attempts,
        "prefill_failures": stages.prefill_failures,
        "prefill": None if prefill is None else prefill.peer.worker_id,
        "decode": None if path is None else path.decode.peer.worker_id,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": stages.num_cached_tokens,
        "output_tokens": stages.num_output_tokens,
        "output_steps": stages.num_output_steps,
        "kv_bytes": None
        if prefill is None
        else _kv_bytes(prefill, request.num_prompt_tokens - stages.num_skipped_tokens),
        "preemptions": stages.num_preemptions,
        "moves": [(_ms(one.at), one.source, one.target) for one in stages.moves],
        "arrived": _ms(stages.arrive),
        "begun": _ms(stages.begun),
        "prompt_done": _ms(stages.prompt_done),
        "first_token": _ms(stages.first_token),
        "decoding": _ms(stages.decoding),
        "finished": _ms(stages.finish),
        "prefill_queue_s": _ms(stages.prefill_queue_s),
        "prefill_s": _ms(stages.prefill_s),
        "chunks": [_ms(one) for one in stages.chunk_ends_s],
        "transfer_s": _ms(stages.transfer_s),
        "decode_queue_s": _ms(stages.decode_queue_s),
    }


def _state(stages: SequenceStages) -> str:
    if stages.begun is None:
        return "waiting"
    if stages.finish is not None:
        return "finished"
    return "prompt" if stages.first_token is None else "decoding"


def _end(exchange: HttpExchange, stages: SequenceStages) -> str:
    """Return how it ended: a finish reason, the code of an error, or `left` where its client did."""
    if exchange.code is not None:
        return exchange.code
    return stages.finish_reason or "left"


def _kv_bytes(info: WorkerInfo, num_tokens: int) -> int:
    """Return the bytes of so many tokens' KV as it is stored; an encoding makes it less on the wire."""
    return info.layout.sent_bytes(num_tokens)


def _ms(seconds: float | None) -> float | None:
    """Seconds, to the tenth of a millisecond."""
    return None if seconds is None else round(seconds, 4)


def _event(kind: str, now: float, **fields: Any) -> bytes:
    return b"data: " + _write({"kind": kind, "now": round(now, 4), **fields}) + b"\n\n"
