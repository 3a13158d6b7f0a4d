"""The replicas as they are deployed: workers on a faulty network and with an agent that takes orders, and all of them
with a pipe for their logs."""

import asyncio
import dataclasses
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
from ray.serve.handle import DeploymentHandle

from tests.chaos.faulty import FaultyNetwork, FaultyTransport, LinkFaults
from tests.chaos.log_pipe import LOG_PIPE_VARIABLE
from tests.chaos.orders import (
    Arrived,
    Cut,
    Deed,
    HangEngine,
    HarmLink,
    LoseEngine,
    Order,
    Partition,
    Report,
    Slow,
    Tamper,
)
from twostroke.cluster.config import process_logs
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.deployments.router import RouterReplica, RouterSettings
from twostroke.cluster.deployments.workers import DecodeReplica, PrefillReplica, _WorkerReplica
from twostroke.cluster.ranks.worker_parts import WorkerParts
from twostroke.decode_worker.config import DecodeConfig
from twostroke.kvtransfer.link import Transport
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.protocol.network import Network, TcpNetwork

if TYPE_CHECKING:
    from twostroke.model.engine import ThreadEngine
    from twostroke.worker.role import WorkerRole

MAX_QUEUED_LINES = 8
"""Log lines that wait in a process. Few, so that a pipe that stalls for seconds has lines dropped."""
PATIENCE_S = 4.0
"""Seconds that a fault waits for a message or a chunk to harm."""


def log_to_pipe() -> None:
    """Have this process log to the pipe of the chaos run, as `logging.to: stdout` does to that of its container."""
    process_logs._CONTAINERS_OUTPUT = Path(os.environ[LOG_PIPE_VARIABLE])
    process_logs._MAX_QUEUED = MAX_QUEUED_LINES


class Agent:
    """Carries out the driver's orders in a worker's process."""

    def __init__(self, network: FaultyNetwork, lose_engine: Callable[[], None]):
        self._network = network
        self._lose_engine = lose_engine
        self._links = LinkFaults(network.barriers["workers"], self._report_refused)
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def take_over(self, parts: WorkerParts) -> None:
        """Put faulty transports in the place of sound ones, before any link is made."""
        self._engine = parts.deps.engine
        transports = cast(dict[str, Transport], parts.rank.transports.by_name)
        for name, transport in transports.items():
            transports[name] = FaultyTransport(transport, self._links)

    async def report_to(self, port: int, arrived: Arrived) -> None:
        """Connect to the driver, and obey it from now on."""
        reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        self._write(arrived)
        self._start(self._obey(reader))

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            self._start(self._carry_out(msgspec.json.decode(line, type=Order)))

    async def _carry_out(self, order: Order) -> None:
        self._write(Report(order.number, await self._do(order.deed)))

    async def _do(self, deed: Deed) -> int:
        """Returns how often the fault has fired, when it is over."""
        match deed:
            case Partition(side, seconds):
                barrier = self._network.barriers[side]
                barrier.close()
                await asyncio.sleep(seconds)
                barrier.open()
                return barrier.held
            case Cut(side):
                return await self._network.cut(side)
            case Tamper():
                return await self._network.tamper(deed, PATIENCE_S)
            case HarmLink(harm):
                return await self._links.harm(harm, PATIENCE_S)
            case Slow(seconds, delay_s):
                self._links.delayed, self._links.delay_s = 0, delay_s
                await asyncio.sleep(seconds)
                self._links.delay_s = 0.0
                return self._links.delayed
            case LoseEngine():
                self._lose_engine()
                return 1
            case HangEngine():
                hangs = threading.Event()
                cast("ThreadEngine", self._engine)._executor.submit(lambda: (hangs.set(), threading.Event().wait()))
                await asyncio.to_thread(hangs.wait)
                return 1

    def _report_refused(self) -> None:
        self._write(Report(0, 1))

    def _write(self, message: Arrived | Report) -> None:
        if self._writer is not None:
            self._writer.write(msgspec.json.encode(message) + b"\n")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Harmed(_WorkerReplica):
    """Common part of both kinds of replicas: the faulty network and the agent."""

    _control: int  # the port that the driver listens on
    _is_remote = False

    def _make_network(self, secret: bytes) -> Network:
        network = FaultyNetwork(TcpNetwork(secret))
        self._agent = Agent(network, self._lose_engine)
        return network

    async def _load(self, settings: WorkerSettings, secret: bytes) -> WorkerParts:
        log_to_pipe()
        # Half of the decode workers are reached over TCP, as between machines; the others over shared memory.
        if settings.transfer.transport == "auto" and self._is_remote:
            settings = dataclasses.replace(settings, transfer=settings.transfer.model_copy(update={"transport": "tcp"}))
        parts = await super()._load(settings, secret)
        self._agent.take_over(parts)
        return parts

    async def _start(self, role: "WorkerRole") -> None:
        await super()._start(role)
        info = self._info
        await self._agent.report_to(self._control, Arrived(info.role, info.peer.worker_id, os.getpid()))

    def _lose_engine(self) -> None:
        assert self._worker is not None  # the agent's orders come when it has started
        self._worker.engine_lost("chaos")


class ChaosPrefillReplica(_Harmed, PrefillReplica):
    """A prefill worker that can be harmed."""

    async def __init__(self, settings: WorkerSettings, config: PrefillConfig, secret: bytes, control: int):  # type: ignore[misc]
        self._control = control
        await super().__init__(settings, config, secret)


class ChaosDecodeReplica(_Harmed, DecodeReplica):
    """A decode worker that can be harmed."""

    async def __init__(self, settings: WorkerSettings, config: DecodeConfig, secret: bytes, control: int):  # type: ignore[misc]
        self._control = control
        self._is_remote = os.getpid() % 2 == 0
        await super().__init__(settings, config, secret)


class ChaosRouterReplica(RouterReplica):
    """A router that logs to the run's pipe."""

    async def __init__(  # type: ignore[misc]
        self,
        settings: RouterSettings,
        secret: bytes,
        decode: DeploymentHandle,
        prefill: DeploymentHandle | None = None,
    ):
        log_to_pipe()
        await super().__init__(settings, secret, decode, prefill)
