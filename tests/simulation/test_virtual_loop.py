"""Virtual time: it jumps, it is ordered, and it never hangs."""

import asyncio
import time

import pytest

from tests.simulation.virtual_loop import PROCESS, SimulationStuck, VirtualLoop, run_virtually


def test_an_hour_of_sleep_passes_at_once():
    async def main() -> float:
        await asyncio.sleep(3000.0)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_virtually(main()) == pytest.approx(3000.0)
    assert time.monotonic() - began < 60.0


def test_sleepers_wake_in_the_order_of_their_time():
    async def main() -> list[int]:
        woken: list[int] = []

        async def sleeper(number: int) -> None:
            await asyncio.sleep(number * 0.1)
            woken.append(number)

        await asyncio.gather(*(sleeper(number) for number in (3, 1, 2, 0)))
        return woken

    assert run_virtually(main()) == [0, 1, 2, 3]


def test_a_timeout_ends_a_wait_after_exactly_its_time():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(7.5)


def test_a_deadlock_raises_and_names_who_waits_where():
    async def waits_for_nobody() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(waits_for_nobody(), name="the forgotten one")

    with pytest.raises(SimulationStuck, match="deadlock") as caught:
        run_virtually(main())
    assert any("the forgotten one" in note and "waits_for_nobody" in note for note in caught.value.__notes__)


def test_timers_that_go_on_for_ever_are_stopped_by_the_limit():
    async def main() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(1.0)

    with pytest.raises(SimulationStuck, match="still running after 100"):
        run_virtually(main(), limit_s=100.0)


def test_tasks_that_run_without_time_passing_are_stopped():
    async def main() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(SimulationStuck, match="no time passes"):
        run_virtually(main())


def test_a_set_of_tasks_iterates_in_the_same_order_in_every_run():
    async def main() -> list[str]:
        tasks = {asyncio.create_task(asyncio.sleep(1.0), name=f"task {number}") for number in range(200)}
        order = [task.get_name() for task in tasks]
        await asyncio.gather(*tasks)
        return order

    assert run_virtually(main()) == run_virtually(main())


def test_a_stopped_process_does_nothing_until_it_is_continued_and_the_others_go_on():
    done: list[tuple[str, float]] = []

    async def ticks(name: str) -> None:
        PROCESS.set(name)
        for _ in range(3):
            # A task and a timer of the process are the process's own.
            await asyncio.create_task(asyncio.sleep(1.0))
            done.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        both = asyncio.gather(ticks("stopped"), ticks("other"))
        await asyncio.sleep(1.5)
        loop.stop_process("stopped")
        await asyncio.sleep(8.5)
        loop.continue_process("stopped")
        await both

    run_virtually(main())
    assert [at for name, at in done if name == "other"] == pytest.approx([1.0, 2.0, 3.0])
    assert [at for name, at in done if name == "stopped"] == pytest.approx([1.0, 10.0, 11.0])


def test_a_process_that_is_stopped_for_ever_is_a_deadlock():
    async def main() -> None:
        PROCESS.set("stopped")
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.stop_process("stopped")
        await asyncio.sleep(1.0)

    with pytest.raises(SimulationStuck, match="deadlock"):
        run_virtually(main())


def test_work_in_a_thread_takes_no_virtual_time_and_its_error_comes_through():
    async def main() -> float:
        assert await asyncio.to_thread(sorted, [2, 1]) == [1, 2]
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 0.0
