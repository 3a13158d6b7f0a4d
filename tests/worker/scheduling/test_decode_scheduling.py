"""The decode scheduler: who decodes, whose KV comes, who stands still or gives way, and blocks that come back."""

import random
from typing import Any

import pytest

from tests.worker.scheduling.scheduler_rig import NOTHING, TOKEN, Rig, idle, jobs, parts, receiving
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import Promise
from twostroke.protocol.stats import StepCosts
from twostroke.worker.scheduling.job import Phase, WorkerJob
from twostroke.worker.scheduling.scheduler import NewTokens
from twostroke.worker.scheduling.step_policy import MAX_OVERTAKING_S

LOW, MIDDLE, HIGH = (Promise(name, priority, 0.1) for priority, name in enumerate(("low", "middle", "high")))
COSTS = StepCosts(base_s=0.010, token_s=0.001, pair_s=0.0, row_s=0.010, context_s=0.0)


def test_a_request_computes_its_prompt_then_decodes_one_token_a_step_to_its_end() -> None:
    rig = Rig()
    job = rig.add(6, max_tokens=3)
    steps = [rig.schedule()]
    drawn = rig.end(steps[0])
    while not job.has_ended:
        steps.append(rig.schedule())
        drawn += rig.end(steps[-1])
    assert [parts(step) for step in steps] == [[(job, 6)], [(job, 1)], [(job, 1)]]
    assert [(one.index, one.finish_reason) for one in drawn] == [(0, None), (1, None), (2, "length")]
    assert rig.pool.owned_blocks == 0


def test_running_decodes_come_first_and_prompts_take_what_is_left_of_the_budget() -> None:
    rig = Rig(max_step_tokens=8)
    first = rig.add(4, max_tokens=20)
    rig.run()
    second = rig.add(20, max_tokens=5)
    assert [rig.run() for _ in range(4)] == [[(first, 1), (second, left)] for left in (7, 7, 6, 1)]


@pytest.mark.parametrize(("length", "max_tokens", "num_blocks"), [(196, 5, 64), (10, 8, 4), (1, 1_000_000_000, 64)])
def test_a_request_that_can_never_run_to_its_end_is_refused(length: int, max_tokens: int, num_blocks: int) -> None:
    with pytest.raises(RequestError):
        Rig(num_blocks=num_blocks).add(length, max_tokens)


def test_a_request_that_just_fits_runs_to_its_end_alone() -> None:
    rig = Rig(num_blocks=4)
    job = rig.add(10, max_tokens=7)
    while not job.has_ended:
        rig.run()
    assert job.sequence.num_output_tokens == 7


def test_admission_leaves_the_watermark_free_unless_the_request_would_be_alone() -> None:
    rig = Rig(num_blocks=6, watermark_blocks=2)
    large = rig.add(20, max_tokens=2)
    assert rig.run() == [(large, 16)], "alone, it may take five of six blocks"
    small = rig.add(4, max_tokens=2)
    assert rig.run() == [(large, 4)], "one block is free, but it is not for newcomers"
    assert [rig.run() for _ in range(2)] == [[(large, 1)], [(small, 4)]]


# --- KV that comes from a prefill worker ---


def test_a_request_with_a_transfer_reserves_its_prompt_and_joins_once_verified() -> None:
    rig = Rig()
    job = rig.add(10, max_tokens=3, transfer=True)
    step = rig.schedule()
    assert (receiving(step.admitted), step.entries, len(job.sequence.block_ids)) == ((job,), (), 3)
    assert rig.scheduler.verified(job, TOKEN) == NewTokens(job, 0, (TOKEN,), None)
    assert rig.run() == [(job, 1)]
    assert rig.pool.lookup(job.sequence.block_hashes) == 2


def test_a_request_that_is_not_offered_yet_reserves_nothing_and_delays_no_other() -> None:
    rig = Rig()
    job = rig.add(10, transfer=True, is_offered=False)
    other = rig.add(3)
    assert rig.run() == [(other, 3)]
    assert (job.phase, rig.pool.owned_blocks) == (Phase.WAITING, 0)
    rig.scheduler.offered(job)
    assert receiving(rig.schedule().admitted) == (job,)


def test_a_prefix_that_is_here_already_needs_no_transfer() -> None:
    rig = Rig()
    rig.cache(10)
    job = rig.add(10, first=0, transfer=True)
    rig.run()
    assert job.sequence.num_computed == job.num_cached_tokens == 8
    assert len(job.sequence.block_ids) == 3


def test_a_first_token_that_ends_the_request_frees_it_at_once() -> None:
    rig = Rig()
    job = rig.add(10, transfer=True)
    rig.run()
    assert rig.scheduler.verified(job, TOKEN) == NewTokens(job, 0, (TOKEN,), "length")
    assert rig.pool.owned_blocks == 0


