"""The ranks of a worker under Ray: actors in its replica's placement group, on one machine.

Ray places, starts and ends them. What rank 0 tells them goes over its own connection: never a Ray call per step.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twostroke.cluster.config.placement import Placement
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.ranks.led_ranks import RankOrder
from twostroke.protocol.errors import WorkerLost

PATIENCE_S = 6.0
"""How long a rank may take to end, once rank 0 has hung up."""

# Ray hides all GPUs but its own from an actor. NCCL then finds no way from one to the other but over the host.
_SIGHT_OF_ALL_GPUS = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}


def rank_options(settings: WorkerSettings, placement: Placement) -> dict[str, Any]:
    """Serve's options for where a worker's ranks run, each with its cores and its GPU. Rank 0 is the replica itself."""
    threads, gpus = settings.threads, settings.resources.num_gpus
    if settings.tensor_parallel == 1:
        return {"ray_actor_options": {"num_cpus": threads, "num_gpus": gpus, **placement.actor_options()}}
    bundle = {"CPU": threads} | ({"GPU": gpus} if gpus else {})
    own = dict(placement.node_resources)  # of the whole worker: all ranks are on rank 0's node
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": threads, "num_gpus": gpus, "runtime_env": _SIGHT_OF_ALL_GPUS},
        "placement_group_bundles": [bundle | own, *[bundle] * (settings.tensor_parallel - 1)],
        "placement_group_strategy": "STRICT_PACK",
    }
    if own:
        options["ray_actor_options"]["resources"] = own
    if placement.node_labels:
        options["placement_group_bundle_label_selector"] = [dict(placement.node_labels)] * settings.tensor_parallel
    return options


def own_gpu() -> int:
    """The number, among the GPUs in this process's sight, of the one that Ray has given to it; 0 where it has none."""
    if not ray.get_gpu_ids():
        return 0
    visible = ray.get_runtime_context().runtime_env.get("env_vars", {})
    return int(ray.get_gpu_ids()[0]) if _SIGHT_OF_ALL_GPUS["env_vars"].items() <= visible.items() else 0


@ray.remote(max_restarts=0)
class RankActor:
    """One rank's process."""

    async def run(self, order: RankOrder) -> None:
        """Be the rank until rank 0 hangs up."""
        from twostroke.cluster.ranks.rank_process import log_as_rank, run_rank

        log_as_rank(order)
        await run_rank(order, own_gpu())


class ActorRanks:
    """Implements StartedRanks with Ray's actors. They also end with this process, which owns them."""

    def __init__(self, orders: Sequence[RankOrder], on_ended: Callable[[str], None]):
        """Raises WorkerLost outside of a placement group."""
        group = get_current_placement_group()
        if group is None:
            raise WorkerLost("this replica has no placement group for its tensor-parallel ranks")
        self._actors: list[Any] = []
        self._watches: list[asyncio.Task[None]] = []
        for order in orders:
            settings = order.settings
            actor = RankActor.options(  # type: ignore[attr-defined]
                num_cpus=settings.threads,
                num_gpus=settings.resources.num_gpus,
                runtime_env=_SIGHT_OF_ALL_GPUS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, order.rank),
            ).remote()
            self._actors.append(actor)
            self._watches.append(asyncio.create_task(_watch(order.rank, actor.run.remote(order), on_ended)))

    async def close(self) -> None:
        """As StartedRanks.close."""
        await asyncio.wait(self._watches, timeout=PATIENCE_S)
        for actor in self._actors:
            ray.kill(actor)
        await asyncio.wait(self._watches)


async def _watch(rank: int, running: Any, on_ended: Callable[[str], None]) -> None:
    try:
        await running
    except RayError as error:
        on_ended(f"rank {rank} has died: {error}")
    else:
        on_ended(f"rank {rank} has ended")


async def start_actors(orders: Sequence[RankOrder], on_ended: Callable[[str], None]) -> ActorRanks:
    """A cluster.led_ranks.StartRanks."""
    return ActorRanks(orders, on_ended)
