"""Virtual time: it jumps, it is ordered, and it never hangs."""

import asyncio

import pytest

from twostroke.simulator.virtual_loop import PROCESS, SimulationStuck, VirtualLoop, run_virtually


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
