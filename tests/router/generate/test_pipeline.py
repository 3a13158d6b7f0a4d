"""A request's way through two workers: its first token, its end, and its end before the end."""

import asyncio

import pytest

from tests.router.generate.collecting_tokens import allow, collect, go_on, new_state, nth_token
from twostroke.protocol.errors import ConnectionLost, RequestError
from twostroke.router.fleet import NoPath
from twostroke.router.generate.config import PipelineConfig


async def test_a_request_goes_through_prefill_and_decode_and_leaves_nothing(fleet_of, a_request, expected):
    async with fleet_of(1, 1) as rig:
        state = new_state(a_request())
        assert await collect(rig, state) == expected(a_request())
        assert len(state.decisions_s) == 1
        assert len(rig["p0"].seen) == len(rig["d0"].seen) == 1
        assert rig["p0"].seen[0].request_id == rig["d0"].seen[0].request_id != "template"
        assert (state.num_cached_tokens, state.prefill_s, state.transfer_s) == (3, 0.02, 0.03)
        assert state.num_output_tokens == 12
        assert not rig.fleet.owned
        assert not rig["d0"].cancelled


async def test_without_prefill_workers_the_decode_worker_does_both(fleet_of, a_request, expected):
    async with fleet_of(0, 1) as rig:
        state = new_state(a_request())
        assert await collect(rig, state) == expected(a_request())
        assert (state.num_cached_tokens, state.transfer_s) == (5, None)


async def test_the_first_token_is_sent_before_the_decode_worker_says_anything(fleet_of, a_request, expected):
    async with fleet_of(1, 1) as rig:
        allow(rig["d0"], 0)
        events, tokens = await nth_token(rig, a_request(), 1)
        assert tokens == expected(a_request())[:1]
        await events.aclose()
        assert not rig.fleet.owned


def reply_late(rig):
    """Have the prefill worker's KV arrive at once, and its reply when the decode worker is through with the request."""
    prefill = rig.fleet.prefill

    async def late(worker, request, ticket, pull):
        reply = await prefill(worker, request, ticket, pull)
        while rig["d0"].owned:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        return reply

    rig.fleet.prefill = late


async def test_the_first_token_may_come_from_the_decode_worker_first(fleet_of, a_request, expected):
    async with fleet_of(1, 1) as rig:
        reply_late(rig)
        assert await collect(rig, a_request()) == expected(a_request())
        assert not rig["d0"].told_prefill_failed


@pytest.mark.parametrize("num_tokens", [1, 3])
async def test_closing_the_generator_ends_both_calls_and_tells_both_workers(fleet_of, a_request, until, num_tokens):
    async with fleet_of(1, 1) as rig:
        allow(rig["d0"], num_tokens if num_tokens > 1 else 0)
        events, _ = await nth_token(rig, a_request(), num_tokens)
        assert not rig["p0"].owned
        await events.aclose()
        assert not rig.fleet.owned
        assert rig.pipeline.in_flight == 0
        for name in ("p0", "d0"):
            await until(lambda name=name: rig[name].cancelled == [rig[name].seen[0].request_id])


@pytest.mark.parametrize("steps", [0, 2])
async def test_cancelling_the_consumer_ends_everything(fleet_of, a_request, steps, until):
    async with fleet_of(1, 1) as rig:
        rig["p0"].prefill_gate = asyncio.Event()
        if steps:
            rig["p0"].prefill_gate.set()
        allow(rig["d0"], steps)
        task = asyncio.create_task(collect(rig, a_request()))
        await until(lambda: rig["d0"].owned and (rig["d0"].gate.locked() and (steps == 0 or not rig["p0"].owned)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not rig.fleet.owned


async def test_nobody_there_is_told_at_once(fleet_of, a_request):
    async with fleet_of(1, 0) as rig:
        with pytest.raises(NoPath) as caught:
            await collect(rig, a_request())
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)


async def test_places_at_a_worker_that_can_not_be_reached_are_given_back(fleet_of, a_request, monkeypatch):
    async with fleet_of(1, 1) as rig:

        async def ensure(info):
            raise ConnectionLost("a bug")

        monkeypatch.setattr(rig.channels, "ensure", ensure)
        with pytest.raises(ConnectionLost):
            await collect(rig, a_request())


@pytest.mark.parametrize("change", ["max_tokens", "stop_token_ids"])
async def test_a_first_token_that_is_the_last_cancels_the_decode_worker_at_once(
    fleet_of, a_request, expected, until, change, monkeypatch
):
    one = a_request(**{change: 1 if change == "max_tokens" else tuple(expected(a_request())[:1])})
    async with fleet_of(1, 1) as rig:
        monkeypatch.setattr(rig.pipeline, "_config", PipelineConfig(reply_grace_s=1000.0))
        allow(rig["d0"], 0)
        async with asyncio.timeout(20):
            assert await collect(rig, one) == expected(one)
        assert not rig.fleet.owned
        await until(lambda: rig["d0"].cancelled == [rig["d0"].seen[0].request_id])


async def test_a_whole_request_is_cancelled_nowhere(fleet_of, a_request):
    async with fleet_of(1, 1) as rig:
        await collect(rig, a_request())
        events, _ = await nth_token(rig, a_request(), 1)  # what was sent on the channels before has come by now
        await events.aclose()
        assert not {rig["p0"].seen[0].request_id} & {*rig["p0"].cancelled, *rig["d0"].cancelled}


async def test_a_request_whose_answer_nobody_reads_is_cancelled(fleet_of, a_request, until, monkeypatch):
    monkeypatch.setattr("twostroke.router.token_channels.MAX_UNREAD", 20)
    async with fleet_of(0, 1) as rig:
        allow(rig["d0"], 1)
        events, _ = await nth_token(rig, a_request(max_tokens=500), 1)
        go_on(rig["d0"])
        await until(lambda: rig["d0"].cancelled)
        with pytest.raises(RequestError, match="does not read"):
            async for _ in events:
                pass
