"""A worker's KV tiers: a peer without an engine, from which the worker pulls prefixes and to which it sends them.

The tiers have a KV store in host memory with both sides of KV transfer, like a worker's. So a prefix is read by a pull
and written by a transfer, and what those do for unequal ranks, stages, windows and states serves tiers too:

    read    storage -> host memory -> transfer -> the worker's blocks
    write   the worker's blocks -> transfer -> host memory -> storage

A read has a deadline, before which computing would not be done. What has arrived by then is offered; the rest is
computed. A read that fails offers less, or declines. Nothing here fails a request.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from twostroke.kvtiers.host_tier import HostObject, HostTier, PrefixObjects
from twostroke.kvtiers.identity import KVIdentity
from twostroke.kvtiers.storage_tier import PROBES, ObjectRef, StorageTier
from twostroke.kvtiers.tier_index import TierIndex, UseCounts
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.transfer import IncomingTransfer, OutgoingTransfer
from twostroke.protocol.block_hash import BlockHash
from twostroke.protocol.clock import Clock
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.kv_layout import RankCut
from twostroke.protocol.requests import Address, Peer, Ticket, mint_ticket
from twostroke.protocol.stats import TierStats

_log = logging.getLogger(__name__)

READS_AT_ONCE = 4
"""Objects of one prefix that are read one beside the other."""
MIN_WAIT_S = 0.25
"""Time that a read is given at least, where computing takes longer: predictions of milliseconds mean little."""
PATIENCE = 2.0
"""A read may take this many times what was predicted."""
FIRST_LINK_BYTES_PER_S = 2e9
"""Bytes a second between host memory and the worker's cache, before anything was sent."""
NEWEST = 0.2
"""Weight of the newest transfer in what transfers are predicted to take."""
SCAN_S = 30.0
"""Seconds between scans of a disk, into which other workers of the machine may write."""
FIRST_SCAN_S = 2.0
"""Seconds for which a worker's start waits for the first scan, which goes on behind it: some 20,000 objects."""
FLUSH_S = 5.0
"""Seconds that a worker that ends gives its tiers to write what waits."""
ROOM_SHARE = 0.9
"""Share of a disk's quota up to which objects are written at their first use."""
CHEAP_SHARE = 0.02
"""Share of a prompt's computing time that a core may take to write it at its first use."""
HANG_S = 20.0
"""Seconds after which a write counts as hanging."""
MAX_WRITES = 64
"""Objects that wait for one storage; more are dropped."""


@dataclass(frozen=True, slots=True)
class TieredWorker:
    """The worker that the tiers serve, as a peer of transfers."""

    peer: Peer
    addresses: tuple[Address, ...]  # where its ranks listen for KV
    cut: RankCut


@dataclass(frozen=True, slots=True)
class TierRead:
    """A prefix that is being read. The worker awaits the ticket's offer for `wait_s` seconds at most."""

    ticket: Ticket
    wait_s: float
    refs: tuple[tuple[ObjectRef, StorageTier | None], ...]  # and where each is; None: in host memory
    is_probe: bool = False  # begun although computing was predicted to be quicker

    @property
    def weight(self) -> float:
        """Weight of what the read takes in what reads are predicted to take."""
        return 1.0 if self.is_probe else NEWEST


@dataclass(eq=False, slots=True)
class ObjectRun:
    """Objects that follow each other in a prefix, and that are to be written."""

    refs: tuple[ObjectRef, ...]

    @property
    def first_row(self) -> int:
        return self.refs[0].first_row

    @property
    def end_row(self) -> int:
        return self.refs[-1].end_row


