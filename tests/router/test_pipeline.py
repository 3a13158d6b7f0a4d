import asyncio
from contextlib import aclosing

import msgspec
import pytest

from protocol.errors import RequestError, WorkerLost
from protocol.messages import KVNotSent, StatsFrame
from protocol.requests import SampledToken, TokenEvent
from protocol.stats import WorkerStats
from router.config import PipelineConfig
from router.policy import NoPath
from router.stages import Stages


async def collect(rig, request, stages=None):
    """All tokens; checks that indices are contiguous and the end is told once."""
    tokens, finishes = [], []
    async with aclosing(rig.pipeline.generate(request, stages or Stages(0.0))) as events:
        async for event in events:
            assert event.index == len(tokens)
            tokens += [token.token_id for token in event.tokens]
            if event.finish_reason:
                finishes.append(event.finish_reason)
    assert len(finishes) == 1
    return tokens


async def nth_token(rig, request, n, stages=None):
    """A generator that has yielded `n` tokens, and those tokens."""
    events = rig.pipeline.generate(request, stages or Stages(0.0))
    tokens = []
    while len(tokens) < n:
        tokens += [token.token_id for token in (await anext(events)).tokens]
    return events, tokens


def allow(worker, steps):
    worker.gate = asyncio.Semaphore(steps)


async def test_a_request_goes_through_prefill_and_decode_and_leaves_nothing(fleet_of, a_request, expected):
    async with fleet_of(1, 1) as rig:
        stages = Stages(0.0)
        assert await collect(rig, a_request(), stages) == expected(a_request())
        assert len(rig["p0"].seen) == len(rig["d0"].seen) == 1
        assert rig["p0"].seen[0].request_id == rig["d0"].seen[0].request_id != "template"
        assert (stages.num_cached_tokens, stages.prefill_s, stages.transfer_s) == (3, 0.02, 0.03)
        assert stages.num_output_tokens == 12
        assert not rig.fleet.owned
        assert not rig["d0"].cancelled


async def test_without_prefill_workers_the_decode_worker_does_both(fleet_of, a_request, expected):
    async with fleet_of(0, 1) as rig:
        stages = Stages(0.0)
        assert await collect(rig, a_request(), stages) == expected(a_request())
        assert (stages.num_cached_tokens, stages.transfer_s) == (5, None)


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


@pytest.mark.parametrize(
    ("num_prefill", "num_tokens", "is_suspect"),
    [
        pytest.param(
            1, 1, True, id="it has only repeated the prefill worker's token, and may have died of drawing one"
        ),
        pytest.param(1, 2, False, id="it has drawn one"),
        pytest.param(0, 1, False, id="it has drawn the first itself"),
    ],
)
async def test_a_decode_worker_that_is_heard_before_the_prefill_workers_reply_and_dies_accuses_by_what_it_drew(
    fleet_of, a_request, until, num_prefill, num_tokens, is_suspect
):
    async with fleet_of(num_prefill, 1) as rig:
        reply_late(rig)
        allow(rig["d0"], num_tokens)
        events, _ = await nth_token(rig, a_request(), num_tokens)
        going_on = asyncio.create_task(anext(events))
        await rig["d0"].die()
        suspects = rig.pipeline._records.suspects
        await until(lambda: suspects.num_suspects == 1)
        assert suspects.is_suspect(suspects.open(a_request())) == is_suspect
        going_on.cancel()
        await asyncio.gather(going_on, return_exceptions=True)
        await events.aclose()


async def test_closing_the_generator_cancels_both_calls_and_says_so_on_the_channel(fleet_of, a_request, until):
    async with fleet_of(1, 1) as rig:
        allow(rig["d0"], 3)
        events, _ = await nth_token(rig, a_request(), 3)
        await events.aclose()
        assert not rig.fleet.owned
        await until(lambda: len(rig["d0"].cancelled) == 1)
        assert rig.pipeline.in_flight == 0


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


@pytest.mark.parametrize("failure", [WorkerLost("gone"), RequestError("draining", status=503), ValueError("a bug")])
async def test_a_failing_prefill_is_done_by_the_decode_worker(fleet_of, a_request, expected, failure):
    async with fleet_of(1, 1) as rig:
        rig["p0"].refusal = failure
        stages = Stages(0.0)
        assert await collect(rig, a_request(), stages) == expected(a_request())
        assert rig["d0"].told_prefill_failed
        assert (stages.prefill_failures, stages.attempts, stages.num_cached_tokens) == (1, 1, 5)


