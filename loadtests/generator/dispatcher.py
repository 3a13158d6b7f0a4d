"""When each request is sent. Open loop: at its own instant, however slow the server is; closed: when a user is free.

A session is a conversation: its requests are made from what was said before, and each leaves a record. Nothing here
knows sockets or gevent: how a request is posted, and time, are given.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.generator.http_stream import ClientExchange, StreamedAnswer, read_stream
from twostroke.loadtests.plan import Chat, Closed, Plan, Session, SessionTurn
from twostroke.loadtests.run_folder import Record
from twostroke.loadtests.workloads.prompts import text, token_ids
from twostroke.loadtests.workloads.sessions import sessions

Post = Callable[[str, bytes, ClientExchange], None]
"""Sends a body to a path and puts all that comes into the exchange: loadtests/generator/http_stream.py."""


class Crew(Protocol):
    """Time, and those who work in it."""

    def now(self) -> float:
        """Seconds, monotonic."""

    def sleep(self, seconds: float) -> None:
        """Let others run, for about so long."""

    def spawn(self, work: Callable[..., object], *arguments: object) -> None:
        """Have somebody do it, beside the caller."""

    def join(self) -> None:
        """Wait until all spawned greenlets are done."""

    def kill(self) -> None:
        """End all who are not, and wait until they are."""


@dataclass(frozen=True)
class Line:
    """Connection settings of conversations."""

    post: Post
    asks_stages: bool  # the server is ours, and tells its stages
    on_send: Callable[[float], None]  # after the run's beginning
    on_record: Callable[[Record], None]


def check_prompts(plan: Plan) -> None:
    """Raises LoadTestError for a plan whose prompts can't be written."""
    if plan.prompts == "ids" and plan.vocabulary < 1:
        raise LoadTestError("token ids need the size of the vocabulary: give --vocabulary, or --prompts text")


