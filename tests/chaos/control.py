"""The driver's ends of the workers' sockets: who is there, and what becomes of the orders given to them."""

import asyncio
import itertools
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.chaos.orders import Arrived, Deed, Order, Report


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
        """How often the fault has fired, when it is over. Raises Gone."""
        if self.writer is None or self.gone.is_set():
            raise Gone(self.worker_id)
        report: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.reports[number] = report
        self.writer.write(msgspec.json.encode(Order(number, deed)) + b"\n")
        return await report

    @property
    def state(self) -> str:
        """The kernel's letter for the process: `T` is stopped; empty for one that has ended."""
        return process_state(self.pid)


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
        """As Worker.carry_out."""
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


def process_state(pid: int) -> str:
    """The kernel's letter for a process; empty for one that has ended, though nobody has waited for it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    letter = state.rpartition(")")[2].split()[0]
    return "" if letter in "ZX" else letter