async def test_a_prefill_worker_whose_channel_drops_has_failed_although_its_call_hangs(
    fleet_of, a_request, expected, until
):
    async with fleet_of(1, 1) as rig:
        rig["p0"].prefill_gate = asyncio.Event()
        stages = Stages(0.0)
        task = asyncio.create_task(collect(rig, a_request(), stages))
        await until(lambda: rig["p0"].owned)
        await rig["p0"].close()
        async with asyncio.timeout(20):
            assert await task == expected(a_request())
        assert (stages.prefill_failures, stages.attempts) == (1, 1)


async def test_prefill_failed_is_repeated_until_the_decode_worker_is_heard(fleet_of, a_request, expected, until):
    async with fleet_of(1, 1) as rig:
        rig["p0"].refusal = WorkerLost("gone")
        original = rig.fleet.decode

        async def late(worker, request, ticket):
            await until(lambda: len(rig["d0"].told_prefill_failed) >= 2)
            rig["d0"].prompt_ready.clear()  # a worker that hears of a request it does not know forgets it
            return await original(worker, request, ticket)

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
        stages = Stages(0.0)
        task = asyncio.create_task(collect(rig, a_request(), stages))
        await until(lambda: p0.owned and d0.owned)
        if when != "before the reply":
            p0.prefill_gate.set()
            await until(lambda: not p0.owned and stages.first_token is not None)
        assert not d0.told_prefill_failed
        say_not_sent(p0)
        if when == "twice":
            say_not_sent(p0)
        async with asyncio.timeout(20):
            assert await task == expected(a_request())
        assert d0.told_prefill_failed
        assert (stages.prefill_failures, stages.attempts) == (1, 1)
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
        stages = Stages(0.0)
        task = asyncio.create_task(collect(rig, a_request(), stages))
        await until(lambda: p0.owned and rig["d0"].owned)
        say_not_sent(p0)
        await until(lambda: rig["d0"].told_prefill_failed)
        await p0.die()
        await until(lambda: not p0.owned)
        for _ in range(20):
            rig["d0"].gate.release()
        assert await task == expected(a_request())
        assert (stages.prefill_failures, stages.attempts) == (1, 1)


async def test_a_prefill_worker_lost_after_its_reply_has_not_sent_what_was_left(fleet_of, a_request, expected):
    async with fleet_of(1, 1) as rig:
        rig["p0"].keeps_kv = True
        stages = Stages(0.0)
        events, tokens = await nth_token(rig, a_request(), 1, stages)
        await rig["p0"].die()
        async with asyncio.timeout(20):
            async for event in events:
                tokens += [token.token_id for token in event.tokens]
        assert tokens == expected(a_request())
        assert (stages.prefill_failures, stages.attempts) == (1, 1)


async def test_a_source_that_counts_a_failure_although_the_decode_worker_goes_on_is_ignored(
    fleet_of, a_request, expected, until
):
    async with fleet_of(1, 1) as rig:
        allow(rig["d0"], 2)
        stages = Stages(0.0)
        events, tokens = await nth_token(rig, a_request(), 2, stages)
        say_not_sent(rig["p0"])
        numbers = WorkerStats(total_blocks=77)
        rig["p0"].connections["router-0"].send(StatsFrame(numbers))
        await until(lambda: rig.channels.stats(rig["p0"].info.peer) == numbers)  # so the word before it is here, too
        for _ in range(20):
            rig["d0"].gate.release()
        async for event in events:
            tokens += [token.token_id for token in event.tokens]
        assert tokens == expected(a_request())
        assert (stages.prefill_failures, stages.attempts, rig["d0"].told_prefill_failed) == (0, 1, [])


