"""One storage of KV objects as requests feel it: what fails is a miss, and what fails or hangs on is left alone.

On virtual time, over storage in memory.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest

from tests.kvtiers.rig import PLAIN, WINDOWS, Sample, sample
from tests.rigs.played import played_by
from twostroke.kvtiers import storage_tier
from twostroke.kvtiers.objects import ObjectCipher, SectionData, section_bytes
from twostroke.kvtiers.storage.blobs import BlobInfo
from twostroke.kvtiers.storage_tier import FIRST_REST_S, LONGEST_REST_S, PROBES, ObjectRef, StorageTier
from twostroke.kvtiers.tier_index import TierIndex
from twostroke.protocol.kv_layout import KVLayout
from twostroke.simulator.memory_blobs import MemoryBlobs, MemoryReader, VirtualCalls
from twostroke.simulator.virtual_loop import run_virtually

CALL_S, THREADS = 0.01, 2
CIPHER = ObjectCipher(bytes(range(32)))


class ScriptedBlobs(MemoryBlobs):
    """Blobs that may end before they should, can't be read or put aside, or do something while they are listed."""

    def __init__(self) -> None:
        super().__init__(random.Random(1))
        self.during_list: Callable[[], None] = lambda: None
        self.ends_early = self.is_read_only = False
        self.unreadable: set[str] = set()

    def open(self, key: str) -> AbstractContextManager[MemoryReader]:
        if key in self.unreadable:
            raise OSError("a bad sector")
        if self.ends_early:
            raise EOFError("the file ends before")
        return super().open(key)

    def quarantine(self, key: str) -> None:
        if self.is_read_only:
            raise OSError("a read-only file system")
        super().quarantine(key)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        found = list(super().list(prefix))
        self.during_list()
        yield from found


@dataclass
class Scene:
    """A tier, and a second worker's over the same storage."""

    blobs: ScriptedBlobs
    tier: StorageTier
    other: StorageTier
    calls: VirtualCalls

    async def write(self, one: Sample, tier: StorageTier | None = None) -> None:
        assert await (tier or self.tier).write(ref_of(one), one.sections) == pytest.approx(CALL_S)

    async def read(self, one: Sample, tier: StorageTier | None = None) -> bool:
        """Return whether the object came, whole and right."""
        wanted = {section.group: room_for(one, section) for section in one.sections}
        found = await (tier or self.tier).read(ref_of(one), wanted)
        if not found:
            return False
        assert found == wanted.keys()
        assert [b"".join(wanted[section.group].buffers) for section in one.sections] == one.contents
        return True

    def counts(self, tier: StorageTier | None = None) -> dict[str, int]:
        """Return the counters of reads that are not 0."""
        stats = (tier or self.tier).stats()
        names = ("lookups", "hits", "quarantined", "errors", "late")
        return {name: getattr(stats, name) for name in names if getattr(stats, name)}


def ref_of(one: Sample) -> ObjectRef:
    return ObjectRef(one.key, one.rows)


def room_for(one: Sample, section: SectionData) -> SectionData:
    size = section_bytes(one.layout, section.group, section.num_rows)
    return section._replace(buffers=[memoryview(bytearray(size))])


def play(
    script: Callable[[Scene], Awaitable[None]],
    *,
    has_index: bool = True,
    layout: KVLayout = PLAIN,
    cipher: ObjectCipher | None = None,
) -> None:
    async def main() -> None:
        blobs, clock = ScriptedBlobs(), asyncio.get_running_loop().time

        def tier(calls: VirtualCalls) -> StorageTier:
            index = TierIndex() if has_index else None
            writes = VirtualCalls(1, lambda: CALL_S)
            return StorageTier("disk", lambda: blobs, layout, calls, writes, clock, lambda: cipher, index)

        calls = VirtualCalls(THREADS, lambda: CALL_S)
        await script(Scene(blobs, tier(calls), tier(VirtualCalls(THREADS, lambda: CALL_S)), calls))

    run_virtually(main(), limit_s=10_000.0)


ONE, TWO = sample(PLAIN, 1), sample(PLAIN, 2)


# --- reading ---