class Conversation:
    """One user's requests, one after another. `prepare`, then `send`, for each turn."""

    def __init__(self, plan: Plan, session: Session, line: Line, crew: Crew):
        self.session = session
        self._plan = plan
        self._line = line
        self._crew = crew
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

        `scheduled_s` counts from `began`, a moment of the crew's clock.
        """
        turn = self.session.turns[self._turn]
        exchange = ClientExchange(self._crew.now())
        self._line.on_send(exchange.sent_at - began)
        path = "/v1/chat/completions" if self._is_chat else "/v1/completions"
        try:
            self._line.post(path, self._body, exchange)
            end_s = self._crew.now() - began
            answer = read_stream(exchange, lambda: self._crew.sleep(0))
        except BaseException:
            answer = read_stream(exchange)
            answer.status, answer.error = "unfinished", None
            self._record(turn, scheduled_s, began, self._crew.now() - began, exchange, answer)
            raise
        record = self._record(turn, scheduled_s, began, end_s, exchange, answer)
        self._messages.append({"role": "assistant", "content": answer.text})
        self._turn += 1
        return record

    def _request(self, turn: SessionTurn) -> dict[str, Any]:
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
        if (tier := plan.service_tier or turn.service_tier) is not None:
            request["service_tier"] = tier
        if self._line.asks_stages:
            request["return_stages"] = True
        request |= turn.fields or {}
        number = self.session.index
        if int((number + 1) * plan.extra_share) > int(number * plan.extra_share):
            request |= plan.extra
        return request

    def _new_messages(self, turn: SessionTurn) -> list[dict[str, str]]:
        *shared, own = turn.prompt
        system = [{"role": "system", "content": text(shared)}] if shared and not self._messages else []
        return [*system, {"role": "user", "content": text([own])}]

    def _record(
        self,
        turn: SessionTurn,
        scheduled_s: float,
        began: float,
        end_s: float,
        exchange: ClientExchange,
        answer: StreamedAnswer,
    ) -> Record:
        record = Record(
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
            stages=answer.usage.stages,
            request_id=answer.request_id,
            is_unreadable=answer.is_unreadable,
        )
        self._line.on_record(record)
        return record


PREPARED_AHEAD = 32  # sessions whose first request lies ready
PREPARING_S = 0.02  # nothing is prepared so shortly before a request is due
UNANSWERED_S = 1.0
"""Seconds that a closed loop's user pauses after a refused or failed request. Otherwise a server that is gone would
be asked thousands of times a second, and the disk would fill with records."""


class Dispatcher:
    """Sends a process's share of a plan: every `num_workers`-th session, or user, from the process's own on."""

    def __init__(self, plan: Plan, worker: int, line: Line, crew: Crew):
        self._plan = plan
        self._worker = worker
        self._line = line
        self._crew = crew
        self._sessions: Iterator[Session] = islice(sessions(plan), worker, None, plan.num_workers)
        self._prepared: deque[Conversation] = deque()
        self._crash: Exception | None = None

    def prepare(self) -> None:
        """Make the first requests, before the run begins."""
        users = len(self._users(self._plan.arrivals)) if isinstance(self._plan.arrivals, Closed) else 0
        while len(self._prepared) < max(PREPARED_AHEAD, users) and self._prepare_one():
            pass

    def run(self, began: float) -> None:
        """Send all, and wait for the answers. `began`, a moment of the crew's clock, may lie ahead.

        Ended from outside, it ends what is under way; those leave their records. Raises what went wrong in a session,
        and sends nothing more then: a record that can't be written is a request that nobody knows of.
        """
        try:
            match self._plan.arrivals:
                case Closed() as closed:
                    for _ in self._users(closed):
                        self._crew.spawn(self._guarded, self._use, began, closed.think_s)
                case _:
                    self._send_at_their_instants(began)
            if self._crash is None:
                self._crew.join()
        finally:
            self._crew.kill()
        if self._crash is not None:
            raise self._crash

    def end(self) -> None:
        """Send nothing more; what is under way goes on."""
        self._sessions = iter(())
        self._prepared.clear()

    def _send_at_their_instants(self, began: float) -> None:
        while self._crash is None and (self._prepared or self._prepare_one()):
            at_s = self._prepared[0].session.at_s
            self._prepare_others_until(began + at_s)
            if self._prepared:  # it has not ended meanwhile
                self._crew.spawn(self._guarded, self._converse, self._prepared.popleft(), at_s, began)

    def _prepare_others_until(self, due: float) -> None:
        while (left := due - self._crew.now()) > 0:
            if left > PREPARING_S and len(self._prepared) < PREPARED_AHEAD and self._prepare_one():
                self._crew.sleep(0)
            else:
                self._crew.sleep(left)

    def _prepare_one(self) -> bool:
        session = next(self._sessions, None)
        if session is None:
            return False
        conversation = Conversation(self._plan, session, self._line, self._crew)
        conversation.prepare()
        self._prepared.append(conversation)
        return True

    def _users(self, closed: Closed) -> range:
        return range(self._worker, closed.users, self._plan.num_workers)

    def _use(self, began: float, think_s: float) -> None:
        """A user of a closed loop, until the run's time is over."""
        free_s = 0.0
        while self._crash is None and free_s < self._plan.seconds and (self._prepared or self._prepare_one()):
            conversation = self._prepared.popleft()
            self._sleep_until(began + free_s)
            # A user without time to think asks as soon as it can: what the generator took to get ready is no wait.
            scheduled_s = max(free_s, self._crew.now() - began) if free_s else 0.0
            last = self._converse(conversation, scheduled_s, began)
            free_s = last.end_s + think_s + (0.0 if last.status == "ok" else UNANSWERED_S)

    def _converse(self, conversation: Conversation, scheduled_s: float, began: float) -> Record:
        """All turns, as far as the server answers and the run's time allows. Returns the last."""
        record = conversation.send(scheduled_s, began)
        for turn in conversation.session.turns[1:]:
            scheduled_s = record.end_s + turn.think_s
            if record.status != "ok" or scheduled_s >= self._plan.seconds:
                break
            conversation.prepare()
            self._sleep_until(began + scheduled_s)
            record = conversation.send(scheduled_s, began)
        return record

    def _sleep_until(self, due: float) -> None:
        while (left := due - self._crew.now()) > 0:
            self._crew.sleep(left)

    def _guarded(self, work: Callable[..., object], *arguments: object) -> None:
        try:
            work(*arguments)
        except Exception as error:
            self._crash = self._crash or error
