"""One run: starts Locust's processes, watches them, samples the server, and leaves a run's folder."""

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadtests.conversation import check_prompts
from loadtests.errors import LoadTestError
from loadtests.plan import Plan
from loadtests.progress import Progress
from loadtests.progress_display import ProgressDisplay
from loadtests.run_folder import RunFolder
from loadtests.sampling import Sampler
from loadtests.workloads import sessions

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
LOOK_INTERVAL_S = 0.5
START_LIMIT_S = 60.0  # until the first word of a run: Locust's processes find each other, and compute the schedule
END_LIMIT_S = 3.0  # for a process to end by itself when the run is over
STOP_LIMIT_S = 20.0  # to end after it was told to


def run_plan(plan: Plan, folder: Path, *, show: bool = True, web_port: int | None = None) -> RunFolder:
    """Carry out a plan; what it leaves is in `folder`, which must have no run yet.

    Ctrl-C ends the run early: its folder is complete for what was sent, says so, and KeyboardInterrupt goes on.
    Raises LoadTestError where the run can't be carried out, or a process was lost; what was sent then has its records.
    """
    check_prompts(plan)
    sessions(plan)  # raises here rather than in each process
    if web_port is not None:
        _check_free(web_port)
    result = RunFolder(folder)
    _begin_folder(result, plan)
    with ExitStack() as ending:
        processes = _start(plan, result, web_port)
        ending.callback(processes.end)
        display = ending.enter_context(ProgressDisplay(plan, show))
        sampler = ending.enter_context(Sampler(plan.url, result.samples_path))
        last = _watch(processes, display, sampler)
    if last is None or not last.is_over:
        raise LoadTestError(
            f"Locust ended before the run did, with {processes.head.returncode}: {processes.last_words()}"
        )
    if last.error is not None:
        raise LoadTestError(last.error)
    return result


def _watch(processes: "_Processes", display: ProgressDisplay, sampler: Sampler) -> Progress | None:
    """Until the head has ended. Returns its last word."""
    last: Progress | None = None
    started = time.monotonic()
    try:
        for progress in processes.progress():
            if progress is None:
                if last is None or not last.is_over:
                    processes.check()
                if last is None and time.monotonic() - started > START_LIMIT_S:
                    raise LoadTestError(f"Locust does not begin: {processes.last_words()}")
                continue
            if last is None:
                sampler.begin(time.monotonic() - progress.elapsed_s)
            last = progress
            display.show(progress)
    except KeyboardInterrupt:
        display.say("stopping: answers under way are given up")
        processes.interrupt()
        raise
    return last


def _begin_folder(folder: RunFolder, plan: Plan) -> None:
    if folder.facts_path.exists() or any(folder.path.glob("records-*.jsonl")):
        raise LoadTestError(f"{folder.path}: has a run already; name another folder")
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.plan_path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2))
    except OSError as error:
        raise LoadTestError(f"{folder.path}: {error.strerror}") from error


@dataclass
class _Processes:
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
        """Raises LoadTestError where a worker is gone before the end."""
        for number, worker in enumerate(self.workers):
            if worker.poll() is not None:
                self.interrupt()
                raise LoadTestError(f"sending process {number} is gone: {self.last_words(f'worker-{number}')}")

    def interrupt(self) -> None:
        """As Ctrl-C: all that is under way is given up and recorded. Waits until the head has ended."""
        _end(self.head, at_once=True)

    def end(self) -> None:
        """Whatever happened, none of them stays."""
        for process in (self.head, *self.workers):
            _end(process)
        os.close(self.pipe)

    def last_words(self, name: str = "head") -> str:
        path = log_path(self.folder, name)
        lines = path.read_text(errors="replace").split("\n") if path.exists() else []
        said = [line.strip() for line in lines if line.strip()]
        return f"{said[-1] if said else 'it said nothing'} ({path})"


def _start(plan: Plan, folder: RunFolder, web_port: int | None) -> _Processes:
    reading, writing = os.pipe()
    head = ["--progress-fd", str(writing), "--only-summary"]
    if web_port is None:
        head += ["--headless"]
    else:
        head += ["--autostart", "--autoquit", "0", "--web-host", "127.0.0.1", "--web-port", str(web_port)]
    if plan.num_workers == 1:
        processes = _Processes(_locust(folder, "head", head, writing), [], reading, folder)
    else:
        port = str(_free_port())
        head += ["--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", port]
        head += ["--expect-workers", str(plan.num_workers)]
        worker = ["--worker", "--master-host", "127.0.0.1", "--master-port", port]
        processes = _Processes(
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
    with log_path(folder, name).open("ab") as log:
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
    """Wait until it has ended; where it does not by itself, tell it to, and at last make it."""
    for limit_s, stop in ((0.0 if at_once else END_LIMIT_S, signal.SIGINT), (STOP_LIMIT_S, signal.SIGKILL)):
        try:
            process.wait(limit_s)
            return
        except subprocess.TimeoutExpired:
            process.send_signal(stop)
    process.wait()


def _check_free(web_port: int) -> None:
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
