"""Who is alive, as Serve told this process: written by the handles' request routers, read by the fleet.

Apart from `replica_router.py` on purpose. Serve ships a RequestRouter class to its users by value, globals of its
module included, so state that both sides share must live in a module of its own.

How Serve reaches exactly the replica that the pipeline picked, and how the router learns who is there.

Serve makes one RequestRouter per handle, inside the process that holds the handle, and gives it the live replicas with
the metadata they published. Ours doesn't choose: it reads the chosen worker from the call's first argument, and it
writes the live workers down in this process's directory. Those that Serve has begun to take down are not among them.
"""

import threading
from collections.abc import Callable, Iterable
from enum import Enum

import msgspec
from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from twostroke.protocol.errors import WorkerLeaving
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


class ReplicaByPeer(RequestRouter):  # type: ignore[misc]  # Ray is untyped here
    """Sends a call to the replica whose Peer is the call's first argument, or fails it with WorkerLeaving."""

    def initialize_state(self) -> None:
        self._peers: dict[ReplicaID, Peer] = {}
        self._directory = directory_of(self._deployment_id.name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        infos = {replica.replica_id: read_worker_metadata(replica.replica_metadata) for replica in replicas}
        self._peers = {replica_id: info.peer for replica_id, info in infos.items()}
        self._directory.replace(infos.values())

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        peer = self._peers.pop(replica_id, None)
        if peer is not None:
            self._directory.remove(peer)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        target: Peer = pending_request.args[0]
        chosen = [replica for replica in candidate_replicas if self._peers.get(replica.replica_id) == target]
        if chosen:
            return [chosen]
        if not pending_request.future.done():
            pending_request.future.set_exception(WorkerLeaving(f"worker {target.worker_id} is gone"))
            self._remove_pending_request_from_indices(pending_request)
        # Serve goes on asking until a candidate is named; it then sees that the request is settled already.
        return [candidate_replicas]

    def _fulfill_next_pending_request(
        self, replica: RunningReplica, request_metadata: RequestMetadata | None = None
    ) -> None:
        """Give the replica to the very request that it was chosen for.

        Serve's own ways would give it to whichever request waits longest, or to any with the same internal id, which
        all calls that one HTTP request makes have in common. Metadata is made anew for each call.
        """
        for pending in self._pending_requests_to_fulfill:
            if pending.metadata is request_metadata and not pending.future.done():
                self._record_queue_wait_time(pending)
                pending.future.set_result(replica)
                self._remove_pending_request_from_indices(pending)
                return
