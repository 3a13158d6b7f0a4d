"""Rank 0's end of the connections to the other ranks of its worker. No torch here, and no KV transfer.

The ranks stand and fall together: the first one that is lost, or fails, is the end of all, for good.
"""

import asyncio
import logging
from collections.abc import Callable

from twostroke.protocol.errors import ConnectionLost, WorkerLost
from twostroke.protocol.messages import Refuse
from twostroke.protocol.network import Connection, Listener, Network
from twostroke.protocol.rank_messages import RankFailed, RankHello, RankLoaded, RankMessage, TransferEnded
from twostroke.protocol.tickets import Address, Peer

_log = logging.getLogger(__name__)


class RankConnections:
    """Waits for the ranks, tells them all the same, and hears of their transfers and of their end."""

    def __init__(self, *, worker: Peer, size: int, network: Network):
        """`size` counts rank 0, which is here. Needs a running event loop."""
        self._worker = worker
        self._size = size
        self._network = network
        self._listener: Listener | None = None
        self._connections: dict[int, Connection] = {}
        self._addresses: dict[int, Address] = {}
        self._all_loaded = asyncio.Event()
        self._is_closing = False
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, once the ranks can't be relied on any more."""
        self._watchers: list[Callable[[int, TransferEnded], None]] = []
        self._numbers = 0

    @property
    def others(self) -> range:
        """All ranks but 0."""
        return range(1, self._size)

    @property
    def loss(self) -> str | None:
        """Why the ranks can't be relied on any more; None while they can."""
        return self.lost.result() if self.lost.done() else None

    def new_number(self) -> int:
        """One that no transfer of this worker has had."""
        self._numbers += 1
        return self._numbers

    def watch(self, on_ended: Callable[[int, TransferEnded], None]) -> None:
        """Call `on_ended` with the rank whose part of a transfer has ended, of every transfer."""
        self._watchers.append(on_ended)

    async def listen(self, host: str) -> Address:
        """Where the ranks are to connect. Raises ConnectionLost where `host` can't be listened on."""
        self._listener = await self._network.listen(host, self._serve)
        return self._listener.address

    async def loaded(self) -> tuple[Address, ...]:
        """Wait until every rank has loaded; where they listen for KV, in order. Raises WorkerLost."""
        loading = asyncio.ensure_future(self._all_loaded.wait())
        try:
            await asyncio.wait((loading, self.lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            loading.cancel()
        self.check()
        return tuple(self._addresses[rank] for rank in self.others)

    def check(self) -> None:
        """Raises WorkerLost where a rank is lost."""
        if self.loss is not None:
            raise WorkerLost(self.loss)

    def tell(self, message: RankMessage) -> None:
        """Send it to every rank; never waits. A lost rank is told of by `lost` alone."""
        for rank, connection in self._connections.items():
            try:
                connection.send(message)
            except ConnectionLost as error:
                self.fail(f"rank {rank} is lost: {error}")

    def fail(self, reason: str) -> None:
        """The ranks can't be relied on any more. Only the first reason counts."""
        if not self.lost.done():
            if not self._is_closing:
                _log.error("the ranks of worker %s end: %s", self._worker.worker_id, reason)
            self.lost.set_result(reason)

    async def close(self) -> None:
        """Close all connections, whereupon the ranks end."""
        self._is_closing = True
        self.fail("the worker is ending")
        if self._listener is not None:
            await self._listener.close()

    async def _serve(self, connection: Connection) -> None:
        rank = 0
        try:
            hello = await connection.receive()
            if not isinstance(hello, RankHello) or not self._is_awaited(hello):
                connection.send(Refuse("this is no rank that is waited for"))
                return
            rank = hello.rank
            self._connections[rank] = connection
            while True:
                self._handle(rank, await connection.receive())
        except ConnectionLost as error:
            if rank:
                self.fail(f"rank {rank} is lost: {error}")
        finally:
            if self._connections.get(rank) is connection:
                del self._connections[rank]

    def _is_awaited(self, hello: RankHello) -> bool:
        return hello.worker == self._worker and hello.rank in self.others and hello.rank not in self._connections

    def _handle(self, rank: int, message: object) -> None:
        match message:
            case RankLoaded(transfer_address):
                self._addresses[rank] = transfer_address
                if len(self._addresses) == len(self.others):
                    self._all_loaded.set()
            case TransferEnded():
                for on_ended in self._watchers:
                    on_ended(rank, message)
            case RankFailed(reason):
                self.fail(f"rank {rank} failed: {reason}")
            case _:
                raise ConnectionLost(f"a rank must not send {type(message).__name__}")
