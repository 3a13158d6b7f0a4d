"""The prefill scheduler: who gives blocks back to a higher class, and KV that waits to be sent."""

from typing import Any

import pytest

from tests.worker.scheduling.scheduler_rig import Rig, parts
from twostroke.protocol.requests import Promise

LOW, HIGH = Promise("low", 0, 0.1), Promise("high", 1, 0.1)


def run(rig: Rig) -> list[tuple[Any, int]]:
    """Run a step, whose newcomers are sent to where there is no room yet; who had how many tokens of it."""
    step = rig.schedule()
    for job in step.admitted.jobs:
        rig.scheduler.begin_sending(job)
    rig.end(step)
    return parts(step)


def test_a_prompt_goes_on_behind_its_chunk_under_way_until_one_ends_it() -> None:
    rig = Rig("prefill", max_step_tokens=8)
    long, short = rig.add(18), rig.add(4)
    steps = [rig.schedule()]
    for _ in range(3):
        steps.append(rig.schedule())
        rig.end(steps[-2])
    assert [parts(step) for step in steps] == [[(long, 8)], [(long, 8)], [(long, 2), (short, 4)], []]
    assert [entry.step.start for step in steps for entry in step.entries] == [0, 8, 16, 0]
    rig.end(steps[-1])
    assert rig.pool.owned_blocks == 0


def test_a_full_batch_does_not_keep_a_higher_class_out() -> None:
    rig = Rig("prefill", max_batch=1)
    rig.add(40, promise=LOW)
    rig.run()
    high = rig.add(10, promise=HIGH)
    assert rig.run() == [(high, 10)]


def test_blocks_that_a_higher_class_lacks_come_from_the_youngest_of_lower_ones() -> None:
    rig = Rig("prefill", num_blocks=10, max_step_tokens=8)
    old, young = rig.add(20, promise=LOW), rig.add(16, promise=LOW)
    rig.run()
    assert rig.run() == [(old, 8)]
    rig.run()  # the rest of the old one, and the young one begins
    assert bool(young.sequence.block_ids)
    high = rig.add(32, promise=HIGH)
    assert rig.run() == [(high, 8)]
    assert (bool(young.sequence.block_ids), rig.scheduler.num_preemptions, rig.scheduler.num_waiting) == (
        False,
        1,
        1,
    )
    computed = [rig.run() for _ in range(6)]
    assert sum(tokens for step in computed for job, tokens in step if job is young) >= 8
    assert rig.pool.owned_blocks == 0


@pytest.mark.parametrize("how", ["is being sent", "was sent", "came by its share", "of the same class"])
def test_no_blocks_are_taken_from_a_prompt_that(how: str) -> None:
    rig = Rig("prefill", num_blocks=6, max_step_tokens=8)
    job = rig.add(16, promise=LOW)
    rig.run()
    match how:
        case "is being sent":
            rig.scheduler.begin_sending(job)
        case "was sent":
            rig.scheduler.begin_sending(job)
            rig.scheduler.end_sending(job)
        case "came by its share":
            job.keeps_blocks = True
    rig.add(20, promise=LOW if how == "of the same class" else HIGH)
    assert rig.run() == [(job, 8)]
    assert rig.scheduler.num_preemptions == 0


def fill_with_kv_that_waits(rig: Rig) -> list[Any]:
    """Low prompts of four blocks, computed and offered, until no more are admitted."""
    kept: list[Any] = []
    while True:
        job = rig.add(16, promise=LOW)
        if not run(rig):
            return kept
        kept.append(job)


def test_kv_that_waits_for_room_leaves_some_blocks_to_higher_classes_that_have_been_here() -> None:
    rig = Rig("prefill", num_blocks=32)
    rig.add(4, promise=HIGH)
    rig.run()
    assert len(fill_with_kv_that_waits(rig)) == 7
    assert rig.pool.free_blocks == 4
    high = rig.add(16, promise=HIGH)
    assert run(rig) == [(high, 16)]
    rig.add(16, promise=HIGH)
    assert rig.run() == []


def test_kv_that_waits_has_all_blocks_where_there_is_but_one_class() -> None:
    rig = Rig("prefill", num_blocks=32)
    assert len(fill_with_kv_that_waits(rig)) == 8


def test_prompts_that_are_being_computed_have_all_blocks() -> None:
    rig = Rig("prefill", num_blocks=32, max_step_tokens=40)
    rig.add(4, promise=HIGH)
    rig.run()
    first, second = rig.add(64, promise=LOW), rig.add(64, promise=LOW)
    assert run(rig) == [(first, 40)]
    assert run(rig) == [(first, 24), (second, 16)]


def test_what_is_left_to_higher_classes_is_taken_when_no_kv_waits() -> None:
    rig = Rig("prefill", num_blocks=32)
    rig.add(4, promise=HIGH)
    rig.run()
    kept = fill_with_kv_that_waits(rig)
    huge = rig.add(120, promise=LOW)
    for job in kept[1:]:
        rig.scheduler.end_sending(job)
    rig.run()  # the one that was not admitted
    assert rig.run() == []
    rig.scheduler.end_sending(kept[0])
    while not huge.has_ended:
        assert rig.run()
    assert rig.pool.owned_blocks == 0
