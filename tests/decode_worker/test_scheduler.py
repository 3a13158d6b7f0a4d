"""The decode scheduler: who steps, who waits, who gives way, and blocks that come back on every path."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode_worker.budgets import step_budget
from twostroke.decode_worker.jobs import DecodeJob, DecodeStep, Phase, Progress
from twostroke.decode_worker.preemption import PreemptionPolicy, SwappedBlocks
from twostroke.decode_worker.scheduler import DecodeScheduler
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest, SampledToken, SamplingParams
from twostroke.worker.block_pool import BlockPool

BLOCK = 4
TOKEN = SampledToken(7)


def request(length: int, max_tokens: int = 5, first: int = 0, **fields) -> GenerateRequest:
    tokens = tuple(range(first, first + length))
    return GenerateRequest(
        request_id=f"{first}+{length}",
        router_id="router-0",
        token_ids=tokens,
        num_prompt_tokens=length,
        sampling=SamplingParams(),
        max_tokens=max_tokens,
        **fields,
    )


class Rig:
    """A scheduler with its pool, and an engine that always draws the same token."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_step_tokens: int = 16,
        max_batch: int = 8,
        watermark_blocks: int = 0,
        max_waiting: int = 1024,
    ):
        self.pool = BlockPool(num_blocks, BLOCK)
        self.scheduler = DecodeScheduler(
            self.pool,
            budget=step_budget(max_step_tokens),
            max_batch=max_batch,
            watermark_blocks=watermark_blocks,
            max_context=200,
            max_waiting=max_waiting,
            swapped=SwappedBlocks(None, PreemptionPolicy("recompute", block_bytes=1)),
        )

    def add(self, length: int, max_tokens: int = 5, first: int = 0, *, transfer: bool = False, **fields) -> DecodeJob:
        job = self.scheduler.add(request(length, max_tokens, first, **fields), wants_transfer=transfer, now=0.0)
        if transfer:
            self.scheduler.offered(job)
        return job

    def run(self) -> tuple[DecodeStep, list[Progress]]:
        step = self.scheduler.schedule()
        return step, self.finish(step)

    def finish(self, step: DecodeStep) -> list[Progress]:
        drawn = [TOKEN if entry.step.draw is not None else None for entry in step.entries]
        progress = self.scheduler.complete(step, drawn)
        self.pool.check_integrity()
        return progress

    def shape(self) -> list[tuple[int, int]]:
        """Run a step; (arrival, tokens) of each entry."""
        step, _ = self.run()
        return [(entry.job.arrival, len(entry.step.token_ids)) for entry in step.entries]


def test_a_request_computes_its_prompt_then_decodes_one_token_a_step_to_its_end():
    rig = Rig()
    rig.add(6, max_tokens=3)
    assert [rig.shape() for _ in range(4)] == [[(0, 6)], [(0, 1)], [(0, 1)], []]
    assert rig.pool.owned_blocks == 0


def test_every_token_is_told_once_with_its_index_and_the_last_with_its_reason():
    rig = Rig()
    rig.add(6, max_tokens=3)
    told = [(one.index, one.finish_reason) for _ in range(3) for one in rig.run()[1]]
    assert told == [(0, None), (1, None), (2, "length")]


def test_a_resumed_request_goes_on_with_the_next_index():
    rig = Rig()
    rig.scheduler.add(
        GenerateRequest(
            request_id="resumed",
            router_id="router-0",
            token_ids=(1, 2, 3, 4, 5),
            num_prompt_tokens=3,
            sampling=SamplingParams(),
            max_tokens=4,
        ),
        wants_transfer=False,
        now=0.0,
    )
    told = [(one.index, one.finish_reason) for _ in range(2) for one in rig.run()[1]]
    assert told == [(2, None), (3, "length")]


