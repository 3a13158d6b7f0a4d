"""The decode worker alone: its calls, its frames, and what becomes of blocks when things end early."""

import asyncio
import contextlib

import msgspec
import pytest

from kvtransfer.receiver import IncomingTransfer
from model.sequence import SequenceState
from protocol.errors import ConnectionLost, RequestError, TicketRefused, WorkerLeaving, WorkerLost
from protocol.messages import Abort, Cancel, Drain, PrefillFailed, SendPrefix
from protocol.network import Connection
from protocol.requests import DecodeReply, GenerateRequest
from protocol.tickets import Address, Peer, mint_ticket
from tests.simulation.fake_model import FakeEngine, expected_tokens
from tests.simulation.worker_rig import (
    BLOCK,
    DECODE,
    LAYERS,
    PREFILL,
    ROUTER,
    SECRET,
    Rig,
    a_request,
    begin,
    make_parts,
    play,
)


def expected(request) -> list[tuple[int, int]]:
    return list(enumerate(expected_tokens(request, LAYERS)))


async def a_moment() -> None:
    """Until frames under way have arrived."""
    await asyncio.sleep(0.1)


def test_a_request_without_a_ticket_is_computed_here_to_its_end():
    async def script(rig: Rig) -> None:
        request = a_request(max_tokens=20, stop_token_ids=(4, 9, 17), min_tokens=2)
        reply: DecodeReply = await rig.worker.decode(request, None)
        await a_moment()
        assert rig.events()["r"] == expected(request)
        assert reply.num_output_tokens == len(expected(request))
        assert reply.finish_reason == rig.frames[-1].events[0].finish_reason
        assert rig.pool.owned_blocks == 0

    play(script, role="decode")


def test_requests_that_decode_together_share_one_frame_a_step():
    async def script(rig: Rig) -> None:
        requests = [a_request(10, name) for name in ("a", "b", "c")]
        await asyncio.gather(*(rig.worker.decode(request, None) for request in requests))
        await a_moment()
        for request in requests:
            assert rig.events()[request.request_id] == expected(request)
        assert len(rig.frames) < 12, "18 tokens came in frames of up to three"

    play(script, role="decode")


def test_requests_of_two_routers_come_in_their_own_frames():
    async def script(rig: Rig) -> None:
        other = await rig.connect_router("router-1")
        await asyncio.gather(
            rig.worker.decode(a_request(10, "a"), None),
            rig.worker.decode(msgspec.structs.replace(a_request(10, "b"), router_id="router-1"), None),
        )
        await a_moment()
        assert all(len({event.request_id for event in frame.events}) == 1 for frame in rig.frames)
        await other.close()

    play(script, role="decode")


def test_a_router_without_a_token_channel_gets_no_answer():
    async def script(rig: Rig) -> None:
        with pytest.raises(WorkerLost, match="no token channel"):
            await rig.worker.decode(msgspec.structs.replace(a_request(), router_id="router-9"), None)

    play(script, role="decode")


@pytest.mark.parametrize("fields", [{"max_tokens": 1000}, {"length": 90, "max_tokens": 9}])
def test_a_request_that_could_never_fit_is_refused(fields):
    async def script(rig: Rig) -> None:
        with pytest.raises(RequestError):
            await rig.worker.decode(a_request(**fields), None)

    play(script, role="decode", num_blocks=20)


def test_a_full_queue_refuses_what_comes_next():
    async def script(rig: Rig) -> None:
        calls = [begin(rig.worker.decode(a_request(name=name), None)) for name in ("a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as refused:
            await rig.worker.decode(a_request(name="c"), None)
        assert refused.value.status == 429
        await asyncio.gather(*calls)
        await rig.worker.decode(a_request(name="c"), None)

    play(script, role="decode", max_waiting=2)


def test_a_request_id_in_use_is_refused():
    async def script(rig: Rig) -> None:
        first = begin(rig.worker.decode(a_request(), None))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="here already"):
            await rig.worker.decode(a_request(), None)
        await first

    play(script, role="decode")


def test_a_ticket_of_another_request_is_refused():
    async def script(rig: Rig) -> None:
        with pytest.raises(TicketRefused):
            await rig.worker.decode(a_request(), rig.ticket("another"))

    play(script, role="decode")


def test_a_cancelled_call_frees_its_blocks_once_the_step_has_run():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(max_tokens=50), None))
        await asyncio.sleep(0.01)
        assert rig.pool.owned_blocks > 0
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert rig.pool.owned_blocks > 0, "a step still writes into them"
        await a_moment()
        assert rig.pool.owned_blocks == 0
        assert rig.worker.stats().aborted_requests == 1

    play(script, role="decode")


def test_a_cancel_message_ends_the_call_without_a_finish_reason():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(max_tokens=50), None))
        await asyncio.sleep(0.01)
        rig.router.send(Cancel("somebody else's"))
        rig.router.send(Cancel("r"))
        reply = await call
        assert reply.finish_reason is None
        await a_moment()
        assert rig.pool.owned_blocks == 0

    play(script, role="decode")


def test_a_lost_router_ends_its_requests():
    async def script(rig: Rig) -> None:
        call = begin(rig.worker.decode(a_request(max_tokens=50), None))
        await asyncio.sleep(0.01)
        rig.fabric.cut(ROUTER)
        with pytest.raises(WorkerLost, match="is gone"):
            await call
        await a_moment()
        assert rig.pool.owned_blocks == 0

    play(script, role="decode")


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


def test_tokens_are_the_same_whether_steps_run_ahead_or_not():
    answers, ahead = [], []
    for run_ahead in (True, False):

        async def script(rig: Rig) -> None:
            await asyncio.gather(
                *(
                    rig.worker.decode(a_request(10 + i, f"{i}", max_tokens=20, stop_token_ids=(i,)), None)
                    for i in range(6)
                )
            )
            await a_moment()
            answers.append(rig.events())
            ahead.append(rig.engine.num_steps_ahead)

        play(script, role="decode", run_ahead=run_ahead, num_blocks=16)
    assert answers[0] == answers[1]
    assert ahead[0] > ahead[1] == 0


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


def test_the_numbers_it_tells_are_true():
    async def script(rig: Rig) -> None:
        assert rig.info.peer == DECODE
        assert rig.info.role == "decode"
        for _ in range(2):
            await rig.worker.decode(a_request(10), None)
        rig.engine.num_broken_rows = 3
        stats = rig.worker.stats()
        assert stats.broken_logit_rows == 3
        assert stats.generated_tokens == 12
        assert stats.finished_requests == 2
        assert stats.prefix_queries == 20
        assert stats.prefix_hits == 8
        assert stats.computed_tokens == 10 + 2
        assert stats.steps == rig.engine.num_steps == 12
        assert stats.step_seconds > 0
        assert stats.free_blocks == stats.total_blocks == 32
        assert stats.num_running == stats.num_waiting == stats.owned_blocks == 0

    play(script, role="decode")
