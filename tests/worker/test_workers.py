"""A worker of either role: how it takes requests, tells its numbers, drains, stops, and dies of its engine."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.worker.worker_rig import (
    BLOCK,
    DECODE,
    PREFILL,
    ROUTER,
    SECRET,
    Rig,
    a_moment,
    a_request,
    begin,
    of_both_roles,
)
from twostroke.model.step import SequenceStep
from twostroke.protocol.errors import ConnectionLost, RequestError, WorkerLeaving, WorkerLost
from twostroke.protocol.messages import Cancel, ChangeRole, Drain, Resume, SendPrefix
from twostroke.protocol.requests import Peer, Promise, SampledToken, SamplingParams, mint_ticket
from twostroke.protocol.stats import STEP_ROLES, StepCosts
from twostroke.worker.step_costs import COLD_STEPS, FIRST_SAMPLES, StepContent
from twostroke.worker.step_loop import MAX_BROKEN_REQUESTS

CHAT = Promise("chat", priority=2, share=0.5, tpot_s=0.05)
BATCH = Promise("batch", priority=0, share=0.1)


@of_both_roles()
async def test_the_reported_numbers_are_true(rig: Rig, role: str) -> None:
    assert (rig.info.role, rig.info.peer) == (role, PREFILL if role == "prefill" else DECODE)
    assert len(rig.info.transfer_addresses) == 1
    for _ in range(2):
        await rig.ask(a_request(10))
    rig.engine.num_broken_rows = 3
    stats = rig.worker.stats()
    num_tokens = 2 if role == "prefill" else 12
    assert stats.broken_logit_rows == 3
    assert (stats.generated_tokens, stats.finished_requests) == (num_tokens, 2)
    num_computed = 11 if role == "prefill" else 10  # a lone last token is a prompt's to one, a row to the other
    assert (stats.prefix_queries, stats.prefix_hits, stats.computed_tokens) == (20, 9, num_computed)
    assert stats.steps == rig.engine.num_steps == num_tokens
    assert stats.step_seconds > 0
    assert stats.free_blocks == stats.total_blocks == 32
    assert stats.num_running == stats.num_waiting == stats.owned_blocks == 0


@of_both_roles()
@pytest.mark.parametrize("length", [2, 8, 43])
async def test_choices_of_one_request_compute_the_end_of_their_prompt_once(rig: Rig, role: str, length: int) -> None:
    choices = [
        a_request(length, f"choice-{seed}", sampling=SamplingParams(seed=seed), max_tokens=6) for seed in range(8)
    ]
    first = begin(rig.ask(choices[0]))
    await asyncio.sleep(0.01)
    assert rig.worker.stats().generated_tokens, "as a router waits for the first choice's first token"
    calls = [first, *(begin(rig.ask(choice)) for choice in choices[1:])]
    for choice, call in zip(choices, calls, strict=True):
        assert await rig.is_right(choice, await call)
    num_drawn_after = 7 if role == "prefill" else 0  # each other draws after its last token, which is a row to decodes
    assert rig.worker.stats().computed_tokens == length + num_drawn_after
    assert rig.engine.num_copied == 7 * ((length - 1) % BLOCK > 0)


@of_both_roles()
async def test_a_request_id_in_use_is_refused(rig: Rig) -> None:
    first = begin(rig.ask(a_request()))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="here already"):
        await rig.ask(a_request())
    await first


@of_both_roles()
@pytest.mark.parametrize("how", ["call", "message", "router"])
async def test_a_request_that_is_given_up_frees_its_blocks_once_the_step_has_run(rig: Rig, role: str, how: str) -> None:
    call = begin(rig.ask(a_request(60, max_tokens=20)))
    await asyncio.sleep(0.0015)
    rig.router.send(Cancel("somebody else's"))
    match how:
        case "call":
            call.cancel()
        case "message":
            rig.router.send(Cancel("r"))
        case "router":
            rig.fabric.cut(ROUTER)
    (outcome,) = await asyncio.gather(call, return_exceptions=True)
    if how == "message" and role == "decode":
        assert outcome.finish_reason is None
    else:
        assert isinstance(outcome, asyncio.CancelledError if how == "call" else WorkerLost)
    if how == "call":
        assert rig.pool.owned_blocks > 0, "a step still writes into them"
    await a_moment()
    assert rig.pool.owned_blocks == 0
    assert rig.worker.stats().aborted_requests == 1


@of_both_roles(max_step_tokens=10)
async def test_a_dead_engine_ends_every_request_and_hangs_up(rig: Rig, role: str) -> None:
    rig.engine.fail_at_step = 2
    calls = [begin(rig.ask(a_request(20, name), rig.ticket(name) if name == "b" else None)) for name in ("a", "b")]
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, WorkerLost)
    with pytest.raises(WorkerLost, match="has died"):
        rig.worker.check_health()
    with pytest.raises(WorkerLost):
        await rig.ask(a_request(name="c"))
    await rig.worker.drain()
    await a_moment()
    told = {event.request_id for frame in rig.frames for event in frame.events if event.error}
    assert told == ({"a", "b"} if role == "decode" else set())
    with pytest.raises(ConnectionLost):
        await rig.fabric.at("router-2").connect(rig.info.token_address)
    assert rig.pool.owned_blocks == 0


def _two_requests(rig: Rig, number: int) -> "list[asyncio.Task[Any]]":
    """Begin two requests whose prompts nobody has computed; any two have the same steps."""
    return [begin(rig.ask(a_request(20, f"{number} {name}", cache_salt=f"{number} {name}".encode()))) for name in "ab"]


async def _learn_costs(rig: Rig) -> None:
    """Have the worker run these steps until it knows what they cost."""
    for number in range(COLD_STEPS + FIRST_SAMPLES):
        await asyncio.gather(*_two_requests(rig, number))


@pytest.mark.parametrize("steps_before", range(3))
@pytest.mark.parametrize("is_known", [False, True])
@of_both_roles(max_step_s=8.0, min_hang_s=3.0, max_step_tokens=8)
async def test_a_worker_whose_engine_hangs_ends_its_calls_and_hangs_up(
    rig: Rig, role: str, is_known: bool, steps_before: int
) -> None:
    if is_known:
        await _learn_costs(rig)
    told_before, begun = len(rig.frames), rig.engine.num_steps
    calls = _two_requests(rig, 100)
    async with asyncio.timeout(1.0):
        while rig.engine.num_steps < begun + steps_before:  # noqa: ASYNC110  # engines tell nobody
            await asyncio.sleep(0.0001)
    rig.engine.released.clear()
    bound_s = 3.0 if is_known else 8.0
    await asyncio.sleep(bound_s - 0.1)
    rig.worker.check_health()
    held = [call for call in calls if not call.done()]
    assert held if role == "prefill" else held == calls
    await asyncio.sleep(0.4)
    with pytest.raises(WorkerLost, match="the engine hangs"):
        rig.worker.check_health()
    for outcome in await asyncio.gather(*held, return_exceptions=True):
        assert isinstance(outcome, WorkerLost)
    told = {event.request_id for frame in rig.frames[told_before:] for event in frame.events if event.error}
    assert told == ({"100 a", "100 b"} if role == "decode" else set()), "streams go on elsewhere at once"
    with pytest.raises(WorkerLost, match="the engine hangs"):
        await rig.ask(a_request(name="another"))
    with pytest.raises(ConnectionLost):
        await rig.fabric.at("router-2").connect(rig.info.token_address)
    assert rig.pool.owned_blocks > 0, "the step that hangs may write into them"
    await rig.worker.drain()
    rig.engine.released.set()
    await a_moment()
    assert rig.pool.owned_blocks == 0
    with pytest.raises(WorkerLost, match="the engine hangs"):
        rig.worker.check_health()


@of_both_roles(max_step_s=8.0, min_hang_s=3.0)
async def test_a_step_of_a_new_shape_may_take_as_long_as_its_kernels_are_compiled(rig: Rig) -> None:
    await _learn_costs(rig)
    rig.engine.released.clear()
    call = begin(rig.ask(a_request(7)))
    await asyncio.sleep(7.5)
    rig.engine.released.set()
    assert await rig.is_right(a_request(7), await call)
    rig.worker.check_health()


@of_both_roles(max_step_s=8.0, min_hang_s=0.001, hang_factor=1000.0)
async def test_a_step_may_take_a_multiple_of_what_such_steps_have_taken(rig: Rig) -> None:
    await _learn_costs(rig)
    rig.engine.slowness = 500.0
    await asyncio.gather(*_two_requests(rig, 100))
    rig.worker.check_health()
    rig.engine.slowness = 5000.0
    for outcome in await asyncio.gather(*_two_requests(rig, 101), return_exceptions=True):
        assert "the engine hangs" in str(outcome)
    await asyncio.sleep(100.0)  # the steps under way end at last


@of_both_roles(max_step_s=5.0, max_step_tokens=8)
async def test_a_worker_whose_engine_hangs_stops_without_the_steps_under_way(rig: Rig) -> None:
    call = begin(rig.ask(a_request(60, max_tokens=20)))
    await asyncio.sleep(0.001)
    rig.engine.released.clear()
    await asyncio.sleep(0.02)
    began = asyncio.get_running_loop().time()
    await rig.worker.stop()
    assert 4.9 < asyncio.get_running_loop().time() - began < 5.1
    with pytest.raises(WorkerLost):
        await call
    assert rig.pool.owned_blocks > 0, "the step that hangs may write into them"
    (job,) = {entry.job for step in rig.worker._steps.give_up() for entry in step.entries}
    job.sequence.reset(rig.pool)


@of_both_roles()
async def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_has(rig: Rig) -> None:
    call = begin(rig.ask(a_request()))
    await asyncio.sleep(0.001)
    draining = begin(rig.worker.drain())
    await asyncio.sleep(0)
    with pytest.raises(WorkerLost, match="draining"):
        await rig.ask(a_request(name="late"))
    assert not draining.done()
    assert await rig.is_right(a_request(), await call)
    await draining
    assert rig.pool.owned_blocks == 0


@of_both_roles()
async def test_a_draining_worker_waits_for_a_step_whose_requests_have_ended(rig: Rig) -> None:
    call = begin(rig.ask(a_request()))
    await asyncio.sleep(0.0005)  # the step is under way
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert rig.pool.owned_blocks > 0
    await rig.worker.drain()
    assert rig.pool.owned_blocks == 0


@of_both_roles()
async def test_a_draining_worker_gives_up_prefixes_that_no_worker_takes(rig: Rig) -> None:
    request = a_request(30)
    await rig.ask(request)
    slow = mint_ticket(SECRET, "r", rig.info.peer, Peer("prefill-7", 77), (await rig.silent_peer("prefill-7"),))
    rig.router.send(SendPrefix(slow, request.token_ids, b""))
    await a_moment()
    assert rig.pool.owned_blocks == 7
    began = asyncio.get_running_loop().time()
    await rig.worker.drain()
    assert asyncio.get_running_loop().time() > began + 1.0
    assert rig.pool.owned_blocks == 0


@of_both_roles()
async def test_a_worker_ignores_a_request_for_another_workers_prefix(rig: Rig) -> None:
    ticket = mint_ticket(SECRET, "r", Peer("another", 1), Peer("prefill-7", 77), (await rig.silent_peer("prefill-7"),))
    rig.router.send(SendPrefix(ticket, a_request().token_ids, b""))
    assert await rig.is_right(a_request(), await rig.ask(a_request()))


@of_both_roles(num_blocks=24, max_step_tokens=8)
async def test_a_leaving_worker_finishes_begun_requests_and_returns_the_others(rig: Rig) -> None:
    begun = begin(rig.ask(a_request(60, max_tokens=2)))
    await asyncio.sleep(0.0005)
    waiting = begin(rig.ask(a_request(60, name="finds no block", max_tokens=2)))
    await asyncio.sleep(0)
    rig.router.send(Drain())
    with pytest.raises(WorkerLeaving):
        await waiting
    assert rig.worker.stats().is_draining
    with pytest.raises(WorkerLeaving):
        await rig.ask(a_request(name="late"))
    assert await rig.is_right(a_request(60, max_tokens=2), await begun)


@of_both_roles()
async def test_a_leaving_worker_that_is_kept_takes_requests_again_unless_it_is_to_end(rig: Rig) -> None:
    rig.router.send(Drain())
    await asyncio.sleep(0.001)
    rig.worker.resume()
    assert not rig.worker.stats().is_draining
    await rig.ask(a_request())
    await rig.worker.drain()
    rig.worker.resume()
    with pytest.raises(WorkerLeaving):
        await rig.ask(a_request(name="late"))


@of_both_roles()
async def test_an_operators_drain_lasts_until_the_operator_ends_it(rig: Rig) -> None:
    rig.router.send(Drain(is_ordered=True))
    await asyncio.sleep(0.001)
    rig.worker.resume()
    assert rig.worker.stats().is_draining
    rig.router.send(Resume())
    await asyncio.sleep(0.001)
    assert not rig.worker.stats().is_draining
    await rig.ask(a_request())


@of_both_roles(max_step_tokens=8)
async def test_a_worker_changes_its_role_while_it_computes(rig: Rig) -> None:
    for role in STEP_ROLES:
        names = [f"{role} {number}" for number in range(2)]
        calls = [begin(rig.ask(a_request(40, name, max_tokens=20))) for name in names]
        await asyncio.sleep(0.002)
        rig.router.send(ChangeRole(role))
        await asyncio.sleep(0.001)
        assert rig.worker.stats().step_role == role
        for name, call in zip(names, calls, strict=True):
            assert await rig.is_right(a_request(40, name, max_tokens=20), await call)


@of_both_roles(max_step_tokens=8)
async def test_a_stopping_worker_ends_its_requests_after_the_step_under_way(rig: Rig) -> None:
    calls = [begin(rig.ask(a_request(40, "a", max_tokens=50))), begin(rig.ask(a_request(40, "b"), rig.ticket("b")))]
    await asyncio.sleep(0.002)
    await rig.worker.stop()
    assert rig.pool.owned_blocks == 0
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, WorkerLost)
    with pytest.raises(WorkerLost):
        rig.worker.check_health()


@of_both_roles()
async def test_both_roles_report_the_tokens_queued_by_class(rig: Rig) -> None:
    classes = [BATCH, CHAT, BATCH, CHAT]
    calls = [
        begin(rig.ask(a_request(10 + number, f"r{number}", promise=promise))) for number, promise in enumerate(classes)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    stats = rig.worker.stats()
    assert [(one.class_name, one.tokens, one.requests) for one in stats.queued] == [
        ("chat", 11 + 13, 2),
        ("batch", 10 + 12, 2),
    ]
    assert stats.num_waiting_tokens == 46
    await asyncio.gather(*calls)
    assert rig.worker.stats().queued == ()
    assert rig.worker.stats().num_waiting_tokens == 0


@of_both_roles()
async def test_workers_learn_what_their_own_steps_cost(rig: Rig) -> None:
    assert rig.worker.stats().costs is None
    for number in range(COLD_STEPS + FIRST_SAMPLES):
        await rig.ask(a_request(5 + number, f"r{number}", max_tokens=3))
    stats = rig.worker.stats()
    assert stats.costs is not None
    assert stats.costs.num_samples == stats.steps - COLD_STEPS, "all that have run"
    mean_s = stats.step_seconds / stats.steps
    content = StepContent(12, 72.0, 0, 0)
    predicted_s = stats.costs.base_s + stats.costs.prompt_s(content.prompt_tokens)
    assert mean_s / 3 < predicted_s < 3 * mean_s


@of_both_roles(max_step_tokens=16)
async def test_behind_prompts_the_next_step_is_scheduled_shortly_before_the_expected_end(rig: Rig) -> None:
    """Requests that arrive meanwhile are in it. Nothing runs ahead of unknown costs, or of a step that ends before."""
    rig.engine.slowness = 10.0  # a step of 16 tokens takes 26 ms
    under_way = rig.worker._steps
    call = begin(rig.ask(a_request(32, "unknown costs", max_tokens=1)))
    await asyncio.sleep(0.025)
    assert len(under_way) == 1
    await call
    costs = StepCosts(base_s=0.010, token_s=0.001, pair_s=0.0, row_s=0.0, context_s=0.0)
    rig.worker._costs.costs = lambda: costs
    call = begin(rig.ask(a_request(48, max_tokens=1, cache_salt=b"unlike those before")))
    await asyncio.sleep(0.020)
    assert len(under_way) == 1
    late = begin(rig.ask(a_request(8, "late", max_tokens=1, cache_salt=b"another")))
    await asyncio.sleep(0.004)
    assert len(under_way) == 2
    await asyncio.sleep(0.010)
    assert len(under_way) == 1, "it runs, and is given its own time"
    rig.engine.slowness = 1.0  # from here on steps end before they are expected to
    await asyncio.gather(call, late)
    assert rig.engine.num_steps_ahead == 1


@of_both_roles()
async def test_a_draining_worker_reports_to_its_routers_at_once(rig: Rig) -> None:
    running = begin(rig.ask(a_request(60, max_tokens=20)))
    await asyncio.sleep(0.51)
    told = len(rig.numbers)
    assert not any(stats.is_draining for stats in rig.numbers)
    draining = begin(rig.worker.drain())
    await asyncio.sleep(0.05)
    assert [stats.is_draining for stats in rig.numbers[told:]] == [True]
    await running
    await draining


@of_both_roles()
async def test_a_worker_whose_logits_are_broken_request_after_request_is_unhealthy_and_says_why(rig: Rig) -> None:
    step = rig.engine.step

    async def broken(batch: Sequence[SequenceStep], *rest: Any) -> list[SampledToken | None]:
        rig.engine.num_broken_rows += sum(one.draw is not None for one in batch)
        return await step(batch, *rest)

    rig.engine.step = broken
    for number in range(MAX_BROKEN_REQUESTS - 1):
        await rig.ask(a_request(10 + number, f"r{number}"))
        rig.worker.check_health()
    await asyncio.gather(begin(rig.ask(a_request(9, "last"))), return_exceptions=True)
    await a_moment()
    with pytest.raises(WorkerLost, match="all logits of the last 16 requests were NaN or infinite"):
        rig.worker.check_health()
