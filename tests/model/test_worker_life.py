"""A worker's life before it begins; all else is tested with the workers themselves."""

import asyncio

from tests.simulation.virtual_loop import run_virtually
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.life import WorkerCallbacks, WorkerLife


def test_what_never_started_drains_and_stops_at_once():
    async def nothing() -> None:
        raise AssertionError("never called")

    async def no_step() -> bool:
        raise AssertionError("never called")

    async def main() -> None:
        life = WorkerLife(
            worker_id="prefill-0",
            pools=(BlockPool(4, 4),),
            clock=asyncio.get_running_loop().time,
            integrity_interval_s=1.0,
            max_step_s=1.0,
            callbacks=WorkerCallbacks(step=no_step, is_busy=lambda: True, died=lambda _: None, hang_up=nothing),
        )
        await life.drain()
        await life.stop()
        assert asyncio.get_running_loop().time() == 0.0

    run_virtually(main())
