"""Worker processes as their parent sees them: commands, reports, signals."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from twostroke.protocol.requests import Address, Peer

ROOT = Path(__file__).parents[2]
LIMIT_S = 20.0
"""What takes longer will never happen."""

Report = dict[str, Any]


def _start_zygote(orders: socket.socket) -> subprocess.Popen[bytes]:
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-m", "tests.faults.zygote", str(orders.fileno())],
        cwd=ROOT,
        env={**os.environ, **one, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        pass_fds=[orders.fileno()],
    )


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
        async with asyncio.timeout(LIMIT_S):
            while self._state() != "T":  # noqa: ASYNC110  the kernel tells only a process's own parent
                await asyncio.sleep(0.001)

    @property
    def is_gone(self) -> bool:
        return self._gone.is_set()

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL; returns when the process is gone, and everything that it held."""
        os.kill(self.pid, signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            await self._gone.wait()
            while self._state() not in ("", "Z", "X"):  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def end(self) -> None:
        """Let the process close what it has, and exit."""
        if not self._gone.is_set():
            await self.call("close")
        if self._writer is not None:
            self._writer.close()
        if self._listening is not None:
            await self._listening

    def _state(self) -> str:
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return stat.rpartition(")")[2].split()[0]

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
    """Spawns worker processes, from one that has everything loaded."""

    def __init__(self, orders: socket.socket):
        self._orders = orders
        self._epoch = 100

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls) -> AsyncIterator["Nursery"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = _start_zygote(theirs)
        try:
            yield cls(ours)
        finally:
            ours.close()
            await asyncio.to_thread(process.wait, LIMIT_S)

    async def spawn(self, worker_id: str, transport: str) -> Child:
        """A new incarnation of a worker, ready."""
        self._epoch += 1
        ours, theirs = socket.socketpair()
        arguments = {"worker_id": worker_id, "epoch": self._epoch, "transport": transport}
        with theirs:
            socket.send_fds(self._orders, [json.dumps(arguments).encode()], [theirs.fileno()])
        pid = int(await asyncio.to_thread(self._orders.recv, 64))
        child = Child(pid, ours, Peer(worker_id, self._epoch))
        await child.start()
        return child
