"""Objects that KV tiers write: which, when, once each, and how a worker ends while they are written."""

import asyncio

import pytest

from tests.kvtiers.whole.tiers_rig import CALL_S, OBJECT_TOKENS, ROWS, TiersRig, play, prompt
from tests.rigs.played import played_by
from twostroke.kvtiers import kv_tiers
from twostroke.kvtiers.kv_tiers import FLUSH_S, HANG_S, ObjectRun

FOUR, TWO = prompt(4), prompt(2)
ALL = 4 * OBJECT_TOKENS
DEAR_S = 1.0
"""Seconds a token of a prompt beside which writing costs nothing."""


def rows_of(runs: list[ObjectRun]) -> list[tuple[int, int]]:
    return [(run.first_row, run.end_row) for run in runs]


async def both_uses(rig: TiersRig) -> list[ObjectRun]:
    """Return what is due at the second use of a prompt of four objects."""
    assert rig.used(FOUR) == []
    return rig.used(FOUR)


# --- which objects ---


@played_by(play)
async def test_a_prompt_is_written_at_its_second_use_and_read_by_the_worker_that_follows(rig: TiersRig) -> None:
    (run,) = await both_uses(rig)
    assert (run.first_row, run.end_row) == (0, 4 * ROWS)
    assert await rig.send(run, FOUR)
    await rig.idle()
    assert (rig.stats().written_objects, len(rig.disk.blobs.blobs)) == (4, 4)
    assert rig.used(FOUR) == [], "it is there"
    assert await rig.read(FOUR) == ALL
    assert rig.stats().lookups == 0, "what was written is in memory still"
    after = await rig.remake()
    assert await after.read(FOUR) == ALL
    assert after.stats().hits == 4


@played_by(play)
async def test_a_prompt_whose_kv_is_to_be_kept_is_written_at_its_first_use(rig: TiersRig) -> None:
    assert rows_of(rig.used(FOUR, keeps=True)) == [(0, 4 * ROWS)]


@played_by(play)
async def test_of_a_longer_prompt_with_a_known_beginning_the_rest_alone_is_written(rig: TiersRig) -> None:
    await rig.write(TWO)
    assert rows_of(rig.used(FOUR, keeps=True)) == [(2 * ROWS, 4 * ROWS)]
    assert rig.used(FOUR[: ROWS - 1], keeps=True) == [], "it has no whole object"


@pytest.mark.parametrize("why_not", [None, "the disk is almost full", "there is no quota", "computing costs little"])
@played_by(play)
async def test_a_prompt_is_written_at_its_first_use_where_that_is_cheap_and_the_disk_has_room(
    rig: TiersRig, why_not: str | None
) -> None:
    (disk,) = rig.tiers.storage
    disk.max_bytes = 0 if why_not == "there is no quota" else 1000
    rig.disk.num_bytes = 950 if why_not == "the disk is almost full" else 100
    token_s = 1e-9 if why_not == "computing costs little" else DEAR_S
    assert rows_of(rig.used(FOUR, token_s=token_s)) == ([] if why_not else [(0, 4 * ROWS)])


@played_by(play)
async def test_what_takes_a_core_long_to_write_is_written_at_its_second_use_alone(rig: TiersRig) -> None:
    (disk,) = rig.tiers.storage
    disk.max_bytes = 1000
    cores = iter(range(0, 1000, 10))  # a clock of the writing thread
    disk.cpu_clock = lambda: next(cores)
    await rig.write(TWO)
    assert rig.used(prompt(2, b"another"), token_s=DEAR_S) == []


@played_by(play, has_shared=True)
async def test_every_storage_that_lacks_an_object_gets_it(rig: TiersRig) -> None:
    await rig.write(FOUR)
    assert rig.shared is not None
    assert len(rig.disk.blobs.blobs) == len(rig.shared.blobs.blobs) == 4
    rig.tiers.storage[0].index.discard(rig.tiers.objects.refs(FOUR, b"")[1].name)  # type: ignore[union-attr]
    rig.disk.blobs.blobs.clear()
    await rig.write(FOUR)
    assert len(rig.disk.blobs.blobs) == 1, "the one that the disk is known to lack"
    assert rig.stats("shared").written_objects == 4


