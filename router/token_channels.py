"""The token channels of one router replica: one per worker, shared by all its requests. Nothing here knows Ray or HTTP.

`TokenChannels` has them all, and keeps that of a worker that has left the fleet until the requests on it have ended.
`WorkerChannel` is the router's end of one: connect, be welcomed, hear what comes, and connect again. `TokenStream` has
the events of one request on their way to the pipeline.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import Context
from dataclasses import dataclass

from twostroke.protocol.clock import Clock, Silence
from twostroke.protocol.errors import (
    ConnectionLost,
    EpochMismatch,
    ProtocolError,
    RequestError,
    TwostrokeError,
    WorkerFailed,
    WorkerLost,
)
from twostroke.protocol.messages import (
    BlocksChanged,
    BlocksHeld,
    Cancel,
    Drain,
    Hello,
    KVNotSent,
    Message,
    Ping,
    Refuse,
    ReportBlocks,
    RequestsBlocked,
    StatsFrame,
    TokenFrame,
    Welcome,
)
from twostroke.protocol.network import Connection, Network
from twostroke.protocol.requests import BlockedRequest, BlockedRequests, Peer, SampledToken, TokenEvent
from twostroke.protocol.settings import Interval, Section
from twostroke.protocol.stats import Role, WorkerInfo, WorkerStats

MAX_UNREAD = 16384
"""Tokens, and alternatives to them, that may wait for a client which does not read: a few MB."""


class TokenStream:
    """The events of one request, in the order they came. Read by one consumer; closed by it, always.

    Others may `push` what they learn by another way (the first token of a prefill reply) or `fail` it.
    """

    def __init__(self, max_tokens: int, on_close: Callable[[], None], on_unread: Callable[[], None]):
        """`on_unread` is called where too much waits to be read: the stream takes no more then, and fails."""
        self._on_close = on_close
        self._on_unread = on_unread
        self._unread = 0
        self._events: deque[TokenEvent] = deque()
        self._error: TwostrokeError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        # A sound worker sends one token an event at least, and token 0 may come twice; the end may come alone.
        self._events_left = max_tokens + 2
        self.heard = False
        """True once the decode worker has sent anything for this request."""

    def push(self, event: TokenEvent) -> None:
        """Queue `event` behind those before it."""
        self._events.append(event)
        self._wake()

    def fail(self, error: TwostrokeError) -> None:
        """Let the reader have what is queued, then raise `error`. The first failure counts."""
        if self._error is None:
            self._error = error
            self._wake()

    def fail_in(self, delay_s: float, error: TwostrokeError) -> None:
        """Fail later, unless the stream is closed by then."""
        self._timer = asyncio.get_running_loop().call_later(delay_s, self.fail, error)

    def close(self) -> None:
        """Take no more events of this request. May be called more than once."""
        self._on_close()
        if self._timer is not None:
            self._timer.cancel()
        self._events.clear()
        self.fail(WorkerLost("the stream is closed"))

    def receive(self, event: TokenEvent) -> None:
        """Take an event off the channel; a worker that sends more than was asked for has failed."""
        self.heard = True
        self._events_left -= 1
        if self._events_left < 0:
            self.fail(WorkerFailed("the worker sent more tokens than the request asked for"))
            return
        for token in event.tokens:
            self._unread += 1 + len(token.top)
        if self._unread > MAX_UNREAD:
            self._on_close()
            self._on_unread()
            self.fail(RequestError("the client does not read the answer", code="client_too_slow", status=408))
        else:
            self.push(event)

    def take_queued(self) -> list[TokenEvent]:
        """All that has come already, without waiting; a slow reader catches up in one go."""
        events = list(self._events)
        self._events.clear()
        self._unread = 0
        return events

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> TokenEvent:
        """The next event. Raises WorkerLost when the channel drops; never ends by itself."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if len(self._events) == 1:
            self._unread = 0
        return self._events.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def join_fresh(events: Sequence[TokenEvent], sent: Sequence[int]) -> TokenEvent | None:
    """`events` as one that goes on where `sent` (all output so far) ends; None if nothing is new.

    A token may come twice: the first from the prefill worker and from the decode worker. Raises WorkerFailed for a gap
    and for a token that differs from what was sent in its place (what follows would go on from another text), and
    WorkerLost where the worker gave the request up.
    """
    tokens: list[SampledToken] = []
    begin = len(sent)
    num_cached = None
    for event in events:
        num_cached = event.num_cached_tokens if num_cached is None else num_cached
        if event.error is not None:
            raise WorkerLost(f"the worker gave the request up: {event.error}")
        next_index = begin + len(tokens)
        if not 0 <= event.index <= next_index:
            raise WorkerFailed(f"token {next_index} is missing: the next to come was {event.index}")
        if num_known := next_index - event.index:
            for i, token in enumerate(event.tokens[:num_known], event.index):
                if token.token_id != (sent[i] if i < begin else tokens[i - begin].token_id):
                    raise WorkerFailed(f"token {i} came again, and as another one")
        tokens.extend(event.tokens[num_known:])
        if event.finish_reason is not None and event.index + len(event.tokens) == begin + len(tokens):
            return TokenEvent(event.request_id, begin, tuple(tokens), event.finish_reason, None, num_cached)
    return TokenEvent(events[0].request_id, begin, tuple(tokens), None, None, num_cached) if tokens else None


