"""Locust's processes of one run: started, listened to, and ended on every path."""

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from twostroke.loadtests.errors import LoadTestError, RunLost, unwritable
from twostroke.loadtests.generator.progress import Progress
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.run_folder import RunFolder

LOCUSTFILE = Path(__file__).resolve().parent.parent / "locustfile.py"
LOOK_INTERVAL_S = 0.5
END_LIMIT_S = 3.0  # for a process to end by itself when the run is over
STOP_LIMIT_S = 20.0  # to end after it was told to


@dataclass
class LocustProcesses:
    """Locust's: the head, which alone or with workers sends, and the pipe through which it tells how it goes."""

    head: subprocess.Popen[bytes]
    workers: list[subprocess.Popen[bytes]]
    pipe: int
    folder: RunFolder

    def progress(self) -> Iterator[Progress | None]:
        """Each line of the head; None where there was none for a while. Ends with the head."""
        decode = msgspec.json.Decoder(Progress).decode
        buffered = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            while True:
                if not selector.select(LOOK_INTERVAL_S):
                    yield None
                    continue
                data = os.read(self.pipe, 65536)
                if not data:
                    return
                *lines, buffered = (buffered + data).split(b"\n")
                yield from map(decode, lines)

    def check(self) -> None:
        """Raises RunLost where a worker is gone before the end."""
        for number, worker in enumerate(self.workers):
            if worker.poll() is not None:
                self.interrupt()
                raise RunLost(f"sending process {number} {self.fate(worker, f'worker-{number}')}")

    def interrupt(self) -> None:
        """As Ctrl-C: all that is under way is given up and recorded. Waits until the head has ended."""
        _end(self.head, at_once=True)

    def end(self) -> None:
        """Whatever happened, none of them stays."""
        for process in (self.head, *self.workers):
            _end(process)
        os.close(self.pipe)

    def fate(self, process: subprocess.Popen[bytes], name: str) -> str:
        """How a process came to its end; one that was killed had no time to say why."""
        if process.returncode is not None and process.returncode < 0:
            by = signal.Signals(-process.returncode).name
            why = ", as the kernel does where memory runs out" if by == "SIGKILL" else ""
            return f"was killed by {by}{why}; its log is {log_path(self.folder, name)}"
        return f"ended with exit code {process.returncode}: {self.last_words(name)}"

    def last_words(self, name: str = "head") -> str:
        path = log_path(self.folder, name)
        lines = path.read_text(errors="replace").split("\n") if path.exists() else []
        said = [line.strip() for line in lines if line.strip()]
        return f"{said[-1] if said else 'it said nothing'} ({path})"


def start_locust(plan: Plan, folder: RunFolder, web_port: int | None) -> LocustProcesses:
    """One process, or a master and its workers. The plan lies in the folder."""
    reading, writing = os.pipe()
    head = ["--progress-fd", str(writing), "--only-summary"]
    if web_port is None:
        head += ["--headless"]
    else:
        head += ["--autostart", "--autoquit", "0", "--web-host", "127.0.0.1", "--web-port", str(web_port)]
    if plan.num_workers == 1:
        processes = LocustProcesses(_locust(folder, "head", head, writing), [], reading, folder)
    else:
        port = str(_free_port())
        head += ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port]
        head += ["--expect-workers", str(plan.num_workers)]
        worker = ["--worker", "--master-host", "127.0.0.1", "--master-port", port]
        processes = LocustProcesses(
            _locust(folder, "head", head, writing),
            [_locust(folder, f"worker-{number}", worker) for number in range(plan.num_workers)],
            reading,
            folder,
        )
    os.close(writing)
    return processes


def _locust(folder: RunFolder, name: str, arguments: list[str], *inherited: int) -> subprocess.Popen[bytes]:
    path = folder.path.resolve()
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--plan", str(path / "plan.json")]
    try:
        log = log_path(folder, name).open("ab")
    except OSError as error:
        raise unwritable(log_path(folder, name), error) from error
    with log:
        return subprocess.Popen(
            [*command, *arguments],
            cwd=path,  # where no locust.conf of somebody else's lies
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C comes to us alone
        )


def log_path(folder: RunFolder, name: str) -> Path:
    return folder.path / f"locust-{name}.log"


def _end(process: subprocess.Popen[bytes], *, at_once: bool = False) -> None:
    """Wait until it has ended; where it does not by itself, tell it to, and at last make it.

    Not by SIGINT: what is started in the background of a shell's script ignores that, and so do its children.
    """
    for limit_s, stop in ((0.0 if at_once else END_LIMIT_S, signal.SIGTERM), (STOP_LIMIT_S, signal.SIGKILL)):
        try:
            process.wait(limit_s)
            return
        except subprocess.TimeoutExpired:
            process.send_signal(stop)
    process.wait()


def check_free(web_port: int) -> None:
    """Raises LoadTestError for a port that Locust's page can't have."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", web_port))
        except (OSError, OverflowError) as error:
            raise LoadTestError(f"--web {web_port}: {error}; name another port") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
