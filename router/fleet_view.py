"""What this router knows of the workers' work, kept ready for the next decision.

A worker's row is computed when the worker tells something, and anew before a decision only where this router has sent
something there, or taken something back, since.
"""

import statistics
from collections.abc import Sequence

from twostroke.protocol.clock import Clock
from twostroke.protocol.stats import Role, WorkerInfo, WorkerStats
from twostroke.protocol.step_costs import StepCosts
from twostroke.protocol.tickets import Peer
from twostroke.router.in_flight import InFlight
from twostroke.router.link_rates import LinkRates
from twostroke.router.policy import Candidate
from twostroke.router.service_classes import ServiceClasses
from twostroke.router.token_channels import TokenChannels
from twostroke.router.worker_table import AVAILABLE, UNWELCOME, WorkerTable

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
