"""A worker's stages on several nodes: each but the first has an actor in its bundle of the replica's placement group.

Serve makes the group, of a bundle for each stage, packs it on as few nodes as it can, and removes it with the replica,
which is in the first bundle. The actors are the replica's own: when it ends, however it does, Ray ends them, and their
ranks end with them.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twostroke.cluster.config.sections import Placement
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.ranks.led_ranks import PATIENCE_S, RankProcesses
from twostroke.cluster.ranks.rank_parts import RankOrder
from twostroke.protocol.errors import WorkerLost


class StageHost:
    """The actor: has the processes of one stage's ranks on its node, which see its GPUs."""

    def __init__(self) -> None:
        self._ranks = RankProcesses()

    async def start(self, orders: Sequence[RankOrder]) -> None:
        """Start ranks as StageRanks.start does. They are reached at this node's address."""
        host = ray.util.get_node_ip_address()
        await self._ranks.start([msgspec.structs.replace(order, host=host) for order in orders])

    async def ended(self) -> str:
        """Wait as StageRanks.ended does."""
        return await self._ranks.ended()

    async def close(self) -> None:
        """Close as StageRanks.close does."""
        await self._ranks.close()


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
