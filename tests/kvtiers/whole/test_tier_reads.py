"""Prefixes from KV tiers: what comes is right, comes in time, and costs others nothing."""

import asyncio

import pytest

from tests.kvtiers.whole.tiers_rig import CALL_S, OBJECT_TOKENS, ROWS, THREADS, TOKEN_S, TiersRig, play, prompt
from tests.rigs.played import played_by
from twostroke.kvtiers.kv_tiers import FIRST_SCAN_S, MIN_WAIT_S, SCAN_S
from twostroke.kvtiers.storage_tier import FIRST_REST_S, PROBES

FOUR, TWO = prompt(4), prompt(2)
ALL = 4 * OBJECT_TOKENS


@played_by(play)
async def test_a_stored_prefix_comes_from_the_disk_and_the_next_time_from_memory(rig: TiersRig) -> None:
    rig.store(FOUR)
    assert await rig.read([*FOUR, *prompt(1, b"another")]) == ALL
    disk, host = rig.stats(), rig.stats("host")
    assert (disk.lookups, disk.hits, disk.hit_tokens, host.hit_tokens) == (4, 4, ALL, 0)
    assert await rig.read(FOUR) == ALL
    disk, host = rig.stats(), rig.stats("host")
    assert (disk.lookups, host.hits, host.hit_tokens) == (4, 4, ALL)


@pytest.mark.parametrize("num_cached", [0, 4, 8, 12, 24])
@played_by(play)
async def test_only_what_the_worker_lacks_is_read_in_whole_objects(rig: TiersRig, num_cached: int) -> None:
    rig.store(FOUR)
    assert await rig.read(FOUR, num_cached) == ALL
    assert rig.stats().lookups == 4 - num_cached // OBJECT_TOKENS


@played_by(play)
async def test_nothing_is_begun_where_nothing_is_held_or_the_prompt_is_too_short(rig: TiersRig) -> None:
    rig.store(TWO)
    assert rig.begin(prompt(4, b"another")) is None
    assert rig.begin(TWO[: ROWS - 1]) is None
    assert rig.begin(TWO, 2 * OBJECT_TOKENS) is None
    assert await rig.read(FOUR) == 2 * OBJECT_TOKENS, "as far as it is held"
    assert rig.stats().lookups == 2


@played_by(play)
async def test_a_read_that_takes_longer_than_computing_is_not_begun(rig: TiersRig) -> None:
    rig.store(FOUR)
    for _ in range(PROBES - 1):
        assert rig.begin(FOUR, token_s=1e-6) is None
    assert rig.stats().lookups == 0
    probe = rig.begin(FOUR, token_s=1e-6)
    assert probe is not None
    assert probe.wait_s <= 1e-6 * ALL, "which costs no more than computing"
    assert await rig.pull(probe, FOUR) == 0


@played_by(play)
async def test_of_a_slow_storage_what_has_come_by_the_deadline_is_offered_and_the_rest_stays_in_memory(
    rig: TiersRig,
) -> None:
    rig.store(FOUR)
    rig.disk.next_s = [CALL_S, CALL_S, 3.0, CALL_S]
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await rig.read(FOUR) == 2 * OBJECT_TOKENS
    assert loop.time() - began == pytest.approx(MIN_WAIT_S, abs=0.1)
    assert (rig.stats().late, rig.stats().hit_tokens) == (1, 2 * OBJECT_TOKENS)
    await rig.idle()
    assert await rig.read(FOUR) == ALL
    assert rig.stats().lookups == 4, "what came late was not read in vain"


@played_by(play)
async def test_a_read_of_which_nothing_comes_in_time_is_declined_then(rig: TiersRig) -> None:
    rig.store(FOUR)
    rig.disk.next_s = [3.0] * 4
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert await rig.read(FOUR) == 0
    assert loop.time() - began == pytest.approx(MIN_WAIT_S, abs=0.1)


@pytest.mark.parametrize("bound", ["the request's own", "computing"])
@played_by(play)
async def test_no_read_is_waited_for_longer_than_the_request_may_or_computing_takes(rig: TiersRig, bound: str) -> None:
    rig.store(FOUR)
    read = rig.begin(FOUR, token_s=0.1 / ALL) if bound == "computing" else rig.begin(FOUR, most_wait_s=0.1)
    assert read is not None
    assert read.wait_s == pytest.approx(0.1)
    assert await rig.pull(read, FOUR) == ALL


@played_by(play)
async def test_a_request_that_may_not_wait_at_all_has_nothing_read(rig: TiersRig) -> None:
    rig.store(FOUR)
    assert rig.begin(FOUR, most_wait_s=0.0) is None
    assert rig.stats().lookups == 0


