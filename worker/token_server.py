"""The worker's end of the token channel: one connection per router, one frame per router and engine step.

The worker learns of a lost router once for each connection. The worker's StatsFrames are its proof of life; the
router's are its Pings.

`BlockReports` reports the prefix cache to routers: all names to a router that asks, and from then on each change. A
worker with KV tiers reports the names in them likewise, by reports of their own.

All names of a large cache are megabytes. They go in pieces, each when the router has taken the one before it, while
tokens and changes pass between them. A piece is read from the cache in the very moment when it is sent, after all
changes until then have been: so it need not be kept, and whatever comes after it is newer.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge
from pydantic import model_validator

from twostroke.protocol.block_hash import (
    NamedBlocks,
    pack_hashes,
)
from twostroke.protocol.clock import Clock, Silence
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import (
    BlocksChanged,
    BlocksHeld,
    Cancel,
    ChangeRole,
    Drain,
    Hello,
    KVNotSent,
    Ping,
    PrefillFailed,
    Refuse,
    ReportBlocks,
    RequestsBlocked,
    Resume,
    SendPrefix,
    StatsFrame,
    TokenFrame,
    Welcome,
)
from twostroke.protocol.network import Connection, Listener, Network
from twostroke.protocol.requests import Address, BlockedRequest, BlockedRequests, Peer, TokenEvent
from twostroke.protocol.settings import Count, Section
from twostroke.protocol.stats import WorkerStats

_log = logging.getLogger(__name__)

_ToRouter = TokenFrame | StatsFrame | KVNotSent | BlocksHeld | BlocksChanged | RequestsBlocked


class TokenServerConfig(Section):
    """Times and bounds of a worker's token channel."""

    stats_interval_s: Annotated[float, Ge(0.01)] = 0.5
    """Seconds between a worker's reports of its numbers, which are its sign of life; at most a third of `lease_s`, and
    half of `router.token_channel.silence_s`."""
    lease_s: Annotated[float, Ge(0.1)] = 10.0
    """Seconds of silence after which a router is lost, and its requests end. At least three times `stats_interval_s`,
    and three times `router.token_channel.ping_s`."""
    max_unsent_bytes: Count = 4 * 1024 * 1024
    """Bytes of unread tokens after which a router is dropped."""

    @model_validator(mode="after")
    def _check(self) -> "TokenServerConfig":
        if self.stats_interval_s > self.lease_s / 3:
            raise ValueError(
                f"stats_interval_s: {self.stats_interval_s:g} must be at most a third of lease_s ({self.lease_s:g}), "
                "since StatsFrames are the worker's proof of life"
            )
        return self


FromRouter = Cancel | Drain | Resume | ChangeRole | PrefillFailed | SendPrefix
"""Messages that a router sends to the worker itself."""


FLUSH_S = 0.05
"""Seconds for which changes are gathered before they are sent."""

PIECE_BLOCKS = 16_384
"""Blocks of the pool whose names are read at once: a millisecond of the event loop's, and 128 KiB."""

Send = Callable[[str, Connection, BlocksHeld | BlocksChanged], None]
"""Sends to a router by its connection, and drops the router where that fails."""


@dataclass(slots=True)
class _Reader:
    """A router that has asked."""

    connection: Connection
    num_told: int = 0  # blocks that it has been told of, by their ids; once there are some, it is told changes
    telling: asyncio.Task[None] | None = None  # all names


