"""Workers as processes of a simulation, and the Fleet that reaches them: calls with latency, crashes, cancellation."""

import asyncio
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from decode_worker.worker import DecodeWorker
from kvtransfer.config import TransferConfig
from kvtransfer.receiver import KVReceiver
from kvtransfer.sender import KVSender
from kvtransfer.transports import Transports
from prefill_worker.worker import PrefillWorker
from protocol.errors import TwostrokeError, WorkerLost
from protocol.requests import DecodeReply, GenerateRequest, PrefillReply
from protocol.stats import WorkerInfo
from protocol.tickets import Peer, Ticket
from tests.simulation.fake_model import FakeEngine
from tests.simulation.fake_store import FakeStore, FakeSwapSpace, SpoilingPool, fake_layout
from tests.simulation.memory_network import MemoryFabric, Trace
from tests.simulation.memory_transport import LinkFabric, memory_transports
from tests.simulation.scenario import MAX_CONTEXT, Scenario

SECRET = b"the simulation's secret"
T = TypeVar("T")


@dataclass(eq=False)
class SimProcess:
    """One worker with all that its process holds."""

    host: str
    info: WorkerInfo
    worker: PrefillWorker | DecodeWorker
    store: FakeStore
    pool: SpoilingPool
    engine: FakeEngine
    transports: Transports
    died: "asyncio.Future[None]"
    calls: dict["asyncio.Task[Any]", None] = field(default_factory=dict)