def test_after_a_failed_transfer_the_prompt_is_computed_here_before_later_requests() -> None:
    rig = Rig(max_step_tokens=10, max_batch=1)
    job, other = rig.add(10, transfer=True), rig.add(3)
    assert rig.run() == [(other, 3)]
    late = rig.add(4)
    rig.scheduler.transfer_failed(job)
    assert rig.pool.owned_blocks == 0
    assert [rig.run() for _ in range(2)] == [[(job, 10)], [(late, 4)]]


# --- who stands still ---


def test_a_higher_class_takes_a_place_in_a_full_batch_and_the_youngest_of_the_lowest_waits_with_its_kv() -> None:
    rig = Rig(max_batch=2)
    old, young = rig.add(4, 8, promise=LOW), rig.add(4, 8, promise=LOW)
    rig.run()
    high = rig.add(4, 3, promise=HIGH)
    steps = [jobs(rig.run()) for _ in range(5)]
    assert high in steps[1]
    assert young not in steps[1]
    assert steps[-1] == [old, young], "it goes on as soon as there is room"
    assert young.sequence.block_ids
    assert rig.scheduler.num_preemptions == 0


def test_the_place_of_a_preempted_job_goes_to_one_without_a_place() -> None:
    """Otherwise no request would ever step again: no step ends that could wake the worker."""
    rig = Rig(num_blocks=6, max_batch=1)
    older, younger = rig.add(8, 4, promise=LOW, transfer=True), rig.add(8, 8, promise=LOW, transfer=True)
    rig.schedule()
    rig.scheduler.verified(younger, TOKEN)
    while younger.phase is Phase.RUNNING and younger.sequence.num_output_tokens < 5:
        assert jobs(rig.run()) == [younger]
    rig.scheduler.verified(older, TOKEN)
    rig.pool.allocate(rig.pool.free_blocks)  # who knows who holds them
    while younger.phase is Phase.RUNNING:
        stepping = jobs(rig.run())
    assert younger.phase is Phase.WAITING
    assert stepping == [older]


def test_no_job_of_the_same_or_a_higher_class_loses_a_place() -> None:
    rig = Rig(max_batch=2)
    first, second = rig.add(4, 8, promise=MIDDLE), rig.add(4, 8, promise=HIGH)
    rig.run()
    waiting = rig.add(4, 8, promise=MIDDLE)
    assert [jobs(rig.run()) for _ in range(3)] == [[first, second]] * 3
    assert waiting.phase is Phase.WAITING


def test_newcomers_wait_where_the_tightest_promise_leaves_no_room_until_it_has_ended() -> None:
    rig = Rig(max_step_tokens=64, costs=COSTS)
    tight = rig.add(4, 4, promise=Promise(tpot_s=0.030))
    second, third = rig.add(4, 8, promise=LOW), rig.add(4, 8, promise=LOW)
    assert [jobs(rig.run()) for _ in range(3)] == [[tight, second]] * 3, "30 ms are two rows"
    assert jobs(rig.run()) == [tight, second, third], "its prompt may share the step that draws the other's last token"
    assert jobs(rig.run()) == [second, third]


def test_newcomers_whose_promises_are_looser_do_not_overtake_one_that_waits_for_room() -> None:
    """Their KV comes from elsewhere, so that all are here already."""
    rig = Rig(num_blocks=512, costs=StepCosts(1.0, 0.01, 0.0, 0.5, 0.0))

    def come(promise: Promise) -> WorkerJob:
        job: WorkerJob = rig.add(4, 6, promise=promise, transfer=True)
        rig.scheduler.admit_offered()
        rig.scheduler.verified(job, TOKEN)
        return job

    loose, tight = Promise("one", tpot_s=100.0), Promise("one", tpot_s=2.3)
    for _ in range(4):
        come(loose)
        rig.run()
    waiting = come(tight)
    for _ in range(100):
        come(loose)
        rig.run()
    assert waiting.has_ended


def test_a_newcomer_with_a_tight_promise_waits_for_its_own_class_and_stops_lower_ones() -> None:
    rig = Rig(max_step_tokens=64, costs=COSTS)
    lows = [rig.add(4, 30, promise=LOW) for _ in range(4)]
    rig.run()
    same = rig.add(4, 8, promise=Promise("low", 0, tpot_s=0.030))
    assert jobs(rig.run()) == lows
    rig.scheduler.end(same)
    tight = rig.add(4, 8, promise=Promise("high", 2, tpot_s=0.030))
    rig.run()
    assert jobs(rig.run()) == [lows[0], tight]


# --- who gives way ---


