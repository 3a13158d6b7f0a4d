"""A worker's life: it sleeps until woken, dies visibly, and does not wait for ever for a step that hangs.

How it drains and stops is tested with the workers themselves.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from tests.simulation.virtual_loop import run_virtually
from twostroke.model.step import SequenceStep
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.requests import SampledToken
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.life import StepsUnderWay, WorkerCallbacks, WorkerLife


def make_life(
    step: Callable[[], Awaitable[bool]],
    died: Callable[[str], None] = lambda _: None,
    is_ahead: Callable[[], bool] = lambda: False,
    is_busy: Callable[[], bool] = lambda: False,
) -> WorkerLife:
    """Must be called inside a running event loop, whose time it goes by."""

    async def hang_up() -> None:
        """There is no token channel."""

    return WorkerLife(
        worker_id="w",
        pools=(BlockPool(4, 4),),
        clock=asyncio.get_running_loop().time,
        integrity_interval_s=1.0,
        max_step_s=5.0,
        callbacks=WorkerCallbacks(step=step, is_busy=is_busy, is_ahead=is_ahead, died=died, hang_up=hang_up),
    )


def test_it_steps_while_there_is_work_and_again_when_woken():
    async def main() -> None:
        work = [True, True, False, True, False]

        async def step() -> bool:
            return work.pop(0)

        life = make_life(step)
        life.start()
        await asyncio.sleep(1.0)
        assert len(work) == 2
        life.wake()
        await asyncio.sleep(1.0)
        assert work == []
        life.check_health()
        await life.stop()
        with pytest.raises(WorkerLost, match="not running"):
            life.check_health()

    run_virtually(main())


def test_an_exception_ends_it_and_is_told():
    async def main() -> None:
        told: list[str] = []

        async def step() -> bool:
            raise RuntimeError("broken")

        life = make_life(step, told.append)
        life.start()
        await asyncio.sleep(0.1)
        assert told == ["the engine of worker w died: RuntimeError('broken')"]
        with pytest.raises(WorkerLost, match="has died"):
            life.check_health()
        await life.stop()

    run_virtually(main())


def test_a_lost_engine_ends_it_though_it_sleeps():
    async def main() -> None:
        told: list[str] = []

        async def step() -> bool:
            return False

        life = make_life(step, told.append)
        life.start()
        await asyncio.sleep(0.1)
        life.engine_lost("a rank is gone")
        await asyncio.sleep(0.1)
        assert told == ["the engine of worker w died: WorkerLost('a rank is gone')"]
        with pytest.raises(WorkerLost, match="a rank is gone"):
            life.check_health()
        await life.stop()

    run_virtually(main())


def test_a_step_begun_ahead_of_an_engines_loss_is_seen_to_its_end():
    async def main() -> None:
        told: list[str] = []
        steps: list[float] = []

        async def step() -> bool:
            await asyncio.sleep(1.0)
            steps.append(asyncio.get_running_loop().time())
            if len(steps) == 2:
                raise WorkerLost("an engine step failed: a rank is gone")
            return True

        life = make_life(step, told.append, is_ahead=lambda: True)
        life.start()
        await asyncio.sleep(0.5)
        life.engine_lost("a rank is gone")
        await asyncio.sleep(5.0)
        assert told == ["the engine of worker w died: WorkerLost('an engine step failed: a rank is gone')"]
        assert steps == [1.0, 2.0]
        await life.stop()

    run_virtually(main())


def test_idle_time_is_no_step_time():
    async def main() -> None:
        async def step() -> bool:
            return False

        life = make_life(step)
        life.start()
        await asyncio.sleep(100.0)
        life.check_health()
        await life.stop()

    run_virtually(main())


def test_a_stuck_step_is_told_by_the_health_check_and_does_not_hold_up_the_stop():
    async def main() -> None:
        async def step() -> bool:
            await asyncio.Event().wait()
            return True

        life = make_life(step)
        life.start()
        await asyncio.sleep(4.9)
        life.check_health()
        await asyncio.sleep(0.2)
        with pytest.raises(WorkerLost, match="has not ended"):
            life.check_health()
        await life.stop()
        await life.stop()
        assert asyncio.get_running_loop().time() < 5.2
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtually(main())


def test_a_step_under_way_at_the_stop_may_still_end():
    async def main() -> None:
        ended: list[float] = []

        async def step() -> bool:
            await asyncio.sleep(4.0)
            ended.append(asyncio.get_running_loop().time())
            return True

        life = make_life(step)
        life.start()
        await asyncio.sleep(1.0)
        await life.stop()
        assert len(ended) == 1

    run_virtually(main())


def test_a_step_begun_ahead_at_the_stop_may_still_end_in_its_own_time():
    async def main() -> None:
        ended: list[float] = []

        async def step() -> bool:
            await asyncio.sleep(4.0)
            ended.append(asyncio.get_running_loop().time())
            return True

        life = make_life(step, is_ahead=lambda: len(ended) == 1)
        life.start()
        await asyncio.sleep(1.0)
        await life.stop()
        assert ended == [4.0, 8.0]

    run_virtually(main())


def test_what_never_started_drains_and_stops_at_once():
    async def no_step() -> bool:
        raise AssertionError("never called")

    async def main() -> None:
        life = make_life(no_step, is_busy=lambda: True)
        await life.drain()
        await life.stop()
        assert asyncio.get_running_loop().time() == 0.0

    run_virtually(main())


class SlowEngine:
    """Takes two seconds a step, one after the other."""

    num_broken_rows = 0

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def step(self, batch: Sequence[SequenceStep], *_: Any) -> list[SampledToken | None]:
        async with self._turn:
            await asyncio.sleep(2.0)
        return [None] * len(batch)


def test_a_steps_time_is_its_own_without_what_it_waited_behind_another():
    async def main() -> None:
        steps = StepsUnderWay[str](SlowEngine(), asyncio.get_running_loop().time)
        batch = [SequenceStep((1, 2), 0, (0,), None)]
        for name in ("a", "b", "c"):
            await steps.begin(name, batch)
        ended = [await steps.first_ended() for _ in range(3)]
        assert [one.step for one in ended] == ["a", "b", "c"]
        assert [one.seconds for one in ended] == pytest.approx([2.0, 2.0, 2.0])
        await asyncio.sleep(10.0)
        await steps.begin("d", batch)
        assert (await steps.first_ended()).seconds == pytest.approx(2.0), "the engine had nothing to do before"

    run_virtually(main())
