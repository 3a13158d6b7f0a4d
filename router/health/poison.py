"""Requests that may have taken workers down, and those that certainly have.

A request that crashes whatever worker computes it must not be sent from worker to worker. When a worker dies, whoever
had got no token from it is a suspect. A suspect is tried again with no other suspect of this router on its worker, so
that a second death names the guilty; a token of its own clears it. Requests are known by what they ask for
(`fingerprint_of`), so the choices of one prompt, and its repeats, are one suspect.

Suspicion is one router replica's own; verdicts are told to all (protocol/verdicts.py).
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

import msgspec
from pydantic import NonNegativeFloat, NonNegativeInt

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest, Peer
from twostroke.protocol.settings import Section
from twostroke.protocol.verdicts import FINGERPRINT_BYTES, LONGEST_S, Verdict, Verdicts

_MOST_REMEMBERED = 4096  # fingerprints with strikes
_STRIKE_S = 120.0  # how long a death is remembered of who was there
_POLL_S = 0.05  # between two looks whether a worker is gone
_SPREAD = 4.0  # suspects wait for up to so many pauses more, each as its fingerprint says
_SAME_MOMENT_S = 0.02  # workers that die so close to each other died of the same thing


class SuspectsConfig(Section):
    """How suspects are dealt with."""

    pause_s: NonNegativeFloat = 0.1
    """Between a worker's death and the next try of a request that may have caused it, at least (at most five times
    that): what else dies in that time did not die of the request."""
    verdict_s: NonNegativeFloat = 10.0
    """What a router takes at most to learn whether two workers that were lost under the same request are really
    gone."""
    refuse_s: NonNegativeFloat = 600.0
    """So long a request that has taken two workers down is refused (status 422, `poison_request`) when it comes
    again."""
    max_refused: NonNegativeInt = 1024
    """Requests of which it is remembered that they are refused; the oldest go first."""


class PoisonRequest(RequestError):
    """The request takes down every worker that computes it (422)."""

    def __init__(self) -> None:
        super().__init__(
            "the request has taken down the workers that computed it, and is refused", code="poison_request", status=422
        )


class Stay(Enum):
    """What a request does at a worker."""

    AWAITS = "awaits"  # nothing yet: its KV is computed elsewhere
    HELD = "held"  # the same, for a suspect whose turn it is there
    FRESH = "fresh"  # the worker may be computing for it, and has given no token of its own
    STREAMS = "streams"


@dataclass(frozen=True)
class WorkerDeath:
    """A worker that died while the request was there."""

    worker: Peer
    at: float
    position: int  # output tokens that the client had
    is_prompt: bool  # the prompt was being computed
    was_streaming: bool  # the worker had given tokens: hardly a reason to suspect the request
    is_alone: bool  # it had a strike before, and nobody else there without a token had one


@dataclass(eq=False)
class SuspectRequest:
    """One request under way."""

    fingerprint: bytes
    position: int = 0  # output tokens that the client has
    stays: dict[Peer, Stay] = field(default_factory=dict)
    is_prompt_done: bool = False  # of the attempt at hand: its prefill worker has drawn a token
    waits: bool = False  # until it may be tried: whatever it was to do at its workers, it has not been told to do it


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A suspect that may not be tried on its workers yet."""

    case: SuspectRequest
    workers: Collection[Peer]
    woken: asyncio.Future[None]