def test_without_free_blocks_the_youngest_is_preempted_and_computed_again() -> None:
    rig = Rig(num_blocks=4)
    old, young = rig.add(7, 5), rig.add(7, 8)
    assert rig.run() == [(old, 7), (young, 7)]
    assert rig.run() == [(old, 1), (young, 1)], "both fill their second block"
    assert rig.run() == [(old, 1)], "no block for either: the older takes the younger's"
    assert (young.phase, rig.scheduler.num_preemptions, young.num_preemptions) == (Phase.WAITING, 1, 1)
    before = list(young.sequence.token_ids)
    assert [rig.run() for _ in range(2)] == [[(old, 1)]] * 2
    assert rig.run() == [(young, 5)], "the first full block is still cached; only the rest is computed again"
    assert young.sequence.token_ids == [*before, TOKEN.token_id]
    while rig.scheduler.num_running:
        rig.run()
    assert (young.sequence.num_output_tokens, rig.pool.owned_blocks) == (8, 0)


@pytest.mark.parametrize("swap_blocks", [0, 8])
def test_a_higher_class_that_lacks_blocks_gets_those_of_the_youngest_of_the_lowest(swap_blocks: int) -> None:
    rig = Rig(num_blocks=6, swap_blocks=swap_blocks)
    old, young = rig.add(6, 8, promise=LOW), rig.add(6, 8, promise=LOW)
    middle = rig.add(6, 8, promise=MIDDLE)
    rig.run()
    high = rig.add(7, 1, promise=HIGH)
    if swap_blocks:
        assert rig.run() == [], "copying comes first"
    assert jobs(rig.run()) == [old, middle, high]
    assert (young.phase, young.num_preemptions, rig.scheduler.num_preemptions) == (Phase.WAITING, 1, 1)
    assert (rig.swapping.num_swaps == 1) is (swap_blocks > 0)
    while not (old.has_ended and young.has_ended and middle.has_ended):
        rig.run()
    assert young.num_preemptions <= 2
    assert rig.owned_blocks() == (0, 0)


def test_no_job_is_preempted_where_that_would_not_be_enough() -> None:
    rig = Rig(num_blocks=6)
    low, middle = rig.add(6, 8, promise=LOW), rig.add(13, 8, promise=MIDDLE)
    rig.run()
    rig.add(12, 8, promise=MIDDLE)
    assert set(jobs(rig.run())) == {low, middle}, "with the low one's two blocks it would still lack one"
    assert rig.scheduler.num_preemptions == 0


def test_where_blocks_run_out_the_youngest_of_the_lowest_is_preempted() -> None:
    rig = Rig(num_blocks=6)
    low, high, young = rig.add(7, 8, promise=LOW), rig.add(7, 8, promise=HIGH), rig.add(7, 8, promise=HIGH)
    rig.run()
    rig.run()
    assert jobs(rig.run()) == [high, young]
    assert low.phase is Phase.WAITING


@pytest.mark.parametrize("what", ["all of its KV", "its beginning"])
def test_an_offered_request_of_a_higher_class_gets_blocks_of_lower_ones_though_the_batch_is_full(what: str) -> None:
    rig = Rig(num_blocks=7, max_batch=1)
    low = rig.add(9, 8, promise=LOW)
    rig.run()
    first = rig.add(9, 3, promise=HIGH)
    rig.run()
    is_whole = what == "all of its KV"
    high = rig.add(9, 4, promise=HIGH, transfer=is_whole, awaits_offer=not is_whole)
    if not is_whole:
        rig.scheduler.offered_prefix(high, 8)
    step = rig.schedule()
    assert (jobs(step), receiving(step.admitted), low.phase) == ([first], (high,), Phase.WAITING)


def test_kv_that_arrives_for_a_higher_class_counts_for_the_share_of_a_lower_one() -> None:
    rig = Rig(num_blocks=4)
    low = rig.add(8, 8, promise=LOW)
    rig.add(12, 1, promise=HIGH, transfer=True)
    num_highs = 0
    while low.phase is Phase.WAITING:
        rig.add(12, 1, promise=HIGH, transfer=True)  # one waits while another's KV comes
        step = rig.schedule()
        rig.end(step)
        for high in receiving(step.admitted):
            rig.scheduler.verified(high, TOKEN)
        num_highs += 1
        assert num_highs < 10, "a tenth of 9 x 12 tokens is more than it needs"


