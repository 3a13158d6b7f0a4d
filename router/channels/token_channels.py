"""The token channels of one router replica: one per worker, shared by all its requests.

The channel of a worker that has left the fleet stays until the requests on it have ended. Nothing here knows Ray or
HTTP.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.messages import Cancel, Convicted, Message, PrefillFailed, SendPrefix
from twostroke.protocol.network import Network
from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import WorkerInfo, WorkerStats
from twostroke.protocol.verdicts import Verdict
from twostroke.router.channels.token_stream import TokenStream
from twostroke.router.channels.worker_channel import ChannelListener, TokenChannelConfig, VerdictExchange, WorkerChannel

_DEFAULTS = TokenChannelConfig()


class TokenChannels:
    """All token channels of one router replica.

    `peer` is this replica's id and epoch; the id is the `router_id` of its requests.
    """

    def __init__(self, *, network: Network, peer: Peer, clock: Clock, config: TokenChannelConfig = _DEFAULTS):
        self.peer = peer
        self._network = network
        self._clock = clock
        self._config = config
        self._channels: dict[Peer, WorkerChannel] = {}
        self._followed: list[WorkerInfo] = []
        self._left: set[Peer] = set()  # those with a channel that are not followed
        self._listener: ChannelListener | None = None
        self._exchange: VerdictExchange | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    def listen(self, listener: ChannelListener) -> None:
        """Have `listener` told of all channels. Raises RuntimeError where there are channels already."""
        self._check_unused()
        self._listener = listener

    def share_verdicts(self, exchange: VerdictExchange) -> None:
        """Exchange verdicts with other routers by way of all workers. Raises RuntimeError as `listen`."""
        self._check_unused()
        self._exchange = exchange

    def follow(self, workers: Iterable[WorkerInfo]) -> None:
        """Keep a channel to each of `workers`, and to others until nobody uses it. Connects in the background.

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
            channel = self._open(info)
            self._channels[info.peer] = channel
            self._left.add(info.peer)
        await channel.ensure()

    async def outlive(self, worker: Peer) -> None:
        """Return when the channel to this worker drops: it has forgotten our requests. At once where there is none."""
        channel = self._channels.get(worker)
        if channel is not None:
            await channel.outlive()

    def is_connected(self, worker: Peer) -> bool:
        """Whether tokens can come from this worker now."""
        channel = self._channels.get(worker)
        return channel is not None and channel.is_connected

    def is_down(self, worker: Peer) -> bool:
        """Whether the channel to this worker is broken; a first attempt under way counts as sound."""
        channel = self._channels.get(worker)
        return channel is not None and channel.is_down

    def fell_silent(self, worker: Peer) -> bool:
        """Whether the worker was given up without a word: stopped, cut off, or its machine is gone."""
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
        channel = self._channels.get(worker)
        if channel is None:
            raise WorkerLost(f"worker {worker.worker_id} has left the fleet")
        return channel.subscribe(request_id, max_tokens)

    def watch_sending(self, worker: Peer, request_id: str, not_sent: Callable[[], None]) -> None:
        """Call `not_sent`, once at most, when the worker says that it has not sent the request's KV, or is lost.

        Until `unwatch_sending`. Raises WorkerLost where there is no channel (see `ensure`).
        """
        channel = self._channels.get(worker)
        if channel is None:
            raise WorkerLost(f"worker {worker.worker_id} has left the fleet")
        channel.watch_sending(request_id, not_sent)

    def unwatch_sending(self, worker: Peer, request_id: str) -> None:
        """Harmless where nothing is watched."""
        channel = self._channels.get(worker)
        if channel is not None:
            channel.unwatch_sending(request_id)

    def cancel(self, worker: Peer, request_id: str) -> None:
        """Tell the worker to forget the request. Says nothing where the channel is down: that tells it, too."""
        self._send(worker, Cancel(request_id))

    def prefill_failed(self, worker: Peer, request_id: str) -> None:
        """Tell the decode worker that no KV will come for this request."""
        self._send(worker, PrefillFailed(request_id))

    def send_prefix(self, worker: Peer, message: SendPrefix) -> None:
        """Ask the worker for a prefix. Where the channel is down, the target waits for it in vain, but not for long."""
        self._send(worker, message)

    def tell_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Have every worker pass this on to its other routers."""
        if verdicts:
            for channel in self._channels.values():
                channel.send(Convicted(tuple(verdicts)))

    async def close(self) -> None:
        """Close every channel; streams still open raise WorkerLost."""
        for worker in list(self._channels):
            self._let_go(worker)
        await asyncio.gather(*self._leaving)

    def _check_unused(self) -> None:
        if self._channels:
            raise RuntimeError("a listener must be there before the first channel is")

    def _let_go(self, worker: Peer) -> None:
        self._left.discard(worker)
        task = asyncio.create_task(self._channels.pop(worker).close())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _open(self, info: WorkerInfo) -> WorkerChannel:
        return WorkerChannel(info, self._network, self.peer, self._clock, self._config, self._listener, self._exchange)

    def _send(self, worker: Peer, message: Message) -> None:
        channel = self._channels.get(worker)
        if channel is not None:
            channel.send(message)
