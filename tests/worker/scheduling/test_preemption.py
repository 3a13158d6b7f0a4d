"""KV of preempted requests: dropped or swapped by setting, room and cost; copies, and blocks released on every path."""

import asyncio

import pytest

from tests.worker.scheduling.scheduler_rig import BLOCK, TOKEN, HostMemory, Rig
from tests.worker.worker_rig import Rig as WorkerRig
from tests.worker.worker_rig import a_request, play
from twostroke.decode_worker.config import DecodeConfig
from twostroke.model.step import BlockCopy
from twostroke.worker.config import PreemptionMode
from twostroke.worker.scheduling.job import Phase, WorkerJob
from twostroke.worker.scheduling.scheduler import ScheduledStep, Swapping


def a_job(rig: Rig, num_computed: int) -> WorkerJob:
    job: WorkerJob = rig.add(41, 5)
    job.sequence.reserve(rig.pool, 41)
    job.sequence.num_computed = num_computed
    return job


@pytest.mark.parametrize(
    ("mode", "num_tokens", "host_blocks", "expected"),
    [
        ("recompute", 40, 50, False),
        ("swap", 40, 50, True),
        ("swap", 40, 10, True),
        ("swap", 40, 9, False),
        ("swap", 0, 50, False),
        ("auto", 40, 9, False),
    ],
)
def test_a_request_is_swapped_where_that_is_wanted_and_host_memory_has_room(
    mode: PreemptionMode, num_tokens: int, host_blocks: int, expected: bool
):
    swapping = Swapping(HostMemory(host_blocks), mode, BLOCK)
    assert (swapping.swap_out(a_job(Rig(), num_tokens)) is not None) is expected


@pytest.mark.parametrize(
    ("computed", "copied_bytes", "expected"),
    [
        ([], 0, False),  # nothing is known: computing it makes that known
        ([], 10**6, False),
        ([(400, 1.0)], 0, True),  # and so does copying
        ([(400, 1.0)], 300_000, True),  # 0.1 s against 2 x 10 blocks x 1000 bytes / 300,000 = 0.067 s
        ([(400, 1.0)], 100_000, False),  # 0.2 s
        ([(100, 0.5), (700, 0.5)], 300_000, False),  # 0.05 s, in all steps together
    ],
)
def test_auto_takes_what_costs_less(computed: list[tuple[int, float]], copied_bytes: int, expected: bool):
    memory = HostMemory(50, block_bytes=1000, num_bytes=copied_bytes, seconds=1.0 if copied_bytes else 0.0)
    swapping = Swapping(memory, "auto", BLOCK)
    for step in computed:
        swapping.step_ended(*step)
    assert (swapping.swap_out(a_job(Rig(), 40)) is not None) is expected


@pytest.mark.parametrize("settings", [{"swap_gib": -1.0}, {"preemption": "swap"}])
def test_settings_that_can_not_be_are_refused(settings):
    with pytest.raises(ValueError, match="swap_gib"):
        DecodeConfig(**settings)


def swap_out(rig: Rig) -> tuple[WorkerJob, WorkerJob, ScheduledStep]:
    """An old and a young job, and the step that takes the young one's blocks."""
    old, young = rig.add(7, 5), rig.add(7, 8)
    rig.run()
    rig.run()
    return old, young, rig.schedule()


def test_where_blocks_run_out_the_youngest_is_copied_out_before_anything_else():
    rig = Rig(num_blocks=4, swap_blocks=8)
    old, young, step = swap_out(rig)
    assert (step.entries, young.phase) == ((), Phase.WAITING)
    (swap,) = step.swaps
    assert swap.copy == BlockCopy(True, tuple(young.sequence.block_ids), (0, 1))
    assert rig.pool.free_blocks == 0, "they are still being read"
    assert rig.scheduler.schedule(step).is_empty, "nothing runs ahead of that"
    rig.end(step)
    assert young.sequence.block_ids == []
    assert rig.run() == [(old, 1)]
    assert (rig.scheduler.num_preemptions, rig.swapping.num_swaps) == (1, 1)


def test_only_what_is_not_cached_is_copied_back_and_the_request_goes_on_where_it_was():
    rig = Rig(num_blocks=4, swap_blocks=8)
    old, young, step = swap_out(rig)
    rig.end(step)
    assert rig.num_tokens_to_compute() == 1, "nothing but its last token is to be computed"
    while not old.has_ended:
        rig.run()
    step = rig.schedule()
    (swap,) = step.swaps
    assert (swap.job, swap.copy.is_out, swap.copy.host_blocks) == (young, False, (1,)), "the first is still cached"
    assert swap.copy.cache_blocks == tuple(young.sequence.block_ids[1:2])
    (entry,) = step.entries
    assert (entry.job, entry.step.start, list(entry.step.token_ids)) == (young, 8, [TOKEN.token_id])
    assert rig.swapping.pool.owned_blocks == 2, "they are still being read"
    rig.end(step)
    assert rig.swapping.pool.owned_blocks == 0
    assert young.swapped is None
    while not young.has_ended:
        rig.run()
    assert young.sequence.num_output_tokens == 8
    assert rig.pool.owned_blocks == 0


def test_one_whose_whole_prefix_is_cached_needs_no_copy():
    rig, swapping = Rig(), Swapping(HostMemory(8), "swap", BLOCK)
    job = a_job(rig, 8)
    assert swapping.swap_out(job) is not None
    assert swapping.pool.owned_blocks == 2
    assert swapping.swap_in(job, rig.pool) is None
    assert swapping.pool.owned_blocks == 0


def test_without_room_in_host_memory_it_is_computed_again():
    rig = Rig(num_blocks=4, swap_blocks=1)
    old, young, step = swap_out(rig)
    assert [entry.job for entry in step.entries] == [old]
    assert young.swapped is None
    assert (rig.scheduler.num_preemptions, rig.swapping.num_swaps) == (1, 0)


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
        for request in requests:
            assert await rig.is_right(request, None)
        stats = rig.worker.stats()
        assert stats.preemptions > 0
        assert (stats.swaps > 0) == (stats.swap_bytes > 0) == (stats.swap_seconds > 0) == ("swap_blocks" in config)
        if config.get("preemption") == "swap" and config["swap_blocks"] == 40:
            assert stats.swaps == stats.preemptions
            assert stats.computed_tokens <= sum(len(request.token_ids) for request in requests), "none twice"

    play(script, role="decode", num_blocks=10, **config)


def test_kv_that_is_still_to_be_copied_from_another_is_not_kept() -> None:
    rig = Rig(swap_blocks=8)
    rig.cache(10)
    job = rig.add(10, 5, first=0)
    job.sequence.match_prefix(rig.pool)
    job.sequence.reserve(rig.pool, job.sequence.num_uncomputed)
    assert job.sequence.match_tail(rig.pool) == 1
    assert rig.swapping.swap_out(job) is None
