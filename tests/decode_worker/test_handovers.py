"""KV that comes from a prefill worker, early, late or never: no prompt is computed twice only because all are busy."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from tests.simulation.fake_model import FakeEngine, expected_tokens
from tests.simulation.memory_network import MemoryConnection
from tests.simulation.worker_rig import BLOCK, LAYERS, PREFILL, TRANSFERS, Rig, a_request, begin, make_parts, play
from twostroke.protocol.errors import ConnectionLost, TransferFailed, WorkerLost
from twostroke.protocol.messages import Abort, Awaited, Cancel, Grant, PrefillFailed
from twostroke.worker.sequence import SequenceState
from twostroke.worker.token_server import TokenServerConfig

LONG_S = 20 * TRANSFERS.progress_s
PATIENT: dict[str, Any] = {"role": "decode", "token_channel": TokenServerConfig(lease_s=10 * LONG_S)}
FULL: dict[str, Any] = {**PATIENT, "num_blocks": 8, "max_step_s": 10 * LONG_S}
"""A worker that `fill` leaves no room on."""


async def fill(rig: Rig) -> "asyncio.Task[object]":
    """A request that holds most blocks until the engine is released."""
    rig.engine.released.clear()
    busy = begin(rig.worker.decode(a_request(20, "busy", max_tokens=4), None))
    await asyncio.sleep(0.1)
    return busy


async def told(connection: MemoryConnection, kind: type) -> object:
    """The next message of this type."""
    while not isinstance(message := await connection.receive(), kind):
        pass
    return message


def test_a_request_whose_prefill_worker_has_not_begun_waits_as_long_as_its_router_says_nothing():
    async def script(rig: Rig) -> None:
        request = a_request()
        call = begin(rig.worker.decode(request, rig.ticket()))
        await asyncio.sleep(LONG_S)
        assert rig.worker.stats().computed_tokens == 0
        rig.router.send(PrefillFailed("r"))
        await call
        await asyncio.sleep(0.1)
        assert [token for _, token in rig.events()["r"]] == expected_tokens(request, LAYERS)

    play(script, **PATIENT, router_wait_s=1.0)


def test_it_waits_no_longer_than_its_router_lives():
    async def script(rig: Rig) -> None:
        with pytest.raises(WorkerLost, match="is gone"):
            await rig.worker.decode(a_request(), rig.ticket())
        assert asyncio.get_running_loop().time() < LONG_S
        assert rig.worker.stats().computed_tokens == 0

    play(script, role="decode")


@pytest.mark.parametrize("first", ["the request", "the offer"])
def test_kv_whose_request_waits_for_room_is_kept_and_comes_when_there_is_some(first: str):
    async def script(rig: Rig) -> None:
        busy = await fill(rig)
        parts, ticket = make_parts(PREFILL, rig.fabric, rig.links), rig.ticket()
        request = a_request(18, cache_salt=b"tenant")
        sequence = SequenceState(request, BLOCK)
        sequence.reserve(parts.pool, 18)
        (token,) = await FakeEngine(parts.store).step([sequence.step(18)])
        if first == "the request":
            call = begin(rig.worker.decode(request, ticket))
            await asyncio.sleep(1.0)
        transfer = parts.sender.open(ticket, 18, sequence.block_ids, 18)
        transfer.commit(token)
        if first == "the offer":
            await asyncio.sleep(1.0)
            call = begin(rig.worker.decode(request, ticket))
        await asyncio.sleep(LONG_S)
        assert not transfer.ended
        rig.engine.released.set()
        await asyncio.gather(busy, call)
        await transfer.done()
        await asyncio.sleep(0.1)
        assert [token for _, token in rig.events()["r"]] == expected_tokens(request, LAYERS)
        stats = rig.worker.stats()
        assert (stats.transfers_done, stats.transfers_failed) == (1, 0)
        assert stats.computed_tokens == 20, "the other request's prompt alone is computed here"
        sequence.reset(parts.pool)
        await parts.sender.close()
        await parts.transports.close()

    play(script, **FULL)


def test_a_source_hears_that_its_request_waits_only_where_it_does():
    async def script(rig: Rig) -> None:
        waiting = await rig.offer(18, "waiting")
        busy = await fill(rig)
        call = begin(rig.worker.decode(a_request(18, "waiting", cache_salt=b"tenant"), waiting))
        assert await told(rig.prefill, Awaited | Grant | Abort) == Awaited(waiting.transfer_id)
        rig.engine.released.set()
        await busy
        assert await told(rig.prefill, Awaited | Grant | Abort) == Grant(waiting.transfer_id, 0)
        await rig.prefill.close()
        at_once = await rig.offer(10, "at once")
        other = begin(rig.worker.decode(a_request(10, "at once", cache_salt=b"tenant"), at_once))
        assert await told(rig.prefill, Awaited | Grant | Abort) == Grant(at_once.transfer_id, 0)
        for task in (call, other):
            task.cancel()
        await asyncio.gather(call, other, return_exceptions=True)

    play(script, **FULL)


@pytest.mark.parametrize(
    "end", ["the client leaves", "the router cancels", "the router is lost", "the prefill failed", "the engine dies"]
)
def test_kept_kv_is_given_up_with_its_request(end: str):
    async def script(rig: Rig) -> None:
        busy = await fill(rig)
        ticket = await rig.offer(18)
        call = begin(rig.worker.decode(a_request(18, cache_salt=b"tenant"), ticket))
        assert await told(rig.prefill, Awaited | Grant | Abort) == Awaited(ticket.transfer_id)
        match end:
            case "the client leaves":
                call.cancel()
            case "the router cancels":
                rig.router.send(Cancel("r"))
            case "the router is lost":
                await rig.router.close()
            case "the prefill failed":
                rig.router.send(PrefillFailed("r"))
            case "the engine dies":
                rig.engine.fail_at_step = rig.engine.num_steps
                rig.engine.released.set()
        message = await told(rig.prefill, Awaited | Grant | Abort)
        assert isinstance(message, Abort)
        assert rig.worker._receiver._kept == set()
        rig.engine.released.set()
        with suppress(WorkerLost):
            await busy
        with suppress(WorkerLost, asyncio.CancelledError):
            await call

    play(script, **FULL)


def test_a_request_that_ended_in_its_transfer_waits_for_no_word_of_its_router():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(cache_salt=b"tenant"), await rig.offer()))
        await told(rig.prefill, Grant)
        rig.router.send(Cancel("r"))
        await call
        await asyncio.sleep(1.0)
        assert rig.worker.stats().transfers_failed == 1
        loop = asyncio.get_running_loop()
        assert not [when for when, _, timer in loop._timers if when > LONG_S and not timer.cancelled()]

    play(script, role="decode", router_wait_s=2 * LONG_S)


def test_kept_kv_is_given_up_with_its_worker():
    async def script(rig: Rig) -> None:
        busy = await fill(rig)
        parts, ticket = make_parts(PREFILL, rig.fabric, rig.links), rig.ticket()
        transfer = parts.sender.open(ticket, 18, parts.pool.allocate(5), 18)
        call = begin(rig.worker.decode(a_request(18, cache_salt=b"tenant"), ticket))
        await asyncio.sleep(LONG_S)
        assert not transfer.ended
        rig.engine.released.set()
        await rig.worker.stop()
        with pytest.raises(TransferFailed):
            await transfer.done()
        assert rig.worker._receiver._kept == set()
        for task in (busy, call):
            with pytest.raises((WorkerLost, ConnectionLost)):
                await task
        await parts.sender.close()
        await parts.transports.close()

    play(script, **FULL)
