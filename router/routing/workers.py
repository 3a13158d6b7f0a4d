"""The state of each worker as this router knows it, kept ready for the next decision.

What a decision needs of a worker and does not depend on the request is computed when the worker tells something, and
anew before a decision only where this router has sent something there, or taken something back, since.

`WorkerLoad` is the work that this router replica has at a worker: exact, and newer than the worker's own numbers, which
tell of all routers' requests. `WorkerLoad.joined` joins the two without counting work twice.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from twostroke.protocol.clock import Clock
from twostroke.protocol.kv_layout import TYPICAL_TOKENS, incompatibility
from twostroke.protocol.requests import Peer, Promise
from twostroke.protocol.stats import ROLES, Role, StepCosts, TierStats, WorkerInfo, WorkerStats, role_of, typical
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


AVAILABLE, EJECTED, UNWELCOME, DRAINING = range(4)
"""Tiers of workers. Those between the first and the last are taken for want of a better one: first those that fail many
requests, then those that have failed this one or can't be reached."""

NO_STATS: Mapping[Peer, WorkerStats] = {}

_NO_LIMIT_S = 1e9
_MIN_CHUNK = 16
"""Least prompt tokens that decode workers compute in a step, however tight their streams' promises."""
_TYPICAL_AGE_S = 1.0
"""Longest age in seconds of the typical costs of a role, which workers without their own get."""


