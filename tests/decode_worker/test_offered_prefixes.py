"""The decode scheduler with prompts whose beginning another worker offers: what is taken and given up, and when."""

import pytest

from tests.decode_worker.budgets import step_budget
from twostroke.decode_worker.jobs import DecodeJob, DecodeStep, Phase
from twostroke.decode_worker.preemption import PreemptionPolicy, SwappedBlocks
from twostroke.decode_worker.scheduler import DecodeScheduler
from twostroke.decode_worker.standings import OfferedPrefixes
from twostroke.protocol.requests import GenerateRequest, Promise, SampledToken, SamplingParams
from twostroke.worker.block_pool import BlockPool

BLOCK = 4
TOKEN = SampledToken(7)


class Rig:
    """A scheduler with its pool, and an engine that always draws the same token."""

    def __init__(
        self, num_blocks: int = 64, *, max_batch: int = 8, min_pull_tokens: int = 1, watermark_blocks: int = 0
    ):
        self.pool = BlockPool(num_blocks, BLOCK)
        self.scheduler = DecodeScheduler(
            self.pool,
            budget=step_budget(16),
            max_batch=max_batch,
            watermark_blocks=watermark_blocks,
            max_context=200,
            max_waiting=1024,
            swapped=SwappedBlocks(None, PreemptionPolicy("recompute", block_bytes=1)),
            min_pull_tokens=min_pull_tokens,
        )

    @property
    def prefixes(self) -> OfferedPrefixes:
        return self.scheduler.prefixes

    def add(
        self, length: int, first: int = 0, *, awaits_offer: bool = True, max_tokens: int = 2, **fields: object
    ) -> DecodeJob:
        request = GenerateRequest(
            request_id=f"{first}+{length}",
            router_id="router-0",
            token_ids=tuple(range(first, first + length)),
            num_prompt_tokens=length,
            sampling=SamplingParams(),
            max_tokens=max_tokens,
            **fields,  # type: ignore[arg-type]
        )
        return self.scheduler.add(request, now=0.0, wants_transfer=False, awaits_offer=awaits_offer)

    def end(self, step: DecodeStep) -> None:
        self.scheduler.complete(step, [TOKEN if entry.step.draw is not None else None for entry in step.entries])
        self.pool.check_integrity()

    def run(self) -> list[tuple[DecodeJob, int]]:
        """Run a step; each job in it with its tokens."""
        step = self.scheduler.schedule()
        self.end(step)
        return [(entry.job, len(entry.step.token_ids)) for entry in step.entries]

    def cache(self, length: int) -> None:
        """Have the first whole blocks of so many tokens in the cache."""
        job = self.add(length, awaits_offer=False, max_tokens=1)
        while not job.has_ended:
            self.run()


def test_a_prompt_that_awaits_an_offer_holds_nothing_and_holds_nobody_up() -> None:
    rig = Rig()
    job = rig.add(20)
    other = rig.add(3, 100, awaits_offer=False)
    assert rig.run() == [(other, 3)]
    assert job.sequence.block_ids == []
    assert rig.scheduler.num_waiting == 1
    rig.prefixes.not_offered(job)
    assert rig.run() == [(other, 1), (job, 15)]


def test_an_offered_beginning_is_pulled_and_the_rest_is_computed() -> None:
    rig = Rig()
    job = rig.add(20)
    rig.prefixes.offered(job, 13)
    assert rig.scheduler.num_waiting_tokens == 20
    step = rig.scheduler.schedule()
    assert (step.entries, step.reserved, job.phase) == ((), (job,), Phase.TRANSFERRING)
    assert (len(job.sequence.block_ids), rig.scheduler.num_waiting, rig.scheduler.num_waiting_tokens) == (5, 1, 7)
    assert rig.run() == [], "nothing is computed of it meanwhile"
    assert rig.prefixes.pulled(job) == 13
    assert rig.pool.lookup(job.sequence.block_hashes) == 3, "others find it before the next step has ended"
    assert rig.run() == [(job, 7)]
    assert job.num_cached_tokens == 13
    assert rig.run() == [(job, 1)]
    assert rig.pool.lookup(job.sequence.block_hashes) == 5, "what was pulled is named, like what was computed"


def test_what_is_cached_here_is_not_pulled() -> None:
    rig = Rig()
    rig.cache(10)
    job = rig.add(20)
    rig.prefixes.offered(job, 16)
    assert rig.scheduler.reserve_offered() == (job,)
    assert job.sequence.num_computed == 8
    assert rig.prefixes.pulled(job) == 8
    assert (rig.scheduler.prefix_hits, job.num_cached_tokens) == (8, 16)


@pytest.mark.parametrize(("offered", "is_taken"), [(12, True), (11, False), (8, False), (20, False), (0, False)])
def test_an_offer_is_taken_where_it_spares_enough_and_leaves_a_token_to_compute(offered: int, is_taken: bool) -> None:
    rig = Rig(min_pull_tokens=4)
    rig.cache(10)
    job = rig.add(20)
    rig.prefixes.offered(job, offered)
    step = rig.scheduler.schedule()
    assert step.reserved == ((job,) if is_taken else ())
    assert rig.prefixes.take_declined() == ([] if is_taken or not offered else [job])
    assert rig.prefixes.take_declined() == []
    assert [len(entry.step.token_ids) for entry in step.entries] == ([] if is_taken else [12])
    rig.end(step)
    assert (job.phase is Phase.TRANSFERRING) is is_taken


