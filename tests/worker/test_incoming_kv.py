"""KV that comes to a decode worker, early, late or never: nothing is computed twice only because all are busy.

And what becomes of a request whose KV does not come.
"""

import asyncio
from typing import Any

import msgspec
import pytest

from tests.rigs.played import played_by
from tests.simulation.fake_model import FakeEngine, expected_tokens
from tests.worker.worker_rig import (
    BLOCK,
    DECODE,
    LAYERS,
    PREFILL,
    SECRET,
    TRANSFERS,
    Rig,
    a_moment,
    a_request,
    begin,
    expected,
    make_parts,
    play,
    source_beside,
)
from twostroke.kvtransfer.transfer import IncomingTransfer
from twostroke.protocol.errors import TransferFailed, WorkerLost
from twostroke.protocol.messages import Abort, Awaited, Cancel, Grant, PrefillFailed, SendPrefix
from twostroke.protocol.requests import GenerateRequest, Peer, mint_ticket
from twostroke.simulator.memory_network import MemoryConnection
from twostroke.worker.scheduling.job import SequenceState
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


@played_by(play, **PATIENT, router_wait_s=1.0)
async def test_a_request_whose_prefill_worker_has_not_begun_waits_as_long_as_its_router_says_nothing(rig: Rig) -> None:
    request = a_request()
    call = begin(rig.worker.decode(request, rig.ticket()))
    await asyncio.sleep(LONG_S)
    assert rig.worker.stats().computed_tokens == 0
    rig.router.send(PrefillFailed("r"))
    await call
    assert await rig.is_right(request, None)


@played_by(play, role="decode")
async def test_it_waits_no_longer_than_its_router_lives(rig: Rig) -> None:
    with pytest.raises(WorkerLost, match="is gone"):
        await rig.worker.decode(a_request(), rig.ticket())
    assert asyncio.get_running_loop().time() < LONG_S
    assert rig.worker.stats().computed_tokens == 0


@pytest.mark.parametrize("first", ["the request", "the offer"])
@played_by(play, **FULL)
async def test_kv_whose_request_waits_for_room_is_kept_until_there_is_some(rig: Rig, first: str) -> None:
    busy, ticket, request = await fill(rig), rig.ticket(), a_request(18, cache_salt=b"tenant")
    async with source_beside(rig, peer=PREFILL) as prefill:
        if first == "the request":
            call = begin(rig.worker.decode(request, ticket))
            await asyncio.sleep(1.0)
        transfer, token = await prefill.hand_over(ticket, request)
        transfer.commit(token)
        if first == "the offer":
            await asyncio.sleep(1.0)
            call = begin(rig.worker.decode(request, ticket))
        await asyncio.sleep(LONG_S)
        assert prefill.transfers.is_busy
        rig.engine.released.set()
        await asyncio.gather(busy, call)
        await transfer.done()
        assert await rig.is_right(request, None)
    stats = rig.worker.stats()
    assert (stats.transfers_done, stats.transfers_failed) == (1, 0)
    assert stats.computed_tokens == 20, "the other request's prompt alone is computed here"


@played_by(play, **FULL)
async def test_a_source_hears_that_its_request_waits_only_where_it_does(rig: Rig) -> None:
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


@played_by(play, role="decode", router_wait_s=2 * LONG_S)
async def test_a_request_that_ended_in_its_transfer_does_not_wait_for_its_router(rig: Rig) -> None:
    call = begin(rig.worker.decode(a_request(cache_salt=b"tenant"), await rig.offer()))
    await told(rig.prefill, Grant)
    rig.router.send(Cancel("r"))
    await call
    await asyncio.sleep(1.0)
    assert rig.worker.stats().transfers_failed == 1
    loop = asyncio.get_running_loop()
    assert not [when for when, _, timer in loop._timers if when > LONG_S and not timer.cancelled()]


@played_by(play, **FULL)
async def test_kept_kv_is_given_up_with_its_worker(rig: Rig) -> None:
    busy, ticket, request = await fill(rig), rig.ticket(), a_request(18, cache_salt=b"tenant")
    async with source_beside(rig, peer=PREFILL) as prefill:
        transfer, _ = await prefill.hand_over(ticket, request)
        call = begin(rig.worker.decode(request, ticket))
        await asyncio.sleep(LONG_S)
        assert prefill.transfers.is_busy
        rig.engine.released.set()
        await rig.worker.stop()
        with pytest.raises(TransferFailed):
            await transfer.done()
    assert rig.worker._deps.receiver._kept == set()
    for task in (busy, call):
        with pytest.raises(WorkerLost):
            await task


