"""A crew on virtual time: greenlets of their own hub, so that nothing waits and nothing is patched; and its answers."""

import heapq
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from tests.loadtests.generator.scripted_server import HEAD, REFUSAL, delta_event, end, token_event
from twostroke.loadtests.generator.dispatcher import Line
from twostroke.loadtests.generator.http_stream import ClientExchange
from twostroke.loadtests.run_folder import Record


class VirtualCrew:
    """The dispatcher's Crew. Time goes on when all wait; whoever sleeps wakes `late_s` after its time."""

    def __init__(self, late_s: float = 0.0):
        self._time = 0.0
        self._late_s = late_s
        self._hub = getcurrent()
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, greenlet]] = []
        self._members: list[greenlet] = []

    def run(self, work: Callable[[], object], until: float | None = None) -> greenlet:
        """Do `work` from the hub until all is done, or to a moment. Raises what it raises."""
        worker = greenlet(work, parent=self._hub)
        self._wake_at(0.0, worker)
        while self._waiting and (until is None or self._waiting[0][0] <= until):
            self._time, _, next_one = heapq.heappop(self._waiting)
            if not next_one.dead:
                next_one.switch()
        return worker

    def now(self) -> float:
        return self._time

    def sleep(self, seconds: float) -> None:
        self._wake_at(self._time + max(0.0, seconds) + self._late_s, getcurrent())
        self._hub.switch()

    def spawn(self, work: Callable[..., object], *arguments: object) -> None:
        member = greenlet(lambda: work(*arguments), parent=self._hub)
        self._members.append(member)
        self._wake_at(self._time, member)

    def join(self) -> None:
        while self._waiting and not all(member.dead for member in self._members):
            self._wake_at(self._waiting[0][0], getcurrent())
            self._hub.switch()

    def kill(self) -> None:
        for member in self._members:
            if not member.dead:
                member.parent = getcurrent()
                member.throw(GreenletExit)

    def _wake_at(self, time: float, one: greenlet) -> None:
        heapq.heappush(self._waiting, (time, next(self._numbers), one))


@dataclass
class FakeServer:
    """Answers as `http_stream.stream` gets them, without a socket. Each takes `takes_s`; the requests whose number,
    from 0, is in `refuses` are refused at once."""

    crew: VirtualCrew
    takes_s: float = 1.0
    refuses: frozenset[int] = frozenset()
    asked: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)  # when, path, body
    records: list[Record] = field(default_factory=list)

    @property
    def line(self) -> Line:
        return Line(self.post, True, lambda at_s: None, self.records.append)

    def post(self, path: str, body: bytes, exchange: ClientExchange) -> None:
        exchange.sent_at = self.crew.now()
        number = len(self.asked)
        self.asked.append((self.crew.now(), path, json.loads(body)))
        if number in self.refuses:
            exchange.arrivals.append((self.crew.now(), REFUSAL))
            return
        first = token_event("a") if path == "/v1/completions" else delta_event(f"answer {number}")
        exchange.arrivals.append((self.crew.now(), HEAD + first))
        self.crew.sleep(self.takes_s)
        last = token_event(" b", "length") if path == "/v1/completions" else delta_event("!", "length")
        exchange.arrivals.append((self.crew.now(), last + end(7, 2)))