def test_an_offer_that_is_not_worth_it_is_declined_although_a_step_is_under_way() -> None:
    rig = Rig(min_pull_tokens=16)
    busy = rig.add(30, 100, awaits_offer=False)
    step = rig.scheduler.schedule()
    job = rig.add(20)
    rig.prefixes.offered(job, 15)
    assert rig.scheduler.reserve_offered() == ()
    assert rig.prefixes.take_declined() == [job]
    rig.end(step)
    assert rig.run() == [(busy, 14), (job, 2)]


def test_after_a_failed_pull_all_is_computed_in_the_blocks_that_were_reserved() -> None:
    rig = Rig()
    job = rig.add(12)
    rig.prefixes.offered(job, 8)
    rig.scheduler.schedule()
    blocks = list(job.sequence.block_ids)
    rig.prefixes.pull_failed(job)
    assert rig.run() == [(job, 12)]
    assert rig.pool.match(job.sequence.block_hashes) == blocks


def test_a_pull_begins_although_a_step_is_under_way_or_its_batch_is_full() -> None:
    rig = Rig(max_batch=1)
    busy = rig.add(30, awaits_offer=False)
    step = rig.scheduler.schedule()
    job, late = rig.add(20, 100), rig.add(20, 150)
    rig.prefixes.offered(job, 16)
    assert rig.scheduler.reserve_offered() == (job,)
    rig.end(step)
    rig.prefixes.offered(late, 16)
    step = rig.scheduler.schedule()
    assert (step.reserved, [entry.job for entry in step.entries]) == ((late,), [busy])


def test_nobody_with_an_offer_overtakes_one_that_has_none() -> None:
    rig = Rig(max_batch=1)
    rig.add(30, awaits_offer=False)
    step = rig.scheduler.schedule()
    rig.add(4, 100, awaits_offer=False)
    job = rig.add(20, 150)
    rig.prefixes.offered(job, 16)
    assert rig.scheduler.reserve_offered() == ()
    rig.end(step)
    assert rig.scheduler.schedule().reserved == ()


@pytest.mark.parametrize("watermark_blocks", [0, 2])
def test_where_blocks_are_short_every_offer_that_waits_is_given_up(watermark_blocks: int) -> None:
    rig = Rig(num_blocks=8 + watermark_blocks, watermark_blocks=watermark_blocks)
    first = rig.add(13, awaits_offer=False, max_tokens=3)
    rig.run()
    large, small = rig.add(24, 100), rig.add(8, 150)
    rig.prefixes.offered(small, 4)
    rig.prefixes.offered(large, 8)
    assert rig.run() == [(first, 1)]
    assert rig.prefixes.take_declined() == [large, small], "the large one's turn came first"
    rig.run()
    assert rig.run() == [(large, 16)]


def test_an_offered_request_of_a_higher_class_gets_blocks_of_lower_ones() -> None:
    rig = Rig(num_blocks=4, max_batch=1)
    low = rig.add(13, awaits_offer=False, promise=Promise("low", 0))
    rig.run()
    high = rig.add(13, 100, promise=Promise("high", 1))
    rig.prefixes.offered(high, 8)
    assert rig.scheduler.schedule().reserved == (high,)
    assert low.phase is Phase.WAITING
    assert rig.prefixes.pulled(high) == 8
    assert rig.run() == [(high, 5)]


def test_a_pull_gets_blocks_of_lower_classes_although_the_batch_has_no_place_for_its_request_yet() -> None:
    rig = Rig(num_blocks=7, max_batch=1)
    low = rig.add(9, awaits_offer=False, max_tokens=8, promise=Promise("low", 0))
    rig.run()
    first = rig.add(9, 100, awaits_offer=False, max_tokens=3, promise=Promise("high", 1))
    rig.run()
    high = rig.add(9, 200, promise=Promise("high", 1))
    rig.prefixes.offered(high, 8)
    step = rig.scheduler.schedule()
    assert ([entry.job for entry in step.entries], step.reserved) == ([first], (high,))
    assert low.phase is Phase.WAITING


def test_one_that_gives_way_after_its_pull_is_computed_like_any_other() -> None:
    rig = Rig(num_blocks=4)
    old = rig.add(4, awaits_offer=False, max_tokens=8)
    rig.run()
    job = rig.add(8, 100, max_tokens=8)
    rig.prefixes.offered(job, 4)
    rig.scheduler.reserve_offered()
    rig.prefixes.pulled(job)
    while job.num_preemptions == 0:
        rig.run()
    assert (job.phase, job.offered_tokens, job.has_kv_coming) == (Phase.WAITING, 0, False)
    while not (old.has_ended and job.has_ended):
        rig.run()
    assert rig.prefixes.take_declined() == []
    assert job.num_cached_tokens == 4, "that of its first admission"


@pytest.mark.parametrize("when", ["awaiting an offer", "offered", "pulling"])
def test_a_prompt_that_ends_before_it_is_computed_frees_its_blocks_once_nothing_writes_into_them(when: str) -> None:
    rig = Rig(num_blocks=8)
    job = rig.add(12)
    if when != "awaiting an offer":
        rig.prefixes.offered(job, 8)
    if when == "pulling":
        rig.scheduler.reserve_offered()
    rig.scheduler.end(job)
    assert rig.pool.owned_blocks == (3 if when == "pulling" else 0)
    if when == "pulling":
        assert rig.prefixes.pulled(job) == 0
    assert rig.pool.owned_blocks == rig.pool.lookup(job.sequence.block_hashes) == 0
    assert rig.run() == []
