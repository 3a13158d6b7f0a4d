"""A worker's KV tiers on virtual time, over storage in memory, with a worker's two sides of transfers and no engine.

The KV of a block is a hash of its name, so a reader notices a block that is not the one that it asked for.
"""

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.kvtransfer.test_offers import TRANSFERS
from tests.worker.worker_rig import BLOCK, LAYERS, SECRET
from twostroke.kvtiers.host_tier import HostTier
from twostroke.kvtiers.identity import KVIdentity
from twostroke.kvtiers.kv_tiers import KVTiers, ObjectRun, TieredWorker, TierRead
from twostroke.kvtiers.objects import SectionData, write_object
from twostroke.kvtiers.storage_tier import StorageTier
from twostroke.kvtiers.tier_index import TierIndex
from twostroke.kvtransfer.transfer import OutgoingTransfer
from twostroke.protocol.block_hash import BlockHash, chain_hashes
from twostroke.protocol.kv_layout import NO_BLOCK
from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import TierStats
from twostroke.simulator.memory_blobs import MemoryBlobs, VirtualCalls
from twostroke.simulator.memory_network import MemoryFabric
from twostroke.simulator.memory_store import FakeStore, fake_layout
from twostroke.simulator.memory_transport import LinkFabric, Parts, parts_around
from twostroke.simulator.virtual_loop import describe, run_virtually

WORKER = Peer("prefill-0", 11)
OBJECT_TOKENS = 8
ROWS = OBJECT_TOKENS // BLOCK
TOKEN_S = 0.05
"""Seconds of computing one token, of which an object has eight."""
CALL_S = 0.01
"""Seconds of a call of the storage, where a test does not say otherwise."""
THREADS = 4


def prompt(objects: int, salt: bytes = b"") -> list[BlockHash]:
    """Return the names of the blocks of a prompt of so many objects; longer ones begin like shorter ones."""
    return chain_hashes(range(objects * OBJECT_TOKENS), BLOCK, salt)


def kv_of(name: BlockHash, layer: int, num_bytes: int) -> bytes:
    """Return the bytes of a block in one layer."""
    return hashlib.shake_128(name + bytes([layer])).digest(num_bytes)


@dataclass
class Storage:
    """A storage that outlives workers."""

    blobs: MemoryBlobs = field(default_factory=lambda: MemoryBlobs(random.Random(1)))
    next_s: list[float] = field(default_factory=list)  # seconds of the next reads; CALL_S afterwards
    write_s: float = CALL_S
    reads: VirtualCalls = field(init=False)
    writes: VirtualCalls = field(init=False)
    num_bytes: int = 0
    max_bytes: int = 0

    def __post_init__(self) -> None:
        self.reads = VirtualCalls(THREADS, lambda: self.next_s.pop(0) if self.next_s else CALL_S)
        self.writes = VirtualCalls(1, lambda: self.write_s)