@dataclass(eq=False)
class TierWriter:
    """The queue of one storage, whose objects are pinned: written one after the other and for a share of the time, so
    that reads come between.

    Each storage has its own: one that hangs keeps nothing from the others. What waits behind a write that hangs is
    dropped, since its memory is needed; the write itself goes on, and its memory stays until it has ended.
    """

    tier: StorageTier
    objects: PrefixObjects
    share: float  # of its time that it writes, at most
    on_done: Callable[[ObjectRef], None]  # an object is written, or dropped
    waiting: deque[tuple[ObjectRef, HostObject]] = field(default_factory=deque, init=False)
    _running: "asyncio.Task[None] | None" = field(default=None, init=False)
    _writing: "asyncio.Task[float] | None" = field(default=None, init=False)
    _is_closing: bool = field(default=False, init=False)

    @property
    def is_busy(self) -> bool:
        """True while something is written, or waits to be."""
        return self._running is not None

    @property
    def num_waiting(self) -> int:
        """Objects that are not written yet."""
        return len(self.waiting) + (self._writing is not None)

    def add(self, ref: ObjectRef, one: HostObject) -> None:
        """Write an object behind all that waits; never waits."""
        one.pins += 1
        self.waiting.append((ref, one))
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name=f"writer of the {self.tier.name} tier")

    async def close(self, timeout_s: float) -> None:
        """Write what waits, for so long at most. The storage's threads may go on behind that."""
        self._is_closing = True
        if self._running is None:
            return
        await asyncio.wait({self._running}, timeout=timeout_s)
        left = [task for task in (self._running, self._writing) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while self.waiting:
                ref, one = self.waiting.popleft()
                sections = [self.objects.section(one, group) for group in sorted(one.blocks)]
                writing = self._writing = asyncio.create_task(self.tier.write(ref, sections), name="object's write")
                ended, _ = await asyncio.wait({writing}, timeout=HANG_S)
                if not ended:
                    self.tier.write_hangs()
                    self._drop_waiting()
                    await asyncio.wait({writing})  # nothing else is written before the storage is back
                self._writing = None
                self._end(ref, one)
                if not self._is_closing:
                    await asyncio.sleep(writing.result() * (1.0 / self.share - 1.0))
        finally:
            self._running = None

    def _drop_waiting(self) -> None:
        while self.waiting:
            ref, one = self.waiting.popleft()
            self.tier.count("dropped")
            self._end(ref, one)

    def _end(self, ref: ObjectRef, one: HostObject) -> None:
        one.pins -= 1
        self.on_done(ref)


@dataclass(eq=False, kw_only=True)
class KVTiers:
    """The tiers of one worker, in the order in which they are looked up; the host's comes first."""

    identity: KVIdentity
    host: HostTier
    storage: Sequence[StorageTier]
    sender: KVSender
    receiver: KVReceiver
    secret: bytes
    clock: Clock
    write_share: float = 0.5
    read_wait_s: float = 10.0
    _uses: UseCounts = field(default_factory=UseCounts, init=False)
    _loading: dict[tuple[bytes, bool], asyncio.Task[HostObject | None]] = field(default_factory=dict, init=False)
    _tasks: dict[asyncio.Task[None], None] = field(default_factory=dict, init=False)  # in order: simulations replay
    _under_way: Counter[bytes] = field(default_factory=Counter, init=False)  # writes to come, by the object's name
    _worker: TieredWorker | None = field(default=None, init=False)
    _scans: list[asyncio.Task[None]] = field(default_factory=list, init=False)
    _unread: int = field(default=0, init=False)  # prompts since a read, for which computing was predicted to be quicker
    _is_closing: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        layout = self.host.store.layout
        self.object_rows = max(1, self.identity.object_tokens // layout.block_size)
        self._block_size = layout.block_size
        self.writers: dict[StorageTier, TierWriter] = {}
        self.objects = PrefixObjects(self.identity.digest, self.object_rows, self.host)
        self._host_counts = {"lookups": 0, "hits": 0, "hit_tokens": 0}
        self._link_token_s = layout.token_bytes / FIRST_LINK_BYTES_PER_S
        self._peer = self.sender.peer
        self._groups = self.host.groups
        for tier in self.storage:
            self.writers[tier] = TierWriter(tier, self.objects, self.write_share, self._write_ended)
        self._addresses: tuple[Address, ...] = ()

    async def start(self, host: str, worker: TieredWorker) -> None:
        """Listen for the worker's KV, and learn what the storage holds, as far as FIRST_SCAN_S allow.

        Raises ConnectionLost where `host` can't be listened on.
        """
        self._worker = worker
        self._addresses = await self.receiver.start(host)
        scanned: list[asyncio.Task[bool]] = []
        for tier in self.storage:
            if tier.index is not None:
                first = asyncio.Event()
                scanned.append(asyncio.create_task(first.wait()))
                self._scans.append(asyncio.create_task(self._scan(tier, first), name=f"scan of the {tier.name} tier"))
            else:
                self._scans.append(asyncio.create_task(tier.look(), name=f"first look at the {tier.name} tier"))
        if scanned:  # the first prompts after a restart need it most
            await asyncio.wait(scanned, timeout=FIRST_SCAN_S)
            for waiter in scanned:
                waiter.cancel()

    async def close(self) -> None:
        """End all transfers, once what waits to be written is, or after FLUSH_S: a storage may hang."""
        self._is_closing = True
        for task in (*self._tasks, *self._loading.values(), *self._scans):
            task.cancel()
        await asyncio.gather(*(writer.close(FLUSH_S) for writer in self.writers.values()))
        await asyncio.gather(*self._tasks, *self._loading.values(), *self._scans, return_exceptions=True)
        await self.sender.close()
        await self.receiver.close()
        for tier in self.storage:
            tier.close()

    def stats(self) -> tuple[TierStats, ...]:
        """Return each tier's numbers now."""
        host = TierStats(
            name="host",
            **self._host_counts,  # type: ignore[arg-type]  # they are numbers
            num_bytes=self.host.num_bytes,
            max_bytes=self.host.max_bytes,
            read_token_s=self._link_token_s,
        )
        return (host, *(tier.stats() for tier in self.storage))

    @property
    def is_busy(self) -> bool:
        """True while anything is read, sent, received or written."""
        return bool(self._tasks or self._loading) or any(writer.is_busy for writer in self.writers.values())

    @property
    def index(self) -> TierIndex | None:
        """The objects that outlive the worker and are known by name; None where no storage has an index."""
        return next((tier.index for tier in self.storage if tier.index is not None), None)

    async def _scan(self, tier: StorageTier, first: asyncio.Event) -> None:
        """Keep a storage's index up to date, from its first scan on."""
        while True:
            began = self.clock()
            try:
                await tier.scan(self.objects.digest, self.object_rows)
            except Exception as error:  # whatever it is, the next scan may do
                tier.count("errors")
                _log.warning("the %s tier can't be listed: %s", tier.name, error)
            first.set()
            # Of a large directory's scans, this leaves nine tenths of a thread to reads.
            await asyncio.sleep(max(SCAN_S, 9 * (self.clock() - began)))

    # --- reading ---

    def begin_read(
        self,
        request_id: str,
        hashes: Sequence[BlockHash],
        client: bytes,
        *,
        num_cached: int,
        spared_s: Callable[[int], float],
        most_wait_s: float,
    ) -> TierRead | None:
        """Begin to read what the tiers hold of a prompt beyond its first `num_cached` tokens; never waits.

        `hashes` are the names of the prompt's blocks, `spared_s(n)` the seconds that computing the tokens from
        `num_cached` up to `n` takes. Return None where nothing is held, or computing is quicker. The offer to the
        returned ticket, or its decline, comes within about `wait_s`. One in PROBES prompts is read although computing
        is predicted to be quicker: else a storage that was slow once would never be read again.
        """
        if self._worker is None or self._is_closing:
            return None
        refs = self.objects.refs(hashes, client)[num_cached // self._block_size // self.object_rows :]
        found = self._find(refs, num_cached, spared_s)
        if not found:
            return None
        end = found[-1][0].end_row * self._block_size
        predicted_s = self._predicted_s(found, num_cached)
        wait_s = max(PATIENCE * predicted_s, MIN_WAIT_S)
        if is_probe := predicted_s >= spared_s(end):
            self._unread += 1
            if self._unread < PROBES:
                return None
            wait_s = MIN_WAIT_S
        wait_s = min(wait_s, spared_s(end), most_wait_s, self.read_wait_s)
        if wait_s <= 0.0:
            return None
        self._unread = 0
        ticket = mint_ticket(
            self.secret,
            request_id,
            self._peer,
            self._worker.peer,
            self._worker.addresses,
            target_cut=self._worker.cut,
        )
        read = TierRead(ticket, wait_s, tuple(found), is_probe)
        self._track(self._serve(read), f"tiers' read for {request_id}")
        return read

    def _find(
        self, refs: Sequence[ObjectRef], num_cached: int, spared_s: Callable[[int], float]
    ) -> list[tuple[ObjectRef, StorageTier | None]]:
        """Return the objects that follow the cached prefix and are held somewhere, or perhaps are."""
        usable = [tier for tier in self.storage if not tier.is_resting]
        known = [tier for tier in usable if tier.index is not None]
        found: list[tuple[ObjectRef, StorageTier | None]] = []
        for ref in refs:
            tier = next((tier for tier in known if tier.holds(ref.name)), None)
            if tier is None and ref.name not in self.host:
                break
            found.append((ref, None if ref.name in self.host else tier))
        if len(found) < len(refs) and (asked := next((tier for tier in usable if tier.index is None), None)):
            held = found[-1][0].end_row * self._block_size if found else num_cached
            gain_s = spared_s(refs[-1].end_row * self._block_size) - (spared_s(held) if held > num_cached else 0.0)
            if asked.is_worth_asking(gain_s):
                found += [(ref, asked) for ref in refs[len(found) :]]
        return found

    def _predicted_s(self, found: Sequence[tuple[ObjectRef, StorageTier | None]], num_cached: int) -> float:
        """Return what reading these objects, and moving them to the worker, will take."""
        tokens = self.object_rows * self._block_size
        tiers = dict.fromkeys(tier for _, tier in found if tier is not None)
        reading_s = sum(tier.read_s for tier in tiers)
        reading_s += sum(tokens * tier.read_token_s for _, tier in found if tier is not None)
        return reading_s + (found[-1][0].end_row * self._block_size - num_cached) * self._link_token_s

    async def _serve(self, read: TierRead) -> None:
        """Load a prefix's objects, and send them to the worker."""
        objects: list[HostObject] = []
        began = self.clock()
        try:
            await self._load(read, objects)
            await self._load_windows(read, objects, began + read.wait_s)
            self._learn(read, objects, self.clock() - began)
            if not objects:
                self.sender.decline_transfer(read.ticket, "the tiers hold nothing of the prompt any more, or are slow")
                return
            await self._send(read, objects)
        except asyncio.CancelledError:
            self.sender.decline_transfer(read.ticket, "the worker is closing")
            raise
        finally:
            for one in objects:
                one.pins -= 1

    async def _load(self, read: TierRead, objects: list[HostObject]) -> None:
        """Append the objects that are in memory by the deadline, pinned, with the groups that keep all tokens."""
        pending: deque[asyncio.Task[HostObject | None]] = deque()
        todo = deque(read.refs)
        try:
            async with asyncio.timeout(read.wait_s):
                while todo or pending:
                    while todo and len(pending) < READS_AT_ONCE:
                        ref, tier = todo.popleft()
                        pending.append(self._loaded(ref, tier, is_windows=False))
                    one = await asyncio.shield(pending.popleft())
                    if one is None or self.host.get(one.name) is not one:  # evicted since, and perhaps read again
                        return
                    one.pins += 1
                    objects.append(one)
        except TimeoutError:
            for tier in dict.fromkeys(tier for _, tier in read.refs if tier is not None):
                tier.was_late()

    async def _load_windows(self, read: TierRead, objects: list[HostObject], deadline: float) -> None:
        """Load what follow-ups need of groups with a window; drop objects from the end until all of it is there."""
        windowed = self._groups.windowed
        while objects and windowed:
            end_row = objects[-1].end_row
            try:
                async with asyncio.timeout(max(0.0, deadline - self.clock())):
                    is_whole = True
                    for one, (ref, tier) in zip(objects, read.refs, strict=False):
                        if self.objects.lacks(one, end_row):
                            await asyncio.shield(self._loaded(ref, tier, is_windows=True))
                            is_whole = is_whole and not self.objects.lacks(one, end_row)
            except TimeoutError:
                is_whole = False
            if is_whole:
                return
            objects.pop().pins -= 1

    def _loaded(
        self, ref: ObjectRef, tier: StorageTier | None, *, is_windows: bool
    ) -> "asyncio.Task[HostObject | None]":
        """Return the task that brings a part of an object into memory; requests that want the same share it."""
        key = ref.name, is_windows
        task = self._loading.get(key)
        if task is None:
            task = asyncio.create_task(self._fetch(ref, tier, is_windows=is_windows), name="tiers' object")
            self._loading[key] = task
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        return task

    async def _fetch(self, ref: ObjectRef, tier: StorageTier | None, *, is_windows: bool) -> HostObject | None:
        """Bring the groups with a window, or all others, of an object into memory; None where that fails."""
        held = self.host.get(ref.name)
        groups = (
            self._groups.windowed
            if is_windows
            else [group for group in range(self._groups.count) if group not in self._groups.windowed]
        )
        wanted = self.objects.kept_rows(ref, groups)
        missing = {group: first for group, first in wanted.items() if held is None or group not in held.blocks}
        if not is_windows:
            self._host_counts["lookups"] += 1
        if not missing and held is not None:
            self._host_counts["hits"] += not is_windows
            return held
        tier = tier or next((one for one in self.storage if one.holds(ref.name)), None)
        if tier is None:
            return None
        if held is not None:
            held.pins += 1
        one = self.objects.room_for(ref, missing)
        try:
            if one is None:
                return None
            found = await tier.read(ref, {group: self.objects.section(one, group) for group in missing})
            for group in missing.keys() - found:
                self.host.give_back(one, group)
            if not is_windows and found != missing.keys():
                self.host.free(one)
                return None
            return self.host.add(one)
        finally:
            if held is not None:
                held.pins -= 1

    def _learn(self, read: TierRead, objects: Sequence[HostObject], seconds: float) -> None:
        """Learn what reading takes, and count the tokens, by tier."""
        tokens, first = self.object_rows * self._block_size, read.refs[0][1]
        if not objects and first is not None and seconds >= read.wait_s:
            first.learn(tokens, seconds, read.weight)  # at least
        by_tier: dict[StorageTier, int] = {}
        for _, tier in read.refs[: len(objects)]:
            if tier is None:
                self._host_counts["hit_tokens"] += tokens
            else:
                by_tier[tier] = by_tier.get(tier, 0) + tokens
        for tier, num_tokens in by_tier.items():
            tier.count("hit_tokens", num_tokens)
            if len(by_tier) == 1:
                tier.learn(num_tokens, seconds, read.weight)

    async def _send(self, read: TierRead, objects: Sequence[HostObject]) -> None:
        first, end = objects[0].first_row * self._block_size, objects[-1].end_row * self._block_size
        began = self.clock()
        transfer = self.sender.begin_transfer(read.ticket, end, self.host.table(objects), end, min_skip_tokens=first)
        transfer.commit(None)
        try:
            await _ended(transfer)
        except TransferFailed as error:
            _log.info("a prefix from the tiers was not sent: %s", error)
        else:
            self._link_token_s += read.weight * ((self.clock() - began) / (end - first) - self._link_token_s)

    # --- writing ---

    def request_ended(
        self, hashes: Sequence[BlockHash], client: bytes, *, keeps: bool, token_s: float
    ) -> list[ObjectRun]:
        """Count a use of a sequence's objects; return runs of those that are to be written now.

        These are objects that a tier lacks and that were used before, or all with `keeps`, and where writing costs
        little beside computing, which takes `token_s` seconds a token. They count as under way until they are written:
        `begin_write` or `drop` must follow for each run.
        """
        due: list[ObjectRun] = []
        if self._worker is None or self._is_closing:
            return due
        least_uses = 1 if keeps or self._is_cheap(token_s) else 2
        for ref in self.objects.refs(hashes, client):
            uses = self._uses.use(ref.name)
            if uses >= least_uses and self._is_lacking(ref):
                self._under_way[ref.name] = 1
                if due and due[-1].end_row == ref.first_row and not self._groups.windowed:
                    due[-1].refs += (ref,)
                else:  # what is sent of windows depends on where a transfer ends
                    due.append(ObjectRun((ref,)))
        return due

    def _is_cheap(self, token_s: float) -> bool:
        """Return True where objects may be written at their first use.

        A chat's beginning often comes back once only. So where a disk has room it is written at once, unless traffic
        that never comes back would feel it.
        """
        tokens = self.object_rows * self._block_size
        cost_s = self._link_token_s + sum(tier.write_cpu_s for tier in self.storage) / tokens
        has_room = any(tier.num_bytes() < ROOM_SHARE * tier.max_bytes for tier in self.storage if tier.max_bytes)
        is_idle = not any(writer.num_waiting for writer in self.writers.values())
        return (has_room or not self.storage) and is_idle and cost_s <= CHEAP_SHARE * token_s

    def _is_lacking(self, ref: ObjectRef) -> bool:
        if ref.name in self._under_way:
            return False
        return bool(self._lacking(ref)) if self.storage else ref.name not in self.host

    def _lacking(self, ref: ObjectRef) -> tuple[StorageTier, ...]:
        """Return the storage tiers that take writes and are not known to hold an object."""
        return tuple(tier for tier in self.storage if tier.takes_writes and not tier.holds(ref.name))

    def drop(self, run: ObjectRun) -> None:
        """Count a run that is not written, since its blocks are gone or there is no room."""
        for ref in run.refs:
            del self._under_way[ref.name]
            for tier in self._lacking(ref):
                tier.count("dropped")

    def begin_write(self, run: ObjectRun, lacking_groups: frozenset[int]) -> Ticket | None:
        """Expect a run's KV from the worker; never waits. Return the transfer's ticket; None, where there is no room.

        Where there is room for the first objects alone, the run is cut to these.
        `lacking_groups` are groups whose rows the worker has no more: what it sends for them means nothing.
        """
        num_waiting = max((writer.num_waiting for writer in self.writers.values()), default=0)
        if self._worker is None or self._is_closing or num_waiting + len(run.refs) > MAX_WRITES:
            return None
        objects: list[HostObject] = []
        for ref in run.refs:
            one = self.objects.room_for(ref, self.objects.kept_rows(ref, range(self._groups.count)))
            if one is None:
                break
            one.pins = 1
            objects.append(one)
        if not objects:
            return None
        if rest := run.refs[len(objects) :]:
            self.drop(ObjectRun(rest))
            run.refs = run.refs[: len(objects)]
        end, first = run.end_row * self._block_size, run.first_row * self._block_size
        ticket = mint_ticket(
            self.secret, "tiers", self._worker.peer, self._peer, self._addresses, source_cut=self._worker.cut
        )
        incoming = self.receiver.expect_transfer(ticket, self.host.table(objects), end, skip_tokens=first)
        self._track(self._receive(run, objects, incoming, lacking_groups), "tiers' write")
        return ticket

    async def _receive(
        self,
        run: ObjectRun,
        objects: Sequence[HostObject],
        incoming: IncomingTransfer,
        lacking_groups: frozenset[int],
    ) -> None:
        try:
            await incoming.verified()
        except (TransferFailed, asyncio.CancelledError) as error:
            incoming.abort("the tiers are closing")
            await asyncio.gather(incoming.verified(), return_exceptions=True)
            for one in objects:
                self.host.free(one)
            self.drop(run)
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        # What is written first is dropped first, and an end without its beginning is of no use.
        for ref, one in reversed(list(zip(run.refs, objects, strict=True))):
            for group in lacking_groups:
                self.host.give_back(one, group)
            kept, tiers = self.host.add(one), self._lacking(ref)
            one.pins -= 1
            self._under_way[ref.name] = len(tiers) + 1
            for tier in tiers:
                self.writers[tier].add(ref, kept)
            self._write_ended(ref)

    def _write_ended(self, ref: ObjectRef) -> None:
        self._under_way[ref.name] -= 1
        if self._under_way[ref.name] <= 0:
            del self._under_way[ref.name]

    def _track(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)


async def _ended(transfer: OutgoingTransfer) -> None:
    """Wait for the end of a transfer, which a cancelled waiter gives up: nothing reads the blocks after this."""
    try:
        await transfer.done()
    except asyncio.CancelledError:
        transfer.abort("the worker is closing")
        await asyncio.gather(transfer.done(), return_exceptions=True)
        raise
