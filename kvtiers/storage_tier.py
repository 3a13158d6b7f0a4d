"""One tier of storage: objects on a disk, in a shared directory or in a bucket, and what reading them costs.

Every failure is a miss: an object that is missing, damaged or unreadable, and a storage that hangs. A storage that
fails several times in a row is left alone for a while, so that requests don't wait for it one after the other.

A disk's objects are known by name (`index`), since nobody but workers of this machine writes them: a look-up costs no
I/O. A shared storage is asked, where the expected gain is worth the question.
"""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from twostroke.kvtiers.identity import ObjectKey, model_prefix, name_in
from twostroke.kvtiers.objects import (
    ObjectCipher,
    ObjectDamaged,
    ObjectOfAnotherCipher,
    ObjectRows,
    SectionData,
    open_listed_object,
    open_object,
    write_object,
)
from twostroke.kvtiers.storage.blobs import BlobMissing, BlobStore
from twostroke.kvtiers.tier_index import TierIndex
from twostroke.protocol.clock import Clock
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.stats import TierStats

_log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

NEWEST = 0.2
"""Weight of the newest read in what reads are predicted to take."""
QUICKER = 0.5
"""The same where it was quicker to open than predicted."""
FIRST_BYTES_PER_S = 500e6
"""Bytes a second of a storage that nobody has read yet."""
FAILURES = 3
"""Failures in a row after which a storage rests."""
FIRST_REST_S, LONGEST_REST_S = 5.0, 300.0
PROBES = 16
"""One of this many prompts is looked up in a shared storage although it is not expected to be there, or read although
computing is predicted to be quicker."""

HEADERS_AT_ONCE = 64
"""Headers that a scan reads in one call."""
MAX_SEEN = 1 << 16
"""Objects of a storage without an index that are remembered as stored there."""


HANGING_S = 1.0
"""Seconds after which the oldest of reads that hold all threads counts as hanging."""


class Calls(Protocol):
    """Runs blocking calls elsewhere (BlockingCalls), or on virtual time."""

    @property
    def is_full(self) -> bool: ...

    def run(self, call: Callable[[], ResultT]) -> Awaitable[ResultT]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """An object that a prefix has, wherever it may be stored."""

    key: ObjectKey
    rows: ObjectRows

    @property
    def name(self) -> bytes:
        return self.key.name

    @property
    def first_row(self) -> int:
        return self.rows.first_row

    @property
    def end_row(self) -> int:
        return self.rows.first_row + self.rows.num_rows


class _Headers(NamedTuple):
    """Findings of a scan behind some keys."""

    objects: list[tuple[bytes, bytes]]  # name and rows of those that are whole as far as their headers tell
    num_damaged: int
    num_unreadable: int