@played_by(play, has_disk=False)
async def test_without_storage_what_is_used_twice_stays_in_memory(rig: TiersRig) -> None:
    for run in await both_uses(rig):
        assert await rig.send(run, FOUR)
    assert await rig.read(FOUR) == ALL
    assert rig.used(FOUR) == []


# --- once each ---


@pytest.mark.parametrize("moment", ["waiting for its transfer", "on its way", "waiting to be written"])
@played_by(play)
async def test_nothing_is_written_twice_while_it_is_under_way(rig: TiersRig, moment: str) -> None:
    (run,) = await both_uses(rig)
    if moment == "on its way":
        transfer = rig.begin_send(run, FOUR)
        assert transfer is not None
    if moment == "waiting to be written":
        rig.disk.writes.hang()
        assert await rig.send(run, FOUR)
        await asyncio.sleep(0.1)
    assert rig.used(FOUR, keeps=True) == []
    if moment == "waiting for its transfer":
        assert await rig.send(run, FOUR)
    elif moment == "on its way":
        transfer.commit(None)
    else:
        rig.disk.writes.go_on()
    await rig.idle()
    assert rig.stats().written_objects == 4
    assert rig.used(FOUR, keeps=True) == []


@pytest.mark.parametrize("why", ["its blocks are gone", "the transfer fails", "the storage fails"])
@played_by(play)
async def test_what_could_not_be_written_is_due_at_its_next_use(rig: TiersRig, why: str) -> None:
    (run,) = await both_uses(rig)
    if why == "its blocks are gone":
        rig.tiers.drop(run)
    elif why == "the transfer fails":
        transfer = rig.begin_send(run, FOUR)
        assert transfer is not None
        transfer.abort("the worker needs its blocks")
        await rig.idle()
        assert rig.host.num_bytes == 0
    else:
        rig.disk.blobs.faults["fail_write"] = 2
        assert await rig.send(run, FOUR)
        await rig.idle()
    stats = rig.stats()
    assert (stats.dropped, stats.errors) == ((0, 2) if why == "the storage fails" else (4, 0))
    # The end is written first, and has failed.
    assert rows_of(rig.used(FOUR)) == [(2 * ROWS if why == "the storage fails" else 0, 4 * ROWS)]
    await rig.idle()


@played_by(play, has_shared=True)
async def test_a_write_that_hangs_keeps_nothing_from_the_other_storage_and_no_memory_but_its_own(rig: TiersRig) -> None:
    disk, shared = rig.tiers.storage
    assert rig.shared is not None
    rig.shared.writes.hang()
    (run,) = rig.used(FOUR, keeps=True)
    assert await rig.send(run, FOUR)
    await asyncio.sleep(HANG_S + 1.0)
    assert (rig.stats().written_objects, shared.stats().written_objects) == (4, 0)
    assert (shared.stats().errors, shared.stats().dropped) == (1, 3)
    assert rig.host.num_pinned == 1
    assert not shared.takes_writes
    assert disk.takes_writes
    rig.shared.writes.go_on()
    await rig.idle()
    assert shared.takes_writes
    assert shared.stats().written_objects == 1


# --- limits ---


@played_by(play)
async def test_what_finds_the_queue_full_is_dropped_and_counted(rig: TiersRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_tiers, "MAX_WRITES", 3)
    rig.disk.writes.hang()
    first, second = (prompt(2, salt) for salt in (b"first", b"second"))
    for hashes, is_sent in ((first, True), (second, False)):
        (run,) = rig.used(hashes, keeps=True)
        assert await rig.send(run, hashes) == is_sent
        await asyncio.sleep(0.1)
    assert rig.stats().dropped == 2
    rig.disk.writes.go_on()
    await rig.idle()
    await rig.write(second)
    assert rig.stats().written_objects == 4


@played_by(play, host_objects=3)
async def test_where_memory_is_short_the_beginning_is_taken_and_the_other_objects_are_dropped(rig: TiersRig) -> None:
    (run,) = await both_uses(rig)
    assert await rig.send(run, FOUR)
    await rig.idle()
    assert rig.stats().dropped > 0
    assert rig.stats().written_objects == 4 - rig.stats().dropped
    assert rows_of(rig.used(FOUR)) == [(rig.stats().written_objects * ROWS, 4 * ROWS)]


