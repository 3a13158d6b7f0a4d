"""The step loop: it sleeps until woken, dies visibly, and does not wait for ever for a step that hangs."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.simulation.virtual_loop import run_virtually
from twostroke.protocol.errors import WorkerLost
from twostroke.worker.life import StepLoop


def make_loop(
    step: Callable[[], Awaitable[bool]],
    died: Callable[[Exception], None] = lambda _: None,
    is_ahead: Callable[[], bool] = lambda: False,
) -> StepLoop:
    """Must be called inside a running event loop, whose time it goes by."""
    clock = asyncio.get_running_loop().time
    return StepLoop(step=step, is_ahead=is_ahead, idle=lambda: None, died=died, clock=clock, max_step_s=5.0)


def test_it_steps_while_there_is_work_and_again_when_woken():
    async def main() -> None:
        work = [True, True, False, True, False]

        async def step() -> bool:
            return work.pop(0)

        loop = make_loop(step)
        loop.start()
        await asyncio.sleep(1.0)
        assert len(work) == 2
        loop.wake()
        await asyncio.sleep(1.0)
        assert work == []
        loop.check_health()
        await loop.stop()
        with pytest.raises(WorkerLost, match="not running"):
            loop.check_health()

    run_virtually(main())


def test_an_exception_ends_it_and_is_told():
    async def main() -> None:
        told: list[Exception] = []

        async def step() -> bool:
            raise RuntimeError("broken")

        loop = make_loop(step, told.append)
        loop.start()
        await asyncio.sleep(0.1)
        assert [str(error) for error in told] == ["broken"]
        with pytest.raises(WorkerLost, match="has died"):
            loop.check_health()
        await loop.stop()

    run_virtually(main())


def test_a_lost_engine_ends_it_though_it_sleeps():
    async def main() -> None:
        told: list[Exception] = []

        async def step() -> bool:
            return False

        loop = make_loop(step, told.append)
        loop.start()
        await asyncio.sleep(0.1)
        loop.fail(WorkerLost("a rank is gone"))
        await asyncio.sleep(0.1)
        assert [str(error) for error in told] == ["a rank is gone"]
        with pytest.raises(WorkerLost, match="a rank is gone"):
            loop.check_health()
        await loop.stop()

    run_virtually(main())


def test_a_step_begun_ahead_of_an_engines_loss_is_seen_to_its_end():
    async def main() -> None:
        told: list[Exception] = []
        steps: list[float] = []

        async def step() -> bool:
            await asyncio.sleep(1.0)
            steps.append(asyncio.get_running_loop().time())
            if len(steps) == 2:
                raise WorkerLost("an engine step failed: a rank is gone")
            return True

        loop = make_loop(step, told.append, is_ahead=lambda: True)
        loop.start()
        await asyncio.sleep(0.5)
        loop.fail(WorkerLost("a rank is gone"))
        await asyncio.sleep(5.0)
        assert [str(error) for error in told] == ["an engine step failed: a rank is gone"]
        assert steps == [1.0, 2.0]
        await loop.stop()

    run_virtually(main())


def test_idle_time_is_no_step_time():
    async def main() -> None:
        async def step() -> bool:
            return False

        loop = make_loop(step)
        loop.start()
        await asyncio.sleep(100.0)
        loop.check_health()
        await loop.stop()

    run_virtually(main())


def test_a_stuck_step_is_told_by_the_health_check_and_does_not_hold_up_the_stop():
    async def main() -> None:
        async def step() -> bool:
            await asyncio.Event().wait()
            return True

        loop = make_loop(step)
        loop.start()
        await asyncio.sleep(4.9)
        loop.check_health()
        await asyncio.sleep(0.2)
        with pytest.raises(WorkerLost, match="has not ended"):
            loop.check_health()
        await loop.stop()
        await loop.stop()
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

        loop = make_loop(step)
        loop.start()
        await asyncio.sleep(1.0)
        await loop.stop()
        assert len(ended) == 1

    run_virtually(main())


def test_a_step_begun_ahead_at_the_stop_may_still_end_in_its_own_time():
    async def main() -> None:
        ended: list[float] = []

        async def step() -> bool:
            await asyncio.sleep(4.0)
            ended.append(asyncio.get_running_loop().time())
            return True

        loop = make_loop(step, is_ahead=lambda: len(ended) == 1)
        loop.start()
        await asyncio.sleep(1.0)
        await loop.stop()
        assert ended == [4.0, 8.0]

    run_virtually(main())
