"""Requests that come when they come, however the server fares; and what became of each, by the clock of its schedule.

Time counts from the scheduled arrival, so that what a late client or a full server delays is not left out. How late
requests were sent is told as well: a client that can't keep up measures itself.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from twostroke.cluster.bench.stream_client import fault_of, random_prompt, stream_completion
from twostroke.loadtests.generator.answers import read_stream
from twostroke.loadtests.generator.completions import Exchange, completion_body
from twostroke.router.slo import SLOClass

Result = TypeVar("Result")
Status = Literal["ok", "refused", "failed"]


@dataclass(frozen=True)
class Arrival:
    """One request, `at` so many seconds after the beginning."""

    at: float
    class_name: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of one request. Times in seconds."""

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

    def body(self, draw: random.Random, class_name: str | None) -> dict[str, Any]:
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


async def at_their_moments(
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


async def send_all(url: str, arrivals: Sequence[Arrival], is_over: Callable[[], bool] = lambda: False) -> list[Outcome]:
    """Send each at its time, until it is over, and wait for all answers. These are read when all are there."""

    async def send(number: int, scheduled: float) -> tuple[Arrival, float, Exchange]:
        arrival = arrivals[number]
        return arrival, scheduled, await stream_completion(url, arrival.body)

    moments = itertools.takewhile(lambda _: not is_over(), (arrival.at for arrival in arrivals))
    return [outcome_of(*sent) for sent in await at_their_moments(moments, send)]


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
