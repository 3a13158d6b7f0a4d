"""Requests that take workers down, and how they are kept from taking down more.

1. A worker's death makes suspects of all requests that it was computing and had given no token of its own.
2. A suspect is tried apart from other suspects, and one request of a fingerprint at a time. A token clears it.
3. A request that was the only suspect on a second worker that died is blocked: refused for `refuse_s`, at all routers.

So a poisonous request takes down two workers. If it kills the first only after that worker has sent a token, that death
is not counted, and it takes down three. Another router that tries it at the same moment loses as many.

Without rule 2, requests that ran twice beside a poisonous one would be blocked with it. Requests are known by
`fingerprint_of`, so the choices of one prompt, and its repeats, are one suspect.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from pydantic import NonNegativeFloat, NonNegativeInt

from twostroke.protocol.blocked_requests import LONGEST_S, BlockedRequest, BlockedRequests, fingerprint_of
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest, Peer
from twostroke.protocol.settings import Section
from twostroke.router.request_state import SuspectRequest

REMEMBERED_S = 120.0
"""Seconds for which a death counts against the requests that were there."""
POLL_S = 0.05
"""Pause between two looks whether a lost worker is gone."""
PAUSE_SPREAD = 4.0
"""Most extra pauses of a suspect, by its fingerprint. Routers don't share suspects: with equal pauses two of them would
try theirs on one worker at once, and block the innocent one."""


class SuspectsConfig(Section):
    """Suspects: pauses, and how long requests are blocked."""

    pause_s: NonNegativeFloat = 0.1
    """Shortest pause between a worker's death and the next attempt of a request that may have caused it; the longest is
    five times that. What else dies in that time did not die of the request."""
    verdict_s: NonNegativeFloat = 10.0
    """Longest time in which a router finds out whether two workers that were lost under the same request are really
    gone."""
    refuse_s: NonNegativeFloat = 600.0
    """Time for which a request that has taken two workers down is refused (status 422, `poison_request`)."""
    max_refused: NonNegativeInt = 1024
    """Most blocked requests that a router remembers; the oldest go first."""


class PoisonRequest(RequestError):
    """The request takes down every worker that computes it (422)."""

    def __init__(self) -> None:
        super().__init__(
            "the request has taken down the workers that computed it, and is refused", code="poison_request", status=422
        )


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """A worker's death under a request. `is_alone`: it was a suspect already, and the only one there."""

    worker: Peer
    at: float
    is_alone: bool


