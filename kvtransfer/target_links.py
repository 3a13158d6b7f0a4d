"""The data links of one connection on the receiving side, one after the other, and the chunks that come over them."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.digest import chunk_seal
from twostroke.kvtransfer.endings import all_ended, finish, run_movers
from twostroke.kvtransfer.incoming_lane import IncomingLane
from twostroke.kvtransfer.layout import Cut
from twostroke.kvtransfer.leased_connection import LeasedConnection
from twostroke.kvtransfer.link import DataLink, LinkParams, PendingLink
from twostroke.kvtransfer.patience import Patience
from twostroke.kvtransfer.retry import LinkBudget
from twostroke.kvtransfer.source_links import CHUNKS_UNDER_WAY
from twostroke.kvtransfer.stats import TransferStats
from twostroke.kvtransfer.transport_choice import Choice
from twostroke.kvtransfer.transports import Transports
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import ConnectionLost, ProtocolError
from twostroke.protocol.messages import Chunk, Damaged, LinkReady, LinkWanted, Verified
from twostroke.protocol.requests import Peer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Link:
    data: DataLink
    under_way: list[tuple[IncomingLane, Chunk]] = field(default_factory=list)


class TargetLinks:
    """Takes announced chunks off the link at hand, in order; those of a link that broke are asked for again.

    The source leaves a link before it asks for another: what is announced before its LinkWanted comes over the old one,
    which is closed before the new one is prepared.
    """

    def __init__(
        self,
        *,
        source: Peer,
        target: Peer,
        host: str,
        cut: Cut,
        max_chunk_units: int,
        control: LeasedConnection,
        choose: Callable[[tuple[str, ...]], Choice],
        lanes: Mapping[bytes, IncomingLane],
        transports: Transports,
        config: TransferConfig,
        clock: Clock,
        stats: TransferStats,
    ):
        self._source = source
        self._target = target
        self._host = host
        self._cut = cut
        self._control = control
        self._choose = choose
        self._lanes = lanes
        self._transports = transports
        self._config = config
        self._stats = stats
        # Looser than the source's, whose requests may come in a bunch.
        self._budget = LinkBudget(clock, config.max_new_links, config.progress_s / 2)
        self._max_chunk_units = max_chunk_units
        self._number = 0  # of the last link that was asked for
        self._queue: deque[Chunk | LinkWanted] = deque()
        self._arrived = asyncio.Event()
        self._is_left = asyncio.Event()  # nothing is left to come over the link at hand

    def put(self, message: Chunk | LinkWanted) -> None:
        """What comes next. Raises ProtocolError for what can't be; the stream of bytes is not to be trusted then."""
        if len(self._queue) >= self._config.max_queued_messages:
            raise ProtocolError("the source runs ahead of its bytes")
        if isinstance(message, Chunk):
            self._check(message)
            lane = self._lanes.get(message.transfer_id)
            if lane is not None:
                lane.announce(message)
        else:
            self._number += 1
            if message.link != self._number or not self._budget.ask():
                raise ProtocolError(f"link {message.link} can't be had: {self._number} is next, in its time")
        self._queue.append(message)
        self._arrived.set()
        if self._is_another_wanted:
            self._is_left.set()

    async def run(self, welcome: Callable[[Choice, LinkParams], None]) -> None:
        """Prepare the first link, tell the peer by `welcome`, and receive until cancelled. Raises ConnectionLost."""
        choice, pending = await self._prepare(())
        try:
            welcome(choice, pending.params)
            await self._serve(pending, 0)
        finally:
            await finish(pending.close())
        while True:
            wanted = self._queue.popleft()
            if not isinstance(wanted, LinkWanted):
                raise ProtocolError("a chunk came between two links")
            self._is_left.clear()
            choice, pending = await self._prepare(wanted.without)
            try:
                self._control.post(LinkReady(wanted.link, choice.transport, pending.params))
                await self._serve(pending, wanted.link)
            finally:
                await finish(pending.close())

    # --- inside ---

    @property
    def _is_another_wanted(self) -> bool:
        """The source has left the link at hand, and nothing that it announced before is left."""
        return bool(self._queue) and isinstance(self._queue[0], LinkWanted)

    def _check(self, chunk: Chunk) -> None:
        """Raises ProtocolError for a chunk whose bytes can't be told from those behind it."""
        num_units = sum(run.num_units for run in chunk.runs)
        if len(chunk.runs) > self._cut.layout.num_layers:  # a layer's next units are one run
            raise ProtocolError(f"a chunk of {len(chunk.runs)} runs can't be")
        if chunk.link != self._number:
            raise ProtocolError(f"a chunk can't be on link {chunk.link}: {self._number} is at hand")
        if not all(run.num_units > 0 for run in chunk.runs) or not 0 < num_units <= self._max_chunk_units:
            raise ProtocolError(f"a chunk of {num_units} units can't be")
        if chunk.num_bytes != num_units * self._cut.unit_bytes:
            raise ProtocolError(f"{num_units} units can't be {chunk.num_bytes} bytes")

    async def _prepare(self, without: tuple[str, ...]) -> tuple[Choice, PendingLink]:
        """The best transport that is not in `without` and can be prepared here. Raises ConnectionLost."""
        while True:
            choice = self._choose(without)
            try:
                return choice, await self._transports.by_name[choice.transport].prepare(self._host, self._cut)
            except ConnectionLost as lost:
                if choice.transport in without:
                    raise
                logger.warning("can't prepare a %s link: %s", choice.transport, lost)
                without = (*without, choice.transport)

    async def _serve(self, pending: PendingLink, number: int) -> None:
        """Receive over one link until the source asks for another; it is closed then."""
        try:
            data = await self._established(pending)
        except ConnectionLost as lost:
            logger.warning("link %d from %s was not joined: %s", number, self._source, lost)
        else:
            if data is not None:
                await self._receive(_Link(data), number)
        while not self._is_another_wanted:  # whatever still comes over the broken link does not arrive
            if self._queue:
                chunk = self._queue.popleft()
                lane = self._lanes.get(chunk.transfer_id) if isinstance(chunk, Chunk) else None
                if isinstance(chunk, Chunk) and lane is not None:
                    self._answer(lane.lost_chunk(chunk))
            else:
                self._arrived.clear()
                await self._arrived.wait()

    async def _established(self, pending: PendingLink) -> DataLink | None:
        """The link; None where the source can't join it and asks for another. Raises ConnectionLost."""
        joining = asyncio.get_running_loop().create_task(pending.established())
        leaving = asyncio.get_running_loop().create_task(_event(self._is_left))
        try:
            try:
                await asyncio.wait([joining, leaving], return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                joining.cancel()
                await all_ended([joining, leaving])
        except asyncio.CancelledError:
            if not joining.cancelled() and joining.exception() is None:
                await finish(joining.result().close())
            raise
        return None if joining.cancelled() else joining.result()

    async def _receive(self, link: _Link, number: int) -> None:
        """Receive until the link breaks, or nothing is left to come over it; it is closed then."""
        patience = Patience(self._config.lease_s)
        movers = [self._move(link, patience) for _ in range(CHUNKS_UNDER_WAY)]
        loss = await run_movers(*movers, close=lambda: self._close(link))
        if loss is not None:
            logger.warning("lost link %d from %s: %s", number, self._source, loss)

    async def _close(self, link: _Link) -> None:
        await link.data.close()
        for lane, chunk in link.under_way:
            self._answer(lane.end_chunk(chunk, is_intact=False))

    async def _move(self, link: _Link, patience: Patience) -> None:
        """Take chunks off the link, one at a time. Raises ConnectionLost when it breaks."""
        while not self._is_another_wanted:
            if not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            chunk = self._queue.popleft()
            if not isinstance(chunk, Chunk):
                raise ProtocolError("a link was asked for twice")
            lane = self._lanes.get(chunk.transfer_id)
            segments = lane.begin_chunk(chunk) if lane is not None else None
            if lane is None or segments is None:
                num_units = sum(run.num_units for run in chunk.runs)
                await patience.wait(link.data.discard(num_units), "discarding a chunk")
                continue
            link.under_way.append((lane, chunk))
            seal = chunk_seal(chunk, self._source, self._target)
            is_intact = await patience.wait(link.data.receive(segments, seal), "receiving a chunk")
            link.under_way.remove((lane, chunk))
            self._stats.bytes += chunk.num_bytes
            self._stats.digest_failures += not is_intact
            self._answer(lane.end_chunk(chunk, is_intact=is_intact))

    def _answer(self, message: Damaged | Verified | None) -> None:
        if message is not None:
            self._control.post(message)


async def _event(event: asyncio.Event) -> None:
    await event.wait()
