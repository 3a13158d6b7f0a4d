"""Steps scheduled while another is under way: who goes on, who waits, and rows that turn out to be wasted."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode_worker.budgets import step_budget
from twostroke.decode_worker.jobs import DecodeJob, DecodeStep, Phase
from twostroke.decode_worker.preemption import PreemptionPolicy, SwappedBlocks
from twostroke.decode_worker.scheduler import DecodeScheduler
from twostroke.protocol.requests import GenerateRequest, SampledToken, SamplingParams
from twostroke.worker.block_pool import BlockPool

BLOCK = 4
STOP = 9


class Rig:
    """A scheduler with its pool, and steps that end when they are told to."""

    def __init__(self, num_blocks: int = 64, max_step_tokens: int = 16, max_batch: int = 8):
        self.pool = BlockPool(num_blocks, BLOCK)
        self.scheduler = DecodeScheduler(
            self.pool,
            budget=step_budget(max_step_tokens),
            max_batch=max_batch,
            watermark_blocks=0,
            max_context=200,
            max_waiting=1024,
            swapped=SwappedBlocks(None, PreemptionPolicy("recompute", block_bytes=1)),
        )
        self._num_requests = 0

    def add(self, length: int, max_tokens: int = 5, sampling: SamplingParams | None = None) -> DecodeJob:
        first = 100 * self._num_requests
        self._num_requests += 1
        request = GenerateRequest(
            request_id=str(first),
            router_id="router-0",
            token_ids=tuple(range(first, first + length)),
            num_prompt_tokens=length,
            sampling=sampling or SamplingParams(),
            max_tokens=max_tokens,
            stop_token_ids=(STOP,),
        )
        return self.scheduler.add(request, wants_transfer=False, now=0.0)

    def end(self, step: DecodeStep, token: int = 7) -> list[int]:
        """The step has drawn `token` for all who draw; whose it was, by arrival."""
        drawn = [None if entry.step.draw is None else SampledToken(token) for entry in step.entries]
        progress = self.scheduler.complete(step, drawn)
        self.pool.check_integrity()
        return [one.job.arrival for one in progress]


def shape(step: DecodeStep) -> list[tuple[int, int, int | None]]:
    """(arrival, tokens, entry that it follows) of each entry."""
    return [(entry.job.arrival, len(entry.step.token_ids), entry.step.follows) for entry in step.entries]


def test_a_decode_goes_on_with_the_token_that_is_being_drawn():
    rig = Rig()
    job = rig.add(6)
    rig.end(rig.scheduler.schedule())
    first = rig.scheduler.schedule()
    second = rig.scheduler.schedule(first)
    assert (shape(first), shape(second)) == ([(0, 1, None)], [(0, 1, 0)])
    assert rig.end(first) == [0]
    third = rig.scheduler.schedule(second)
    assert [entry.step.start for step in (first, second, third) for entry in step.entries] == [6, 7, 8]
    assert rig.end(second) == rig.end(third) == [0]
    assert job.sequence.num_output_tokens == 4
    assert job.sequence.num_uncomputed == 1


def test_a_decode_follows_its_own_entry_wherever_that_stands():
    rig = Rig(max_batch=2)
    rig.add(3, max_tokens=2)
    rig.add(3)
    rig.add(3)
    rig.end(rig.scheduler.schedule())
    first = rig.scheduler.schedule()
    assert shape(rig.scheduler.schedule(first)) == [(1, 1, 1), (2, 3, None)], "the first ends, and leaves its place"


def test_nothing_is_scheduled_while_prompts_are_computed():
    rig = Rig(max_step_tokens=8)
    rig.add(18)
    steps = [rig.scheduler.schedule()]
    assert rig.scheduler.schedule(steps[0]).entries == ()
    rig.end(steps[0])
    assert shape(rig.scheduler.schedule()) == [(0, 8, None)]


def test_a_request_whose_last_token_is_being_drawn_is_in_no_further_step():
    rig = Rig()
    rig.add(6, max_tokens=3)
    rig.end(rig.scheduler.schedule())
    first = rig.scheduler.schedule()
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
    rig.end(rig.scheduler.schedule())
    first = rig.scheduler.schedule()
    second = rig.scheduler.schedule(first)
    if how == "aborted":
        rig.scheduler.end(job)
        assert rig.end(first) == [1]
    else:
        drawn = [SampledToken(STOP), SampledToken(7)]
        assert [one.finish_reason for one in rig.scheduler.complete(first, drawn)] == ["stop", None]
    assert job.has_ended
    assert len(job.sequence.block_ids) == 3, "the second step still writes into them"
    assert rig.end(second) == [1]
    assert job.sequence.block_ids == []
    rig.scheduler.end(other)
    assert rig.pool.owned_blocks == 0


def test_what_an_aborted_request_computed_ahead_is_not_named():
    rig = Rig()
    job = rig.add(6, max_tokens=20)
    rig.end(rig.scheduler.schedule())
    first = rig.scheduler.schedule()
    second = rig.scheduler.schedule(first)  # the eighth token would fill the second block
    rig.scheduler.end(job)
    block_ids = list(job.sequence.block_ids)
    rig.end(first)
    rig.end(second)
    assert [len(rig.pool.names(block_id, block_id + 1)) for block_id in block_ids] == [1, 0]


def test_where_somebody_must_give_way_nothing_is_scheduled_ahead():
    rig = Rig(num_blocks=3)
    rig.add(3, max_tokens=8)
    young = rig.add(6, max_tokens=6)
    rig.end(rig.scheduler.schedule())
    first = rig.scheduler.schedule()
    assert rig.scheduler.schedule(first).entries == ()
    assert young.phase is Phase.RUNNING
    assert rig.end(first) == [0, 1]
    assert shape(rig.scheduler.schedule()) == [(0, 1, None)]
    assert young.phase is Phase.WAITING


def test_a_draw_with_penalties_is_waited_for_by_all():
    rig = Rig()
    rig.add(3)
    rig.add(3, max_tokens=3, sampling=SamplingParams(presence_penalty=0.5))
    rig.end(rig.scheduler.schedule())
    first = rig.scheduler.schedule()
    assert rig.scheduler.schedule(first).entries == ()
    rig.end(first)
    second = rig.scheduler.schedule()
    assert shape(rig.scheduler.schedule(second)) == [(0, 1, 0)], "now it draws its last"


def test_newcomers_are_admitted_ahead_too():
    rig = Rig()
    rig.add(3)
    rig.end(rig.scheduler.schedule())
    first = rig.scheduler.schedule()
    rig.add(4)
    assert shape(rig.scheduler.schedule(first)) == [(0, 1, 0), (1, 4, None)]


def test_steps_that_are_abandoned_give_all_blocks_back():
    rig = Rig()
    job = rig.add(7)
    rig.end(rig.scheduler.schedule())
    first = rig.scheduler.schedule()
    second = rig.scheduler.schedule(first)
    for step in (first, second):
        rig.scheduler.abandon(step)
    rig.scheduler.end(job)
    assert rig.pool.owned_blocks == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 15), st.integers(1, 6), st.integers(0, 20))
def test_whatever_happens_every_request_gets_its_tokens_once_as_without_running_ahead(
    seed: int, num_requests: int, max_batch: int, more_tokens: int
):
    draw = random.Random(seed)
    rig = Rig(num_blocks=14, max_step_tokens=max_batch + more_tokens, max_batch=max_batch)
    outputs: dict[DecodeJob, list[int]] = {}
    in_flight: DecodeStep | None = None
    while num_requests or not all(job.has_ended for job in outputs):
        if num_requests and (draw.random() < 0.3 or all(job.has_ended for job in outputs)):
            num_requests -= 1
            penalty = draw.choice((0.0, 0.0, 0.0, 0.5))
            job = rig.add(draw.randint(1, 40), draw.randint(1, 16), SamplingParams(presence_penalty=penalty))
            outputs[job] = []
        running, in_flight = in_flight or rig.scheduler.schedule(), None
        if draw.random() < 0.8:
            in_flight = rig.scheduler.schedule(running)
            assert len(in_flight.entries) <= max_batch
            assert len({entry.job for entry in in_flight.entries}) == len(in_flight.entries)
            if not in_flight.entries:
                in_flight = None
        if draw.random() < 0.05 and outputs:
            rig.scheduler.end(draw.choice(list(outputs)))
        token = STOP if draw.random() < 0.1 else 7
        drawn = [None if entry.step.draw is None else SampledToken(token) for entry in running.entries]
        for one in rig.scheduler.complete(running, drawn):
            assert one.index == len(outputs[one.job])
            outputs[one.job].append(token)
        rig.pool.check_integrity()
    if in_flight is not None:
        rig.end(in_flight)
    assert rig.pool.owned_blocks == 0
    for job, tokens in outputs.items():
        assert job.sequence.token_ids == [*job.request.token_ids, *tokens]
        assert job.sequence.num_output_tokens <= job.request.max_tokens
