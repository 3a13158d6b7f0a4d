"""KV that comes to a decode worker and goes from it, and what becomes of a request whose KV does not come."""

import asyncio

import msgspec
import pytest

from tests.decode_worker.answers import a_moment, expected
from tests.simulation.fake_model import FakeEngine, expected_tokens
from tests.simulation.worker_rig import BLOCK, DECODE, LAYERS, PREFILL, SECRET, Rig, a_request, begin, make_parts, play
from twostroke.kvtransfer.incoming import IncomingTransfer
from twostroke.protocol.messages import Abort, Cancel, PrefillFailed, SendPrefix
from twostroke.protocol.requests import GenerateRequest, Peer, mint_ticket
from twostroke.worker.sequence import SequenceState


def test_a_transfer_that_makes_no_progress_is_given_up_and_its_prompt_computed_here_when_the_router_says_so():
    async def script(rig: Rig) -> None:
        request = a_request()
        call = begin(rig.worker.decode(request, await rig.offer()))
        await asyncio.sleep(5.0)
        assert rig.worker.stats().transfers_failed == 1
        assert rig.worker.stats().computed_tokens == rig.pool.owned_blocks == 0
        rig.router.send(PrefillFailed("r"))
        reply = await call
        await a_moment()
        assert rig.events()["r"] == expected(request)
        assert reply.transfer_s == 0.0
        assert rig.worker.stats().transfers_failed == 1

    play(script, role="decode")


def test_a_failed_transfer_of_which_the_router_says_nothing_is_computed_here_in_the_end():
    async def script(rig: Rig) -> None:
        request = a_request()
        await rig.worker.decode(request, await rig.offer())
        await a_moment()
        assert rig.events()["r"] == expected(request)

    play(script, role="decode", router_wait_s=3.0)


def test_a_request_that_is_cancelled_after_its_transfer_failed_is_not_computed():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(), await rig.offer()))
        await asyncio.sleep(5.0)
        rig.router.send(Cancel("r"))
        await call
        await asyncio.sleep(4.0)
        assert rig.worker.stats().computed_tokens == 0

    play(script, role="decode")


def test_an_offer_whose_request_is_given_up_is_aborted_at_once():
    async def script(rig: Rig) -> None:
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

    play(script, role="decode", num_blocks=8)


def test_kv_comes_and_its_first_token_goes_out_while_the_engine_is_busy():
    async def script(rig: Rig) -> None:
        parts, ticket, request = make_parts(PREFILL, rig.fabric, rig.links), rig.ticket(), a_request()
        sequence = SequenceState(request, BLOCK)
        sequence.reserve(parts.pool, 10)
        (token,) = await FakeEngine(parts.store).step([sequence.step(10)])
        rig.engine.released.clear()
        busy = begin(rig.worker.decode(a_request(9, "busy"), None))
        await asyncio.sleep(0)
        call = begin(rig.worker.decode(request, ticket))
        transfer = parts.sender.open(ticket, 10, sequence.block_ids, 10)
        transfer.commit(token)
        await transfer.done()
        sequence.reset(parts.pool)
        await a_moment()
        assert rig.events() == {"r": expected(request)[:1]}
        rig.engine.released.set()
        await asyncio.gather(busy, call)
        await a_moment()
        assert rig.events()["r"] == expected(request)
        await parts.sender.close()
        await parts.transports.close()

    play(script, role="decode")


@pytest.mark.parametrize("when", ["as it is verified", "after its first token"])
def test_a_failure_told_of_kv_that_has_come_changes_nothing(when: str):
    async def script(rig: Rig) -> None:
        parts, ticket, request = make_parts(PREFILL, rig.fabric, rig.links), rig.ticket(), a_request()
        sequence = SequenceState(request, BLOCK)
        sequence.reserve(parts.pool, 10)
        (token,) = await FakeEngine(parts.store).step([sequence.step(10)])
        call = begin(rig.worker.decode(request, ticket))
        transfer = parts.sender.open(ticket, 10, sequence.block_ids, 10)
        await a_moment()
        incoming = rig.worker._calls.find("r").incoming
        count = incoming._on_ended

        def count_and_tell(ended: IncomingTransfer) -> None:
            """Before the worker has looked at the end."""
            count(ended)
            rig.worker._prefill_failed("r")

        if when == "as it is verified":
            incoming._on_ended = count_and_tell
        else:
            rig.engine.released.clear()
        transfer.commit(token)
        await transfer.done()
        sequence.reset(parts.pool)
        await a_moment()
        rig.router.send(PrefillFailed("r"))
        await a_moment()
        rig.engine.released.set()
        await call
        await a_moment()
        assert rig.events()["r"] == expected(request)
        stats = rig.worker.stats()
        assert (stats.computed_tokens, stats.transfers_done, stats.transfers_failed) == (0, 1, 0)
        await parts.sender.close()
        await parts.transports.close()

    play(script, role="decode")