@pytest.mark.parametrize("sent", [1, 2, 7, 11])
async def test_a_lost_decode_worker_is_replaced_without_gap_or_repeat(fleet_of, a_request, expected, sent):
    async with fleet_of(1, 2) as rig:
        allow(rig["d0"], sent)
        stages = Stages(0.0)
        events, tokens = await nth_token(rig, a_request(), sent, stages)
        await rig["d0"].die()
        async for event in events:
            assert event.index == len(tokens)
            tokens += [token.token_id for token in event.tokens]
        assert tokens == expected(a_request())
        assert stages.resumes == 1
        resumed = rig["d1"].seen[0]
        assert resumed.num_output_tokens_given == sent
        assert resumed.request_id != rig["d0"].seen[0].request_id
        assert not rig.fleet.owned


async def test_a_stream_that_goes_on_elsewhere_is_told(fleet_of, a_request, expected, caplog):
    caplog.set_level("INFO", logger="router.pipeline")
    async with fleet_of(0, 2) as rig:
        for name in ("d0", "d1"):
            allow(rig[name], 3)
        events, tokens = await nth_token(rig, a_request(), 3)
        (victim,) = [worker for worker in rig.fleet.all.values() if worker.seen]
        (other,) = [worker for worker in rig.fleet.all.values() if worker is not victim]
        await victim.die()
        allow(other, 100)
        async with aclosing(events):
            tokens += [token.token_id async for event in events for token in event.tokens]
        assert tokens == expected(a_request())
    (told,) = [record for record in caplog.records if "goes on" in record.message]
    assert told.levelname == "INFO"
    assert (told.fields["attempt"], told.fields["decode_worker"], told.fields["tokens"]) == (2, other.name, 3)
    assert 0 < told.fields["pause_s"] < 5


async def test_a_dropped_channel_alone_moves_the_request_to_another_worker(fleet_of, a_request, expected):
    async with fleet_of(1, 2) as rig:
        allow(rig["d0"], 4)
        events, tokens = await nth_token(rig, a_request(), 4)
        await rig["d0"].connections["router-0"].close()
        async for event in events:
            tokens += [token.token_id for token in event.tokens]
        assert tokens == expected(a_request())
        assert not rig.fleet.owned


async def test_a_request_waits_for_its_only_worker_to_come_back(fleet_of, a_request, expected):
    async with fleet_of(1, 1) as rig:
        allow(rig["d0"], 4)
        events, tokens = await nth_token(rig, a_request(), 4)
        rest = asyncio.create_task(anext(events))
        await rig["d0"].die()
        rig["d0"].gate = None
        await asyncio.sleep(0.05)
        await rig["d0"].start()
        tokens += [token.token_id for token in (await rest).tokens]
        async for event in events:
            tokens += [token.token_id for token in event.tokens]
        assert tokens == expected(a_request())


async def test_the_only_worker_gets_time_to_recover_before_it_is_asked_again(fleet_of, a_request, expected):
    async with fleet_of(0, 1) as rig:
        rig["d0"].refusal = WorkerLost("no token channel yet")
        asyncio.get_running_loop().call_later(0.3, setattr, rig["d0"], "refusal", None)
        stages = Stages(0.0)
        assert await collect(rig, a_request(), stages) == expected(a_request())
        assert stages.attempts == 2


async def test_a_first_token_that_comes_again_as_another_one_moves_the_request(fleet_of, a_request, expected):
    def another(event):
        return msgspec.structs.replace(event, tokens=(SampledToken((event.tokens[0].token_id + 1) % 300),))

    async with fleet_of(1, 2) as rig:
        allow(rig["d0"], 0)
        rig["d0"].corrupt = lambda event: another(event) if event.index == 0 else event
        stages = Stages(0.0)
        events, tokens = await nth_token(rig, a_request(), 1, stages)
        for _ in range(20):
            rig["d0"].gate.release()
        async for event in events:
            tokens += [token.token_id for token in event.tokens]
        assert tokens == expected(a_request())
        assert stages.resumes == 1


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda event: msgspec.structs.replace(event, index=event.index + 1) if event.index == 5 else event,
        lambda event: TokenEvent(event.request_id, 5, (), None, "out of luck") if event.index == 5 else event,
    ],
    ids=["a gap", "an error event"],
)
async def test_a_worker_that_misbehaves_counts_as_lost(fleet_of, a_request, expected, corrupt):
    async with fleet_of(1, 2) as rig:
        rig["d0"].corrupt = corrupt
        stages = Stages(0.0)
        assert await collect(rig, a_request(), stages) == expected(a_request())
        assert stages.resumes == 1


