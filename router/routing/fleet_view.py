"""What this router knows of the workers' work, kept ready for the next decision.

A worker's row is computed when the worker tells something, and anew before a decision only where this router has sent
something there, or taken something back, since.

All workers as columns of numbers, one row a worker: what paths' costs are computed from.

A row is computed anew when its worker's numbers or this router's own work there have changed, not for each request.
Prefill workers come first, so that whatever is asked of both roles is computed for all at once, and each role's part is
a slice.

How fast KV comes to each worker, learnt from what transfers took. Pure.

Most transfers wait for prefill rather than for the wire, so what workers count is a lower bound of their links' rate.
Pulled prefixes are all ready when they begin: what they took is the rate.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from twostroke.protocol.clock import Clock
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import Role, StepCosts, WorkerInfo, WorkerStats
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.routing.fleet import pair_up, takers
from twostroke.router.routing.in_flight import InFlight, Load
from twostroke.router.routing.policy import Candidate
from twostroke.router.slo.classes import Floats, ServiceClasses

Ints = NDArray[np.int64]
Number = TypeVar("Number", float, Floats)

AVAILABLE, EJECTED, UNWELCOME, DRAINING = range(4)
"""Tiers of workers. Those between the first and the last are taken for want of a better one: first those that fail many
requests, then those that have failed this one or can't be reached."""

_NO_LIMIT_S = 1e9
_LEAST_CHUNK = 16  # tokens of a prompt that decode workers compute in a step, however tight its streams' promises


class Columns(NamedTuple, Generic[Number]):
    """Numbers of one worker, or arrays of those of many."""

    # What its steps cost, as in StepCosts.
    token_s: Number
    pair_s: Number
    context_s: Number
    # What computing a prompt takes.
    step_s: Number  # of a step without one: with the requests that decode there
    chunk_tokens: Number  # of a prompt, in one step beside them
    stalled: Number  # requests that wait for each chunk: those that decode, and who comes next; at prefill workers none
    queue_token_s: Number  # a queued prompt token's time
    # What KV takes on its way there.
    token_transfer_s: Number  # of a token's, all layers
    layer_transfer_s: Number  # of a token's in one layer
    # What there is room for.
    requests: Number
    free_tokens: Number  # of KV that find room now
    tightest_tpot_s: Number
    next_step_s: Number  # of a step with one more request, its context aside
    requests_over: Number  # that must end before the batch has room for one more
    requests_per_token: Number  # of KV: one over what each of them holds
    requests_per_s: Number  # of a step: one over what each of them adds to it
    end_s: Number  # until one of them ends, for each token of their answers


