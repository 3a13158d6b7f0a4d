"""Rank 0's engine tells the others every step, in order, and does not wait for what can't end any more."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from twostroke.model.parallel.ranked_engine import RankConnections, TensorParallelEngine
from twostroke.model.step import BlockCopy, Draw, OnLayer, SequenceStep
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.messages import RankHello, RankSequence, RankStep, StepEnded
from twostroke.protocol.network import Connection, TcpNetwork
from twostroke.protocol.requests import Peer, SampledToken, SamplingParams

WORKER = Peer("w", 5)
DRAW = Draw(SamplingParams(), [1, 2], 2)


class GatedEngine:
    """Each step draws the last token's successor, announces a layer, and ends once `gate` is open."""

    num_broken_rows = 3

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.seen: list[list[int]] = []
        self.fault: WorkerLost | None = None

    async def step(
        self,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        copies: Sequence[BlockCopy] = (),
    ) -> list[SampledToken | None]:
        self.seen.append([token for step in batch for token in step.token_ids])
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        if on_layer is not None:
            on_layer(0)
        return [None if step.draw is None else SampledToken(step.token_ids[-1] + 1) for step in batch]


@contextlib.asynccontextmanager
async def two_ranks() -> AsyncIterator[tuple[GatedEngine, TensorParallelEngine, RankConnections, Connection]]:
    network = TcpNetwork(b"a secret of tests")
    ranks = RankConnections(worker=WORKER, size=2, network=network)
    other = await network.connect(await ranks.listen("127.0.0.1"))
    other.send(RankHello(WORKER, 1))
    own = GatedEngine()
    engine = TensorParallelEngine(own, ranks)
    while not ranks._connections:  # noqa: ASYNC110  # it has said who it is
        await asyncio.sleep(0.001)
    try:
        async with asyncio.timeout(60):
            yield own, engine, ranks, other
    finally:
        await ranks.close()
        await other.close()


async def test_a_step_is_told_before_it_ends_and_its_end_after() -> None:
    async with two_ranks() as (own, engine, _, other):
        own.gate.clear()
        layers: list[int] = []
        step = asyncio.create_task(engine.step([SequenceStep([7, 8], 2, [4], DRAW)], layers.append))
        assert await other.receive() == RankStep((RankSequence((7, 8), 2, (4,), True),), True)
        own.gate.set()
        assert await other.receive() == StepEnded()
        assert await step == [SampledToken(9)]
        assert layers == [0]
        assert engine.num_broken_rows == 3


async def test_a_step_is_told_and_begun_while_the_one_that_it_follows_is_under_way() -> None:
    async with two_ranks() as (own, engine, _, other):
        own.gate.clear()
        first = asyncio.create_task(engine.step([SequenceStep([7], 2, [4], DRAW)]))
        second = asyncio.create_task(engine.step([SequenceStep([0], 3, [4], DRAW, follows=0)]))
        assert [await other.receive() for _ in range(2)] == [
            RankStep((RankSequence((7,), 2, (4,), True),), False),
            RankStep((RankSequence((0,), 3, (4,), True, follows=0),), False),
        ]
        while len(own.seen) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert not first.done()
        own.gate.set()
        assert await asyncio.gather(first, second) == [[SampledToken(8)], [SampledToken(1)]]
        assert [await other.receive() for _ in range(2)] == [StepEnded()] * 2


async def test_a_step_is_not_said_to_have_ended_before_the_one_in_front_of_it() -> None:
    async with two_ranks() as (own, engine, _, other):
        own.gate.clear()
        first = asyncio.create_task(engine.step([SequenceStep([7], 2, [4], DRAW)]))
        assert isinstance(await other.receive(), RankStep)
        blocked, own.gate = own.gate, asyncio.Event()
        own.gate.set()  # the second ends at once
        second = asyncio.create_task(engine.step([SequenceStep([9], 2, [5], DRAW)]))
        assert isinstance(await other.receive(), RankStep)
        while len(own.seen) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not second.done()
        blocked.set()
        assert await asyncio.gather(first, second) == [[SampledToken(8)], [SampledToken(10)]]
        assert [await other.receive() for _ in range(2)] == [StepEnded()] * 2


@pytest.mark.parametrize("announcing", [0, 1])
async def test_a_step_that_announces_layers_runs_alone(announcing: int) -> None:
    async with two_ranks() as (own, engine, _, other):
        own.gate.clear()
        layers: list[int] = []
        steps = [
            asyncio.create_task(
                engine.step([SequenceStep([7], 2, [4], DRAW)], layers.append if i == announcing else None)
            )
            for i in range(3)
        ]
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(own.seen) == 1
        own.gate.set()
        await asyncio.gather(*steps)
        assert layers == [0]
        told = [type(await other.receive()) for _ in range(6)]
        begun = [RankStep, StepEnded] * (announcing + 1)
        assert told[: len(begun)] == begun


async def test_a_lost_rank_fails_the_step_that_hangs_for_it_and_all_later_ones() -> None:
    async with two_ranks() as (own, engine, _, other):
        own.gate.clear()
        step = asyncio.create_task(engine.step([SequenceStep([7], 2, [4], DRAW)]))
        await other.receive()
        await other.close()
        with pytest.raises(WorkerLost, match="rank 1 is lost"):
            await step
        with pytest.raises(WorkerLost, match="rank 1 is lost"):
            await engine.step([SequenceStep([7], 2, [4], DRAW)])
        own.gate.set()  # what hung comes back, and nothing more is begun
        await asyncio.sleep(0)
        assert own.seen == [[7]]


async def test_a_step_that_fails_for_a_lost_rank_says_so() -> None:
    async with two_ranks() as (own, engine, _, other):
        own.gate.clear()
        step = asyncio.create_task(engine.step([SequenceStep([7], 2, [4], DRAW)]))
        await other.receive()
        own.fault = WorkerLost("a collective failed")
        own.gate.set()
        await asyncio.sleep(0)  # it has noticed first
        await other.close()
        with pytest.raises(WorkerLost, match="rank 1 is lost"):
            await step


async def test_a_cancelled_callers_step_runs_to_its_end_and_tells_nobody_of_its_layers() -> None:
    async with two_ranks() as (own, engine, _, other):
        own.gate.clear()
        layers: list[int] = []
        step = asyncio.create_task(engine.step([SequenceStep([7], 2, [4], DRAW)], layers.append))
        await other.receive()
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        following = asyncio.create_task(engine.step([SequenceStep([11], 2, [5], None)]))
        own.gate.set()
        assert await following == [None]
        assert (own.seen, layers) == ([[7], [11]], [])
        told = [await other.receive() for _ in range(3)]
        assert told == [StepEnded(), RankStep((RankSequence((11,), 2, (5,), False),), False), StepEnded()]