@played_by(play)
async def test_two_requests_for_the_same_objects_read_them_once(rig: TiersRig) -> None:
    rig.store(FOUR)
    assert await asyncio.gather(rig.read(FOUR), rig.read(TWO), rig.read(FOUR, 8)) == [ALL, 2 * OBJECT_TOKENS, ALL]
    assert rig.stats().lookups == 4


@played_by(play, host_objects=2)
async def test_a_read_with_too_little_memory_is_shorter_and_does_not_fail(rig: TiersRig) -> None:
    rig.store(FOUR)
    assert await rig.read(FOUR) == 2 * OBJECT_TOKENS
    assert rig.host.num_pinned == 2
    other = prompt(2, b"another")
    rig.store(other)
    assert await rig.read(other) == 0, "all memory is in use"
    await asyncio.sleep(0.1)
    assert rig.host.num_pinned == 0
    assert await rig.read(other) == 2 * OBJECT_TOKENS


@played_by(play, host_objects=3)
async def test_an_object_that_was_evicted_and_read_again_before_it_was_sent_is_sent_as_it_is_or_not(
    rig: TiersRig,
) -> None:
    other = prompt(2, b"another")
    for hashes in (TWO, other):
        rig.store(hashes)
    rig.disk.next_s = [0.2, CALL_S]
    reading = asyncio.create_task(rig.read(TWO))
    await asyncio.sleep(0.02)  # the second object is there, and waits for the first
    assert await rig.read(other) == 2 * OBJECT_TOKENS
    await asyncio.sleep(0.05)
    assert await rig.read(TWO, OBJECT_TOKENS) == 2 * OBJECT_TOKENS  # which reads the second object anew
    assert await reading in (OBJECT_TOKENS, 2 * OBJECT_TOKENS)


@pytest.mark.parametrize("fault", ["lose", "flip", "fail_read"])
@played_by(play)
async def test_a_prefix_ends_where_an_object_is_bad(rig: TiersRig, fault: str) -> None:
    rig.store(FOUR)
    rig.disk.next_s = [CALL_S, CALL_S, CALL_S / 2, CALL_S]  # the third comes first, and is bad
    rig.disk.blobs.faults[fault] = 1
    assert await rig.read(FOUR) == 2 * OBJECT_TOKENS
    await rig.idle()
    assert await rig.read(FOUR) == (ALL if fault == "fail_read" else 2 * OBJECT_TOKENS)


# --- a storage that hangs, fails, or was slow ---


@played_by(play, is_left_busy=True)
async def test_a_storage_that_hangs_delays_one_read_and_is_not_asked_again_before_it_answers(rig: TiersRig) -> None:
    prompts = [prompt(4, bytes([number])) for number in range(3)]
    for hashes in prompts:
        rig.store(hashes)
    rig.disk.reads.hang()
    loop = asyncio.get_running_loop()
    assert await rig.read(prompts[0]) == 0
    assert (rig.stats().late, rig.disk.reads.num_under_way) == (1, THREADS)
    began = loop.time()
    assert [rig.begin(hashes) for hashes in prompts] == [None] * 3
    assert (loop.time(), rig.stats().late) == (began, 1)
    rig.disk.reads.go_on()
    await asyncio.sleep(1.0)
    assert [await rig.read(hashes) for hashes in prompts] == [ALL] * 3


@played_by(play, has_shared=True)
async def test_a_storage_that_rests_is_left_out_and_the_others_go_on(rig: TiersRig) -> None:
    other = prompt(2, b"another")
    rig.store(FOUR)
    rig.store(other, shared=True)
    rig.disk.blobs.faults["fail_read"] = 4
    assert await rig.read(FOUR) == 0
    await rig.idle()
    assert rig.tiers.storage[0].is_resting
    assert await rig.read(other) == 2 * OBJECT_TOKENS
    assert await rig.read(FOUR) == 0, "the shared storage was asked, and has nothing"
    await asyncio.sleep(FIRST_REST_S)
    assert await rig.read(FOUR) == ALL


@played_by(play)
async def test_a_disk_that_was_slow_for_a_while_is_used_again_once_it_is_quick(rig: TiersRig) -> None:
    prompts = [prompt(4, bytes([number])) for number in range(60)]
    for hashes in prompts:
        rig.store(hashes)
    rig.disk.next_s = [3.0 if number % 4 else CALL_S for number in range(20)]
    for hashes in prompts[:5]:
        await rig.read(hashes, token_s=TOKEN_S / 10)
        await rig.idle()
    rig.disk.next_s = []
    found = []
    for hashes in prompts[5:]:
        found.append(await rig.read(hashes, token_s=TOKEN_S / 10))
        await rig.idle()
    assert found[-5:] == [ALL] * 5


