"""The connection and link from one prefill worker to one decode worker, shared by all transfers between them."""

import asyncio
from collections.abc import Callable

from kvtransfer.config import TransferConfig
from kvtransfer.digest import Digester
from kvtransfer.leased_connection import LeasedConnection, run_until_lost, within
from kvtransfer.lifecycle import IllegalTransition, SenderState
from kvtransfer.link import DataLink, Transport
from kvtransfer.outgoing import OutgoingTransfer
from kvtransfer.stats import TransferStats
from kvtransfer.store import KVStore
from protocol.clock import Clock
from protocol.errors import ConnectionLost, ProtocolError
from protocol.messages import Abort, Chunk, Commit, Grant, Hello, Message, Offer, Ping, Refuse, Verified, Welcome
from protocol.network import Connection, Network
from protocol.tickets import Address, Peer


class SenderConnection:
    """Owns the control connection, the link and the transfers on them; all end together.

    Chunks of several transfers take turns on the link. A chunk's message goes out just before its bytes, so both
    streams stay in step whatever is aborted in between.
    """

    def __init__(
        self,
        *,
        peer: Peer,
        decode: Peer,
        address: Address,
        store: KVStore,
        network: Network,
        transport: Transport,
        config: TransferConfig,
        clock: Clock,
        digester: Digester,
        stats: TransferStats,
        on_lost: Callable[["SenderConnection"], None],
    ):
        self.decode = decode
        self.address = address
        self._peer = peer
        self._store = store
        self._network = network
        self._transport = transport
        self._config = config
        self._clock = clock
        self._digester = digester
        self._stats = stats
        self._on_lost = on_lost
        self._transfers: dict[bytes, OutgoingTransfer] = {}
        self._ready: dict[bytes, OutgoingTransfer] = {}  # those that may have something to send, in turn
        self._work = asyncio.Event()
        self._control: LeasedConnection | None = None  # set once the peer has welcomed us
        self._link: DataLink | None = None

    def add(self, transfer: OutgoingTransfer) -> None:
        """Offer `transfer`, now or once the connection stands."""
        self._transfers[transfer.ticket.transfer_id] = transfer
        if self._control is not None:
            self._offer(self._control, transfer)

    async def run(self) -> None:
        """Connect and serve until the connection is lost or this is cancelled; then end every transfer left."""
        connection: Connection | None = None
        reason = "the prefill worker is closing"
        try:
            connection = await within(
                self._config.lease_s, self._network.connect(self.address), "connecting to the decode worker"
            )
            welcome = await within(self._config.lease_s, self._greet(connection), "the decode worker's welcome")
            control = self._control = LeasedConnection(connection, self._clock, self._config.lease_s)
            for transfer in tuple(self._transfers.values()):
                self._offer(control, transfer)
            reason = await run_until_lost(self._listen(control), self._send(control, welcome), control.watch())
        except ConnectionLost as lost:
            reason = str(lost)
        finally:
            self._on_lost(self)
            self._control = None
            if self._link is not None:
                await self._link.close()
            if connection is not None:
                await connection.close()
            self.abandon(reason)

    def abandon(self, reason: str) -> None:
        """End every transfer left. Only where `run` has ended, or never began: nothing is under way."""
        for transfer in tuple(self._transfers.values()):
            transfer.peer_lost(reason)

    # --- the transfers' calls (OutgoingObserver) ---

    def has_work(self, transfer: OutgoingTransfer) -> None:
        if transfer.state is SenderState.GRANTED:
            self._ready[transfer.ticket.transfer_id] = transfer
            self._work.set()

    def gave_up(self, transfer: OutgoingTransfer, reason: str) -> None:
        if self._control is not None and transfer.state is not SenderState.OFFERING:
            self._control.post(Abort(transfer.ticket.transfer_id, reason))

    def ended(self, transfer: OutgoingTransfer) -> None:
        self._transfers.pop(transfer.ticket.transfer_id, None)
        self._ready.pop(transfer.ticket.transfer_id, None)
        self._stats.in_flight -= 1
        if transfer.state is SenderState.RELEASED:
            self._stats.done += 1
            self._stats.seconds += self._clock() - transfer.started_s
        else:
            self._stats.failed += 1

    # --- the connection's parts ---

    async def _greet(self, connection: Connection) -> Welcome:
        """Raises ConnectionLost with the peer's words where it refuses."""
        connection.send(Hello(self._peer, self.decode, self._store.fingerprint, self._transport.name))
        answer = await connection.receive()
        if isinstance(answer, Refuse):
            raise ConnectionLost(f"the decode worker refuses the connection: {answer.reason}")
        if not isinstance(answer, Welcome) or answer.receiver != self.decode:
            raise ProtocolError(f"{self.address} answers as somebody else: {answer}")
        return answer

    def _offer(self, control: LeasedConnection, transfer: OutgoingTransfer) -> None:
        control.post(Offer(transfer.ticket, transfer.num_tokens))
        transfer.offered()

    async def _listen(self, control: LeasedConnection) -> None:
        while True:
            self._handle(await control.receive())

    def _handle(self, message: Message) -> None:
        match message:
            case Ping():
                return
            case Grant(transfer_id=transfer_id) | Verified(transfer_id=transfer_id):
                # A transfer that was given up here: an answer that crosses our abort is nobody's fault.
                transfer = self._transfers.get(transfer_id)
                if transfer is not None and transfer.state is not SenderState.ABORTING:
                    _answer(transfer, message)
            case Abort(transfer_id=transfer_id, reason=reason):
                if (transfer := self._transfers.get(transfer_id)) is not None:
                    transfer.peer_aborted(f"the decode worker gave up: {reason}")
            case _:
                raise ProtocolError(f"a decode worker does not send {type(message).__name__}")

    async def _send(self, control: LeasedConnection, welcome: Welcome) -> None:
        self._link = await self._transport.join(welcome.link)
        while True:
            while not self._ready:
                self._work.clear()
                await self._work.wait()
            transfer = self._ready.pop(next(iter(self._ready)))
            run = transfer.begin_chunk()
            if run is not None:
                blocks = transfer.block_ids[run.first_block : run.first_block + run.num_blocks]
                digest = await self._digester.digest(self._store, run.layer, blocks)
                if transfer.state is SenderState.SENDING:  # not given up meanwhile
                    num_bytes = run.num_blocks * self._store.block_bytes
                    control.post(
                        Chunk(
                            transfer.ticket.transfer_id,
                            transfer.num_chunks,
                            run.layer,
                            run.first_block,
                            run.num_blocks,
                            num_bytes,
                            digest,
                        )
                    )
                    transfer.num_chunks += 1
                    await control.drain()
                    await within(self._config.lease_s, self._link.send(run.layer, blocks), "sending a chunk")
                    self._stats.bytes += num_bytes
                transfer.end_chunk()
                self.has_work(transfer)  # at the end of the line
            elif transfer.can_commit and transfer.first_token is not None:
                control.post(Commit(transfer.ticket.transfer_id, transfer.num_chunks, transfer.first_token))
                transfer.committed()


def _answer(transfer: OutgoingTransfer, message: Grant | Verified) -> None:
    """Pass the peer's answer on; one that does not fit ends this transfer alone."""
    try:
        if isinstance(message, Grant):
            transfer.granted(message.skip_blocks)
        else:
            transfer.verified()
    except (IllegalTransition, ValueError) as error:
        transfer.abort(f"the decode worker broke the protocol: {error}")
