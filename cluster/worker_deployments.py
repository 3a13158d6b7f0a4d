"""The two kinds of worker as Serve deployments: one replica is one worker with one engine.

Serve starts, watches and calls them; tokens and KV go their own ways. All heavy imports are inside the constructors,
since the process that deploys and the router's process load this module too.
"""

import asyncio
import time
from typing import TYPE_CHECKING, Any

import ray
from ray import serve

from cluster.worker_directory import worker_metadata
from cluster.worker_parts import WorkerSettings, load_parts
from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from protocol.clock import draw_epoch
from protocol.errors import EpochMismatch
from protocol.requests import DecodeReply, GenerateRequest, PrefillReply
from protocol.tcp_network import TcpNetwork
from protocol.tickets import Peer, Ticket

if TYPE_CHECKING:
    from decode_worker.worker import DecodeWorker
    from prefill_worker.worker import PrefillWorker


class PrefillReplica:
    """A prefill worker under Serve."""

    _worker: "PrefillWorker | None" = None

    async def __init__(self, settings: WorkerSettings, config: PrefillConfig, secret: bytes):  # type: ignore[misc]  # Serve awaits it
        """Returns once the worker can take requests; Serve starts the replica again where this raises."""
        from kvtransfer.sender import KVSender
        from prefill_worker.worker import PrefillWorker

        self._peer = _this_peer()
        self._parts = await load_parts(settings)
        network = TcpNetwork(secret)
        store = self._parts.store
        self._worker = PrefillWorker(
            peer=self._peer,
            config=config,
            engine=self._parts.loaded.engine,
            store=store,
            pool=self._parts.pool,
            network=network,
            sender=KVSender(
                peer=self._peer,
                store=store,
                network=network,
                transport=self._parts.transport,
                config=settings.transfer,
                clock=time.monotonic,
            ),
            clock=time.monotonic,
            max_context=self._parts.loaded.max_context,
        )
        self._info = await self._worker.start(ray.util.get_node_ip_address())

    def record_replica_metadata(self) -> dict[str, object]:
        return worker_metadata(self._info)

    async def check_health(self) -> None:
        if self._worker is not None:
            self._worker.check_health()

    async def prefill(self, worker: Peer, request: GenerateRequest, ticket: Ticket | None) -> PrefillReply:
        """As PrefillWorker.prefill. `worker` is whom the router means; EpochMismatch where that is somebody else."""
        check_peer(worker, self._peer)
        assert self._worker is not None  # Serve calls methods of constructed replicas only
        return await self._worker.prefill(request, ticket)

    async def __del__(self) -> None:
        """Serve awaits this once the replica has drained."""
        if self._worker is not None:
            await self._worker.stop()
            await asyncio.to_thread(self._parts.close)


class DecodeReplica:
    """A decode worker under Serve."""

    _worker: "DecodeWorker | None" = None

    async def __init__(self, settings: WorkerSettings, config: DecodeConfig, secret: bytes):  # type: ignore[misc]  # Serve awaits it
        """Returns once the worker can take requests; Serve starts the replica again where this raises."""
        from decode_worker.worker import DecodeWorker
        from kvtransfer.receiver import KVReceiver

        self._peer = _this_peer()
        self._parts = await load_parts(settings)
        network = TcpNetwork(secret)
        store = self._parts.store
        self._worker = DecodeWorker(
            peer=self._peer,
            config=config,
            engine=self._parts.loaded.engine,
            store=store,
            pool=self._parts.pool,
            network=network,
            receiver=KVReceiver(
                peer=self._peer,
                store=store,
                network=network,
                transport=self._parts.transport,
                config=settings.transfer,
                clock=time.monotonic,
                secret=secret,
            ),
            clock=time.monotonic,
            max_context=self._parts.loaded.max_context,
        )
        self._info = await self._worker.start(ray.util.get_node_ip_address())

    def record_replica_metadata(self) -> dict[str, object]:
        return worker_metadata(self._info)

    async def check_health(self) -> None:
        if self._worker is not None:
            self._worker.check_health()

    async def decode(self, worker: Peer, request: GenerateRequest, ticket: Ticket | None) -> DecodeReply:
        """As DecodeWorker.decode. `worker` is whom the router means; EpochMismatch where that is somebody else."""
        check_peer(worker, self._peer)
        assert self._worker is not None  # Serve calls methods of constructed replicas only
        return await self._worker.decode(request, ticket)

    async def __del__(self) -> None:
        """Serve awaits this once the replica has drained."""
        if self._worker is not None:
            await self._worker.stop()
            await asyncio.to_thread(self._parts.close)


def _this_peer() -> Peer:
    """This process's name: Serve's for the replica, and a number that no later incarnation has."""
    return Peer(serve.get_replica_context().replica_id.unique_id, draw_epoch())


def check_peer(meant: Peer, actual: Peer) -> None:
    """Raises EpochMismatch unless a call has reached whom it was meant for."""
    if meant != actual:
        raise EpochMismatch(f"the call is for worker {meant.worker_id}, not for {actual.worker_id}")


def worker_options(settings: WorkerSettings, replicas: int) -> dict[str, Any]:
    """Serve's options for a worker deployment."""
    return {
        "num_replicas": replicas,
        # The workers' own schedulers queue and refuse. Serve's limit would only hide requests from them.
        "max_ongoing_requests": 100_000,
        "ray_actor_options": {"num_cpus": settings.threads, "num_gpus": settings.resources.num_gpus},
        "request_router_config": {"request_router_class": "cluster.replica_router:ReplicaByPeer"},
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": 30.0,
        "max_constructor_retry_count": 2,
        "logging_config": {"enable_access_log": False},
    }
