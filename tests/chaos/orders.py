"""Orders of the driver to a worker's process, and its reports: lines of JSON over a loopback socket.

Each order is answered by one report, when its deed is over: how often the fault has fired, so that a fault which found
nothing to harm is not counted as one. Control is the driver's end of these sockets.
"""

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Literal

import msgspec

Harm = Literal["flip", "cut"]
Side = Literal["routers", "workers"]  # whom a worker is joined to by token channels, and by transfers of KV


class Arrived(msgspec.Struct, frozen=True):
    """A worker's first line: who it is."""

    role: str
    worker_id: str
    pid: int


class Partition(msgspec.Struct, frozen=True, tag=True):
    """Nothing gets through to one side or from there, and nobody is told. What was sent comes late, as TCP has it.

    Fires for each message and chunk that is held up.
    """

    side: Side
    seconds: float


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Close all connections with one side. Fires for each."""

    side: Side


class Tamper(msgspec.Struct, frozen=True, tag=True):
    """Send the next message of this type twice, or not at all."""

    message: str
    trick: Literal["repeat", "drop"]


class HarmLink(msgspec.Struct, frozen=True, tag=True):
    """Flip a bit of the next KV that leaves over TCP, or cut its connection in the middle of it."""

    harm: Harm


class Slow(msgspec.Struct, frozen=True, tag=True):
    """Each chunk of KV leaves late, for a while. Fires for each."""

    seconds: float
    delay_s: float


class LoseEngine(msgspec.Struct, frozen=True, tag=True):
    """The engine is dead, as its worker would find it."""


class HangEngine(msgspec.Struct, frozen=True, tag=True):
    """The engine's thread waits for ever, as a kernel or a driver that hangs has it. Fires once it does."""


Deed = Partition | Cut | Tamper | HarmLink | Slow | LoseEngine | HangEngine


class Order(msgspec.Struct, frozen=True):
    number: int
    deed: Deed


class Report(msgspec.Struct, frozen=True):
    """A deed is over; or, number 0, a chunk was refused here for its digest."""

    number: int
    fired: int


class Gone(Exception):
    """The worker's process has ended."""


@dataclass
class Worker:
    """A worker's process. `gone` is set when its socket closes, which the kernel does for a process that is killed."""

    role: str
    worker_id: str
    pid: int
    is_doomed: bool = False  # we kill it
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    reports: dict[int, "asyncio.Future[int]"] = field(default_factory=dict)
    writer: asyncio.StreamWriter | None = None

    async def carry_out(self, number: int, deed: Deed) -> int:
        """Carry out a deed; return how often the fault has fired when it is over. Raises Gone."""
        if self.writer is None or self.gone.is_set():
            raise Gone(self.worker_id)
        report: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.reports[number] = report
        self.writer.write(msgspec.json.encode(Order(number, deed)) + b"\n")
        return await report


class Control:
    """Listens for workers."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self.refused_chunks = 0
        """Chunks of KV that their digests have refused, on all workers."""
        self.deaths = 0
        """Workers that have ended without our killing them."""
        self._numbers = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def of_role(self, role: str) -> list[Worker]:
        """Those that are there."""
        return [worker for worker in self.workers if worker.role == role]

    async def order(self, worker: Worker, deed: Deed) -> int:
        """Send an order, as Worker.carry_out does."""
        return await worker.carry_out(next(self._numbers), deed)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._hear(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        worker: Worker | None = None
        try:
            arrived = msgspec.json.decode(await reader.readline(), type=Arrived)
            worker = Worker(arrived.role, arrived.worker_id, arrived.pid, writer=writer)
            self.workers.append(worker)
            while line := await reader.readline():
                report = msgspec.json.decode(line, type=Report)
                if report.number == 0:
                    self.refused_chunks += report.fired
                elif not (waiting := worker.reports.pop(report.number)).done():
                    waiting.set_result(report.fired)
        except ConnectionError:
            pass  # killed with something unread
        finally:
            if worker is not None:
                self.workers.remove(worker)
                worker.gone.set()
                self.deaths += not worker.is_doomed
                for waiting in worker.reports.values():
                    if not waiting.done():
                        waiting.set_exception(Gone(worker.worker_id))
            writer.close()
