"""The router's end of the token channel to one worker: connect, be welcomed, hear what comes, and connect again.

It comes back after every loss, with growing pauses, for as long as its worker is in the fleet. When it drops, the
worker forgets this router's requests, so every stream on it raises WorkerLost.

How a token channel begins: the router's half.

What requests wait for on one token channel: their tokens, and word of KV that was not sent.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.protocol.clock import Clock, Silence
from twostroke.protocol.errors import ConnectionLost, EpochMismatch, ProtocolError, WorkerLost
from twostroke.protocol.messages import (
    BlocksChanged,
    BlocksHeld,
    Cancel,
    Convicted,
    Drain,
    Hello,
    KVNotSent,
    Message,
    Ping,
    Refuse,
    ReportBlocks,
    StatsFrame,
    TokenFrame,
    Welcome,
)
from twostroke.protocol.network import Connection, Network
from twostroke.protocol.requests import Peer
from twostroke.protocol.settings import Interval, Section
from twostroke.protocol.stats import WorkerInfo, WorkerStats
from twostroke.protocol.verdicts import Verdict
from twostroke.router.channels.token_stream import TokenStream


async def greet(network: Network, router: Peer, info: WorkerInfo) -> tuple[Connection, tuple[Verdict, ...]]:
    """Connect, be welcomed by the very incarnation that the fleet names, and hear what it knows of poison requests.

    Raises ConnectionLost (nobody there, or refused), EpochMismatch (somebody else) or ProtocolError.
    """
    connection = await network.connect(info.token_address)
    try:
        connection.send(Hello(sender=router, receiver=info.peer))
        answer = await connection.receive()
        if isinstance(answer, Refuse):
            raise ConnectionLost(f"refused: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"expected a welcome, got {type(answer).__name__}")
        if answer.receiver != info.peer:
            raise EpochMismatch(f"reached worker {answer.receiver.worker_id} of another epoch or name")
        known = await connection.receive()
        if not isinstance(known, Convicted):
            raise ProtocolError(f"expected what is known of poison requests, got {type(known).__name__}")
    except BaseException:
        await connection.close()
        raise
    return connection, known.verdicts


class Subscriptions:
    """By request. All end with the connection, since the worker forgets them with it."""

    def __init__(self) -> None:
        self._streams: dict[str, TokenStream] = {}
        self._sendings: dict[str, Callable[[], None]] = {}  # to be called where the request's KV is not sent

    @property
    def is_empty(self) -> bool:
        """Whether no request relies on the channel."""
        return not (self._streams or self._sendings)

    def subscribe(self, request_id: str, max_tokens: int, on_unread: Callable[[], None]) -> TokenStream:
        """The stream of a request's events. For the rest see TokenStream."""
        stream = TokenStream(max_tokens, lambda: self._unsubscribe(request_id), on_unread)
        self._streams[request_id] = stream
        return stream

    def watch_sending(self, request_id: str, not_sent: Callable[[], None]) -> None:
        """Call `not_sent`, once at most, when the request's KV will not come. Until `unwatch_sending`."""
        self._sendings[request_id] = not_sent

    def unwatch_sending(self, request_id: str) -> None:
        """Harmless where nothing is watched."""
        self._sendings.pop(request_id, None)

    def hear(self, message: TokenFrame | KVNotSent) -> None:
        """Hand out what the worker has sent. What is for requests that have ended here meanwhile goes nowhere."""
        match message:
            case TokenFrame():
                for event in message.events:
                    stream = self._streams.get(event.request_id)
                    if stream is not None:
                        stream.receive(event)
            case KVNotSent():
                not_sent = self._sendings.pop(message.request_id, None)
                if not_sent is not None:
                    not_sent()

    def fail(self, error: WorkerLost) -> None:
        """The connection has ended: everybody is told, and forgotten."""
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(error)
        sendings = list(self._sendings.values())
        self._sendings.clear()
        for not_sent in sendings:  # the worker aborts them
            not_sent()

    def _unsubscribe(self, request_id: str) -> None:
        self._streams.pop(request_id, None)


_log = logging.getLogger(__name__)


class TokenChannelConfig(Section):
    """Times of a token channel, in seconds."""

    ping_s: Interval = 1.0
    """A third of a lease or less: how often the router gives a sign of life."""
    silence_s: Interval = 2.5
    """A worker that is silent for so long counts as lost: five of its signs of life."""
    connect_s: Interval = 2.0
    """To connect and be welcomed."""
    backoff_first_s: Interval = 0.05
    backoff_most_s: Interval = 2.0


