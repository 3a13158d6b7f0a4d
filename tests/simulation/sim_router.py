"""A router replica as a process of a simulation: the real pipeline and token channels."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.blind_pulls import BlindPulls
from tests.simulation.memory_network import MemoryFabric
from tests.simulation.sim_fleet import SECRET, SimFleet, process_context, virtual_loop
from twostroke.protocol.blocks import ShortName
from twostroke.protocol.requests import Peer
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.generate.pipeline import Pipeline
from twostroke.router.slo.admission import Admission
from twostroke.router.slo.classes import SLOConfig

PROMISE_NOTHING = SLOConfig(admission=False)


class SimRouter:
    """Its requests' tasks run in its own context, so that it can be lost: it stands still from then on."""

    def __init__(
        self,
        index: int,
        fleet: SimFleet,
        fabric: MemoryFabric,
        config: PipelineConfig,
        slo: SLOConfig = PROMISE_NOTHING,
        *,
        blind_pulls: float = 0.0,
    ):
        self.host = f"router-{index}"
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = process_context(self.host)
        self._index = index
        self._fleet = fleet
        self._fabric = fabric
        self._blind_pulls = blind_pulls
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self.channels, self.admission, self.pipeline = self._context.run(self._make, config, slo)

    def _make(self, config: PipelineConfig, slo: SLOConfig) -> tuple[TokenChannels, Admission, Pipeline]:
        clock, peer = asyncio.get_running_loop().time, Peer(self.host, self._index + 1)
        channels = TokenChannels(network=self._fabric.at(self.host), peer=peer, clock=clock)
        admission = Admission(config=slo, stats=channels.stats, clock=clock)
        fleet = BlindPulls(
            self._fleet, channels, secret=SECRET, share=self._blind_pulls, draw=random.Random(f"pulls of {self._index}")
        )
        pipeline = Pipeline(
            fleet=fleet,
            channels=channels,
            secret=SECRET,
            clock=clock,
            router=peer,
            config=config,
            draw_id=_numbered(f"r{self._index}"),
            draw=random.Random(self._index).random,
            admit=admission.admit,
        )
        return channels, admission, pipeline

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a task in this process."""
        task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def lose(self) -> None:
        """Nothing of this process runs any more."""
        if not self.lost.done():
            self.lost.set_result(None)
            virtual_loop().stop_process(self.host)

    def known_blocks(self, worker: Peer) -> set[ShortName] | None:
        """What the worker has told of its cache, as this router has understood it; None where it has told nothing."""
        cached = self.pipeline._chooser._cached
        if cached is None or not self.channels.is_connected(worker) or worker not in cached._workers:
            return None
        bit = 1 << cached._workers[worker].column
        return {name for name, holders in cached._held.items() if holders & bit}

    async def ended(self) -> None:
        """Return when its requests' tasks have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """End what is left of it."""
        await self.spawn(self.channels.close())


def _numbered(prefix: str) -> Callable[[], str]:
    number = 0

    def draw() -> str:
        nonlocal number
        number += 1
        return f"{prefix}-{number}"

    return draw