@dataclass(slots=True, eq=False)
class KnownWorker:
    """A worker, and what of its numbers paths are chosen by. The first three stay, `update` changes most others."""

    info: WorkerInfo
    kind: int  # of its KV: workers of one kind are alike
    takes: frozenset[int]  # kinds of KV that can come here
    role: Role  # now; it may differ from that of `info`
    tier: int = AVAILABLE
    cached_tokens: int = 0  # tokens of the beginning of the prompt that a path is chosen for
    tier_tokens: int = 0  # the same that its KV tiers hold
    # What it has to do, and room for.
    requests: float = 0.0
    decoding: float = 0.0  # of these, the ones whose answers are written there
    prompt_share: float = 0.0  # of its time, that prompts have taken lately
    queued: dict[str, float] = field(default_factory=dict)  # prompt tokens to be computed, by class
    free_tokens: float = 0.0  # of KV that find room now
    # What its steps cost, as in StepCosts.
    token_s: float = 0.0
    pair_s: float = 0.0
    context_s: float = 0.0
    # What computing a prompt takes.
    step_s: float = 0.0  # of a step beside it: with the requests that decode there, and all weights read
    chunk_tokens: float = 1.0  # of a prompt, in one step beside them
    stalled: float = 0.0  # requests that wait for each chunk: those that decode, and at D who comes next
    queue_token_s: float = 0.0  # a queued prompt token's time
    # What reading its KV tiers takes: see tier_read_costs.
    tier_read_s: float = 0.0
    tier_token_s: float = 0.0  # of each token; 0: it has no tiers
    # What KV takes on its way there.
    token_transfer_s: float = 0.0  # of a token's, all layers
    layer_transfer_s: float = 0.0  # of a token's in one layer
    # What decoding takes.
    tightest_tpot_s: float = _NO_LIMIT_S
    speedup: float = 1.0  # by drafts: a token takes so much less than a step
    next_step_s: float = 0.0  # of a step with one more request, its context aside
    requests_over: float = 0.0  # that must end before the batch has room for one more
    requests_per_token: float = 0.0  # of KV: one over what each of them holds
    requests_per_s: float = 0.0  # of a step: one over what each of them adds to it
    end_s: float = 0.0  # until one of them ends, for each token of their answers

    def queued_tokens(self) -> float:
        """Return the prompt tokens that wait, of all classes."""
        return sum(self.queued.values())

    def update(
        self,
        stats: WorkerStats | None,
        load: WorkerLoad,
        costs: StepCosts | None,
        classes: "Classes",
        *,
        tier: int,
        bytes_per_s: float,
        prompt_share: float = 0.0,
    ) -> None:
        """Take in what is known of the worker now. Without `costs` it can be chosen by load alone."""
        info = self.info
        if stats is None:
            stats = WorkerStats(free_blocks=info.num_blocks, total_blocks=info.num_blocks)
        self.tier = DRAINING if stats.is_draining else tier
        self.prompt_share = prompt_share
        self.tier_read_s, self.tier_token_s = tier_read_costs(stats.tiers) if stats.tiers else (0.0, 0.0)
        if not self.tier_token_s:
            self.tier_tokens = 0
        self.requests = load.requests(stats.num_running + stats.num_waiting)
        num_decoding = stats.num_decoding
        if num_decoding is None:
            num_decoding = stats.num_running + stats.num_waiting if self.role == "decode" else 0
        self.decoding = decoding = load.decoding(num_decoding)
        context_tokens = load.decoding_tokens(stats.context_tokens) if decoding else 0.0
        usual_tokens = context_tokens / decoding if context_tokens else TYPICAL_TOKENS
        layout, groups = info.layout, info.layout.groups
        block_tokens = groups.tokens_a_block(layout.block_size, usual_tokens)
        self.free_tokens = stats.free_blocks * block_tokens - load.since.context_tokens
        half_prompt = self._update_queue(stats, load, classes)
        if costs is None:
            return

        self.token_s, self.pair_s, self.context_s = costs.token_s, costs.pair_s, costs.context_s
        self.speedup = stats.draft_speedup
        self.tightest_tpot_s = _NO_LIMIT_S if stats.tightest_tpot_s is None else stats.tightest_tpot_s
        rows_s = decoding * costs.row_s + context_tokens * costs.context_s
        self.step_s = step_s = costs.weights_s + rows_s
        room = (self.tightest_tpot_s - step_s) / costs.token_s if costs.token_s > 0 else info.max_step_tokens
        self.chunk_tokens = max(_MIN_CHUNK, min(info.max_step_tokens - decoding, room))
        self.stalled = decoding + 1 if self.role == "decode" else decoding
        self.queue_token_s = costs.token_s + step_s / self.chunk_tokens + costs.pair_s * half_prompt

        token_bytes = layout.block_bytes * layout.tp_size * layout.num_layers / layout.block_size
        usual = max(1, math.ceil(usual_tokens / layout.block_size)) * layout.block_size
        token_bytes *= layout.sent_bytes(usual) / usual / layout.token_bytes
        self.token_transfer_s = token_bytes / bytes_per_s
        self.layer_transfer_s = self.token_transfer_s / layout.num_layers

        request_tokens = max(context_tokens, 1.0) / max(decoding, 1.0)
        one_s = costs.row_s + costs.reading_s(decoding + 1) - costs.reading_s(decoding)  # the next, its context aside
        self.next_step_s = costs.reading_s(decoding) + rows_s + one_s
        self.requests_over = self.requests + 1 - info.max_batch
        self.requests_per_token = 1 / request_tokens
        self.requests_per_s = 1 / max(one_s + costs.context_s * request_tokens, 1e-9)
        self.end_s = (costs.reading_s(decoding) + rows_s) / self.speedup / max(decoding, 1.0)

    def queue_s(self, promise: Promise, classes: "Classes") -> float:
        """Return how long a new prompt with this promise waits for those that go first.

        Those are all of equal or higher priority; lower classes that wait keep their share of the worker meanwhile. A
        class with a share of its own waits no longer than that takes for the class's own prompts.
        """
        if not self.queued:
            return 0.0
        tokens = lower_shares = 0.0
        for name, waiting in self.queued.items():
            priority, share = classes[name]
            if priority >= promise.priority:
                tokens += waiting
            elif waiting > 0:
                lower_shares += share
        if lower_shares:
            tokens /= max(1.0 - lower_shares, 0.01)
        if promise.share > 0:
            tokens = min(tokens, self.queued.get(promise.class_name, 0.0) / promise.share)
        return tokens * self.queue_token_s

    def _update_queue(self, stats: WorkerStats, load: WorkerLoad, classes: "Classes") -> float:
        """Returns half of the usual prompt that waits."""
        queued: dict[str, float] = {}
        num_queued = num_tokens = 0
        for work in stats.queued:
            classes[work.class_name] = work.priority, work.share
            # A class is there once for each priority that its requests have.
            queued[work.class_name] = queued.get(work.class_name, 0.0) + work.tokens
            num_queued += work.requests
            num_tokens += work.tokens
        for name in load.now.prompt_tokens:
            if name in classes:
                queued[name] = load.prompt_tokens(name, queued.get(name, 0.0))
        self.queued = queued
        return num_tokens / num_queued / 2 if num_queued else 0.0


def tier_read_costs(tiers: Iterable[TierStats]) -> tuple[float, float]:
    """Return the seconds of a read from a worker's KV tiers, however short, and of each token of it; 0: it has none.

    They are those of the slowest tier that holds anything and predicts its reads: the worker does not tell which of its
    tiers holds a block. A shared tier does not count, since its blocks are not reported.
    """
    costs = [
        (one.read_s, one.read_token_s)
        for one in tiers
        if one.name != "shared" and one.num_bytes > 0 and one.read_token_s > 0
    ]
    return max(costs, key=lambda one: one[0] + TYPICAL_TOKENS * one[1], default=(0.0, 0.0))


Classes = dict[str, tuple[int, float]]
"""Priority and share of each SLO class that was heard of, by its name; what was heard last counts."""


