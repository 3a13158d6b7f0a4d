"""A session as it goes on: its requests, made from what was said before, and a record of each."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.generator.answers import StreamedAnswer, read_stream
from twostroke.loadtests.generator.http_stream import Exchange
from twostroke.loadtests.plan import Chat, Plan, Session, Turn
from twostroke.loadtests.records import Record
from twostroke.loadtests.workloads.prompts import text, token_ids

Post = Callable[[str, bytes, Exchange], None]
"""Sends a body to a path and puts all that comes into the exchange: loadtests/generator/http_stream.py."""


@dataclass(frozen=True)
class Line:
    """What a conversation is held over."""

    post: Post
    asks_stages: bool  # the server is ours, and tells its stages
    now: Callable[[], float] = time.monotonic
    pause: Callable[[], None] = lambda: None  # while a long answer is read, others may run
    on_send: Callable[[float], None] = lambda at_s: None
    on_record: Callable[[Record], None] = lambda record: None


def check_prompts(plan: Plan) -> None:
    """Raises LoadTestError for a plan whose prompts can't be written."""
    if plan.prompts == "ids" and plan.vocabulary < 1:
        raise LoadTestError("token ids need the size of the vocabulary: give --vocabulary, or --prompts text")


class Conversation:
    """One user's requests, one after another. `prepare`, then `send`, for each turn."""

    def __init__(self, plan: Plan, session: Session, line: Line):
        self.session = session
        self._plan = plan
        self._line = line
        self._is_chat = isinstance(plan.workload, Chat) or len(session.turns) > 1
        self._messages: list[dict[str, str]] = []
        self._turn = 0
        self._body = b""

    def prepare(self) -> None:
        """Make the next request's bytes, so that nothing is left to be done when it is due."""
        turn = self.session.turns[self._turn]
        self._body = json.dumps(self._request(turn), separators=(",", ":")).encode()

    def send(self, scheduled_s: float, began: float) -> Record:
        """Send what was prepared and wait for the answer. Also when this is ended from outside there is a record.

        `scheduled_s` counts from `began`, a moment of the line's clock.
        """
        turn = self.session.turns[self._turn]
        exchange = Exchange(self._line.now())
        self._line.on_send(exchange.sent_at - began)
        path = "/v1/chat/completions" if self._is_chat else "/v1/completions"
        try:
            self._line.post(path, self._body, exchange)
            end_s = self._line.now() - began
            answer = read_stream(exchange, self._line.pause)
        except BaseException:
            answer = read_stream(exchange)
            answer.status, answer.error = "unfinished", None
            self._line.on_record(self._record(turn, scheduled_s, began, self._line.now() - began, exchange, answer))
            raise
        record = self._record(turn, scheduled_s, began, end_s, exchange, answer)
        self._line.on_record(record)
        self._messages.append({"role": "assistant", "content": answer.text})
        self._turn += 1
        return record

    def _request(self, turn: Turn) -> dict[str, Any]:
        plan = self._plan
        request: dict[str, Any] = {"model": plan.model}
        if self._is_chat:
            self._messages += self._new_messages(turn)
            request["messages"] = self._messages
        elif plan.prompts == "ids":
            request["prompt"] = token_ids(turn.prompt, plan.vocabulary)
        else:
            request["prompt"] = text(turn.prompt)
        request |= {
            "max_tokens": turn.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if plan.ignore_eos:
            request["ignore_eos"] = True
        if plan.service_tier is not None:
            request["service_tier"] = plan.service_tier
        if self._line.asks_stages:
            request["return_stages"] = True
        return request

    def _new_messages(self, turn: Turn) -> list[dict[str, str]]:
        *shared, own = turn.prompt
        system = [{"role": "system", "content": text(shared)}] if shared and not self._messages else []
        return [*system, {"role": "user", "content": text([own])}]

    def _record(
        self, turn: Turn, scheduled_s: float, began: float, end_s: float, exchange: Exchange, answer: StreamedAnswer
    ) -> Record:
        return Record(
            session=self.session.index,
            turn=self._turn,
            scheduled_s=scheduled_s,
            sent_s=exchange.sent_at - began,
            end_s=end_s,
            status=answer.status,
            kind=turn.kind,
            http_status=answer.http_status,
            error=answer.error,
            planned_input_tokens=sum(piece.tokens for piece in turn.prompt),
            planned_output_tokens=turn.output_tokens,
            input_tokens=answer.usage.prompt_tokens,
            output_tokens=answer.usage.completion_tokens,
            cached_tokens=answer.usage.cached_tokens,
            token_s=tuple(at - began for at in answer.token_times),
            stages=answer.usage.choice_stages,
            request_id=answer.request_id,
        )
