"""Requests whose KV goes to host memory and comes back: what is copied when, and blocks that go back on every path."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decode_worker.budgets import step_budget
from tests.simulation.fake_model import expected_tokens
from tests.simulation.worker_rig import LAYERS, a_request, begin, play
from tests.simulation.worker_rig import Rig as WorkerRig
from twostroke.decode_worker.jobs import DecodeJob, DecodeStep, Phase
from twostroke.decode_worker.preemption import PreemptionPolicy, SwappedBlocks
from twostroke.decode_worker.scheduler import DecodeScheduler
from twostroke.model.step import BlockCopy
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.requests import GenerateRequest, SampledToken, SamplingParams
from twostroke.worker.block_pool import BlockPool

BLOCK = 4
TOKEN = SampledToken(7)


class Rig:
    """A scheduler over 4 blocks by default, with host memory beside them."""

    def __init__(self, num_blocks: int = 4, swap_blocks: int = 8, max_batch: int = 8):
        self.pool = BlockPool(num_blocks, BLOCK)
        self.host = BlockPool(swap_blocks, BLOCK)
        self.scheduler = DecodeScheduler(
            self.pool,
            budget=step_budget(16),
            max_batch=max_batch,
            watermark_blocks=0,
            max_context=200,
            max_waiting=1024,
            swapped=SwappedBlocks(self.host, PreemptionPolicy("swap", block_bytes=1)),
        )

    def add(self, length: int, max_tokens: int, first: int = 0) -> DecodeJob:
        request = GenerateRequest(
            request_id=f"{first}",
            router_id="router-0",
            token_ids=tuple(range(first, first + length)),
            num_prompt_tokens=length,
            sampling=SamplingParams(),
            max_tokens=max_tokens,
        )
        return self.scheduler.add(request, wants_transfer=False, now=0.0)

    def end(self, step: DecodeStep) -> None:
        drawn = [TOKEN if entry.step.draw is not None else None for entry in step.entries]
        self.scheduler.complete(step, drawn)
        self.pool.check_integrity()
        self.host.check_integrity()

    def run(self) -> DecodeStep:
        step = self.scheduler.schedule()
        self.end(step)
        return step

    def swap_out(self) -> tuple[DecodeJob, DecodeJob, DecodeStep]:
        """An old and a young job, and the step that takes the young one's blocks."""
        old, young = self.add(7, 5), self.add(7, 8, first=50)
        self.run()
        self.run()
        return old, young, self.scheduler.schedule()


def test_where_blocks_run_out_the_youngest_is_copied_out_before_anything_else():
    rig = Rig()
    old, young, step = rig.swap_out()
    assert (step.entries, young.phase) == ((), Phase.WAITING)
    (swap,) = step.swaps
    assert swap.copy == BlockCopy(True, tuple(young.sequence.block_ids), (0, 1))
    assert rig.pool.free_blocks == 0, "they are still being read"
    assert rig.scheduler.schedule(step).is_empty, "nothing runs ahead of that"
    rig.end(step)
    assert young.sequence.block_ids == []
    assert [entry.job for entry in rig.run().entries] == [old]
    assert (rig.scheduler.preemptions, rig.scheduler.swaps) == (1, 1)


def test_only_what_is_not_cached_comes_back_and_the_request_goes_on_where_it_was():
    rig = Rig()
    old, young, step = rig.swap_out()
    rig.end(step)
    assert rig.scheduler.num_waiting_tokens == 1, "nothing but its last token is to be computed"
    while not old.has_ended:
        rig.run()
    step = rig.scheduler.schedule()
    (swap,) = step.swaps
    assert (swap.job, swap.copy.is_out, swap.copy.host_blocks) == (young, False, (1,)), "the first is still cached"
    assert swap.copy.cache_blocks == tuple(young.sequence.block_ids[1:2])
    (entry,) = step.entries
    assert (entry.job, entry.step.start, list(entry.step.token_ids)) == (young, 8, [TOKEN.token_id])
    assert rig.host.owned_blocks == 2, "they are still being read"
    rig.end(step)
    assert rig.host.owned_blocks == 0
    assert young.swapped is None
    while not young.has_ended:
        rig.run()
    assert young.sequence.num_output_tokens == 8
    assert rig.pool.owned_blocks == 0


def test_one_whose_whole_prefix_is_cached_needs_no_copy():
    rig, swapped = Rig(), SwappedBlocks(BlockPool(8, BLOCK), PreemptionPolicy("swap", block_bytes=1))
    job = rig.add(9, 5)
    job.sequence.reserve(rig.pool, 9)
    job.sequence.num_computed = 8
    assert swapped.swap_out(job) is not None
    assert swapped.owned_blocks == 2
    assert swapped.swap_in(job) is None
    assert swapped.owned_blocks == 0


