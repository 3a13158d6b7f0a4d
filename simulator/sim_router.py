"""A router as a process of a simulation: everything of it but HTTP, on the simulated network."""

import asyncio
import random
from collections.abc import Callable

from twostroke.protocol.requests import Peer
from twostroke.router.fleet import Fleet
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.generate.pipeline import FleetKnowledge, Pipeline
from twostroke.router.slo.admission import Admission
from twostroke.router.slo.classes import SLOConfig
from twostroke.router.token_channels import TokenChannels
from twostroke.simulator.memory_network import MemoryFabric
from twostroke.simulator.sim_fleet import SECRET
from twostroke.simulator.virtual_loop import VirtualProcess, virtual_loop

PROMISE_NOTHING = SLOConfig(admission=False)


class SimRouter(VirtualProcess):
    """Its requests' tasks run in its own context, so that it can be lost: it stands still from then on."""

    def __init__(
        self,
        index: int,
        fleet: Fleet,
        fabric: MemoryFabric,
        config: PipelineConfig,
        slo: SLOConfig = PROMISE_NOTHING,
    ):
        self.host = f"router-{index}"
        super().__init__(self.host)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._index = index
        self._fleet = fleet
        self._fabric = fabric
        self.channels, self.admission, self.pipeline = self.context.run(self._make, config, slo)

    def _make(self, config: PipelineConfig, slo: SLOConfig) -> tuple[TokenChannels, Admission, Pipeline]:
        clock, peer = asyncio.get_running_loop().time, Peer(self.host, self._index + 1)
        knowledge = FleetKnowledge(network=self._fabric.at(self.host), router=peer, clock=clock, config=config)
        channels = knowledge.channels
        admission = Admission(config=slo, stats=channels.stats, clock=clock)
        pipeline = Pipeline(
            fleet=self._reach(channels),
            knowledge=knowledge,
            secret=SECRET,
            draw_id=_numbered(f"r{self._index}"),
            draw=random.Random(self._index).random,
            admit=admission.admit,
        )
        return channels, admission, pipeline

    def _reach(self, channels: TokenChannels) -> Fleet:
        """The workers, as this router reaches them."""
        return self._fleet

    def lose(self) -> None:
        """Nothing of this process runs any more."""
        if not self.lost.done():
            self.lost.set_result(None)
            virtual_loop().stop_process(self.host)

    async def ended(self) -> None:
        """Return when its requests' tasks have ended."""
        await asyncio.gather(*self.tasks, return_exceptions=True)

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
