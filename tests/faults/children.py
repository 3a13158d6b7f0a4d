"""Worker processes as their parent sees them: commands, reports, signals."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import pkgutil
import signal
import socket
from typing import Any

import twostroke.kvtransfer
from tests.faults.worker_process import work
from tests.rigs.processes import comes, process_state
from twostroke.protocol.requests import Address, Peer

LIMIT_S = 20.0
"""Seconds after which an event counts as missing."""

Report = dict[str, Any]


class WorkerLost(Exception):
    """A command was not answered: the process is gone."""


class Child:
    """One worker process. Use `Nursery.spawn`."""

    def __init__(self, pid: int, control: socket.socket, peer: Peer):
        self.pid = pid
        self.peer = peer
        self.address = Address("", 0)
        self.fired: asyncio.Queue[Report] = asyncio.Queue()
        self.joining: asyncio.Queue[int] = asyncio.Queue()  # ports of links about to be joined
        self._control = control
        self._number = 0
        self._answers: dict[int, asyncio.Future[Report]] = {}
        self._ready: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._control)
        self._listening = asyncio.create_task(self._listen(reader))
        async with asyncio.timeout(LIMIT_S):
            self.address = await self._ready

    async def call(self, do: str, **arguments: Any) -> Report:
        """The answer to a command. Raises WorkerLost where the process dies before it answers."""
        if self._gone.is_set() or self._writer is None:
            raise WorkerLost(f"{self.peer.worker_id} is gone")
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps({"number": self._number, "do": do, **arguments}).encode() + b"\n")
        async with asyncio.timeout(LIMIT_S):
            report = await answer
        if "error" in report:
            raise RuntimeError(f"{self.peer.worker_id}, at {do}: {report['error']}")
        return report

    async def has_fired(self) -> Report:
        """Wait for the next fault's own word that it fires."""
        async with asyncio.timeout(LIMIT_S):
            return await self.fired.get()

    async def is_joining(self) -> Address:
        """Wait until it is about to join a link; returns where the link really is."""
        async with asyncio.timeout(LIMIT_S):
            return Address("127.0.0.1", await self.joining.get())

    async def is_stopped(self) -> None:
        """Wait until the process is stopped: it says that it fires just before."""
        assert await comes(lambda: process_state(self.pid) == "T", LIMIT_S)

    @property
    def is_gone(self) -> bool:
        return self._gone.is_set()

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL; returns when the process is gone, and everything that it held."""
        os.kill(self.pid, signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            await self._gone.wait()
        assert await comes(lambda: not process_state(self.pid), LIMIT_S)

    async def end(self) -> None:
        """Let the process close what it has, and exit."""
        if not self._gone.is_set():
            await self.call("close")
        if self._writer is not None:
            self._writer.close()
        if self._listening is not None:
            await self._listening

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                report = json.loads(line)
                match report.pop("event"):
                    case "ready":
                        self._ready.set_result(Address(report["host"], report["port"]))
                    case "answer":
                        answer = self._answers.pop(report.pop("number"))
                        if not answer.done():
                            answer.set_result(report)
                    case "fired":
                        self.fired.put_nowait(report)
                    case "joining":
                        self.joining.put_nowait(report["port"])
        self._gone.set()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(WorkerLost(f"{self.peer.worker_id} is gone"))
        self._answers.clear()


class Nursery:
    """Spawns worker processes: forks them of one that has loaded what they need once, so that it takes milliseconds."""

    def __init__(self) -> None:
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
        walked = pkgutil.walk_packages(twostroke.kvtransfer.__path__, "twostroke.kvtransfer.")
        # Kernels compile where there is no cache: not within a lease.
        used = [module.name for module in walked if "cuda" not in module.name and "device" not in module.name]
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["pytest", "tests.faults.worker_process", *used])
        self._epoch = 100

    async def spawn(self, worker_id: str, transport: str) -> Child:
        """A new incarnation of a worker, ready."""
        self._epoch += 1
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._context.Process(target=work, args=(theirs, worker_id, self._epoch, transport))
            await asyncio.to_thread(process.start)
        assert process.pid is not None
        child = Child(process.pid, ours, Peer(worker_id, self._epoch))
        await child.start()
        return child
