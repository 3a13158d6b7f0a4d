"""Who is alive, as Serve told this process: written by the handles' request routers, read by the fleet.

Apart from `replica_router.py` on purpose. Serve ships a RequestRouter class to its users by value, globals of its
module included, so state that both sides share must live in a module of its own.
"""

import threading
from collections.abc import Callable, Iterable
from enum import Enum

import msgspec

from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import WorkerInfo

METADATA_KEY = "worker_info"


def worker_metadata(info: WorkerInfo) -> dict[str, object]:
    """What a worker's `record_replica_metadata` returns. Plain JSON types: Serve's controller carries it."""
    return {METADATA_KEY: msgspec.to_builtins(info)}


def read_worker_metadata(metadata: dict[str, object]) -> WorkerInfo:
    """The reverse. Raises msgspec.ValidationError or KeyError for metadata of something that is no worker of ours."""
    return msgspec.convert(metadata[METADATA_KEY], WorkerInfo)


class Departure(Enum):
    """How a worker went."""

    LEAVES = "leaves"  # Serve takes it down, and its process goes on for a while
    DIED = "died"


Watcher = Callable[[frozenset[Peer], Departure], None]


class WorkerDirectory:
    """The live workers of one deployment, as this process was told last. Safe to use from any thread.

    Serve may run its routers on a thread of their own, so watchers are called on whatever thread brings the news.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[Peer, WorkerInfo] = {}
        self._watchers: list[Watcher] = []

    def workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(self._workers.values())

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._workers

    def watch(self, on_departed: Watcher) -> None:
        """Call `on_departed` with the workers that are no longer here, whenever some are, and how they went."""
        with self._lock:
            self._watchers.append(on_departed)

    def replace(self, workers: Iterable[WorkerInfo]) -> None:
        """These may be called now, and no others. Serve takes those down that are not there any more."""
        self._replace(workers, Departure.LEAVES)

    def remove(self, peer: Peer) -> None:
        """This one has died."""
        self._replace([info for info in self.workers() if info.peer != peer], Departure.DIED)

    def _replace(self, workers: Iterable[WorkerInfo], how: Departure) -> None:
        with self._lock:
            # A new dict, not a changed one: readers on other threads iterate over the old one.
            before, self._workers = self._workers, {info.peer: info for info in workers}
            departed = frozenset(before.keys() - self._workers.keys())
            watchers = tuple(self._watchers)
        if departed:
            for on_departed in watchers:
                on_departed(departed, how)


# Serve constructs RequestRouters itself, from a class and JSON arguments: a name is all that can be handed to them.
_directories: dict[str, WorkerDirectory] = {}


def directory_of(deployment: str) -> WorkerDirectory:
    """This process's directory for the deployment of that name."""
    return _directories.setdefault(deployment, WorkerDirectory())
