"""The other ranks of a worker, as its rank 0 has them: started, connected, and ended again.

All ranks of a worker run on one machine, and talk over its loopback interface: only KV goes further.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.model.parallel.ranked_engine import RankConnections
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Address, Peer

if TYPE_CHECKING:
    from twostroke.model.parallel.tensor_parallel import RankPlace, Rendezvous


LOOPBACK = "127.0.0.1"


class RankOrder(msgspec.Struct, frozen=True):
    """What a rank's process is told."""

    worker: Peer
    rank: int
    leader: Address  # where rank 0 waits for its connection
    rendezvous: Address  # where the group forms
    host: str  # where it listens for KV
    secret: bytes
    settings: WorkerSettings


class StartedRanks(Protocol):
    """The processes of some ranks: plain ones (rank_process.py), or Ray's actors (tensor_parallel_ranks.py)."""

    async def close(self) -> None:
        """Wait for all of them to end, since rank 0 has hung up; kill those that don't."""


StartRanks = Callable[[Sequence[RankOrder], Callable[[str], None]], Awaitable[StartedRanks]]
"""Starts a process for each order, and calls back with the reason when the first of them has ended."""


class LedRanks:
    """Owns the ranks' processes, the connections with them, and the place where their group forms."""

    def __init__(self, connections: RankConnections, rendezvous: "Rendezvous", processes: StartedRanks):
        self.connections = connections
        self.processes = processes
        self._rendezvous: Rendezvous | None = rendezvous

    @classmethod
    async def start(
        cls,
        settings: WorkerSettings,
        worker: Peer,
        network: Network,
        secret: bytes,
        *,
        host: str,
        start_ranks: StartRanks,
    ) -> "LedRanks":
        """Start a process for every rank but 0; they load as soon as rank 0 does. Raises ConnectionLost."""
        from twostroke.model.parallel.tensor_parallel import Rendezvous

        connections = RankConnections(worker=worker, size=settings.tensor_parallel, network=network)
        rendezvous = Rendezvous(LOOPBACK)
        leader = await connections.listen(LOOPBACK)
        orders = [
            RankOrder(worker, rank, leader, rendezvous.address, host, secret, settings) for rank in connections.others
        ]
        try:
            return cls(connections, rendezvous, await start_ranks(orders, connections.fail))
        except BaseException:
            await connections.close()
            raise

    @property
    def place(self) -> "RankPlace":
        """Of rank 0 in the group. Raises RuntimeError once closed."""
        from twostroke.model.parallel.tensor_parallel import RankPlace

        if self._rendezvous is None:
            raise RuntimeError("the ranks have been ended")
        return RankPlace(0, self._rendezvous.address)

    async def close(self) -> None:
        """Hang up, and return when all processes have ended. May be called more than once."""
        await self.connections.close()
        self._rendezvous = None  # whoever still waits there for others is refused
        await self.processes.close()
