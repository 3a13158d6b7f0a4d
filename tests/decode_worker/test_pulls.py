"""Prompts computed on a decode worker whose beginning another worker holds: pulled from it, or computed after all.

On virtual time. A wrong, missing or stale block gives a wrong token: the model is a hash over all KV.
"""

import asyncio

import pytest

from tests.decode_worker.answers import a_moment, expected
from tests.simulation.fake_model import expected_tokens
from tests.simulation.prefix_source import source_beside
from tests.simulation.worker_rig import BLOCK, DECODE, LAYERS, ROUTER, Rig, a_request, begin, play
from twostroke.protocol.errors import EpochMismatch, RequestError, TicketRefused, WorkerLeaving
from twostroke.protocol.messages import Cancel, Drain, PrefillFailed
from twostroke.protocol.requests import GenerateRequest, Peer


async def is_right(rig: Rig, request: GenerateRequest) -> bool:
    """Whether the router has got the whole answer."""
    await a_moment()
    return rig.events()[request.request_id] == expected(request)


@pytest.mark.parametrize("block_size", [BLOCK, 2 * BLOCK, BLOCK // 2])
@pytest.mark.parametrize("is_early", [True, False])
def test_what_another_worker_holds_is_not_computed(block_size: int, is_early: bool):
    async def script(rig: Rig) -> None:
        async with source_beside(rig, block_size) as source:
            request, ticket = a_request(42), source.ticket()
            await source.compute(a_request(40))
            if is_early:
                source.send(ticket, request)
                await a_moment()
            call = begin(rig.worker.decode(request, None, ticket))
            await asyncio.sleep(0.01)
            if not is_early:
                source.send(ticket, request)
            reply = await call
            assert await is_right(rig, request)
            stats = rig.worker.stats()
            assert (reply.num_cached_tokens, stats.pulled_tokens, stats.transfers_done) == (40, 40, 1)
            assert stats.computed_tokens == 2
            assert 0 < reply.transfer_s < 0.5
            again = await rig.worker.decode(a_request(42, "again"), None)
            assert await is_right(rig, a_request(42, "again"))
            assert again.num_cached_tokens == 40, "what was pulled is cached here now"

    play(script, role="decode", min_pull_tokens=8)


def test_only_what_is_missing_here_is_pulled():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            await rig.worker.decode(a_request(21, "before"), None)
            ticket = source.ticket()
            source.send(ticket, a_request(41))
            reply = await rig.worker.decode(a_request(41), None, ticket)
            assert await is_right(rig, a_request(41))
            stats = rig.worker.stats()
            assert (reply.num_cached_tokens, stats.pulled_tokens) == (40, 20)
            assert source.parts.sender.stats.bytes == 20 * 8 * LAYERS

    play(script, role="decode", min_pull_tokens=8)


def test_a_resumed_request_pulls_what_the_lost_worker_may_have_left_elsewhere():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            first = a_request(30, max_tokens=20)
            sent = expected_tokens(first, LAYERS)[:12]
            resumed = a_request(30, max_tokens=20)
            resumed = type(resumed)(
                request_id="r",
                router_id=ROUTER,
                token_ids=(*first.token_ids, *sent),
                num_prompt_tokens=30,
                sampling=first.sampling,
                max_tokens=20,
            )
            await source.compute(resumed)
            ticket = source.ticket()
            source.send(ticket, resumed)
            await rig.worker.decode(resumed, None, ticket)
            await a_moment()
            assert rig.events()["r"] == expected(first)[12:]
            assert rig.worker.stats().pulled_tokens == 40

    play(script, role="decode", min_pull_tokens=8)


def test_a_source_that_holds_nothing_says_so_and_the_prompt_is_computed_at_once():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            ticket = source.ticket()
            assert not source.send(ticket, a_request(40))
            reply = await rig.worker.decode(a_request(40), None, ticket)
            assert asyncio.get_running_loop().time() < 0.2
            assert await is_right(rig, a_request(40))
            assert rig.worker.stats().pulled_tokens == reply.num_cached_tokens == 0
            assert reply.transfer_s == 0.0

    play(script, role="decode")


def test_an_offer_that_never_comes_is_waited_for_a_while_and_holds_nobody_up():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            call = begin(rig.worker.decode(a_request(40), None, source.ticket()))
            await asyncio.sleep(0)
            await rig.worker.decode(a_request(9, "other"), None)
            assert rig.pool.owned_blocks == 0
            assert rig.worker.stats().num_waiting == 1
            assert rig.worker.stats().num_waiting_tokens == 40
            await call
            assert 0.5 < asyncio.get_running_loop().time() < 0.6
            assert await is_right(rig, a_request(40))

    play(script, role="decode", pull_wait_s=0.5)


def test_an_offer_that_comes_too_late_is_refused():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            ticket = source.ticket()
            await rig.worker.decode(a_request(41), None, ticket)
            source.send(ticket, a_request(41))
            await source.exports.outlive()
            assert asyncio.get_running_loop().time() < 1.0, "long before the transfer's own time is up"

    play(script, role="decode", pull_wait_s=0.5)


def test_an_offer_that_spares_too_little_is_refused():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            await rig.worker.decode(a_request(36, "before"), None)
            ticket = source.ticket()
            source.send(ticket, a_request(41))
            reply = await rig.worker.decode(a_request(41), None, ticket)
            assert await is_right(rig, a_request(41))
            assert (reply.num_cached_tokens, rig.worker.stats().pulled_tokens) == (36, 0)
            await source.exports.outlive()
            assert asyncio.get_running_loop().time() < 1.0

    play(script, role="decode", min_pull_tokens=8)


@pytest.mark.parametrize("moment", [0.001, 0.003, 0.005, 0.01])
def test_a_source_lost_in_the_middle_costs_nothing_but_time(moment: float):
    async def script(rig: Rig) -> None:
        rig.links.bytes_per_s = 1e4
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            ticket = source.ticket()
            source.send(ticket, a_request(41))
            call = begin(rig.worker.decode(a_request(41), None, ticket))
            await asyncio.sleep(moment)
            source.vanish()
            assert (await call).num_cached_tokens == 0
            assert await is_right(rig, a_request(41))
            assert rig.worker.stats().pulled_tokens == 0
            assert rig.pool.owned_blocks == 0

    play(script, role="decode", min_pull_tokens=8)


@pytest.mark.parametrize("where", ["awaiting the offer", "pulling", "computing", "decoding"])
@pytest.mark.parametrize("how", ["call", "message", "router lost", "engine death", "stop"])
def test_a_request_that_ends_on_its_way_gives_all_blocks_back(where: str, how: str):
    async def script(rig: Rig) -> None:
        rig.links.bytes_per_s = 1e4
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            request, ticket = a_request(70, max_tokens=20), source.ticket()
            if where != "awaiting the offer":
                source.send(ticket, request)
            call = begin(rig.worker.decode(request, None, ticket))
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

    play(script, role="decode", max_batch=8, max_step_tokens=8, min_pull_tokens=8, pull_wait_s=5.0)


def test_blocks_stay_until_nothing_writes_into_them_any_more():
    async def script(rig: Rig) -> None:
        rig.links.bytes_per_s = 1e4
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            ticket = source.ticket()
            source.send(ticket, a_request(41))
            call = begin(rig.worker.decode(a_request(41), None, ticket))
            await asyncio.sleep(0.02)
            rig.router.send(Cancel("r"))
            await call
            assert rig.pool.owned_blocks == 11, "a chunk is on the wire"
            await asyncio.sleep(0.5)
            assert rig.pool.owned_blocks == 0

    play(script, role="decode", min_pull_tokens=8)


def test_where_blocks_are_short_a_pull_is_given_up_so_that_workers_never_wait_in_a_circle():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            first = begin(rig.worker.decode(a_request(60, "first", cache_salt=b"x"), None))
            await asyncio.sleep(0)
            ticket = source.ticket("second")
            source.send(ticket, a_request(41))
            second = begin(rig.worker.decode(a_request(41, "second"), None, ticket))
            await source.exports.outlive()
            assert not first.done(), "the source has its blocks back before the target has any"
            await asyncio.gather(first, second)
            assert await is_right(rig, a_request(41, "second"))
            assert rig.worker.stats().pulled_tokens == 0

    play(script, role="decode", num_blocks=18, max_batch=2, max_step_tokens=2)


def test_pulled_kv_comes_while_the_engine_is_busy():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            rig.engine.released.clear()
            busy = begin(rig.worker.decode(a_request(9, "busy"), None))
            await asyncio.sleep(0)
            ticket = source.ticket()
            source.send(ticket, a_request(43))
            call = begin(rig.worker.decode(a_request(43), None, ticket))
            await asyncio.sleep(1.0)
            assert rig.worker.stats().pulled_tokens == 40
            assert rig.worker.stats().num_waiting_tokens == 9 + 3
            rig.engine.released.set()
            await asyncio.gather(busy, call)
            assert await is_right(rig, a_request(43))

    play(script, role="decode", min_pull_tokens=8)


@pytest.mark.parametrize("swap_blocks", [0, 32])
def test_one_that_gives_way_after_its_pull_goes_on_with_the_same_tokens(swap_blocks: int):
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            old = begin(rig.worker.decode(a_request(16, "old", max_tokens=40, cache_salt=b"x"), None))
            await asyncio.sleep(0)
            ticket = source.ticket()
            request = a_request(41, max_tokens=30)
            source.send(ticket, request)
            reply = await rig.worker.decode(request, None, ticket)
            await old
            assert await is_right(rig, request)
            assert reply.num_preemptions > 0
            assert rig.worker.stats().pulled_tokens == reply.num_cached_tokens == 40

    swapping = {"preemption": "swap", "swap_gib": 1.0} if swap_blocks else {}
    play(script, role="decode", num_blocks=21, swap_blocks=swap_blocks, min_pull_tokens=8, watermark=0.0, **swapping)


def test_a_worker_in_which_a_pull_is_under_way_drains():
    async def script(rig: Rig) -> None:
        rig.links.bytes_per_s = 1e4
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            ticket = source.ticket()
            source.send(ticket, a_request(41))
            call = begin(rig.worker.decode(a_request(41), None, ticket))
            await asyncio.sleep(0.02)
            await rig.worker.drain()
            assert call.done()
            assert await is_right(rig, a_request(41))

    play(script, role="decode", min_pull_tokens=8)


def test_a_draining_worker_waits_for_a_pull_whose_request_has_ended():
    async def script(rig: Rig) -> None:
        rig.links.bytes_per_s = 1e4
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            ticket = source.ticket()
            source.send(ticket, a_request(41))
            call = begin(rig.worker.decode(a_request(41), None, ticket))
            await asyncio.sleep(0.02)
            rig.router.send(Cancel("r"))
            await call
            assert rig.pool.owned_blocks > 0
            await rig.worker.drain()
            assert rig.pool.owned_blocks == 0

    play(script, role="decode", min_pull_tokens=8)


@pytest.mark.parametrize("is_offered", [True, False])
def test_a_worker_that_is_told_to_leave_gives_back_what_waits_for_a_prefix_and_keeps_what_pulls_one(is_offered: bool):
    async def script(rig: Rig) -> None:
        rig.links.bytes_per_s = 1e4
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            ticket = source.ticket()
            if is_offered:
                source.send(ticket, a_request(41))
            call = begin(rig.worker.decode(a_request(41), None, ticket))
            await asyncio.sleep(0.02)
            rig.router.send(Drain())
            if is_offered:
                await call
                assert await is_right(rig, a_request(41))
            else:
                with pytest.raises(WorkerLeaving):
                    await call
                source.send(ticket, a_request(41))
                await source.exports.outlive()
                assert asyncio.get_running_loop().time() < 1.0, "its offer is refused"

    play(script, role="decode", min_pull_tokens=8, pull_wait_s=5.0)


def test_a_failed_prefill_that_is_told_of_a_request_without_one_disturbs_no_pull():
    async def script(rig: Rig) -> None:
        rig.links.bytes_per_s = 1e4
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            ticket = source.ticket()
            source.send(ticket, a_request(41))
            call = begin(rig.worker.decode(a_request(41), None, ticket))
            await asyncio.sleep(0.02)
            rig.router.send(PrefillFailed("r"))
            assert (await call).num_cached_tokens == 40
            assert await is_right(rig, a_request(41))

    play(script, role="decode", min_pull_tokens=8)


@pytest.mark.parametrize(
    ("target", "name", "error"),
    [
        (Peer(DECODE.worker_id, 12), "r", EpochMismatch),
        (Peer("decode-9", 22), "r", TicketRefused),
        (DECODE, "another", TicketRefused),
    ],
)
def test_a_pull_ticket_for_somebody_else_is_refused(target: Peer, name: str, error: type[Exception]):
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            with pytest.raises(error):
                await rig.worker.decode(a_request(), None, source.ticket(name, target=target))
            assert rig.worker.stats().num_waiting == 0

    play(script, role="decode")


def test_a_request_whose_kv_comes_from_a_prefill_worker_pulls_nothing_besides():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            with pytest.raises(TicketRefused, match="from two workers"):
                await rig.worker.decode(a_request(), rig.ticket(), source.ticket())

    play(script, role="decode")


def test_a_forged_pull_ticket_pulls_nothing():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            forged = source.ticket(secret=b"guessed")
            source.send(forged, a_request(41))
            await rig.worker.decode(a_request(41), None, forged)
            assert await is_right(rig, a_request(41))
            assert rig.worker.stats().pulled_tokens == 0

    play(script, role="decode")


def test_a_request_that_is_refused_keeps_no_blocks_at_its_source():
    async def script(rig: Rig) -> None:
        async with source_beside(rig) as source:
            await source.compute(a_request(40))
            ticket, late = source.ticket(), source.ticket("late")
            source.send(ticket, a_request(41))
            await a_moment()
            for name, pull in (("r", ticket), ("late", late)):
                with pytest.raises(RequestError, match="max_tokens"):
                    await rig.worker.decode(a_request(41, name, max_tokens=1000), None, pull)
            source.send(late, a_request(41, "late"))
            await a_moment()
            assert source.parts.pool.owned_blocks == 0

    play(script, role="decode", min_pull_tokens=8)
