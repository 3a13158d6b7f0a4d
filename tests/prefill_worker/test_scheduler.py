"""The prefill scheduler: chunks, the queue, the prefix cache, and blocks that come back on every path."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.prefill_worker.scheduler import Admission, PrefillJob, PrefillScheduler, PrefillStep
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest, Promise, SamplingParams
from twostroke.worker.block_pool import BlockPool

BLOCK = 4
NOTHING = Promise()


def request(length: int, first: int = 0, promise: Promise = NOTHING) -> GenerateRequest:
    tokens = tuple(range(first, first + length))
    return GenerateRequest(
        request_id=f"{first}+{length}",
        router_id="router-0",
        token_ids=tokens,
        num_prompt_tokens=length,
        sampling=SamplingParams(),
        max_tokens=5,
        promise=promise,
    )


def scheduler(
    num_blocks: int = 64, max_step_tokens: int = 16, max_batch: int = 8, pool: BlockPool | None = None, **options
) -> PrefillScheduler:
    return PrefillScheduler(
        pool or BlockPool(num_blocks, BLOCK),
        max_step_tokens=max_step_tokens,
        max_batch=max_batch,
        max_context=200,
        **{"max_waiting": 1024} | options,
    )


def shape(step: PrefillStep) -> list[tuple[int, int]]:
    """(arrival, tokens) of each chunk."""
    return [(chunk.job.arrival, len(chunk.step.token_ids)) for chunk in step.chunks]


def run(scheduler: PrefillScheduler) -> list[tuple[int, int]]:
    """Run one step, end what is computed."""
    step = scheduler.schedule()
    for job in scheduler.complete(step):
        scheduler.end(job)
    return shape(step)


def test_prompts_share_a_step_up_to_its_token_budget():
    one = scheduler()
    for length, first in ((6, 0), (30, 100), (3, 50)):
        one.add(request(length, first), now=0.0)
    assert [run(one) for _ in range(4)] == [[(0, 6), (1, 10)], [(1, 16)], [(1, 4), (2, 3)], []]


def test_only_the_last_chunk_draws_a_token():
    one = scheduler()
    one.add(request(20), now=0.0)
    draws = []
    for _ in range(2):
        step = one.schedule()
        draws.append([chunk.step.draw is not None for chunk in step.chunks])
        one.complete(step)
    assert draws == [[False], [True]]


def test_no_more_prompts_share_a_step_than_the_batch_allows():
    one = scheduler(max_batch=2)
    for first in (0, 50, 100):
        one.add(request(2, first), now=0.0)
    assert run(one) == [(0, 2), (1, 2)]
    assert run(one) == [(2, 2)]


def test_a_prompt_computed_before_costs_only_what_lies_behind_its_full_blocks():
    one = scheduler()
    one.add(request(10), now=0.0)
    run(one)
    job = one.add(request(10), now=0.0)
    assert run(one) == [(1, 2)]
    assert job.num_cached_tokens == 8
    assert (one.prefix_queries, one.prefix_hits) == (20, 8)


def test_a_wholly_cached_prompt_still_computes_its_last_block_to_draw_a_token():
    one = scheduler()
    one.add(request(8), now=0.0)
    run(one)
    one.add(request(8), now=0.0)
    step = one.schedule()
    assert shape(step) == [(1, 4)]
    assert step.chunks[0].ends_prompt


def test_a_prompt_waits_for_blocks_and_nobody_overtakes_it():
    one = scheduler(num_blocks=4)
    first, large, small = (one.add(request(length, start), now=0.0) for length, start in ((8, 0), (16, 50), (4, 100)))
    step = one.schedule()
    assert shape(step) == [(0, 8)]
    one.begin_sending(first)
    one.complete(step)
    one.end(first)
    assert one.schedule().chunks == (), "the first prompt's blocks are still being sent"
    one.end_sending(first)
    assert run(one) == [(large.arrival, 16)]
    assert run(one) == [(small.arrival, 4)]


def test_the_shortest_first_takes_another_order():
    one = scheduler(max_step_tokens=200, max_batch=1, queue="sjf")
    for length, first in ((9, 0), (3, 50), (6, 100)):
        one.add(request(length, first), now=0.0)
    assert [run(one) for _ in range(3)] == [[(1, 3)], [(2, 6)], [(0, 9)]]


def test_a_job_that_ends_within_a_step_keeps_its_blocks_until_the_step_has_run():
    pool = BlockPool(8, BLOCK)
    one = PrefillScheduler(pool, max_step_tokens=16, max_batch=8, max_context=200, max_waiting=1024)
    job = one.add(request(10), now=0.0)
    step = one.schedule()
    one.end(job)
    assert pool.owned_blocks == 3
    assert one.complete(step) == [], "nobody waits for its token"
    assert pool.owned_blocks == 0


def test_an_abandoned_step_gives_the_blocks_of_ended_jobs_back_unnamed():
    pool = BlockPool(8, BLOCK)
    one = PrefillScheduler(pool, max_step_tokens=16, max_batch=8, max_context=200, max_waiting=1024)
    job = one.add(request(10), now=0.0)
    step = one.schedule()
    one.abandon(step)
    one.end(job)
    assert (pool.owned_blocks, pool.names(0, pool.num_blocks)) == (0, [])


@pytest.mark.parametrize(("length", "blocks"), [(0, 64), (200, 64), (17, 4)])
def test_a_prompt_that_can_never_run_is_refused(length: int, blocks: int):
    with pytest.raises(RequestError):
        scheduler(num_blocks=blocks).add(request(length), now=0.0)


def test_a_prompt_too_many_is_refused_as_overload_until_the_queue_moves():
    one = scheduler(max_waiting=2)
    one.add(request(4), now=0.0)
    one.add(request(4, 50), now=0.0)
    with pytest.raises(RequestError, match="wait here already") as refused:
        one.add(request(4, 100), now=0.0)
    assert (refused.value.status, refused.value.code) == (429, "overloaded")
    run(one)
    one.add(request(4, 100), now=0.0)


def awaiting(one: PrefillScheduler, length: int, first: int = 0) -> PrefillJob:
    return one.add(request(length, first), now=0.0, awaits_offer=True)


def test_a_prompt_that_awaits_an_offer_holds_nothing_and_holds_nobody_up():
    one = scheduler()
    job = awaiting(one, 20)
    one.add(request(3, 100), now=0.0)
    assert run(one) == [(1, 3)]
    assert job.sequence.block_ids == []
    assert one.num_waiting == 1
    one.not_offered(job)
    assert run(one) == [(0, 16)]


def test_an_offered_beginning_is_pulled_and_the_rest_is_computed():
    pool = BlockPool(64, BLOCK)
    one = scheduler(pool=pool)
    job = awaiting(one, 20)
    one.offered(job, 13)
    assert one.num_waiting_tokens == 20
    step = one.schedule()
    assert (step.chunks, step.admission) == ((), Admission((job,), ()))
    assert (job.is_pulling, len(job.sequence.block_ids), one.num_waiting, one.num_waiting_tokens) == (True, 5, 1, 7)
    assert run(one) == [], "nothing is computed of it meanwhile"
    assert one.pulled(job) == 13
    assert run(one) == [(0, 7)]
    assert job.num_cached_tokens == 13
    assert len(pool.names(0, pool.num_blocks)) == 5, "what was pulled is named, like what was computed"


def test_what_is_cached_here_is_not_pulled():
    one = scheduler()
    one.add(request(10), now=0.0)
    run(one)
    job = awaiting(one, 20)
    one.offered(job, 16)
    one.schedule()
    assert job.sequence.num_computed == 8
    assert one.pulled(job) == 8
    assert (one.prefix_hits, job.num_cached_tokens) == (8, 16)


@pytest.mark.parametrize(("offered", "is_taken"), [(12, True), (11, False), (8, False), (20, False), (0, False)])
def test_an_offer_is_taken_where_it_spares_enough_and_leaves_a_token_to_compute(offered: int, is_taken: bool):
    one = scheduler(min_pull_tokens=4)
    one.add(request(10), now=0.0)
    run(one)
    job = awaiting(one, 20)
    one.offered(job, offered)
    step = one.schedule()
    assert job.is_pulling is is_taken
    assert step.admission.declined == (() if is_taken or not offered else (job,))
    assert shape(step) == ([] if is_taken else [(1, 12)])


def test_after_a_failed_pull_all_is_computed_in_the_blocks_that_were_reserved():
    pool = BlockPool(64, BLOCK)
    one = scheduler(pool=pool)
    job = awaiting(one, 12)
    one.offered(job, 8)
    one.schedule()
    blocks = list(job.sequence.block_ids)
    one.pull_failed(job)
    assert run(one) == [(0, 12)]
    assert pool.match(job.sequence.block_hashes) == blocks


def test_a_prompt_that_pulls_lets_others_be_computed_and_joins_them():
    one = scheduler(max_batch=1, max_step_tokens=8)
    job = awaiting(one, 20)
    one.offered(job, 16)
    one.add(request(12, 100), now=0.0)
    assert run(one) == [(1, 8)]
    one.pulled(job)
    assert [run(one) for _ in range(3)] == [[(0, 4)], [(1, 4)], []], "it came first"


def test_a_pull_begins_although_a_step_is_under_way_or_its_batch_is_full():
    one = scheduler(max_batch=1)
    one.add(request(30), now=0.0)
    step = one.schedule()
    job, late = awaiting(one, 20, 100), awaiting(one, 20, 150)
    one.offered(job, 16)
    assert one.admit_offered() == Admission((job,), ())
    one.complete(step)
    one.offered(late, 16)
    assert one.schedule().admission == Admission((late,), ())


def test_nobody_with_an_offer_overtakes_one_that_has_none():
    one = scheduler(max_batch=1)
    one.add(request(30), now=0.0)
    step = one.schedule()
    one.add(request(4, 100), now=0.0)
    job = awaiting(one, 20, 150)
    one.offered(job, 16)
    assert one.admit_offered() == Admission((), ())
    one.complete(step)
    assert job not in one.schedule().admission.admitted


def test_where_blocks_are_short_every_offer_that_waits_is_given_up():
    one = scheduler(num_blocks=8)
    first = one.add(request(16), now=0.0)
    one.begin_sending(first)
    run(one)
    large, small = awaiting(one, 24, 100), awaiting(one, 8, 150)
    one.offered(small, 4)
    one.offered(large, 8)
    assert one.schedule().admission == Admission((), (large, small)), "the large one's turn came first"
    one.end_sending(first)
    assert run(one) == [(large.arrival, 16)]


@pytest.mark.parametrize("when", ["awaiting an offer", "offered", "pulling"])
def test_a_prompt_that_ends_before_it_is_computed_frees_its_blocks_once_nothing_writes_into_them(when: str):
    pool = BlockPool(8, BLOCK)
    one = scheduler(pool=pool)
    job = awaiting(one, 12)
    if when != "awaiting an offer":
        one.offered(job, 8)
    if when == "pulling":
        one.admit_offered()
    one.end(job)
    assert pool.owned_blocks == (3 if when == "pulling" else 0)
    if when == "pulling":
        assert one.pulled(job) == 0
    assert (pool.owned_blocks, pool.names(0, pool.num_blocks)) == (0, [])
    assert run(one) == []


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(1, 40), st.integers(1, 6))
def test_whatever_happens_blocks_are_accounted_for_and_every_prompt_is_computed_once(
    seed: int, num_prompts: int, max_step_tokens: int, max_batch: int
):
    draw = random.Random(seed)
    pool = BlockPool(12, BLOCK)
    one = PrefillScheduler(
        pool, max_step_tokens=max_step_tokens, max_batch=max_batch, max_context=200, max_waiting=1024
    )
    live: list[PrefillJob] = []
    sending: list[PrefillJob] = []
    pulling: list[PrefillJob] = []
    awaiting_offer: list[PrefillJob] = []
    computed: set[int] = set()
    ended: set[int] = set()
    for _ in range(1000):
        if num_prompts and (draw.random() < 0.5 or not live):
            awaits_offer = draw.random() < 0.5
            prompt = request(draw.randint(1, 48), first=draw.choice((0, 0, 100)))
            job = one.add(prompt, now=0.0, awaits_offer=awaits_offer)
            live.append(job)
            num_prompts -= 1
            if awaits_offer:
                awaiting_offer.append(job)
        for job in awaiting_offer:
            if not job.has_ended and draw.random() < 0.5:
                if draw.random() < 0.7:
                    one.offered(job, draw.randint(1, 50))
                else:
                    one.not_offered(job)
        awaiting_offer = [job for job in awaiting_offer if job.awaits_offer and not job.has_ended]
        step = one.schedule()
        assert sum(len(chunk.step.token_ids) for chunk in step.chunks) <= max_step_tokens
        assert len(step.chunks) <= max_batch
        admissions = [step.admission]
        if draw.random() < 0.3:
            admissions.append(one.admit_offered())
        for job in (job for admission in admissions for job in admission.admitted):
            assert not job.awaits_offer
            if job.is_pulling:
                pulling.append(job)
            if draw.random() < 0.5:
                one.begin_sending(job)
                sending.append(job)
        assert not any(chunk.job.is_pulling for chunk in step.chunks)
        if live and draw.random() < 0.1:
            victim = live.pop(draw.randrange(len(live)))
            one.end(victim)
            ended.add(victim.arrival)
        if draw.random() < 0.05:
            one.abandon(step)  # as if the engine had failed, but only the accounting is of interest here
            for chunk in step.chunks:
                one.end(chunk.job)
                ended.add(chunk.job.arrival)
                live = [job for job in live if job is not chunk.job]
        else:
            for job in one.complete(step):
                assert job.arrival not in computed | ended
                computed.add(job.arrival)
                one.end(job)
                live.remove(job)
        while pulling and draw.random() < 0.5:
            pull_ends = draw.choice((one.pulled, one.pull_failed))
            pull_ends(pulling.pop(draw.randrange(len(pulling))))
        while sending and draw.random() < 0.5:
            one.end_sending(sending.pop(draw.randrange(len(sending))))
        pool.check_integrity()
        if not live and not num_prompts:
            break
    for job in pulling:
        one.pull_failed(job)
    for job in sending:
        one.end_sending(job)
    assert not live, "prompts still wait after a thousand steps"
    assert pool.owned_blocks == 0
    assert one.num_waiting == one.num_running == one.num_waiting_tokens == 0
