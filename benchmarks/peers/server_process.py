"""A server of any make in processes of its own: started, awaited, weighed, and ended by its id."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import httpx

END_S = 30.0
POLL_S = 0.25


class ServerFailed(Exception):
    """The server ended, or did not answer in time; the message has the end of what it said."""


@dataclass(frozen=True)
class Command:
    """How to start a server that will listen on `port` of 127.0.0.1."""

    name: str
    arguments: Sequence[str]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)  # beside this process's own

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


class ServerProcess:
    """A context manager: inside it the server answers."""

    def __init__(self, command: Command, model: str, log: Path, start_limit_s: float):
        """`model` is what the server calls its model; `log` takes all it says."""
        self.command = command
        self.started_in_s = 0.0
        self._model = model
        self._log = log
        self._start_limit_s = start_limit_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ServerProcess":
        began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command.arguments,
                env={**os.environ, **self.command.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that whatever it starts can be ended with it
            )
        try:
            self._await_answer(self._process, began + self._start_limit_s)
        except BaseException:
            self.end()
            raise
        self.started_in_s = time.monotonic() - began
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def memory_bytes(self) -> int:
        """Memory of the server's processes together, what they share counted once."""
        assert self._process is not None  # inside of the context
        return sum(_proportional_bytes(each.pid) for each in _tree(self._process.pid))

    def end(self) -> None:
        """Ask the server to end as Ctrl-C does; what is left of it after END_S is killed."""
        assert self._process is not None  # inside of the context
        processes = _tree(self._process.pid)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for left in filter(_alive, processes):  # in groups of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(left.pid, signal.SIGKILL)
        killed_by = time.monotonic() + END_S
        while any(map(_alive, processes)) and time.monotonic() < killed_by:
            time.sleep(POLL_S / 10)

    def _await_answer(self, process: "subprocess.Popen[bytes]", deadline: float) -> None:
        """Poll with a request of one token: a port that listens does not yet mean a server that computes."""
        body = {"model": self._model, "prompt": [1000, 1001], "max_tokens": 1, "temperature": 0, "stream": True}
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.post(f"{self.command.base_url}/completions", json=body, timeout=60.0)
                if answer.status_code == 200:
                    return
            if process.poll() is not None:
                raise ServerFailed(f"{self.command.name} ended while it started: {self._last_words()}")
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"{self.command.name} did not answer within {self._start_limit_s:g} s: {self._last_words()}"
                )
            time.sleep(POLL_S)

    def _last_words(self) -> str:
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return f"{self._log} ends with\n{text[-2000:]}"


class _Process(NamedTuple):
    pid: int
    started: str | None  # tells a process from a later one with its id


def _tree(root: int) -> list[_Process]:
    """A process and all that descend from it; those that end meanwhile are left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[_Process] = []
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        found.append(_Process(pid, _started(pid)))
        waiting += children.get(pid, [])
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name; empty for a process that has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []


def _alive(process: _Process) -> bool:
    fields = _stat(process.pid)
    return bool(fields) and fields[0] != "Z" and fields[19] == process.started


def _started(pid: int) -> str | None:
    fields = _stat(pid)
    return fields[19] if fields else None  # clock ticks from the machine's start


def _proportional_bytes(pid: int) -> int:
    """A process's PSS: pages that n processes share count a n-th in each."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