class Suspects:
    """Who was where when a worker died, and who may go on. A request opens a case and takes it through its attempts.

    `is_gone` tells whether a worker that was lost is gone for good: True, False (it lives), or None (not known yet).
    `tell` has all other routers told of verdicts.
    """

    def __init__(
        self,
        config: SuspectsConfig,
        clock: Clock,
        *,
        is_gone: Callable[[Peer], bool | None],
        tell: Callable[[tuple[Verdict, ...]], None],
    ):
        self._config = config
        self._clock = clock
        self._is_gone = is_gone
        self._tell = tell
        self._there: dict[Peer, dict[SuspectRequest, None]] = {}
        self._died: dict[Peer, float] = {}  # lately, and when
        self._strikes: OrderedDict[bytes, list[WorkerDeath]] = OrderedDict()
        self._verdicts = Verdicts(clock, most=config.max_refused, longest_s=config.refuse_s)
        self._waiting: list[_Waiting] = []  # in the order in which they came

    # --- a request's way ---

    def open(self, request: GenerateRequest) -> SuspectRequest:
        """A request comes. Raises PoisonRequest where it was found guilty before."""
        case = SuspectRequest(fingerprint_of(request))
        self.check(case)
        return case

    def check(self, case: SuspectRequest) -> None:
        """Raises PoisonRequest where the case, or another of its fingerprint, has been found guilty meanwhile."""
        if self._verdicts.holds(case.fingerprint):
            raise PoisonRequest

    async def may_try(self, case: SuspectRequest, workers: Collection[Peer]) -> None:
        """Wait until the case may be tried on `workers`, and hold them for it. Raises PoisonRequest.

        A suspect waits until it is the only one there, and the only one of its fingerprint anywhere; others pass.
        """
        case.waits = True
        try:
            while self.is_suspect(case):
                await self.judge(case)
                left_s = self._paused_until(case) - self._clock()
                if left_s > 0:
                    await asyncio.sleep(left_s)
                elif self._has_room(case, workers, *self._under_way(but=case)):
                    break
                else:
                    waiting = _Waiting(case, workers, asyncio.get_running_loop().create_future())
                    self._waiting.append(waiting)
                    await waiting.woken
        finally:
            case.waits = False
        self.check(case)
        is_suspect = self.is_suspect(case)
        for worker in workers:
            self.stay(case, worker, Stay.HELD if is_suspect else Stay.AWAITS)

    async def judge(self, case: SuspectRequest) -> None:
        """Raises PoisonRequest where the case has taken two workers down. Where they live after all, it is innocent."""
        self.check(case)
        deadline = self._clock() + self._config.verdict_s
        while workers := self.accused_of(case):
            fates = {worker: self._is_gone(worker) for worker in workers}
            if all(fates.values()):
                self._convict(case)
                raise PoisonRequest
            is_late = self._clock() >= deadline
            is_settled = self._clock() >= self._paused_until(case)  # one that tells of its end hangs up later
            for worker, is_gone in fates.items():
                if (is_gone is False and is_settled) or (is_gone is None and is_late):
                    self._forgive(case.fingerprint, worker)
            await asyncio.sleep(_POLL_S)
            self.check(case)

    def stay(self, case: SuspectRequest, worker: Peer, stay: Stay) -> None:
        """What the request does at `worker` from now on."""
        case.stays[worker] = stay
        self._there.setdefault(worker, {})[case] = None

    def leave(self, case: SuspectRequest, worker: Peer) -> None:
        """It has nothing to do with `worker` any more. Harmless where it never had."""
        case.stays.pop(worker, None)
        there = self._there.get(worker)
        if there is not None:
            there.pop(case, None)
            if not there:
                del self._there[worker]
        self._wake()

    def prompt_done(self, case: SuspectRequest) -> None:
        """A prefill worker has computed the prompt, and lives."""
        case.is_prompt_done = True
        self._clear(case.fingerprint, lambda strike: strike.is_prompt)
        self._wake()

    def got_on(self, case: SuspectRequest, worker: Peer, position: int) -> None:
        """`worker` has drawn output token `position` by itself."""
        if case.stays.get(worker) is not None:
            self.stay(case, worker, Stay.STREAMS)
        self._clear(case.fingerprint, lambda strike: strike.position <= position)
        self._wake()

    # --- deaths and verdicts ---

    def died(self, worker: Peer) -> None:
        """`worker` was lost. Everybody who was there says so; the first one counts.

        Who came after that, before the router knew, has met a dead worker.
        """
        self._forget_old()
        there = [(case, case.stays.pop(worker)) for case in self._there.pop(worker, ())]
        if worker in self._died:
            return
        self._died[worker] = self._clock()
        # Those that wait to be tried have been told to do nothing: they are no company for the one that is.
        before = {
            case.fingerprint
            for case, stay in there
            if stay is Stay.FRESH and not case.waits and case.fingerprint in self._strikes
        }
        struck: set[bytes] = set()
        for case, stay in sorted(there, key=lambda one: one[1] is Stay.STREAMS):
            if stay in (Stay.FRESH, Stay.STREAMS) and case.fingerprint not in struck:
                struck.add(case.fingerprint)
                self._strike(
                    case.fingerprint,
                    WorkerDeath(
                        worker=worker,
                        at=self._clock(),
                        position=case.position,
                        is_prompt=not case.is_prompt_done,
                        was_streaming=stay is Stay.STREAMS,
                        is_alone=stay is Stay.FRESH and before == {case.fingerprint},
                    ),
                )

    def is_suspect(self, case: SuspectRequest) -> bool:
        """Whether it may only be tried where no other suspect is."""
        return any(not strike.was_streaming for strike in self._strikes.get(case.fingerprint, ()))

    def accused_of(self, case: SuspectRequest) -> tuple[Peer, ...]:
        """Two workers that it has taken down, provided that they are gone; none where it may be innocent."""
        strikes = self._strikes.get(case.fingerprint, [])
        others = [strike for strike in strikes if strike.worker != strikes[-1].worker]
        if not others or not strikes[-1].is_alone:
            return ()
        before, last = others[-1], strikes[-1]
        if before.was_streaming and last.at - before.at < _SAME_MOMENT_S:
            return ()  # a stream goes on at once, so it had just moved
        return (before.worker, last.worker)

    def hear(self, verdicts: Collection[Verdict]) -> None:
        """Other routers have found these guilty: refuse them too, though no longer than this one's own."""
        for verdict in self._verdicts.learn(verdicts):
            self._strikes.pop(verdict.fingerprint, None)
        self._wake()

    def verdicts(self) -> tuple[Verdict, ...]:
        """What is refused now, by whomever it was found guilty."""
        return self._verdicts.to_tell()

    @property
    def num_suspects(self) -> int:
        """Fingerprints with strikes; 0 when all is well."""
        return len(self._strikes)

    def _convict(self, case: SuspectRequest) -> None:
        """Refuse it from now on, everywhere."""
        self._strikes.pop(case.fingerprint, None)
        self._tell(self._verdicts.learn([Verdict(case.fingerprint, min(self._config.refuse_s, LONGEST_S))]))
        self._wake()

    def _forgive(self, fingerprint: bytes, worker: Peer) -> None:
        """`worker` lives, or nobody knows better: its loss proves nothing."""
        self._clear(fingerprint, lambda strike: strike.worker == worker)

    def _wake(self) -> None:
        """Somebody has got on, or has left a worker: look who is next.

        Often called while hundreds wait, so everybody under way is looked at once, and only those are woken who may go
        on now, or needn't wait any more. Whoever is woken calls this again in the end.
        """
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        busy, fingerprints = self._under_way()
        for one in waiting:
            if one.woken.done():
                continue  # its client has left
            if self.is_suspect(one.case):
                if not self._has_room(one.case, one.workers, busy, fingerprints):
                    self._waiting.append(one)
                    continue
                busy.update(one.workers)
                fingerprints.add(one.case.fingerprint)
            one.woken.set_result(None)

    def _under_way(self, *, but: SuspectRequest | None = None) -> tuple[set[Peer], set[bytes]]:
        """What may take workers down: where a suspect is computed, or is about to be; and all such fingerprints."""
        busy: set[Peer] = set()
        fingerprints: set[bytes] = set()
        for worker, there in self._there.items():
            for case in there:
                if case is but or case.waits:  # else two whose KV did not come would wait for each other
                    continue
                if case.stays[worker] in (Stay.HELD, Stay.FRESH):
                    fingerprints.add(case.fingerprint)
                    if self.is_suspect(case):
                        busy.add(worker)
        return busy, fingerprints

    @staticmethod
    def _has_room(case: SuspectRequest, workers: Collection[Peer], busy: set[Peer], fingerprints: set[bytes]) -> bool:
        return case.fingerprint not in fingerprints and busy.isdisjoint(workers)

    def _paused_until(self, case: SuspectRequest) -> float:
        """When a suspect may be tried again at the earliest.

        Routers don't tell each other of suspects: so that two of them seldom try theirs on one worker at the same
        moment, and the innocent one is accused of what the other has done, each fingerprint has its own pause.
        """
        strikes = self._strikes.get(case.fingerprint, ())
        pause_s = self._config.pause_s * (1 + _SPREAD * case.fingerprint[0] / 255)
        return max((strike.at for strike in strikes), default=float("-inf")) + pause_s

    def _strike(self, fingerprint: bytes, strike: WorkerDeath) -> None:
        self._strikes.setdefault(fingerprint, []).append(strike)
        self._strikes.move_to_end(fingerprint)
        while len(self._strikes) > _MOST_REMEMBERED:
            self._strikes.popitem(last=False)

    def _forget_old(self) -> None:
        oldest = self._clock() - _STRIKE_S
        for fingerprint in list(self._strikes):
            self._clear(fingerprint, lambda strike: strike.at < oldest)
        paused = self._clock() - self._config.pause_s
        self._died = {worker: at for worker, at in self._died.items() if at > paused}

    def _clear(self, fingerprint: bytes, is_cleared: Callable[[WorkerDeath], bool]) -> None:
        strikes = self._strikes.get(fingerprint)
        if strikes is None:
            return
        strikes[:] = [strike for strike in strikes if not is_cleared(strike)]
        if not strikes:
            del self._strikes[fingerprint]


def fingerprint_of(request: GenerateRequest) -> bytes:
    """What makes a request the same as another: all that the workers compute by, but neither seed nor length.

    A prompt that is scored or embedded is another request than the same prompt with an answer.
    """
    asked = (
        request.token_ids,
        msgspec.structs.replace(request.sampling, seed=0),
        request.stop_token_ids,
        request.cache_salt,
        request.grammar,
        request.reading,
    )
    return hashlib.sha256(msgspec.msgpack.encode(asked)).digest()[:FINGERPRINT_BYTES]