@played_by(play, role="decode")
async def test_a_transfer_that_makes_no_progress_is_given_up_and_its_prompt_computed_here_when_the_router_says_so(
    rig: Rig,
) -> None:
    request = a_request()
    call = begin(rig.worker.decode(request, await rig.offer()))
    await asyncio.sleep(5.0)
    assert rig.worker.stats().transfers_failed == 1
    assert rig.worker.stats().computed_tokens == rig.pool.owned_blocks == 0
    rig.router.send(PrefillFailed("r"))
    reply = await call
    assert await rig.is_right(request, None)
    assert reply.transfer_s == 0.0
    assert rig.worker.stats().transfers_failed == 1


@played_by(play, role="decode", router_wait_s=3.0)
async def test_a_failed_transfer_of_which_the_router_says_nothing_is_computed_here_in_the_end(rig: Rig) -> None:
    request = a_request()
    await rig.worker.decode(request, await rig.offer())
    assert await rig.is_right(request, None)


@played_by(play, role="decode", num_blocks=8)
async def test_an_offer_whose_request_is_given_up_is_aborted_at_once(rig: Rig) -> None:
    long = begin(rig.worker.decode(a_request(20, "long", max_tokens=10), None))
    await asyncio.sleep(0)
    waiting = begin(rig.worker.decode(a_request(18, cache_salt=b"tenant"), rig.ticket()))
    await asyncio.sleep(0.002)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    ticket = await rig.offer(18, "late")
    late = begin(rig.worker.decode(a_request(18, "late", cache_salt=b"tenant"), ticket))
    await asyncio.sleep(0)
    late.cancel()
    while not isinstance(message := await rig.prefill.receive(), Abort):
        pass
    assert message.transfer_id == ticket.transfer_id
    assert asyncio.get_running_loop().time() < 1.0
    await long


@played_by(play, role="decode")
async def test_kv_arrives_and_its_first_token_is_sent_while_the_engine_is_busy(rig: Rig) -> None:
    ticket, request = rig.ticket(), a_request()
    rig.engine.released.clear()
    busy = begin(rig.worker.decode(a_request(9, "busy"), None))
    await asyncio.sleep(0)
    call = begin(rig.worker.decode(request, ticket))
    async with source_beside(rig, peer=PREFILL) as prefill:
        transfer, token = await prefill.hand_over(ticket, request)
        transfer.commit(token)
        await transfer.done()
    await a_moment()
    assert rig.events() == {"r": expected(request)[:1]}
    rig.engine.released.set()
    await asyncio.gather(busy, call)
    assert await rig.is_right(request, None)


@pytest.mark.parametrize("when", ["as it is verified", "after its first token"])
@played_by(play, role="decode")
async def test_a_message_of_a_failed_prefill_after_its_kv_has_arrived_changes_nothing(rig: Rig, when: str) -> None:
    ticket, request = rig.ticket(), a_request()
    call = begin(rig.worker.decode(request, ticket))
    async with source_beside(rig, peer=PREFILL) as prefill:
        transfer, token = await prefill.hand_over(ticket, request)
        await a_moment()
        incoming = rig.worker._jobs["r"].incoming
        count = incoming._on_ended

        def count_and_tell(ended: IncomingTransfer) -> None:
            """Act before the worker has noticed the end."""
            count(ended)
            rig.worker.on_message(PrefillFailed("r"))

        if when == "as it is verified":
            incoming._on_ended = count_and_tell
        else:
            rig.engine.released.clear()
        transfer.commit(token)
        await transfer.done()
    await a_moment()
    rig.router.send(PrefillFailed("r"))
    await a_moment()
    rig.engine.released.set()
    assert await rig.is_right(request, await call)
    stats = rig.worker.stats()
    assert (stats.computed_tokens, stats.transfers_done, stats.transfers_failed) == (0, 1, 0)


@played_by(play, role="decode")
async def test_kv_without_a_first_token_is_taken_for_a_failed_transfer(rig: Rig) -> None:
    ticket, request = rig.ticket(), a_request()
    async with source_beside(rig, peer=PREFILL) as prefill:
        transfer, _ = await prefill.hand_over(ticket, request)
        transfer.commit(None)
        reply = await rig.worker.decode(request, ticket)
        await transfer.done()
    assert await rig.is_right(request, reply)
    assert reply.transfer_s == 0.0


