"""Suspects wait for each other, so that a worker's death names the one that was there, and for their judgement.

For those of this router `suspects.py` tells who may go on; for other routers' the worker does (protocol/turns.py).

A router's turn to have suspects computed at one worker, which other routers may want, too (protocol/turns.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from twostroke.protocol.clock import Clock
from twostroke.protocol.messages import AskTurn, EndTurn
from twostroke.protocol.requests import Peer
from twostroke.protocol.verdicts import Verdict
from twostroke.router.health.suspects import Case, PoisonRequest, Stay, Suspects

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class OtherRouters:
    """What passes between the routers, by way of the workers."""

    take_turn: Callable[[Peer], Awaitable[None]]  # returns when none of them has a suspect computed at the worker
    end_turn: Callable[[Peer], None]
    tell: Callable[[tuple[Verdict, ...]], None]  # who was found guilty


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A suspect that may not be tried on its workers yet."""

    case: Case
    workers: Collection[Peer]
    woken: asyncio.Future[None]


class SuspectTurns:
    """Lets one suspect at a time try a worker. Everybody else passes at once.

    `fate` tells whether a worker that was lost is gone for good: True, False (it lives), or None (not known yet).
    """

    def __init__(
        self,
        suspects: Suspects,
        *,
        clock: Clock,
        verdict_s: float,
        fate: Callable[[Peer], bool | None],
        others: OtherRouters,
    ):
        self._suspects = suspects
        self._clock = clock
        self._verdict_s = verdict_s
        self._fate = fate
        self._others = others
        self._turns: dict[Peer, None] = {}  # where this router has its turn, or has asked for it
        self._waiting: list[_Waiting] = []  # in the order in which they came

    async def take(self, case: Case, workers: Collection[Peer]) -> None:
        """Wait until the case may be tried on `workers`, and hold them for it. Raises PoisonRequest."""
        case.waits = True
        self._end_turns()  # who waits while others wait for it might wait for ever
        try:
            await self._wait(case, workers)
        finally:
            case.waits = False
        self._suspects.check(case)
        is_suspect = self._suspects.is_suspect(case)
        for worker in workers:
            self._suspects.stay(case, worker, Stay.HELD if is_suspect else Stay.AWAITS)
        if is_suspect:
            await self._take_turns(workers)
            self._suspects.check(case)

    async def judge(self, case: Case) -> None:
        """Raises PoisonRequest where the case has taken two workers down. Where they live after all, it is innocent."""
        self._suspects.check(case)
        deadline = self._clock() + self._verdict_s
        while workers := self._suspects.accused_of(case):
            fates = {worker: self._fate(worker) for worker in workers}
            if all(fates.values()):
                self._others.tell(self._suspects.convict(case))
                self.changed()
                raise PoisonRequest
            is_late = self._clock() >= deadline
            is_settled = self._clock() >= self._suspects.paused_until(case)  # one that tells of its end hangs up later
            for worker, is_gone in fates.items():
                if (is_gone is False and is_settled) or (is_gone is None and is_late):
                    self._suspects.forgive(case, worker)
            await asyncio.sleep(_POLL_S)
            self._suspects.check(case)

    async def _wait(self, case: Case, workers: Collection[Peer]) -> None:
        while self._suspects.is_suspect(case):
            await self.judge(case)
            left_s = self._suspects.paused_until(case) - self._clock()
            if left_s > 0:
                await asyncio.sleep(left_s)
            elif self._suspects.may_try(case, workers):
                return
            else:
                waiting = _Waiting(case, workers, asyncio.get_running_loop().create_future())
                self._waiting.append(waiting)
                await waiting.woken

    def changed(self) -> None:
        """Somebody has got on, or has left a worker: look who is next.

        Often called while hundreds wait, so it wakes those alone who may go on now, or needn't wait any more. Whoever
        is woken calls this again in the end.
        """
        self._end_turns()
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        tries = self._suspects.under_way()
        for one in waiting:
            if one.woken.done():
                continue  # its client has left
            is_suspect = self._suspects.is_suspect(one.case)
            if is_suspect and not tries.leaves_room_for(one.case, one.workers):
                self._waiting.append(one)
                continue
            if is_suspect:
                tries.add(one.case, one.workers)
            one.woken.set_result(None)

    async def _take_turns(self, workers: Collection[Peer]) -> None:
        for worker in sorted(workers, key=_place_in_line):
            self._turns[worker] = None
            await self._others.take_turn(worker)

    def _end_turns(self) -> None:
        for worker in [worker for worker in self._turns if not self._suspects.is_tried_at(worker)]:
            del self._turns[worker]
            self._others.end_turn(worker)


def _place_in_line(worker: Peer) -> tuple[str, int]:
    """In which order turns are taken: every router's is the same, so that no two wait for each other."""
    return worker.worker_id, worker.epoch


class WorkerTurn:
    """Of one channel. `send` sends on it."""

    def __init__(self, send: Callable[[AskTurn | EndTurn], None]):
        self._send = send
        self._number = 0
        self._given: asyncio.Future[None] | None = None  # there is one while a turn is wanted or taken

    async def take(self) -> None:
        """Return when it has come, or the connection has ended. Everybody here shares it, until `end`."""
        if self._given is None:
            self._given = asyncio.get_running_loop().create_future()
            self._number += 1
            self._send(AskTurn(self._number))
        await asyncio.shield(self._given)

    def come(self, number: int) -> None:
        """The worker gives a turn; one that was given up meanwhile counts for nothing."""
        if self._given is not None and number == self._number and not self._given.done():
            self._given.set_result(None)

    def end(self) -> None:
        """Nobody here wants it any more. Harmless where nobody did."""
        if self._given is not None:
            self._forget()
            self._send(EndTurn())

    def lose(self) -> None:
        """The connection has ended, and with it all that this router has there: nobody waits any longer."""
        if self._given is not None:
            self._forget()

    def _forget(self) -> None:
        if self._given is not None and not self._given.done():
            self._given.set_result(None)
        self._given = None
