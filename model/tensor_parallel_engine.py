"""The engine of several ranks, as the worker on rank 0 sees it."""

import asyncio
from collections.abc import Sequence

from twostroke.model.rank_connections import RankConnections
from twostroke.model.step import BlockCopy, Engine, OnLayer, SequenceStep, with_drawn_tokens
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.rank_messages import RankCopy, RankSequence, RankStep, StepEnded
from twostroke.protocol.requests import SampledToken

BLAME_S = 0.2
"""How long a step that failed waits to hear that it was for another rank: a collective may notice first, and less."""


class TensorParallelEngine:
    """Implements model.step.Engine: every step is told to the other ranks first, and then begun on the own one."""

    def __init__(self, own: Engine, ranks: RankConnections):
        self._own = own
        self._ranks = ranks
        self._turn = asyncio.Lock()
        self._drawn: list[SampledToken | None] = []  # by the last step: the other ranks draw nothing

    @property
    def num_broken_rows(self) -> int:
        """As Engine.num_broken_rows: rank 0 alone has whole rows."""
        return self._own.num_broken_rows

    async def step(
        self,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        copies: Sequence[BlockCopy] = (),
    ) -> list[SampledToken | None]:
        """As Engine.step. Raises WorkerLost as soon as a rank is lost, though the own part may hang for it."""
        is_wanted = True

        def deliver(layer: int) -> None:
            if on_layer is not None and is_wanted:
                on_layer(layer)

        # A task of its own: the caller may be cancelled, and the other ranks can't.
        stepping = asyncio.create_task(
            self._step(batch, None if on_layer is None else deliver, copies), name="step of rank 0"
        )
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
        self, batch: Sequence[SequenceStep], on_layer: OnLayer | None, copies: Sequence[BlockCopy]
    ) -> list[SampledToken | None]:
        async with self._turn:
            self._ranks.check()
            batch = with_drawn_tokens(batch, self._drawn)
            self._ranks.tell(
                RankStep(
                    tuple(map(_for_ranks, batch)),
                    on_layer is not None,
                    tuple(RankCopy(copy.is_out, tuple(copy.cache_blocks), tuple(copy.host_blocks)) for copy in copies),
                )
            )
            self._drawn = await self._own.step(batch, on_layer, copies)
            self._ranks.tell(StepEnded())
            return self._drawn


def _for_ranks(step: SequenceStep) -> RankSequence:
    return RankSequence(tuple(step.token_ids), step.start, tuple(step.block_ids), step.draw is not None)


def _look_at(stepping: "asyncio.Task[list[SampledToken | None]]") -> None:
    """Its error says nothing new to a caller that has gone: the ranks are lost, or the next step will fail too."""
    if not stepping.cancelled():
        stepping.exception()