async def export(rig: Rig, request: GenerateRequest, *, taken: bool = True) -> tuple[int | None, bool]:
    """Ask the worker for the prefix: how many tokens it offers, and whether they arrive whole (and are right)."""
    target = Peer("prefill-7", 77)
    parts = make_parts(target, rig.fabric, rig.links)
    (address,) = await parts.receiver.start("host")
    ticket = mint_ticket(SECRET, "r", DECODE, target, (address,))
    assert rig.router is not None
    rig.router.send(SendPrefix(ticket, request.token_ids, request.cache_salt))
    await a_moment()
    assert parts.receiver.has_offer(ticket), "it is offered, or declined"
    num_tokens, is_whole = parts.receiver.offered_tokens(ticket.transfer_id), False
    if num_tokens and taken:
        block_ids = parts.pool.allocate(num_tokens // BLOCK)
        assert await parts.receiver.expect_transfer(ticket, block_ids, num_tokens, 0).verified() is None
        sequence = SequenceState(request, BLOCK)
        sequence.block_ids, sequence.num_computed = [*block_ids, *parts.pool.allocate(9)], num_tokens
        (token,) = await FakeEngine(parts.store).step([sequence.step(sequence.num_uncomputed)])
        is_whole = token is not None and token.token_id == expected_tokens(request, (0,) * LAYERS)[0]
        sequence.reset(parts.pool)
    else:
        parts.receiver.refuse_offer(ticket)
    await a_moment()
    assert rig.pool.owned_blocks == 0, "references end with the transfer"
    await parts.close()
    return num_tokens, is_whole


@played_by(play, role="decode")
async def test_what_was_decoded_here_is_sent_to_a_worker_that_pulls_it(rig: Rig) -> None:
    first = a_request(10, max_tokens=20)
    await rig.worker.decode(first, None)
    turn = (*first.token_ids, *expected_tokens(first, (0,) * LAYERS))
    second = msgspec.structs.replace(first, token_ids=(*turn, 1, 2, 3), num_prompt_tokens=len(turn) + 3)
    assert await export(rig, second) == (28, True), "the last drawn token was never computed"
    same = msgspec.structs.replace(first, token_ids=turn[:28], num_prompt_tokens=28)
    assert await export(rig, same) == (24, True), "a token must be left to compute"
    other = msgspec.structs.replace(second, cache_salt=b"another tenant")
    assert await export(rig, other) == (None, False)
    assert await export(rig, second, taken=False) == (28, False)


@played_by(play, role="decode")
async def test_after_a_failed_prefill_the_prompt_is_computed_here_at_once(rig: Rig) -> None:
    call = begin(rig.worker.decode(a_request(), rig.ticket()))
    await asyncio.sleep(0.05)
    assert rig.worker.stats().num_waiting == 1
    rig.router.send(PrefillFailed("r"))
    rig.router.send(PrefillFailed("r"))
    await call
    assert await rig.is_right(a_request(), None)
    assert asyncio.get_running_loop().time() < 1.0


@played_by(play, role="decode", num_blocks=8)
async def test_a_prefill_that_fails_while_its_request_waits_for_blocks_is_not_waited_for(rig: Rig) -> None:
    long = begin(rig.worker.decode(a_request(20, "long", max_tokens=10), None))
    waiting = begin(rig.worker.decode(a_request(18, cache_salt=b"tenant"), rig.ticket()))
    await asyncio.sleep(0.01)
    rig.router.send(PrefillFailed("r"))
    await asyncio.gather(long, waiting)
    assert await rig.is_right(a_request(18), None)
    assert rig.worker.stats().transfers_failed == 0, "none was begun"
    assert asyncio.get_running_loop().time() < 1.0


@played_by(play, role="decode")
async def test_a_draining_worker_waits_for_transfers_too(rig: Rig) -> None:
    call = begin(rig.worker.decode(a_request(), await rig.offer()))
    await asyncio.sleep(0.1)
    draining = begin(rig.worker.drain())
    await asyncio.sleep(1.0)
    assert not draining.done()
    await asyncio.sleep(3.0)
    rig.router.send(PrefillFailed("r"))
    await asyncio.gather(call, draining)
    assert rig.pool.owned_blocks == 0


@played_by(play, role="decode", min_pull_tokens=8)
async def test_a_resumed_request_pulls_what_the_lost_worker_may_have_left_elsewhere(rig: Rig) -> None:
    async with source_beside(rig) as source:
        first = a_request(30, max_tokens=20)
        sent = expected_tokens(first, (0,) * LAYERS)[:12]
        resumed = msgspec.structs.replace(first, token_ids=(*first.token_ids, *sent))
        await source.compute(resumed)
        ticket = source.offer(resumed)
        await rig.worker.decode(resumed, None, ticket)
        await a_moment()
        assert rig.events()["r"] == expected(first)[12:]
        assert rig.worker.stats().pulled_tokens == 40


@played_by(play, role="decode", min_pull_tokens=8)
async def test_a_message_of_a_failed_prefill_for_a_request_without_one_disturbs_no_pull(rig: Rig) -> None:
    rig.links.bytes_per_s = 1e4
    async with source_beside(rig, 40) as source:
        ticket = source.offer(a_request(41))
        call = begin(rig.worker.decode(a_request(41), None, ticket))
        await asyncio.sleep(0.02)
        rig.router.send(PrefillFailed("r"))
        assert (await call).num_cached_tokens == 40
        assert await rig.is_right(a_request(41), None)