def test_running_decodes_come_first_and_prompts_take_what_is_left_of_the_budget():
    rig = Rig(max_step_tokens=8)
    rig.add(4, max_tokens=20)
    rig.run()
    rig.add(20, first=50)
    assert [rig.shape() for _ in range(4)] == [
        [(0, 1), (1, 7)],
        [(0, 1), (1, 7)],
        [(0, 1), (1, 6)],
        [(0, 1), (1, 1)],
    ]


def test_a_full_batch_admits_nobody():
    rig = Rig(max_batch=2)
    for first in (0, 50, 100):
        rig.add(2, max_tokens=2, first=first)
    assert rig.shape() == [(0, 2), (1, 2)]
    assert rig.shape() == [(0, 1), (1, 1)]
    assert rig.shape() == [(2, 2)]


def test_a_request_with_a_transfer_reserves_its_prompt_and_joins_once_verified():
    rig = Rig()
    job = rig.add(10, max_tokens=3, transfer=True)
    step, _ = rig.run()
    assert step.reserved == (job,)
    assert step.entries == ()
    assert len(job.sequence.block_ids) == 3
    first = rig.scheduler.verified(job, TOKEN)
    assert first == Progress(job, 0, TOKEN, None)
    assert rig.shape() == [(0, 1)]
    assert rig.pool.lookup(job.sequence.block_hashes) == 2


def test_a_request_that_is_not_offered_yet_reserves_nothing_and_holds_nobody_up():
    rig = Rig()
    job = rig.scheduler.add(request(10), wants_transfer=True, now=0.0)
    rig.add(3, max_tokens=1, first=50)
    assert rig.shape() == [(1, 3)]
    assert job.phase is Phase.WAITING
    assert rig.pool.owned_blocks == 0
    rig.scheduler.offered(job)
    step, _ = rig.run()
    assert step.reserved == (job,)
    rig.scheduler.transfer_failed(job)


def test_an_offered_request_reserves_its_blocks_while_a_step_is_under_way():
    rig = Rig()
    rig.add(6, max_tokens=3)
    step = rig.scheduler.schedule()
    job = rig.add(10, first=50, transfer=True)
    assert rig.scheduler.reserve_offered() == (job,)
    assert job.phase is Phase.TRANSFERRING
    rig.finish(step)
    rig.scheduler.verified(job, TOKEN)
    assert rig.shape() == [(0, 1), (1, 1)]


def test_an_offered_request_does_not_overtake_one_that_is_to_be_computed_here():
    rig = Rig(max_batch=1)
    rig.add(6, max_tokens=3)
    step = rig.scheduler.schedule()
    local = rig.add(10, first=50)
    job = rig.add(10, first=100, transfer=True)
    assert rig.scheduler.reserve_offered() == ()
    rig.finish(step)
    rig.scheduler.end(local)
    assert rig.scheduler.reserve_offered() == (job,)
    rig.scheduler.transfer_failed(job)


def test_a_prefix_that_is_here_already_needs_no_transfer():
    rig = Rig()
    rig.add(10, max_tokens=1)
    rig.run()
    job = rig.add(10, transfer=True)
    rig.run()
    assert job.sequence.num_computed == job.num_cached_tokens == 8
    assert len(job.sequence.block_ids) == 3


def test_a_first_token_that_ends_the_request_frees_it_at_once():
    rig = Rig()
    job = rig.add(10, max_tokens=1, transfer=True)
    rig.run()
    assert rig.scheduler.verified(job, TOKEN) == Progress(job, 0, TOKEN, "length")
    assert rig.pool.owned_blocks == 0


def test_after_a_failed_transfer_the_prompt_is_computed_here_before_later_requests():
    rig = Rig(max_step_tokens=10, max_batch=1)
    job = rig.add(10, max_tokens=1, transfer=True)
    rig.add(3, max_tokens=1, first=50)
    assert rig.shape() == [(1, 3)]
    rig.add(4, max_tokens=1, first=100)
    rig.scheduler.transfer_failed(job)
    assert rig.pool.owned_blocks == 0
    assert [rig.shape() for _ in range(2)] == [[(0, 10)], [(2, 4)]]


