"""Steps that an engine has been given, on virtual time."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.simulation.virtual_loop import run_virtually
from tests.simulation.worker_rig import a_request
from twostroke.decode_worker.jobs import DecodeJob, DecodeStep, Entry
from twostroke.decode_worker.scheduler import StepsUnderWay
from twostroke.model.step import SequenceStep
from twostroke.protocol.requests import SampledToken
from twostroke.worker.sequence import SequenceState


class SlowEngine:
    """Takes two seconds a step, one after the other."""

    num_broken_rows = 0

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def step(self, batch: Sequence[SequenceStep], *_: Any, **__: Any) -> list[SampledToken | None]:
        async with self._turn:
            await asyncio.sleep(2.0)
        return [None] * len(batch)


def a_step() -> DecodeStep:
    job = DecodeJob(SequenceState(a_request(), 4), 0, 0.0, 10, False)
    return DecodeStep((Entry(job, SequenceStep((1, 2), 0, (0,), None)),), ())


def test_a_steps_time_is_its_own_without_what_it_waited_behind_another():
    async def main() -> None:
        steps = StepsUnderWay(SlowEngine(), asyncio.get_running_loop().time)
        for _ in range(3):
            await steps.begin(a_step())
        times = [(await steps.first_ended()).seconds for _ in range(3)]
        assert times == pytest.approx([2.0, 2.0, 2.0])
        await asyncio.sleep(10.0)
        await steps.begin(a_step())
        assert (await steps.first_ended()).seconds == pytest.approx(2.0), "the engine had nothing to do before"

    run_virtually(main())