_log = logging.getLogger(__name__)


class TokenChannelConfig(Section):
    """Times of a token channel, in seconds."""

    ping_s: Interval = 1.0
    """Interval of a router's signs of life to workers; at most a third of their `lease_s`."""
    silence_s: Interval = 2.5
    """A worker that is silent for so long counts as lost, and its requests go on elsewhere. A killed worker's
    connection ends at once; this is for stopped and unreachable ones, whose streams stand still for as long. At least
    twice the workers' `stats_interval_s`; five of them by default: with fewer, a worker whose event loop is held up for
    a moment loses its streams for nothing."""
    connect_s: Interval = 2.0
    """Longest time to connect to a worker and be welcomed. A request that needs a worker which does not answer goes
    elsewhere after that."""
    backoff_first_s: Interval = 0.05
    """Pause before the second attempt to connect; doubles from attempt to attempt."""
    backoff_most_s: Interval = 2.0
    """Longest pause between attempts to connect."""


_DEFAULTS = TokenChannelConfig()


@dataclass(frozen=True, slots=True)
class ChannelListener:
    """Callbacks for what the channels bring. All run on the event loop and must not wait."""

    on_stats: Callable[[Peer, WorkerStats], None] = lambda peer, stats: None
    on_connection: Callable[[Peer, bool], None] = lambda peer, is_up: None
    """A worker's channel has come up, or has dropped or could not be opened."""
    on_blocks: Callable[[Peer, BlocksHeld | BlocksChanged], bool] | None = None
    """Return False to have the worker send all of its blocks, or all of its tiers' where the message is of these.
    Without this callback no worker is asked for blocks."""


_NO_LISTENER = ChannelListener()


class TokenChannels:
    """All token channels of one router replica.

    `peer` is this replica's id and epoch; the id is the `router_id` of its requests. `blocked` is extended by what
    workers tell, and told to each worker whose channel comes up.
    """

    def __init__(
        self,
        *,
        network: Network,
        peer: Peer,
        clock: Clock,
        config: TokenChannelConfig = _DEFAULTS,
        listener: ChannelListener = _NO_LISTENER,
        blocked: BlockedRequests | None = None,
    ):
        self.peer = peer
        self._listener = listener
        self._blocked = BlockedRequests(clock) if blocked is None else blocked
        self._network = network
        self._clock = clock
        self._config = config
        self._channels: dict[Peer, WorkerChannel] = {}
        self._followed: list[WorkerInfo] = []
        self._left: set[Peer] = set()  # those with a channel that are not followed
        self._leaving: set[asyncio.Task[None]] = set()
        self.num_hung = Counter[Role]()
        """Workers whose engines hung, by role."""

    def follow(self, workers: Iterable[WorkerInfo]) -> None:
        """Keep a channel to each of `workers`, and to others until no request uses it. Connects in the background.

        Quick where they are the same as before.
        """
        workers = list(workers)
        if workers != self._followed:
            self._followed = workers
            present = {info.peer: info for info in workers}
            for peer, info in present.items():
                if peer in self._left and not self._channels[peer].stay():
                    self._let_go(peer)
                if peer not in self._channels:
                    self._channels[peer] = self._open(info)
            self._left = self._channels.keys() - present.keys()
        for gone in list(self._left):
            self._channels[gone].leave()
            if not self._channels[gone].is_in_use:
                self._let_go(gone)

    async def ensure(self, info: WorkerInfo) -> None:
        """Return once there is a channel to this worker. Raises WorkerLost where an attempt at it fails."""
        channel = self._channels.get(info.peer)
        if channel is None:
            channel = self._channels[info.peer] = self._open(info)
            self._left.add(info.peer)
        await channel.ensure()

    def is_connected(self, worker: Peer) -> bool:
        """Return whether tokens can come from this worker now."""
        channel = self._channels.get(worker)
        return channel is not None and channel.is_connected

    def is_down(self, worker: Peer) -> bool:
        """Return whether the channel to this worker is broken; a first attempt under way counts as sound."""
        channel = self._channels.get(worker)
        return channel is not None and channel.is_down

    def fell_silent(self, worker: Peer) -> bool:
        """Return whether the worker was given up for its silence: stopped, cut off, or its machine is gone."""
        channel = self._channels.get(worker)
        return channel is not None and channel.fell_silent

    def stats(self, worker: Peer) -> WorkerStats | None:
        """The worker's latest numbers; None before the first, and while the channel is down."""
        channel = self._channels.get(worker)
        return None if channel is None else channel.stats

    def subscribe(self, worker: Peer, request_id: str, *, max_tokens: int) -> TokenStream:
        """The stream of a request's events, to be opened before the worker hears of the request.

        `max_tokens` bounds what may queue up. Raises WorkerLost where there is no channel (see `ensure`).
        """
        return self._connected(worker).subscribe(request_id, max_tokens)

    def watch_sending(self, worker: Peer, request_id: str, not_sent: Callable[[], None]) -> None:
        """Call `not_sent`, once at most, when the worker says that it has not sent the request's KV, or is lost.

        Until `unwatch_sending`. Raises WorkerLost where there is no channel (see `ensure`).
        """
        self._connected(worker).sendings[request_id] = not_sent

    def unwatch_sending(self, worker: Peer, request_id: str) -> None:
        """Harmless where nothing is watched."""
        channel = self._channels.get(worker)
        if channel is not None:
            channel.sendings.pop(request_id, None)

    def send(self, worker: Peer, message: Message) -> None:
        """Says nothing where the channel is down: that tells the worker to forget our requests, too."""
        channel = self._channels.get(worker)
        if channel is not None:
            channel.send(message)

    def tell_blocked(self, requests: Sequence[BlockedRequest]) -> None:
        """Have every worker pass these on to its other routers."""
        if requests:
            for channel in self._channels.values():
                channel.send(RequestsBlocked(tuple(requests)))

    async def close(self) -> None:
        """Close every channel; streams still open raise WorkerLost."""
        for worker in list(self._channels):
            self._let_go(worker)
        await asyncio.gather(*self._leaving)

    def _connected(self, worker: Peer) -> "WorkerChannel":
        channel = self._channels.get(worker)
        if channel is None or not channel.is_connected:
            raise WorkerLost(f"there is no token channel to worker {worker.worker_id} now")
        return channel

    def _let_go(self, worker: Peer) -> None:
        self._left.discard(worker)
        task = asyncio.create_task(self._channels.pop(worker).close())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _open(self, info: WorkerInfo) -> "WorkerChannel":
        return WorkerChannel(
            info, self._network, self.peer, self._clock, self._config, self._listener, self._blocked, self.num_hung
        )