class FleetView:
    """All workers, kept up to date by `on_stats` and `on_connection`, and by this router's own work (`in_flight`)."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._stats: dict[Peer, WorkerStats] = {}  # the latest of each worker whose channel is up
        self._down: set[Peer] = set()  # workers whose channel is broken
        self.in_flight = InFlight(clock, self._mark)
        self.rates = LinkRates()
        self.prompt_shares = PromptShares(clock)
        self.classes: Classes = {}
        self.of_role: dict[Role, list[KnownWorker]] = {role: [] for role in ROLES}
        self.workers: list[KnownWorker] = []
        """Prefill workers first."""
        self.infos: list[WorkerInfo] = []
        """The infos of `workers`, in their order."""
        self.has_tiers = False
        """Some worker has told what reading its KV tiers takes."""
        self._followed: list[WorkerInfo] = []
        self._known: dict[Peer, KnownWorker] = {}
        self._changed: set[Peer] = set()
        self._typical: dict[Role, StepCosts] = {}
        self._typical_at = clock()

    def follow(self, infos: Iterable[WorkerInfo]) -> bool:
        """Take over the current workers. Return True if the list has changed; cheap if it has not."""
        infos = list(infos)
        if infos == self._followed:
            return False
        self._followed = infos
        self._arrange()
        return True

    def _arrange(self) -> None:
        """Sort the workers by their roles, and begin anew to know them."""
        workers = known_workers(self._followed, self._stats)
        self.of_role = {role: [worker for worker in workers if worker.role == role] for role in ROLES}
        self.workers = [*self.of_role["prefill"], *self.of_role["decode"]]
        self.infos = [worker.info for worker in self.workers]
        self.has_tiers = False  # until those that have some are updated
        self._known = {worker.info.peer: worker for worker in self.workers}
        self.in_flight.keep(self._known.keys())
        self.rates.keep(self._known.keys())
        self.prompt_shares.keep(self._known.keys())
        self._down &= self._known.keys()
        self._changed = set(self._known)
        self._find_typical()

    def on_stats(self, peer: Peer, stats: WorkerStats) -> None:
        """Take in the worker's new numbers at once, not when a request waits for that."""
        self._stats[peer] = stats
        self.in_flight.on_stats(peer)
        self.rates.on_stats(peer, stats)
        self.prompt_shares.on_stats(peer, stats)
        worker = self._known.get(peer)
        if worker is None:
            return
        if worker.role != role_of(worker.info, stats):
            self._arrange()
            worker = self._known[peer]
        is_first = stats.costs is not None and worker.role not in self._typical
        if is_first or self._clock() - self._typical_at >= _TYPICAL_AGE_S:
            self._find_typical()
        self._update(worker)
        self._changed.discard(peer)

    def find(self, peer: Peer) -> KnownWorker | None:
        """Return a worker of the fleet; None where it is not there any more."""
        return self._known.get(peer)

    def on_connection(self, peer: Peer, is_up: bool) -> None:
        """Note that the worker's channel has come up or dropped; its numbers count no more without a channel."""
        if is_up:
            self._down.discard(peer)
        else:
            self._down.add(peer)
            self._stats.pop(peer, None)
        self._mark(peer)

    def refresh(self) -> None:
        """Take in what has changed since the last decision."""
        for peer in self._changed:
            worker = self._known.get(peer)
            if worker is not None:
                self._update(worker)
        self._changed.clear()

    @property
    def knows_costs(self) -> bool:
        """Return whether a worker of each role that is there has reported its step costs."""
        return all(role in self._typical or not self.of_role[role] for role in ROLES)

    def _mark(self, peer: Peer) -> None:
        self._changed.add(peer)

    def _find_typical(self) -> None:
        """The typical costs of each role, from those that its workers have reported; the others get them."""
        self._typical_at = self._clock()
        for role in ROLES:
            reported = {one.info.peer: self._costs_of(one) for one in self.of_role[role]}
            costs = typical(reported.values())
            if costs is not None:
                self._typical[role] = costs
                self._changed.update(peer for peer, own in reported.items() if own is None)

    def _costs_of(self, worker: KnownWorker) -> StepCosts | None:
        stats = self._stats.get(worker.info.peer)
        return None if stats is None else stats.costs

    def _update(self, worker: KnownWorker) -> None:
        peer = worker.info.peer
        worker.update(
            self._stats.get(peer),
            self.in_flight.load(peer),
            self._costs_of(worker) or self._typical.get(worker.role),
            self.classes,
            tier=UNWELCOME if peer in self._down else AVAILABLE,
            bytes_per_s=self.rates.of(peer),
            prompt_share=self.prompt_shares.of(peer),
        )
        if worker.tier_token_s:
            self.has_tiers = True


