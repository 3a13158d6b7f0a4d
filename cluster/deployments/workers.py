"""Workers as Serve deployments, one for each role: one replica is one worker with one engine.

Serve starts, watches and calls them; tokens and KV go their own ways. All heavy imports are inside the constructors,
since the process that deploys and the router's process load this module too.

Of a worker whose stages are on several nodes, each stage but the first has an actor in its bundle of the replica's
placement group. Serve makes the group, of a bundle for each stage, packs it on as few nodes as it can, and removes it
with the replica, which is in the first bundle. The actors are the replica's own: when it ends, however it does, Ray
ends them, and their ranks end with them.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twostroke.cluster.config.process_logs import close_logs, log_as_replica
from twostroke.cluster.config.sections import Placement
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.deployments.fleet import worker_metadata
from twostroke.cluster.ranks.led_ranks import PATIENCE_S, RankProcesses
from twostroke.cluster.ranks.rank_parts import RankOrder
from twostroke.cluster.ranks.worker_parts import WorkerParts, load_parts
from twostroke.decode_worker.config import DecodeConfig
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.protocol.clock import draw_epoch
from twostroke.protocol.errors import EpochMismatch, WorkerLost
from twostroke.protocol.garbage import freeze_start_up
from twostroke.protocol.messages import ProbeTimes
from twostroke.protocol.network import Network, TcpNetwork
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply, Ticket
from twostroke.protocol.stats import Role

if TYPE_CHECKING:
    from twostroke.worker.role import WorkerRole
    from twostroke.worker.worker import Worker


_log = logging.getLogger(__name__)

ENDING_S = 5.0
"""Seconds in which a replica without calls ends, after which Serve ends its process."""

DRAIN_S = 3.0
"""Seconds of that for transfers whose calls have returned."""


class _WorkerReplica:
    """A worker under Serve. A constructor that raises leaves `_worker` unset, and Serve starts the replica again.

    The first argument of each call names the incarnation that the router means; another one raises EpochMismatch.
    """

    _worker: "Worker | None" = None
    _role: Role

    async def _load(self, settings: WorkerSettings, secret: bytes) -> WorkerParts:
        # Serve's name for the replica, and a number that no later incarnation has.
        self._peer = Peer(serve.get_replica_context().replica_id.unique_id, draw_epoch())
        log_as_replica(settings.logging, self._role, self._peer)
        network, host = self._make_network(secret), ray.util.get_node_ip_address()
        stages = host_stages(settings)
        self._parts = await load_parts(settings, self._peer, network, secret, host=host, stages=stages)
        return self._parts

    def _make_network(self, secret: bytes) -> Network:
        return TcpNetwork(secret)

    async def _start(self, role: "WorkerRole") -> None:
        from twostroke.decode_worker.policy import DecodePolicy, EvenPolicy
        from twostroke.prefill_worker.policy import PrefillPolicy
        from twostroke.worker.role import Policies
        from twostroke.worker.worker import Worker

        policies: Policies = {"prefill": PrefillPolicy, "decode": DecodePolicy, "even": EvenPolicy}
        worker = self._worker = Worker(role, self._parts.deps, self._parts.rank.loaded.swap_space, policies)
        self._info = await worker.start(ray.util.get_node_ip_address())
        self._parts.watch(worker.engine_lost)
        freeze_start_up()

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        """Run Worker.prefill."""
        return await self._meant(worker).prefill(request, ticket, pull)

    async def decode(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> DecodeReply:
        """Run Worker.decode."""
        return await self._meant(worker).decode(request, ticket, pull)

    async def score_prompt(self, worker: Peer, request: GenerateRequest) -> PrefillReply:
        """Run Worker.score_prompt."""
        return await self._meant(worker).score_prompt(request)

    async def probe_source(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> ProbeTimes:
        """Run LinkProbe.source."""
        return await self._meant(worker).probe.source(tickets, num_tokens)

    async def probe_target(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> None:
        """Run LinkProbe.target."""
        await self._meant(worker).probe.target(tickets, num_tokens)

    def _meant(self, worker: Peer) -> "Worker":
        """The worker, which the router means. Raises EpochMismatch where that is somebody else."""
        if worker != self._peer:
            raise EpochMismatch(f"the call is for worker {worker.worker_id}, not for {self._peer.worker_id}")
        if self._worker is None:
            raise WorkerLost(f"worker {worker.worker_id} has not started")
        return self._worker

    def record_replica_metadata(self) -> dict[str, object]:
        return worker_metadata(self._info)

    async def check_health(self) -> None:
        """Serve asks this of replicas that it keeps, never of those that it takes down.

        Where the worker has died, the process ends: an engine's thread that hangs can't be ended otherwise, and Serve
        replaces what is gone sooner than what fails its checks.
        """
        if self._worker is not None:
            try:
                self._worker.check_health()
            except WorkerLost as error:
                _log.critical("the process of worker %s ends: %s", self._peer.worker_id, error)
                close_logs()
                os._exit(1)
            self._worker.resume()  # a router may have heard otherwise, and said so

    async def __del__(self) -> None:
        """Serve awaits this once the replica's calls have returned; the KV of some may still be under way."""
        if self._worker is not None:
            await drain_and_stop(self._worker, DRAIN_S)
            await self._parts.close()


