"""Requests that come when they come, however the server fares; and what became of each, by the clock of its schedule.

Time counts from the scheduled arrival, so that what a late client or a full server delays is not left out. How late
requests were sent is told as well: a client that can't keep up measures itself.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cluster.bench.stream_client import StreamResult, stream_completion
from router.slo import SLOClass

FIRST_TOKEN_ID, LAST_TOKEN_ID = 300, 1000  # ordinary tokens in any vocabulary

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
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": [draw.randint(FIRST_TOKEN_ID, LAST_TOKEN_ID) for _ in range(self.prompt_tokens)],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
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


async def send_all(url: str, arrivals: Sequence[Arrival]) -> list[Outcome]:
    """Send each at its time, and wait for all answers."""
    began = time.perf_counter()

    async def send(arrival: Arrival) -> Outcome:
        scheduled = began + arrival.at
        try:
            result = await stream_completion(url, arrival.body)
        except OSError as error:
            result = StreamResult(time.perf_counter(), broken=str(error))
        return outcome_of(arrival, scheduled, result)

    async with asyncio.TaskGroup() as group:
        tasks = []
        for arrival in arrivals:
            await asyncio.sleep(max(0.0, began + arrival.at - time.perf_counter()))
            tasks.append(group.create_task(send(arrival)))
    return [task.result() for task in tasks]


def outcome_of(arrival: Arrival, scheduled: float, result: StreamResult) -> Outcome:
    """Read what came over the wire. An answer that is shorter than it was to be has failed."""
    lag_s = result.sent_at - scheduled
    head = result.arrivals[0][1] if result.arrivals else b""
    if head.startswith(b"HTTP/1.1 429"):
        return Outcome(arrival.class_name, arrival.at, lag_s, "refused")
    try:
        times = result.token_times()
        num_tokens = int(result.usage()["completion_tokens"])
    except (ValueError, StopIteration) as error:
        return Outcome(arrival.class_name, arrival.at, lag_s, "failed", why=str(error)[:200] or "no answer")
    asked = arrival.body.get("max_tokens", num_tokens)
    if num_tokens != asked and arrival.body.get("ignore_eos"):
        return Outcome(arrival.class_name, arrival.at, lag_s, "failed", why=f"{num_tokens} tokens instead of {asked}")
    tpot_s = (times[-1] - times[0]) / (num_tokens - 1) if num_tokens > 1 else None
    return Outcome(arrival.class_name, arrival.at, lag_s, "ok", times[0] - scheduled, tpot_s)
