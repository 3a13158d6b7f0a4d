"""Requests that go on at another decode worker, since theirs is lost, misbehaves or refuses them; and how often."""

import asyncio

import msgspec
import pytest

from tests.router.generate.collecting_tokens import allow, collect, go_on, new_state, nth_token, rest
from twostroke.protocol.errors import RequestError, WorkerLost
from twostroke.protocol.requests import LogContext, SampledToken, TokenEvent
from twostroke.router.generate.config import PipelineConfig


@pytest.mark.parametrize("sent", [1, 2, 7, 11])
async def test_a_lost_decode_worker_is_replaced_without_gap_or_repeat(fleet_of, a_request, expected, sent):
    async with fleet_of(1, 2) as rig:
        allow(rig["d0"], sent)
        state = new_state(a_request(), log_context=LogContext("a client's", "a trace's", 3))
        events, tokens = await nth_token(rig, state, sent)
        await rig["d0"].die()
        assert await rest(events, tokens) == expected(a_request())
        assert state.resumes == 1
        resumed = rig["d1"].seen[0]
        assert resumed.num_output_tokens_given == sent
        first = rig["d0"].seen[0]
        assert resumed.request_id != first.request_id
        assert first.log_context == LogContext("a client's", "a trace's", 3, 1, "p0", "d0")
        assert resumed.log_context == LogContext("a client's", "a trace's", 3, 2, "p0", "d1")
        assert rig["p0"].seen[-1].log_context == resumed.log_context
        assert not rig.fleet.owned


async def test_a_stream_that_goes_on_elsewhere_is_told(fleet_of, a_request, expected, caplog):
    caplog.set_level("INFO", logger="twostroke.router.generate.pipeline")
    async with fleet_of(0, 2) as rig:
        for name in ("d0", "d1"):
            allow(rig[name], 3)
        events, tokens = await nth_token(rig, a_request(), 3)
        (victim,) = [worker for worker in rig.fleet.all.values() if worker.seen]
        (other,) = [worker for worker in rig.fleet.all.values() if worker is not victim]
        await victim.die()
        allow(other, 100)
        assert await rest(events, tokens) == expected(a_request())
    (told,) = [record for record in caplog.records if "goes on" in record.message]
    assert told.levelname == "INFO"
    assert (told.log_context.attempt, told.log_context.decode_worker, told.fields["tokens"]) == (2, other.name, 3)
    assert 0 < told.fields["pause_s"] < 5


async def test_the_only_worker_gets_time_to_recover_before_it_is_asked_again(fleet_of, a_request, expected):
    async with fleet_of(0, 1) as rig:
        rig["d0"].refusal = WorkerLost("no token channel yet")
        asyncio.get_running_loop().call_later(0.3, setattr, rig["d0"], "refusal", None)
        state = new_state(a_request())
        assert await collect(rig, state) == expected(a_request())
        assert len(state.attempts) == 2


async def test_a_first_token_that_comes_again_as_another_one_moves_the_request(fleet_of, a_request, expected):
    def another(event):
        return msgspec.structs.replace(event, tokens=(SampledToken((event.tokens[0].token_id + 1) % 300),))

    async with fleet_of(1, 2) as rig:
        allow(rig["d0"], 0)
        rig["d0"].corrupt = lambda event: another(event) if event.index == 0 else event
        state = new_state(a_request())
        events, tokens = await nth_token(rig, state, 1)
        go_on(rig["d0"])
        assert await rest(events, tokens) == expected(a_request())
        assert state.resumes == 1


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda event: msgspec.structs.replace(event, index=event.index + 1) if event.index == 5 else event,
        lambda event: TokenEvent(event.request_id, 5, (), None, "out of luck") if event.index == 5 else event,
        lambda event: msgspec.structs.replace(event, request_id="another"),
    ],
    ids=["a gap", "an error event", "no tail"],
)
async def test_a_worker_that_misbehaves_counts_as_lost(fleet_of, a_request, expected, corrupt):
    async with fleet_of(1, 2) as rig:
        rig["d0"].corrupt = corrupt
        state = new_state(a_request())
        assert await collect(rig, state) == expected(a_request())
        assert state.resumes == 1


async def test_attempts_are_bounded(fleet_of, a_request, monkeypatch):
    async with fleet_of(0, 2) as rig:
        monkeypatch.setattr(rig.pipeline, "_config", PipelineConfig(retries=2))
        for name in ("d0", "d1"):
            rig[name].refusal = WorkerLost("again and again")
        state = new_state(a_request())
        with pytest.raises(WorkerLost):
            await collect(rig, state)
        assert len(state.attempts) == 1 + 2


async def test_a_refused_request_is_not_tried_elsewhere(fleet_of, a_request):
    async with fleet_of(0, 2) as rig:
        rig["d0"].refusal = RequestError("no")
        with pytest.raises(RequestError):
            await collect(rig, a_request())
        assert not rig["d1"].seen


async def test_a_full_worker_sends_the_request_elsewhere(fleet_of, a_request, expected):
    full = RequestError("full", status=429)
    async with fleet_of(0, 2) as rig:
        rig["d0"].refusal = full
        assert await collect(rig, a_request()) == expected(a_request())
        rig["d1"].refusal = full
        with pytest.raises(RequestError):
            await collect(rig, a_request())


async def test_requests_that_are_not_admitted_earn_no_retries(fleet_of, a_request, monkeypatch):
    def refuse(request, path, waited_s, follows):
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