class PrefillReplica(_WorkerReplica):
    """A prefill worker under Serve."""

    _role = "prefill"

    async def __init__(self, settings: WorkerSettings, config: PrefillConfig, secret: bytes):  # type: ignore[misc]  # Serve awaits it
        """Load the worker; return once it can take requests."""
        from twostroke.prefill_worker.policy import prefill_role

        await self._load(settings, secret)
        await self._start(prefill_role(config))


class DecodeReplica(_WorkerReplica):
    """A decode worker under Serve."""

    _role = "decode"

    async def __init__(self, settings: WorkerSettings, config: DecodeConfig, secret: bytes):  # type: ignore[misc]  # Serve awaits it
        """Load the worker; return once it can take requests."""
        from twostroke.decode_worker.policy import decode_role

        await self._load(settings, secret)
        await self._start(decode_role(config))


async def drain_and_stop(worker: "Worker", drain_s: float) -> None:
    """End a worker: at once when nothing is under way any more, and after `drain_s` whatever is."""
    try:
        async with asyncio.timeout(drain_s):
            await worker.drain()
    except TimeoutError:
        _log.warning("the worker has not drained in %g s: what is under way ends now", drain_s)
    await worker.stop()


def worker_options(settings: WorkerSettings, placement: Placement, *, grace_s: float) -> dict[str, Any]:
    """Serve's options for a worker deployment, but for how many replicas it has.

    Routers take a leaving worker's calls elsewhere after `grace_s`.
    """
    stage = stage_resources(settings)
    where = placement.actor_options()
    if settings.parallel.has_stages:
        where.pop("label_selector", None)  # its bundle's
    return {
        # All ranks of the first stage are processes of the one replica, so they are on one node.
        "ray_actor_options": {"num_cpus": stage["CPU"], "num_gpus": stage.get("GPU", 0), **where},
        **placement_options(settings, placement),
        # The workers' own schedulers queue and refuse. Serve's limit would only hide requests from them.
        "max_ongoing_requests": 100_000,
        "request_router_config": {"request_router_class": "twostroke.cluster.deployments.replica_router:ReplicaByPeer"},
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 10.0,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": grace_s + ENDING_S,
        "max_constructor_retry_count": 2,
        "logging_config": {"enable_access_log": False},
    }


class StageHost(RankProcesses):
    """The actor: has the processes of one stage's ranks on its node, which see its GPUs."""

    async def start(self, orders: Sequence[RankOrder]) -> None:
        """Start the ranks, which are reached at this node's address."""
        host = ray.util.get_node_ip_address()
        await super().start([msgspec.structs.replace(order, host=host) for order in orders])


class HostedStage:
    """StageRanks in the hands of an actor."""

    def __init__(self, stage: int, actor: Any):
        self._stage = stage
        self._actor = actor

    async def start(self, orders: Sequence[RankOrder]) -> None:
        try:
            await self._actor.start.remote(list(orders))
        except RayError as error:
            raise WorkerLost(f"stage {self._stage} can't be started: {_first_line(error)}") from error

    async def ended(self) -> str:
        try:
            reason: str = await self._actor.ended.remote()
        except RayError as error:  # its process or its node is gone
            return f"stage {self._stage} is lost: {_first_line(error)}"
        return reason

    async def close(self) -> None:
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(2 * PATIENCE_S):
                await self._actor.close.remote()
        ray.kill(self._actor)


def host_stages(settings: WorkerSettings) -> list[HostedStage] | None:
    """Return the hosts of the calling replica's stages behind the first; None where it has one stage."""
    if not settings.parallel.has_stages:
        return None
    resources, group = stage_resources(settings), ray.util.get_current_placement_group()
    host = ray.remote(StageHost)
    return [
        HostedStage(
            stage,
            host.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, stage),
            ).remote(),
        )
        for stage in range(1, settings.parallel.stages)
    ]


def stage_resources(settings: WorkerSettings) -> dict[str, float]:
    """The cores and GPUs of a stage's ranks, by Ray's names."""
    ranks = settings.parallel.tensor_ranks
    resources = {"CPU": float(ranks * settings.threads), "GPU": ranks * settings.resources.gpus}
    return {name: amount for name, amount in resources.items() if amount}


def placement_options(settings: WorkerSettings, placement: Placement) -> dict[str, Any]:
    """Serve's options for where a worker's stages are; none where it has one, whose actor says it."""
    if not settings.parallel.has_stages:
        return {}
    bundle = {**stage_resources(settings), **placement.node_resources}
    options: dict[str, Any] = {
        "placement_group_bundles": [bundle] * settings.parallel.stages,
        "placement_group_strategy": "PACK",
    }
    if placement.node_labels:
        options["placement_group_bundle_label_selector"] = [dict(placement.node_labels)] * settings.parallel.stages
    return options


def _first_line(error: RayError) -> str:
    return str(error).strip().splitlines()[0]
