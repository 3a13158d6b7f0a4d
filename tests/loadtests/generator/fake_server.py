"""Answers on virtual time, for conversations: what `http_stream.stream` does, without a socket."""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.loadtests.generator.scripted_server import HEAD, end, event, token_event
from tests.loadtests.generator.virtual_crew import VirtualCrew
from twostroke.loadtests.generator.dispatcher import Line
from twostroke.loadtests.generator.http_stream import Exchange
from twostroke.loadtests.run_folder import Record

REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull"


@dataclass
class FakeServer:
    """Each answer takes `takes_s`; the requests whose number, from 0, is in `refuses` are refused at once."""

    crew: VirtualCrew
    takes_s: float = 1.0
    refuses: frozenset[int] = frozenset()
    asked: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)  # when, path, body
    records: list[Record] = field(default_factory=list)

    @property
    def line(self) -> Line:
        return Line(self.post, True, lambda at_s: None, self.records.append)

    def post(self, path: str, body: bytes, exchange: Exchange) -> None:
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


def delta_event(content: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish_reason}]})