class SimFleet:
    """A `router.fleet.Fleet` over processes in this very event loop.

    A call and its answer each take a moment; so does the cancellation of a call. A crash ends calls with WorkerLost,
    and nothing of the worker reaches anybody any more; its objects are then stopped, as memory is freed by a kernel.
    """

    engine_type: type[FakeEngine] = FakeEngine

    def __init__(self, scenario: Scenario, fabric: MemoryFabric, links: LinkFabric, trace: Trace):
        self._scenario = scenario
        self._fabric = fabric
        self._links = links
        self._trace = trace
        self._draw = random.Random(scenario.seed)
        self._num_started = 0
        self.processes: dict[Peer, SimProcess] = {}
        self.departed: list[SimProcess] = []
        self.prefills_to_refuse = 0  # the next calls fail before they begin
        self.prefill_replies_to_lose = 0  # the next calls fail after they have run
        self._endings: dict[asyncio.Task[None], None] = {}

    async def start(self, role: str) -> SimProcess:
        """Start a worker; the fleet knows it from then on."""
        scenario, host = self._scenario, f"{role}-{self._num_started}"
        self._num_started += 1
        loop = asyncio.get_running_loop()
        is_prefill = role == "prefill"
        block_size = scenario.prefill_block_size if is_prefill else scenario.decode_block_size
        store = FakeStore(
            fake_layout(num_layers=scenario.num_layers, block_size=block_size),
            num_blocks=scenario.prefill_blocks if is_prefill else scenario.decode_blocks,
        )
        swap_space = None
        if not is_prefill and scenario.swap_blocks:
            swap_space = FakeSwapSpace(store, num_blocks=scenario.swap_blocks)
        pool, engine, network = SpoilingPool(store), self.engine_type(store, swap_space), self._fabric.at(host)
        transports = memory_transports(self._links, host, store, scenario.transports)
        peer = Peer(host, self._draw.getrandbits(63))
        sender, receiver = None, None
        if scenario.num_prefill > 0:
            transfers = TransferConfig(lease_s=2.0, progress_s=4.0, max_chunk_bytes=scenario.max_chunk_bytes)
            sender = KVSender(
                peer=peer, store=store, network=network, transports=transports, config=transfers, clock=loop.time
            )
            receiver = KVReceiver(
                peer=peer,
                store=store,
                network=network,
                transports=transports,
                config=transfers,
                clock=loop.time,
                secret=SECRET,
            )
        worker: PrefillWorker | DecodeWorker
        if is_prefill:
            worker = PrefillWorker(
                peer=peer,
                config=scenario.prefill,
                engine=engine,
                store=store,
                pool=pool,
                network=network,
                sender=sender,
                receiver=receiver,
                clock=loop.time,
                max_context=MAX_CONTEXT,
            )
        else:
            worker = DecodeWorker(
                peer=peer,
                config=scenario.decode,
                engine=engine,
                store=store,
                pool=pool,
                network=network,
                receiver=receiver,
                sender=sender,
                clock=loop.time,
                max_context=MAX_CONTEXT,
                swap_space=swap_space,
            )
        info = await worker.start(host)
        process = SimProcess(host, info, worker, store, pool, engine, transports, loop.create_future())
        self.processes[peer] = process
        return process

    def crash(self, process: SimProcess) -> None:
        """Take a worker away at once."""
        self._trace(f"{process.host} crashes")
        del self.processes[process.info.peer]
        self.departed.append(process)
        self._fabric.remove(process.host)
        self._links.cut(process.host)
        process.died.set_result(None)
        for call in process.calls:
            call.cancel()
        self._own(self.end(process))

    async def end(self, process: SimProcess) -> None:
        """Stop a worker, crashed or not, and all that it had."""
        await process.worker.stop()
        await process.transports.close()

    async def close(self) -> None:
        """Wait for everything that crashes and cancellations have left to do."""
        while self._endings:
            await asyncio.wait(list(self._endings))

    @property
    def num_calls(self) -> int:
        """Calls that some worker still works on."""
        return sum(len(process.calls) for process in (*self.processes.values(), *self.departed))

    def workers(self) -> Sequence[WorkerInfo]:
        return [process.info for process in self.processes.values()]

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        if self.prefills_to_refuse > 0:
            self.prefills_to_refuse -= 1
            await asyncio.sleep(self._latency())
            raise WorkerLost("the simulation refuses this prefill")
        process = await self._reach(worker)
        if not isinstance(process.worker, PrefillWorker):
            raise TypeError(f"{worker} is no prefill worker")
        reply = await self._call(process, process.worker.prefill(_copy(request), _copy(ticket), _copy(pull)))
        if self.prefill_replies_to_lose > 0:
            self.prefill_replies_to_lose -= 1
            raise WorkerLost("the simulation loses this prefill's reply")
        return reply

    async def decode(self, worker: Peer, request: GenerateRequest, ticket: Ticket | None) -> DecodeReply:
        process = await self._reach(worker)
        if not isinstance(process.worker, DecodeWorker):
            raise TypeError(f"{worker} is no decode worker")
        return await self._call(process, process.worker.decode(_copy(request), _copy(ticket)))

    async def _reach(self, worker: Peer) -> SimProcess:
        await asyncio.sleep(self._latency())
        process = self.processes.get(worker)
        if process is None:
            raise WorkerLost(f"worker {worker.worker_id} is gone")
        return process

    async def _call(self, process: SimProcess, method: Coroutine[Any, Any, T]) -> T:
        call = asyncio.create_task(method)
        process.calls[call] = None
        call.add_done_callback(lambda done: _forget(process, done))
        try:
            await asyncio.wait((call, process.died), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._own(self._cancel_later(call))
            raise
        if process.died.done():
            self._own(self._cancel_later(call))
            raise WorkerLost(f"worker {process.host} is gone")
        await asyncio.sleep(self._latency())
        try:
            return call.result()
        except TwostrokeError:
            raise
        except Exception as error:
            raise WorkerLost(f"the worker failed: {error!r}") from error

    async def _cancel_later(self, call: "asyncio.Task[Any]") -> None:
        await asyncio.sleep(self._latency())
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    def _own(self, ending: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(ending)
        self._endings[task] = None
        task.add_done_callback(lambda done: self._endings.pop(done, None))

    def _latency(self) -> float:
        return 0.0005 + 0.002 * self._draw.random() + (0.05 if self._draw.random() < 0.02 else 0.0)


def _forget(process: SimProcess, call: "asyncio.Task[Any]") -> None:
    process.calls.pop(call, None)
    if not call.cancelled():
        call.exception()  # its caller may be gone, and then nobody else asks


def _copy(value: T) -> T:
    """What arrives after a trip through bytes: shared objects would hide mistakes."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))