def test_a_transfer_that_will_not_come_is_forgotten_before_it_began():
    rig = Rig()
    job = rig.add(10, transfer=True)
    rig.scheduler.compute_here(job)
    assert rig.shape() == [(0, 10)]


def test_without_free_blocks_the_youngest_gives_way_and_is_computed_again():
    rig = Rig(num_blocks=4, max_step_tokens=16)
    rig.add(7, max_tokens=5)
    young = rig.add(7, max_tokens=8, first=50)
    assert rig.shape() == [(0, 7), (1, 7)]
    assert rig.shape() == [(0, 1), (1, 1)], "both fill their second block"
    assert rig.shape() == [(0, 1)], "no block for either: the older takes the younger's"
    assert young.phase is Phase.WAITING
    assert (rig.scheduler.preemptions, young.num_preemptions) == (1, 1)
    tokens_before = list(young.sequence.token_ids)
    for _ in range(2):
        assert rig.shape() == [(0, 1)]
    assert rig.shape() == [(1, 5)], "the first full block is still cached; only the rest is computed again"
    assert young.sequence.token_ids == [*tokens_before, TOKEN.token_id]
    while rig.scheduler.num_running:
        rig.run()
    assert young.sequence.num_output_tokens == 8
    assert rig.pool.owned_blocks == 0


def test_admission_leaves_the_watermark_free_unless_the_request_would_be_alone():
    rig = Rig(num_blocks=6, watermark_blocks=2)
    rig.add(20, max_tokens=2)
    assert rig.shape() == [(0, 16)], "alone, it may take five of six blocks"
    rig.add(4, max_tokens=2, first=50)
    assert rig.shape() == [(0, 4)], "one block is free, but it is not for newcomers"
    assert rig.shape() == [(0, 1)]
    assert rig.shape() == [(1, 4)]


def test_nobody_overtakes_a_request_that_waits_for_blocks():
    rig = Rig(num_blocks=6)
    rig.add(8, max_tokens=3)
    rig.run()
    rig.add(20, max_tokens=1, first=50, transfer=True)
    rig.add(4, max_tokens=1, first=100)
    assert rig.shape() == [(0, 1)]
    assert rig.shape() == [(0, 1)]
    step, _ = rig.run()
    assert [job.arrival for job in step.reserved] == [1]


@pytest.mark.parametrize("where", ["waiting", "transferring", "in a step"])
def test_an_ended_request_gives_its_blocks_back_as_soon_as_nothing_uses_them(where: str):
    rig = Rig()
    job = rig.add(10, transfer=where == "transferring")
    if where == "waiting":
        rig.scheduler.end(job)
    else:
        step = rig.scheduler.schedule()
        rig.scheduler.end(job)
        assert rig.pool.owned_blocks == 3
        if where == "transferring":
            assert rig.scheduler.verified(job, TOKEN) is None
        else:
            assert rig.finish(step) == []
    rig.scheduler.end(job)
    assert rig.pool.owned_blocks == 0
    assert rig.run()[0].entries == ()


def test_an_abandoned_step_gives_blocks_back_once_its_jobs_have_ended():
    rig = Rig()
    job = rig.add(10)
    rig.scheduler.abandon(rig.scheduler.schedule())
    rig.scheduler.end(job)
    assert rig.pool.owned_blocks == 0


@pytest.mark.parametrize(
    ("length", "max_tokens", "blocks"), [(0, 1, 64), (196, 5, 64), (10, 8, 4), (1, 1_000_000_000, 64)]
)
def test_a_request_that_can_never_run_to_its_end_is_refused(length: int, max_tokens: int, blocks: int):
    with pytest.raises(RequestError):
        Rig(num_blocks=blocks).add(length, max_tokens)