@pytest.mark.parametrize("has_index", [True, False])
def test_what_was_written_is_read_again_and_counted(has_index: bool) -> None:
    async def script(scene: Scene) -> None:
        one = sample(WINDOWS, 1)
        await scene.write(one)
        assert scene.tier.holds(one.key.name)
        assert await scene.read(one)
        stats, num_bytes = scene.tier.stats(), sum(map(len, one.contents))
        assert (stats.lookups, stats.hits, stats.read_bytes, stats.written_bytes) == (1, 1, num_bytes, num_bytes)
        assert (stats.read_seconds, stats.write_seconds) == pytest.approx((CALL_S, CALL_S))

    play(script, has_index=has_index, layout=WINDOWS)


@played_by(play, layout=WINDOWS)
async def test_one_group_of_an_object_can_be_read_alone(scene: Scene) -> None:
    one = sample(WINDOWS, 1)
    await scene.write(one)
    window = room_for(one, one.sections[1])
    assert await scene.tier.read(ref_of(one), {1: window}) == {1}
    assert b"".join(window.buffers) == one.contents[1]
    longer = one.sections[1]._replace(first_row=0, num_rows=5)
    assert await scene.tier.read(ref_of(one), {1: room_for(one, longer)}) == frozenset(), "rows that it does not have"
    assert scene.counts() == {"lookups": 2, "hits": 1}


@played_by(play)
async def test_a_missing_object_is_a_miss_and_no_longer_known(scene: Scene) -> None:
    await scene.write(ONE)
    scene.blobs.blobs.clear()
    assert not await scene.read(ONE)
    assert not scene.tier.holds(ONE.key.name)
    assert scene.counts() == {"lookups": 1}


@pytest.mark.parametrize("fault", ["flip", "truncate", "swap"])
@played_by(play)
async def test_a_damaged_object_is_put_aside_and_counted_once(scene: Scene, fault: str) -> None:
    for one in (ONE, TWO):
        await scene.write(one)
    if fault == "swap":
        scene.blobs.blobs[ONE.key.path] = scene.blobs.blobs[TWO.key.path]
    else:
        scene.blobs.faults[fault] = 1
    for _ in range(2):
        assert not await scene.read(ONE)
    assert scene.blobs.quarantined == [ONE.key.path]
    assert scene.counts() == {"lookups": 2, "quarantined": 1}
    assert not scene.tier.holds(ONE.key.name)
    assert await scene.read(TWO), "what lies beside it is none the worse"


@played_by(play)
async def test_a_damaged_object_that_cannot_be_put_aside_is_not_read_again_and_again(scene: Scene) -> None:
    await scene.write(ONE)
    scene.blobs.is_read_only, scene.blobs.faults["flip"] = True, 1
    assert not await scene.read(ONE)
    assert not scene.tier.holds(ONE.key.name)
    assert scene.counts() == {"lookups": 1, "quarantined": 1}
    for _ in range(3):
        scene.blobs.faults["flip"] = 1
        assert not await scene.read(ONE)
    assert not scene.tier.is_resting, "one damaged object does not mean that the storage fails"


@played_by(play)
async def test_an_object_of_another_prefixs_rows_is_damaged(scene: Scene) -> None:
    await scene.write(ONE)
    elsewhere = ONE._replace(rows=ONE.rows._replace(first_row=ONE.rows.first_row + 1))
    assert not await scene.tier.read(ref_of(elsewhere), {0: room_for(ONE, ONE.sections[0])})
    assert scene.counts() == {"lookups": 1, "quarantined": 1}


@pytest.mark.parametrize("writers", [None, CIPHER])
def test_an_object_of_another_cipher_is_left_alone(writers: ObjectCipher | None) -> None:
    async def script(scene: Scene) -> None:
        ONE.write(scene.blobs, writers)
        await scene.tier.scan(ONE.key.identity)
        assert not await scene.read(ONE)
        assert ONE.key.path in scene.blobs.blobs, "the key may come back"
        assert scene.counts() == {"lookups": 1}

    play(script, cipher=CIPHER if writers is None else None)


@pytest.mark.parametrize("fault", ["fail_read", "ends early"])
@played_by(play)
async def test_a_read_that_fails_is_an_error_and_the_object_stays_known(scene: Scene, fault: str) -> None:
    await scene.write(ONE)
    scene.blobs.faults["fail_read"] = fault == "fail_read"
    scene.blobs.ends_early = fault == "ends early"
    assert not await scene.read(ONE)
    scene.blobs.ends_early = False
    assert scene.counts() == {"lookups": 1, "errors": 1}
    assert scene.tier.holds(ONE.key.name)
    assert await scene.read(ONE)


