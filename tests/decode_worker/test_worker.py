"""The decode worker alone: its calls, its frames, its refusals, and what becomes of blocks when requests end early."""

import asyncio

import msgspec
import pytest

from tests.decode_worker.answers import a_moment, expected
from tests.simulation.worker_rig import DECODE, ROUTER, Rig, a_request, begin, play
from twostroke.protocol.errors import RequestError, TicketRefused, WorkerLost
from twostroke.protocol.messages import Cancel
from twostroke.protocol.requests import DecodeReply


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
