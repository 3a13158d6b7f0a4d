"""The decode scheduler with requests of several classes: who goes first, who gives way, and that nobody starves."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode_worker.budgets import step_budget
from twostroke.decode_worker.jobs import DecodeJob, DecodeStep, Phase
from twostroke.decode_worker.preemption import PreemptionPolicy, SwappedBlocks
from twostroke.decode_worker.scheduler import DecodeScheduler
from twostroke.protocol.requests import GenerateRequest, Promise, SampledToken, SamplingParams
from twostroke.protocol.stats import StepCosts
from twostroke.worker.block_pool import BlockPool

BLOCK = 4
TOKEN = SampledToken(7)
LOW, MIDDLE, HIGH = (Promise(name, priority, 0.1) for priority, name in enumerate(("low", "middle", "high")))


class Rig:
    """A scheduler with its pool and, where asked for, host memory; an engine that always draws the same token."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        max_batch: int = 8,
        max_step_tokens: int = 16,
        swap_blocks: int = 0,
        watermark_blocks: int = 0,
        costs: StepCosts | None = None,
    ):
        self.pool = BlockPool(num_blocks, BLOCK)
        self.host = BlockPool(swap_blocks, BLOCK) if swap_blocks else None
        self.scheduler = DecodeScheduler(
            self.pool,
            budget=step_budget(max_step_tokens, costs),
            max_batch=max_batch,
            watermark_blocks=watermark_blocks,
            max_context=200,
            max_waiting=1024,
            swapped=SwappedBlocks(self.host, PreemptionPolicy("swap" if swap_blocks else "recompute", block_bytes=1)),
        )
        self._num_requests = 0

    def add(
        self, promise: Promise, length: int = 4, max_tokens: int = 8, *, now: float = 0.0, transfer: bool = False
    ) -> DecodeJob:
        first = 1000 * self._num_requests
        self._num_requests += 1
        request = GenerateRequest(
            request_id=str(first),
            router_id="router-0",
            token_ids=tuple(range(first, first + length)),
            num_prompt_tokens=length,
            sampling=SamplingParams(),
            max_tokens=max_tokens,
            promise=promise,
        )
        job = self.scheduler.add(request, now=now, wants_transfer=transfer)
        if transfer:
            self.scheduler.offered(job)
        return job

    def end(self, step: DecodeStep) -> None:
        drawn = [TOKEN if entry.step.draw is not None else None for entry in step.entries]
        self.scheduler.complete(step, drawn)
        self.pool.check_integrity()

    def run(self) -> list[DecodeJob]:
        """Run a step; who was in it."""
        step = self.scheduler.schedule()
        self.end(step)
        return [entry.job for entry in step.entries]


def test_higher_classes_are_admitted_first_then_earlier_deadlines() -> None:
    rig = Rig(max_batch=1)
    late = rig.add(Promise("high", 2, ttft_left_s=9.0), max_tokens=1)
    low = rig.add(LOW, max_tokens=1)
    soon = rig.add(Promise("high", 2, ttft_left_s=1.0), max_tokens=1)
    assert [rig.run() for _ in range(3)] == [[soon], [late], [low]]


def test_a_higher_class_takes_a_place_in_a_full_batch_and_the_youngest_of_the_lowest_stands_still_with_its_kv() -> None:
    rig = Rig(max_batch=2)
    old, young = rig.add(LOW), rig.add(LOW)
    rig.run()
    high = rig.add(HIGH, max_tokens=3)
    steps = [rig.run() for _ in range(5)]
    assert high in steps[1]
    assert young not in steps[1]
    assert steps[-1] == [old, young], "it goes on as soon as there is room"
    assert young.sequence.block_ids
    assert rig.scheduler.preemptions == 0


def test_the_place_of_one_who_gives_way_goes_to_who_stands_still() -> None:
    """Or nobody would ever step again: no step ends that could wake the worker."""
    rig = Rig(6, max_batch=1)
    older = rig.add(LOW, 8, max_tokens=4, transfer=True)
    younger = rig.add(LOW, 8, max_tokens=8, transfer=True)
    rig.scheduler.schedule()
    rig.scheduler.verified(younger, TOKEN)
    while younger.phase is Phase.RUNNING and younger.sequence.num_output_tokens < 5:
        assert rig.run() == [younger]
    rig.scheduler.verified(older, TOKEN)
    while rig.pool.free_blocks:
        rig.pool.allocate(1)  # who knows who holds them
    while younger.phase is Phase.RUNNING:
        stepping = rig.run()
    assert younger.phase is Phase.WAITING
    assert stepping == [older]


def test_nobody_of_the_same_or_a_higher_class_loses_a_place() -> None:
    rig = Rig(max_batch=2)
    first, second = rig.add(MIDDLE), rig.add(HIGH)
    rig.run()
    waiting = rig.add(MIDDLE)
    for _ in range(3):
        assert rig.run() == [first, second]
    assert waiting.phase is Phase.WAITING