class BlockReports:
    """One worker's reports of its prefix cache or, with `is_tier`, of its KV tiers.

    Nothing is recorded while no router has asked.
    """

    def __init__(self, blocks: NamedBlocks, send: Send, *, is_tier: bool = False):
        self._blocks = blocks
        self._send = send
        self._is_tier = is_tier
        self._readers: dict[str, _Reader] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._sequence = 0
        self._flushing: asyncio.TimerHandle | None = None

    def begin(self, router_id: str, connection: Connection) -> None:
        """Tell this router all names, and from then on each change; from the beginning, where that goes on already."""
        if not self._readers:
            self._blocks.record_changes(self._flush_later)
        reader = self._readers.setdefault(router_id, _Reader(connection))
        self._tell_anew(router_id, reader)

    def end(self, router_id: str) -> None:
        """Tell this router nothing more. Harmless for one that never asked."""
        reader = self._readers.pop(router_id, None)
        if reader is None:
            return
        if reader.telling is not None:
            reader.telling.cancel()
        if not self._readers:
            self._blocks.record_changes(None)
            if self._flushing is not None:
                self._flushing.cancel()
                self._flushing = None

    async def close(self) -> None:
        """End all; returns when nothing goes on any more."""
        for router_id in list(self._readers):
            self.end(router_id)
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _tell_anew(self, router_id: str, reader: _Reader) -> None:
        reader.num_told = 0
        if reader.telling is None:
            what = "tiers' blocks" if self._is_tier else "blocks"
            reader.telling = asyncio.create_task(self._tell_all(router_id, reader), name=f"{what} to {router_id}")
            self._ending.add(reader.telling)
            reader.telling.add_done_callback(self._ending.discard)

    async def _tell_all(self, router_id: str, reader: _Reader) -> None:
        try:
            while True:
                await reader.connection.drain()
                self._flush()
                first, end = reader.num_told, min(reader.num_told + PIECE_BLOCKS, self._blocks.num_blocks)
                names = pack_hashes(self._blocks.names(first, end))
                is_last = end == self._blocks.num_blocks
                reader.num_told = end
                if is_last:
                    reader.telling = None
                if names or first == 0 or is_last:
                    held = BlocksHeld(
                        names,
                        is_first=first == 0,
                        is_last=is_last,
                        sequence=self._sequence,
                        is_tier=self._is_tier,
                    )
                    self._send(router_id, reader.connection, held)
                if is_last:
                    return
                await asyncio.sleep(0)  # the connection may take it all at once, but others have things to do
        except ConnectionLost:
            return  # the listener of this router notices it too, and ends its reports

    def _flush_later(self) -> None:
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        """Tell what has changed until now."""
        if self._flushing is None:
            return  # nothing has
        self._flushing.cancel()
        self._flushing = None
        changes = self._blocks.take_changes()
        if changes is None:
            for router_id, reader in self._readers.items():
                self._tell_anew(router_id, reader)
        elif changes.stored or changes.removed:
            self._sequence += 1
            stored, removed = pack_hashes(changes.stored), pack_hashes(changes.removed)
            message = BlocksChanged(self._sequence, stored, removed, is_tier=self._is_tier)
            for router_id, reader in list(self._readers.items()):
                if reader.num_told:
                    self._send(router_id, reader.connection, message)


