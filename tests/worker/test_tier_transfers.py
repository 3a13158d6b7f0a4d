"""A worker's prompts from and to its KV tiers, on virtual time.

A wrong, missing or stale block gives a wrong token: the model is a hash over all KV.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.rigs.played import Script, played_by
from tests.worker.worker_rig import BLOCK, SECRET, Rig, a_moment, a_request, begin, running_worker, source_beside
from twostroke.protocol.requests import LogContext, Promise
from twostroke.protocol.stats import Role, TierStats
from twostroke.simulator.memory_blobs import MemoryBlobs
from twostroke.simulator.sim_fleet import SimStorage, TierPlan
from twostroke.simulator.virtual_loop import describe, run_virtually
from twostroke.worker import tier_transfers
from twostroke.worker.scheduling.block_pool import BlockPool

PLAN = TierPlan(object_tokens=2 * BLOCK, host_blocks=32, has_disk=True, has_shared=False, call_s=0.001)
CONFIG = {"min_pull_tokens": 8}


@dataclass
class Scene:
    """Storage that outlives its workers, of which one runs at a time."""

    role: Role
    storage: SimStorage
    num_blocks: int

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[Rig]:
        """Start a worker. When it has ended, nobody holds a block."""
        async with running_worker(self.role, self.num_blocks, 0, CONFIG, (self.storage, PLAN)) as rig:
            yield rig
        assert rig.pool.owned_blocks == 0
        rig.pool.check_integrity()

    @property
    def blobs(self) -> MemoryBlobs:
        return self.storage.blobs[f"disk {self.role}"]

    def hang(self) -> None:
        for calls in self.storage.calls[f"disk {self.role}"]:
            calls.hang()

    def go_on(self) -> None:
        for calls in self.storage.calls[f"disk {self.role}"]:
            calls.go_on()

    async def store(self, length: int, **fields: Any) -> None:
        """Have a prompt's objects on the disk, by a worker that is gone."""
        async with self.worker() as rig:
            request = a_request(length, keep_s=60.0, **fields)
            assert await rig.is_right(request, await rig.ask(request))
            await idle(rig)
        assert len(self.blobs.blobs) >= length // (2 * BLOCK)


def disk(rig: Rig) -> TierStats:
    return next(one for one in rig.worker.stats().tiers if one.name == "disk")


async def idle(rig: Rig) -> None:
    """Return once nothing goes to the tiers or comes from there."""
    await a_moment()
    while rig.worker._tiers.tiers.is_busy:  # noqa: ASYNC110  (virtual time)
        await asyncio.sleep(0.01)
    assert rig.pool.owned_blocks == 0


def play(script: Callable[[Scene], Awaitable[None]], *, role: Role, num_blocks: int = 32) -> None:
    async def main() -> None:
        await script(Scene(role, SimStorage(1, SECRET), num_blocks))
        await asyncio.sleep(1.0)
        left = {task for task in asyncio.all_tasks() - {asyncio.current_task()} if task is not None}
        assert not left, [describe(task) for task in left]

    run_virtually(main())


def of_both_roles(**settings: Any) -> Callable[[Script], Callable[..., None]]:
    """A test that is played with prefill workers, and again with decode workers."""
    return lambda test: pytest.mark.parametrize("role", ["prefill", "decode"])(
        played_by(play, "role", **settings)(test)
    )


@of_both_roles()
async def test_a_worker_that_starts_reads_what_one_before_has_computed_twice(scene: Scene) -> None:
    async with scene.worker() as rig:
        for name in ("first", "second"):
            request = a_request(42, name)
            assert await rig.is_right(request, await rig.ask(request))
            await idle(rig)
            assert len(scene.blobs.blobs) == (5 if name == "second" else 0)
    async with scene.worker() as rig:
        request = a_request(42, "third")
        reply = await rig.ask(request)
        assert await rig.is_right(request, reply)
        assert (reply.num_cached_tokens, reply.tier_tokens) == (40, 40)
        stats = rig.worker.stats()
        assert (stats.computed_tokens, stats.pulled_tokens, disk(rig).hit_tokens) == (2, 0, 40)
        again = await rig.ask(a_request(42, "again"))
        assert (again.num_cached_tokens, again.tier_tokens) == (41, 0), "it is in the prefix cache now"


@of_both_roles()
async def test_only_what_the_prefix_cache_lacks_is_read(scene: Scene) -> None:
    await scene.store(42)
    async with scene.worker() as rig:
        scene.hang()
        await rig.ask(a_request(21, "before", max_tokens=1))
        scene.go_on()
        await idle(rig)
        reply = await rig.ask(a_request(42))
        assert await rig.is_right(a_request(42), reply)
        assert (reply.num_cached_tokens, reply.tier_tokens) == (40, 20)


@of_both_roles()
async def test_a_prompt_too_short_to_be_worth_it_is_not_looked_up(scene: Scene) -> None:
    await scene.store(42)
    async with scene.worker() as rig:
        assert (await rig.ask(a_request(7))).tier_tokens == 0
        assert disk(rig).lookups == 0


