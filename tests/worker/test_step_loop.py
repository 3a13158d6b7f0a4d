"""The step loop where steps hang, end late or never begin.

Steps, drains, stops and deaths are tested with the workers themselves (test_workers.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from twostroke.model.step import SequenceStep
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.requests import SampledToken
from twostroke.simulator.virtual_loop import run_virtually
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.step_loop import MAX_BROKEN_REQUESTS, LogitHealth, StepLoop, StepsUnderWay


class Scene:
    """A step loop whose steps take `step_s` each, and what it reported. `is_ahead` is called after each step."""

    def __init__(self, step_s: float, is_ahead: Callable[[int], bool] = lambda _: False):
        self.ended: list[float] = []
        self.told: list[str] = []
        self.failure: BaseException | None = None  # of the steps that end from now on
        self.is_busy = True
        self._step_s = step_s
        self._is_ahead = is_ahead
        clock = asyncio.get_running_loop().time
        self.life = StepLoop(
            step=self.step,
            is_busy=lambda: self.is_busy,
            fail_all=self.told.append,
            hang_up=self.hang_up,
            steps=self,
            worker_id="w",
            pools=(BlockPool(4, 4),),
            clock=clock,
            config=PrefillConfig(integrity_interval_s=1.0),
            step_bound_s=lambda: 5.0,
        )

    def __len__(self) -> int:
        return self._is_ahead(len(self.ended))

    async def step(self) -> bool:
        if not self._step_s:
            return False
        await asyncio.sleep(self._step_s)
        self.ended.append(asyncio.get_running_loop().time())
        if self.failure is not None:
            raise self.failure
        return True

    async def hang_up(self) -> None:
        """There is no token channel."""


def play(script: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await script()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtually(main())


def test_a_step_begun_ahead_of_an_engines_loss_is_seen_to_its_end():
    async def script() -> None:
        scene = Scene(1.0, is_ahead=lambda _: True)
        scene.life.start()
        await asyncio.sleep(0.5)
        scene.life.engine_lost("a rank is gone")
        await asyncio.sleep(1.0)
        scene.failure = WorkerLost("an engine step failed: a rank is gone")
        await asyncio.sleep(4.0)
        assert scene.told == ["the engine of worker w died: WorkerLost('an engine step failed: a rank is gone')"]
        assert scene.ended == [1.0, 2.0]
        await scene.life.stop()

    play(script)


def test_idle_time_is_no_step_time():
    async def script() -> None:
        scene = Scene(0.0)
        scene.life.start()
        await asyncio.sleep(100.0)
        scene.life.check_health()
        await scene.life.stop()

    play(script)


@pytest.mark.parametrize(("num_ahead", "ended"), [(0, [4.0]), (1, [4.0, 8.0])])
def test_steps_under_way_at_the_stop_may_still_end_each_in_its_own_time(num_ahead: int, ended: list[float]):
    async def script() -> None:
        scene = Scene(4.0, is_ahead=lambda num_ended: 0 < num_ended <= num_ahead)
        scene.life.start()
        await asyncio.sleep(1.0)
        await scene.life.stop()
        assert scene.ended == ended

    play(script)


def test_a_process_that_stood_still_has_not_hung():
    async def script() -> None:
        loop, stood_s = asyncio.get_running_loop(), 0.0
        scene = Scene(4.0)
        scene.life.clock = lambda: loop.time() + stood_s
        scene.life.start()
        for _ in range(10):
            await asyncio.sleep(2.6)
            stood_s += 7.0
        scene.life.check_health()
        assert len(scene.ended) > 5
        await scene.life.stop()

    play(script)


def test_a_step_that_hangs_ends_the_worker_and_what_it_does_later_does_not_matter():
    async def script() -> None:
        scene = Scene(8.0)
        scene.failure = RuntimeError("too late")
        scene.life.start()
        await asyncio.sleep(5.3)
        assert scene.told == [
            "the engine of worker w died: WorkerLost('the engine hangs: a step has not ended in 5.0 s, its bound')"
        ]
        await asyncio.sleep(5.0)
        assert scene.ended == [8.0]
        assert len(scene.told) == 1
        with pytest.raises(WorkerLost, match="hangs"):
            scene.life.check_health()
        await scene.life.drain()
        await scene.life.stop()

    play(script)


def test_what_never_started_drains_and_stops_at_once():
    async def script() -> None:
        scene = Scene(1.0)
        await scene.life.drain()
        await scene.life.stop()
        assert asyncio.get_running_loop().time() == 0.0

    play(script)


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
    async def script() -> None:
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

    play(script)


def test_a_model_is_broken_once_many_requests_in_a_row_have_no_sound_logits():
    health = LogitHealth()
    names = [f"r{number}" for number in range(MAX_BROKEN_REQUESTS)]
    broken = 0
    for _ in range(1000):
        broken += 1
        assert health.step_ended(broken, ["r0"]) is None, "one request may have caused its own"
    for name in names[1:-1]:
        broken += 1
        assert health.step_ended(broken, [name]) is None
    assert health.step_ended(broken + 1, ["a", "b"]) is None, "one of the two has sound logits"
    assert health.step_ended(broken + 1, []) is None
    assert "NaN or infinite" in (health.step_ended(broken + 1 + len(names), names) or "")


def test_a_step_loop_that_a_panic_ends_has_died_and_says_so():
    class Panic(BaseException):
        """A panic like Rust's, which is no Exception."""

    async def script() -> None:
        scene = Scene(1.0)
        scene.failure = Panic("llguidance")
        scene.life.start()
        await asyncio.sleep(2.0)
        assert "Panic" in scene.told[0]
        with pytest.raises(WorkerLost, match="Panic"):
            scene.life.check_health()
        await scene.life.stop()

    play(script)
