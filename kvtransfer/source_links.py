"""The data links of one connection on the sending side, one after the other, and the lanes that take turns on them."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.digest import chunk_seal
from twostroke.kvtransfer.endings import run_movers
from twostroke.kvtransfer.layout import Cut
from twostroke.kvtransfer.leased_connection import LeasedConnection
from twostroke.kvtransfer.link import DataLink
from twostroke.kvtransfer.outgoing_lane import OutgoingLane
from twostroke.kvtransfer.patience import Patience, within
from twostroke.kvtransfer.retry import LinkBudget
from twostroke.kvtransfer.stats import TransferStats
from twostroke.kvtransfer.transports import Transports
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import ConnectionLost, ProtocolError
from twostroke.protocol.messages import LinkReady, LinkWanted
from twostroke.protocol.requests import Peer

logger = logging.getLogger(__name__)

CHUNKS_UNDER_WAY = 2
"""On one link: while one's bytes move, the next one's call has been made, so that no wire waits for us."""


@dataclass(slots=True)
class _Link:
    number: int
    transport: str
    data: DataLink
    num_carried: int = 0  # chunks
    is_retired: bool = False  # takes no more chunks
    under_way: list[OutgoingLane] = field(default_factory=list)  # one entry a chunk


class SourceLinks:
    """Sends chunks over the link at hand, and asks for another where that broke or is not to be trusted.

    Lanes take turns by chunk: a short prompt waits for at most one chunk of each other. A chunk's message goes out just
    before its bytes, so control connection and link stay in step whatever is aborted in between. The commit goes out
    right behind the last chunk's message. A link that is left is closed before the next one is asked for.
    """

    def __init__(
        self,
        *,
        source: Peer,
        target: Peer,
        cut: Cut,
        control: LeasedConnection,
        transports: Transports,
        config: TransferConfig,
        clock: Clock,
        stats: TransferStats,
        on_link: Callable[[LinkReady], None],
    ):
        self._source = source
        self._target = target
        self._cut = cut
        self._control = control
        self._transports = transports
        self._config = config
        self._stats = stats
        self._on_link = on_link
        self._max_units = max(1, config.max_chunk_bytes // cut.unit_bytes)
        self._budget = LinkBudget(clock, config.max_new_links, config.progress_s)
        self._line: dict[OutgoingLane, None] = {}  # those with a chunk to send, in turn
        self._work = asyncio.Event()
        self._link: _Link | None = None
        self._awaited: asyncio.Future[LinkReady] | None = None

    def serve(self, lane: OutgoingLane) -> None:
        """Let `lane` send what it has to: its commit now, a chunk when its turn comes. Never waits."""
        commit = lane.take_commit()
        if commit is not None:
            self._control.post(commit)
        if lane.has_chunk:
            self._line[lane] = None
            self._work.set()

    def forget(self, lane: OutgoingLane) -> None:
        """It has nothing to send any more."""
        self._line.pop(lane, None)

    def leave(self, link: int) -> None:
        """Send nothing more over this link, if it is the one at hand."""
        if self._link is not None and self._link.number == link:
            self._link.is_retired = True
            self._work.set()

    def ready(self, message: LinkReady) -> None:
        """The peer has prepared a link. Raises ProtocolError for one that was not asked for."""
        if self._awaited is None or self._awaited.done():
            raise ProtocolError(f"link {message.link} was not asked for")
        self._awaited.set_result(message)

    async def run(self, first: LinkReady) -> None:
        """Send over `first` and its successors. Raises ConnectionLost where the pair needs too many of them."""
        ready = first
        while True:
            without = await self._use(ready)
            ready = await self._ask(ready.link + 1, without)

    # --- inside ---

    async def _use(self, ready: LinkReady) -> tuple[str, ...]:
        """Send over one link until it breaks or is left; it is closed then. Returns the transports to avoid next."""
        transport = self._transports.by_name.get(ready.transport)
        if transport is None:
            raise ProtocolError(f"the target chose the transport {ready.transport}, which this worker has not")
        try:
            data = await transport.join(ready.params, self._cut)
        except ConnectionLost as lost:
            self._count_loss(ready, lost)
            return (ready.transport,)
        link = self._link = _Link(ready.link, ready.transport, data)
        self._on_link(ready)
        patience = Patience(self._config.lease_s)
        movers = [self._move(link, patience) for _ in range(CHUNKS_UNDER_WAY)]
        loss = await run_movers(*movers, close=lambda: self._close(link))
        if loss is None:
            logger.warning("leaving %s link %d to %s: it damages chunks", link.transport, link.number, self._target)
            return (link.transport,)
        self._count_loss(ready, loss)
        return () if link.num_carried else (link.transport,)

    async def _close(self, link: _Link) -> None:
        self._link = None
        await link.data.close()
        for lane in link.under_way:
            lane.end_chunk()

    async def _ask(self, number: int, without: tuple[str, ...]) -> LinkReady:
        if not self._budget.ask():
            raise ConnectionLost(
                f"{self._config.max_new_links} links to the target were lost in {self._config.progress_s:g} s"
            )
        self._awaited = asyncio.get_running_loop().create_future()
        self._control.post(LinkWanted(number, without))
        # The target first waits for what is under way on the old link, which may take it a lease.
        ready = await within(2 * self._config.lease_s, self._awaited, "another link")
        if ready.link != number:
            raise ProtocolError(f"link {ready.link} came in place of {number}")
        return ready

    async def _move(self, link: _Link, patience: Patience) -> None:
        """Take turns' chunks to the link, one at a time. Raises ConnectionLost when it breaks."""
        while True:
            await self._control.drain()
            if link.is_retired:
                return
            if not self._line:
                self._work.clear()
                await self._work.wait()
                continue
            lane = next(iter(self._line))
            del self._line[lane]
            chunk = lane.begin_chunk(link.number, self._max_units)
            if chunk is None:
                continue
            self._control.post(chunk)
            link.under_way.append(lane)
            self.serve(lane)  # at the end of the line
            await patience.wait(
                link.data.send(lane.segments(chunk), chunk_seal(chunk, self._source, self._target)), "sending a chunk"
            )
            link.under_way.remove(lane)
            link.num_carried += 1
            self._stats.bytes += chunk.num_bytes
            lane.end_chunk()

    def _count_loss(self, ready: LinkReady, loss: ConnectionLost) -> None:
        self._stats.links_lost += 1
        logger.warning("lost %s link %d to %s: %s", ready.transport, ready.link, self._target, loss)