@pytest.mark.parametrize("swap_blocks", [0, 8])
def test_a_higher_class_that_lacks_blocks_gets_those_of_the_youngest_of_the_lowest(swap_blocks: int) -> None:
    rig = Rig(num_blocks=6, swap_blocks=swap_blocks)
    old, young = rig.add(LOW, 6), rig.add(LOW, 6)
    middle = rig.add(MIDDLE, 6)
    rig.run()
    high = rig.add(HIGH, 7, max_tokens=1)
    if swap_blocks:
        assert rig.run() == [], "copying comes first"
    assert rig.run() == [old, middle, high]
    assert (young.phase, young.num_preemptions, rig.scheduler.preemptions) == (Phase.WAITING, 1, 1)
    assert (rig.scheduler.swaps == 1) is (swap_blocks > 0)
    while not (old.has_ended and young.has_ended and middle.has_ended):
        rig.run()
    assert young.num_preemptions <= 2
    assert rig.pool.owned_blocks == 0


def test_nobody_gives_way_where_that_would_not_be_enough() -> None:
    rig = Rig(num_blocks=6)
    low, middle = rig.add(LOW, 6), rig.add(MIDDLE, 13)
    rig.run()
    rig.add(MIDDLE, 12)
    assert set(rig.run()) == {low, middle}, "with the low one's two blocks it would still lack one"
    assert rig.scheduler.preemptions == 0


def test_nothing_runs_ahead_while_somebody_is_to_give_way() -> None:
    rig = Rig(num_blocks=4)
    low = rig.add(LOW, 7)
    rig.run()
    step = rig.scheduler.schedule()
    high = rig.add(HIGH, 12, max_tokens=1)
    assert rig.scheduler.schedule(step).is_empty
    assert low.phase is Phase.RUNNING
    rig.end(step)
    assert rig.run() == [high]


def test_where_blocks_run_out_the_youngest_of_the_lowest_gives_way() -> None:
    rig = Rig(num_blocks=6)
    low, high, young = rig.add(LOW, 7), rig.add(HIGH, 7), rig.add(HIGH, 7)
    rig.run()
    rig.run()
    assert rig.run() == [high, young]
    assert low.phase is Phase.WAITING


def test_an_offered_request_of_a_higher_class_gets_blocks_of_lower_ones() -> None:
    rig = Rig(num_blocks=4)
    low = rig.add(LOW, 7)
    rig.run()
    high = rig.add(HIGH, 12, 4, transfer=True)
    assert rig.scheduler.reserve_offered() == ()
    step = rig.scheduler.schedule()
    assert (step.reserved, low.phase) == ((high,), Phase.WAITING)
    rig.end(step)
    rig.scheduler.transfer_failed(high)


def test_kv_that_comes_for_a_higher_class_counts_for_the_share_of_a_lower_one() -> None:
    rig = Rig(num_blocks=4)
    low = rig.add(LOW, 8)
    rig.add(HIGH, 12, 1, transfer=True)
    num_highs = 0
    while low.phase is Phase.WAITING:
        rig.add(HIGH, 12, 1, transfer=True)  # one waits while another's KV comes
        step = rig.scheduler.schedule()
        rig.end(step)
        for high in step.reserved:
            rig.scheduler.verified(high, TOKEN)
        num_highs += 1
        assert num_highs < 10, "a tenth of 9 x 12 tokens is more than it needs"


COSTS = StepCosts(base_s=0.010, token_s=0.001, pair_s=0.0, row_s=0.010, context_s=0.0)


def test_newcomers_wait_where_the_tightest_promise_leaves_no_room_and_come_when_it_has_ended() -> None:
    rig = Rig(max_step_tokens=64, costs=COSTS)
    tight = rig.add(Promise(tpot_s=0.030), max_tokens=4)
    second, third = rig.add(LOW), rig.add(LOW)
    assert [rig.run() for _ in range(3)] == [[tight, second]] * 3, "30 ms are two rows"
    assert rig.run() == [tight, second, third], "its prompt may share the step that draws the other's last token"
    assert rig.run() == [second, third]


def test_newcomers_whose_promises_are_looser_do_not_overtake_one_that_waits_for_room() -> None:
    """Their KV comes from elsewhere, so that all are here already."""
    rig = Rig(num_blocks=512, costs=StepCosts(1.0, 0.01, 0.0, 0.5, 0.0))

    def come(promise: Promise) -> DecodeJob:
        job = rig.add(promise, 4, max_tokens=6, transfer=True)
        rig.scheduler.reserve_offered()
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
    lows = [rig.add(LOW, max_tokens=30) for _ in range(4)]
    rig.run()
    same = rig.add(Promise("low", 0, tpot_s=0.030))
    assert rig.run() == lows
    rig.scheduler.end(same)
    tight = rig.add(Promise("high", 2, tpot_s=0.030))
    rig.run()
    assert rig.run() == [lows[0], tight]


