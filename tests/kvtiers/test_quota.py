"""A store with a quota never has more, and says so without I/O."""

import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.kvtiers.rig import MemoryBlobs, MemoryReader
from twostroke.kvtiers.storage.blobs import BlobInfo, BlobMissing
from twostroke.kvtiers.storage.quota import QuotaBlobs


class WatchedBlobs(MemoryBlobs):
    """A store that knows how much it has ever had, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.most_bytes = 0
        self.room: int | None = None  # of the disk
        self.failing: dict[str, OSError] = {}  # by method
        self.num_listings = 0
        self.before_write = threading.Event()  # set: writes go on
        self.before_write.set()
        self.writing = threading.Event()
        self._lock = threading.Lock()
        self._in_flight = 0

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.blobs.values()))

    @contextmanager
    def open(self, key: str) -> Iterator[MemoryReader]:
        self._fail("open")
        with super().open(key) as reader:
            yield reader

    def write(self, key: str, parts: Sequence[memoryview]) -> None:
        self._fail("write")
        size = sum(part.nbytes for part in parts)
        if self.room is not None and self.num_bytes + size > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        with self._lock:
            self._in_flight += size
            self.most_bytes = max(self.most_bytes, self.num_bytes + self._in_flight)
        self.writing.set()
        assert self.before_write.wait(10)
        with self._lock:
            super().write(key, parts)
            self._in_flight -= size

    def delete(self, key: str) -> None:
        self._fail("delete")
        with self._lock:
            super().delete(key)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        self.num_listings += 1
        self._fail("list")
        yield from super().list(prefix)

    def _fail(self, method: str) -> None:
        if method in self.failing:
            raise self.failing[method]


def put(blobs: QuotaBlobs | MemoryBlobs, key: str, num_bytes: int) -> None:
    blobs.write(key, [memoryview(bytes(num_bytes))])


def read(blobs: QuotaBlobs, key: str) -> int:
    with blobs.open(key) as reader:
        return reader.num_bytes


def test_what_was_used_longest_ago_makes_room() -> None:
    inner = WatchedBlobs()
    blobs = QuotaBlobs(inner, 100)
    for number in range(10):
        put(blobs, str(number), 10)
    assert read(blobs, "0") == 10
    put(blobs, "new", 15)
    assert inner.blobs.keys() == {*"03456789", "new"}
    assert (blobs.num_bytes, blobs.max_bytes, blobs.num_evicted, len(blobs)) == (95, 100, 2, 9)
    assert "0" in blobs
    assert "1" not in blobs
    assert inner.most_bytes <= 100


def test_a_blob_larger_than_the_quota_is_refused_and_drops_nothing() -> None:
    inner = WatchedBlobs()
    blobs = QuotaBlobs(inner, 100)
    put(blobs, "a", 60)
    with pytest.raises(OSError, match="101 bytes are more than the quota of 100; raise it") as error:
        put(blobs, "b", 101)
    assert error.value.errno == errno.EFBIG
    assert inner.blobs.keys() == {"a"}
    put(blobs, "b", 100)
    assert inner.blobs.keys() == {"b"}


def test_the_index_is_rebuilt_from_a_listing_and_too_much_is_dropped() -> None:
    inner = WatchedBlobs()
    for number in range(10):
        put(inner, str(number), 20)
    blobs = QuotaBlobs(inner, 100)
    assert (blobs.num_bytes, len(blobs), inner.num_bytes) == (200, 10, 200)  # nothing is deleted before a write
    put(blobs, "new", 10)
    assert inner.num_bytes == blobs.num_bytes == 90


def test_other_workers_blobs_are_noticed() -> None:
    inner, now = WatchedBlobs(), [0.0]
    blobs = QuotaBlobs(inner, 100, refresh_s=60, clock=lambda: now[0])
    put(blobs, "ours", 40)
    put(inner, "theirs", 40)
    put(inner, "read", 10)
    inner.delete("ours")
    assert (blobs.num_bytes, "theirs" in blobs) == (40, False)
    assert read(blobs, "read") == 10
    assert (blobs.num_bytes, "read" in blobs) == (50, True)
    now[0] = 59
    put(blobs, "a", 1)
    assert inner.num_listings == 1
    now[0] = 60
    put(blobs, "b", 1)
    assert inner.num_listings == 2
    assert blobs.num_bytes == inner.num_bytes == 52
    assert "theirs" in blobs
    put(blobs, "big", 90)
    assert inner.most_bytes <= 100
    now[0] = -1e9  # a clock that jumps back
    put(blobs, "c", 1)


def test_a_missing_blob_leaves_the_index() -> None:
    inner = WatchedBlobs()
    blobs = QuotaBlobs(inner, 100)
    put(blobs, "a", 10)
    inner.blobs.clear()
    with pytest.raises(BlobMissing):
        read(blobs, "a")
    assert ("a" in blobs, blobs.num_bytes) == (False, 0)


def test_deleted_and_quarantined_blobs_take_no_room() -> None:
    inner = WatchedBlobs()
    blobs = QuotaBlobs(inner, 100)
    put(blobs, "a", 10)
    put(blobs, "b", 10)
    blobs.delete("a")
    blobs.quarantine("b")
    blobs.delete("none")
    assert (blobs.num_bytes, inner.quarantined, list(blobs.list())) == (0, ["b"], [])


def test_a_blob_that_is_written_again_counts_once() -> None:
    inner = WatchedBlobs()
    blobs = QuotaBlobs(inner, 100)
    for num_bytes in (30, 40, 20):
        put(blobs, "a", num_bytes)
        assert blobs.num_bytes == inner.num_bytes == num_bytes


def test_a_full_disk_drops_some_and_fails_the_write() -> None:
    inner = WatchedBlobs()
    blobs = QuotaBlobs(inner, 1000)
    for number in range(10):
        put(blobs, str(number), 10)
    inner.room = 105
    with pytest.raises(OSError, match="No space left"):
        put(blobs, "new", 15)
    assert (len(blobs), inner.num_bytes, blobs.num_bytes, blobs.num_evicted) == (8, 80, 80, 2)
    for number in range(20):  # room is made before the disk is full again
        put(blobs, f"new-{number}", 15)
        assert f"new-{number}" in blobs
    assert inner.num_bytes <= 100
    inner.room = None  # others have left
    blobs.refresh()
    put(blobs, "large", 900)
    assert blobs.num_bytes > 950
    inner.room = 0  # others' files fill the disk
    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            put(blobs, "more", 1000)
    assert (len(blobs), blobs.num_bytes, inner.num_bytes) == (0, 0, 0)


def test_a_failed_write_leaves_the_account_as_it_was() -> None:
    inner = WatchedBlobs()
    blobs = QuotaBlobs(inner, 100)
    put(blobs, "a", 50)
    inner.failing["write"] = OSError(errno.EIO, "Input/output error")
    with pytest.raises(OSError, match="Input/output error"):
        put(blobs, "b", 10)
    assert (blobs.num_bytes, "b" in blobs, "a" in blobs) == (50, False, True)


def test_a_victim_that_can_not_be_deleted_fails_the_write() -> None:
    inner = WatchedBlobs()
    blobs = QuotaBlobs(inner, 100)
    put(blobs, "a", 60)
    inner.failing["delete"] = PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(PermissionError):
        put(blobs, "b", 60)
    assert (blobs.num_bytes, "a" in blobs, blobs.num_evicted) == (60, True, 0)
    inner.failing.clear()
    put(blobs, "b", 60)
    assert inner.blobs.keys() == {"b"}


def test_a_listing_that_fails_is_not_repeated_at_each_write() -> None:
    inner, now = WatchedBlobs(), [0.0]
    blobs = QuotaBlobs(inner, 100, refresh_s=60, clock=lambda: now[0])
    inner.failing["list"] = OSError(errno.EIO, "Input/output error")
    now[0] = 60
    with pytest.raises(OSError, match="Input/output error"):
        put(blobs, "a", 1)
    put(blobs, "a", 1)
    assert (inner.num_listings, "a" in blobs) == (2, True)


def test_what_changes_during_a_listing_is_not_taken_from_it() -> None:
    class Interrupted(WatchedBlobs):
        def list(self, prefix: str = "") -> Iterator[BlobInfo]:
            found = list(super().list(prefix))
            for change in changes:
                change()
            yield from found

    changes: list[Callable[[], None]] = []
    blobs = QuotaBlobs(inner := Interrupted(), 100)
    put(blobs, "deleted", 10)
    put(blobs, "kept", 10)

    def change() -> None:
        blobs.delete("deleted")
        put(blobs, "written", 10)

    changes.append(change)
    blobs.refresh()
    assert ("deleted" in blobs, "written" in blobs, blobs.num_bytes) == (False, True, 20)
    assert inner.num_bytes == 20


def test_writes_of_other_threads_count_before_they_end() -> None:
    inner = WatchedBlobs()
    blobs = QuotaBlobs(inner, 100)
    inner.before_write.clear()
    thread = threading.Thread(target=put, args=(blobs, "a", 60))
    thread.start()
    assert inner.writing.wait(10)
    assert (blobs.num_bytes, "a" in blobs) == (60, False)
    with pytest.raises(BlockingIOError, match="60 bytes that are being written leave no room for 41"):
        put(blobs, "b", 41)
    inner.before_write.set()
    thread.join()
    put(blobs, "b", 40)
    assert blobs.num_bytes == inner.num_bytes == 100


def test_many_threads_never_exceed_the_quota() -> None:
    inner = WatchedBlobs()
    blobs = QuotaBlobs(inner, 500)
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(200):
                put(blobs, f"{number}-{step % 30}", 1 + (7 * step + number) % 40)
                if step % 3 == 0:
                    blobs.delete(f"{number}-{step % 17}")
                if step % 50 == 0:
                    blobs.refresh()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert inner.most_bytes <= 500
    blobs.refresh()
    assert blobs.num_bytes == inner.num_bytes <= 500
