"""When each request is sent. Open loop: at its own instant, however slow the server is; closed: when a user is free.

Nothing here knows HTTP or gevent: conversations and time are given.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from twostroke.loadtests.generator.conversation import Conversation
from twostroke.loadtests.plan import Closed, Plan, Session
from twostroke.loadtests.records import Record
from twostroke.loadtests.workloads.sessions import sessions

PREPARED_AHEAD = 32  # sessions whose first request lies ready
PREPARING_S = 0.02  # nothing is prepared so shortly before a request is due
UNANSWERED_S = 1.0
"""How long a closed loop's user pauses whose request was refused or failed: asking on at once, as fast as a server that
is not there can refuse, would be a load that nobody asked for, and fill the disk with its records."""


class Crew(Protocol):
    """Time, and those who work in it."""

    def now(self) -> float:
        """Seconds, monotonic."""

    def sleep(self, seconds: float) -> None:
        """Let others run, for about so long."""

    def spawn(self, work: Callable[..., object], *arguments: object) -> None:
        """Have somebody do it, beside the caller."""

    def join(self) -> None:
        """Until all who were spawned are done."""

    def kill(self) -> None:
        """End all who are not, and wait until they are."""


@dataclass(frozen=True)
class Share:
    """Which part of a plan a process sends: every `num_workers`-th session, or user, from its own on."""

    worker: int
    num_workers: int


class Dispatcher:
    """Sends a share of a plan's sessions."""

    def __init__(self, plan: Plan, share: Share, begin: Callable[[Session], Conversation], crew: Crew):
        self._plan = plan
        self._share = share
        self._begin = begin
        self._crew = crew
        self._sessions: Iterator[Session] = islice(sessions(plan), share.worker, None, share.num_workers)
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

    def _send_at_their_instants(self, began: float) -> None:
        while self._crash is None and (self._prepared or self._prepare_one()):
            at_s = self._prepared[0].session.at_s
            self._prepare_others_until(began + at_s)
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
        conversation = self._begin(session)
        conversation.prepare()
        self._prepared.append(conversation)
        return True

    def _users(self, closed: Closed) -> range:
        return range(self._share.worker, closed.users, self._share.num_workers)

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