@played_by(play)
async def test_a_write_that_fails_is_an_error_and_the_object_is_not_known(scene: Scene) -> None:
    scene.blobs.faults["fail_write"] = 1
    await scene.write(ONE)
    assert not scene.tier.holds(ONE.key.name)
    assert scene.counts() == {"errors": 1}
    assert await scene.tier.write(ref_of(ONE), []) == pytest.approx(CALL_S), "parts that make no object"
    assert (scene.tier.stats().errors, scene.tier.stats().written_objects) == (2, 0)
    await scene.write(ONE)
    assert scene.tier.holds(ONE.key.name)


@played_by(play)
async def test_what_is_deleted_for_the_quota_is_no_longer_known(scene: Scene) -> None:
    await scene.write(ONE)
    scene.tier.evicted.append(ONE.key.path)
    await scene.write(TWO)
    assert [scene.tier.holds(one.key.name) for one in (ONE, TWO)] == [False, True]


# --- a storage that fails, or hangs ---


@played_by(play)
async def test_a_storage_that_fails_three_times_in_a_row_rests_ever_longer_and_comes_back(scene: Scene) -> None:
    clock = asyncio.get_running_loop().time
    await scene.write(ONE)

    async def fail(times: int) -> None:
        scene.blobs.faults["fail_read"] = times
        for _ in range(times):
            assert not await scene.read(ONE)

    await fail(2)
    assert not scene.tier.is_resting
    assert await scene.read(ONE)
    await fail(2)
    assert not scene.tier.is_resting, "a success between them begins the count anew"
    await fail(1)
    rests = []
    for _ in range(8):
        began = clock()
        assert scene.tier.is_resting
        while scene.tier.is_resting:  # noqa: ASYNC110  (virtual time)
            await asyncio.sleep(0.5)
        rests.append(clock() - began)
        await fail(3)
    expected = [min(FIRST_REST_S * 2**number, LONGEST_REST_S) for number in range(8)]
    assert rests == pytest.approx(expected, abs=0.6)
    await asyncio.sleep(LONGEST_REST_S)
    assert not scene.tier.is_resting
    assert await scene.read(ONE)
    await fail(3)
    began = clock()
    while scene.tier.is_resting:  # noqa: ASYNC110  (virtual time)
        await asyncio.sleep(0.5)
    assert clock() - began == pytest.approx(FIRST_REST_S, abs=0.6), "it has been well since"


@played_by(play)
async def test_writes_that_fail_let_writes_rest_and_reads_go_on(scene: Scene) -> None:
    scene.blobs.faults["fail_write"] = 3
    for _ in range(3):
        assert scene.tier.takes_writes
        await scene.write(ONE)
    assert not scene.tier.takes_writes
    assert not scene.tier.is_resting
    await asyncio.sleep(FIRST_REST_S)
    assert scene.tier.takes_writes


# --- a storage without an index ---


@played_by(play, has_index=False)
async def test_a_storage_that_never_has_anything_is_asked_by_one_prompt_of_16(scene: Scene) -> None:
    asked = []
    for _ in range(30 * PROBES):
        is_asked = scene.tier.is_worth_asking(0.2)
        asked.append(is_asked)
        if is_asked:
            assert not await scene.read(ONE)
    assert asked[0]
    assert sum(asked[-10 * PROBES :]) == 10
    assert not any(scene.tier.is_worth_asking(CALL_S / 2) for _ in range(4 * PROBES)), "no hit would be a gain"


@played_by(play, has_index=False)
async def test_a_storage_that_has_something_again_is_asked_again(scene: Scene) -> None:
    for _ in range(30):
        assert not await scene.read(ONE)
    assert not scene.tier.is_worth_asking(0.2)
    ONE.write(scene.blobs)
    for _ in range(5):
        assert await scene.read(ONE)
    assert scene.tier.is_worth_asking(0.2)
    assert scene.tier.holds(ONE.key.name), "so it is not written once more"


@played_by(play, has_index=False)
async def test_objects_seen_in_a_shared_storage_are_remembered_up_to_a_limit(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_tier, "MAX_SEEN", 2)
    three = [sample(PLAIN, seed) for seed in range(3)]
    for one in three:
        await scene.write(one)
    assert [scene.tier.holds(one.key.name) for one in three] == [False, True, True]


