"""The decode worker alone: its frames, its refusals, its steps ahead, and what only it tells of itself."""

import asyncio

import msgspec
import pytest

from tests.rigs.played import played_by
from tests.worker.worker_rig import Rig, a_moment, a_request, begin, expected, play, source_beside
from twostroke.protocol.errors import TicketRefused, WorkerLost
from twostroke.protocol.requests import DecodeReply, Promise
from twostroke.protocol.stats import MIN_STRETCH
from twostroke.worker.step_costs import COLD_STEPS, FIRST_SAMPLES

CHAT = Promise("chat", priority=2, share=0.5, tpot_s=0.05)


@played_by(play, role="decode")
async def test_a_request_without_a_ticket_is_computed_here_to_its_end(rig: Rig) -> None:
    request = a_request(max_tokens=20, stop_token_ids=(4, 9, 17), min_tokens=2)
    reply: DecodeReply = await rig.worker.decode(request, None)
    assert await rig.is_right(request, reply)
    assert reply.num_output_tokens == len(expected(request))
    assert reply.finish_reason == rig.frames[-1].events[0].finish_reason
    assert rig.pool.owned_blocks == 0


@played_by(play, role="decode")
async def test_requests_that_decode_together_share_one_frame_a_step(rig: Rig) -> None:
    requests = [a_request(10, name) for name in ("a", "b", "c")]
    await asyncio.gather(*(rig.worker.decode(request, None) for request in requests))
    for request in requests:
        assert await rig.is_right(request, None)
    assert len(rig.frames) < 12, "18 tokens came in frames of up to three"


@played_by(play, role="decode")
async def test_requests_of_two_routers_have_their_own_frames(rig: Rig) -> None:
    other = await rig.connect_router("router-1")
    await asyncio.gather(
        rig.worker.decode(a_request(10, "a"), None),
        rig.worker.decode(msgspec.structs.replace(a_request(10, "b"), router_id="router-1"), None),
    )
    await a_moment()
    assert all(len({event.request_id for event in frame.events}) == 1 for frame in rig.frames)
    await other.close()


@played_by(play, role="decode")
async def test_a_router_without_a_token_channel_gets_no_answer(rig: Rig) -> None:
    with pytest.raises(WorkerLost, match="no token channel"):
        await rig.worker.decode(msgspec.structs.replace(a_request(), router_id="router-9"), None)


@played_by(play, role="decode")
async def test_tickets_that_cannot_be_are_refused(rig: Rig) -> None:
    with pytest.raises(TicketRefused, match="for request another"):
        await rig.worker.decode(a_request(), rig.ticket("another"))
    with pytest.raises(TicketRefused, match="from two workers"):
        await rig.worker.decode(a_request(), rig.ticket(), rig.ticket())


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


@played_by(play, role="decode", max_step_s=5.0)
async def test_a_stopping_worker_waits_for_the_steps_under_way(rig: Rig) -> None:
    call = begin(rig.worker.decode(a_request(max_tokens=50), None))
    await asyncio.sleep(0.01)
    rig.engine.released.clear()
    await asyncio.sleep(1.0)
    stopping = begin(rig.worker.stop())
    await asyncio.sleep(1.0)
    assert len(rig.worker._steps) == 2
    num_steps = rig.engine.num_steps
    rig.engine.released.set()
    await stopping
    assert rig.engine.num_steps == num_steps + 1
    assert rig.pool.owned_blocks == 0
    await asyncio.gather(call, return_exceptions=True)


@played_by(play, role="decode", max_step_s=5.0)
async def test_a_step_behind_one_that_takes_long_has_its_own_time(rig: Rig) -> None:
    call = begin(rig.worker.decode(a_request(max_tokens=3), None))
    for _ in range(3):
        rig.engine.released.clear()
        await asyncio.sleep(4.0)
        rig.engine.released.set()
        await asyncio.sleep(0.002)
        rig.worker.check_health()
    await call


@pytest.mark.parametrize("swap_blocks", [0, 32])
def test_a_request_preempted_after_its_pull_goes_on_with_the_same_tokens(swap_blocks: int):
    async def script(rig: Rig) -> None:
        async with source_beside(rig, 40) as source:
            old = begin(rig.worker.decode(a_request(16, "old", max_tokens=40, cache_salt=b"x"), None))
            await asyncio.sleep(0)
            request = a_request(41, max_tokens=30)
            ticket = source.offer(request)
            reply = await rig.worker.decode(request, None, ticket)
            await old
            assert await rig.is_right(request, reply)
            assert reply.num_preemptions > 0
            assert rig.worker.stats().pulled_tokens == reply.num_cached_tokens == 40

    swapping = {"preemption": "swap", "swap_gib": 1.0} if swap_blocks else {}
    play(script, role="decode", num_blocks=21, swap_blocks=swap_blocks, min_pull_tokens=8, watermark=0.0, **swapping)


@played_by(play, role="decode", num_blocks=64)
async def test_a_decode_worker_reports_its_contexts_and_the_tightest_promise_among_decoding_requests(rig: Rig) -> None:
    loose = Promise("batch", tpot_s=0.2)
    calls = [
        begin(rig.ask(a_request(10, "a", promise=CHAT, max_tokens=30))),
        begin(rig.ask(a_request(7, "b", promise=loose, max_tokens=60))),
        begin(rig.ask(a_request(5, "c", max_tokens=60))),
    ]
    assert rig.worker.stats().tightest_tpot_s is None
    await asyncio.sleep(0.02)
    assert len(rig.events()) == 3, "all have begun to decode"
    stats = rig.worker.stats()
    assert stats.tightest_tpot_s == 0.05
    heard = 10 + 7 + 5 + sum(len(tokens) for tokens in rig.events().values())
    assert heard <= stats.context_tokens <= heard + 10, "some may be on their way"
    await calls[0]
    assert rig.worker.stats().tightest_tpot_s == 0.2
    await asyncio.gather(*calls)
    stats = rig.worker.stats()
    assert (stats.tightest_tpot_s, stats.context_tokens) == (None, 0)


@played_by(play, role="decode", num_blocks=64)
async def test_a_promise_that_can_not_be_kept_is_reported_with_its_lower_bound(rig: Rig) -> None:
    for number in range(COLD_STEPS + FIRST_SAMPLES):
        await rig.ask(a_request(5 + number, f"r{number}", max_tokens=3))
    hopeless = begin(rig.ask(a_request(10, "a", promise=Promise("chat", tpot_s=1e-6), max_tokens=30)))
    await asyncio.sleep(0.02)
    assert len(rig.events()["a"]) > 0
    stats = rig.worker.stats()
    assert stats.costs is not None
    alone_s = stats.costs.base_s + stats.costs.decode_s(1, stats.context_tokens)
    assert stats.tightest_tpot_s == pytest.approx(MIN_STRETCH * alone_s)
    await hopeless
