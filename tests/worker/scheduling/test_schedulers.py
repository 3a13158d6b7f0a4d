"""Decisions of the scheduler in both roles: steps, queues, and blocks that are released on every path."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.scheduling.scheduler_rig import ROLES, STOP, TOKEN, Rig, idle, jobs, parts, receiving
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import Promise, SampledToken, SamplingParams
from twostroke.protocol.stats import StepCosts
from twostroke.worker.scheduling.scheduler import Admitted, NewTokens, ScheduledStep

LOW, HIGH = Promise("low", 0, 0.1), Promise("high", 1, 0.1)

pytestmark = pytest.mark.parametrize("role", ROLES)


def test_prompts_share_a_step_up_to_its_token_budget(role: str) -> None:
    rig = Rig(role)
    first, second, third = rig.add(6), rig.add(30), rig.add(3)
    assert [rig.run() for _ in range(4)] == [[(first, 6), (second, 10)], [(second, 16)], [(second, 4), (third, 3)], []]


def test_only_the_last_chunk_draws_a_token(role: str) -> None:
    rig = Rig(role)
    job = rig.add(20)
    assert rig.end(rig.schedule()) == []
    (drawn,) = rig.end(rig.schedule())
    assert (drawn.job, drawn.index, drawn.finish_reason) == (job, 0, "length")


def test_the_next_token_of_a_resumed_request_has_the_next_index(role: str) -> None:
    rig = Rig(role)
    rig.add(5, max_tokens=4, num_outputs=2)
    assert [(one.index, one.finish_reason) for one in rig.end(rig.schedule())] == [(2, None)]


def test_no_more_prompts_share_a_step_than_the_batch_allows(role: str) -> None:
    rig = Rig(role, max_batch=2)
    first, second, third = rig.add(2), rig.add(2), rig.add(2)
    assert [jobs(rig.run()) for _ in range(2)] == [[first, second], [third]]


@pytest.mark.parametrize("length", [2, 8, 9, 10])
def test_a_prompt_computed_before_costs_its_last_token_alone(role: str, length: int) -> None:
    rig = Rig(role)
    rig.cache(length)
    job = rig.add(length, first=0)
    assert rig.run() == [(job, 1)]
    assert job.num_cached_tokens == rig.scheduler.prefix_hits == length - 1
    assert rig.scheduler.prefix_queries == 2 * length
    assert rig.pool.owned_blocks == 0


def test_the_end_of_a_prompt_is_copied_into_a_block_of_its_own_and_stays_until_then(role: str) -> None:
    rig = Rig(role, 6)
    rig.cache(10)
    (others,) = [rig.pool.take_tail(name) for name in rig.pool._by_tail]
    rig.pool.release([others])
    job = rig.add(10, first=0)
    step = rig.schedule()
    (part,) = [entry.step for entry in step.entries]
    assert (part.copied_from, part.start, list(part.token_ids)) == (others, 9, [9])
    assert others not in part.block_ids
    assert rig.pool.references(others) == 1, "nobody else may write into it"
    rig.end(step)
    assert rig.pool.references(others) == 0
    assert job.sequence.num_computed == 10 or job.has_ended


def test_one_that_ends_before_its_copy_is_made_needs_the_other_no_more(role: str) -> None:
    rig = Rig(role, max_batch=2, max_step_tokens=16)
    rig.cache(10)
    long, job = rig.add(30), rig.add(10, first=0)
    rig.scheduler.end(long)
    step = rig.schedule()
    rig.scheduler.end(job)
    assert rig.pool.owned_blocks > 0, "the step under way still reads and writes"
    rig.end(step)
    assert rig.pool.owned_blocks == 0


def test_a_prompt_waits_for_blocks_and_no_other_overtakes_it(role: str) -> None:
    rig = Rig(role, 4)
    held = rig.pool.allocate(2)
    large, small = rig.add(16), rig.add(4)
    assert rig.run() == []
    rig.pool.release(held)
    assert [rig.run() for _ in range(2)] == [[(large, 16)], [(small, 4)]]


def test_the_shortest_first_takes_another_order(role: str) -> None:
    rig = Rig(role, max_step_tokens=40, max_batch=1, queue="sjf")
    nine, three, six = rig.add(9), rig.add(3), rig.add(6)
    assert [jobs(rig.run()) for _ in range(3)] == [[three], [six], [nine]]


def test_a_higher_class_or_a_tighter_promise_has_the_next_steps_before_one_that_is_begun(role: str) -> None:
    rig = Rig(role)
    loose = rig.add(40, promise=Promise(ttft_left_s=9.0))
    assert rig.run() == [(loose, 16)]
    tight = rig.add(10, promise=Promise(ttft_left_s=1.0), now=2.0)
    assert rig.run() == [(tight, 10), (loose, 6)]
    high = rig.add(20, promise=HIGH)
    assert [rig.run() for _ in range(2)] == [[(high, 16)], [(high, 4), (loose, 12)]]


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_low_class_gets_its_share_though_higher_prompts_keep_coming(role: str, is_begun: bool) -> None:
    rig = Rig(role, 40)
    low = rig.add(100, promise=LOW)
    if is_begun:
        rig.run()
    num_tokens = dict.fromkeys(("low", "high"), 0)
    while not low.has_ended:
        while rig.scheduler.num_waiting + rig.scheduler.num_running < 4:
            rig.add(20, promise=HIGH)
        for job, tokens in rig.run():
            num_tokens[job.request.promise.class_name] += tokens
        assert num_tokens["high"] < 3000, "the low one starves"
    assert 0.09 * num_tokens["high"] <= num_tokens["low"] <= 0.2 * num_tokens["high"]


@pytest.mark.parametrize(("length", "num_blocks"), [(0, 64), (200, 64), (18, 4)])
def test_a_prompt_that_can_never_run_is_refused(role: str, length: int, num_blocks: int) -> None:
    with pytest.raises(RequestError):
        Rig(role, num_blocks).add(length)


def test_a_request_too_many_is_refused_as_overload_until_the_queue_moves(role: str) -> None:
    rig = Rig(role, max_waiting=2)
    rig.add(4)
    rig.add(4)
    with pytest.raises(RequestError, match="wait here already") as refused:
        rig.add(4)
    assert (refused.value.status, refused.value.code) == (429, "overloaded")
    rig.run()
    rig.add(4)


# --- prompts whose beginning another worker offers ---


def test_a_prompt_that_awaits_an_offer_has_no_blocks_and_delays_no_other(role: str) -> None:
    rig = Rig(role)
    job, other = rig.add(20, awaits_offer=True), rig.add(3)
    assert rig.run() == [(other, 3)]
    assert (job.sequence.block_ids, rig.scheduler.num_waiting) == ([], 1)
    rig.scheduler.no_prefix(job)
    assert rig.run() == [(job, 16)]


def test_an_offered_beginning_is_pulled_and_the_rest_is_computed(role: str) -> None:
    rig = Rig(role)
    job = rig.add(20, awaits_offer=True)
    rig.scheduler.offered_prefix(job, 13)
    assert rig.num_tokens_to_compute() == 20
    step = rig.schedule()
    assert (step.entries, receiving(step.admitted), step.admitted.declined) == ((), (job,), ())
    assert (len(job.sequence.block_ids), rig.scheduler.num_waiting, rig.num_tokens_to_compute()) == (5, 1, 7)
    assert rig.run() == [], "nothing is computed of it meanwhile"
    assert rig.scheduler.pulled(job) == 13
    assert rig.pool.lookup(job.sequence.block_hashes) == 3, "others find it before the next step has ended"
    assert rig.run() == [(job, 7)]
    assert job.num_cached_tokens == 13
    assert rig.pool.lookup(job.sequence.block_hashes) == 5, "what was pulled is named, like what was computed"


def test_what_is_cached_here_is_not_pulled(role: str) -> None:
    rig = Rig(role)
    rig.cache(10)
    job = rig.add(20, first=0, awaits_offer=True)
    rig.scheduler.offered_prefix(job, 16)
    assert receiving(rig.scheduler.admit_offered()) == (job,)
    assert job.sequence.num_computed == 8
    assert rig.scheduler.pulled(job) == 8
    assert (rig.scheduler.prefix_hits, job.num_cached_tokens) == (8, 16)


@pytest.mark.parametrize(("offered", "is_taken"), [(12, True), (11, False), (8, False), (20, False), (0, False)])
@pytest.mark.parametrize("is_step_under_way", [False, True])
def test_an_offer_is_taken_where_it_spares_enough_and_leaves_a_token_to_compute(
    role: str, offered: int, is_taken: bool, is_step_under_way: bool
) -> None:
    rig = Rig(role, min_pull_tokens=4)
    rig.cache(10)
    job = rig.add(20, first=0, awaits_offer=True)
    rig.scheduler.offered_prefix(job, offered)
    admitted = rig.scheduler.admit_offered() if is_step_under_way else None
    step = rig.schedule()
    admitted = admitted or step.admitted
    if is_step_under_way and offered in (0, 20):
        assert admitted.jobs == (), "without an offer its turn comes with the step"
    assert receiving(admitted) == ((job,) if is_taken else ())
    assert admitted.declined == (() if is_taken or not offered else (job,))
    assert parts(step) == ([] if is_taken else [(job, 12)])


def test_after_a_failed_pull_all_is_computed_in_the_blocks_that_were_reserved(role: str) -> None:
    rig = Rig(role)
    job = rig.add(12, awaits_offer=True)
    rig.scheduler.offered_prefix(job, 8)
    rig.schedule()
    blocks = list(job.sequence.block_ids)
    rig.scheduler.pull_failed(job)
    assert rig.run() == [(job, 12)]
    assert rig.pool.match(job.sequence.block_hashes) == blocks


def test_a_pull_begins_although_a_step_is_under_way_or_its_batch_is_full(role: str) -> None:
    rig = Rig(role, max_batch=1)
    busy = rig.add(40)
    step = rig.schedule()
    job, late = rig.add(20, awaits_offer=True), rig.add(20, awaits_offer=True)
    rig.scheduler.offered_prefix(job, 16)
    assert receiving(rig.scheduler.admit_offered()) == (job,)
    rig.end(step)
    rig.scheduler.offered_prefix(late, 16)
    step = rig.schedule()
    assert (receiving(step.admitted), jobs(step)) == ((late,), [busy])
    rig.end(step)
    rig.scheduler.pulled(job)
    assert [rig.run() for _ in range(2)] == [[(busy, 8)], [(job, 4)]], "and the first goes on"


def test_no_job_with_an_offer_overtakes_one_without(role: str) -> None:
    rig = Rig(role, max_batch=1)
    rig.add(30)
    step = rig.schedule()
    rig.add(4)
    job = rig.add(20, awaits_offer=True)
    rig.scheduler.offered_prefix(job, 16)
    assert rig.scheduler.admit_offered().jobs == ()
    rig.end(step)
    assert receiving(rig.schedule().admitted) == ()


def test_where_blocks_are_short_every_offer_that_waits_is_given_up(role: str) -> None:
    rig = Rig(role, 8)
    held = rig.pool.allocate(4)
    large, small = rig.add(24, awaits_offer=True), rig.add(8, awaits_offer=True)
    rig.scheduler.offered_prefix(small, 4)
    rig.scheduler.offered_prefix(large, 8)
    step = rig.schedule()
    assert (step.admitted.jobs, step.admitted.declined) == ((), (large, small)), "the large one's turn came first"
    rig.end(step)
    rig.pool.release(held)
    assert rig.run() == [(large, 16)]


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 20),
    max_batch=st.integers(1, 6),
    more_tokens=st.integers(0, 20),
    watermark_blocks=st.integers(0, 3),
    swap_blocks=st.sampled_from((0, 5, 20)),
    costs=st.sampled_from((None, StepCosts(0.010, 0.001, 0.0, 0.010, 0.0), StepCosts(0.010, 0.001, 0.0, 0.001, 0.0))),
    has_drafts=st.booleans(),
)
def test_whatever_happens_every_request_gets_its_tokens_once_and_no_block_is_lost(
    role: str,
    seed: int,
    num_requests: int,
    max_batch: int,
    more_tokens: int,
    watermark_blocks: int,
    swap_blocks: int,
    costs: StepCosts | None,
    has_drafts: bool,
) -> None:
    """Requests have classes, transfers both ways, pulls, swaps and steps ahead; steps fail, requests stop or abort."""
    draw, is_decode = random.Random(seed), role == "decode"
    rig = Rig(
        role,
        14,
        max_batch=max_batch,
        max_step_tokens=max_batch + more_tokens,
        watermark_blocks=watermark_blocks,
        swap_blocks=swap_blocks,
        costs=costs,
        has_drafts=has_drafts,
    )
    scheduler, outputs = rig.scheduler, dict[Any, list[int]]()
    coming: list[Any] = []  # whose KV is on its way here
    leaving: list[Any] = []  # whose KV is being sent

    def add() -> None:
        priority, transfer = draw.randrange(3), is_decode and draw.random() < 0.4
        ttft_s, tpot_s = draw.choice((None, -1.0, 5.0)), draw.choice((None, 0.001, 0.05))
        job = rig.add(
            draw.randint(1, 40),
            draw.randint(1, 16),
            draw.choice((None, 0, 0)),
            promise=Promise(str(priority), priority, draw.choice((0.0, 0.3)), ttft_s, tpot_s),
            now=num_steps,
            transfer=transfer,
            is_offered=draw.random() < 0.5,
            awaits_offer=not transfer and draw.random() < 0.4,
            sampling=SamplingParams(presence_penalty=draw.choice((0.0, 0.0, 0.0, 0.5))),
        )
        outputs[job] = []

    def admit(admitted: Admitted) -> None:
        assert not any(job.awaits_offer for job in admitted.jobs)
        coming.extend(receiving(admitted))
        for job in admitted.jobs:
            if not is_decode and draw.random() < 0.4:
                scheduler.begin_sending(job)
                leaving.append(job)

    def schedule(*behind: ScheduledStep) -> ScheduledStep:
        step: ScheduledStep = scheduler.schedule(*behind)
        assert len(set(jobs(step))) == len(step.entries) <= len(step.batch) <= max_batch
        assert sum(num_tokens for _, num_tokens in parts(step)) <= max_batch + more_tokens
        assert not any(job.is_receiving or job.awaits_offer for job in jobs(step))
        admit(step.admitted)
        return step

    def hear_of_offers() -> None:
        for job in outputs:
            if is_decode and job.wants_transfer and not job.is_offered and draw.random() < 0.3:
                draw.choice((scheduler.offered, scheduler.compute_here))(job)
            if job.awaits_offer and not job.has_ended and draw.random() < 0.3:
                if draw.random() < 0.3:
                    scheduler.no_prefix(job)
                else:
                    scheduler.offered_prefix(job, draw.randint(1, 40))

    def end_transfer(job: Any) -> None:
        fails = draw.random() < 0.3
        if not (is_decode and job.wants_transfer):
            (scheduler.pull_failed if fails else scheduler.pulled)(job)
        elif fails:
            scheduler.transfer_failed(job)
        elif (first := scheduler.verified(job, TOKEN)) is not None:
            note([first])

    def note(drawn: list[NewTokens]) -> None:
        for one in drawn:
            assert one.index == len(outputs[one.job])
            outputs[one.job] += [token.token_id for token in one.tokens]

    num_steps = 0
    under_way: list[ScheduledStep] = []
    while num_requests or not all(job.has_ended for job in outputs):
        num_steps += 1
        assert num_steps < 5000, "somebody starves"
        if num_requests and (draw.random() < 0.3 or all(job.has_ended for job in outputs)):
            num_requests -= 1
            add()
        if not under_way:
            under_way.append(schedule())
        if is_decode and draw.random() < 0.6 and not (ahead := schedule(under_way[0])).is_empty:
            under_way.append(ahead)
        if draw.random() < 0.3:
            admit(scheduler.admit_offered())
        if draw.random() < 0.03:
            scheduler.end(draw.choice(list(outputs)))
        hear_of_offers()
        if draw.random() < 0.01:  # the engine dies, and all requests with it
            for step in under_way:
                scheduler.abandon(step)
            under_way = []
            for job in outputs:
                scheduler.end(job)
        else:
            note(rig.end(under_way.pop(0), SampledToken(STOP) if draw.random() < 0.05 else TOKEN))
        while coming and draw.random() < 0.5:
            end_transfer(coming.pop(draw.randrange(len(coming))))
        while leaving and draw.random() < 0.4:
            scheduler.end_sending(leaving.pop(draw.randrange(len(leaving))))
        rig.check()
    for job in coming:
        end_transfer(job)
    for job in leaving:
        scheduler.end_sending(job)
    for step in under_way:
        rig.end(step)
    assert rig.owned_blocks() == (0, 0)
    assert idle(scheduler)
    for job, tokens in outputs.items():
        assert job.sequence.token_ids == [*job.request.token_ids, *tokens]
        assert job.sequence.num_output_tokens <= job.request.max_tokens