@played_by(play)
async def test_a_disk_that_is_always_too_slow_keeps_few_requests_waiting(rig: TiersRig) -> None:
    prompts = [prompt(4, bytes([number])) for number in range(120)]
    for hashes in prompts:
        rig.store(hashes)
    rig.disk.next_s = [3.0] * 1000
    num_waited = 0
    for hashes in prompts:
        read = rig.begin(hashes, token_s=TOKEN_S / 10)
        num_waited += read is not None
        assert read is None or await rig.pull(read, hashes) == 0
        await rig.idle()
    assert num_waited <= 20, "those that taught it, and one in 16"


# --- layers with windows ---


@played_by(play, windows=(0, 6))
async def test_of_windows_only_the_last_objects_rows_are_read_and_sent(rig: TiersRig) -> None:
    rig.store(FOUR)
    assert await rig.read(FOUR) == ALL
    held = [rig.host.get(ref.name) for ref in rig.tiers.objects.refs(FOUR, b"")]
    assert [sorted(one.blocks) for one in held if one is not None] == [[0], [0], [0], [0, 1]]
    assert await rig.read(TWO) == 2 * OBJECT_TOKENS, "a shorter prompt needs another object's"


@played_by(play, windows=(0, 6))
async def test_a_prefix_ends_where_an_object_has_the_windows_that_follow_ups_need(rig: TiersRig) -> None:
    rig.store(TWO)
    await rig.idle()
    rig.store(FOUR, lacking=frozenset({1}))
    rig.store(TWO)
    assert await rig.read(FOUR) == 2 * OBJECT_TOKENS


# --- storage that others write into ---


@played_by(play, has_disk=False, has_shared=True)
async def test_a_shared_storage_is_asked_for_what_is_not_known(rig: TiersRig) -> None:
    rig.store(FOUR, shared=True)
    assert await rig.read(FOUR) == ALL
    assert (rig.stats("shared").hits, rig.stats("shared").hit_tokens) == (4, ALL)


@played_by(play, has_shared=True)
async def test_a_prefix_may_lie_in_two_storages(rig: TiersRig) -> None:
    rig.store(TWO)
    rig.store(FOUR, shared=True)
    assert await rig.read(FOUR) == ALL
    assert (rig.stats().hit_tokens, rig.stats("shared").hit_tokens) == (ALL / 2, ALL / 2)


# --- starts and ends ---


@played_by(play)
async def test_a_worker_that_starts_finds_what_another_has_written(rig: TiersRig) -> None:
    rig.store(FOUR)
    after = await rig.remake()
    assert await after.read(FOUR) == ALL


@played_by(play)
async def test_a_storage_that_hangs_delays_a_start_for_two_seconds_and_is_learned_later(rig: TiersRig) -> None:
    rig.store(FOUR)
    rig.disk.reads.hang()
    loop = asyncio.get_running_loop()
    began = loop.time()
    after = await rig.remake()
    assert loop.time() - began == pytest.approx(FIRST_SCAN_S, abs=0.1)
    assert after.begin(FOUR) is None
    rig.disk.reads.go_on()
    await asyncio.sleep(1.0)
    assert await after.read(FOUR) == ALL


@played_by(play)
async def test_what_other_workers_write_and_delete_is_learned_within_half_a_minute(rig: TiersRig) -> None:
    other = await rig.remake()
    await other.write(FOUR)
    assert rig.begin(FOUR) is None
    await asyncio.sleep(SCAN_S + 1.0)
    assert await rig.read(FOUR) == ALL
    rig.disk.blobs.blobs.clear()
    await asyncio.sleep(SCAN_S + 1.0)
    assert rig.tiers.index is not None
    assert len(rig.tiers.index) == 0


@pytest.mark.parametrize("error", [OSError("the directory is gone"), MemoryError("anything else")])
@played_by(play)
async def test_a_storage_that_cannot_be_listed_is_listed_again_later(
    rig: TiersRig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    rig.store(FOUR)

    def fail(_: str) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(rig.disk.blobs, "list", fail)
        after = await rig.remake()
    assert after.stats().errors == 1
    await asyncio.sleep(SCAN_S + 1.0)
    assert await after.read(FOUR) == ALL


@played_by(play, is_left_busy=True)
async def test_a_read_under_way_is_declined_when_the_worker_closes_and_none_is_begun_then(rig: TiersRig) -> None:
    rig.store(FOUR)
    rig.disk.next_s = [0.2] * 4
    reading = asyncio.create_task(rig.read(FOUR))
    await asyncio.sleep(0.05)
    await rig.tiers.close()
    assert rig.begin(FOUR) is None
    reading.cancel()
    assert rig.host.num_pinned == 0
