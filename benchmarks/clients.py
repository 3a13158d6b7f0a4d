"""Streaming clients of the benches: one request, as many at a time as are wanted, or as many as a schedule has.

They cost next to nothing of the cores that they share with the server: bytes are stamped when they come, and read when
nobody is measured any more.
"""

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from twostroke.loadtests.generator.http_stream import Exchange, read_stream
from twostroke.loadtests.generator.live import met
from twostroke.loadtests.plan import SLO, Poisson
from twostroke.loadtests.run_folder import Record
from twostroke.loadtests.workloads.arrivals import arrival_times
from twostroke.router.slo.classes import SLOClass

FIRST_TOKEN_ID, LAST_TOKEN_ID = 300, 1000  # ordinary tokens in any vocabulary
PATIENCE_S = 300.0
"""A request that takes longer in all has failed."""

Result = TypeVar("Result")


def random_prompt(draw: random.Random, num_tokens: int) -> list[int]:
    """One whose beginning no cache holds."""
    return [draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(num_tokens)]


def completion_body(model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A request for exactly `max_tokens` greedy tokens. `ignore_eos` is no field of OpenAI's API, but of all servers of
    open models."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


async def stream_completion(url: str, body: Mapping[str, Any], limit_s: float = PATIENCE_S) -> Exchange:
    """POST `body` to the server at `url`, without /v1, on a connection of its own, streamed, with usage.

    Never raises for what the server does: the result then says why it is broken.
    """
    parts = urlsplit(url)
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    result = Exchange(time.perf_counter())
    try:
        async with asyncio.timeout(limit_s):
            transport, _ = await loop.create_connection(
                lambda: _Receiver(result, done), parts.hostname or "127.0.0.1", parts.port or 80
            )
            try:
                transport.write(head.encode() + payload)
                await done
            finally:
                transport.close()
    except TimeoutError:
        result.broken = f"no answer within {limit_s:g} s"
    except OSError as error:
        result.broken = f"no connection: {error}"
    return result


class _Receiver(asyncio.Protocol):
    def __init__(self, exchange: Exchange, done: "asyncio.Future[None]"):
        self._exchange = exchange
        self._done = done

    def data_received(self, data: bytes) -> None:
        self._exchange.arrivals.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._exchange.broken = str(error)
        if not self._done.done():
            self._done.set_result(None)


def record_of(came: Exchange, body: Mapping[str, Any], began: float, scheduled_s: float | None = None) -> Record:
    """What came over the wire. Times count from `began`; a request that had no schedule was due when it was sent."""
    answer = read_stream(came)
    sent_s = came.sent_at - began
    return Record(
        session=0,
        turn=0,
        scheduled_s=sent_s if scheduled_s is None else scheduled_s,
        sent_s=sent_s,
        end_s=came.arrivals[-1][0] - began if came.arrivals else sent_s,
        status=answer.status,
        kind=body.get("service_tier", ""),
        http_status=answer.http_status,
        error=answer.error,
        planned_output_tokens=body["max_tokens"],
        input_tokens=answer.usage.prompt_tokens,
        output_tokens=answer.usage.completion_tokens,
        token_s=tuple(at - began for at in answer.token_times),
        stages=answer.usage.choice_stages,
    )


def exact(record: Record) -> Record:
    """An answer of another length than was asked for has failed."""
    if record.status != "ok" or record.output_tokens == record.planned_output_tokens:
        return record
    error = f"{record.output_tokens} tokens instead of {record.planned_output_tokens}"
    return msgspec.structs.replace(record, status="failed", error=error)


def whole(record: Record) -> Record:
    """Raises ValueError where it is no complete answer of the length that was asked for."""
    if (judged := exact(record)).status != "ok":
        raise ValueError(judged.error)
    return record


async def send_in_turn(
    url: str, bodies: Iterable[dict[str, Any]], clients: int, limit_s: float = PATIENCE_S
) -> list[Record]:
    """Send all, each client its next request as soon as its last has ended; in the order in which they ended.

    What came is read when all has come.
    """
    left = iter(bodies)
    began = time.perf_counter()
    ended: list[tuple[Exchange, dict[str, Any]]] = []

    async def client() -> None:
        for body in left:
            ended.append((await stream_completion(url, body, limit_s), body))

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return [record_of(came, body, began) for came, body in ended]


async def send_at_moments(
    moments: Iterable[float], send: Callable[[int, float], Coroutine[Any, Any, Result]]
) -> list[Result]:
    """Call `send`, with a moment's number and its `time.perf_counter`, when it has come; returns when all calls have.

    The moments are seconds after now, in their order. Each is asked for when the one before it has come: whoever tells
    them may stop at any time.
    """
    began = time.perf_counter()
    tasks: list[asyncio.Task[Result]] = []
    async with asyncio.TaskGroup() as group:
        for number, moment in enumerate(moments):
            await asyncio.sleep(max(0.0, began + moment - time.perf_counter()))
            tasks.append(group.create_task(send(number, began + moment)))
    return [task.result() for task in tasks]


def has_met(record: Record, classes: Mapping[str, SLOClass]) -> bool:
    """Whether a request got what its class is promised."""
    promised = classes[record.kind]
    return met(record, SLO(promised.ttft_s, promised.tpot_s))


Arrival = tuple[float, dict[str, Any]]
"""So many seconds after the beginning, a request's body."""


@dataclass(frozen=True)
class Mix:
    """Which requests are sent: all alike, but for their class and their prompt."""

    model: str
    parts: Mapping[str, float]  # of all requests, by class
    prompt_tokens: int
    max_tokens: int

    def body(self, draw: random.Random, class_name: str | None = None) -> dict[str, Any]:
        """A request whose prompt is random, so that no cache holds its beginning."""
        body = completion_body(self.model, random_prompt(draw, self.prompt_tokens), self.max_tokens)
        return body if class_name is None else {**body, "service_tier": class_name}

    def arrivals(self, rate: float, seconds: float, seed: int) -> list[Arrival]:
        """Poisson arrivals, `rate` a second."""
        draw = random.Random(seed)
        names, weights = list(self.parts), list(self.parts.values())
        times = arrival_times(Poisson(rate), seconds, seed)
        return [(at, self.body(draw, draw.choices(names, weights)[0])) for at in times]

    async def ask_alone(self, url: str, draw: random.Random) -> tuple[float, float]:
        """The TTFT and TPOT of one request, in seconds. Raises ValueError where its answer is not whole."""
        body = self.body(draw)
        alone = whole(record_of(await stream_completion(url, body), body, 0.0))
        return alone.ttft_s or 0.0, alone.tpot_s or 0.0


async def send_arrivals(
    url: str, arrivals: Sequence[Arrival], is_over: Callable[[], bool] = lambda: False
) -> list[Record]:
    """Send each at its time, until it is over, and wait for all answers. These are read when all are there.

    Time counts from the scheduled arrival, so that what a late client or a full server delays is not left out.
    """

    async def send(number: int, scheduled: float) -> tuple[Exchange, float]:
        return await stream_completion(url, arrivals[number][1]), scheduled

    moments = itertools.takewhile(lambda _: not is_over(), (at for at, _ in arrivals))
    sent = await send_at_moments(moments, send)
    return [
        exact(record_of(came, body, scheduled - at, at))
        for (came, scheduled), (at, body) in zip(sent, arrivals, strict=False)
    ]
