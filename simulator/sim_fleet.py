"""Workers as processes of a simulation, and the Fleet that reaches them: calls with latency, crashes, cancellation."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.policy import DecodePolicy, EvenPolicy, decode_role
from twostroke.kvtiers.host_tier import HostTier
from twostroke.kvtiers.identity import KVIdentity
from twostroke.kvtiers.kv_tiers import KVTiers
from twostroke.kvtiers.storage.blobs import BlobStore
from twostroke.kvtiers.storage.quota import QuotaBlobs
from twostroke.kvtiers.storage_tier import StorageTier
from twostroke.kvtiers.tier_index import TierIndex
from twostroke.kvtransfer.config import TransferConfig
from twostroke.model.step import Engine
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.prefill_worker.policy import PrefillPolicy, prefill_role
from twostroke.protocol.errors import TwostrokeError, WorkerFailed, WorkerLost
from twostroke.protocol.kv_layout import ONE_RANK, KVLayout
from twostroke.protocol.messages import ProbeTimes
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply, Ticket
from twostroke.protocol.stats import Role, WorkerInfo
from twostroke.router.fleet import Fleet
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.generate.pipeline import FleetKnowledge, Pipeline
from twostroke.router.slo.admission import Admission
from twostroke.router.slo.classes import SLOConfig
from twostroke.router.token_channels import TokenChannels
from twostroke.simulator.memory_blobs import MemoryBlobs, VirtualCalls
from twostroke.simulator.memory_network import MemoryFabric, MemoryNetwork, Trace
from twostroke.simulator.memory_store import FakeStore, FakeSwapSpace, SpoilingPool, fake_layout
from twostroke.simulator.memory_transport import LinkFabric, Parts, parts_around
from twostroke.simulator.virtual_loop import VirtualProcess, virtual_loop
from twostroke.worker.deps import WorkerDeps
from twostroke.worker.role import Policies
from twostroke.worker.worker import Worker

SECRET = b"the simulation's secret"
NOTICE_S = 0.2  # until a deployment has seen that a worker is unhealthy
RESTART_S = 0.05
T = TypeVar("T")


class MortalEngine(Engine, Protocol):
    """An engine that tells when it has died."""

    @property
    def died(self) -> "asyncio.Future[None]": ...


EngineT = TypeVar("EngineT", bound=MortalEngine)


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


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """Properties that all workers of a fleet share."""

    seed: int
    windows: tuple[int, ...]  # of each layer, in tokens; 0: it attends to all
    prefill_block_size: int
    decode_block_size: int
    transports: tuple[str, ...]
    prefill_blocks: int
    decode_blocks: int
    swap_blocks: int  # of a decode worker; 0: none
    prefill: PrefillConfig
    decode: DecodeConfig
    max_chunk_bytes: int
    max_context: int
    tiers: TierPlan | None = None


@dataclass(eq=False)
class SimProcess(Generic[EngineT]):
    """One worker with all that its process holds. Its tasks run in its own context, so that it can be stopped."""

    host: str
    info: WorkerInfo
    context: Context
    worker: Worker
    engine: EngineT
    parts: Parts
    died: "asyncio.Future[None]"
    tiers: SimTiers | None = None
    is_draining: bool = False
    violations: list[str] = field(default_factory=list)
    calls: dict["asyncio.Task[Any]", str] = field(default_factory=dict)  # and whose: a router id

    @property
    def store(self) -> FakeStore:
        return self.parts.store

    @property
    def pool(self) -> SpoilingPool:
        return self.parts.pool


class SimFleet(Generic[EngineT]):
    """A `twostroke.router.fleet.Fleet` over processes in this very event loop.

    A call and its answer each take a moment; so does the cancellation of a call. A crash ends calls with WorkerLost,
    and nothing of the worker reaches anybody any more; its objects are then stopped, as memory is freed by a kernel.
    A worker whose engine dies is replaced, as a deployment does that asks for its health.
    """

    def __init__(
        self,
        plan: FleetPlan,
        make_engine: Callable[[Role, FakeStore, FakeSwapSpace | None], EngineT],
        fabric: MemoryFabric,
        links: LinkFabric,
        trace: Trace,
    ):
        self._plan = plan
        self._make_engine = make_engine
        self._fabric = fabric
        self._links = links
        self._trace = trace
        self._draw = random.Random(plan.seed)
        self._num_started = 0
        self.storage = SimStorage(plan.seed, SECRET)
        self.processes: dict[Peer, SimProcess[EngineT]] = {}
        self.departed: list[SimProcess[EngineT]] = []
        self.lost_routers: set[str] = set()  # nobody cancels their calls
        self.calls_to_spoil: Counter[str] = Counter()  # of the next, by the profile of fault
        self._endings: dict[asyncio.Task[None], None] = {}

    async def start(self, role: Role) -> SimProcess[EngineT]:
        """Start a worker; the fleet knows it from then on."""
        host = f"{role}-{self._num_started}"
        self._num_started += 1
        own = VirtualProcess(host)
        worker, engine, parts, tiers = self._make(role, host)
        info = await own.spawn(worker.start(host))
        died = asyncio.get_running_loop().create_future()
        process = SimProcess(host, info, own.context, worker, engine, parts, died, tiers)
        self.processes[info.peer] = process
        process.engine.died.add_done_callback(lambda _: self._own(self._replace_unhealthy(process)))
        return process

    def _make(self, role: Role, host: str) -> tuple[Worker, EngineT, Parts, SimTiers | None]:
        plan = self._plan
        is_prefill = role == "prefill"
        block_size = plan.prefill_block_size if is_prefill else plan.decode_block_size
        store = FakeStore(
            fake_layout(num_layers=len(plan.windows), block_size=block_size, windows=plan.windows),
            num_blocks=plan.prefill_blocks if is_prefill else plan.decode_blocks,
        )
        swap_space = None
        if not is_prefill and plan.swap_blocks:
            swap_space = FakeSwapSpace(store, num_blocks=plan.swap_blocks)
        engine, peer = self._make_engine(role, store, swap_space), Peer(host, self._draw.getrandbits(63))
        transfers = TransferConfig(lease_s=2.0, progress_s=4.0, max_chunk_bytes=plan.max_chunk_bytes)
        parts = parts_around(store, peer, self._fabric.at(host), self._links, transfers, SECRET, plan.transports)
        clock = asyncio.get_running_loop().time
        tiers = None
        if plan.tiers is not None:
            tiers = self.storage.make_tiers(plan.tiers, role, peer, store.layout, parts.network, self._links, transfers)
        deps = WorkerDeps(
            peer,
            engine,
            store,
            parts.pool,
            parts.network,
            parts.sender,
            parts.receiver,
            clock,
            plan.max_context,
            tiers=None if tiers is None else tiers.tiers,
        )
        worker_role = prefill_role(plan.prefill) if is_prefill else decode_role(plan.decode)
        policies: Policies = {"prefill": PrefillPolicy, "decode": DecodePolicy, "even": EvenPolicy}
        return Worker(worker_role, deps, swap_space, policies), engine, parts, tiers

    def crash(self, process: SimProcess[EngineT]) -> None:
        """Take a worker away at once."""
        self._trace(f"{process.host} crashes")
        del self.processes[process.info.peer]
        self.departed.append(process)
        process.parts.network.is_dead = True
        self._fabric.remove(process.host)
        self._links.cut(process.host)
        process.died.set_result(None)
        for call in process.calls:
            call.cancel()
        virtual_loop().continue_process(process.host)
        self._own(self.end(process))

    async def replace(self, process: SimProcess[EngineT], *, drain_s: float | None = None) -> bool:
        """Crash a worker, perhaps after it has drained for so long, and start another; False where it is gone."""
        if process.info.peer not in self.processes:
            return False
        if drain_s is not None:
            self._trace(f"{process.host} drains")
            process.is_draining = True
            draining = asyncio.create_task(process.worker.drain(), context=process.context.copy())
            await asyncio.wait({draining}, timeout=drain_s)
            draining.cancel()
            await asyncio.wait({draining})
            if process.info.peer not in self.processes:
                return False
            await self.end(process)  # in an orderly way: whoever is left is told
            if process.info.peer not in self.processes:
                return False
        self.crash(process)
        await asyncio.sleep(RESTART_S)
        await self.start(process.info.role)
        return True

    async def _replace_unhealthy(self, process: SimProcess[EngineT]) -> None:
        await asyncio.sleep(NOTICE_S)
        await self.replace(process)

    async def end(self, process: SimProcess[EngineT]) -> None:
        """Stop a worker, crashed or not, and all that it had."""
        await process.worker.stop()
        await process.parts.transports.close()
        if process.tiers is not None:
            await process.tiers.parts.transports.close()

    async def close(self) -> None:
        """Wait for everything that crashes and cancellations have left to do."""
        while self._endings:
            await asyncio.wait(list(self._endings))

    @property
    def num_calls(self) -> int:
        """Calls that some worker still works on."""
        return sum(len(process.calls) for process in (*self.processes.values(), *self.departed))

    def worker_calls(self, router_id: str) -> int:
        """Return the number of one router's calls."""
        return sum(list(process.calls.values()).count(router_id) for process in self.processes.values())

    def workers(self) -> Sequence[WorkerInfo]:
        return [process.info for process in self.processes.values()]

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        if self._spoils("refuse_prefill"):  # before it begins
            await asyncio.sleep(self._latency())
            raise WorkerLost("the simulation refuses this prefill")

        reply: PrefillReply = await self._call("prefill", worker, request, ticket, pull)
        if self._spoils("lose_prefill_reply"):
            raise WorkerLost("the simulation loses this prefill's reply")
        return reply

    async def score_prompt(self, worker: Peer, request: GenerateRequest) -> PrefillReply:
        reply: PrefillReply = await self._call("score_prompt", worker, request)
        return reply

    async def decode(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> DecodeReply:
        reply: DecodeReply = await self._call("decode", worker, request, ticket, pull)
        return reply

    async def probe_source(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> ProbeTimes:
        raise NotImplementedError("no simulation tries links out")

    async def probe_target(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> None:
        raise NotImplementedError("no simulation tries links out")

    def _spoils(self, profile: str) -> bool:
        """Return whether a fault of this kind hits the call."""
        is_hit = self.calls_to_spoil[profile] > 0
        self.calls_to_spoil[profile] -= is_hit
        return is_hit

    async def _call(self, name: str, worker: Peer, request: GenerateRequest, *tickets: Ticket | None) -> Any:
        router_id = request.router_id

        def method(process: SimProcess[EngineT]) -> Coroutine[Any, Any, Any]:
            called: Coroutine[Any, Any, Any] = getattr(process.worker, name)(_copy(request), *map(_copy, tickets))
            return called

        is_late = self._spoils("late_calls")  # it may come although it has been given up meanwhile
        is_twice = self._spoils("repeat_calls")
        try:
            await asyncio.sleep(self._latency() + (1.0 if is_late else 0.0) * self._draw.random())
            await self._fabric.audible(router_id, worker.worker_id)
        except asyncio.CancelledError:
            if is_late and (process := self.processes.get(worker)) is not None:  # the cancellation overtakes the call
                self._own(self._cancel_later(self._begin(process, router_id, method)))
            raise
        process = self.processes.get(worker)
        if process is None:
            raise WorkerLost(f"worker {worker.worker_id} is gone")
        call = self._begin(process, router_id, method)
        if is_twice:
            self._own(self._repeat(process, router_id, method, call))
        try:
            await asyncio.wait((call, process.died), return_when=asyncio.FIRST_COMPLETED)
            if not process.died.done():
                await asyncio.sleep(self._latency())
                await self._fabric.audible(router_id, worker.worker_id)
        except asyncio.CancelledError:
            if router_id not in self.lost_routers:
                self._own(self._cancel_later(call))
            raise
        if process.died.done():
            self._own(self._cancel_later(call))
            raise WorkerLost(f"worker {process.host} is gone")
        try:
            return call.result()
        except TwostrokeError:
            raise
        except Exception as error:
            raise WorkerFailed(f"the worker failed: {error!r}") from error

    def _begin(
        self,
        process: SimProcess[EngineT],
        router_id: str,
        method: Callable[[SimProcess[EngineT]], Coroutine[Any, Any, T]],
    ) -> "asyncio.Task[T]":
        call = asyncio.get_running_loop().create_task(method(process), context=process.context.copy())
        process.calls[call] = router_id
        may_take = not process.is_draining
        # In no process's context: its router may stand still.
        call.add_done_callback(lambda done: _forget(process, done, may_take=may_take), context=Context())
        return call

    async def _repeat(
        self,
        process: SimProcess[EngineT],
        router_id: str,
        method: Callable[[SimProcess[EngineT]], Coroutine[Any, Any, Any]],
        first: "asyncio.Task[Any]",
    ) -> None:
        """The same call once more, while the first is under way: it must be refused."""
        await asyncio.sleep(self._latency())
        if first.done() or process.died.done():
            return
        again = self._begin(process, router_id, method)
        await asyncio.wait({again, first}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        refused = await asyncio.gather(again, return_exceptions=True)
        self._trace(f"a call that came twice: {refused}")

    async def _cancel_later(self, call: "asyncio.Task[Any]") -> None:
        await asyncio.sleep(self._latency())
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    def _own(self, ending: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(ending, context=Context())
        self._endings[task] = None
        task.add_done_callback(lambda done: self._endings.pop(done, None))

    def _latency(self) -> float:
        return 0.0005 + 0.002 * self._draw.random() + (0.05 if self._draw.random() < 0.02 else 0.0)


def _forget(process: SimProcess[Any], call: "asyncio.Task[Any]", *, may_take: bool) -> None:
    process.calls.pop(call, None)
    is_answered = not call.cancelled() and call.exception() is None  # its caller may be gone, and nobody else asks
    if is_answered and not may_take:
        process.violations.append("took a request while it drained")


def _copy(value: T) -> T:
    """Return a copy made through bytes, because shared objects would hide mistakes."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


PROMISE_NOTHING = SLOConfig(admission=False)


class SimRouter(VirtualProcess):
    """Its requests' tasks run in its own context, so that it can be lost: it stands still from then on."""

    def __init__(
        self,
        index: int,
        fleet: Fleet,
        fabric: MemoryFabric,
        config: PipelineConfig,
        slo: SLOConfig = PROMISE_NOTHING,
    ):
        self.host = f"router-{index}"
        super().__init__(self.host)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._index = index
        self._fleet = fleet
        self._fabric = fabric
        self.channels, self.admission, self.pipeline = self.context.run(self._make, config, slo)

    def _make(self, config: PipelineConfig, slo: SLOConfig) -> tuple[TokenChannels, Admission, Pipeline]:
        clock, peer = asyncio.get_running_loop().time, Peer(self.host, self._index + 1)
        knowledge = FleetKnowledge(network=self._fabric.at(self.host), router=peer, clock=clock, config=config)
        channels = knowledge.channels
        admission = Admission(config=slo, stats=channels.stats, clock=clock)
        pipeline = Pipeline(
            fleet=self._reach(channels),
            knowledge=knowledge,
            secret=SECRET,
            draw_id=_numbered(f"r{self._index}"),
            draw=random.Random(self._index).random,
            admit=admission.admit,
        )
        return channels, admission, pipeline

    def _reach(self, channels: TokenChannels) -> Fleet:
        """The workers, as this router reaches them."""
        return self._fleet

    def lose(self) -> None:
        """Nothing of this process runs any more."""
        if not self.lost.done():
            self.lost.set_result(None)
            virtual_loop().stop_process(self.host)

    async def ended(self) -> None:
        """Return when its requests' tasks have ended."""
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def close(self) -> None:
        """End what is left of it."""
        await self.spawn(self.channels.close())


def _numbered(prefix: str) -> Callable[[], str]:
    number = 0

    def draw() -> str:
        nonlocal number
        number += 1
        return f"{prefix}-{number}"

    return draw


THREADS = 4