def test_a_job_preempted_after_its_pull_is_computed_like_any_other() -> None:
    rig = Rig(num_blocks=4)
    old = rig.add(4, 8)
    rig.run()
    job = rig.add(8, 8, awaits_offer=True)
    rig.scheduler.offered_prefix(job, 4)
    rig.scheduler.admit_offered()
    rig.scheduler.pulled(job)
    while job.num_preemptions == 0:
        rig.run()
    assert (job.phase, job.offered_tokens, job.has_kv_coming) == (Phase.WAITING, 0, False)
    while not (old.has_ended and job.has_ended):
        assert rig.schedule().admitted.declined == ()
        rig.scheduler.end(old)
        rig.scheduler.end(job)
    assert job.num_cached_tokens == 4, "that of its first admission"


@pytest.mark.parametrize("transfer", [False, True])
def test_a_low_class_progresses_although_higher_ones_keep_arriving(transfer: bool) -> None:
    rig = Rig(num_blocks=24, max_batch=2)
    low = rig.add(8, 10, promise=LOW, transfer=transfer)
    rig.scheduler.compute_here(low)
    for _ in range(3000):
        while rig.scheduler.num_waiting + rig.scheduler.num_running < 6:
            rig.add(20, 6, promise=HIGH)
        rig.run()
        if low.has_ended:
            break
    assert low.has_ended, "after three thousand steps"
    assert low.num_preemptions <= 3


def test_the_savings_of_a_class_are_gone_once_none_of_it_waits() -> None:
    rig = Rig()
    waiting = rig.add(40, 8, promise=LOW)
    for _ in range(10):
        high = rig.add(16, promise=HIGH)
        assert jobs(rig.run()) == [high]
    rig.scheduler.end(waiting)
    assert rig.run() == []
    rig.add(12, 8, promise=LOW)
    high = rig.add(16, promise=HIGH)
    assert jobs(rig.run()) == [high]


def test_a_job_admitted_by_its_share_is_not_preempted_by_those_it_overtook() -> None:
    rig = Rig(num_blocks=8)
    low = rig.add(12, 12, promise=LOW)

    def step() -> None:
        while rig.scheduler.num_waiting + rig.scheduler.num_running < 5:
            rig.add(8, 4, promise=HIGH)
        rig.run()

    for _ in range(400):
        step()
        if low.keeps_blocks:
            break
    assert low.keeps_blocks
    before = low.num_preemptions
    while not low.has_ended:
        step()
    assert low.num_preemptions == before


def finish(rig: Rig, prompt: int, answer: int, promise: Promise = NOTHING) -> None:
    """Have one answer of so many tokens."""
    job = rig.add(prompt, answer, promise=promise)
    while not job.has_ended:
        rig.run()


def test_the_shortest_first_goes_by_the_answers_of_similar_requests() -> None:
    rig = Rig(max_batch=1, queue="sjf")
    chatty, terse = Promise("chatty"), Promise("terse")
    finish(rig, 4, 40, chatty)
    finish(rig, 4, 2, terse)
    long, capped, short = rig.add(4, 40, promise=chatty), rig.add(4, 10, promise=chatty), rig.add(4, 40, promise=terse)
    order: list[Any] = []
    while not idle(rig.scheduler):
        order += [job for job in jobs(rig.run()) if job not in order]
    assert order == [short, capped, long], "the cap bounds what is expected, too"


def test_an_answer_that_a_stop_string_ends_is_learnt_from_as_well() -> None:
    rig = Rig(max_batch=1, queue="sjf")
    chatty, terse = Promise("chatty"), Promise("terse")
    finish(rig, 4, 30, chatty)
    cancelled = rig.add(4, 40, promise=terse)
    for _ in range(3):
        rig.run()
    rig.scheduler.end(cancelled)
    first, second = rig.add(4, 40, promise=chatty), rig.add(4, 40, promise=terse)
    assert jobs(rig.run()) == [second]
    assert not first.has_output


@pytest.mark.parametrize("seed", range(10))
def test_no_request_is_overtaken_by_one_that_arrived_later_by_more_than_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    rig = Rig(num_blocks=40, max_batch=4, queue="sjf")
    now = 0.0
    waiting: list[Any] = []
    waits_s: list[float] = []
    while len(waits_s) < 150:
        now += draw.uniform(0.0, 6.0)
        if len(waiting) < 40:
            kind = draw.choice(["brief", "long"])
            length = draw.randint(1, 8) if kind == "brief" else draw.randint(1, 60)
            waiting.append(rig.add(length, min(80, length), promise=Promise(kind), now=now))
        begun = [job for job in jobs(rig.run()) if job in waiting]
        waiting = [job for job in waiting if job not in begun]
        waits_s += [now - job.arrived_at for job in begun]
        oldest = min((job.arrived_at for job in waiting), default=now)
        assert all(job.arrived_at - oldest <= MAX_OVERTAKING_S for job in begun)
    assert max(waits_s) > MAX_OVERTAKING_S, "else the bound was never near"
