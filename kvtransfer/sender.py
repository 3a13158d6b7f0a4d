"""The sending side of KV transfer."""

import asyncio
import logging
from collections.abc import Sequence

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.endings import all_ended, finish
from twostroke.kvtransfer.layout import Lane, plan_lanes
from twostroke.kvtransfer.outgoing import OutgoingTransfer
from twostroke.kvtransfer.sender_connection import LinkReport, SenderConnection
from twostroke.kvtransfer.stats import TransferStats
from twostroke.kvtransfer.store import KVStore
from twostroke.kvtransfer.transports import Transports
from twostroke.kvtransfer.used_tickets import UsedTickets
from twostroke.protocol.clock import Clock
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Address, Peer, Ticket

logger = logging.getLogger(__name__)

__all__ = ["KVSender", "LinkReport", "OutgoingTransfer"]


class KVSender:
    """Opens transfers, and keeps one connection for each rank of each worker that this rank sends to.

    The store and the transports stay their maker's: `close` lets go of them and closes neither.
    """

    def __init__(
        self,
        *,
        peer: Peer,
        store: KVStore,
        network: Network,
        transports: Transports,
        config: TransferConfig,
        clock: Clock,
    ):
        self._peer = peer
        self._store = store
        self._network = network
        self._transports = transports
        self._config = config
        self._clock = clock
        self._connections: dict[tuple[Peer, Address], SenderConnection] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}  # in order, so that a simulation replays exactly
        self._transfers: dict[OutgoingTransfer, None] = {}
        self._opened_tickets = UsedTickets(clock, config.used_ticket_s, config.max_used_tickets)
        self.stats = TransferStats()

    def open(
        self, ticket: Ticket, num_tokens: int, block_ids: Sequence[int], num_ready_tokens: int
    ) -> OutgoingTransfer:
        """Begin a transfer of the KV of `num_tokens` tokens; never waits, and needs a running event loop.

        `block_ids` is the request's block table, which must cover the tokens. KV of the first `num_ready_tokens`
        tokens is in these blocks already, in all layers. A ticket that names another source, or was used, fails the
        transfer. Raises ValueError where tokens and blocks don't fit.
        """
        if not 0 <= num_ready_tokens <= num_tokens or num_tokens < 1:
            raise ValueError(f"{num_ready_tokens} tokens are ready of {num_tokens}")
        num_blocks = -(-num_tokens // self._store.layout.block_size)
        if num_blocks > len(block_ids):
            raise ValueError(f"{num_tokens} tokens need {num_blocks} blocks, not {len(block_ids)}")
        transfer = OutgoingTransfer(
            ticket,
            num_tokens,
            tuple(block_ids[:num_blocks]),
            num_ready_tokens,
            num_layers=self._store.layout.num_layers,
            on_ended=self._count,
            clock=self._clock,
            progress_s=self._config.progress_s,
        )
        self._transfers[transfer] = None
        self.stats.in_flight += 1
        try:
            lanes = self._lanes(ticket)
            if not self._opened_tickets.use(ticket.transfer_id):
                raise ValueError("the ticket was used before")
        except ValueError as error:  # nobody connects to an address out of another worker's ticket
            transfer.refuse(str(error))
            return transfer
        for lane in lanes:
            connection = self._connection(ticket, lane)
            connection.add(transfer.add_lane(connection))
        return transfer

    def decline(self, ticket: Ticket, reason: str) -> None:
        """Tell the ticket's target, where it can be reached, that nothing will come. Never waits.

        Raises ValueError for a ticket that names another source.
        """
        for lane in self._lanes(ticket):
            self._connection(ticket, lane).decline(ticket.transfer_id, reason)

    def links(self) -> tuple[LinkReport, ...]:
        """The links that stand, in the order in which their connections were made."""
        return tuple(link.report for link in self._connections.values() if link.report is not None)

    async def close(self) -> None:
        """End every transfer and connection, and wait until no block is read any more."""
        await finish(self._close())

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await all_ended(tuple(self._tasks))
        for connection in tuple(self._connections.values()):  # those whose task was cancelled before its first step
            connection.abandon("the source is closing")
        self._connections.clear()
        for transfer in tuple(self._transfers):  # those that no connection carries
            transfer.abort("the source is closing")

    def _lanes(self, ticket: Ticket) -> tuple[Lane, ...]:
        """Those of the ticket's transfer that begin at this rank. Raises ValueError where it can't be ours."""
        layout = self._store.layout
        if ticket.source != self._peer:
            raise ValueError(f"the ticket is made out to {ticket.source}, and this is {self._peer}")
        if ticket.source_ranks != layout.tp_size:
            raise ValueError(f"the ticket counts {ticket.source_ranks} ranks, and this worker has {layout.tp_size}")
        lanes = plan_lanes(layout.tp_size, len(ticket.target_addresses), layout.num_kv_heads)
        return tuple(lane for lane in lanes if lane.source_rank == self._store.rank)

    def _connection(self, ticket: Ticket, lane: Lane) -> SenderConnection:
        """The connection to the lane's end at the ticket's target, begun where there is none."""
        address = ticket.target_addresses[lane.target_rank]
        connection = self._connections.get((ticket.target, address))
        if connection is None:
            connection = self._connections[ticket.target, address] = SenderConnection(
                peer=self._peer,
                target=ticket.target,
                address=address,
                lane=lane,
                store=self._store,
                network=self._network,
                transports=self._transports,
                config=self._config,
                clock=self._clock,
                stats=self.stats,
                on_lost=self._forget,
            )
            task = asyncio.get_running_loop().create_task(connection.run(), name=f"kv to {ticket.target.worker_id}")
            self._tasks[task] = None
            task.add_done_callback(self._ended)
        return connection

    def _count(self, transfer: OutgoingTransfer) -> None:
        del self._transfers[transfer]
        self.stats.in_flight -= 1
        if transfer.is_released:
            self.stats.done += 1
            self.stats.seconds += self._clock() - transfer.started_s
        else:
            self.stats.failed += 1
            self.stats.given_up += transfer.is_given_up

    def _forget(self, connection: SenderConnection) -> None:
        """A lost connection takes no more transfers; the next one opened builds another."""
        key = connection.target, connection.address
        if self._connections.get(key) is connection:
            del self._connections[key]

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s failed", task.get_name(), exc_info=error)