def test_without_room_in_host_memory_it_is_computed_again():
    rig = Rig(swap_blocks=1)
    old, young, step = rig.swap_out()
    assert [entry.job for entry in step.entries] == [old]
    assert young.swapped is None
    assert (rig.scheduler.preemptions, rig.scheduler.swaps) == (1, 0)


@pytest.mark.parametrize("when", ["while it is copied out", "while it waits", "while it is copied in"])
def test_a_request_that_ends_gives_all_blocks_back_once_nothing_is_copied(when: str):
    rig = Rig()
    old, young, step = rig.swap_out()
    if when != "while it is copied out":
        rig.end(step)
    if when == "while it is copied in":
        while not (step := rig.scheduler.schedule()).swaps:
            rig.end(step)
    rig.scheduler.end(young)
    assert (rig.host.owned_blocks > 0) == (when != "while it waits")
    rig.scheduler.end(old)
    if when != "while it waits":
        rig.end(step)
    assert rig.pool.owned_blocks == rig.host.owned_blocks == 0


@pytest.mark.parametrize("when", ["out", "in"])
def test_a_copy_that_is_abandoned_leaves_nothing(when: str):
    rig = Rig()
    old, young, step = rig.swap_out()
    if when == "in":
        rig.end(step)
        while not (step := rig.scheduler.schedule()).swaps:
            rig.end(step)
    rig.scheduler.abandon(step)
    for job in (old, young):
        rig.scheduler.end(job)
    assert rig.pool.owned_blocks == rig.host.owned_blocks == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 15), st.integers(1, 6), st.integers(1, 20))
def test_whatever_happens_both_memories_are_accounted_for(
    seed: int, num_requests: int, max_batch: int, swap_blocks: int
):
    draw = random.Random(seed)
    rig = Rig(num_blocks=14, swap_blocks=swap_blocks, max_batch=max_batch)
    jobs: list[DecodeJob] = []
    in_flight: DecodeStep | None = None
    while num_requests or not all(job.has_ended for job in jobs):
        if num_requests and (draw.random() < 0.3 or all(job.has_ended for job in jobs)):
            num_requests -= 1
            jobs.append(rig.add(draw.randint(1, 30), draw.randint(1, 20), first=draw.choice((0, 100))))
        running, in_flight = in_flight or rig.scheduler.schedule(), None
        if draw.random() < 0.5 and (ahead := rig.scheduler.schedule(running)) and not ahead.is_empty:
            in_flight = ahead
        if draw.random() < 0.05:
            rig.scheduler.end(draw.choice(jobs))
        rig.end(running)
    if in_flight is not None:
        rig.end(in_flight)
    assert rig.pool.owned_blocks == rig.host.owned_blocks == rig.scheduler.num_waiting_tokens == 0


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"preemption": "swap", "swap_gib": 1.0, "swap_blocks": 40},
        {"preemption": "swap", "swap_gib": 1.0, "swap_blocks": 7},
        {"preemption": "auto", "swap_gib": 1.0, "swap_blocks": 40},
    ],
    ids=["recompute", "swap", "little swap", "auto"],
)
def test_a_tiny_cache_serves_many_requests_with_the_same_tokens(config):
    async def script(rig: WorkerRig) -> None:
        requests = [a_request(3 + i, f"{i}", max_tokens=25) for i in range(12)]
        await asyncio.gather(*(rig.worker.decode(request, None) for request in requests))
        await asyncio.sleep(0.1)
        for request in requests:
            assert rig.events()[request.request_id] == list(enumerate(expected_tokens(request, LAYERS)))
        stats = rig.worker.stats()
        assert stats.preemptions > 0
        assert (stats.swaps > 0) == (stats.swap_bytes > 0) == (stats.swap_seconds > 0) == ("swap_blocks" in config)
        if config.get("preemption") == "swap" and config["swap_blocks"] == 40:
            assert stats.swaps == stats.preemptions
            assert stats.computed_tokens <= sum(len(request.token_ids) for request in requests), "none twice"

    play(script, role="decode", num_blocks=10, **config)


@pytest.mark.parametrize("how", ["stops", "dies", "is left"])
def test_nothing_of_swapped_requests_is_left_when_the_worker(how: str):
    async def script(rig: WorkerRig) -> None:
        calls = [begin(rig.worker.decode(a_request(3 + i, f"{i}", max_tokens=25), None)) for i in range(12)]
        for _ in range(1000):
            if rig.worker.stats().swapped_blocks:
                break
            await asyncio.sleep(0.001)
        match how:
            case "stops":
                await rig.worker.stop()
            case "dies":
                rig.engine.fail_at_step = rig.engine.num_steps + 1
            case "is left":
                for call in calls:
                    call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(outcome, WorkerLost | asyncio.CancelledError) for outcome in outcomes)
        await asyncio.sleep(0.1)
        assert rig.worker.stats().swapped_blocks == rig.pool.owned_blocks == 0

    play(script, role="decode", num_blocks=10, swap_blocks=40, preemption="swap", swap_gib=1.0)