@dataclass(eq=False)
class TokenServer:
    """Accepts routers, sends them token frames and statistics, and passes their requests to the worker.

    Routers that ask get the names in the prefix cache of `blocks`, and those that KV tiers hold (`tier_blocks`). What
    one router reports of requests that take workers down is passed on to the others, now or when they connect; the
    worker itself does nothing with it.
    """

    on_message: Callable[[FromRouter], None]
    on_router_lost: Callable[[str], None]
    stats: Callable[[], WorkerStats]
    peer: Peer
    network: Network
    config: TokenServerConfig
    blocks: NamedBlocks
    clock: Clock
    tier_blocks: NamedBlocks | None = None
    _listener: Listener | None = field(default=None, init=False)
    _stats_task: "asyncio.Task[None] | None" = field(default=None, init=False)
    _routers: dict[str, Connection] = field(default_factory=dict, init=False)
    _closing: "set[asyncio.Task[None]]" = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._block_reports = BlockReports(self.blocks, self._send)
        self._tier_reports: BlockReports | None = None
        if self.tier_blocks is not None:
            self._tier_reports = BlockReports(self.tier_blocks, self._send, is_tier=True)
        self._blocked = BlockedRequests(self.clock)

    async def start(self, host: str) -> Address:
        """Listen on a free port of `host`. Raises ConnectionLost where that is impossible."""
        self._listener = await self.network.listen(host, self._serve)
        self._stats_task = asyncio.create_task(self._send_stats_forever(), name="token-server-stats")
        return self._listener.address

    async def close(self) -> None:
        """Drop every router and stop listening; may be called again. No call of the worker follows this."""
        if self._stats_task is not None:
            self._stats_task.cancel()
            await asyncio.gather(self._stats_task, return_exceptions=True)
        if self._listener is not None:
            await self._listener.close()
        await self._block_reports.close()
        if self._tier_reports is not None:
            await self._tier_reports.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def is_connected(self, router_id: str) -> bool:
        """Return True where this router has a token channel."""
        return router_id in self._routers

    def emit(self, router_id: str, events: Sequence[TokenEvent]) -> None:
        """Send one frame. Events for a router that is not connected are dropped: the worker knows that it is lost."""
        self._tell(router_id, TokenFrame(tuple(events)))

    def kv_not_sent(self, router_id: str, request_id: str) -> None:
        """Tell the request's router that its KV has not reached the decode worker, if the router is connected."""
        self._tell(router_id, KVNotSent(request_id))

    def send_stats(self) -> None:
        """Send the worker's numbers to all routers now."""
        frame = StatsFrame(self.stats())
        for router_id in list(self._routers):
            self._tell(router_id, frame)

    async def _serve(self, connection: Connection) -> None:
        """Serve one router's connection, from its Hello to its end."""
        router_id = await self._accept(connection)
        if router_id is None:
            return
        silence = Silence(asyncio.get_running_loop().time, self.config.lease_s)
        watch = asyncio.create_task(self._watch(router_id, connection, silence), name=f"token-server-watch-{router_id}")
        try:
            await self._listen_to(router_id, connection, silence)
        except ConnectionLost as error:
            _log.info("token channel of router %s ended: %s", router_id, error)
        finally:
            watch.cancel()
            self._drop(router_id, connection)
            await asyncio.gather(watch, return_exceptions=True)

    async def _accept(self, connection: Connection) -> str | None:
        """Return the id of the router that connects; None where it is refused or gone."""
        try:
            async with asyncio.timeout(self.config.lease_s):
                hello = await connection.receive()
            reason = self._refusal(hello)
            if reason is not None:
                _log.warning("token channel refused: %s", reason)
                connection.send(Refuse(reason))
                await connection.drain()
                return None
        except (ConnectionLost, TimeoutError) as error:
            _log.info("a connection ended before its hello: %s", error)
            return None
        if not isinstance(hello, Hello):  # `_refusal` has refused it; this tells the type checker
            return None
        router_id = hello.sender.worker_id
        older = self._routers.get(router_id)
        if older is not None:
            # Messages on the older connection may be lost, so the requests that relied on it end.
            self._drop(router_id, older)
        try:
            connection.send(Welcome(self.peer))
            connection.send(RequestsBlocked(self._blocked.latest()))
            connection.send(StatsFrame(self.stats()))
        except ConnectionLost:
            return None
        self._routers[router_id] = connection
        return router_id

    def _refusal(self, hello: object) -> str | None:
        if not isinstance(hello, Hello):
            return f"expected a Hello, got {type(hello).__name__}"
        if hello.receiver.worker_id != self.peer.worker_id:
            return f"this is worker {self.peer.worker_id}, not {hello.receiver.worker_id}"
        if hello.receiver.epoch != self.peer.epoch:
            return f"worker {self.peer.worker_id} has restarted: epoch {hello.receiver.epoch:x} is over"
        return None

    async def _watch(self, router_id: str, connection: Connection, silence: Silence) -> None:
        """Drop a router after a lease of silence; that ends its `_listen_to` as well."""
        await silence.outlast()
        _log.warning("router %s was silent for %.1f s: dropped", router_id, silence.length_s)
        self._drop(router_id, connection)

    async def _listen_to(self, router_id: str, connection: Connection, silence: Silence) -> None:
        """Raises ConnectionLost at the connection's end."""
        while True:
            message = await connection.receive()
            if self._routers.get(router_id) is not connection:
                raise ConnectionLost("it was dropped, with all its messages")
            silence.end()
            match message:
                case Cancel() | Drain() | Resume() | ChangeRole() | PrefillFailed() | SendPrefix():
                    self.on_message(message)
                case ReportBlocks(cache, tiers):
                    if cache:
                        self._block_reports.begin(router_id, connection)
                    if tiers and self._tier_reports is not None:
                        self._tier_reports.begin(router_id, connection)
                case RequestsBlocked(blocked):
                    self._pass_on(blocked, but_to=router_id)
                case Ping():
                    pass
                case _:
                    raise ConnectionLost(f"a router must not send {type(message).__name__}")

    def _pass_on(self, blocked: Sequence[BlockedRequest], *, but_to: str) -> None:
        if news := self._blocked.learn(blocked):
            for router_id in list(self._routers):
                if router_id != but_to:
                    self._tell(router_id, RequestsBlocked(news))

    async def _send_stats_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.stats_interval_s)
            if self._routers:
                self.send_stats()

    def _tell(self, router_id: str, message: _ToRouter) -> None:
        if (connection := self._routers.get(router_id)) is not None:
            self._send(router_id, connection, message)

    def _send(self, router_id: str, connection: Connection, message: _ToRouter) -> None:
        try:
            connection.send(message)
        except ConnectionLost as error:
            _log.info("router %s is gone: %s", router_id, error)
            self._drop(router_id, connection)
            return
        if connection.unsent_bytes > self.config.max_unsent_bytes:
            _log.warning("router %s leaves %d bytes unread: dropped", router_id, connection.unsent_bytes)
            self._drop(router_id, connection)

    def _drop(self, router_id: str, connection: Connection) -> None:
        """Forget a connection, close it, and tell the worker. Harmless for one that is dropped already."""
        if self._routers.get(router_id) is not connection:
            return
        del self._routers[router_id]
        self._block_reports.end(router_id)
        if self._tier_reports is not None:
            self._tier_reports.end(router_id)
        closing = asyncio.create_task(connection.close(), name=f"token-server-close-{router_id}")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self.on_router_lost(router_id)