@dataclass(eq=False)
class _Rests:
    """Failures of one kind of a storage's calls, after FAILURES of which in a row it rests for a while."""

    clock: Clock
    _failures: int = 0
    _until: float = 0.0

    @property
    def is_resting(self) -> bool:
        return self.clock() < self._until

    @property
    def has_failed(self) -> bool:
        """True where the last call failed."""
        return self._failures > 0

    def succeeded(self) -> None:
        """Note a call that ended well."""
        self._failures = 0

    def failed(self) -> float:
        """Note a call that failed; return the seconds of the rest that begins with it, 0 for none."""
        self._failures += 1
        if self._failures % FAILURES:
            return 0.0
        rest_s = min(FIRST_REST_S * 2.0 ** (self._failures // FAILURES - 1), LONGEST_REST_S)
        self._until = self.clock() + rest_s
        return rest_s


@dataclass(eq=False)
class StorageTier:
    """Reads and writes one storage's objects, counts what happens, and predicts what reads take.

    `index` has a disk's objects; None for a storage that others write into. `evicted` gets the keys that are deleted
    for a quota, on whatever thread that happens.
    """

    name: str  # in metrics: `disk` or `shared`
    store: Callable[[], BlobStore]  # waits for the storage, on threads
    layout: KVLayout  # of one rank
    reads: Calls
    writes: Calls
    clock: Clock
    cipher: Callable[[], ObjectCipher | None] = lambda: None  # waits for the key, on threads
    index: TierIndex | None = None
    evicted: deque[str] = field(default_factory=deque)
    num_bytes: Callable[[], int] = lambda: 0
    max_bytes: int = 0
    num_evicted: Callable[[], int] = lambda: 0
    is_open: Callable[[], bool] = lambda: True  # False before a storage that is slow to start with has answered
    read_s: float = 0.002
    hit_share: float = 0.5  # of look-ups in a storage without an index
    write_cpu_s: float = 0.0  # seconds of a core that an object's write takes
    cpu_clock: Clock = time.thread_time
    _counts: dict[str, float] = field(default_factory=dict, init=False)
    _seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict, init=False)  # objects without an index
    _reading: dict[object, float] = field(default_factory=dict, init=False)  # reads' beginnings, the oldest first
    _is_hanging: bool = field(default=False, init=False)  # a write
    _is_late: bool = field(default=False, init=False)  # somebody gave up waiting, and no read has ended since
    _unprobed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.read_token_s = self.layout.token_bytes / FIRST_BYTES_PER_S
        self._read_rests, self._write_rests = _Rests(self.clock), _Rests(self.clock)

    def stats(self) -> TierStats:
        """Return the tier's numbers now."""
        counts = {name: int(value) for name, value in self._counts.items() if not name.endswith("seconds")}
        seconds = {name: value for name, value in self._counts.items() if name.endswith("seconds")}
        return TierStats(
            name=self.name,
            **counts,
            **seconds,  # type: ignore[arg-type]  # they are floats
            evicted=self.num_evicted(),
            num_bytes=self.num_bytes(),
            max_bytes=self.max_bytes,
            is_open=self.is_open(),
            read_s=self.read_s,
            read_token_s=self.read_token_s,
        )

    def count(self, name: str, amount: float = 1) -> None:
        """Add to one of the counters of TierStats."""
        self._counts[name] = self._counts.get(name, 0) + amount

    @property
    def is_resting(self) -> bool:
        """True while nothing is read, because reads failed, all threads hang, or the storage has never answered."""
        if not self.is_open():
            return True
        if not self.reads.is_full:
            return self._read_rests.is_resting
        oldest = next(iter(self._reading.values()), self.clock())
        hangs = self._is_late or self._read_rests.has_failed or self.clock() - oldest > HANGING_S
        return hangs or self._read_rests.is_resting

    @property
    def takes_writes(self) -> bool:
        """False while nothing is written, because writes failed or one hangs."""
        return self.is_open() and not (self._is_hanging or self._write_rests.is_resting)

    def holds(self, name: bytes) -> bool:
        """Return True where the object is known to be here, or was when it was last read or written."""
        return name in (self._seen if self.index is None else self.index)

    def is_worth_asking(self, gain_s: float) -> bool:
        """Return True where a hit that spares `gain_s` is likely enough to wait for the storage's answer."""
        if self.hit_share * gain_s > self.read_s:
            return True
        self._unprobed += 1
        if self._unprobed < PROBES:
            return False
        self._unprobed = 0
        return gain_s > self.read_s

    def was_late(self) -> None:
        """Note that somebody gave up waiting for reads. Where all threads hang, nobody else waits until one is back."""
        self.count("late")
        self._is_late = True

    async def read(self, ref: ObjectRef, wanted: Mapping[int, SectionData]) -> frozenset[int]:
        """Fill the wanted groups' buffers; return the groups that are whole now. Empty: a miss of whatever kind."""
        self.count("lookups")
        began, call = self.clock(), object()
        self._reading[call] = began
        try:
            found, opened_s = await self.reads.run(lambda: self._read(ref, wanted))
        except BlobMissing:
            self._missing(ref)
            self.read_s += NEWEST * (self.clock() - began - self.read_s)
        except ObjectOfAnotherCipher as error:  # the key has changed: nothing is wrong with the object
            self._missing(ref)
            _log.info("an object of the %s tier is left alone: %s", self.name, error)
        except ObjectDamaged as error:
            self.count("quarantined")
            self._missing(ref)
            _log.warning("an object of the %s tier is damaged, and put aside: %s", self.name, error)
        except Exception as error:  # whatever it is, it is a miss
            self._failed("read", error, self._read_rests)
        else:
            self._read_rests.succeeded()
            seconds = self.clock() - began
            num_bytes = sum(buffer.nbytes for group in found for buffer in wanted[group].buffers)
            self.count("hits", bool(found))
            self.count("read_bytes", num_bytes)
            self.count("read_seconds", seconds)
            self.hit_share += NEWEST * (1.0 - self.hit_share)
            # A storage that is quick again is trusted at once.
            self.read_s += (NEWEST if opened_s > self.read_s else QUICKER) * (opened_s - self.read_s)
            self._is_here(ref)
            return found
        finally:
            self._is_late = False
            del self._reading[call]
        return frozenset()

    def learn(self, num_tokens: int, seconds: float, weight: float) -> None:
        """Learn from a prefix whose objects were read one beside the other, with this weight, 0 to 1."""
        self.read_token_s += weight * (max(0.0, seconds - self.read_s) / num_tokens - self.read_token_s)

    async def write(self, ref: ObjectRef, sections: Sequence[SectionData]) -> float:
        """Store an object; return the seconds that it took, failed or not."""
        began = self.clock()
        try:
            cpu_s = await self.writes.run(lambda: self._write(ref, sections))
        except Exception as error:  # whatever it is, the next object may do
            self._failed("write", error, self._write_rests)
        else:
            self._write_rests.succeeded()
            self.write_cpu_s += NEWEST * (cpu_s - self.write_cpu_s)
            self.count("written_objects")
            self.count("written_bytes", sum(buffer.nbytes for one in sections for buffer in one.buffers))
            self.count("write_seconds", self.clock() - began)
            self._is_here(ref)
        self._is_hanging = False
        if self.index is not None:
            while self.evicted:
                self.index.discard(name_in(self.evicted.popleft()))
        return self.clock() - began

    def write_hangs(self) -> None:
        """Note that the write under way takes too long: nothing else is written before it ends."""
        self._is_hanging = True
        self.count("errors")
        _log.warning("a write to the %s tier hangs", self.name)

    async def look(self) -> None:
        """Warn where the storage can't be listed: a wrong bucket looks like one that has nothing."""
        try:
            await self.reads.run(lambda: next(iter(self.store().list()), None))
        except Exception as error:
            self.count("errors")
            _log.warning("the %s tier can't be listed: %s", self.name, error)

    async def scan(self, identity: bytes, num_rows: int | None = None) -> None:
        """Bring the index up to date with what lies in the storage of the model with this identity.

        `num_rows` are those of each object; None: any.

        Other workers of this machine may write and delete there. Headers alone are read, a few at a time, so that
        reads for prompts come between. An object that can't be read is passed over. Raises OSError where the storage
        can't be listed, or none of some objects can be read.
        """
        index = self.index
        if index is None:
            return
        prefix, known = model_prefix(identity), index.object_names()
        found = await self.reads.run(lambda: {name_in(one.key): one.key for one in self.store().list(prefix)})
        for name in known:
            if name not in found:
                index.discard(name)
        new = [key for name, key in found.items() if name not in index]
        for first in range(0, len(new), HEADERS_AT_ONCE):
            some = new[first : first + HEADERS_AT_ONCE]
            headers = await self.reads.run(partial(self._headers, some, identity, num_rows))
            for name, row_hashes in headers.objects:
                index.add(name, row_hashes)
            self.count("quarantined", headers.num_damaged)
            self.count("errors", headers.num_unreadable)

    def close(self) -> None:
        """Let the threads end. Calls under way go on as long as the storage lets them."""
        self.reads.close()
        self.writes.close()

    # --- on threads ---

    def _read(self, ref: ObjectRef, wanted: Mapping[int, SectionData]) -> tuple[frozenset[int], float]:
        """Return the groups that were read, and the seconds until the object was open."""
        began = self.clock()
        try:
            with open_object(self.store(), ref.key, self.layout, self.cipher()) as stored:
                opened_s = self.clock() - began
                if stored.header.rows != ref.rows:
                    raise ObjectDamaged("its rows are not those of the prefix")
                found: list[int] = []
                for index, section in enumerate(stored.header.sections):
                    part = wanted.get(section.group)
                    if part is None or (section.first_row, section.num_rows) != (part.first_row, part.num_rows):
                        continue
                    stored.read_section(index, part.buffers)
                    found.append(section.group)
        except ObjectOfAnotherCipher:
            raise
        except ObjectDamaged:
            self._put_aside(ref.key.path)
            raise
        return frozenset(found), opened_s

    def _headers(self, keys: Sequence[str], identity: bytes, num_rows: int | None) -> _Headers:
        """Return what the headers of the objects with these keys tell. Raises OSError where none can be read."""
        found: list[tuple[bytes, bytes]] = []
        num_damaged = num_unreadable = 0
        for key in keys:
            try:
                with open_listed_object(self.store(), key, self.cipher(), self.layout) as stored:
                    if num_rows not in (None, stored.header.num_rows):
                        raise ObjectDamaged(f"it has {stored.header.num_rows} rows, not {num_rows}")
                    if stored.header.identity == identity:
                        found.append((stored.header.name, stored.header.row_hashes))
            except BlobMissing:
                continue  # another worker has just deleted it
            except ObjectOfAnotherCipher:
                continue
            except ObjectDamaged as error:
                _log.warning("%s is put aside: %s", key, error)
                num_damaged += 1
                self._put_aside(key)
            except Exception as error:  # whatever it is, the others may do
                num_unreadable += 1
                if num_unreadable == len(keys) > 1:
                    raise
                _log.warning("%s can't be read: %s", key, error)
        return _Headers(found, num_damaged, num_unreadable)

    def _put_aside(self, key: str) -> None:
        """Quarantine a damaged object. Where the storage does not let us, it is forgotten all the same."""
        try:
            self.store().quarantine(key)
        except OSError as error:
            _log.warning("%s can't be put aside: %s", key, error)

    def _write(self, ref: ObjectRef, sections: Sequence[SectionData]) -> float:
        """Return the seconds of a core that it took. What another worker has written already is left as it is."""
        began = self.cpu_clock()
        if self.index is None and self._is_there(ref):
            return self.cpu_clock() - began
        write_object(self.store(), ref.key, self.layout, ref.rows, sections, self.cipher())
        return self.cpu_clock() - began

    def _is_there(self, ref: ObjectRef) -> bool:
        try:
            with open_object(self.store(), ref.key, self.layout, self.cipher()):
                return True
        except (BlobMissing, ObjectDamaged):
            return False

    # --- inside ---

    def _is_here(self, ref: ObjectRef) -> None:
        if self.index is not None:
            self.index.add(ref.name, ref.rows.row_hashes)
            return
        self._seen[ref.name] = None
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def _missing(self, ref: ObjectRef) -> None:
        if self.index is not None:
            self.index.discard(ref.name)
        else:
            self._seen.pop(ref.name, None)
            self.hit_share -= NEWEST * self.hit_share

    def _failed(self, what: str, error: BaseException, rests: _Rests) -> None:
        self.count("errors")
        if rest_s := rests.failed():
            _log.warning("the %s tier's %ss rest for %.0f s: %s", self.name, what, rest_s, error)
        else:
            _log.info("a %s of the %s tier failed: %s", what, self.name, error)
