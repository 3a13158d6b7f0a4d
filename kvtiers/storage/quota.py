"""A store with a limit in bytes, which drops the blobs that were used longest ago before it writes others.

Scans do no harm, since a full disk takes objects at their second use alone. On Mooncake's traces S3-FIFO finds up to 2%
of the prompts' blocks fewer, and more (1.6%) only on a disk that holds a hundredth of all blocks (November 2026).

An index of keys and bytes says what there is. It is rebuilt from a listing at the start, and brought up to date from
time to time while something is written, because other workers may write into the same directory. Each of them keeps to
the limit by its own index, so together they exceed it at most by what they write between two listings.

All threads may use one. Whatever lasts happens outside the index's lock; room is made by one thread at a time.
"""

import errno
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from twostroke.kvtiers.storage.blobs import BlobInfo, BlobMissing, BlobReader, BlobStore

REFRESH_S = 60.0
"""Seconds between two listings."""
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


class QuotaBlobs:
    """A BlobStore over another one, which has `max_bytes` at most."""

    def __init__(
        self,
        blobs: BlobStore,
        max_bytes: int,
        *,
        refresh_s: float = REFRESH_S,
        clock: Callable[[], float] = time.monotonic,
        on_evicted: Callable[[str], None] = lambda _: None,
    ):
        """Lists what there is. Raises OSError where that fails.

        `on_evicted` hears each key that was deleted for the quota, on the writer's thread.
        """
        self.max_bytes = max_bytes
        self.num_evicted = 0  # blobs, since the start
        self._blobs = blobs
        self._refresh_s = refresh_s
        self._clock = clock
        self._on_evicted = on_evicted
        self._lock = threading.Lock()  # of all below
        self._index: OrderedDict[str, int] = OrderedDict()  # bytes by key; the first is dropped next
        self._indexed = 0  # bytes in the index
        self._limit = max_bytes  # lower while the disk is too small for that
        self._reserved = 0  # bytes of blobs that are being written
        self._changed: dict[object, set[str]] = {}  # keys that changed during each listing that goes on
        self._making_room = threading.Lock()
        self._refreshed_at = clock()
        self.refresh()

    @property
    def num_bytes(self) -> int:
        """Bytes of all blobs in the index, and of those that are being written."""
        with self._lock:
            return self._indexed + self._reserved

    def __len__(self) -> int:
        with self._lock:
            return len(self._index)

    def __contains__(self, key: str) -> bool:
        """Return whether the index has a blob, without I/O."""
        with self._lock:
            return key in self._index

    @contextmanager
    def open(self, key: str) -> Iterator[BlobReader]:
        """Open a blob for reading, which counts as a use. Raises BlobMissing, and OSError."""
        try:
            with self._blobs.open(key) as reader:
                with self._lock:
                    if key not in self._index:  # another worker's, written since the last listing
                        self._add(key, reader.num_bytes)
                        self._note_change(key)
                    self._index.move_to_end(key)
                yield reader
        except BlobMissing:
            self._forget(key)
            raise

    def write(self, key: str, parts: Sequence[memoryview]) -> None:
        """Make room, and store a blob in one piece.

        Raises OSError: EFBIG for a blob larger than the quota, EAGAIN where other threads' writes fill it.

        Where the disk is full, it drops as many bytes as it wanted to write and raises ENOSPC all the same. What there
        was then is the limit until the next listing, so that the next writes succeed.
        """
        num_bytes = sum(part.nbytes for part in parts)
        if num_bytes > self.max_bytes:
            message = f"{num_bytes} bytes are more than the quota of {self.max_bytes}; raise it"
            raise OSError(errno.EFBIG, message, key)
        if self._clock() - self._refreshed_at >= self._refresh_s:
            self.refresh()
        with self._making_room:
            self._drop(lambda _: self._indexed + self._reserved + num_bytes > self._limit)
            with self._lock:
                if self._reserved + num_bytes > self.max_bytes:
                    message = f"blobs of {self._reserved} bytes that are being written leave no room for {num_bytes}"
                    raise BlockingIOError(errno.EAGAIN, message, key)
                self._reserved += num_bytes
        try:
            self._blobs.write(key, parts)
        except OSError as error:
            with self._lock:
                self._reserved -= num_bytes
                if error.errno in FULL_DISK:
                    self._limit = min(self._limit, self._indexed + self._reserved)
            if error.errno in FULL_DISK:
                with self._making_room:
                    self._drop(lambda dropped: dropped < num_bytes)
            raise
        except BaseException:
            with self._lock:
                self._reserved -= num_bytes
            raise
        with self._lock:
            self._reserved -= num_bytes
            self._add(key, num_bytes)
            self._note_change(key)

    def delete(self, key: str) -> None:
        """Delete a blob. Harmless where there is none."""
        self._blobs.delete(key)
        self._forget(key)

    def quarantine(self, key: str) -> None:
        """Take a damaged blob out of the readers' way, and out of the quota. Harmless where there is none."""
        self._blobs.quarantine(key)
        self._forget(key)

    def list(self, prefix: str = "") -> Iterator[BlobInfo]:
        """Yield the blobs whose keys begin with `prefix`, in no order, from the store."""
        return self._blobs.list(prefix)

    def refresh(self) -> None:
        """Bring the index up to date with a listing. Raises OSError where the storage fails."""
        changed = set[str]()
        listing = object()
        with self._lock:
            self._refreshed_at = self._clock()  # first, so that a store that fails isn't listed at each write
            self._changed[listing] = changed
        try:
            found = sorted(self._blobs.list(), key=lambda info: info.modified_s)
        except BaseException:
            with self._lock:
                del self._changed[listing]
            raise
        with self._lock:
            del self._changed[listing]
            self._limit = self.max_bytes
            there = {info.key for info in found}
            for key in self._index.keys() - there - changed:
                self._remove(key)
            for info in found:
                if info.key not in changed:
                    self._add(info.key, info.num_bytes)

    def _drop(self, is_too_much: Callable[[int], bool]) -> None:
        """Delete blobs while there is too much, which is asked with the bytes that were deleted.

        The caller holds `_making_room`. Raises OSError.
        """
        dropped = 0
        while True:
            with self._lock:
                if not self._index or not is_too_much(dropped):
                    return
                key = next(iter(self._index))
                num_bytes = self._remove(key)
                self._note_change(key)
                # It takes room until it is deleted.
                self._reserved += num_bytes
            try:
                self._blobs.delete(key)
            except BaseException:
                with self._lock:
                    self._reserved -= num_bytes
                    self._add(key, num_bytes)
                raise
            with self._lock:
                self._reserved -= num_bytes
                self.num_evicted += 1
            self._on_evicted(key)
            dropped += num_bytes

    def _add(self, key: str, num_bytes: int) -> None:
        """Put a blob at the end of the index, or change its size in its place; the caller holds the lock."""
        self._indexed += num_bytes - self._index.get(key, 0)
        self._index[key] = num_bytes

    def _remove(self, key: str) -> int:
        """Return the bytes of a blob that leaves the index, 0 where it is not there; the caller holds the lock."""
        num_bytes = self._index.pop(key, 0)
        self._indexed -= num_bytes
        return num_bytes

    def _forget(self, key: str) -> None:
        with self._lock:
            self._remove(key)
            self._note_change(key)

    def _note_change(self, key: str) -> None:
        """Have listings that go on say nothing about this key; the caller holds the lock."""
        for changed in self._changed.values():
            changed.add(key)