def known_workers(infos: Sequence[WorkerInfo], stats: Mapping[Peer, WorkerStats] = NO_STATS) -> list[KnownWorker]:
    """Return workers of which nothing but these facts, and their roles by `stats`, is known yet."""
    kinds = {layout: kind for kind, layout in enumerate(dict.fromkeys(info.layout for info in infos))}
    takes = {
        target: frozenset(kind for source, kind in kinds.items() if incompatibility(source, target) is None)
        for target in kinds
    }
    nothing = frozenset[int]()
    return [
        KnownWorker(
            info,
            kinds[info.layout],
            takes[info.layout] if info.transfer_addresses else nothing,
            role_of(info, stats.get(info.peer)),
        )
        for info in infos
    ]


FIRST_GUESS = 1e9
"""Bytes a second: about what one 10 GbE port carries, and far below shared memory."""

_WEIGHT = 0.3
"""Weight of a new measurement."""
_FORGOTTEN = 0.001
"""Part by which a rate returns to the first guess at each report, so that a worker judged slow is tried again."""
_LEAST, _MOST = 1e6, 1e13
"""Bounds of a rate: an estimate that is always wrong must not grow for ever."""
_MIN_BYTES = 1 << 16
"""Least bytes of a transfer that measures a rate; smaller ones measure round trips."""


class LinkRates:
    """The rate at which KV comes to each worker, in bytes a second, learnt from transfers.

    Most transfers wait for prefill rather than for the wire, so what workers count is a lower bound of their links'
    rate. Pulled prefixes are all ready when they begin: what they took is the rate.
    """

    def __init__(self) -> None:
        self._rates: dict[Peer, float] = {}
        self._counted: dict[Peer, tuple[int, float]] = {}

    def of(self, worker: Peer) -> float:
        """Into and out of `worker`."""
        return self._rates.get(worker, FIRST_GUESS)

    def on_stats(self, worker: Peer, stats: WorkerStats) -> None:
        """Learn from the transfers that the worker has counted since its last numbers."""
        num_bytes, seconds = self._counted.get(worker, (0, 0.0))
        new_bytes, new_seconds = stats.transfer_bytes - num_bytes, stats.transfer_seconds - seconds
        self._counted[worker] = stats.transfer_bytes, stats.transfer_seconds
        rate = self.of(worker)
        rate += _FORGOTTEN * (FIRST_GUESS - rate)
        if new_bytes >= _MIN_BYTES and new_seconds > 0:
            rate = max(rate, new_bytes / new_seconds)
        self._rates[worker] = rate

    def pulled(self, worker: Peer, *, expected_s: float, took_s: float) -> None:
        """A prefix came to `worker`. Steps are shared, so one measurement alone says no more than twice or half."""
        factor = min(2.0, max(0.5, expected_s / took_s if took_s > 0 else 2.0))
        rate = self.of(worker) * (1 + _WEIGHT * (factor - 1))
        self._rates[worker] = min(max(rate, _LEAST), _MOST)

    def keep(self, workers: Collection[Peer]) -> None:
        """Forget all others."""
        present = set(workers)
        self._rates = {worker: rate for worker, rate in self._rates.items() if worker in present}
        self._counted = {worker: counted for worker, counted in self._counted.items() if worker in present}


_SHARE_S = 10.0
"""Seconds over which the prompts' share of a worker's time is smoothed."""


class PromptShares:
    """The share of each worker's time that prompts have taken lately, 0 to 1, by its own step costs."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._shares: dict[Peer, tuple[float, float]] = {}  # weighted sum of the shares so far, and of their weights
        self._counted: dict[Peer, tuple[float, int]] = {}  # when its last numbers came, and its computed tokens then

    def of(self, worker: Peer) -> float:
        """Return the share; 0 of a worker that is not known yet."""
        total, weight = self._shares.get(worker, (0.0, 0.0))
        return total / weight if weight else 0.0

    def on_stats(self, worker: Peer, stats: WorkerStats) -> None:
        """Learn from the prompt tokens that the worker has computed since its last numbers."""
        now = self._clock()
        before, num_tokens = self._counted.get(worker, (now, stats.computed_tokens))
        self._counted[worker] = now, stats.computed_tokens
        if now > before and stats.costs is not None:
            latest = min(1.0, (stats.computed_tokens - num_tokens) * stats.costs.token_s / (now - before))
            total, weight = self._shares.get(worker, (0.0, 0.0))
            newest = -math.expm1((before - now) / _SHARE_S)
            self._shares[worker] = total + newest * (latest - total), weight + newest * (1.0 - weight)

    def keep(self, workers: Collection[Peer]) -> None:
        """Forget all others."""
        self._shares = {worker: self._shares[worker] for worker in self._shares.keys() & set(workers)}
        self._counted = {worker: self._counted[worker] for worker in self._counted.keys() & set(workers)}