def test_kv_without_a_first_token_is_taken_for_a_failed_transfer():
    async def script(rig: Rig) -> None:
        parts, ticket = make_parts(PREFILL, rig.fabric, rig.links), rig.ticket()
        block_ids = parts.pool.allocate(3)
        transfer = parts.sender.open(ticket, 10, block_ids, 10)
        transfer.commit(None)
        reply = await rig.worker.decode(a_request(), ticket)
        await transfer.done()
        parts.pool.release(block_ids)
        await a_moment()
        assert rig.events()["r"] == expected(a_request())
        assert reply.transfer_s == 0.0
        await parts.sender.close()
        await parts.transports.close()

    play(script, role="decode")


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
        assert await parts.receiver.expect(ticket, block_ids, num_tokens, 0).verified() is None
        sequence = SequenceState(request, BLOCK)
        sequence.block_ids, sequence.num_computed = [*block_ids, *parts.pool.allocate(9)], num_tokens
        (token,) = await FakeEngine(parts.store).step([sequence.step(sequence.num_uncomputed)])
        is_whole = token is not None and token.token_id == expected_tokens(request, LAYERS)[0]
        sequence.reset(parts.pool)
    else:
        parts.receiver.refuse(ticket)
    await a_moment()
    assert rig.pool.owned_blocks == 0, "references end with the transfer"
    await parts.receiver.close()
    await parts.transports.close()
    return num_tokens, is_whole


def test_what_was_decoded_here_is_sent_to_whoever_pulls_it():
    async def script(rig: Rig) -> None:
        first = a_request(10, max_tokens=20)
        await rig.worker.decode(first, None)
        turn = (*first.token_ids, *expected_tokens(first, LAYERS))
        second = msgspec.structs.replace(first, token_ids=(*turn, 1, 2, 3), num_prompt_tokens=len(turn) + 3)
        assert await export(rig, second) == (28, True), "the last drawn token was never computed"
        same = msgspec.structs.replace(first, token_ids=turn[:28], num_prompt_tokens=28)
        assert await export(rig, same) == (24, True), "a token must be left to compute"
        other = msgspec.structs.replace(second, cache_salt=b"another tenant")
        assert await export(rig, other) == (None, False)
        assert await export(rig, second, taken=False) == (28, False)

    play(script, role="decode")


def test_after_a_failed_prefill_the_prompt_is_computed_here_at_once():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(), rig.ticket()))
        await asyncio.sleep(0.05)
        assert rig.worker.stats().num_waiting == 1
        rig.router.send(PrefillFailed("r"))
        rig.router.send(PrefillFailed("r"))
        await call
        await a_moment()
        assert rig.events()["r"] == expected(a_request())
        assert asyncio.get_running_loop().time() < 1.0

    play(script, role="decode")


def test_a_prefill_that_fails_while_its_request_waits_for_blocks_is_not_waited_for():
    async def script(rig: Rig) -> None:
        long = begin(rig.worker.decode(a_request(20, "long", max_tokens=10), None))
        waiting = begin(rig.worker.decode(a_request(18, cache_salt=b"tenant"), rig.ticket()))
        await asyncio.sleep(0.01)
        rig.router.send(PrefillFailed("r"))
        await asyncio.gather(long, waiting)
        await a_moment()
        assert rig.events()["r"] == expected(a_request(18))
        assert rig.worker.stats().transfers_failed == 0, "none was begun"
        assert asyncio.get_running_loop().time() < 1.0

    play(script, role="decode", num_blocks=8)


def test_a_call_cancelled_during_its_transfer_frees_its_blocks():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(), await rig.offer()))
        await asyncio.sleep(0.05)
        assert rig.pool.owned_blocks == 3
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0)
        assert rig.pool.owned_blocks == 0

    play(script, role="decode")