def test_a_request_too_many_is_refused_as_overload_until_the_queue_moves():
    rig = Rig(max_waiting=2)
    rig.add(4)
    rig.add(4, first=50)
    with pytest.raises(RequestError, match="wait here already") as refused:
        rig.add(4, first=100)
    assert (refused.value.status, refused.value.code) == (429, "overloaded")
    rig.run()
    rig.add(4, first=100)


def test_a_request_that_just_fits_runs_to_its_end_alone():
    rig = Rig(num_blocks=4)
    job = rig.add(10, max_tokens=7)
    while not job.has_ended:
        rig.run()
    assert job.sequence.num_output_tokens == 7


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 25), st.integers(1, 6), st.integers(0, 20), st.integers(0, 3))
def test_whatever_happens_blocks_are_accounted_for_and_every_request_gets_its_tokens_once(
    seed: int, num_requests: int, max_batch: int, more_tokens: int, watermark_blocks: int
):
    draw = random.Random(seed)
    rig = Rig(
        num_blocks=14,
        max_step_tokens=max_batch + more_tokens,
        max_batch=max_batch,
        watermark_blocks=watermark_blocks,
    )
    outputs: dict[DecodeJob, int] = {}
    receiving: list[DecodeJob] = []

    def note(progress: list[Progress]) -> None:
        for one in progress:
            assert one.index == outputs[one.job]
            outputs[one.job] += 1

    for _ in range(2000):
        if num_requests and (draw.random() < 0.3 or all(job.has_ended for job in outputs)):
            num_requests -= 1
            first = draw.choice((0, 0, 100))
            job = rig.add(draw.randint(1, 40), draw.randint(1, 16), first, transfer=draw.random() < 0.5)
            outputs[job] = 0
            job.is_offered = draw.random() < 0.5
            job.awaits_offer = not job.wants_transfer and draw.random() < 0.5
        step = rig.scheduler.schedule()
        assert sum(len(entry.step.token_ids) for entry in step.entries) <= max_batch + more_tokens
        assert len(step.entries) <= max_batch
        assert len({entry.job for entry in step.entries}) == len(step.entries)
        assert not any(entry.job.is_receiving or entry.job.awaits_offer for entry in step.entries)
        receiving.extend(step.reserved)
        if draw.random() < 0.3:
            receiving.extend(rig.scheduler.reserve_offered())
        if draw.random() < 0.05 and outputs:
            rig.scheduler.end(draw.choice(list(outputs)))
        if draw.random() < 0.3 and outputs:
            rig.scheduler.offered(draw.choice(list(outputs)))
        if draw.random() < 0.05 and outputs:
            rig.scheduler.compute_here(draw.choice(list(outputs)))
        for job in outputs:
            if job.awaits_offer and not job.has_ended and draw.random() < 0.3:
                if draw.random() < 0.3:
                    rig.scheduler.prefixes.not_offered(job)
                else:
                    rig.scheduler.prefixes.offered(job, draw.randint(1, 40))
        note(rig.finish(step))
        while receiving and draw.random() < 0.3:
            job = receiving.pop(draw.randrange(len(receiving)))
            fails = draw.random() < 0.3
            if not job.wants_transfer:
                (rig.scheduler.prefixes.pull_failed if fails else rig.scheduler.prefixes.pulled)(job)
            elif fails:
                rig.scheduler.transfer_failed(job)
            elif (first_token := rig.scheduler.verified(job, TOKEN)) is not None:
                note([first_token])
        if not num_requests and all(job.has_ended for job in outputs):
            break
    for job in receiving:
        (rig.scheduler.transfer_failed if job.wants_transfer else rig.scheduler.prefixes.pull_failed)(job)
    assert not any(job.is_receiving for job in rig.scheduler.prefixes.take_declined())
    assert all(job.has_ended for job in outputs)
    assert rig.pool.owned_blocks == 0
    assert rig.scheduler.num_waiting == rig.scheduler.num_running == rig.scheduler.num_waiting_tokens == 0
