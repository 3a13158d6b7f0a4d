"""The prefill scheduler with prompts of several classes: who goes first, who gives blocks back, that nobody starves."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.prefill_worker.scheduler import PrefillJob, PrefillScheduler
from twostroke.protocol.requests import GenerateRequest, Promise, SamplingParams
from twostroke.worker.block_pool import BlockPool

BLOCK = 4
LOW, HIGH = Promise("low", 0, 0.1), Promise("high", 1, 0.1)


class Rig:
    """A scheduler with its pool; what is computed ends at once."""

    def __init__(self, num_blocks: int = 64, max_step_tokens: int = 16, max_batch: int = 8):
        self.pool = BlockPool(num_blocks, BLOCK)
        self.scheduler = PrefillScheduler(
            self.pool, max_step_tokens=max_step_tokens, max_batch=max_batch, max_context=200, max_waiting=1024
        )
        self._num_prompts = 0

    def add(self, promise: Promise, length: int, *, now: float = 0.0) -> PrefillJob:
        first = 1000 * self._num_prompts
        self._num_prompts += 1
        return self.scheduler.add(
            GenerateRequest(
                request_id=str(first),
                router_id="router-0",
                token_ids=tuple(range(first, first + length)),
                num_prompt_tokens=length,
                sampling=SamplingParams(),
                max_tokens=5,
                promise=promise,
            ),
            now=now,
        )

    def run(self, *, sends: bool = False) -> list[tuple[PrefillJob, int]]:
        """Run a step; who had how many tokens of it. `sends`: to where there is no room yet."""
        step = self.scheduler.schedule()
        for job in step.admission.admitted if sends else ():
            self.scheduler.begin_sending(job)
        for job in self.scheduler.complete(step):
            self.scheduler.end(job)
        self.pool.check_integrity()
        return [(chunk.job, len(chunk.step.token_ids)) for chunk in step.chunks]


def test_a_prompt_of_a_higher_class_has_the_next_steps_before_one_that_is_begun() -> None:
    rig = Rig()
    low = rig.add(LOW, 40)
    assert rig.run() == [(low, 16)]
    high = rig.add(HIGH, 20)
    assert [rig.run() for _ in range(3)] == [[(high, 16)], [(high, 4), (low, 12)], [(low, 12)]]


def test_a_tighter_promise_has_the_next_step_before_a_looser_one_that_is_begun() -> None:
    rig = Rig()
    loose = rig.add(Promise(ttft_left_s=9.0), 40)
    assert rig.run() == [(loose, 16)]
    tight = rig.add(Promise(ttft_left_s=1.0), 10, now=2.0)
    assert rig.run() == [(tight, 10), (loose, 6)]


def test_a_full_batch_does_not_keep_a_higher_class_out() -> None:
    rig = Rig(max_batch=1)
    rig.add(LOW, 40)
    rig.run()
    high = rig.add(HIGH, 10)
    assert rig.run() == [(high, 10)]


def test_blocks_that_a_higher_class_lacks_come_from_the_youngest_of_lower_ones() -> None:
    rig = Rig(num_blocks=10, max_step_tokens=8)
    old, young = rig.add(LOW, 20), rig.add(LOW, 16)
    rig.run()
    step = rig.scheduler.schedule()
    assert {chunk.job for chunk in step.chunks} == {old}
    rig.scheduler.complete(step)
    rig.run()  # the rest of the old one, and the young one begins
    assert young.is_admitted
    high = rig.add(HIGH, 32)
    assert rig.run() == [(high, 8)]
    assert (young.is_admitted, rig.scheduler.preemptions, rig.scheduler.num_waiting) == (False, 1, 1)
    computed = [rig.run() for _ in range(6)]
    assert sum(tokens for step in computed for job, tokens in step if job is young) >= 8
    assert rig.pool.owned_blocks == 0


@pytest.mark.parametrize("how", ["is being sent", "was sent", "came by its share", "of the same class"])
def test_no_blocks_are_taken_from_a_prompt_that(how: str) -> None:
    rig = Rig(num_blocks=6, max_step_tokens=8)
    job = rig.add(LOW, 16)
    rig.run()
    match how:
        case "is being sent":
            rig.scheduler.begin_sending(job)
        case "was sent":
            rig.scheduler.begin_sending(job)
            rig.scheduler.end_sending(job)
        case "came by its share":
            job.keeps_blocks = True
    rig.add(LOW if how == "of the same class" else HIGH, 20)
    assert rig.run() == [(job, 8)]
    assert rig.scheduler.preemptions == 0


def fill_with_kv_that_waits(rig: Rig) -> list[PrefillJob]:
    """Low prompts of four blocks, computed and offered, until no more are admitted."""
    kept: list[PrefillJob] = []
    while True:
        job = rig.add(LOW, 16)
        if not rig.run(sends=True):
            return kept
        kept.append(job)


def test_kv_that_waits_for_room_leaves_some_blocks_to_higher_classes_that_have_been_here() -> None:
    rig = Rig(num_blocks=32)
    rig.add(HIGH, 4)
    rig.run()
    assert len(fill_with_kv_that_waits(rig)) == 7
    assert rig.pool.free_blocks == 4
    high = rig.add(HIGH, 16)
    assert rig.run(sends=True) == [(high, 16)]
    rig.add(HIGH, 16)
    assert rig.run() == []


def test_kv_that_waits_has_all_blocks_where_there_is_but_one_class() -> None:
    rig = Rig(num_blocks=32)
    assert len(fill_with_kv_that_waits(rig)) == 8


def test_prompts_that_are_being_computed_have_all_blocks() -> None:
    rig = Rig(num_blocks=32, max_step_tokens=40)
    rig.add(HIGH, 4)
    rig.run()
    first, second = rig.add(LOW, 64), rig.add(LOW, 64)
    assert rig.run(sends=True) == [(first, 40)]
    assert rig.run(sends=True) == [(first, 24), (second, 16)]


def test_what_is_left_to_higher_classes_is_taken_when_no_kv_waits() -> None:
    rig = Rig(num_blocks=32)
    rig.add(HIGH, 4)
    rig.run()
    kept = fill_with_kv_that_waits(rig)
    huge = rig.add(LOW, 120)
    for job in kept[1:]:
        rig.scheduler.end_sending(job)
    rig.run()  # the one that was not admitted
    assert rig.run() == []
    rig.scheduler.end_sending(kept[0])
    while not huge.has_ended:
        assert rig.run()
    assert rig.pool.owned_blocks == 0


@pytest.mark.parametrize("is_begun", [True, False])
def test_a_low_class_gets_its_share_though_higher_prompts_keep_coming(is_begun: bool) -> None:
    rig = Rig(num_blocks=40)
    low = rig.add(LOW, 100)
    if is_begun:
        rig.run()
    num_tokens = dict.fromkeys(("low", "high"), 0)
    while not low.has_ended:
        while rig.scheduler.num_waiting + rig.scheduler.num_running < 4:
            rig.add(HIGH, 20)
        for job, tokens in rig.run():
            num_tokens[job.request.promise.class_name] += tokens
        assert num_tokens["high"] < 3000, "the low one starves"
    assert num_tokens["low"] >= 0.09 * num_tokens["high"]
    assert num_tokens["low"] <= 0.2 * num_tokens["high"]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 25), st.integers(1, 40), st.integers(1, 6))
def test_whatever_happens_every_class_is_computed_and_no_block_is_lost(
    seed: int, num_prompts: int, max_step_tokens: int, max_batch: int
) -> None:
    draw = random.Random(seed)
    rig = Rig(14, max_step_tokens, max_batch)
    live: list[PrefillJob] = []
    sending: list[PrefillJob] = []
    for number in range(2000):
        if num_prompts and (draw.random() < 0.4 or not live):
            num_prompts -= 1
            priority = draw.randrange(3)
            left_s = draw.choice((None, -1.0, 5.0))
            live.append(rig.add(Promise(str(priority), priority, 0.1, left_s), draw.randint(1, 48), now=number))
        step = rig.scheduler.schedule()
        assert sum(len(chunk.step.token_ids) for chunk in step.chunks) <= max_step_tokens
        assert len({chunk.job for chunk in step.chunks}) == len(step.chunks) <= max_batch
        for job in step.admission.admitted:
            if draw.random() < 0.4:
                rig.scheduler.begin_sending(job)
                sending.append(job)
        if live and draw.random() < 0.05:
            rig.scheduler.end(live.pop(draw.randrange(len(live))))
        for job in rig.scheduler.complete(step):
            rig.scheduler.end(job)
            live.remove(job)
        while sending and draw.random() < 0.4:
            rig.scheduler.end_sending(sending.pop(draw.randrange(len(sending))))
        rig.pool.check_integrity()
        if not live and not num_prompts:
            break
    for job in sending:
        rig.scheduler.end_sending(job)
    assert not live, "prompts still wait after two thousand steps"
    assert rig.pool.owned_blocks == 0
