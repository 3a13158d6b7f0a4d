"""What this router knows of the workers' work, kept ready for the next decision.

A worker's row is computed anew only when the worker has told something, or this router has sent it something.
"""

import statistics
from collections.abc import Sequence

from protocol.clock import Clock
from protocol.stats import Role, WorkerInfo, WorkerStats
from protocol.step_costs import StepCosts
from protocol.tickets import Peer
from router.cheapest_path import Workers, pair_up
from router.in_flight import InFlight
from router.link_rates import LinkRates
from router.policy import Candidate
from router.token_channels import TokenChannels
from router.worker_table import AVAILABLE, UNWELCOME, ServiceClasses, WorkerTable

_MEDIAN_AGE_S = 1.0  # how old the fleet's median costs may be, which workers without their own are given


class FleetView:
    """The workers' tables, by role. Hears of changes through `told` and `changed`."""

    def __init__(self, channels: TokenChannels, clock: Clock):
        self._channels = channels
        self._clock = clock
        self.classes = ServiceClasses()
        self.in_flight = InFlight(clock, self.changed)
        self.rates = LinkRates()
        self._infos: list[WorkerInfo] = []
        self._tables: dict[Role, WorkerTable] = {role: WorkerTable((), self.classes) for role in _ROLES}
        self._workers = Workers(self._tables["prefill"], self._tables["decode"], ())
        self._dirty: set[Peer] = set()
        self._costs: dict[Role, dict[Peer, StepCosts]] = {role: {} for role in _ROLES}
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
        for role in _ROLES:
            self._tables[role] = WorkerTable([info for info in infos if info.role == role], self.classes)
            self._costs[role] = {peer: costs for peer, costs in self._costs[role].items() if peer in present}
        prefill, decode = self._tables["prefill"], self._tables["decode"]
        self._workers = Workers(prefill, decode, pair_up(prefill.infos, decode.infos))
        self._dirty = present
        return True

    def told(self, worker: Peer, stats: WorkerStats) -> None:
        """The worker has told its numbers."""
        self.in_flight.told(worker)
        self.rates.told(worker, stats)
        self._dirty.add(worker)

    def changed(self, worker: Peer) -> None:
        """The worker's channel has come or gone, or this router's work there has changed."""
        self._dirty.add(worker)

    def workers(self) -> Workers | None:
        """The tables as of now; None while no worker of some role has told what its steps cost."""
        self._learn_costs()
        for role, table in self._tables.items():
            if len(table) and self._medians[role] is None:
                return None
        for worker in self._dirty:
            self._update(worker)
        self._dirty.clear()
        return self._workers

    def candidates(self, role: Role) -> list[Candidate]:
        """The workers of a role for the policies that go without costs."""
        return [
            Candidate(
                info,
                self._channels.stats(info.peer),
                self.in_flight.load(info.peer).now.requests,
                sum(self.in_flight.load(info.peer).now.prompt_tokens.values()),
            )
            for info in self._tables[role].infos
        ]

    def down(self) -> set[Peer]:
        """Workers whose channel is broken."""
        return {info.peer for info in self._infos if self._channels.is_down(info.peer)}

    def _learn_costs(self) -> None:
        """Take in costs that were told, and give those workers the fleet's medians that have told none."""
        for role, table in self._tables.items():
            known = self._costs[role]
            for worker in self._dirty:
                if worker in table.rows:
                    stats = self._channels.stats(worker)
                    if stats is not None and stats.costs is not None:
                        known[worker] = stats.costs
        is_old = self._clock() - self._medians_at >= _MEDIAN_AGE_S
        for role, table in self._tables.items():
            known = self._costs[role]
            if known and len(known) < len(table) and (is_old or self._medians[role] is None):
                self._dirty.update(table.rows.keys() - known.keys())
            if known and (is_old or self._medians[role] is None):
                self._medians[role] = median_costs(list(known.values()))
        if is_old:
            self._medians_at = self._clock()

    def _update(self, worker: Peer) -> None:
        for role, table in self._tables.items():
            row = table.rows.get(worker)
            if row is None:
                continue
            costs = self._costs[role].get(worker) or self._medians[role]
            if costs is not None:
                table.update(
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
