"""A router as a process of a simulation: everything of it but HTTP, on the simulated network."""

import asyncio
import random
from collections.abc import Callable

from tests.rigs.delegate import Delegate
from tests.simulation.memory_network import MemoryFabric
from tests.simulation.sim_fleet import SECRET, SimFleet
from tests.simulation.virtual_loop import VirtualProcess, virtual_loop
from twostroke.protocol.blocks import ShortName
from twostroke.protocol.messages import SendPrefix
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply, Ticket, mint_ticket
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.fleet import Fleet
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.generate.pipeline import Pipeline
from twostroke.router.slo.admission import Admission
from twostroke.router.slo.classes import SLOConfig


class BlindPulls(Delegate):
    """A `Fleet` in which a share of the prompts that decode workers read alone are pulled from others.

    Mostly from one that has been sent the same beginning, whatever has become of it there. `secret` signs the tickets.
    What a router's own index finds is pulled as ever.
    """

    def __init__(self, fleet: Fleet, channels: TokenChannels, *, secret: bytes, share: float, draw: random.Random):
        super().__init__(fleet)
        self._channels = channels
        self._secret = secret
        self._share = share
        self._draw = draw
        self._readers: dict[tuple[bytes, tuple[int, ...]], list[Peer]] = {}  # by salt and the prompt's beginning

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        self._reads(worker, request)
        return await self._inner.prefill(worker, request, ticket, pull)

    async def decode(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> DecodeReply:
        if ticket is None and pull is None and self._draw.random() < self._share:
            pull = self._ask(worker, request)
        self._reads(worker, request)
        return await self._inner.decode(worker, request, ticket, pull)

    def _reads(self, worker: Peer, request: GenerateRequest) -> None:
        self._readers.setdefault(_beginning(request), []).append(worker)

    def _ask(self, worker: Peer, request: GenerateRequest) -> Ticket | None:
        infos = self._inner.workers()
        target = next((info for info in infos if info.peer == worker), None)
        others = [info for info in infos if info.peer != worker and self._channels.is_connected(info.peer)]
        if target is None or not others:
            return None
        readers = self._readers.get(_beginning(request), ())
        source = self._draw.choice([info for info in others if info.peer in readers] or others)
        ticket = mint_ticket(
            self._secret,
            request.request_id,
            source.peer,
            target.peer,
            target.transfer_addresses,
            source_ranks=source.layout.tp_size,
        )
        self._channels.send(source.peer, SendPrefix(ticket, request.token_ids, request.cache_salt))
        return ticket


def _beginning(request: GenerateRequest) -> tuple[bytes, tuple[int, ...]]:
    return request.cache_salt, request.token_ids[:8]


PROMISE_NOTHING = SLOConfig(admission=False)


class SimRouter(VirtualProcess):
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
        super().__init__(self.host)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._index = index
        self._fleet = fleet
        self._fabric = fabric
        self._blind_pulls = blind_pulls
        self.channels, self.admission, self.pipeline = self.context.run(self._make, config, slo)

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
