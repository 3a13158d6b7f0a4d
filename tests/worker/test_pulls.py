"""Prompts whose beginning another worker holds: pulled from it, or computed after all, by workers of both roles.

On virtual time. A wrong, missing or stale block gives a wrong token: the model is a hash over all KV.
"""

import asyncio
import logging

import pytest

from tests.worker.worker_rig import (
    BLOCK,
    DECODE,
    LAYERS,
    PREFILL,
    ROUTER,
    SECRET,
    SOURCE,
    Rig,
    a_moment,
    a_request,
    begin,
    make_parts,
    of_both_roles,
    source_beside,
)
from twostroke.protocol.errors import EpochMismatch, RequestError, TicketRefused, WorkerLeaving
from twostroke.protocol.log_context import LogContext
from twostroke.protocol.messages import Cancel, Drain, SendPrefix
from twostroke.protocol.requests import Peer, mint_ticket


@of_both_roles(min_pull_tokens=8)
@pytest.mark.parametrize("block_size", [BLOCK, 2 * BLOCK, BLOCK // 2])
@pytest.mark.parametrize("is_early", [True, False])
async def test_what_another_worker_holds_is_not_computed(rig: Rig, block_size: int, is_early: bool) -> None:
    async with source_beside(rig, 40, block_size=block_size) as source:
        request, ticket = a_request(42), source.ticket()
        if is_early:
            source.send(ticket, request)
            await a_moment()
        call = begin(rig.ask(request, None, ticket))
        await asyncio.sleep(0.01)
        if not is_early:
            source.send(ticket, request)
        reply = await call
        assert await rig.is_right(request, reply)
        stats = rig.worker.stats()
        assert (reply.num_cached_tokens, stats.pulled_tokens, stats.transfers_done) == (40, 40, 1)
        assert stats.computed_tokens == 2
        again = await rig.ask(a_request(42, "again"))
        assert await rig.is_right(a_request(42, "again"), again)
        assert again.num_cached_tokens == 41, "what was pulled is cached here now"


@of_both_roles(min_pull_tokens=8)
async def test_only_what_is_missing_here_is_pulled(rig: Rig) -> None:
    async with source_beside(rig, 40) as source:
        await rig.ask(a_request(21, "before"))
        ticket = source.offer(a_request(41))
        reply = await rig.ask(a_request(41), None, ticket)
        assert await rig.is_right(a_request(41), reply)
        assert (reply.num_cached_tokens, rig.worker.stats().pulled_tokens) == (40, 20)
        assert source.parts.sender.stats.bytes == 20 * 8 * LAYERS


@of_both_roles(min_pull_tokens=8)
async def test_the_last_token_is_computed_even_where_the_whole_prompt_is_held(rig: Rig) -> None:
    async with source_beside(rig, 40) as source:
        ticket = source.offer(a_request(40))
        reply = await rig.ask(a_request(40), None, ticket)
        assert await rig.is_right(a_request(40), reply)
        assert reply.num_cached_tokens == 36


@of_both_roles()
async def test_a_source_that_holds_nothing_says_so_and_the_prompt_is_computed_at_once(rig: Rig) -> None:
    async with source_beside(rig) as source:
        ticket = source.ticket()
        assert not source.send(ticket, a_request(40))
        reply = await rig.ask(a_request(40), None, ticket)
        assert asyncio.get_running_loop().time() < 0.2
        assert await rig.is_right(a_request(40), reply)
        assert rig.worker.stats().pulled_tokens == reply.num_cached_tokens == 0


@of_both_roles(pull_wait_s=0.5)
async def test_a_missing_offer_is_awaited_for_a_while_and_delays_no_other(rig: Rig) -> None:
    async with source_beside(rig) as source:
        call = begin(rig.ask(a_request(40), None, source.ticket()))
        await asyncio.sleep(0)
        await rig.ask(a_request(9, "other"))
        stats = rig.worker.stats()
        assert (stats.num_waiting, stats.num_waiting_tokens, stats.owned_blocks) == (1, 40, 0)
        reply = await call
        assert 0.5 < asyncio.get_running_loop().time() < 0.6
        assert await rig.is_right(a_request(40), reply)


@of_both_roles(min_pull_tokens=8, pull_wait_s=0.5)
@pytest.mark.parametrize("why", ["it comes too late", "it spares too little"])
async def test_an_offer_that_is_not_taken_is_refused(rig: Rig, why: str) -> None:
    async with source_beside(rig, 40) as source:
        is_late, ticket = why == "it comes too late", source.ticket()
        if not is_late:
            await rig.ask(a_request(36, "before"))
            source.send(ticket, a_request(41))
        reply = await rig.ask(a_request(41), None, ticket)
        assert await rig.is_right(a_request(41), reply)
        assert (reply.num_cached_tokens, rig.worker.stats().pulled_tokens) == (0 if is_late else 36, 0)
        if is_late:
            source.send(ticket, a_request(41))
        await source.transfers.all_ended()
        assert asyncio.get_running_loop().time() < 1.0, "long before the transfer's own time is up"


@of_both_roles(min_pull_tokens=8)
@pytest.mark.parametrize("moment", [0.001, 0.003, 0.005, 0.01])
async def test_a_source_lost_in_the_middle_costs_nothing_but_time(rig: Rig, moment: float) -> None:
    rig.links.bytes_per_s = 1e4
    async with source_beside(rig, 40) as source:
        ticket = source.offer(a_request(41))
        call = begin(rig.ask(a_request(41), None, ticket))
        await asyncio.sleep(moment)
        source.vanish()
        reply = await call
        assert await rig.is_right(a_request(41), reply)
        assert rig.worker.stats().pulled_tokens == reply.num_cached_tokens == rig.pool.owned_blocks == 0


@of_both_roles(max_batch=8, max_step_tokens=8, min_pull_tokens=8, pull_wait_s=5.0)
@pytest.mark.parametrize("where", ["awaiting the offer", "pulling", "computing", "decoding"])
@pytest.mark.parametrize("how", ["call", "message", "router lost", "engine death", "stop"])
async def test_a_request_that_ends_on_its_way_gives_all_blocks_back(rig: Rig, role: str, where: str, how: str) -> None:
    if role == "prefill" and where == "decoding":
        return
    rig.links.bytes_per_s = 1e4
    async with source_beside(rig, 40) as source:
        request, ticket = a_request(70, max_tokens=20), source.ticket()
        if where != "awaiting the offer":
            source.send(ticket, request)
        call = begin(rig.ask(request, rig.ticket() if role == "prefill" else None, ticket))
        await asyncio.sleep(0.02)
        stats = rig.worker.stats()
        if where in ("computing", "decoding"):
            while rig.worker.stats().pulled_tokens == 0:  # noqa: ASYNC110  (virtual time)
                await asyncio.sleep(0.0005)
            await asyncio.sleep(0.001)
        else:
            assert (stats.num_waiting, stats.owned_blocks) == (1, 18 if where == "pulling" else 0)
        if where == "decoding":
            while rig.worker.stats().generated_tokens < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.0005)
        match how:
            case "call":
                call.cancel()
            case "message":
                rig.router.send(Cancel("r"))
            case "router lost":
                rig.fabric.cut(ROUTER)
            case "engine death":
                rig.worker.engine_lost("a test wants it")
            case "stop":
                await rig.worker.stop()
                assert rig.pool.owned_blocks == 0
        await asyncio.gather(call, return_exceptions=True)
        if where == "awaiting the offer":
            source.send(ticket, request)
        await asyncio.sleep(0.5)
        assert rig.pool.owned_blocks == source.parts.pool.owned_blocks == 0
        assert rig.worker.stats().transfers_done == (1 if where in ("computing", "decoding") else 0)


@of_both_roles(num_blocks=18, max_batch=2, max_step_tokens=2)
async def test_where_blocks_are_short_a_pull_is_given_up_so_that_workers_never_wait_in_a_circle(rig: Rig) -> None:
    async with source_beside(rig, 40) as source:
        first = begin(rig.ask(a_request(60, "first", cache_salt=b"x")))
        await asyncio.sleep(0)
        ticket = source.offer(a_request(41, "second"))
        second = begin(rig.ask(a_request(41, "second"), None, ticket))
        await source.transfers.all_ended()
        assert not first.done(), "the source has its blocks back before the target has any"
        await first
        assert await rig.is_right(a_request(41, "second"), await second)
        assert rig.worker.stats().pulled_tokens == 0


@of_both_roles(min_pull_tokens=8)
async def test_pulled_kv_arrives_while_the_engine_is_busy_and_goes_on_to_the_decode_worker(rig: Rig, role: str) -> None:
    target = make_parts(DECODE, rig.fabric, rig.links)
    (address,) = await target.receiver.start("elsewhere")
    ticket = rig.ticket(target_address=address) if role == "prefill" else None
    incoming = target.receiver.expect_transfer(ticket, target.pool.allocate(11), 43, 0) if ticket else None
    async with source_beside(rig, 40) as source:
        rig.engine.released.clear()
        busy = begin(rig.ask(a_request(9, "busy")))
        await asyncio.sleep(0)
        pull = source.offer(a_request(43))
        call = begin(rig.ask(a_request(43), ticket, pull))
        await asyncio.sleep(1.0)
        stats = rig.worker.stats()
        assert (stats.pulled_tokens, stats.num_waiting_tokens) == (40, 9 + 3)
        assert target.receiver.stats.bytes == (40 * 8 * LAYERS if ticket else 0)
        rig.engine.released.set()
        await busy
        assert await rig.is_right(a_request(43), await call)
        if incoming is not None:
            assert [await incoming.verified()] == list((await call).event.tokens)
    await target.close()


@of_both_roles(min_pull_tokens=8)
@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_draining_worker_waits_for_a_pull_though_its_request_has_ended(rig: Rig, is_cancelled: bool) -> None:
    rig.links.bytes_per_s = 1e4
    async with source_beside(rig, 40) as source:
        ticket = source.offer(a_request(41))
        call = begin(rig.ask(a_request(41), None, ticket))
        await asyncio.sleep(0.02)
        if is_cancelled:
            rig.router.send(Cancel("r"))
            await asyncio.gather(call, return_exceptions=True)
        assert rig.pool.owned_blocks == 11, "a chunk is on the wire"
        await rig.worker.drain()
        assert rig.pool.owned_blocks == 0
        assert is_cancelled or await rig.is_right(a_request(41), await call)


@of_both_roles()
async def test_a_draining_worker_waits_for_a_prefix_that_it_sends_and_logs_its_target(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="twostroke")
    await rig.ask(a_request(40, max_tokens=1))
    target = make_parts(SOURCE, rig.fabric, rig.links)
    ticket = mint_ticket(SECRET, "r", rig.info.peer, SOURCE, await target.receiver.start("elsewhere"))
    rig.router.send(SendPrefix(ticket, a_request(41).token_ids, b"", LogContext("a client's")))
    await a_moment()
    assert rig.pool.owned_blocks == 10
    draining = begin(rig.worker.drain())
    await a_moment()
    assert not draining.done()
    assert await target.receiver.expect_transfer(ticket, target.pool.allocate(10), 40, 0).verified() is None
    await draining
    assert rig.pool.owned_blocks == 0
    await target.close()
    (line,) = [record for record in caplog.records if record.getMessage() == "a cached prefix was sent"]
    assert vars(line)["log_context"] == LogContext("a client's")


@of_both_roles(min_pull_tokens=8, pull_wait_s=5.0)
@pytest.mark.parametrize("is_offered", [True, False])
async def test_a_leaving_worker_returns_requests_that_wait_for_a_prefix_and_keeps_those_that_pull_one(
    rig: Rig, is_offered: bool
) -> None:
    rig.links.bytes_per_s = 1e4
    async with source_beside(rig, 40) as source:
        ticket = source.ticket()
        if is_offered:
            source.send(ticket, a_request(41))
        call = begin(rig.ask(a_request(41), None, ticket))
        await asyncio.sleep(0.02)
        rig.router.send(Drain())
        if is_offered:
            assert await rig.is_right(a_request(41), await call)
        else:
            with pytest.raises(WorkerLeaving):
                await call
            source.send(ticket, a_request(41))
            await source.transfers.all_ended()
            assert asyncio.get_running_loop().time() < 1.0, "its offer is refused"


@of_both_roles()
@pytest.mark.parametrize(
    ("worker_id", "epoch", "name", "error"),
    [("", 99, "r", EpochMismatch), ("other-9", 0, "r", TicketRefused), ("", 0, "another", TicketRefused)],
)
async def test_a_pull_ticket_for_another_worker_is_refused(
    rig: Rig, role: str, worker_id: str, epoch: int, name: str, error: type[Exception]
) -> None:
    own = PREFILL if role == "prefill" else DECODE
    async with source_beside(rig) as source:
        target = Peer(worker_id or own.worker_id, epoch or own.epoch)
        with pytest.raises(error):
            await rig.ask(a_request(), None, source.ticket(name, target=target))
        assert rig.worker.stats().num_waiting == 0


@of_both_roles()
async def test_a_forged_pull_ticket_pulls_nothing(rig: Rig) -> None:
    async with source_beside(rig, 40) as source:
        forged = source.ticket(secret=b"guessed")
        source.send(forged, a_request(41))
        assert await rig.is_right(a_request(41), await rig.ask(a_request(41), None, forged))
        assert rig.worker.stats().pulled_tokens == 0


@of_both_roles(min_pull_tokens=8)
async def test_a_request_that_is_refused_keeps_no_blocks_at_its_source(rig: Rig) -> None:
    async with source_beside(rig, 99) as source:
        early, late = source.ticket(), source.ticket("late")
        source.send(early, a_request(100))
        await a_moment()
        for name, pull in (("r", early), ("late", late)):
            with pytest.raises(RequestError, match="context"):
                await rig.ask(a_request(100, name), None, pull)
        source.send(late, a_request(100, "late"))
        await a_moment()
        assert source.parts.pool.owned_blocks == 0
