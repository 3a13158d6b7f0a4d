"""Rank 0's hold on the other ranks of its worker: their processes, the connections with them, the place of their group.

The ranks of one stage are processes of one machine. Those of rank 0's stage are started here, so they have its
environment: Ray gives it the cores and GPUs of all of them. Those of other stages are started by whoever is there for
them, on their own node (cluster/deployments/workers.py).

With one stage, ranks talk over the loopback interface, and only KV goes further. With several they reach each other at
their nodes' addresses. The place where their group forms asks for no secret. It is bound to rank 0's address alone, on
a port that is drawn, and on CPUs closed once all have loaded: who reaches it before can keep the group from forming, or
lead its connections elsewhere. NCCL asks there again for later connections, so on GPUs it stays.
"""

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.ranks.rank_parts import RankOrder
from twostroke.model.parallel.ranked_engine import RankConnections
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Peer
from twostroke.protocol.settings import to_plain

if TYPE_CHECKING:
    from twostroke.model.parallel.tensor_parallel import Rendezvous

LOOPBACK = "127.0.0.1"
PATIENCE_S = 6.0
"""Seconds that a rank gets to end after rank 0 has hung up."""


class StageRanks(Protocol):
    """Some ranks of one worker, wherever their processes are."""

    async def start(self, orders: Sequence[RankOrder]) -> None:
        """Start a process for each; they load at once. Raises WorkerLost where that can't be."""

    async def ended(self) -> str:
        """Wait for the first of them that ends; returns what is to be said of it."""

    async def close(self) -> None:
        """Return once all have ended, whom rank 0 has hung up on; kill those that don't. Any number of times."""


class RankProcesses:
    """StageRanks on this machine. They end with their connection to rank 0, or with this process."""

    def __init__(self) -> None:
        self.processes: list[asyncio.subprocess.Process] = []
        """All of them, ended ones included."""
        self._watches: list[asyncio.Task[str]] = []

    async def start(self, orders: Sequence[RankOrder]) -> None:
        for order in orders:
            await self._start(order)

    async def ended(self) -> str:
        done, _ = await asyncio.wait(self._watches, return_when=asyncio.FIRST_COMPLETED)
        return next(iter(done)).result()

    async def close(self) -> None:
        if not self._watches:
            return
        _, left = await asyncio.wait(self._watches, timeout=PATIENCE_S)
        if left:
            for process in self.processes:
                if process.returncode is None:
                    process.kill()
            await asyncio.wait(left)

    async def _start(self, order: RankOrder) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "twostroke.cluster.ranks.rank_process", stdin=asyncio.subprocess.PIPE, stdout=2
        )
        self.processes.append(process)
        self._watches.append(asyncio.create_task(_watch(order.rank, process), name=f"rank {order.rank}"))
        if process.stdin is not None:
            # Not on its command line, which everybody can read: the order holds the cluster's secret. The pipe stays
            # open for as long as this process lives.
            process.stdin.write(msgspec.json.encode(order, enc_hook=to_plain) + b"\n")


async def _watch(rank: int, process: asyncio.subprocess.Process) -> str:
    return f"rank {rank} has ended with code {await process.wait()}"


class LedRanks:
    """Owns the connections with the other ranks, the place where their group forms, and whoever started them."""

    def __init__(self, connections: RankConnections, rendezvous: "Rendezvous", host: str | None):
        """`host` as RankPlace.host."""
        from twostroke.model.parallel.tensor_parallel import RankPlace

        self.connections = connections
        self.place = RankPlace(0, rendezvous.address, host)
        """Place of rank 0 in the group."""
        self.own = RankProcesses()
        """Processes of rank 0's stage, and of all stages where no others start them."""
        self._rendezvous: Rendezvous | None = rendezvous
        self._stages: list[StageRanks] = []
        self._watches: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls,
        settings: WorkerSettings,
        worker: Peer,
        network: Network,
        secret: bytes,
        *,
        host: str,
        stages: Sequence[StageRanks] | None = None,
    ) -> "LedRanks":
        """Have a process started for every rank but 0; they load as soon as rank 0 does.

        `host` and `stages` as for load_parts. Raises ConnectionLost and WorkerLost.
        """
        from twostroke.model.parallel.tensor_parallel import Rendezvous

        has_stages = settings.parallel.has_stages
        own_host = host if has_stages else LOOPBACK
        connections = RankConnections(worker=worker, size=settings.parallel.num_ranks, network=network)
        led = cls(connections, Rendezvous(own_host), host if has_stages else None)
        try:
            leader = await connections.listen(own_host)
            orders = [
                RankOrder(worker, rank, leader, led.place.rendezvous, host, secret, settings)
                for rank in connections.others
            ]
            if stages is None:
                await led._start([(led.own, orders)])
            else:
                of_stages = [
                    [order for order in orders if order.rank // settings.parallel.tensor_ranks == stage]
                    for stage in range(settings.parallel.stages)
                ]
                await led._start([*zip((led.own, *stages), of_stages, strict=True)])
        except BaseException:
            await led.close()
            raise
        return led

    def has_formed(self) -> None:
        """The ranks have found each other, and ask nowhere for that any more."""
        self._rendezvous = None

    async def close(self) -> None:
        """Hang up, and return when all processes have ended; kill those that don't. May be called more than once."""
        await self.connections.close()
        self._rendezvous = None  # whoever still waits there for others is refused
        await asyncio.gather(*(stage.close() for stage in self._stages))
        if self._watches:
            await asyncio.wait(self._watches)

    async def _start(self, parts: Sequence[tuple[StageRanks, Sequence[RankOrder]]]) -> None:
        parts = [(stage, orders) for stage, orders in parts if orders]
        self._stages = [stage for stage, _ in parts]
        await asyncio.gather(*(stage.start(orders) for stage, orders in parts))
        self._watches = [asyncio.create_task(self._watch(stage), name="a stage's ranks") for stage in self._stages]

    async def _watch(self, stage: StageRanks) -> None:
        self.connections.fail(await stage.ended())
