"""KV tiers of simulated workers: the real ones over storage in memory, which outlives its workers."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.kvtiers.host_tier import HostTier
from twostroke.kvtiers.identity import KVIdentity
from twostroke.kvtiers.kv_tiers import KVTiers
from twostroke.kvtiers.storage.blobs import BlobStore
from twostroke.kvtiers.storage.quota import QuotaBlobs
from twostroke.kvtiers.storage_tier import StorageTier
from twostroke.kvtiers.tier_index import TierIndex
from twostroke.kvtransfer.config import TransferConfig
from twostroke.protocol.kv_layout import ONE_RANK, KVLayout
from twostroke.protocol.requests import Peer
from twostroke.protocol.stats import Role
from twostroke.simulator.memory_blobs import MemoryBlobs, VirtualCalls
from twostroke.simulator.memory_network import MemoryNetwork
from twostroke.simulator.memory_store import FakeStore
from twostroke.simulator.memory_transport import LinkFabric, Parts, parts_around

THREADS = 4


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """The tiers that all workers of a fleet have."""

    object_tokens: int
    host_blocks: int
    has_disk: bool  # one for each role, whose workers share it
    disk_bytes: int = 10**9
    has_shared: bool
    call_s: float  # longest time of a call of a storage


@dataclass(frozen=True)
class SimTiers:
    """One worker's tiers."""

    tiers: KVTiers
    parts: Parts


class SimStorage:
    """All storage of a simulation, by name: `disk prefill`, `disk decode`, `shared`."""

    def __init__(self, seed: int, secret: bytes):
        self._secret = secret
        self._draw = random.Random(f"storage of {seed}")
        self.blobs: dict[str, MemoryBlobs] = {}
        self.calls: dict[str, list[VirtualCalls]] = {}  # of all workers that have used a storage

    def make_tiers(
        self,
        plan: TierPlan,
        role: Role,
        worker: Peer,
        layout: KVLayout,
        network: MemoryNetwork,
        links: LinkFabric,
        transfers: TransferConfig,
    ) -> SimTiers:
        """Return the tiers of a worker that starts."""
        store = FakeStore(layout.over(ONE_RANK), num_blocks=plan.host_blocks)
        parts = parts_around(
            store, Peer(f"{worker.worker_id}/tiers", worker.epoch), network, links, transfers, self._secret
        )
        clock = asyncio.get_running_loop().time
        storage = [self._tier("disk", f"disk {role}", plan, store.layout, clock)] if plan.has_disk else []
        if plan.has_shared:
            storage.append(self._tier("shared", "shared", plan, store.layout, clock))
        tiers = KVTiers(
            identity=KVIdentity(store.layout, "", "float32", plan.object_tokens),
            host=HostTier(store),
            storage=storage,
            sender=parts.sender,
            receiver=parts.receiver,
            secret=self._secret,
            clock=clock,
        )
        return SimTiers(tiers, parts)

    def _tier(
        self, name: str, storage: str, plan: TierPlan, layout: KVLayout, clock: Callable[[], float]
    ) -> StorageTier:
        blobs: BlobStore = self.blobs.setdefault(storage, MemoryBlobs(self._draw))
        evicted: deque[str] = deque()
        if name == "disk":
            blobs = QuotaBlobs(blobs, plan.disk_bytes, clock=clock, on_evicted=evicted.append)

        def seconds() -> float:
            return self._draw.random() * plan.call_s

        reads, writes = VirtualCalls(THREADS, seconds), VirtualCalls(1, seconds)
        self.calls.setdefault(storage, []).extend((reads, writes))
        index = TierIndex() if name == "disk" else None
        return StorageTier(
            name, lambda: blobs, layout, reads, writes, clock, index=index, evicted=evicted, cpu_clock=lambda: 0.0
        )