@dataclass
class TiersRig:
    """Started tiers and the worker that they serve."""

    tiers: KVTiers
    worker: Parts
    own: Parts  # the tiers' sides of transfers
    disk: Storage
    shared: Storage | None
    remake: Callable[[], Awaitable["TiersRig"]]

    @property
    def host(self) -> HostTier:
        return self.tiers.host

    def stats(self, name: str = "disk") -> TierStats:
        return next(one for one in self.tiers.stats() if one.name == name)

    def store(
        self, hashes: Sequence[BlockHash], *, lacking: frozenset[int] = frozenset(), shared: bool = False
    ) -> None:
        """Have a prefix's objects in the storage, as another worker has written them."""
        layout = self.host.store.layout
        storage = self.shared if shared else self.disk
        assert storage is not None
        for ref in self.tiers.objects.refs(hashes, b""):
            sections = []
            for group, first in self.tiers.objects.kept_rows(ref, range(layout.groups.count)).items():
                names = [ref.rows.row_hashes[16 * row : 16 * row + 16] for row in range(first - ref.first_row, ROWS)]
                layers = [layer for layer, of in enumerate(layout.groups.of_layer) if of == group]
                content = b"".join(kv_of(name, layer, layout.block_bytes) for layer in layers for name in names)
                if group not in lacking:
                    sections.append(SectionData(group, first, len(names), [memoryview(content)]))
            write_object(storage.blobs, ref.key, layout, ref.rows, sections)
            if self.tiers.index is not None and not shared:
                self.tiers.index.add(ref.name, ref.rows.row_hashes)

    def begin(
        self, hashes: Sequence[BlockHash], num_cached: int = 0, *, token_s: float = TOKEN_S, **more: Any
    ) -> TierRead | None:
        """Begin a read of a prompt that takes `token_s` a token to compute."""
        values: dict[str, Any] = {"most_wait_s": 100.0} | more
        spared = {"spared_s": lambda end: token_s * (end - num_cached)}
        return self.tiers.begin_read("r", hashes, b"", num_cached=num_cached, **spared, **values)  # type: ignore[arg-type]

    async def read(self, hashes: Sequence[BlockHash], num_cached: int = 0, **more: Any) -> int:
        """Return the end of the prefix whose KV has come, right in all bytes; 0: none was begun or offered."""
        read = self.begin(hashes, num_cached, **more)
        return 0 if read is None else await self.pull(read, hashes, num_cached)

    async def pull(self, read: TierRead, hashes: Sequence[BlockHash], num_cached: int = 0) -> int:
        """Await a read's offer and pull it, as a worker does."""
        receiver, loop = self.worker.receiver, asyncio.get_running_loop()
        until = loop.time() + read.wait_s + 0.25
        while not receiver.has_offer(read.ticket):
            assert loop.time() < until, "neither an offer nor a decline came in time"
            await asyncio.sleep(0.001)
        num_tokens = receiver.offered_tokens(read.ticket.transfer_id)
        if num_tokens is None:
            return 0
        count = self.host.groups.count
        table = self.worker.pool.allocate(num_tokens // BLOCK * count)
        try:
            await receiver.expect_transfer(read.ticket, table, num_tokens, num_cached).verified()
            assert self.is_right(table, hashes, num_cached, num_tokens)
        finally:
            self.worker.pool.release(table)
        return num_tokens

    def is_right(self, table: Sequence[int], hashes: Sequence[BlockHash], first: int, end: int) -> bool:
        """Return whether the worker's blocks hold what the token behind `end` attends to, from token `first` on."""
        groups, store = self.host.groups, self.worker.store
        size = store.layout.block_bytes
        for layer, group in enumerate(groups.of_layer):
            memory = store.layer_bytes(groups.tensor_of_layer[layer])
            for row in range(max(first, groups.first_kept(group, end)) // BLOCK, end // BLOCK):
                block_id = table[row * groups.count + group]
                if bytes(memory[block_id * size : (block_id + 1) * size]) != kv_of(hashes[row], layer, size):
                    return False
        return True

    def compute(self, hashes: Sequence[BlockHash]) -> list[int]:
        """Return the block table of a computed prompt; the caller releases it."""
        groups, store = self.host.groups, self.worker.store
        table = self.worker.pool.allocate(len(hashes) * groups.count)
        for layer, group in enumerate(groups.of_layer):
            for row, name in enumerate(hashes):
                block = store.layers[groups.tensor_of_layer[layer]][table[row * groups.count + group]]
                block[:] = np.frombuffer(kv_of(name, layer, block.nbytes), np.uint16).reshape(block.shape)
        return table

    def used(self, hashes: Sequence[BlockHash], *, keeps: bool = False, token_s: float = 0.0) -> list[ObjectRun]:
        """Tell of a request that has ended; return what is due."""
        return self.tiers.request_ended(hashes, b"", keeps=keeps, token_s=token_s)

    async def send(self, run: ObjectRun, hashes: Sequence[BlockHash], lacking: frozenset[int] = frozenset()) -> bool:
        """Send a run as the worker does; return whether it went."""
        transfer = self.begin_send(run, hashes, lacking)
        if transfer is None:
            return False
        transfer.commit(None)
        await transfer.done()
        return True

    def begin_send(
        self, run: ObjectRun, hashes: Sequence[BlockHash], lacking: frozenset[int] = frozenset()
    ) -> OutgoingTransfer | None:
        """Begin to send a run, of which nothing has gone before the transfer's commit."""
        ticket = self.tiers.begin_write(run, lacking)
        if ticket is None:
            self.tiers.drop(run)
            return None
        table = self.compute(hashes[: run.end_row])
        table[: run.first_row * self.host.groups.count] = [
            NO_BLOCK if self.worker.pool.release([block_id]) is None else block_id
            for block_id in table[: run.first_row * self.host.groups.count]
        ]
        end = run.end_row * BLOCK
        transfer = self.worker.sender.begin_transfer(ticket, end, table, end)
        self._release_after(transfer, table)
        return transfer

    def _release_after(self, transfer: OutgoingTransfer, table: list[int]) -> None:
        async def release() -> None:
            await asyncio.gather(transfer.done(), return_exceptions=True)
            self.worker.pool.release(table)

        asyncio.create_task(release(), name="the worker's blocks").add_done_callback(lambda task: task.exception())

    async def write(self, hashes: Sequence[BlockHash], *, keeps: bool = True) -> None:
        """Have a prompt's objects written, as a request that wants them kept has."""
        for run in self.used(hashes, keeps=keeps):
            assert await self.send(run, hashes)
        await self.idle()

    async def idle(self) -> None:
        """Return once nothing is under way."""
        while self.tiers.is_busy:  # noqa: ASYNC110  (virtual time)
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self.tiers.close()
        await self.worker.close()
        await self.own.transports.close()


def play(
    script: Callable[[TiersRig], Awaitable[None]],
    *,
    host_objects: int = 16,
    windows: tuple[int, ...] = (),
    has_disk: bool = True,
    has_shared: bool = False,
    is_left_busy: bool = False,
    **settings: Any,
) -> None:
    """Run `script` with tiers. Afterwards no block, no pin and no task of theirs may be left."""

    async def main() -> None:
        disk, shared = Storage(), Storage() if has_shared else None
        layout = fake_layout(num_layers=LAYERS, block_size=BLOCK, windows=windows)
        made: list[TiersRig] = []

        async def make() -> TiersRig:
            epoch = len(made)
            fabric, links = MemoryFabric(seed=1 + epoch), LinkFabric(bytes_per_s=1e6)
            peer = Peer(WORKER.worker_id, WORKER.epoch + epoch)
            worker = parts_around(FakeStore(layout, num_blocks=64), peer, fabric.at("worker"), links, TRANSFERS, SECRET)
            store = FakeStore(layout, num_blocks=host_objects * ROWS * layout.groups.count)
            own = parts_around(store, Peer("prefill-0/tiers", 1), fabric.at("tiers"), links, TRANSFERS, SECRET)
            clock = asyncio.get_running_loop().time

            def tier(name: str, storage: Storage, index: TierIndex | None) -> StorageTier:
                return StorageTier(
                    name,
                    lambda: storage.blobs,
                    layout,
                    storage.reads,
                    storage.writes,
                    clock,
                    index=index,
                    num_bytes=lambda: storage.num_bytes,
                    max_bytes=storage.max_bytes,
                )

            storage = [tier("disk", disk, TierIndex())] if has_disk else []
            if shared is not None:
                storage.append(tier("shared", shared, None))
            tiers = KVTiers(
                identity=KVIdentity(layout, "", "float32", OBJECT_TOKENS),
                host=HostTier(store),
                storage=storage,
                sender=own.sender,
                receiver=own.receiver,
                secret=SECRET,
                clock=clock,
                **settings,
            )
            addresses = await worker.receiver.start("worker")
            await tiers.start("tiers", TieredWorker(peer, addresses, layout.cut))
            made.append(TiersRig(tiers, worker, own, disk, shared, make))
            return made[-1]

        await script(await make())
        for rig in made:
            if not is_left_busy:
                await rig.idle()
            await rig.close()
            assert rig.worker.pool.owned_blocks == 0
            if not is_left_busy:
                rig.host.check_integrity()
        await asyncio.sleep(1.0)
        left = {task for task in asyncio.all_tasks() - {asyncio.current_task()} if task is not None}
        assert not left, [describe(task) for task in left]

    run_virtually(main(), limit_s=10_000.0)
