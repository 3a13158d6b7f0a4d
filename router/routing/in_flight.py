"""The work that this router replica has at each worker: exact, and newer than the workers' own numbers.

A worker's numbers tell of all routers' requests, but are a moment old. `WorkerLoad.joined` joins the two without
counting work twice.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.requests import Peer
from twostroke.router.request_state import (
    AttemptContext,
    AttemptEnded,
    AttemptEvent,
    FirstToken,
    PrefillEnded,
    ScoreDone,
)

_DELIVERY_S = 0.05
"""Seconds that a call takes to reach a worker; until then the worker's numbers don't count the request in."""


class Place(msgspec.Struct, frozen=True, eq=False):
    """The work of one request at one worker."""

    worker: Peer
    prompt_tokens: int  # to be computed there
    context_tokens: int  # of KV that it will hold there
    class_name: str = "standard"
    is_prefill_only: bool = False  # another worker writes the answer


@dataclass(slots=True)
class WorkSum:
    """A sum of places."""

    requests: int = 0
    context_tokens: int = 0
    decoding: int = 0  # requests whose answers are written there
    decoding_tokens: int = 0  # of KV, theirs
    prompt_tokens: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # by class

    def add(self, place: Place, sign: int) -> None:
        """Count `place` in (1) or out (-1)."""
        self.requests += sign
        self.context_tokens += sign * place.context_tokens
        if not place.is_prefill_only:
            self.decoding += sign
            self.decoding_tokens += sign * place.context_tokens
        self.prompt_tokens[place.class_name] += sign * place.prompt_tokens


@dataclass(slots=True)
class WorkerLoad:
    """This router's work at one worker: all there is now, what the worker's numbers count in, what came since."""

    now: WorkSum = field(default_factory=WorkSum)
    reported: WorkSum = field(default_factory=WorkSum)
    since: WorkSum = field(default_factory=WorkSum)
    fresh: dict[Place, float] = field(default_factory=dict)  # held since the numbers came, or just before: and when

    @staticmethod
    def joined(by_worker: float, now: float, reported: float, since: float) -> float:
        """Return the present amount, from the worker's number and this router's part of it (`reported`).

        Others' part is what was more than that. No more can be there than was, with what came since: requests that
        ended, or got on, are out of the worker's number before this router hears of it.
        """
        return min(by_worker + since, max(by_worker - reported, 0.0) + now)

    def requests(self, by_worker: float) -> float:
        """Requests there now, where the worker told of so many."""
        return self.joined(by_worker, self.now.requests, self.reported.requests, self.since.requests)

    def decoding(self, by_worker: float) -> float:
        """Requests whose answers are written there."""
        return self.joined(by_worker, self.now.decoding, self.reported.decoding, self.since.decoding)

    def decoding_tokens(self, by_worker: float) -> float:
        """Their tokens of KV."""
        now, reported, since = self.now, self.reported, self.since
        return self.joined(by_worker, now.decoding_tokens, reported.decoding_tokens, since.decoding_tokens)

    def prompt_tokens(self, class_name: str, by_worker: float) -> float:
        """Prompt tokens of a class that are still to be computed."""
        return self.joined(
            by_worker,
            self.now.prompt_tokens[class_name],
            self.reported.prompt_tokens[class_name],
            self.since.prompt_tokens[class_name],
        )


class Hold:
    """One request's places at its workers, until released."""

    def __init__(self, counts: "InFlight", places: Sequence[Place], when_computed: Callable[[], None]):
        self._counts = counts
        self._when_computed: Callable[[], None] | None = when_computed
        self._places = {place.worker: place for place in places}
        for place in self._places.values():
            counts._enter(place)

    def release(self, worker: Peer | None = None) -> None:
        """Give up the place at `worker`, or all that are left. May be called more than once."""
        for one in [worker] if worker is not None else list(self._places):
            place = self._places.pop(one, None)
            if place is not None:
                self._counts._leave(place)

    def on_event(self, attempt: AttemptContext, event: AttemptEvent) -> None:
        """Give up places as soon as their work is done."""
        match event:
            case FirstToken() | ScoreDone():
                self.prompt_computed()
            case PrefillEnded() if attempt.path.prefill is not None:
                self.release(attempt.path.prefill.peer)
            case AttemptEnded():
                self.release()

    def prompt_computed(self) -> None:
        """The first token has come: no worker has to compute the prompt any more. May be called more than once."""
        if self._when_computed is None:
            return
        self._when_computed()
        self._when_computed = None
        for worker, place in self._places.items():
            if place.prompt_tokens:
                self._places[worker] = self._counts._compute(place)


class InFlight:
    """The load at every worker. `changed` is called with each worker whose load has changed."""

    def __init__(self, clock: Clock, changed: Callable[[Peer], None] = lambda worker: None):
        self._clock = clock
        self._changed = changed
        self._loads: dict[Peer, WorkerLoad] = {}
        self._total = 0

    def hold(self, places: Sequence[Place], when_computed: Callable[[], None] = lambda: None) -> Hold:
        """Count a request in at these places. `when_computed` is called once, when its first token has come."""
        return Hold(self, places, when_computed)

    def load(self, worker: Peer) -> WorkerLoad:
        """This router's work at `worker`."""
        return self._loads.get(worker) or WorkerLoad()

    def total(self) -> int:
        """All places held: 0 when idle."""
        return self._total

    def on_stats(self, worker: Peer) -> None:
        """Note that the worker has just sent its numbers, which count in what it had under way."""
        load = self._loads.get(worker)
        if load is None:
            return
        if load.now.requests == 0:
            del self._loads[worker]
            return
        now = self._clock()
        load.fresh = {place: at for place, at in load.fresh.items() if now - at < _DELIVERY_S}
        load.since = WorkSum()
        load.reported = replace(load.now, prompt_tokens=load.now.prompt_tokens.copy())
        for place in load.fresh:
            load.since.add(place, 1)
            load.reported.add(place, -1)

    def keep(self, workers: Collection[Peer]) -> None:
        """Forget workers that are gone, once nothing is held there."""
        for worker in self._loads.keys() - set(workers):
            if self._loads[worker].now.requests == 0:
                del self._loads[worker]

    def _enter(self, place: Place) -> None:
        load = self._loads.get(place.worker)
        if load is None:
            load = self._loads[place.worker] = WorkerLoad()
        load.now.add(place, 1)
        load.since.add(place, 1)
        load.fresh[place] = self._clock()
        self._total += 1
        self._changed(place.worker)

    def _leave(self, place: Place) -> None:
        load = self._loads[place.worker]  # there even where nothing is left: the worker's numbers may still count it
        load.now.add(place, -1)
        load.fresh.pop(place, None)
        self._total -= 1
        self._changed(place.worker)

    def _compute(self, place: Place) -> Place:
        load = self._loads[place.worker]
        computed = msgspec.structs.replace(place, prompt_tokens=0)
        load.now.prompt_tokens[place.class_name] -= place.prompt_tokens
        if (at := load.fresh.pop(place, None)) is not None:
            load.fresh[computed] = at
        self._changed(place.worker)
        return computed
