"""One run: starts Locust's processes, watches them, samples the server, ends all of them, and leaves a run's folder."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from select import select

import msgspec

from twostroke.loadtests import LoadTestError, RunLost, unwritable
from twostroke.loadtests.generator.dispatcher import check_prompts
from twostroke.loadtests.generator.live import ProgressDisplay, RunProgress
from twostroke.loadtests.generator.run_facts import get
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.run_folder import RunFolder, Sample, make_folder, write_json
from twostroke.loadtests.workloads.sessions import sessions

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

    def progress(self) -> Iterator[RunProgress | None]:
        """Each line of the head; None where there was none for a while. Ends with the head."""
        decode = msgspec.json.Decoder(RunProgress).decode
        buffered = b""
        while True:
            if not select([self.pipe], [], [], LOOK_INTERVAL_S)[0]:
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
                raise RunLost(f"sending process {number} {self.fate(worker, f'worker-{number}')}")

    def interrupt(self) -> None:
        """Interrupt the run as Ctrl-C does: everything in progress is given up and recorded. Waits until the head
        has ended."""
        _end(self.head, at_once=True)

    def end(self) -> None:
        """Whatever happened, none of them stays."""
        for process in (self.head, *self.workers):
            _end(process)
        os.close(self.pipe)

    def fate(self, process: subprocess.Popen[bytes], name: str) -> str:
        """Return how a process ended. One that was killed had no time to say why."""
        if process.returncode is not None and process.returncode < 0:
            by = signal.Signals(-process.returncode).name
            why = ", as the kernel does where memory runs out" if by == "SIGKILL" else ""
            return f"was killed by {by}{why}; its log is {log_path(self.folder, name)}"
        return f"ended with exit code {process.returncode}: {self.last_words(name)}"

    def last_words(self, name: str = "head") -> str:
        path = log_path(self.folder, name)
        lines = path.read_text(errors="replace").split("\n") if path.exists() else []
        words = [line.strip() for line in lines if line.strip()]
        return f"{words[-1] if words else 'it said nothing'} ({path})"


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


INTERVAL_S = 1.0
TIMEOUT_S = 2.0

# Our names are vLLM's with another prefix; the last was its name for KV use before.
_FIELDS = {
    "running": ("num_requests_running",),
    "waiting": ("num_requests_waiting",),
    "waiting_tokens": ("num_waiting_tokens",),
    "kv_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
}
_MAYBE = {
    "mfu": ("model_flops_utilization",),
    "mbu": ("model_bandwidth_utilization",),
    "draft_tokens": ("spec_decode_num_draft_tokens_total",),
    "accepted_tokens": ("spec_decode_num_accepted_tokens_total",),
    "generated_tokens": ("worker_generation_tokens_total", "generation_tokens_total"),
}
"""Fields that are None where the server does not tell them."""
_LINE = re.compile(r"^(?:twostroke|vllm):(\w+)\{([^}]*)\} (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_samples(metrics: str, at_s: float) -> list[Sample]:
    """One of each worker that the text tells of. vLLM has no roles and no worker ids: its engines are `decode`."""
    workers: dict[tuple[str, str], dict[str, float]] = {}
    fields = {name: field for field, names in (_FIELDS | _MAYBE).items() for name in names}
    for line in metrics.splitlines():
        match = _LINE.match(line)
        if match is None or match[1] not in fields:
            continue
        labels: dict[str, str] = dict(_LABEL.findall(match[2]))
        if "router" in labels:
            continue  # no worker's
        worker = (labels.get("role", "decode"), labels.get("worker") or labels.get("engine", "0"))
        workers.setdefault(worker, {})[fields[match[1]]] = float(match[3])
    return [
        Sample(
            at_s,
            role,
            worker,
            **{field: values.get(field, 0.0) for field in _FIELDS},
            mfu=values.get("mfu"),
            mbu=values.get("mbu"),
            draft_tokens=values.get("draft_tokens"),
            accepted_tokens=values.get("accepted_tokens"),
            generated_tokens=values.get("generated_tokens"),
        )
        for (role, worker), values in sorted(workers.items())
    ]


def write_samples(url: str, path: Path, at_s: float) -> None:
    """Append what the server tells now; nothing where it does not. Raises RunLost where the disk has no room."""
    try:
        samples = parse_samples(get(url, "/metrics", TIMEOUT_S).decode(errors="replace"), at_s)
    except (OSError, HTTPException, ValueError):
        return  # a gap in the curve says it
    lines = b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)
    try:
        if lines:
            with path.open("ab") as file:
                file.write(lines)
    except OSError as error:
        raise RunLost(str(unwritable(path, error))) from error


START_LIMIT_S = 60.0  # until the first word of a run: Locust's processes find each other, and compute the schedule


def run_plan(plan: Plan, folder: Path, *, show: bool = True, web_port: int | None = None) -> RunFolder:
    """Carry out a plan; what it leaves is in `folder`, which must have no run yet.

    Ctrl-C ends the run early: its folder is complete for what was sent, says so, and KeyboardInterrupt goes on.
    Raises LoadTestError where the run can't be carried out; RunLost where it had begun, and a process was lost or the
    disk is full: what was sent then has its records.
    """
    check_prompts(plan)
    sessions(plan)  # raises here rather than in each process
    if web_port is not None:
        check_free(web_port)
    result = RunFolder(folder)
    if result.facts_path.exists() or any(folder.glob("records-*.jsonl")):
        raise LoadTestError(f"{folder}: has a run already; name another folder")
    make_folder(folder)
    write_json(result.plan_path, plan)
    processes = start_locust(plan, result, web_port)
    try:
        with ProgressDisplay(plan, show) as display:
            last = _watch(processes, display, plan)
    finally:
        processes.end()
    if last is None or not last.is_over:
        lost = f"Locust ended before the run did: its first process {processes.fate(processes.head, 'head')}"
        raise LoadTestError(lost) if last is None else RunLost(lost)
    if last.error is not None:
        raise RunLost(last.error)
    return result


def _watch(processes: LocustProcesses, display: ProgressDisplay, plan: Plan) -> RunProgress | None:
    """Wait until the head has ended, sampling the server about once a second. Return the head's last message."""
    last: RunProgress | None = None
    began = time.monotonic()
    sampled_at = 0.0
    try:
        for progress in processes.progress():
            now = time.monotonic()
            if progress is not None:
                if last is None:
                    began = now - progress.elapsed_s
                last = progress
                display.show(progress)
            elif last is None or not last.is_over:
                processes.check()
                if last is None and now - began > START_LIMIT_S:
                    raise LoadTestError(f"Locust does not begin: {processes.last_words()}")
            if last is not None and now - sampled_at >= INTERVAL_S:
                sampled_at = now
                write_samples(plan.url, processes.folder.samples_path, now - began)
    except KeyboardInterrupt:
        display.say("stopping: answers under way are given up")
        processes.interrupt()
        raise
    except RunLost:
        processes.interrupt()
        raise
    return last