@dataclass(frozen=True, slots=True)
class ChannelListener:
    """Who wants to hear of what the channels bring. All are called on the event loop and must not wait."""

    told: Callable[[Peer, WorkerStats], None]  # a worker's numbers
    changed: Callable[[Peer], None]  # a worker's channel has come up, or has dropped
    blocks: Callable[[Peer, BlocksHeld | BlocksChanged], bool] | None  # False: ask it for all; None: ask for nothing


@dataclass(frozen=True, slots=True)
class VerdictExchange:
    """Who knows which requests take workers down."""

    known: Callable[[], tuple[Verdict, ...]]  # told to each worker whose channel comes up
    heard: Callable[[Sequence[Verdict]], None]  # other routers' verdicts, more than once


class WorkerChannel:
    """One worker's connection, and the task that keeps it up. `peer` is this router replica's."""

    def __init__(
        self,
        info: WorkerInfo,
        network: Network,
        peer: Peer,
        clock: Clock,
        config: TokenChannelConfig,
        listener: ChannelListener | None,
        exchange: VerdictExchange | None,
    ):
        self.info = info
        self._listener = listener
        self._exchange = exchange
        self.stats: WorkerStats | None = None
        self._network = network
        self._peer = peer
        self._clock = clock
        self._config = config
        self._connection: Connection | None = None
        self._subscriptions = Subscriptions()
        self._attempt: asyncio.Future[WorkerLost | None] = asyncio.get_running_loop().create_future()
        self._failed = False  # the last attempt, or the last connection
        self._is_leaving = False
        self.fell_silent = False  # the last connection ended since nothing came any more
        self._hurry = asyncio.Event()
        self._dropped = asyncio.Event()
        self._task = asyncio.create_task(self._keep_up(), name=f"token channel {info.peer.worker_id}")

    @property
    def is_connected(self) -> bool:
        """Whether tokens can come now."""
        return self._connection is not None

    @property
    def is_down(self) -> bool:
        """Whether the last attempt failed, or the last connection has; a first attempt under way counts as sound."""
        return self._connection is None and self._failed

    @property
    def is_in_use(self) -> bool:
        """Whether any request relies on it."""
        return not self._subscriptions.is_empty

    def leave(self) -> None:
        """The worker is taken down: it is told so, once, and the connection is the last one."""
        if not self._is_leaving:
            self._is_leaving = True
            self.send(Drain())

    def stay(self) -> bool:
        """The worker is not taken down after all. False where the channel has ended meanwhile."""
        if self._is_leaving:
            self._is_leaving = False
            self._ask_for_blocks()
        return not self._task.done()

    async def ensure(self) -> None:
        """Wait for the connection, or for one attempt at it to fail: that raises WorkerLost."""
        if self._connection is not None:
            return
        self._hurry.set()
        # Others wait for the same attempt: one who gives up must not cancel it for them.
        error = await asyncio.shield(self._attempt)
        if error is not None:
            raise error

    async def outlive(self) -> None:
        """Return when the connection that stands now drops; at once where there is none."""
        if self._connection is not None:
            await self._dropped.wait()

    def subscribe(self, request_id: str, max_tokens: int) -> TokenStream:
        """The stream of a request's events. Raises WorkerLost where there is no connection."""
        self._check_connected()
        return self._subscriptions.subscribe(request_id, max_tokens, lambda: self.send(Cancel(request_id)))

    def watch_sending(self, request_id: str, not_sent: Callable[[], None]) -> None:
        """As TokenChannels.watch_sending."""
        self._check_connected()
        self._subscriptions.watch_sending(request_id, not_sent)

    def unwatch_sending(self, request_id: str) -> None:
        """Harmless where nothing is watched."""
        self._subscriptions.unwatch_sending(request_id)

    def _check_connected(self) -> None:
        if self._connection is None:
            raise WorkerLost(f"there is no token channel to worker {self.info.peer.worker_id} now")

    def send(self, message: Message) -> None:
        """Send if connected. Where it isn't, the worker has forgotten our requests anyway."""
        if self._connection is not None:
            try:
                self._connection.send(message)
            except ConnectionLost as error:
                _log.info("token channel to %s: %s", self.info.peer.worker_id, error)

    async def close(self) -> None:
        """End it for good; returns when nothing goes on any more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._settle(WorkerLost(f"worker {self.info.peer.worker_id} has left the fleet"))

    async def _keep_up(self) -> None:
        backoff_s = self._config.backoff_first_s
        level = logging.INFO
        while True:
            reason = "the channel is closed"
            connection: Connection | None = None
            try:
                async with asyncio.timeout(self._config.connect_s):
                    connection, verdicts = await greet(self._network, self._peer, self.info)
                backoff_s = self._config.backoff_first_s
                level = logging.INFO
                await self._serve(connection, verdicts)
            except (ConnectionLost, EpochMismatch, TimeoutError) as error:
                reason = str(error) or "no answer in time"
            except Exception as error:  # those who wait in `ensure` must be told, and the channel must come back
                _log.exception("the token channel to %s met a bug", self.info.peer.worker_id)
                reason = f"a bug: {type(error).__name__}"
            finally:
                self._drop(WorkerLost(f"the token channel to worker {self.info.peer.worker_id} dropped: {reason}"))
                if connection is not None:
                    await connection.close()
            _log.log(level, "token channel to %s dropped: %s", self.info.peer.worker_id, reason)
            level = logging.DEBUG  # a dead worker refuses every attempt until the fleet names it no more
            if self._is_leaving:
                return
            await self._wait(backoff_s)
            backoff_s = min(2 * backoff_s, self._config.backoff_most_s)

    async def _serve(self, connection: Connection, verdicts: Sequence[Verdict]) -> None:
        """Hand out what comes until the connection is lost, which raises ConnectionLost."""
        self._connection = connection
        self._exchange_verdicts(verdicts)  # before any request can go there
        self._failed = self.fell_silent = False
        self._dropped.clear()
        self._settle(None)
        if self._listener is not None:
            self._listener.changed(self.info.peer)
            self._ask_for_blocks()
        silence = Silence(self._clock, self._config.silence_s)
        watch = asyncio.create_task(self._watch(connection, silence))
        try:
            while True:
                message = await connection.receive()
                silence.end()
                match message:
                    case TokenFrame() | KVNotSent():
                        self._subscriptions.hear(message)
                    case StatsFrame():
                        self.stats = message.stats
                        if self._listener is not None:
                            self._listener.told(self.info.peer, message.stats)
                    case BlocksHeld() | BlocksChanged():
                        self._hear_of_blocks(message)
                    case Convicted(verdicts):
                        if self._exchange is not None:
                            self._exchange.heard(verdicts)
                    case Ping():
                        pass
                    case _:
                        raise ProtocolError(f"a worker sent {type(message).__name__} on a token channel")
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def _exchange_verdicts(self, its_own: Sequence[Verdict]) -> None:
        if self._exchange is None:
            return
        self._exchange.heard(its_own)
        known_there = {verdict.fingerprint for verdict in its_own}
        if news := tuple(verdict for verdict in self._exchange.known() if verdict.fingerprint not in known_there):
            self.send(Convicted(news))

    def _ask_for_blocks(self) -> None:
        if self._listener is not None and self._listener.blocks is not None:
            self.send(ReportBlocks())

    def _hear_of_blocks(self, message: BlocksHeld | BlocksChanged) -> None:
        if self._listener is None or self._listener.blocks is None:
            raise ProtocolError("a worker told of its blocks without being asked")
        if self._is_leaving:
            return  # nobody is sent there, and who has forgotten it would learn all of it anew
        if not self._listener.blocks(self.info.peer, message):
            self._ask_for_blocks()

    async def _watch(self, connection: Connection, silence: Silence) -> None:
        """Give signs of life, and close a connection whose other side gives none."""
        while True:
            await silence.pause(self._config.ping_s)
            if silence.is_too_long:
                self.fell_silent = True
                await connection.close()
                return
            try:
                connection.send(Ping())
            except ConnectionLost:
                return  # the reader is told as well, and ends the channel

    def _settle(self, error: WorkerLost | None) -> None:
        """Tell those who wait in `ensure` how the attempt went."""
        if not self._attempt.done():
            self._attempt.set_result(error)

    def _drop(self, error: WorkerLost) -> None:
        self._connection = None
        self._failed = True
        self.stats = None
        self._dropped.set()
        if self._listener is not None:
            self._listener.changed(self.info.peer)
        self._settle(error)
        self._attempt = asyncio.get_running_loop().create_future()
        self._hurry.clear()
        self._subscriptions.fail(error)

    async def _wait(self, backoff_s: float) -> None:
        try:
            async with asyncio.timeout(backoff_s):
                await self._hurry.wait()
        except TimeoutError:
            return  # nobody asked for this worker meanwhile
