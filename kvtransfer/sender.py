"""The prefill worker's side of KV transfer."""

import asyncio
import logging
from collections.abc import Sequence

from kvtransfer.chunk_plan import ChunkPlan
from kvtransfer.config import TransferConfig
from kvtransfer.digest import Digester
from kvtransfer.link import Transport
from kvtransfer.outgoing import OutgoingTransfer
from kvtransfer.sender_connection import SenderConnection
from kvtransfer.stats import TransferStats
from kvtransfer.store import KVStore
from protocol.clock import Clock
from protocol.network import Network
from protocol.tickets import Address, Peer, Ticket

logger = logging.getLogger(__name__)

__all__ = ["KVSender", "OutgoingTransfer"]


class KVSender:
    """Opens transfers, and keeps one connection and link for each decode worker they go to.

    The store and the transport stay their maker's: `close` lets go of them and closes neither.
    """

    def __init__(
        self,
        *,
        peer: Peer,
        store: KVStore,
        network: Network,
        transport: Transport,
        config: TransferConfig,
        clock: Clock,
    ):
        self._peer = peer
        self._store = store
        self._network = network
        self._transport = transport
        self._config = config
        self._clock = clock
        self._digester = Digester()
        self._connections: dict[tuple[Peer, Address], SenderConnection] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order, so that a simulation replays exactly
        self.stats = TransferStats()

    def open(
        self, ticket: Ticket, num_tokens: int, block_ids: Sequence[int], num_ready_tokens: int
    ) -> OutgoingTransfer:
        """Begin a transfer of the KV of `num_tokens` tokens; never waits, and needs a running event loop.

        `block_ids` is the request's block table, which must cover the tokens. KV of the first `num_ready_tokens`
        tokens is in these blocks already, in all layers. A ticket that names another prefill worker fails the
        transfer. Raises ValueError where tokens and blocks don't fit.
        """
        if not 0 <= num_ready_tokens <= num_tokens or num_tokens < 1:
            raise ValueError(f"{num_ready_tokens} tokens are ready of {num_tokens}")
        plan = ChunkPlan(
            num_layers=self._store.num_layers,
            num_tokens=num_tokens,
            block_size=self._store.block_size,
            num_ready_tokens=num_ready_tokens,
            max_run_blocks=max(1, self._config.max_chunk_bytes // self._store.block_bytes),
        )
        if plan.num_blocks > len(block_ids):
            raise ValueError(f"{num_tokens} tokens need {plan.num_blocks} blocks, not {len(block_ids)}")
        mine = ticket.prefill == self._peer
        connection = self._connection(ticket) if mine else self._new_connection(ticket)
        transfer = OutgoingTransfer(
            ticket, num_tokens, block_ids[: plan.num_blocks], plan, connection, self._config, self._clock
        )
        self.stats.in_flight += 1
        if mine:
            connection.add(transfer)
        else:  # nobody connects to an address out of another worker's ticket
            transfer.peer_aborted(f"the ticket is made out to {ticket.prefill}, and this is {self._peer}")
        return transfer

    async def close(self) -> None:
        """End every transfer and connection, and wait until no block is read any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in tuple(self._connections.values()):  # those whose task was cancelled before its first step
            connection.abandon("the prefill worker is closing")
        self._connections.clear()
        self._digester.close()

    def _connection(self, ticket: Ticket) -> SenderConnection:
        """The connection to the ticket's decode worker, begun where there is none."""
        key = ticket.decode, ticket.decode_address
        connection = self._connections.get(key)
        if connection is None:
            connection = self._connections[key] = self._new_connection(ticket)
            task = asyncio.get_running_loop().create_task(connection.run(), name=f"kv to {ticket.decode.worker_id}")
            self._tasks[task] = None
            task.add_done_callback(self._ended)
        return connection

    def _new_connection(self, ticket: Ticket) -> SenderConnection:
        return SenderConnection(
            peer=self._peer,
            decode=ticket.decode,
            address=ticket.decode_address,
            store=self._store,
            network=self._network,
            transport=self._transport,
            config=self._config,
            clock=self._clock,
            digester=self._digester,
            stats=self.stats,
            on_lost=self._forget,
        )

    def _forget(self, connection: SenderConnection) -> None:
        """A lost connection takes no more transfers; the next one opened builds another."""
        key = connection.decode, connection.address
        if self._connections.get(key) is connection:
            del self._connections[key]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)