async def test_a_lost_tail_counts_as_a_lost_worker(fleet_of, a_request, expected):
    async with fleet_of(1, 2) as rig:
        rig["d0"].corrupt = lambda event: msgspec.structs.replace(event, request_id="another")
        assert await collect(rig, a_request()) == expected(a_request())
        assert rig["d1"].seen


async def test_attempts_are_bounded(fleet_of, a_request):
    async with fleet_of(0, 2) as rig:
        for name in ("d0", "d1"):
            rig[name].refusal = WorkerLost("again and again")
        stages = Stages(0.0)
        with pytest.raises(WorkerLost):
            await collect(rig, a_request(), stages)
        assert stages.attempts == 1 + PipelineConfig().retries


async def test_a_refused_request_is_not_tried_elsewhere(fleet_of, a_request, refusal):
    async with fleet_of(0, 2) as rig:
        rig["d0"].refusal = refusal(400)
        with pytest.raises(RequestError):
            await collect(rig, a_request())
        assert not rig["d1"].seen


async def test_a_full_worker_sends_the_request_elsewhere(fleet_of, a_request, expected, refusal):
    async with fleet_of(0, 2) as rig:
        rig["d0"].refusal = refusal(429)
        assert await collect(rig, a_request()) == expected(a_request())
        rig["d1"].refusal = refusal(429)
        with pytest.raises(RequestError):
            await collect(rig, a_request())


async def test_requests_that_are_not_admitted_earn_no_retries(fleet_of, a_request, monkeypatch):
    def refuse(request, path, stages):
        raise RequestError("too late", code="overloaded", status=429)

    async with fleet_of(1, 1) as rig:
        budget = rig.pipeline._budget
        while budget.take():
            pass
        monkeypatch.setattr(rig.pipeline, "_admit", refuse)
        for _ in range(20):
            with pytest.raises(RequestError, match="too late"):
                await collect(rig, a_request())
        assert not budget.take(), "under overload most are refused, and there each retry is load on top of load"


async def test_nobody_there_is_told_at_once(fleet_of, a_request):
    async with fleet_of(1, 0) as rig:
        with pytest.raises(NoPath) as caught:
            await collect(rig, a_request())
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)


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


async def test_an_early_end_is_told_to_a_prefill_worker_whose_call_is_over(fleet_of, a_request, until):
    async with fleet_of(1, 1) as rig:
        allow(rig["d0"], 0)
        events, _ = await nth_token(rig, a_request(), 1)
        assert not rig["p0"].owned
        await events.aclose()
        await until(lambda: rig["p0"].cancelled == [rig["p0"].seen[0].request_id])


async def test_a_whole_request_is_cancelled_nowhere(fleet_of, a_request):
    async with fleet_of(1, 1) as rig:
        await collect(rig, a_request())
        events, _ = await nth_token(rig, a_request(), 1)  # what was sent on the channels before has come by now
        await events.aclose()
        assert not {rig["p0"].seen[0].request_id} & {*rig["p0"].cancelled, *rig["d0"].cancelled}


async def test_many_requests_at_once_each_get_their_own_tokens(fleet_of, a_request, expected):
    async with fleet_of(2, 2) as rig:
        requests = [a_request(token_ids=(i, 2, 3), num_prompt_tokens=3, max_tokens=20) for i in range(40)]
        results = await asyncio.gather(*(collect(rig, request) for request in requests))
        assert results == [expected(request) for request in requests]
        assert len(rig["d0"].seen) == len(rig["d1"].seen) == 20


async def test_a_request_whose_answer_nobody_reads_is_cancelled(fleet_of, a_request, until, monkeypatch):
    monkeypatch.setattr("router.token_stream.MAX_UNREAD", 20)
    async with fleet_of(0, 1) as rig:
        allow(rig["d0"], 1)
        events, _ = await nth_token(rig, a_request(max_tokens=500), 1)
        for _ in range(100):
            rig["d0"].gate.release()
        await until(lambda: rig["d0"].cancelled)
        with pytest.raises(RequestError, match="does not read"):
            async for _ in events:
                pass