class WorkerTable:
    """The workers in the order of `infos`, prefill workers first. Arrays have one element a worker."""

    def __init__(self, infos: Sequence[WorkerInfo], classes: ServiceClasses):
        prefill = tuple(info for info in infos if info.role == "prefill")
        decode = tuple(info for info in infos if info.role == "decode")
        self.infos = prefill + decode
        self.of_role: Mapping[Role, tuple[WorkerInfo, ...]] = {"prefill": prefill, "decode": decode}
        self.num_prefill = len(prefill)
        self.rows: Mapping[Peer, int] = {info.peer: row for row, info in enumerate(self.infos)}
        self.classes = classes
        # What does not change.
        self.pairings = pair_up(prefill, decode)
        self.block_sizes = {info.layout.block_size for info in self.infos}
        self.block_size: Floats = np.array([info.layout.block_size for info in self.infos], float)
        self.max_context: Ints = np.array([info.max_context for info in self.infos], np.int64)
        self.least_context = min((info.max_context for info in self.infos), default=0)
        self._token_bytes = [_token_bytes(info) for info in self.infos]
        self._takes: dict[KVLayout, Floats] = {}
        # What does.
        self.tier: Ints = np.zeros(len(self), np.int64)
        self.all_available = True
        self.queued: Floats = np.zeros((len(classes), len(self)))  # prompt tokens, by class and worker
        self._numbers: Floats = np.zeros((len(Columns._fields), len(self)))
        self.columns: Columns[Floats] = Columns(*self._numbers)
        self.decode: Columns[Floats] = Columns(*self._numbers[:, self.num_prefill :])
        """Those of the decode workers alone."""

    def __len__(self) -> int:
        return len(self.infos)

    def takes(self, layout: KVLayout) -> Floats:
        """1 for each worker that takes KV of this layout, else 0."""
        known = self._takes.get(layout)
        if known is None:
            known = self._takes[layout] = takers(self.infos, layout).astype(float)
        return known

    def update(
        self, row: int, stats: WorkerStats | None, load: Load, costs: StepCosts, tier: int, bytes_per_s: float
    ) -> None:
        """Take in what is known of a worker now."""
        info = self.infos[row]
        if stats is None:
            stats = WorkerStats(free_blocks=info.num_blocks, total_blocks=info.num_blocks)
        tier = DRAINING if stats.is_draining else tier
        if tier != self.tier[row]:
            self.tier[row] = tier
            self.all_available = not self.tier.any()
        num_queued, num_tokens = self._update_queue(row, stats, load)
        half_prompt = num_tokens / num_queued / 2 if num_queued else 0.0

        requests = load.requests(stats.num_running + stats.num_waiting)
        decoding = context_tokens = 0.0
        if info.role == "decode":
            decoding, context_tokens = requests, load.context_tokens(stats.context_tokens)
        limit_s = _NO_LIMIT_S if stats.tightest_tpot_s is None else stats.tightest_tpot_s
        step_s = costs.base_s + decoding * costs.row_s + context_tokens * costs.context_s
        request_tokens = max(context_tokens, 1.0) / max(requests, 1.0)
        room = (limit_s - step_s) / costs.token_s if costs.token_s > 0 else info.max_step_tokens
        chunk_tokens = max(_LEAST_CHUNK, min(info.max_step_tokens - decoding, room))
        transfer_s = self._token_bytes[row] / bytes_per_s
        numbers: Columns[float] = Columns(
            token_s=costs.token_s,
            pair_s=costs.pair_s,
            context_s=costs.context_s,
            step_s=step_s,
            chunk_tokens=chunk_tokens,
            stalled=decoding + 1 if info.role == "decode" else 0.0,
            queue_token_s=costs.token_s + step_s / chunk_tokens + costs.pair_s * half_prompt,
            token_transfer_s=transfer_s,
            layer_transfer_s=transfer_s / info.layout.num_layers,
            requests=requests,
            free_tokens=stats.free_blocks * info.layout.block_size - load.since.context_tokens,
            tightest_tpot_s=limit_s,
            next_step_s=step_s + costs.row_s,
            requests_over=requests + 1 - info.max_batch,
            requests_per_token=1 / request_tokens,
            requests_per_s=1 / max(costs.row_s + costs.context_s * request_tokens, 1e-9),
            end_s=step_s / max(requests, 1.0),
        )
        self._numbers[:, row] = numbers

    def add_classes(self) -> None:
        """Make room for all classes that were heard of."""
        missing = len(self.classes) - len(self.queued)
        if missing:
            self.queued = np.vstack([self.queued, np.zeros((missing, len(self)))])

    def _update_queue(self, row: int, stats: WorkerStats, load: Load) -> tuple[int, int]:
        """Returns what the worker told of: prompts, and their tokens."""
        tokens: dict[int, float] = {}
        num_queued = num_tokens = 0
        for work in stats.queued:
            number = self.classes.number(work.class_name, work.priority, work.share)
            # A class is there once for each priority that its requests have.
            tokens[number] = tokens.get(number, 0.0) + work.tokens
            num_queued += work.requests
            num_tokens += work.tokens
        for name in load.now.prompt_tokens:
            known = self.classes.find(name)
            if known is not None:  # of a request that is held now, it is
                tokens[known] = load.prompt_tokens(name, tokens.get(known, 0.0))
        self.add_classes()
        self.queued[:, row] = 0.0
        for number, waiting in tokens.items():
            self.queued[number, row] = waiting
        return num_queued, num_tokens


def _token_bytes(info: WorkerInfo) -> float:
    layout = info.layout
    return layout.block_bytes * layout.tp_size * layout.num_layers / layout.block_size


FIRST_GUESS = 1e9
"""Bytes a second: about what one 10 GbE port carries, and far below shared memory."""

_WEIGHT = 0.3  # of a new measurement
_FORGOTTEN = 0.001  # with each report: a worker that was judged slow would else never be tried again
_LEAST, _MOST = 1e6, 1e13  # what pulls may make of a rate: an estimate that is always wrong must not grow for ever
_LEAST_BYTES = 1 << 16  # transfers of less measure round trips


class LinkRates:
    """Bytes a second, by worker."""

    def __init__(self) -> None:
        self._rates: dict[Peer, float] = {}
        self._counted: dict[Peer, tuple[int, float]] = {}

    def of(self, worker: Peer) -> float:
        """Into and out of `worker`."""
        return self._rates.get(worker, FIRST_GUESS)

    def told(self, worker: Peer, stats: WorkerStats) -> None:
        """The worker has told its numbers."""
        num_bytes, seconds = self._counted.get(worker, (0, 0.0))
        new_bytes, new_seconds = stats.transfer_bytes - num_bytes, stats.transfer_seconds - seconds
        self._counted[worker] = stats.transfer_bytes, stats.transfer_seconds
        rate = self.of(worker)
        rate += _FORGOTTEN * (FIRST_GUESS - rate)
        if new_bytes >= _LEAST_BYTES and new_seconds > 0:
            rate = max(rate, new_bytes / new_seconds)
        self._rates[worker] = rate

    def pulled(self, worker: Peer, *, expected_s: float, took_s: float) -> None:
        """A prefix came to `worker`. Steps are shared, so one measurement alone says no more than twice or half."""
        factor = min(2.0, max(0.5, expected_s / took_s if took_s > 0 else 2.0))
        rate = self.of(worker) * (1 + _WEIGHT * (factor - 1))
        self._rates[worker] = min(max(rate, _LEAST), _MOST)

    def keep(self, workers: Collection[Peer]) -> None:
        """Forget all others."""
        for gone in self._rates.keys() - set(workers):
            del self._rates[gone]
        for gone in self._counted.keys() - set(workers):
            del self._counted[gone]


