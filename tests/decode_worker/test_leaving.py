"""A decode worker that drains, stops, or whose engine hangs or dies: what it still does, and what it gives back."""

import asyncio
import contextlib

import pytest

from tests.decode_worker.answers import a_moment
from tests.simulation.worker_rig import DECODE, SECRET, Rig, a_request, begin, play
from twostroke.protocol.errors import ConnectionLost, WorkerLeaving, WorkerLost
from twostroke.protocol.messages import Drain, PrefillFailed, SendPrefix
from twostroke.protocol.network import Connection
from twostroke.protocol.requests import Address, Peer, mint_ticket


def test_a_dead_engine_ends_every_request_and_hangs_up():
    async def script(rig: Rig) -> None:
        rig.engine.fail_at_step = 3
        calls = [
            begin(rig.worker.decode(a_request(name="a"), None)),
            begin(rig.worker.decode(a_request(name="b"), rig.ticket("b"))),
        ]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, WorkerLost)
        with pytest.raises(WorkerLost, match="has died"):
            rig.worker.check_health()
        with pytest.raises(WorkerLost):
            await rig.worker.decode(a_request(name="c"), None)
        await a_moment()
        assert {event.request_id for frame in rig.frames for event in frame.events if event.error} == {"a", "b"}
        assert rig.pool.owned_blocks == 0
        await rig.worker.drain()

    play(script, role="decode")


def test_a_draining_worker_waits_for_prefixes_on_their_way():
    async def script(rig: Rig) -> None:
        request = a_request(30)
        await rig.worker.decode(request, None)
        assert rig.router is not None
        slow = mint_ticket(SECRET, "r", DECODE, Peer("prefill-7", 77), (await silent_peer(rig),))
        rig.router.send(SendPrefix(slow, request.token_ids, b""))
        await a_moment()
        assert rig.pool.owned_blocks == 7
        began = asyncio.get_running_loop().time()
        await rig.worker.drain()
        assert asyncio.get_running_loop().time() > began + 1.0
        assert rig.pool.owned_blocks == 0

    play(script, role="decode")


async def silent_peer(rig: Rig) -> Address:
    """Where somebody listens who never says a word."""

    async def say_nothing(connection: Connection) -> None:
        with contextlib.suppress(ConnectionLost):
            while True:
                await connection.receive()

    return (await rig.fabric.at("prefill-7").listen("", say_nothing)).address


def test_a_worker_whose_engine_hangs_is_unhealthy_and_takes_nothing_new():
    async def script(rig: Rig) -> None:
        rig.engine.released.clear()
        call = begin(rig.worker.decode(a_request(), None))
        await asyncio.sleep(4.9)
        rig.worker.check_health()
        await asyncio.sleep(0.2)
        with pytest.raises(WorkerLost, match="a step has not ended in 5 s"):
            rig.worker.check_health()
        with pytest.raises(WorkerLost):
            await rig.worker.decode(a_request(name="another"), None)
        rig.engine.released.set()
        await call
        rig.worker.check_health()

    play(script, role="decode", max_step_s=5.0)


def test_a_worker_whose_engine_hangs_stops_without_the_steps_that_it_has_asked_for():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(max_tokens=50), None))
        await asyncio.sleep(0.005)
        rig.engine.released.clear()
        await asyncio.sleep(0.005)
        began = asyncio.get_running_loop().time()
        await rig.worker.stop()
        assert 4.9 < asyncio.get_running_loop().time() - began < 5.1
        with pytest.raises(WorkerLost):
            await call
        assert rig.pool.owned_blocks > 0, "the step that hangs may write into them"
        (job,) = {entry.job for step in rig.worker._under_way.give_up() for entry in step.entries}
        job.sequence.reset(rig.pool)

    play(script, role="decode", max_step_s=5.0)


