"""Prompts whose beginning another worker holds: pulled from it, or computed after all. On virtual time.

A wrong, missing or stale block gives a wrong token: the model is a hash over all KV.
"""

import asyncio

import pytest

from tests.simulation.fake_model import expected_tokens
from tests.simulation.prefix_source import SOURCE, source_beside
from tests.simulation.worker_rig import (
    BLOCK,
    DECODE,
    LAYERS,
    PREFILL,
    SECRET,
    Rig,
    a_request,
    begin,
    make_parts,
    play,
)
from twostroke.protocol.errors import EpochMismatch, RequestError, TicketRefused
from twostroke.protocol.messages import Cancel, SendPrefix
from twostroke.protocol.requests import GenerateRequest, Peer, PrefillReply, mint_ticket


def is_right(reply: PrefillReply, request: GenerateRequest) -> bool:
    return [token.token_id for token in reply.event.tokens] == expected_tokens(request, LAYERS)[:1]


@pytest.mark.parametrize("block_size", [BLOCK, 2 * BLOCK, BLOCK // 2])
@pytest.mark.parametrize("is_early", [True, False])
def test_what_another_worker_holds_is_not_computed(block_size: int, is_early: bool):
    async def script(rig: Rig) -> None:
        async with source_beside(rig, block_size) as source:
            request, ticket = a_request(42), source.ticket()
            await source.compute(a_request(40))
            if is_early:
                source.send(ticket, request)
                await asyncio.sleep(0.1)
            call = begin(rig.worker.prefill(request, None, ticket))
            await asyncio.sleep(0.01)
            if not is_early:
                source.send(ticket, request)
            reply = await call
            assert is_right(reply, request)
            stats = rig.worker.stats()
            assert (reply.num_cached_tokens, stats.pulled_tokens, stats.computed_tokens) == (40, 40, 2)
            again = await rig.worker.prefill(request, None)
            assert is_right(again, request)
            assert again.num_cached_tokens == 40, "what was pulled is cached here now"

    play(script, role="prefill", min_pull_tokens=8)


def test_only_what_is_missing_here_is_pulled():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            await rig.worker.prefill(a_request(21), None)
            ticket = source.ticket()
            source.send(ticket, a_request(41))
            reply = await rig.worker.prefill(a_request(41), None, ticket)
            assert is_right(reply, a_request(41))
            stats = rig.worker.stats()
            assert (reply.num_cached_tokens, stats.pulled_tokens) == (40, 20)
            assert source.parts.sender.stats.bytes == 20 * 8 * LAYERS

    play(script, role="prefill", min_pull_tokens=8)


def test_the_last_token_is_computed_even_where_the_whole_prompt_is_held():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            ticket = source.ticket()
            source.send(ticket, a_request(40))
            reply = await rig.worker.prefill(a_request(40), None, ticket)
            assert is_right(reply, a_request(40))
            assert reply.num_cached_tokens == 36

    play(script, role="prefill", min_pull_tokens=8)


def test_a_source_that_holds_nothing_says_so_and_the_prompt_is_computed_at_once():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            ticket = source.ticket()
            assert not source.send(ticket, a_request(40))
            reply = await rig.worker.prefill(a_request(40), None, ticket)
            assert is_right(reply, a_request(40))
            assert asyncio.get_running_loop().time() < 0.2
            assert rig.worker.stats().pulled_tokens == 0

    play(script, role="prefill")


def test_an_offer_that_never_comes_is_waited_for_a_while_and_holds_nobody_up():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            call = begin(rig.worker.prefill(a_request(40), None, source.ticket()))
            await asyncio.sleep(0)
            other = await rig.worker.prefill(a_request(9, "other"), None)
            assert is_right(other, a_request(9))
            assert rig.pool.owned_blocks == 0
            assert rig.worker.stats().num_waiting == 1
            assert is_right(await call, a_request(40))
            assert 0.5 < asyncio.get_running_loop().time() < 0.6

    play(script, role="prefill", pull_wait_s=0.5)


def test_an_offer_that_comes_too_late_is_refused():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            ticket = source.ticket()
            await rig.worker.prefill(a_request(41), None, ticket)
            source.send(ticket, a_request(41))
            await source.exports.outlive()
            assert asyncio.get_running_loop().time() < 1.0, "long before the transfer's own time is up"

    play(script, role="prefill", pull_wait_s=0.5)


def test_an_offer_that_spares_too_little_is_refused():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            await rig.worker.prefill(a_request(36), None)
            ticket = source.ticket()
            source.send(ticket, a_request(41))
            reply = await rig.worker.prefill(a_request(41), None, ticket)
            assert is_right(reply, a_request(41))
            assert reply.num_cached_tokens == 36
            await source.exports.outlive()
            assert asyncio.get_running_loop().time() < 1.0

    play(script, role="prefill", min_pull_tokens=8)


@pytest.mark.parametrize("moment", [0.001, 0.003, 0.005, 0.01])
def test_a_source_lost_in_the_middle_costs_nothing_but_time(moment: float):
    async def script(rig: Rig) -> None:
        rig.links.bytes_per_s = 1e4
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            ticket = source.ticket()
            source.send(ticket, a_request(41))
            call = begin(rig.worker.prefill(a_request(41), None, ticket))
            await asyncio.sleep(moment)
            source.vanish()
            assert is_right(await call, a_request(41))
            assert rig.worker.stats().pulled_tokens == 0
            assert rig.pool.owned_blocks == 0

    play(script, role="prefill", min_pull_tokens=8)


@pytest.mark.parametrize("where", ["awaiting the offer", "pulling", "computing"])
@pytest.mark.parametrize("how", ["call", "message", "stop"])
def test_a_request_that_ends_on_its_way_gives_all_blocks_back(where: str, how: str):
    async def script(rig: Rig) -> None:
        rig.links.bytes_per_s = 1e4
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            ticket = source.ticket()
            if where != "awaiting the offer":
                source.send(ticket, a_request(80))
            call = begin(rig.worker.prefill(a_request(80), rig.ticket(), ticket))
            await asyncio.sleep(0.02)
            stats = rig.worker.stats()
            if where == "computing":
                while rig.worker.stats().pulled_tokens == 0:  # noqa: ASYNC110  (virtual time)
                    await asyncio.sleep(0.0005)
                await asyncio.sleep(0.001)
            else:
                assert (stats.num_waiting, stats.owned_blocks) == (1, 20 if where == "pulling" else 0)
            if how == "call":
                call.cancel()
            elif how == "message":
                assert rig.router is not None
                rig.router.send(Cancel("r"))
            else:
                await rig.worker.stop()
            await asyncio.gather(call, return_exceptions=True)
            if where == "awaiting the offer":
                source.send(ticket, a_request(80))
            await asyncio.sleep(0.5)
            assert rig.pool.owned_blocks == source.parts.pool.owned_blocks == 0
            assert rig.worker.stats().transfers_done == (1 if where == "computing" else 0)

    play(script, role="prefill", max_step_tokens=8, min_pull_tokens=8, pull_wait_s=5.0)


def test_where_blocks_are_short_a_pull_is_given_up_so_that_workers_never_wait_in_a_circle():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            first = begin(rig.worker.prefill(a_request(60, cache_salt=b"x"), None))
            await asyncio.sleep(0)
            ticket = source.ticket("second")
            source.send(ticket, a_request(41))
            second = begin(rig.worker.prefill(a_request(41, "second"), None, ticket))
            await source.exports.outlive()
            assert not first.done(), "the source has its blocks back before the target has any"
            assert is_right(await second, a_request(41))
            await first

    play(script, role="prefill", num_blocks=18, max_step_tokens=2)


def test_pulled_kv_comes_and_goes_on_to_the_decode_worker_while_the_engine_is_busy():
    async def script(rig: Rig) -> None:
        target = make_parts(DECODE, rig.fabric, rig.links)
        (address,) = await target.receiver.start("host")
        ticket = rig.ticket(target_address=address)
        incoming = target.receiver.expect(ticket, target.pool.allocate(11), 41, 0)
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            rig.engine.released.clear()
            busy = begin(rig.worker.prefill(a_request(9, "busy"), None))
            await asyncio.sleep(0)
            pull = source.ticket()
            source.send(pull, a_request(41))
            call = begin(rig.worker.prefill(a_request(41), ticket, pull))
            await asyncio.sleep(1.0)
            assert rig.worker.stats().pulled_tokens == 40
            assert target.receiver.stats.bytes == 40 * 8 * LAYERS
            rig.engine.released.set()
            await busy
            assert is_right(await call, a_request(41))
            assert [await incoming.verified()] == list((await call).event.tokens)
        await target.receiver.close()
        await target.transports.close()

    play(script, role="prefill", min_pull_tokens=8)


def test_a_worker_in_which_a_pull_is_under_way_drains():
    async def script(rig: Rig) -> None:
        rig.links.bytes_per_s = 1e4
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            ticket = source.ticket()
            source.send(ticket, a_request(41))
            call = begin(rig.worker.prefill(a_request(41), None, ticket))
            await asyncio.sleep(0.02)
            await rig.worker.drain()
            assert is_right(await call, a_request(41))

    play(script, role="prefill", min_pull_tokens=8)


def test_a_draining_worker_waits_for_a_prefix_that_it_sends():
    async def script(rig: Rig) -> None:
        await rig.worker.prefill(a_request(40), None)
        target = make_parts(SOURCE, rig.fabric, rig.links)
        ticket = mint_ticket(SECRET, "r", PREFILL, SOURCE, await target.receiver.start("host"))
        assert rig.router is not None
        rig.router.send(SendPrefix(ticket, a_request(41).token_ids, b""))
        await asyncio.sleep(0.1)
        assert rig.pool.owned_blocks == 10
        draining = begin(rig.worker.drain())
        await asyncio.sleep(0.1)
        assert not draining.done()
        assert await target.receiver.expect(ticket, target.pool.allocate(10), 40, 0).verified() is None
        await draining
        assert rig.pool.owned_blocks == 0
        await target.receiver.close()
        await target.transports.close()

    play(script, role="prefill")


@pytest.mark.parametrize(
    ("target", "name", "error"),
    [
        (Peer(PREFILL.worker_id, 12), "r", EpochMismatch),
        (Peer("prefill-9", 11), "r", TicketRefused),
        (PREFILL, "another", TicketRefused),
    ],
)
def test_a_pull_ticket_for_somebody_else_is_refused(target: Peer, name: str, error: type[Exception]):
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            with pytest.raises(error):
                await rig.worker.prefill(a_request(), None, source.ticket(name, target=target))

    play(script, role="prefill")


def test_a_forged_pull_ticket_pulls_nothing():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            forged = source.ticket(secret=b"guessed")
            source.send(forged, a_request(41))
            assert is_right(await rig.worker.prefill(a_request(41), None, forged), a_request(41))
            assert rig.worker.stats().pulled_tokens == 0

    play(script, role="prefill")


def test_a_prompt_that_is_refused_keeps_no_blocks_at_its_source():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(99))
            ticket = source.ticket()
            source.send(ticket, a_request(100))
            await asyncio.sleep(0.1)
            with pytest.raises(RequestError, match="context"):
                await rig.worker.prefill(a_request(100), None, ticket)
            await asyncio.sleep(0.1)
            assert source.parts.pool.owned_blocks == 0

    play(script, role="prefill", min_pull_tokens=8)
