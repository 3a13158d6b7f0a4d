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
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from twostroke.loadtests.generator.http_stream import Exchange, StreamedAnswer, read_stream
from twostroke.router.slo.classes import SLOClass

FIRST_TOKEN_ID, LAST_TOKEN_ID = 300, 1000  # ordinary tokens in any vocabulary
PATIENCE_S = 300.0
"""A request that takes longer in all has failed."""

Result = TypeVar("Result")
Status = Literal["ok", "refused", "failed"]


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


def whole_answer(came: Exchange, num_tokens: int) -> StreamedAnswer:
    """What came. Raises ValueError where it is no complete answer of so many tokens."""
    answer = read_stream(came)
    fault = fault_of(answer, num_tokens)
    if fault is not None:
        raise ValueError(fault)
    return answer


def fault_of(answer: StreamedAnswer, num_tokens: int) -> str | None:
    """Why it is no complete answer of so many tokens, None where it is one."""
    if answer.error is not None:
        return answer.error
    answered = answer.usage.completion_tokens
    return None if answered == num_tokens else f"{answered} tokens instead of {num_tokens}"


async def send_in_turn(
    url: str, bodies: Iterable[dict[str, Any]], clients: int, limit_s: float = PATIENCE_S
) -> list[tuple[dict[str, Any], Exchange]]:
    """Send all, each client its next request as soon as its last has ended; in the order in which they ended."""
    left = iter(bodies)
    results: list[tuple[dict[str, Any], Exchange]] = []

    async def client() -> None:
        for body in left:
            results.append((body, await stream_completion(url, body, limit_s)))

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return results


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


@dataclass(frozen=True)
class Arrival:
    """One request, `at` so many seconds after the beginning."""

    at: float
    class_name: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of one request. Times in seconds.

    Time counts from the scheduled arrival, so that what a late client or a full server delays is not left out. How late
    requests were sent is told as well: a client that can't keep up measures itself.
    """

    class_name: str
    at: float  # scheduled, after the beginning
    lag_s: float  # sent so much later
    status: Status
    ttft_s: float | None = None  # since it was scheduled
    tpot_s: float | None = None  # None for a single token
    why: str | None = None  # of a failure

    def met(self, classes: Mapping[str, SLOClass]) -> bool:
        """Whether it got both promised times."""
        promised = classes[self.class_name]
        if self.status != "ok" or self.ttft_s is None:
            return False
        in_time = promised.ttft_s is None or self.ttft_s <= promised.ttft_s
        return in_time and (promised.tpot_s is None or self.tpot_s is None or self.tpot_s <= promised.tpot_s)


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
        found: list[Arrival] = []
        at = draw.expovariate(rate)
        while at < seconds:
            name = draw.choices(names, weights)[0]
            found.append(Arrival(at, name, self.body(draw, name)))
            at += draw.expovariate(rate)
        return found

    async def ask_alone(self, url: str, draw: random.Random) -> tuple[float, float]:
        """The TTFT and TPOT of one request, in seconds. Raises ValueError where its answer is not whole."""
        came = await stream_completion(url, self.body(draw))
        times = whole_answer(came, self.max_tokens).token_times
        return times[0] - came.sent_at, (times[-1] - times[0]) / max(1, self.max_tokens - 1)


async def send_arrivals(
    url: str, arrivals: Sequence[Arrival], is_over: Callable[[], bool] = lambda: False
) -> list[Outcome]:
    """Send each at its time, until it is over, and wait for all answers. These are read when all are there."""

    async def send(number: int, scheduled: float) -> tuple[Arrival, float, Exchange]:
        arrival = arrivals[number]
        return arrival, scheduled, await stream_completion(url, arrival.body)

    moments = itertools.takewhile(lambda _: not is_over(), (arrival.at for arrival in arrivals))
    return [outcome_of(*sent) for sent in await send_at_moments(moments, send)]


def outcome_of(arrival: Arrival, scheduled: float, came: Exchange) -> Outcome:
    """Read what came over the wire. An answer that is shorter than it was to be has failed."""
    lag_s = came.sent_at - scheduled
    answer = read_stream(came)
    if answer.http_status == 429:
        return Outcome(arrival.class_name, arrival.at, lag_s, "refused")
    num_tokens = arrival.body["max_tokens"]
    fault = fault_of(answer, num_tokens)
    if fault is not None:
        return Outcome(arrival.class_name, arrival.at, lag_s, "failed", why=fault)
    times = answer.token_times
    tpot_s = (times[-1] - times[0]) / (num_tokens - 1) if num_tokens > 1 else None
    return Outcome(arrival.class_name, arrival.at, lag_s, "ok", times[0] - scheduled, tpot_s)