@pytest.mark.parametrize(("write_share", "least_s"), [(1.0, 4 * CALL_S), (0.5, 7 * CALL_S), (0.25, 13 * CALL_S)])
def test_writing_takes_its_share_of_the_time_and_no_more(write_share: float, least_s: float) -> None:
    async def script(rig: TiersRig) -> None:
        (run,) = rig.used(FOUR, keeps=True)
        assert await rig.send(run, FOUR)
        loop = asyncio.get_running_loop()
        began = loop.time()
        while rig.stats().written_objects < 4:  # noqa: ASYNC110  (virtual time)
            await asyncio.sleep(0.001)
        assert loop.time() - began == pytest.approx(least_s, abs=0.6 * CALL_S)

    play(script, write_share=write_share)


# --- layers with windows ---


@played_by(play, windows=(0, 6))
async def test_each_object_is_written_with_the_windows_at_its_end(rig: TiersRig) -> None:
    runs = rig.used(FOUR, keeps=True)
    assert rows_of(runs) == [(first, first + ROWS) for first in range(0, 4 * ROWS, ROWS)]
    for run in runs:
        assert await rig.send(run, FOUR)
    await rig.idle()
    after = await rig.remake()
    for objects in (1, 2, 3, 4):
        assert await after.read(prompt(objects)) == objects * OBJECT_TOKENS


@played_by(play, windows=(0, 6))
async def test_what_a_worker_sends_of_windows_that_it_has_no_more_is_not_kept(rig: TiersRig) -> None:
    for run in rig.used(TWO, keeps=True):
        assert await rig.send(run, TWO, frozenset({1}) if run.first_row else frozenset())
    await rig.idle()
    held = [rig.host.get(ref.name) for ref in rig.tiers.objects.refs(TWO, b"")]
    assert [sorted(one.blocks) for one in held if one is not None] == [[0, 1], [0]]
    after = await rig.remake()
    assert await after.read(TWO) == OBJECT_TOKENS, "the first object's windows are there"


# --- ends ---


@played_by(play)
async def test_a_worker_that_ends_writes_what_waits(rig: TiersRig) -> None:
    (run,) = rig.used(FOUR, keeps=True)
    assert await rig.send(run, FOUR)
    await asyncio.sleep(2 * CALL_S)
    assert rig.stats().written_objects < 4
    await rig.tiers.close()
    assert rig.stats().written_objects == 4
    assert rig.used(prompt(2, b"another"), keeps=True) == [], "and nothing more"


@played_by(play, is_left_busy=True)
async def test_a_storage_that_hangs_keeps_no_worker_from_ending(rig: TiersRig) -> None:
    rig.store(other := prompt(2, b"another"))
    (run,) = rig.used(FOUR, keeps=True)
    for calls in (rig.disk.reads, rig.disk.writes):
        calls.hang()
    assert await rig.send(run, FOUR)
    assert rig.begin(other) is not None
    await asyncio.sleep(0.1)
    loop, before = asyncio.get_running_loop(), asyncio.all_tasks()
    began = loop.time()
    await rig.tiers.close()
    assert loop.time() - began <= FLUSH_S + 0.1
    mine = {"tiers' writer", "tiers' object", "tiers' write", "tiers' read for r", "scan of the disk tier"}
    assert {task.get_name() for task in before} & mine
    assert not {task.get_name() for task in asyncio.all_tasks()} & mine
    for calls in (rig.disk.reads, rig.disk.writes):
        calls.go_on()


@played_by(play)
async def test_an_object_that_is_being_written_is_not_evicted(rig: TiersRig) -> None:
    rig.disk.writes.hang()
    (run,) = rig.used(TWO, keeps=True)
    assert await rig.send(run, TWO)
    await asyncio.sleep(0.1)
    blocks = rig.host.allocate(14 * ROWS)
    assert blocks is not None
    assert rig.host.allocate(1) is None
    rig.host._free.extend(blocks)
    rig.disk.writes.go_on()
    await rig.idle()
    after = await rig.remake()
    assert await after.read(TWO) == 2 * OBJECT_TOKENS