def test_a_stopping_worker_sees_the_steps_that_it_has_asked_for_to_their_end():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(max_tokens=50), None))
        await asyncio.sleep(0.01)
        rig.engine.released.clear()
        await asyncio.sleep(1.0)
        stopping = begin(rig.worker.stop())
        await asyncio.sleep(1.0)
        assert len(rig.worker._under_way) == 2
        num_steps = rig.engine.num_steps
        rig.engine.released.set()
        await stopping
        assert rig.engine.num_steps == num_steps + 1
        assert rig.pool.owned_blocks == 0
        await asyncio.gather(call, return_exceptions=True)

    play(script, role="decode", max_step_s=5.0)


def test_a_step_behind_one_that_takes_long_has_its_own_time():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(max_tokens=3), None))
        for _ in range(3):
            rig.engine.released.clear()
            await asyncio.sleep(4.0)
            rig.engine.released.set()
            await asyncio.sleep(0.002)
            rig.worker.check_health()
        await call

    play(script, role="decode", max_step_s=5.0)


def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_has():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(), None))
        await asyncio.sleep(0.001)
        draining = begin(rig.worker.drain())
        await asyncio.sleep(0)
        with pytest.raises(WorkerLost, match="draining"):
            await rig.worker.decode(a_request(name="late"), None)
        assert not draining.done()
        assert (await call).finish_reason == "length"
        await draining
        assert rig.pool.owned_blocks == 0

    play(script, role="decode")


def test_a_worker_that_is_told_to_leave_finishes_what_it_has_begun_and_gives_the_rest_back():
    async def script(rig: Rig) -> None:
        begun = begin(rig.worker.decode(a_request(), None))
        await asyncio.sleep(0.001)
        waiting = begin(rig.worker.decode(a_request(name="waits for its KV"), rig.ticket("waits for its KV")))
        await asyncio.sleep(0)
        rig.router.send(Drain())
        with pytest.raises(WorkerLeaving):
            await waiting
        assert rig.worker.stats().is_draining
        with pytest.raises(WorkerLeaving):
            await rig.worker.decode(a_request(name="late"), None)
        assert (await begun).finish_reason == "length"

    play(script, role="decode")


def test_a_worker_that_is_told_to_leave_and_is_kept_takes_requests_again_unless_it_is_to_end():
    async def script(rig: Rig) -> None:
        rig.router.send(Drain())
        await asyncio.sleep(0.001)
        rig.worker.stay()
        assert not rig.worker.stats().is_draining
        assert (await rig.worker.decode(a_request(), None)).finish_reason == "length"
        await rig.worker.drain()
        rig.worker.stay()
        with pytest.raises(WorkerLeaving):
            await rig.worker.decode(a_request(name="late"), None)

    play(script, role="decode")


def test_a_draining_worker_waits_for_transfers_too():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(), await rig.offer()))
        await asyncio.sleep(0.1)
        draining = begin(rig.worker.drain())
        await asyncio.sleep(1.0)
        assert not draining.done()
        await asyncio.sleep(3.0)
        rig.router.send(PrefillFailed("r"))
        await asyncio.gather(call, draining)
        assert rig.pool.owned_blocks == 0

    play(script, role="decode")


def test_a_draining_worker_waits_for_a_step_whose_requests_have_ended():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(), None))
        await asyncio.sleep(0.0005)  # the step is under way
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert rig.pool.owned_blocks > 0
        await rig.worker.drain()
        assert rig.pool.owned_blocks == 0

    play(script, role="decode")


def test_a_stopping_worker_ends_its_requests_after_the_step_under_way():
    async def script(rig: Rig) -> None:
        calls = [
            begin(rig.worker.decode(a_request(name="a", max_tokens=50), None)),
            begin(rig.worker.decode(a_request(name="b"), rig.ticket("b"))),
        ]
        await asyncio.sleep(0.01)
        await rig.worker.stop()
        assert rig.pool.owned_blocks == 0
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, WorkerLost)
        with pytest.raises(WorkerLost):
            rig.worker.check_health()

    play(script, role="decode")