_MEDIAN_AGE_S = 1.0  # how old the fleet's median costs may be, which workers without their own are given


class FleetView:
    """The workers' table. Hears of changes through `told` and `changed`."""

    def __init__(self, channels: TokenChannels, clock: Clock):
        self._channels = channels
        self._clock = clock
        self.classes = ServiceClasses()
        self.in_flight = InFlight(clock, self.changed)
        self.rates = LinkRates()
        self._infos: list[WorkerInfo] = []
        self._table = WorkerTable((), self.classes)
        self._dirty: set[Peer] = set()
        self._costs: dict[Peer, StepCosts] = {}
        self._medians: dict[Role, StepCosts | None] = dict.fromkeys(_ROLES)
        self._medians_at = clock()

    @property
    def infos(self) -> Sequence[WorkerInfo]:
        """All workers that were followed last."""
        return self._infos

    def follow(self, infos: Sequence[WorkerInfo]) -> bool:
        """These are the workers now. Whether that is news; where it is not, this is quick."""
        infos = list(infos)
        if infos == self._infos:
            return False
        self._infos = infos
        present = {info.peer for info in infos}
        self.in_flight.keep(present)
        self.rates.keep(present)
        self._table = WorkerTable(infos, self.classes)
        self._costs = {worker: costs for worker, costs in self._costs.items() if worker in present}
        for worker in present:
            stats = self._channels.stats(worker)
            if stats is not None and stats.costs is not None:
                self._costs[worker] = stats.costs
        self._dirty = present
        self._take_medians()
        return True

    def told(self, worker: Peer, stats: WorkerStats) -> None:
        """The worker has told its numbers: its row is computed now, not when a request waits for it."""
        self.in_flight.told(worker)
        self.rates.told(worker, stats)
        row = self._table.rows.get(worker)
        if row is None:
            return
        is_first = stats.costs is not None and self._medians[self._table.infos[row].role] is None
        if stats.costs is not None:
            self._costs[worker] = stats.costs
        if is_first or self._clock() - self._medians_at >= _MEDIAN_AGE_S:
            self._take_medians()
        self._update(worker)
        self._dirty.discard(worker)

    def changed(self, worker: Peer) -> None:
        """The worker's channel has come or gone, or this router's work there has changed."""
        self._dirty.add(worker)

    def table(self) -> WorkerTable | None:
        """The table as of now; None while no worker of some role has told what its steps cost."""
        if any(self._medians[role] is None and self._table.of_role[role] for role in _ROLES):
            return None
        for worker in self._dirty:
            self._update(worker)
        self._dirty.clear()
        return self._table

    def candidates(self, role: Role) -> list[Candidate]:
        """The workers of a role for the policies that go without costs."""
        return [
            Candidate(
                info,
                self._channels.stats(info.peer),
                self.in_flight.load(info.peer).now.requests,
                sum(self.in_flight.load(info.peer).now.prompt_tokens.values()),
            )
            for info in self._table.of_role[role]
        ]

    def down(self) -> set[Peer]:
        """Workers whose channel is broken."""
        return {info.peer for info in self._infos if self._channels.is_down(info.peer)}

    def _take_medians(self) -> None:
        """Of the costs that each role's workers have told; those that have told none are given them."""
        self._medians_at = self._clock()
        for role in _ROLES:
            workers = [info.peer for info in self._table.of_role[role]]
            known = [self._costs[worker] for worker in workers if worker in self._costs]
            if known:
                self._medians[role] = median_costs(known)
                self._dirty.update(worker for worker in workers if worker not in self._costs)

    def _update(self, worker: Peer) -> None:
        row = self._table.rows.get(worker)
        if row is None:
            return
        costs = self._costs.get(worker) or self._medians[self._table.infos[row].role]
        if costs is not None:
            self._table.update(
                row,
                self._channels.stats(worker),
                self.in_flight.load(worker),
                costs,
                UNWELCOME if self._channels.is_down(worker) else AVAILABLE,
                self.rates.of(worker),
            )


_ROLES: tuple[Role, ...] = ("prefill", "decode")


def median_costs(costs: Sequence[StepCosts]) -> StepCosts:
    """The median of each number: what a worker of which nothing is known is taken to be like."""
    return StepCosts(
        base_s=statistics.median(one.base_s for one in costs),
        token_s=statistics.median(one.token_s for one in costs),
        pair_s=statistics.median(one.pair_s for one in costs),
        row_s=statistics.median(one.row_s for one in costs),
        context_s=statistics.median(one.context_s for one in costs),
    )
