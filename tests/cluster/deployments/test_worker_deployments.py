"""A leaving worker's replica gives transfers in progress their time, and no more."""

import asyncio
from types import SimpleNamespace

import pytest

from tests.worker.worker_rig import Rig, a_request, begin, play
from twostroke.cluster.deployments.workers import DRAIN_S, ENDING_S, DecodeReplica, drain_and_stop
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.messages import Drain


def time() -> float:
    return asyncio.get_running_loop().time()


def test_a_worker_with_work_ends_once_it_is_done():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(), None))
        await asyncio.sleep(0.001)
        await drain_and_stop(rig.worker, 20.0)
        assert (await call).finish_reason == "length"
        assert time() < 1.0

    play(script, role="decode")


def test_a_worker_whose_work_takes_too_long_ends_anyway():
    async def script(rig: Rig) -> None:
        rig.engine.released.clear()
        call = begin(rig.worker.decode(a_request(), None))
        await asyncio.sleep(0.001)
        asyncio.get_running_loop().call_later(4.0, rig.engine.released.set)
        await drain_and_stop(rig.worker, 3.0)
        with pytest.raises(WorkerLost):
            await call
        assert 3.0 < time() < 5.0

    play(script, role="decode")


def test_an_idle_worker_end_at_once():
    async def script(rig: Rig) -> None:
        await drain_and_stop(rig.worker, 20.0)
        assert time() < 1.0

    play(script, role="prefill")


def test_a_worker_that_was_told_to_leave_and_whose_health_serve_asks_for_is_kept():
    async def script(rig: Rig) -> None:
        rig.router.send(Drain())
        await asyncio.sleep(0.001)
        assert rig.worker.stats().is_draining
        await DecodeReplica.check_health(SimpleNamespace(_worker=rig.worker))
        assert not rig.worker.stats().is_draining

    play(script, role="decode")


def test_the_time_to_drain_is_less_than_serve_waits():
    assert 0 < DRAIN_S < ENDING_S
