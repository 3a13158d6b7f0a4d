"""A server in a process of its own, for benches and tests: started, awaited, and ended by its id."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from twostroke.cluster.local.ray import free_ports
from twostroke.protocol.errors import ConfigError

START_S = 400.0
END_S = 30.0
POLL_S = 0.25


class ServerFailed(ConfigError):
    """The server ended, or was not ready in time; the message has the end of what it said."""


class ServerProcess:
    """A context manager: inside it the server is ready at `url`."""

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        is_ready: Callable[["ServerProcess"], bool],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ):
        """`command` has the server listen on `port` of 127.0.0.1, with `environment` beside this process's own; `log`
        keeps what it says."""
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.started_in_s = 0.0
        self._command = command
        self._is_ready = is_ready
        self._environment = environment or {}
        self._log = tempfile.TemporaryFile() if log is None else log.open("w+b")  # noqa: SIM115  (`end` closes it)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None  # inside of the context
        return self._process.pid

    def output(self) -> str:
        """All that the server has said so far. Leaves the place alone at which it goes on writing."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def __enter__(self) -> "ServerProcess":
        began = time.monotonic()
        self._process = subprocess.Popen(
            self._command,
            env={**os.environ, **self._environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            while not self._is_ready(self):
                if self._process.poll() is not None:
                    raise ServerFailed(f"the server ended while it started: {self.output()[-2000:]}")
                if time.monotonic() > began + START_S:
                    raise ServerFailed(f"the server was not ready within {START_S:g} s: {self.output()[-2000:]}")
                time.sleep(POLL_S)
        except BaseException:
            self.end()
            raise
        self.started_in_s = time.monotonic() - began
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self, number: signal.Signals = signal.SIGINT) -> float:
        """Ask the server to end; after END_S kill it. Returns how many seconds it took."""
        assert self._process is not None  # inside of the context
        began = time.monotonic()
        if self._process.poll() is None:
            self._process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._process.kill()
        self._process.wait()
        self._log.close()
        return time.monotonic() - began


def twostroke_server(arguments: Sequence[str], *, port: int | None = None) -> ServerProcess:
    """`twostroke serve` with these arguments, the port excepted; it is ready when it tells the `curl` to paste.

    The model is the bundled one unless they say another.
    """
    port = free_ports(1)[0] if port is None else port
    model = [] if "--model" in arguments or "--config" in arguments else ["--model", "bundled"]
    command = [sys.executable, "-m", "twostroke.cluster.cli", "serve", "--port", str(port), *model, *arguments]
    return ServerProcess(command, port, lambda server: "\ncurl " in server.output())


@contextlib.contextmanager
def config_file(sections: Mapping[str, Any]) -> Iterator[str]:
    """Give the path of a file for `--config`, while the context lasts."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(sections, file)  # YAML takes JSON
        file.flush()
        yield file.name


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
