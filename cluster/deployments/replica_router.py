"""Delivery of Serve calls to exactly the replica that the pipeline picked, and discovery of the live replicas.

Serve makes one RequestRouter per handle, inside the process that holds the handle, and gives it the live replicas with
the metadata they published. Ours does not choose: it reads the chosen worker from the call's first argument, and writes
the live workers into this process's directory. Replicas that Serve has begun to take down are left out.
"""

from ray.serve._private.common import RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from twostroke.cluster.deployments.fleet import read_worker_metadata, worker_directory
from twostroke.protocol.errors import WorkerLeaving
from twostroke.protocol.requests import Peer


class ReplicaByPeer(RequestRouter):  # type: ignore[misc]  # Ray is untyped here
    """Sends a call to the replica whose Peer is the call's first argument, or fails it with WorkerLeaving."""

    def initialize_state(self) -> None:
        self._peers: dict[ReplicaID, Peer] = {}
        self._directory = worker_directory(self._deployment_id.name)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        metadata = {replica.replica_id: read_worker_metadata(replica.replica_metadata) for replica in replicas}
        infos = {replica_id: info for replica_id, info in metadata.items() if info is not None}
        self._peers = {replica_id: info.peer for replica_id, info in infos.items()}
        self._directory.replace(infos.values(), (one.unique_id for one in metadata.keys() - infos.keys()))

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
