"""The control connection from one rank of the source to one rank of the target, shared by all transfers of both."""

from collections.abc import Callable
from dataclasses import dataclass

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.endings import run_until_lost
from twostroke.kvtransfer.layout import Cut, Lane, cut_lane
from twostroke.kvtransfer.leased_connection import LeasedConnection
from twostroke.kvtransfer.lifecycle import IllegalTransition, SenderState
from twostroke.kvtransfer.outgoing_lane import OutgoingLane
from twostroke.kvtransfer.patience import within
from twostroke.kvtransfer.source_links import SourceLinks
from twostroke.kvtransfer.stats import TransferStats
from twostroke.kvtransfer.store import KVStore
from twostroke.kvtransfer.transports import Transports
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import ConnectionLost, ProtocolError
from twostroke.protocol.kv_layout import incompatibility
from twostroke.protocol.messages import (
    Abort,
    Awaited,
    Damaged,
    Grant,
    Hello,
    KVHello,
    KVWelcome,
    LinkReady,
    Message,
    Offer,
    Ping,
    Refuse,
    Verified,
    Welcome,
)
from twostroke.protocol.network import Connection, Network
from twostroke.protocol.requests import Address, Peer


@dataclass(frozen=True, slots=True)
class LinkReport:
    """How this rank sends to one rank of another worker."""

    target: Peer
    rank: int  # of the target
    transport: str
    why: str  # this transport, in words for people
    missing: tuple[str, ...]  # for each better transport: what it would need


