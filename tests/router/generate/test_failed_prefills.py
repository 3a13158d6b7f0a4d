"""Requests whose prefill fails, whose KV is not sent, or whose prefill worker is lost: the decode worker does it."""

import asyncio

import pytest

from tests.router.generate.collecting_tokens import allow, collect, go_on, new_state, nth_token, rest
from twostroke.protocol.errors import RequestError, WorkerLost
from twostroke.protocol.messages import KVNotSent, StatsFrame
from twostroke.protocol.stats import QueuedWork, StepCosts, WorkerStats


@pytest.mark.parametrize("failure", [WorkerLost("gone"), RequestError("draining", status=503), ValueError("a bug")])
async def test_a_failing_prefill_is_done_by_the_decode_worker(fleet_of, a_request, expected, failure):
    async with fleet_of(1, 1) as rig:
        rig["p0"].refusal = failure
        state = new_state(a_request())
        assert await collect(rig, state) == expected(a_request())
        assert rig["d0"].told_prefill_failed
        assert (state.prefill_failures, len(state.attempts), state.num_cached_tokens) == (1, 1, 5)


async def test_a_prefill_worker_whose_channel_drops_has_failed_although_its_call_hangs(
    fleet_of, a_request, expected, until
):
    async with fleet_of(1, 1) as rig:
        rig["p0"].prefill_gate = asyncio.Event()
        state = new_state(a_request())
        task = asyncio.create_task(collect(rig, state))
        await until(lambda: rig["p0"].owned)
        await rig["p0"].close()
        async with asyncio.timeout(20):
            assert await task == expected(a_request())
        assert (state.prefill_failures, len(state.attempts)) == (1, 1)


async def test_prefill_failed_is_repeated_until_the_decode_worker_is_heard(fleet_of, a_request, expected, until):
    async with fleet_of(1, 1) as rig:
        rig["p0"].refusal = WorkerLost("gone")
        original = rig.fleet.decode

        async def late(worker, request, ticket, pull):
            await until(lambda: len(rig["d0"].told_prefill_failed) >= 2)
            rig["d0"].prompt_ready.clear()  # a worker that hears of a request it does not know forgets it
            return await original(worker, request, ticket, pull)

        rig.fleet.decode = late
        assert await collect(rig, a_request()) == expected(a_request())


def say_not_sent(worker):
    worker.connections["router-0"].send(KVNotSent(worker.seen[-1].request_id))


@pytest.mark.parametrize("when", ["before the reply", "after the reply", "twice"])
async def test_a_prompt_whose_kv_was_not_sent_is_computed_by_the_decode_worker(
    fleet_of, a_request, expected, until, when
):
    async with fleet_of(1, 1) as rig:
        p0, d0 = rig["p0"], rig["d0"]
        p0.keeps_kv = True
        p0.prefill_gate = asyncio.Event()
        state = new_state(a_request())
        task = asyncio.create_task(collect(rig, state))
        await until(lambda: p0.owned and d0.owned)
        if when != "before the reply":
            p0.prefill_gate.set()
            await until(lambda: not p0.owned and state.first_token is not None)
        assert not d0.told_prefill_failed
        say_not_sent(p0)
        if when == "twice":
            say_not_sent(p0)
        async with asyncio.timeout(20):
            assert await task == expected(a_request())
        assert d0.told_prefill_failed
        assert (state.prefill_failures, len(state.attempts)) == (1, 1)
        assert not rig.fleet.owned
        p0.keeps_kv = False
        p0.prefill_gate.set()
        assert await collect(rig, a_request()) == expected(a_request())
        assert len(p0.seen) == 2, "it has failed that request alone"


async def test_a_prefill_call_that_fails_after_its_kv_was_not_sent_counts_once(fleet_of, a_request, expected, until):
    async with fleet_of(1, 1) as rig:
        p0 = rig["p0"]
        p0.prefill_gate = asyncio.Event()
        allow(rig["d0"], 0)
        state = new_state(a_request())
        task = asyncio.create_task(collect(rig, state))
        await until(lambda: p0.owned and rig["d0"].owned)
        say_not_sent(p0)
        await until(lambda: rig["d0"].told_prefill_failed)
        await p0.die()
        await until(lambda: not p0.owned)
        go_on(rig["d0"])
        assert await task == expected(a_request())
        assert (state.prefill_failures, len(state.attempts)) == (1, 1)


async def test_a_prefill_worker_lost_after_its_reply_has_not_sent_what_was_left(fleet_of, a_request, expected):
    async with fleet_of(1, 1) as rig:
        rig["p0"].keeps_kv = True
        state = new_state(a_request())
        events, tokens = await nth_token(rig, state, 1)
        await rig["p0"].die()
        async with asyncio.timeout(20):
            assert await rest(events, tokens) == expected(a_request())
        assert (state.prefill_failures, len(state.attempts)) == (1, 1)


async def test_a_source_that_counts_a_failure_although_the_decode_worker_goes_on_is_ignored(
    fleet_of, a_request, expected, until
):
    async with fleet_of(1, 1) as rig:
        allow(rig["d0"], 2)
        state = new_state(a_request())
        events, tokens = await nth_token(rig, state, 2)
        say_not_sent(rig["p0"])
        numbers = WorkerStats(total_blocks=77)
        rig["p0"].connections["router-0"].send(StatsFrame(numbers))
        await until(lambda: rig.channels.stats(rig["p0"].info.peer) == numbers)  # so the word before it is here, too
        go_on(rig["d0"])
        assert await rest(events, tokens) == expected(a_request())
        assert (state.prefill_failures, len(state.attempts), rig["d0"].told_prefill_failed) == (0, 1, [])


def tell_costs(rig, name, **numbers):
    """Send numbers like those of a worker that has run some steps."""
    costs = StepCosts(base_s=0.001, token_s=0.0001, pair_s=0.0, row_s=0.001, context_s=0.0, num_samples=100)
    rig[name].connections["router-0"].send(
        StatsFrame(WorkerStats(total_blocks=100, free_blocks=100, costs=costs, **numbers))
    )


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
async def test_where_the_decode_worker_is_busy_another_prefill_worker_computes_the_prompt(
    fleet_of, a_request, expected, until, is_busy
):
    async with fleet_of(2, 1) as rig:
        names = ("p0", "p1", "d0")
        rig.channels.follow(rig.fleet.workers())
        await until(lambda: all(rig.channels.stats(rig[name].info.peer) for name in names))
        for name in names:
            rig[name].prefill_gate = asyncio.Event()
            tell_costs(rig, name)
        await until(lambda: all(rig.channels.stats(rig[name].info.peer).costs for name in names))
        prompt = tuple(range(100))
        request = a_request(token_ids=prompt, num_prompt_tokens=len(prompt))
        state = new_state(request)
        task = asyncio.create_task(collect(rig, state))
        await until(lambda: rig["p0"].owned or rig["p1"].owned)
        first, other = (rig["p0"], rig["p1"]) if rig["p0"].owned else (rig["p1"], rig["p0"])
        if is_busy:
            tell_costs(rig, "d0", queued=(QueuedWork("standard", 0, 0.0, 5000, 3),))
            await until(lambda: rig.channels.stats(rig["d0"].info.peer).queued)
        other.prefill_gate.set()
        await first.die()
        async with asyncio.timeout(20):
            assert await task == expected(request)
        assert len(other.seen) == is_busy
        assert (len(state.attempts), state.prefill_failures) == ((2, 0) if is_busy else (1, 1))
        assert bool(rig["d0"].told_prefill_failed) != is_busy
        assert not rig.fleet.owned
