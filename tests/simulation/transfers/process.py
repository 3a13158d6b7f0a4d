"""One worker of a simulation of transfers: for each of its ranks a store, a pool, a KVSender and a KVReceiver."""

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from tests.simulation.fake_store import FakeStore, SpoilingPool, fake_layout
from tests.simulation.memory_network import MemoryFabric, MemoryNetwork
from tests.simulation.memory_transport import LinkFabric, MemoryTransport, memory_transports
from tests.simulation.transfers.plan import LEASE_S, PROGRESS_S, Plan
from tests.simulation.virtual_loop import PROCESS
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.transports import Transports
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import Address, Peer

SECRET = b"the simulation's secret"
NUM_BLOCKS = 64
MAX_PENDING_OFFERS = 4


@dataclass(frozen=True)
class Rank:
    """One rank of a worker."""

    store: FakeStore
    pool: SpoilingPool
    network: MemoryNetwork
    transports: Transports
    sender: KVSender
    receiver: KVReceiver


class Process:
    """One incarnation of a worker. All its tasks run in its own context, so that it can be stopped and continued."""

    def __init__(self, plan: Plan, number: int, epoch: int, fabric: MemoryFabric, links: LinkFabric):
        self.number = number
        self.host = f"worker-{number}"
        self.peer = Peer(self.host, epoch)
        self.name = f"{self.host} of epoch {epoch}"
        self.is_dead = False
        self.links_left = 0  # after its end: links that nobody has closed
        self.addresses: tuple[Address, ...] = ()
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self._context = Context()
        self._context.run(PROCESS.set, self.name)
        worker = plan.workers[number]
        layout = fake_layout(
            num_layers=plan.num_layers,
            block_size=worker.block_size,
            tp_size=worker.tp_size,
            num_kv_heads=plan.num_kv_heads,
        )
        config = TransferConfig(
            lease_s=LEASE_S,
            progress_s=PROGRESS_S,
            max_chunk_bytes=worker.max_chunk_bytes,
            max_pending_offers=MAX_PENDING_OFFERS,
        )
        self.ranks = tuple(
            self._make_rank(layout, rank, config, plan.links_from, fabric, links) for rank in range(worker.tp_size)
        )

    def _make_rank(
        self,
        layout: KVLayout,
        rank: int,
        config: TransferConfig,
        kinds: tuple[str, ...],
        fabric: MemoryFabric,
        links: LinkFabric,
    ) -> Rank:
        store = FakeStore(layout, num_blocks=NUM_BLOCKS, rank=rank)
        # A process that is started again listens where its forerunner did.
        network = fabric.at(self.host, port=1000 + 10 * self.number + rank)
        transports = memory_transports(links, self.host, store, kinds)
        clock = asyncio.get_running_loop().time
        return Rank(
            store,
            SpoilingPool(store),
            network,
            transports,
            KVSender(peer=self.peer, store=store, network=network, transports=transports, config=config, clock=clock),
            KVReceiver(
                peer=self.peer,
                store=store,
                network=network,
                transports=transports,
                config=config,
                clock=clock,
                secret=SECRET,
            ),
        )

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> "asyncio.Task[Any]":
        """Run a task in this process."""
        task = asyncio.get_running_loop().create_task(work, name=f"{name} at {self.name}", context=self._context.copy())
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done, None))
        return task

    async def start(self) -> None:
        """Listen."""
        for rank in self.ranks:
            self.addresses += await self.spawn(rank.receiver.start(self.host), "start")

    async def close(self) -> None:
        """End everything that this process has."""
        for rank in self.ranks:
            await self.spawn(rank.sender.close(), "close")
            await self.spawn(rank.receiver.close(), "close")
            for transport in rank.transports.by_name.values():
                if isinstance(transport, MemoryTransport):
                    self.links_left += len(transport.open_links)
            await rank.transports.close()
