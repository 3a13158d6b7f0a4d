"""Steps scheduled while another is under way: who goes on, who waits, and rows that turn out to be wasted."""

import pytest

from tests.worker.scheduling.scheduler_rig import STOP, Rig
from twostroke.protocol.requests import Promise, SampledToken, SamplingParams
from twostroke.worker.scheduling.job import Phase
from twostroke.worker.scheduling.scheduler import ScheduledStep


def arrivals(rig: Rig, step: ScheduledStep) -> list[int]:
    """Arrivals of the jobs whose tokens a step has drawn."""
    return [one.job.arrival for one in rig.end(step)]


def shape(step: ScheduledStep) -> list[tuple[int, int, int | None]]:
    """(arrival, tokens, entry that it follows) of each entry."""
    return [(entry.job.arrival, len(entry.step.token_ids), entry.step.follows) for entry in step.entries]


def test_a_decode_goes_on_with_the_token_that_is_being_drawn():
    rig = Rig()
    job = rig.add(6, 5)
    rig.end(rig.schedule())
    first = rig.schedule()
    second = rig.scheduler.schedule(first)
    assert (shape(first), shape(second)) == ([(0, 1, None)], [(0, 1, 0)])
    assert arrivals(rig, first) == [0]
    third = rig.scheduler.schedule(second)
    assert [entry.step.start for step in (first, second, third) for entry in step.entries] == [6, 7, 8]
    assert arrivals(rig, second) == arrivals(rig, third) == [0]
    assert job.sequence.num_output_tokens == 4
    assert job.sequence.num_uncomputed == 1


def test_a_decode_follows_its_own_entry_wherever_that_stands():
    rig = Rig(max_batch=2)
    rig.add(3, max_tokens=2)
    rig.add(3, 5)
    rig.add(3, 5)
    rig.end(rig.schedule())
    first = rig.schedule()
    assert shape(rig.scheduler.schedule(first)) == [(1, 1, 1), (2, 3, None)], "the first ends, and leaves its place"


def test_a_prompts_next_chunk_and_its_first_token_are_scheduled_while_a_chunk_is_computed():
    rig = Rig(max_step_tokens=8)
    job = rig.add(18, 5)
    steps = [rig.schedule()]
    for _ in range(4):
        steps.append(rig.scheduler.schedule(steps[-1]))
        rig.end(steps[-2])
    assert [shape(step) for step in steps] == [
        [(0, 8, None)],
        [(0, 8, None)],
        [(0, 2, None)],
        [(0, 1, 0)],
        [(0, 1, 0)],
    ]
    assert [entry.step.start for step in steps for entry in step.entries] == [0, 8, 16, 18, 19]
    assert arrivals(rig, steps[-1]) == [0]
    assert job.sequence.num_output_tokens == 3


def test_decodes_go_on_beside_a_prompt_that_is_computed_ahead():
    rig = Rig(max_step_tokens=8)
    rig.add(3, 20)
    rig.end(rig.schedule())
    rig.add(12, 20)
    first = rig.schedule()
    second = rig.scheduler.schedule(first)
    third = rig.scheduler.schedule(second) if rig.end(first) else None
    assert third is not None
    assert [shape(step) for step in (first, second, third)] == [
        [(0, 1, None), (1, 7, None)],
        [(0, 1, 0), (1, 5, None)],
        [(0, 1, 0), (1, 1, 1)],
    ]
    assert arrivals(rig, second) == arrivals(rig, third) == [0, 1]


def test_a_request_whose_last_token_is_being_drawn_is_in_no_further_step():
    rig = Rig()
    rig.add(6, max_tokens=3)
    rig.end(rig.schedule())
    first = rig.schedule()
    second = rig.scheduler.schedule(first)
    rig.end(first)
    assert rig.scheduler.schedule(second).entries == ()
    rig.end(second)
    assert rig.pool.owned_blocks == 0


@pytest.mark.parametrize("how", ["stopped", "aborted"])
def test_a_row_that_was_wasted_draws_nothing_and_keeps_its_blocks_until_its_step_has_ended(how: str):
    rig = Rig()
    job = rig.add(7, max_tokens=20)
    other = rig.add(3, max_tokens=20)
    rig.end(rig.schedule())
    first = rig.schedule()
    second = rig.scheduler.schedule(first)
    if how == "aborted":
        rig.scheduler.end(job)
        assert arrivals(rig, first) == [1]
    else:
        drawn = [SampledToken(STOP), SampledToken(7)]
        assert [one.finish_reason for one in rig.scheduler.complete(first, drawn)] == ["stop", None]
    assert job.has_ended
    assert len(job.sequence.block_ids) == 3, "the second step still writes into them"
    assert arrivals(rig, second) == [1]
    assert job.sequence.block_ids == []
    rig.scheduler.end(other)
    assert rig.pool.owned_blocks == 0


def test_what_an_aborted_request_computed_ahead_is_not_named():
    rig = Rig()
    job = rig.add(6, max_tokens=20)
    rig.end(rig.schedule())
    first = rig.schedule()
    second = rig.scheduler.schedule(first)  # the eighth token would fill the second block
    rig.scheduler.end(job)
    block_ids = list(job.sequence.block_ids)
    rig.end(first)
    rig.end(second)
    assert [len(rig.pool.names(block_id, block_id + 1)) for block_id in block_ids] == [1, 0]


def test_where_a_job_must_be_preempted_nothing_is_scheduled_ahead():
    rig = Rig(num_blocks=3)
    rig.add(3, max_tokens=8)
    young = rig.add(6, max_tokens=6)
    rig.end(rig.schedule())
    first = rig.schedule()
    assert rig.scheduler.schedule(first).entries == ()
    assert young.phase is Phase.RUNNING
    assert arrivals(rig, first) == [0, 1]
    assert shape(rig.schedule()) == [(0, 1, None)]
    assert young.phase is Phase.WAITING


def test_a_draw_with_penalties_runs_ahead_and_lets_the_engine_settle_what_it_depends_on():
    rig = Rig()
    job = rig.add(3, 5, sampling=SamplingParams(presence_penalty=0.5))
    rig.end(rig.schedule())
    first = rig.schedule()
    second = rig.scheduler.schedule(first)
    assert shape(second) == [(0, 1, 0)]
    draw = second.entries[0].step.draw
    assert draw is not None
    assert draw.counts is not None
    told = dict(zip(draw.counts.ids.tolist(), draw.counts.output_counts.tolist(), strict=True))
    rig.end(first)
    assert dict(zip(draw.counts.ids.tolist(), draw.counts.output_counts.tolist(), strict=True)) == told
    assert draw.settled(7, job.num_scheduled).counts is draw.counts
    assert draw.counts.output_counts[draw.counts.ids == 7] == 2


def test_newcomers_are_admitted_ahead_too():
    rig = Rig()
    rig.add(3, 5)
    rig.end(rig.schedule())
    first = rig.schedule()
    rig.add(4, 5)
    assert shape(rig.scheduler.schedule(first)) == [(0, 1, 0), (1, 4, None)]


def test_nothing_runs_ahead_while_a_lower_class_is_to_be_preempted():
    rig = Rig(num_blocks=4)
    low = rig.add(7, 8)
    rig.run()
    step = rig.schedule()
    high = rig.add(12, promise=Promise("high", 1))
    assert rig.scheduler.schedule(step).is_empty
    assert low.phase is Phase.RUNNING
    rig.end(step)
    assert rig.run() == [(high, 12)]