# --- scans ---


@played_by(play)
async def test_a_scan_learns_what_another_worker_wrote_and_forgets_what_was_deleted(scene: Scene) -> None:
    many = [sample(PLAIN, seed) for seed in range(2 * storage_tier.HEADERS_AT_ONCE + 3)]
    for one in many:
        await scene.write(one, scene.other)
    await scene.tier.scan(ONE.key.identity)
    assert all(scene.tier.holds(one.key.name) for one in many)
    assert await scene.read(many[-1])
    for one in many[:5]:
        scene.blobs.delete(one.key.path)
    await scene.tier.scan(ONE.key.identity)
    assert [scene.tier.holds(one.key.name) for one in many] == [False] * 5 + [True] * (len(many) - 5)


@played_by(play)
async def test_a_scan_does_not_forget_what_is_written_while_it_lists(scene: Scene) -> None:
    await scene.write(ONE)
    index = scene.tier.index
    assert index is not None
    scanning = asyncio.create_task(scene.tier.scan(ONE.key.identity))
    scene.blobs.during_list = lambda: index.add(TWO.key.name, TWO.rows.row_hashes)  # after the list was made
    await scanning
    assert [scene.tier.holds(one.key.name) for one in (ONE, TWO)] == [True, True]


@played_by(play)
async def test_a_scan_passes_over_what_is_deleted_while_it_goes_on(scene: Scene) -> None:
    for one in (ONE, TWO):
        await scene.write(one, scene.other)
    scene.blobs.during_list = lambda: scene.blobs.delete(ONE.key.path)
    await scene.tier.scan(ONE.key.identity)
    assert [scene.tier.holds(one.key.name) for one in (ONE, TWO)] == [False, True]


@played_by(play)
async def test_a_scan_ignores_objects_of_other_models(scene: Scene) -> None:
    foreign = sample(WINDOWS, 1)
    foreign.write(scene.blobs)
    # An identity that begins alike lies in the same folder.
    alike = ONE.key.identity[:8] + bytes(24)
    ONE.write(scene.blobs)
    await scene.tier.scan(alike)
    assert scene.tier.index is not None
    assert len(scene.tier.index) == 0
    assert len(scene.blobs.blobs) == 2
    await scene.tier.scan(ONE.key.identity)
    assert scene.tier.index.object_names() == [ONE.key.name]


@played_by(play)
async def test_a_scan_puts_damaged_headers_aside_and_no_others(scene: Scene) -> None:
    for one in (ONE, TWO):
        one.write(scene.blobs)
    damaged = bytearray(scene.blobs.blobs[ONE.key.path])
    damaged[80] ^= 1
    scene.blobs.blobs[ONE.key.path] = bytes(damaged)
    encrypted = sample(PLAIN, 3)
    encrypted.write(scene.blobs, CIPHER)
    await scene.tier.scan(ONE.key.identity)
    assert scene.blobs.quarantined == [ONE.key.path]
    assert encrypted.key.path in scene.blobs.blobs
    assert scene.tier.index is not None
    assert scene.tier.index.object_names() == [TWO.key.name]
    assert scene.tier.stats().quarantined == 1


@played_by(play)
async def test_one_object_that_cannot_be_read_hides_no_others_from_a_scan(scene: Scene) -> None:
    many = [sample(PLAIN, seed) for seed in range(10)]
    for one in many:
        one.write(scene.blobs)
    bad = min(many, key=lambda one: one.key.path)  # is listed first
    scene.blobs.unreadable = {bad.key.path}
    await scene.tier.scan(ONE.key.identity)
    assert [scene.tier.holds(one.key.name) for one in many] == [one is not bad for one in many]
    assert scene.counts() == {"errors": 1}


@played_by(play)
async def test_a_scan_of_a_storage_of_which_nothing_can_be_read_fails(scene: Scene) -> None:
    for one in (ONE, TWO):
        one.write(scene.blobs)
    scene.blobs.unreadable = set(scene.blobs.blobs)
    with pytest.raises(OSError, match="a bad sector"):
        await scene.tier.scan(ONE.key.identity)


@played_by(play, has_index=False)
async def test_a_storage_without_an_index_is_not_listed(scene: Scene) -> None:
    ONE.write(scene.blobs)
    await scene.tier.scan(ONE.key.identity)
    assert not scene.tier.holds(ONE.key.name)