@of_both_roles()
async def test_a_prompt_that_comes_from_another_worker_is_not_looked_up(scene: Scene) -> None:
    await scene.store(42)
    async with scene.worker() as rig, source_beside(rig, 40) as source:
        reply = await rig.ask(a_request(42), None, source.offer(a_request(42)))
        assert await rig.is_right(a_request(42), reply)
        assert (reply.num_cached_tokens, reply.tier_tokens, disk(rig).lookups) == (40, 0, 0)


@played_by(play, role="decode")
async def test_a_prompt_that_a_prefill_worker_hands_over_is_not_looked_up(scene: Scene) -> None:
    await scene.store(42)
    async with scene.worker() as rig:
        call = begin(rig.ask(a_request(42), rig.ticket()))
        await a_moment()
        assert disk(rig).lookups == 0
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


@of_both_roles()
async def test_a_prompt_of_another_tenant_finds_nothing(scene: Scene) -> None:
    await scene.store(42, cache_salt=b"one", client=b"one")
    async with scene.worker() as rig:
        request = a_request(42, cache_salt=b"another", client=b"another")
        reply = await rig.ask(request)
        assert await rig.is_right(request, reply)
        assert (reply.tier_tokens, disk(rig).hits) == (0, 0)


@of_both_roles()
async def test_a_storage_that_hangs_delays_a_prompt_and_fails_none(scene: Scene) -> None:
    await scene.store(42)
    async with scene.worker() as rig:
        scene.hang()
        loop = asyncio.get_running_loop()
        began = loop.time()
        reply = await rig.ask(a_request(42))
        assert loop.time() - began < 1.0
        assert await rig.is_right(a_request(42), reply)
        assert (reply.tier_tokens, disk(rig).late) == (0, 1)
        began = loop.time()
        other = a_request(41, "other", cache_salt=b"x")
        assert await rig.is_right(other, await rig.ask(other))
        scene.go_on()
        await idle(rig)


@of_both_roles()
async def test_a_request_that_is_late_already_waits_for_no_read(scene: Scene) -> None:
    await scene.store(42)
    async with scene.worker() as rig:
        scene.hang()
        loop = asyncio.get_running_loop()
        began = loop.time()
        request = a_request(42, promise=Promise(ttft_left_s=-1.0))
        reply = await rig.ask(request)
        assert loop.time() - began < 0.1
        assert await rig.is_right(request, reply)
        assert disk(rig).lookups == 0
        scene.go_on()
        await idle(rig)


@of_both_roles()
async def test_a_request_that_is_cancelled_while_it_reads_gives_all_blocks_back(scene: Scene) -> None:
    await scene.store(42)
    async with scene.worker() as rig:
        for moment in (0.0005, 0.003, 0.006, 0.01):
            call = begin(rig.ask(a_request(42, f"at {moment}", cache_salt=b"")))
            await asyncio.sleep(moment)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            await asyncio.sleep(0.5)
            assert rig.pool.owned_blocks == 0
        await idle(rig)
        assert await rig.is_right(a_request(42), await rig.ask(a_request(42)))


@of_both_roles()
async def test_requests_of_one_prompt_that_end_together_have_it_written_once(scene: Scene) -> None:
    async with scene.worker() as rig:
        await asyncio.gather(*(rig.ask(a_request(42, f"r{number}")) for number in range(4)))
        await idle(rig)
        assert disk(rig).written_objects == len(scene.blobs.blobs) == 5


@of_both_roles()
async def test_the_choices_of_one_request_are_one_use_of_its_prompt(scene: Scene) -> None:
    async with scene.worker() as rig:
        for choice in range(3):
            await rig.ask(a_request(42, f"c{choice}", log_context=LogContext("client's", choice=choice)))
        await idle(rig)
        assert not scene.blobs.blobs


@of_both_roles(num_blocks=14)
async def test_what_is_no_longer_cached_when_its_turn_comes_is_dropped(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene.worker() as rig:
        with monkeypatch.context() as patched:
            patched.setattr(BlockPool, "take_rows", lambda *_: None)
            await rig.ask(a_request(42, keep_s=60.0))
            await idle(rig)
        assert (disk(rig).dropped, disk(rig).written_objects) == (5, 0)
        await rig.ask(a_request(42, "again", keep_s=60.0))
        await idle(rig)
        assert disk(rig).written_objects == 5


@of_both_roles()
async def test_more_prompts_than_may_wait_for_their_transfer_are_dropped(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_transfers, "MAX_RUNS", 0)
    async with scene.worker() as rig:
        await rig.ask(a_request(42, keep_s=60.0))
        await idle(rig)
        assert (disk(rig).dropped, disk(rig).written_objects) == (5, 0)


@of_both_roles()
@pytest.mark.parametrize("moment", [0.0, 0.001, 0.004, 0.02])
async def test_a_worker_that_stops_while_it_writes_leaves_whole_objects(scene: Scene, moment: float) -> None:
    async with scene.worker() as rig:
        await rig.ask(a_request(42, keep_s=60.0))
        await asyncio.sleep(moment)
    async with scene.worker() as rig:
        reply = await rig.ask(a_request(42, "after"))
        assert await rig.is_right(a_request(42, "after"), reply)
        assert (disk(rig).quarantined, disk(rig).errors) == (0, 0)
        await idle(rig)
