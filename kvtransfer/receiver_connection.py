"""One prefill worker's connection and link to this decode worker, with the transfers that came over them."""

import asyncio
from typing import Protocol

from kvtransfer.config import TransferConfig
from kvtransfer.digest import Digester
from kvtransfer.incoming import IncomingTransfer
from kvtransfer.leased_connection import LeasedConnection, run_until_lost, within
from kvtransfer.link import DataLink, PendingLink, Transport
from kvtransfer.stats import TransferStats
from kvtransfer.store import KVStore
from protocol.clock import Clock
from protocol.errors import ConnectionLost, ProtocolError
from protocol.messages import Abort, Chunk, Commit, Hello, Message, Offer, Ping, Refuse, Verified, Welcome
from protocol.network import Connection
from protocol.tickets import Peer


class OfferDesk(Protocol):
    """Whoever matches offers with the requests that expect them. Calls never wait."""

    def offered(self, connection: "ReceiverConnection", offer: Offer) -> None:
        """Grant, keep or refuse the offer."""

    def offer_withdrawn(self, connection: "ReceiverConnection", transfer_id: bytes) -> None:
        """The peer aborts a transfer that this connection does not carry: perhaps one that is only offered yet."""

    def connection_lost(self, connection: "ReceiverConnection") -> None:
        """Its offers are void."""


class ReceiverConnection:
    """Reads control messages as they come; a second task takes chunks and commits in order and moves the bytes.

    So a slow transfer holds up neither pings, nor offers, nor aborts behind it.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        peer: Peer,
        host: str,
        store: KVStore,
        transport: Transport,
        config: TransferConfig,
        clock: Clock,
        digester: Digester,
        stats: TransferStats,
        desk: OfferDesk,
    ):
        self.sender = Peer("", 0)  # until its Hello
        self.transfers: dict[bytes, IncomingTransfer] = {}
        self._connection = connection
        self._control = LeasedConnection(connection, clock, config.lease_s)
        self._peer = peer
        self._host = host
        self._store = store
        self._transport = transport
        self._config = config
        self._digester = digester
        self._stats = stats
        self._desk = desk
        self._queue: asyncio.Queue[Chunk | Commit] = asyncio.Queue(config.max_queued_messages)
        self._link: DataLink | None = None

    async def run(self) -> None:
        """Serve until the connection is lost or this is cancelled; then end every transfer left."""
        pending: PendingLink | None = None
        reason = "the decode worker is closing"
        try:
            hello = await within(self._config.lease_s, self._connection.receive(), "the prefill worker's hello")
            if not isinstance(hello, Hello):
                raise ProtocolError(f"a connection does not begin with {type(hello).__name__}")
            refusal = self._refusal(hello)
            if refusal is not None:
                self._connection.send(Refuse(refusal))
                await self._connection.drain()
                return
            self.sender = hello.sender
            pending = await self._transport.prepare(self._host)
            self._connection.send(Welcome(self._peer, pending.params))
            reason = await run_until_lost(self._listen(), self._receive(pending), self._control.watch())
        except ConnectionLost as lost:
            reason = str(lost)
        finally:
            if pending is not None:
                await pending.close()
            if self._link is not None:
                await self._link.close()
            self._desk.connection_lost(self)
            for transfer in tuple(self.transfers.values()):
                transfer.peer_lost(reason)

    def post(self, message: Message) -> None:
        """Send `message`, if the connection still stands; never waits."""
        self._control.post(message)

    def _refusal(self, hello: Hello) -> str | None:
        """Why this peer can't send us KV, if so; with both sides' values."""
        if hello.receiver != self._peer:
            return f"you look for {_name(hello.receiver)}, and this is {_name(self._peer)}"
        if hello.fingerprint != self._store.fingerprint:
            return f"your KV layout is {hello.fingerprint}, and ours is {self._store.fingerprint}"
        if hello.transport != self._transport.name:
            return f"your transport is {hello.transport}, and ours is {self._transport.name}"
        return None

    async def _listen(self) -> None:
        while True:
            message = await self._control.receive()
            match message:
                case Ping():
                    pass
                case Offer():
                    self._desk.offered(self, message)
                case Chunk() | Commit():
                    try:
                        self._queue.put_nowait(message)
                    except asyncio.QueueFull as error:
                        raise ProtocolError("the prefill worker runs ahead of its bytes") from error
                case Abort(transfer_id=transfer_id, reason=reason):
                    if (transfer := self.transfers.get(transfer_id)) is not None:
                        transfer.peer_aborted(f"the prefill worker gave up: {reason}")
                    else:
                        self._desk.offer_withdrawn(self, transfer_id)
                case _:
                    raise ProtocolError(f"a prefill worker does not send {type(message).__name__}")

    async def _receive(self, pending: PendingLink) -> None:
        self._link = await pending.established()
        while True:
            message = await self._queue.get()
            transfer = self.transfers.get(message.transfer_id)
            if isinstance(message, Chunk):
                await self._receive_chunk(self._link, message, transfer)
            elif transfer is not None and transfer.commit(message):
                self._control.post(Verified(message.transfer_id))

    async def _receive_chunk(self, link: DataLink, chunk: Chunk, transfer: IncomingTransfer | None) -> None:
        if not 0 < chunk.num_bytes <= self._store.num_blocks * self._store.block_bytes:
            raise ProtocolError(f"a chunk of {chunk.num_bytes} bytes can't be")
        blocks = transfer.begin_chunk(chunk) if transfer is not None else None
        if transfer is None or blocks is None:
            await within(self._config.lease_s, link.discard(chunk.num_bytes), "discarding a chunk")
            return
        await within(self._config.lease_s, link.receive(chunk.layer, blocks), "receiving a chunk")
        is_intact = await self._digester.digest(self._store, chunk.layer, blocks) == chunk.digest
        self._stats.bytes += chunk.num_bytes
        self._stats.digest_failures += not is_intact
        transfer.end_chunk(chunk, is_intact=is_intact)


def _name(peer: Peer) -> str:
    return f"{peer.worker_id} of epoch {peer.epoch:x}"