class SenderConnection:
    """Owns the control connection, its links and the lanes on them; all end together.

    A link may break without the connection: see SourceLinks.
    """

    def __init__(
        self,
        *,
        peer: Peer,
        target: Peer,
        address: Address,
        lane: Lane,
        store: KVStore,
        network: Network,
        transports: Transports,
        config: TransferConfig,
        clock: Clock,
        stats: TransferStats,
        on_lost: Callable[["SenderConnection"], None],
    ):
        self.target = target
        self.address = address
        self.report: LinkReport | None = None  # of the link at hand
        self._lane = lane
        self._peer = peer
        self._store = store
        self._network = network
        self._transports = transports
        self._config = config
        self._clock = clock
        self._stats = stats
        self._on_lost = on_lost
        self._transfers: dict[bytes, OutgoingLane] = {}
        self._declined: dict[bytes, str] = {}  # to be told once the connection stands
        self._control: LeasedConnection | None = None  # set once the peer has welcomed us
        self._links: SourceLinks | None = None  # set with it
        self._cut: Cut | None = None  # set with it

    def add(self, lane: OutgoingLane) -> None:
        """Offer `lane`, now or once the connection stands."""
        self._transfers[lane.ticket.transfer_id] = lane
        if self._control is not None:
            self._offer(self._control, lane)

    def decline(self, transfer_id: bytes, reason: str) -> None:
        """Tell the target that nothing will come, now or once the connection stands."""
        if self._control is not None:
            self._control.post(Abort(transfer_id, reason))
        else:
            self._declined[transfer_id] = reason

    async def run(self) -> None:
        """Connect and serve until the connection is lost or this is cancelled; then end every lane left."""
        connection: Connection | None = None
        reason = "the source is closing"
        try:
            connection = await within(
                self._config.lease_s, self._network.connect(self.address), "connecting to the target"
            )
            welcome = await within(self._config.lease_s, self._greet(connection), "the target's welcome")
            control = self._control = LeasedConnection(connection, self._clock, self._config.lease_s)
            links = self._links = self._begin(control, welcome)
            first = LinkReady(0, welcome.transport, welcome.link)
            reason = await run_until_lost(self._listen(control, links), links.run(first), control.watch())
        except ConnectionLost as lost:
            reason = str(lost)
        finally:  # every link is closed here
            self._on_lost(self)
            self._control = self._links = self.report = None
            self.abandon(reason)
            if connection is not None:
                await connection.close()

    def abandon(self, reason: str) -> None:
        """End every lane left. Only where `run` has ended, or never began: nothing is under way."""
        for lane in tuple(self._transfers.values()):
            lane.peer_lost(reason)

    # --- the lanes' calls (LaneCarrier) ---

    def has_work(self, lane: OutgoingLane) -> None:
        if self._links is not None:
            self._links.serve(lane)

    def gave_up(self, lane: OutgoingLane, reason: str) -> None:
        self.decline(lane.ticket.transfer_id, reason)

    def ended(self, lane: OutgoingLane) -> None:
        self._transfers.pop(lane.ticket.transfer_id, None)
        if self._links is not None:
            self._links.forget(lane)

    # --- the connection's parts ---

    async def _greet(self, connection: Connection) -> KVWelcome:
        """Raises ConnectionLost with the peer's words where it refuses."""
        layout = self._store.layout
        kv = KVHello(layout, self._store.rank, self._config.encoding, self._transports.reach)
        connection.send(Hello(self._peer, self.target, kv))
        while isinstance(answer := await connection.receive(), Ping):
            pass  # it is still preparing the link
        if isinstance(answer, Refuse):
            raise ConnectionLost(f"the target refuses the connection: {answer.reason}")
        if not isinstance(answer, Welcome) or answer.receiver != self.target or answer.kv is None:
            raise ProtocolError(f"{self.address} answers as somebody else: {answer}")
        if answer.kv.rank != self._lane.target_rank:
            raise ProtocolError(f"{self.address} is rank {answer.kv.rank}, not {self._lane.target_rank}")
        fault = incompatibility(layout, answer.kv.layout, self._config.encoding)
        if fault is not None:
            raise ProtocolError(f"the target welcomes what does not fit: {fault}")
        return answer.kv

    def _begin(self, control: LeasedConnection, welcome: KVWelcome) -> SourceLinks:
        """Offer, or call off, what has gathered meanwhile."""
        self._cut = cut_lane(self._lane, self._store.layout, welcome.layout, self._config.encoding)[0]

        def note(link: LinkReady) -> None:
            why = welcome.why if link.link == 0 else "in place of a link that was lost"
            self.report = LinkReport(self.target, self._lane.target_rank, link.transport, why, welcome.missing)

        for lane in tuple(self._transfers.values()):
            self._offer(control, lane)
        for transfer_id, reason in self._declined.items():
            control.post(Abort(transfer_id, reason))
        self._declined.clear()
        return SourceLinks(
            source=self._peer,
            target=self.target,
            cut=self._cut,
            control=control,
            transports=self._transports,
            config=self._config,
            clock=self._clock,
            stats=self._stats,
            on_link=note,
        )

    def _offer(self, control: LeasedConnection, lane: OutgoingLane) -> None:
        control.post(Offer(lane.ticket, lane.num_tokens))
        lane.offered()

    async def _listen(self, control: LeasedConnection, links: SourceLinks) -> None:
        while True:
            self._handle(await control.receive(), links)

    def _handle(self, message: Message, links: SourceLinks) -> None:
        match message:
            case Ping():
                return
            case LinkReady():
                links.ready(message)
            case Awaited(transfer_id=transfer_id):
                if (lane := self._transfers.get(transfer_id)) is not None:
                    lane.awaited()
            case Grant() | Verified() | Damaged():
                # A lane that was given up here: an answer that crosses our abort is nobody's fault.
                lane = self._transfers.get(message.transfer_id)
                if lane is not None and lane.state is not SenderState.ABORTING:
                    self._answer(lane, message, links)
            case Abort(transfer_id=transfer_id, reason=reason):
                if (lane := self._transfers.get(transfer_id)) is not None:
                    lane.peer_aborted(f"the target gave up: {reason}")
            case _:
                raise ProtocolError(f"a target does not send {type(message).__name__}")

    def _answer(self, lane: OutgoingLane, message: Grant | Verified | Damaged, links: SourceLinks) -> None:
        """Pass the peer's answer on; one that does not fit ends this transfer alone."""
        try:
            if isinstance(message, Grant):
                if self._cut is not None:
                    lane.granted(self._cut, message.skip_tokens)
            elif isinstance(message, Verified):
                lane.verified()
            else:
                unfit = lane.damaged(message.sequence, message.attempt)
                self._stats.retries += 1
                if unfit is not None:
                    links.leave(unfit)
                links.serve(lane)
        except (IllegalTransition, ValueError) as error:
            lane.abort(f"the target broke the protocol: {error}")