def test_prompts_of_higher_classes_get_chunks_first() -> None:
    rig = Rig(max_step_tokens=16)
    low = rig.add(LOW, 40)
    assert rig.run() == [low]
    high = rig.add(HIGH, 40)
    assert [rig.run() for _ in range(2)] == [[high], [high]]
    assert rig.run() == [high, low]


@pytest.mark.parametrize("transfer", [False, True])
def test_a_low_class_gets_on_though_higher_ones_keep_coming(transfer: bool) -> None:
    rig = Rig(num_blocks=24, max_batch=2)
    low = rig.add(LOW, 8, max_tokens=10, transfer=transfer)
    rig.scheduler.compute_here(low)
    for _ in range(3000):
        while rig.scheduler.num_waiting + rig.scheduler.num_running < 6:
            rig.add(HIGH, 20, max_tokens=6)
        rig.run()
        if low.has_ended:
            break
    assert low.has_ended, "after three thousand steps"
    assert low.num_preemptions <= 3


def test_what_a_class_saved_is_gone_once_nobody_of_it_waits() -> None:
    rig = Rig()
    waiting = rig.add(LOW, 40)
    for _ in range(10):
        high = rig.add(HIGH, 16, max_tokens=1)
        assert rig.run() == [high]
    rig.scheduler.end(waiting)
    assert rig.run() == []
    rig.add(LOW, 12)
    high = rig.add(HIGH, 16)
    assert rig.run() == [high]


def test_what_was_admitted_by_its_share_is_not_thrown_out_by_those_it_overtook() -> None:
    rig = Rig(num_blocks=8, max_batch=8)
    low = rig.add(LOW, 12, max_tokens=12)
    for _ in range(400):
        while rig.scheduler.num_waiting + rig.scheduler.num_running < 5:
            rig.add(HIGH, 8, max_tokens=4)
        rig.run()
        if low.keeps_blocks:
            break
    assert low.keeps_blocks
    before = low.num_preemptions
    while not low.has_ended:
        while rig.scheduler.num_waiting + rig.scheduler.num_running < 5:
            rig.add(HIGH, 8, max_tokens=4)
        rig.run()
    assert low.num_preemptions == before


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(0, 20),
    st.integers(0, 3),
    st.sampled_from((0, 5, 20)),
    st.sampled_from((None, COSTS)),
)
def test_whatever_happens_classes_run_ahead_and_end_with_their_tokens_and_no_block_is_lost(
    seed: int,
    num_requests: int,
    max_batch: int,
    more_tokens: int,
    watermark_blocks: int,
    swap_blocks: int,
    costs: StepCosts | None,
) -> None:
    draw = random.Random(seed)
    rig = Rig(
        num_blocks=14,
        max_batch=max_batch,
        max_step_tokens=max_batch + more_tokens,
        watermark_blocks=watermark_blocks,
        swap_blocks=swap_blocks,
        costs=costs,
    )
    jobs: list[DecodeJob] = []
    receiving: list[DecodeJob] = []
    in_flight: DecodeStep | None = None
    num_steps = 0
    while num_requests or not all(job.has_ended for job in jobs):
        num_steps += 1
        assert num_steps < 5000, "somebody starves"
        if num_requests and (draw.random() < 0.3 or all(job.has_ended for job in jobs)):
            num_requests -= 1
            priority = draw.randrange(3)
            promise = Promise(
                str(priority),
                priority,
                draw.choice((0.0, 0.3)),
                draw.choice((None, -1.0, 5.0)),
                draw.choice((None, 0.001, 0.05)),
            )
            transfer = draw.random() < 0.4
            jobs.append(rig.add(promise, draw.randint(1, 40), draw.randint(1, 16), now=num_steps, transfer=transfer))
        if in_flight is None:
            in_flight = rig.scheduler.schedule()
            receiving.extend(in_flight.reserved)
        running, in_flight = in_flight, None
        if draw.random() < 0.5:
            ahead = rig.scheduler.schedule(running)
            receiving.extend(ahead.reserved)
            in_flight = None if ahead.is_empty else ahead
        for step in (running, in_flight or running):
            assert len(step.entries) <= max_batch
            assert sum(len(entry.step.token_ids) for entry in step.entries) <= max_batch + more_tokens
            assert len({entry.job for entry in step.entries}) == len(step.entries)
        if draw.random() < 0.3:
            receiving.extend(rig.scheduler.reserve_offered())
        if draw.random() < 0.03:
            rig.scheduler.end(draw.choice(jobs))
        rig.end(running)
        while receiving and draw.random() < 0.5:
            job = receiving.pop(draw.randrange(len(receiving)))
            if draw.random() < 0.3:
                rig.scheduler.transfer_failed(job)
            else:
                rig.scheduler.verified(job, TOKEN)
    for job in receiving:
        rig.scheduler.transfer_failed(job)
    if in_flight is not None:
        rig.end(in_flight)
    assert rig.pool.owned_blocks == 0
    assert rig.host is None or rig.host.owned_blocks == 0
    assert rig.scheduler.num_waiting == rig.scheduler.num_running == rig.scheduler.num_waiting_tokens == 0
