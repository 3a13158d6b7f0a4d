"""A rank of a worker, other than 0, in a process of its own:
`python -m twostroke.cluster.ranks.rank_process` with its order on stdin.

It does as rank 0 says, and ends with its connection to rank 0, whatever it is doing then; or with whoever has started
it, which keeps its standard input open for as long as it lives.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections import deque
from typing import NoReturn

import msgspec

from twostroke.cluster.config.process_logs import close_logs, log_to
from twostroke.cluster.ranks.rank_parts import RankOrder, RankParts, load_rank
from twostroke.kvtransfer.ranks import RankTransfers
from twostroke.kvtransfer.timeouts import run_until_lost
from twostroke.model.parallel.ranked_engine import as_on_rank_0
from twostroke.model.parallel.tensor_parallel import RankPlace
from twostroke.model.step import BlockCopy
from twostroke.protocol.errors import ConnectionLost, TwostrokeError, WorkerLost
from twostroke.protocol.garbage import freeze_start_up
from twostroke.protocol.messages import (
    ArrangeExperts,
    Message,
    RankFailed,
    RankHello,
    RankLoaded,
    RankStep,
    StageExpertHits,
    StepEnded,
)
from twostroke.protocol.network import Connection, TcpNetwork
from twostroke.protocol.settings import from_plain

_log = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Seconds that a step may go on after rank 0 has hung up."""
HITS_S = 1.0
"""Seconds between two reports of expert hits to rank 0."""


async def run_rank(order: RankOrder) -> None:
    """Be the rank until rank 0 hangs up. Where the engine's thread can't be waited for, ends the whole process."""
    network = TcpNetwork(order.secret)
    try:
        connection = await network.connect(order.leader)
    except ConnectionLost:
        return  # rank 0 has ended meanwhile
    try:
        await _Rank(order, network, connection).run()
    finally:
        await connection.close()


class _Rank:
    """Reads what rank 0 says as it comes, and does it in its order."""

    def __init__(self, order: RankOrder, network: TcpNetwork, connection: Connection):
        self._order = order
        self._network = network
        self._connection = connection
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._parts: RankParts | None = None
        self._transfers: RankTransfers | None = None
        self._stepping: deque[asyncio.Task[None]] = deque()  # until rank 0's have ended, too
        self._arranging: asyncio.Task[None] | None = None  # the last one that was told
        self._told_hits_at = -math.inf

    async def run(self) -> None:
        """Return when rank 0 has hung up, with all ended here."""
        try:
            self._connection.send(RankHello(self._order.worker, self._order.rank))
            await run_until_lost(self._listen(), self._work())
        except TwostrokeError as error:
            _log.error("rank %d of worker %s ends: %s", self._order.rank, self._order.worker.worker_id, error)
            self._tell(RankFailed(str(error)))
        except Exception as error:  # torch's own, and bugs: rank 0 must hear of these too, and nothing be left here
            _log.exception("rank %d of worker %s has failed", self._order.rank, self._order.worker.worker_id)
            self._tell(RankFailed(f"{type(error).__name__}: {error}"))
        if self._parts is None or self._transfers is None:
            _leave()  # a thread is still loading, perhaps waiting for ranks that are gone
        await self._transfers.close()
        under_way = [*self._stepping, *([self._arranging] if self._arranging else [])]
        if under_way:
            _, hanging = await asyncio.wait(under_way, timeout=PATIENCE_S)
            if hanging:
                _leave()  # it waits in the middle of a step for ranks that are gone
        await self._parts.close()

    async def _listen(self) -> None:
        while True:
            self._messages.put_nowait(await self._connection.receive())

    async def _work(self) -> None:
        order = self._order
        host = order.host if order.settings.parallel.has_stages else None
        place = RankPlace(order.rank, order.rendezvous, host)
        parts = self._parts = await load_rank(order.settings, order.worker, self._network, order.secret, place)
        transfers = self._transfers = RankTransfers(
            sender=parts.sender,
            receiver=parts.receiver,
            layers=parts.store.layout.layers_of(parts.store.rank),
            tell=self._tell,
        )
        (address,) = await parts.receiver.start(order.host)
        freeze_start_up()
        self._connection.send(RankLoaded(address))
        while True:
            match await self._messages.get():
                case RankStep() as step:
                    transfers.step_began()  # here, not in the task: what was said behind the step is next
                    before = self._stepping[-1] if self._stepping else None
                    self._stepping.append(asyncio.create_task(self._step(parts, transfers, step, before)))
                case ArrangeExperts() as arrangement:
                    self._arranging = asyncio.create_task(self._arrange(parts, arrangement))
                case StepEnded():
                    await self._step_over()
                case RankFailed(reason):  # our own
                    raise WorkerLost(reason)
                case message:
                    transfers.handle(message)

    async def _step(
        self, parts: RankParts, transfers: RankTransfers, step: RankStep, before: asyncio.Task[None] | None
    ) -> None:
        batch = [as_on_rank_0(each) for each in step.sequences]
        copies = [BlockCopy(copy.is_out, copy.cache_blocks, copy.host_blocks) for copy in step.copies]
        try:
            await parts.loaded.engine.step(batch, transfers.layer_done if step.tells_layers else None, copies)
        except WorkerLost as error:
            self._messages.put_nowait(RankFailed(str(error)))
        else:
            if before is not None:
                await asyncio.wait({before})
            transfers.step_ended()
            self._tell_hits(parts)

    async def _arrange(self, parts: RankParts, arrangement: ArrangeExperts) -> None:
        """Behind the steps that were told before, on the engine's thread."""
        try:
            await parts.loaded.engine.arrange_experts(arrangement)
        except WorkerLost as error:
            self._messages.put_nowait(RankFailed(str(error)))
        except Exception as error:  # a bug: nobody waits for this task
            _log.exception("rank %d could not arrange experts", self._order.rank)
            self._messages.put_nowait(RankFailed(f"{type(error).__name__}: {error}"))

    def _tell_hits(self, parts: RankParts) -> None:
        """Report expert hits from one rank of each stage, because all ranks of a stage have the same. Rank 0 reads
        those of its own stage itself."""
        of_stage = self._order.rank % self._order.settings.parallel.tensor_ranks
        if of_stage or time.monotonic() < self._told_hits_at + HITS_S:
            return
        self._told_hits_at = time.monotonic()
        if (hits := parts.loaded.expert_hits) is not None:
            self._tell(StageExpertHits(tuple(map(tuple, hits.read().tolist()))))

    async def _step_over(self) -> None:
        """Wait for the first step under way, which a cancelled call leaves alone. Raises what it could not tell."""
        await asyncio.wait({self._stepping[0]})
        self._stepping.popleft().result()

    def _tell(self, message: Message) -> None:
        with contextlib.suppress(ConnectionLost):  # then nobody is there to be told
            self._connection.send(message)


def _leave() -> NoReturn:
    """End this process at once, but for the lines that it has logged."""
    close_logs()
    sys.stderr.flush()
    os._exit(1)


async def _run_until_orphaned(order: RankOrder) -> None:
    """Be the rank until rank 0 hangs up, or standard input ends."""

    def look() -> None:
        if not os.read(sys.stdin.fileno(), 1):
            _leave()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), look)
    await run_rank(order)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, with whom this process ends
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=RankOrder, dec_hook=from_plain)
    worker = {"worker_id": order.worker.worker_id, "epoch": f"{order.worker.epoch:016x}", "rank": str(order.rank)}
    log_to(None, order.settings.logging, worker)
    asyncio.run(_run_until_orphaned(order))


if __name__ == "__main__":
    main()
