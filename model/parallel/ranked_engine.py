"""The engine of several ranks, as the worker on rank 0 sees it, and its connections to the other ranks.

The ranks stand and fall together: the first one that is lost, or fails, is the end of all, for good. No torch here,
and no KV transfer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from twostroke.model.step import (
    BlockCopy,
    Draw,
    Engine,
    OnLayer,
    PromptScorer,
    SequenceStep,
)
from twostroke.protocol.errors import ConnectionLost, WorkerLost
from twostroke.protocol.messages import (
    ArrangeExperts,
    Message,
    RankCopy,
    RankFailed,
    RankHello,
    RankLoaded,
    RankSequence,
    RankStep,
    Refuse,
    StageExpertHits,
    StepEnded,
    TransferEnded,
)
from twostroke.protocol.network import Connection, Listener, Network
from twostroke.protocol.requests import Address, Peer, SampledToken, SamplingParams, ScoringParams

_log = logging.getLogger(__name__)


class RankConnections:
    """Waits for the ranks, tells them all the same, and hears of their transfers and of their end."""

    def __init__(self, *, worker: Peer, size: int, network: Network):
        """`size` counts rank 0, which is here. Needs a running event loop."""
        self._worker = worker
        self._size = size
        self._network = network
        self._listener: Listener | None = None
        self._connections: dict[int, Connection] = {}
        self._addresses: dict[int, Address] = {}
        self._all_loaded = asyncio.Event()
        self._is_closing = False
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Done, with the reason, once the ranks can't be relied on any more."""
        self.expert_hits: dict[int, tuple[tuple[int, ...], ...]] = {}
        """Counters that a rank of each other stage reported last."""
        self._watchers: list[Callable[[int, TransferEnded], None]] = []
        self._numbers = 0

    @property
    def others(self) -> range:
        """Numbers of all ranks but 0."""
        return range(1, self._size)

    @property
    def loss(self) -> str | None:
        """Reason why the ranks can't be relied on any more; None while they can."""
        return self.lost.result() if self.lost.done() else None

    def new_number(self) -> int:
        """Return a number that no transfer of this worker has had."""
        self._numbers += 1
        return self._numbers

    def watch(self, on_ended: Callable[[int, TransferEnded], None]) -> None:
        """Call `on_ended` with the rank whose part of a transfer has ended, of every transfer."""
        self._watchers.append(on_ended)

    async def listen(self, host: str) -> Address:
        """Return the address for the ranks to connect to. Raises ConnectionLost where `host` can't be listened on."""
        self._listener = await self._network.listen(host, self._serve)
        return self._listener.address

    async def loaded(self) -> tuple[Address, ...]:
        """Wait until every rank has loaded; where they listen for KV, in order. Raises WorkerLost."""
        loading = asyncio.ensure_future(self._all_loaded.wait())
        try:
            await asyncio.wait((loading, self.lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            loading.cancel()
        self.check()
        return tuple(self._addresses[rank] for rank in self.others)

    def check(self) -> None:
        """Raises WorkerLost where a rank is lost."""
        if self.loss is not None:
            raise WorkerLost(self.loss)

    def tell(self, message: Message) -> None:
        """Send a message to every rank; never waits. Only `lost` reports a lost rank."""
        for rank, connection in self._connections.items():
            try:
                connection.send(message)
            except ConnectionLost as error:
                self.fail(f"rank {rank} is lost: {error}")

    def fail(self, reason: str) -> None:
        """The ranks can't be relied on any more. Only the first reason counts."""
        if not self.lost.done():
            if not self._is_closing:
                _log.error("the ranks of worker %s end: %s", self._worker.worker_id, reason)
            self.lost.set_result(reason)

    async def close(self) -> None:
        """Close all connections, whereupon the ranks end."""
        self._is_closing = True
        self.fail("the worker is ending")
        if self._listener is not None:
            await self._listener.close()

    async def _serve(self, connection: Connection) -> None:
        rank = 0
        try:
            hello = await connection.receive()
            if not isinstance(hello, RankHello) or not self._is_awaited(hello):
                connection.send(Refuse("this is no rank that is waited for"))
                return
            rank = hello.rank
            self._connections[rank] = connection
            while True:
                self._handle(rank, await connection.receive())
        except ConnectionLost as error:
            if rank:
                self.fail(f"rank {rank} is lost: {error}")
        finally:
            if self._connections.get(rank) is connection:
                del self._connections[rank]

    def _is_awaited(self, hello: RankHello) -> bool:
        return hello.worker == self._worker and hello.rank in self.others and hello.rank not in self._connections

    def _handle(self, rank: int, message: object) -> None:
        match message:
            case RankLoaded(transfer_address):
                self._addresses[rank] = transfer_address
                if len(self._addresses) == len(self.others):
                    self._all_loaded.set()
            case TransferEnded():
                for on_ended in self._watchers:
                    on_ended(rank, message)
            case StageExpertHits(layers):
                self.expert_hits[rank] = layers
            case RankFailed(reason):
                self.fail(f"rank {rank} failed: {reason}")
            case _:
                raise ConnectionLost(f"a rank must not send {type(message).__name__}")


BLAME_S = 0.2
"""Seconds that a failed step waits to hear of another rank's failure: a collective may notice it first, and tells less.
"""


@dataclass(frozen=True)
class Rebalancing:
    """Rebalancing of experts among the ranks, between steps."""

    next: Callable[[], ArrangeExperts | None]  # what all ranks are to do before the step that is about to begin
    arrange: Callable[[ArrangeExperts], Awaitable[None]]  # does rank 0's part, before any step that is asked for later


class TensorParallelEngine:
    """Implements model.step.Engine: each step is sent to the other ranks first, and then begins on this one.

    As with one rank, the next step is begun while the one before is under way: the ranks hand on what was drawn among
    themselves (ModelRunner.launch). Only steps that announce layers run alone, since what is said of the KV of one must
    not reach the ranks as if it were of another's.
    """

    def __init__(self, own: Engine, ranks: RankConnections, rebalancing: Rebalancing | None = None):
        self._own = own
        self._rebalancing = rebalancing
        self._ranks = ranks
        self._turn = asyncio.Lock()  # to begin a step
        self._last: asyncio.Task[list[SampledToken | None]] | None = None
        self._last_announces = False
        self._arranging: asyncio.Future[None] | None = None  # kept, or the task would be collected

    @property
    def num_broken_rows(self) -> int:
        """Implement Engine.num_broken_rows: only rank 0 has whole rows."""
        return self._own.num_broken_rows

    async def step(
        self,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        copies: Sequence[BlockCopy] = (),
    ) -> list[SampledToken | None]:
        """Implement Engine.step. Raises WorkerLost as soon as a rank is lost, though this rank's part may hang for
        it."""
        is_wanted = True

        def deliver(layer: int) -> None:
            if on_layer is not None and is_wanted:
                on_layer(layer)

        # A task of its own: the caller may be cancelled, and the other ranks can't.
        stepping = asyncio.create_task(
            self._step(batch, None if on_layer is None else deliver, copies, self._last), name="step of rank 0"
        )
        self._last = stepping
        try:
            await asyncio.wait((stepping, self._ranks.lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_wanted = False
            stepping.add_done_callback(_look_at)
        if stepping.done() and stepping.exception() is not None:
            await asyncio.wait({self._ranks.lost}, timeout=BLAME_S)
        if self._ranks.loss is not None:
            raise WorkerLost(f"an engine step failed: {self._ranks.loss}")
        return stepping.result()

    async def _step(
        self,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None,
        copies: Sequence[BlockCopy],
        before: "asyncio.Task[list[SampledToken | None]] | None",
    ) -> list[SampledToken | None]:
        async with self._turn:
            if before is not None and (on_layer is not None or self._last_announces):
                await asyncio.wait({before})
            self._last_announces = on_layer is not None
            self._ranks.check()
            self._arrange_experts()
            self._ranks.tell(
                RankStep(
                    tuple(map(for_ranks, batch)),
                    on_layer is not None,
                    tuple(RankCopy(copy.is_out, tuple(copy.cache_blocks), tuple(copy.host_blocks)) for copy in copies),
                )
            )
            running = asyncio.create_task(self._own.step(batch, on_layer, copies))
        drawn = await running
        if before is not None:
            await asyncio.wait({before})  # ends are reported in the steps' order
        self._ranks.tell(StepEnded())
        return drawn

    def _arrange_experts(self) -> None:
        """Arrange experts where they are to change; a failure also fails the step behind it."""
        if self._rebalancing is None or (order := self._rebalancing.next()) is None:
            return
        self._ranks.tell(order)
        self._arranging = asyncio.ensure_future(self._rebalancing.arrange(order))
        self._arranging.add_done_callback(_look_at)


def for_ranks(step: SequenceStep) -> RankSequence:
    """Return what the other ranks need of a step."""
    scorer = step.scorer
    scored_rows = None if scorer is None else len(scorer.targets(step.start, len(step.token_ids)))
    return RankSequence(
        tuple(step.token_ids),
        step.start,
        tuple(step.block_ids),
        draws=step.draw is not None,
        takes_largest=step.draw is not None and step.draw.takes_largest,
        scored_rows=scored_rows,
        follows=step.follows,
        copied_from=step.copied_from,
    )


_DRAWN_ELSEWHERE = Draw(SamplingParams(temperature=1.0), history=(), num_prompt_tokens=0)
_LARGEST = Draw(SamplingParams(temperature=0.0), history=(), num_prompt_tokens=0)


def as_on_rank_0(each: RankSequence) -> SequenceStep:
    """Return another rank's step: all that the leader computes, with as many rows of logits."""
    draw = None if not each.draws else _LARGEST if each.takes_largest else _DRAWN_ELSEWHERE
    scorer = None
    if each.scored_rows is not None:
        scorer = PromptScorer(ScoringParams(logprobs=0), range(each.start + 1 + each.scored_rows))
    return SequenceStep(each.token_ids, each.start, each.block_ids, draw, each.follows, scorer, each.copied_from)


def _look_at(stepping: "asyncio.Future[Any]") -> None:
    """Consume the error of an abandoned step: the ranks are lost, or the next step will fail too."""
    if not stepping.cancelled():
        stepping.exception()
