"""The control connection from one rank of a source to this rank, with the transfers that came over it.

A source that is stopped for longer than its lease, and then wakes, can write nothing into blocks that were given away:

- Its lease ends here, by this side's clock, without a word from it. This side's end of every link is closed then, and
  only after that do its lanes end (PEER_LOST) and their blocks go back. A closed link is written to by nobody.
- Which bytes go where was never the source's to say: it sends bytes, and this side writes them, into the blocks of the
  chunk at hand (tcp, torch_distributed), or this side copies them out of the source's memory itself (shm, cuda_ipc).
  What a woken source still sends ends in a closed socket or a process group that is gone.
- Its messages come over a connection that is closed. A new one begins with a new Hello, and its tickets are used.

A target that is stopped and wakes late may still take announced chunks off a link that the source has closed, or read
blocks of the source that hold something else by now. Their digest was made of the bytes that were meant, so what passes
it is right; for the rest it asks a source that is gone, and computes the prompt itself.
"""

from collections.abc import Callable
from typing import Protocol

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.endings import run_until_lost
from twostroke.kvtransfer.incoming_lane import IncomingLane
from twostroke.kvtransfer.layout import Cut, cut_lane, plan_lanes
from twostroke.kvtransfer.leased_connection import LeasedConnection
from twostroke.kvtransfer.link import LinkParams
from twostroke.kvtransfer.patience import within
from twostroke.kvtransfer.stats import TransferStats
from twostroke.kvtransfer.store import KVStore
from twostroke.kvtransfer.target_links import TargetLinks
from twostroke.kvtransfer.transport_choice import Choice, choose_transport
from twostroke.kvtransfer.transports import Transports
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import ConfigError, ConnectionLost, ProtocolError
from twostroke.protocol.kv_layout import incompatibility
from twostroke.protocol.messages import (
    Abort,
    Chunk,
    Commit,
    Hello,
    KVHello,
    KVWelcome,
    LinkWanted,
    Message,
    Offer,
    Ping,
    Refuse,
    Welcome,
)
from twostroke.protocol.network import Connection
from twostroke.protocol.requests import Peer


class OfferDesk(Protocol):
    """Whoever matches offers with the requests that expect them. Calls never wait."""

    def offered(self, connection: "ReceiverConnection", offer: Offer) -> None:
        """Grant, keep or refuse the offer."""

    def declined(self, connection: "ReceiverConnection", transfer_id: bytes, reason: str) -> None:
        """The peer aborts a transfer that this connection does not carry: only offered yet, or never."""

    def connection_lost(self, connection: "ReceiverConnection") -> None:
        """Its offers are void."""


class ReceiverConnection:
    """Reads control messages as they come, and leaves chunks to its links.

    So a slow transfer holds up neither pings, nor offers, nor aborts behind it.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        peer: Peer,
        host: str,
        store: KVStore,
        transports: Transports,
        config: TransferConfig,
        clock: Clock,
        stats: TransferStats,
        desk: OfferDesk,
    ):
        self.source = Peer("", 0)  # until its Hello, as are the next two
        self.source_rank = -1
        self.cut: Cut | None = None
        self.lanes: dict[bytes, IncomingLane] = {}  # by transfer id
        self._connection = connection
        self._control = LeasedConnection(connection, clock, config.lease_s)
        self._peer = peer
        self._host = host
        self._store = store
        self._transports = transports
        self._config = config
        self._clock = clock
        self._stats = stats
        self._desk = desk

    async def run(self) -> None:
        """Serve until the connection is lost or this is cancelled; then end every lane left."""
        reason = "the target is closing"
        try:
            hello = await within(self._config.lease_s, self._connection.receive(), "the source's hello")
            if not isinstance(hello, Hello):
                raise ProtocolError(f"a connection does not begin with {type(hello).__name__}")
            try:
                kv, cut = self._fit(hello)
                self._choose(kv, ())
            except ConfigError as refusal:
                self._connection.send(Refuse(str(refusal)))
                await self._connection.drain()
                return
            self.source, self.source_rank, self.cut = hello.sender, kv.rank, cut
            reason = await self._serve(kv, cut)
        except ConnectionLost as lost:
            reason = str(lost)
        finally:  # every link is closed here
            self._desk.connection_lost(self)
            for lane in tuple(self.lanes.values()):
                lane.peer_lost(reason)

    def post(self, message: Message) -> None:
        """Send `message`, if the connection still stands; never waits."""
        self._control.post(message)

    def _fit(self, hello: Hello) -> tuple[KVHello, Cut]:
        """Its part about KV, and our end of the lane. Raises ConfigError with both sides' values if it does not fit."""
        ours = self._store.layout
        if hello.receiver != self._peer:
            raise ConfigError(f"you look for {_name(hello.receiver)}, and this is {_name(self._peer)}")
        kv = hello.kv
        if kv is None:
            raise ConfigError("this is no token channel")
        fault = incompatibility(kv.layout, ours, kv.encoding)
        if fault is not None:
            raise ConfigError(fault)
        for lane in plan_lanes(kv.layout.tp_size, ours.tp_size, ours.num_kv_heads):
            if (lane.source_rank, lane.target_rank) == (kv.rank, self._store.rank):
                return kv, cut_lane(lane, kv.layout, ours, kv.encoding)[1]
        raise ConfigError(
            f"rank {kv.rank} of {kv.layout.tp_size} has nothing for rank {self._store.rank} of {ours.tp_size}"
        )

    def _choose(self, kv: KVHello, without: tuple[str, ...]) -> Choice:
        """Raises ConfigError where the pair has no transport in common."""
        return choose_transport(kv.reach, self._transports.reach, kv.encoding, without)

    async def _serve(self, kv: KVHello, cut: Cut) -> str:
        """Serve a peer that fits; returns why that ended."""

        def welcome(choice: Choice, params: LinkParams) -> None:
            answer = KVWelcome(
                self._store.layout, self._store.rank, choice.transport, choice.why, choice.missing, params
            )
            self._control.post(Welcome(self._peer, answer))

        links = TargetLinks(
            source=self.source,
            target=self._peer,
            host=self._host,
            cut=cut,
            max_chunk_units=cut.layout.num_layers * self._store.num_blocks * cut.units_per_block,
            control=self._control,
            choose=lambda without: self._choose(kv, without),
            lanes=self.lanes,
            transports=self._transports,
            config=self._config,
            clock=self._clock,
            stats=self._stats,
        )
        return await run_until_lost(self._listen(links.put), links.run(welcome), self._control.watch())

    async def _listen(self, put: Callable[[Chunk | LinkWanted], None]) -> None:
        while True:
            message = await self._control.receive()
            match message:
                case Ping():
                    pass
                case Offer():
                    self._desk.offered(self, message)
                case Chunk() | LinkWanted():
                    put(message)
                case Commit(transfer_id=transfer_id):
                    lane = self.lanes.get(transfer_id)
                    if lane is not None and (verified := lane.commit(message)) is not None:
                        self.post(verified)
                case Abort(transfer_id=transfer_id, reason=reason):
                    if (lane := self.lanes.get(transfer_id)) is not None:
                        lane.peer_aborted(f"the source gave up: {reason}")
                    else:
                        self._desk.declined(self, transfer_id, f"the source gave up: {reason}")
                case _:
                    raise ProtocolError(f"a source does not send {type(message).__name__}")
            await self._control.drain()  # one that reads no answers is not asked for more reasons to answer


def _name(peer: Peer) -> str:
    return f"{peer.worker_id} of epoch {peer.epoch:x}"
