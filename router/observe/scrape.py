"""What Prometheus reads at /metrics: the numbers of all routers, whichever of them is asked.

Routers stand behind one address, so a scrape reaches any of them. Were it told of that one alone, counters would jump
from router to router and every rate over them be wrong. So a router's series carry its name as the label `router`, and
the one that is asked fetches those of the others. A worker tells all routers the same: its series are there once.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import WorkerInfo, WorkerStats
from twostroke.router.observe.worker_metrics import WorkerNumbers, ejected_family, worker_families


@dataclass(frozen=True)
class RouterReading:
    """The numbers of one router at one moment; travels between routers."""

    router: str  # its replica's id
    families: tuple[Metric, ...]  # of its own requests
    workers: WorkerNumbers  # as it last heard of them
    ejected: frozenset[Peer]


OtherRouters = Callable[[], Awaitable[Sequence[RouterReading]]]
"""Fetches the readings of all other routers that answer in time."""


async def no_other_routers() -> Sequence[RouterReading]:
    """Where there is one router."""
    return ()


def exposition(readings: Sequence[RouterReading]) -> bytes:
    """The series of these routers and of the workers, in Prometheus' text format."""
    return generate_latest(_Families(_merged(readings)))


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]):
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _merged(readings: Sequence[RouterReading]) -> list[Metric]:
    """A family has one place in a text, so the samples of all routers go there."""
    families: dict[str, Metric] = {}
    for reading in readings:
        for family in (*reading.families, ejected_family(reading.workers, reading.ejected)):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            merged.samples += [
                sample._replace(labels={**sample.labels, "router": reading.router})
                for sample in family.samples
                if not sample.name.endswith("_created")  # one more series for each, which nobody looks at
            ]
    return [*families.values(), *worker_families(_newest(readings))]


def _newest(readings: Sequence[RouterReading]) -> WorkerNumbers:
    """Each worker once, as the router tells that has heard of it last: else its counters could fall between scrapes."""
    newest: dict[str, tuple[WorkerInfo, WorkerStats]] = {}
    for reading in readings:
        for info, stats in reading.workers:
            known = newest.get(info.peer.worker_id)
            if known is None or stats.steps > known[1].steps:
                newest[info.peer.worker_id] = (info, stats)
    return list(newest.values())
