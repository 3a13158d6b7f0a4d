"""A leaving worker's replica gives transfers in progress their time, and no more."""

import asyncio
import os
from types import SimpleNamespace

import pytest

from tests.worker.worker_rig import DECODE, Rig, a_request, begin, play
from twostroke.cluster.deployments import workers
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


@pytest.mark.parametrize("fault", ["hangs", "failed"])
def test_the_process_of_a_worker_that_has_died_ends_at_the_next_health_check(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
):
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(workers, "close_logs", lambda: ended.append(0))

    async def script(rig: Rig) -> None:
        replica = SimpleNamespace(_worker=rig.worker, _peer=DECODE)
        if fault == "hangs":
            rig.engine.released.clear()
        else:
            rig.engine.fail_at_step = 1
        call = begin(rig.worker.decode(a_request(), None))
        await asyncio.sleep(0.5)
        if fault == "hangs":
            await DecodeReplica.check_health(replica)
            assert ended == []
            await asyncio.sleep(1.0)
        await DecodeReplica.check_health(replica)
        assert ended == [0, 1], "the log's last lines are written first"
        assert f"the process of worker {DECODE.worker_id} ends: " in caplog.text
        with pytest.raises(WorkerLost):
            await call
        rig.engine.released.set()
        await asyncio.sleep(1.0)

    play(script, role="decode", max_step_s=1.0)


def test_the_time_to_drain_is_less_than_serve_waits():
    assert 0 < DRAIN_S < ENDING_S