class Suspects:
    """One router replica's suspects.

    `is_gone` returns whether a lost worker is gone for good; None: not known yet. `tell` tells all other routers.
    """

    def __init__(
        self,
        config: SuspectsConfig,
        clock: Clock,
        *,
        blocked: BlockedRequests,
        is_gone: Callable[[Peer], bool | None],
        tell: Callable[[tuple[BlockedRequest, ...]], None],
    ):
        self._config = config
        self._clock = clock
        self._blocked = blocked
        self._is_gone = is_gone
        self._tell = tell
        self._running: dict[Peer, set[SuspectRequest]] = defaultdict(
            set
        )  # computing there, with no token of the worker's own
        self._turns: dict[bytes | Peer, SuspectRequest] = {}  # the suspect being tried, by fingerprint and by worker
        self._turn_ended = asyncio.Event()
        self._deaths: dict[bytes, list[WorkerDeath]] = {}
        self._dead: dict[Peer, float] = {}  # workers that died a moment ago

    def open(self, request: GenerateRequest) -> SuspectRequest:
        """Register a new request. Raises PoisonRequest where it is blocked."""
        self.check(suspect := SuspectRequest(fingerprint_of(request)))
        return suspect

    def check(self, suspect: SuspectRequest) -> None:
        """Raises PoisonRequest where the request is blocked."""
        if self._blocked.blocks(suspect.fingerprint):
            raise PoisonRequest

    def is_suspect(self, suspect: SuspectRequest) -> bool:
        """Return whether the request may only be tried apart from other suspects."""
        return suspect.fingerprint in self._deaths

    async def await_exclusive_try(self, suspect: SuspectRequest, workers: Collection[Peer]) -> None:
        """Wait, as a suspect, until no other one is tried on `workers`. Raises PoisonRequest."""
        await self.judge(suspect)
        wanted: list[bytes | Peer] = [suspect.fingerprint, *workers]
        while self.is_suspect(suspect):
            pause_s = self._next_try_at(suspect) - self._clock()
            if pause_s > 0:
                await asyncio.sleep(pause_s)
            elif all(self._turns.get(one, suspect) is suspect for one in wanted):
                self._turns.update(dict.fromkeys(wanted, suspect))
                return
            else:
                await self._turn_ended.wait()
            await self.judge(suspect)

    def run(self, suspect: SuspectRequest, worker: Peer) -> None:
        """Note that `worker` may compute the request from now on."""
        self._running[worker].add(suspect)

    def leave(self, suspect: SuspectRequest, worker: Peer) -> None:
        """Note that `worker` computes nothing more for the request, or has given a token of its own."""
        self._running[worker].discard(suspect)

    def clear(self, suspect: SuspectRequest) -> None:
        """Drop the suspicion: a worker has given a token of its own."""
        self._deaths.pop(suspect.fingerprint, None)
        self.end_turn(suspect)

    def end_turn(self, suspect: SuspectRequest) -> None:
        """Let other suspects be tried."""
        if self._turns.get(suspect.fingerprint) is suspect:
            self._turns = {key: one for key, one in self._turns.items() if one is not suspect}
        self._turn_ended.set()
        self._turn_ended = asyncio.Event()

    def died(self, worker: Peer) -> None:
        """Make suspects of the requests on a worker that was lost. Only the first report counts.

        Requests that came later, before this router knew, have met a dead worker.
        """
        now = self._clock()
        self._forget(lambda death: death.at < now - REMEMBERED_S)
        self._dead = {one: at for one, at in self._dead.items() if at > now - self._config.pause_s}
        fingerprints = {suspect.fingerprint for suspect in self._running.pop(worker, ())}
        if worker in self._dead:
            return
        self._dead[worker] = now
        suspects = fingerprints & self._deaths.keys()
        for one in fingerprints:
            self._deaths.setdefault(one, []).append(WorkerDeath(worker, now, is_alone=suspects == {one}))

    async def judge(self, suspect: SuspectRequest) -> None:
        """Raise PoisonRequest where the request is blocked, and block it where it has taken two workers down.

        A worker that lives after all, or of which nothing is known within `verdict_s`, counts no more.
        """
        self.check(suspect)
        deadline = self._clock() + self._config.verdict_s
        while workers := self.killed_by(suspect):
            fates = {worker: self._is_gone(worker) for worker in workers}
            if all(fates.values()):
                del self._deaths[suspect.fingerprint]
                block = BlockedRequest(suspect.fingerprint, min(self._config.refuse_s, LONGEST_S))
                self._tell(self._blocked.learn([block]))
                raise PoisonRequest
            # A dying worker's channel may drop a bit later.
            until = {None: deadline, False: self._next_try_at(suspect)}
            alive = [worker for worker, gone in fates.items() if not gone and self._clock() >= until[gone]]
            self._forget(lambda death, alive=alive: death.worker in alive)  # type: ignore[misc]
            await asyncio.sleep(POLL_S)
            self.check(suspect)

    def killed_by(self, suspect: SuspectRequest) -> tuple[Peer, ...]:
        """Return two workers that the request has taken down if they are gone; none where it may be innocent."""
        deaths = self._deaths.get(suspect.fingerprint, [])
        before = [death.worker for death in deaths if death.worker != deaths[-1].worker]
        return (before[-1], deaths[-1].worker) if before and deaths[-1].is_alone else ()

    def _next_try_at(self, suspect: SuspectRequest) -> float:
        pauses = 1 + PAUSE_SPREAD * suspect.fingerprint[0] / 255
        return self._deaths[suspect.fingerprint][-1].at + pauses * self._config.pause_s

    def _forget(self, is_over: Callable[[WorkerDeath], bool]) -> None:
        kept = {one: [death for death in deaths if not is_over(death)] for one, deaths in self._deaths.items()}
        self._deaths = {one: deaths for one, deaths in kept.items() if deaths}