class WorkerChannel:
    """One worker's connection, and the task that keeps it up. `router` is this router replica.

    It comes back after every loss, with growing pauses, for as long as its worker is in the fleet. When it drops, the
    worker forgets this router's requests, so every stream on it raises WorkerLost, and no KV is sent any more.
    """

    def __init__(
        self,
        info: WorkerInfo,
        network: Network,
        router: Peer,
        clock: Clock,
        config: TokenChannelConfig,
        listener: ChannelListener,
        blocked: BlockedRequests,
        num_hung: Counter[Role],
    ):
        self.info = info
        self.stats: WorkerStats | None = None
        self.fell_silent = False  # the last connection ended since nothing came any more
        self.sendings: dict[str, Callable[[], None]] = {}  # by request: to be called where its KV is not sent
        self._streams: dict[str, TokenStream] = {}  # by request
        self._network = network
        self._router = router
        self._clock = clock
        self._config = config
        self._listener = listener
        self._blocked = blocked
        self._num_hung = num_hung
        self._connection: Connection | None = None
        self._attempt: asyncio.Future[WorkerLost | None] = asyncio.get_running_loop().create_future()
        self._failed = False  # the last attempt, or the last connection
        self._is_leaving = False
        self._hurry = asyncio.Event()
        # In a context of its own: it outlives the request that may have opened it, and its lines are about none.
        self._task = asyncio.create_task(
            self._keep_up(), name=f"token channel {info.peer.worker_id}", context=Context()
        )

    @property
    def is_connected(self) -> bool:
        """Return whether tokens can come now."""
        return self._connection is not None

    @property
    def is_down(self) -> bool:
        """Return whether the last attempt or connection failed; a first attempt under way counts as sound."""
        return self._connection is None and self._failed

    @property
    def is_in_use(self) -> bool:
        """Return whether any request relies on it."""
        return bool(self._streams or self.sendings)

    def leave(self) -> None:
        """Tell the worker, once, that it is taken down; the connection is the last one."""
        if not self._is_leaving:
            self._is_leaving = True
            self.send(Drain())

    def stay(self) -> bool:
        """Take back `leave`. Return False where the channel has ended meanwhile."""
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

    def subscribe(self, request_id: str, max_tokens: int) -> TokenStream:
        """Open a request's stream (see TokenChannels.subscribe); there must be a connection."""
        stream = self._streams[request_id] = TokenStream(
            max_tokens,
            on_close=lambda: self._unsubscribe(request_id),
            on_unread=lambda: self.send(Cancel(request_id)),
        )
        return stream

    def _unsubscribe(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

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
                    connection, known = await self._greet()
                backoff_s = self._config.backoff_first_s
                level = logging.INFO
                await self._serve(connection, known)
            except (ConnectionLost, EpochMismatch, TimeoutError) as error:
                reason = str(error) or "no answer in time"
            except Exception as error:  # callers of `ensure` must get an error, and the channel must come back
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

    async def _greet(self) -> tuple[Connection, RequestsBlocked]:
        """Connect, be welcomed by the very incarnation that the fleet names, and hear what it knows of poison requests.

        Raises ConnectionLost (no peer, or refused), EpochMismatch (another peer) or ProtocolError.
        """
        connection = await self._network.connect(self.info.token_address)
        try:
            connection.send(Hello(sender=self._router, receiver=self.info.peer))
            answer = await connection.receive()
            if isinstance(answer, Refuse):
                raise ConnectionLost(f"refused: {answer.reason}")
            if not isinstance(answer, Welcome):
                raise ProtocolError(f"expected a welcome, got {type(answer).__name__}")
            if answer.receiver != self.info.peer:
                raise EpochMismatch(f"reached worker {answer.receiver.worker_id} of another epoch or name")
            known = await connection.receive()
            if not isinstance(known, RequestsBlocked):
                raise ProtocolError(f"expected what is known of poison requests, got {type(known).__name__}")
        except BaseException:
            await connection.close()
            raise
        return connection, known

    async def _serve(self, connection: Connection, known: RequestsBlocked) -> None:
        """Hand out what comes until the connection is lost, which raises ConnectionLost."""
        self._connection = connection
        # Before any request can go there. What the worker knows already is no news to it.
        self._blocked.learn(known.requests)
        if blocked := self._blocked.latest():
            self.send(RequestsBlocked(blocked))
        self._failed = self.fell_silent = False
        self._settle(None)
        self._listener.on_connection(self.info.peer, True)
        self._ask_for_blocks()
        silence = Silence(self._clock, self._config.silence_s)
        watch = asyncio.create_task(self._watch(connection, silence))
        try:
            while True:
                message = await connection.receive()
                silence.end()
                match message:
                    case TokenFrame():
                        for event in message.events:
                            stream = self._streams.get(event.request_id)
                            if stream is not None:  # else the request has ended here meanwhile
                                stream.receive(event)
                    case KVNotSent():
                        self.sendings.pop(message.request_id, _nothing)()
                    case StatsFrame():
                        was_hung = self.stats is not None and self.stats.has_hung
                        self.stats = message.stats
                        self._num_hung[self.info.role] += message.stats.has_hung and not was_hung
                        self._listener.on_stats(self.info.peer, message.stats)
                    case BlocksHeld() | BlocksChanged():
                        self._hear_of_blocks(message)
                    case RequestsBlocked():
                        self._blocked.learn(message.requests)
                    case Ping():
                        pass
                    case _:
                        raise ProtocolError(f"a worker sent {type(message).__name__} on a token channel")
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    def _ask_for_blocks(self) -> None:
        if self._listener.on_blocks is not None:
            self.send(ReportBlocks())

    def _hear_of_blocks(self, message: BlocksHeld | BlocksChanged) -> None:
        if self._listener.on_blocks is None:
            raise ProtocolError("a worker told of its blocks without being asked")
        if self._is_leaving:
            return  # no request is sent there, and an index that has forgotten it would learn all of it anew
        if not self._listener.on_blocks(self.info.peer, message):
            self.send(ReportBlocks(cache=not message.is_tier, tiers=message.is_tier))

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
                return  # the receiving side notices as well, and ends the channel

    def _settle(self, error: WorkerLost | None) -> None:
        """Tell those who wait in `ensure` how the attempt went."""
        if not self._attempt.done():
            self._attempt.set_result(error)

    def _drop(self, error: WorkerLost) -> None:
        self._connection = None
        self._failed = True
        self.stats = None
        self._listener.on_connection(self.info.peer, False)
        self._settle(error)
        self._attempt = asyncio.get_running_loop().create_future()
        self._hurry.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        sendings, self.sendings = self.sendings, {}
        for not_sent in sendings.values():  # the worker aborts them
            not_sent()

    async def _wait(self, backoff_s: float) -> None:
        try:
            async with asyncio.timeout(backoff_s):
                await self._hurry.wait()
        except TimeoutError:
            return  # no request needed this worker meanwhile


def _nothing() -> None:
    """Stand in for the callback of a request whose KV is not watched."""
