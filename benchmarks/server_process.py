"""A `twostroke serve` in a process of its own, for benchmarks and tests: started, awaited, and ended by its id."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from twostroke.cluster.local.processes import descendants
from twostroke.cluster.local.ray import free_ports

START_S = 240.0
END_S = 15.0


class ServerDied(Exception):
    """The server ended before it was ready, or did not become ready; the message has what it said."""


class ServerProcess:
    """A context manager: inside it the server is ready at `url`."""

    def __init__(self, arguments: Sequence[str], *, port: int | None = None):
        """`arguments` are those of `twostroke serve`, the port excepted; the bundled model unless they say."""
        self.port = port if port is not None else free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self.port}"
        self.output: list[str] = []
        says_model = "--model" in arguments or "--config" in arguments
        self._arguments = [*arguments] if says_model else ["--model", "bundled", *arguments]
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None  # inside of the context
        return self._process.pid

    def __enter__(self) -> "ServerProcess":
        command = [sys.executable, "-m", "twostroke.cluster.cli", "serve", "--port", str(self.port), *self._arguments]
        root = Path(__file__).resolve().parent.parent
        self._process = subprocess.Popen(
            command, cwd=root, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            self._await_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def end(self, number: signal.Signals = signal.SIGINT) -> float:
        """Ask the server to end; returns how many seconds it took.

        Raises TimeoutExpired after END_S, having killed it.
        """
        assert self._process is not None  # inside of the context
        began = time.monotonic()
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            if self._process.stdout is not None:
                with contextlib.suppress(ValueError):  # closed already
                    self._process.stdout.close()
        return time.monotonic() - began

    def _await_ready(self) -> None:
        """The server's last line before it serves is the `curl` to paste."""
        assert self._process is not None
        assert self._process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        stream = self._process.stdout

        def read() -> None:
            with contextlib.suppress(ValueError):  # closed by `end`
                for line in stream:
                    lines.put(line)
            lines.put(None)

        threading.Thread(target=read, name="server output", daemon=True).start()
        deadline = time.monotonic() + START_S
        while True:
            try:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise ServerDied(f"not ready after {START_S:g} s: {''.join(self.output)}") from None
            if line is None:
                raise ServerDied("".join(self.output))
            self.output.append(line)
            if line.startswith("curl "):
                return


def processes_named(title: str, roots: Sequence[int] | None = None) -> list[int]:
    """Ids of processes whose command line contains `title`, optionally only of those in `roots`."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (roots is None or int(entry.name) in roots):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if title in (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                    found.append(int(entry.name))
    return found


def cpu_seconds(pids: Sequence[int]) -> float:
    """CPU time that these processes have used so far; those that have ended count nothing."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # utime, stime
    return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server_at(url: str | None, arguments: Sequence[str]) -> Iterator[tuple[str, list[int] | None]]:
    """(url, process ids) of a server: the one that is given, whose processes are not known, or one of our own.

    Ours runs for as long as the context lasts.
    """
    if url is not None:
        yield url.rstrip("/"), None
        return
    with ServerProcess(arguments) as server:
        yield server.url, descendants(server.pid)
