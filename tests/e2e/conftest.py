"""Real servers for the tests: started by the command line, ended by their ids, and nothing may be left of them."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from twostroke.benchmarks.server_process import ServerProcess
from twostroke.cluster.local.processes import descendants

MODEL = "twostroke-bundled"
SETTLE_S = 15.0  # for what other processes bring about
ENDING_S = 10.0  # from Ctrl-C to the last process's end
# Where outputs are compared: bf16 leaves near-ties that the order of additions decides.
EXACT = ("--dtype", "float32")


class Server:
    """A running server and what a test asks of it."""

    def __init__(self, process: ServerProcess):
        self.process = process
        self.url = process.url
        self.client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="unused", max_retries=0, timeout=60)

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/status", timeout=30) as answer:
            status: dict[str, Any] = json.load(answer)
            return status

    def workers(self, role: str) -> list[dict[str, Any]]:
        return [worker for worker in self.status()["workers"] if worker["role"] == role]

    def owned_blocks(self) -> int:
        """Of all workers that can be reached."""
        stats = [worker["stats"] for worker in self.status()["workers"]]
        return sum(one["owned_blocks"] for one in stats if one is not None)

    def doctor(self) -> list[dict[str, Any]]:
        """What `twostroke doctor` says of each pair of workers; every trial must have worked."""
        command = [sys.executable, "-m", "twostroke.cluster.cli", "doctor", "--url", self.url, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        begin, *pairs, end = [json.loads(line) for line in done.stdout.splitlines()]
        assert (begin["event"], begin["pairs"], end) == ("begin", len(pairs), {"event": "end", "failed": 0})
        return pairs

    def processes(self) -> list[int]:
        return descendants(self.process.pid)


def eventually(what: str, condition: Callable[[], bool], within_s: float = SETTLE_S) -> None:
    """Wait for something that other processes bring about, and fail where it doesn't come."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.05)


def alive(pids: list[int]) -> dict[int, str]:
    """Those that still run, zombies that nobody has waited for left out."""
    found: dict[int, str] = {}
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it has ended
        if stat.rpartition(")")[2].split()[0] != "Z":
            found[pid] = stat[: stat.rindex(")") + 1]
    return found


def serving(*arguments: str) -> Iterator[Server]:
    """The body of a fixture: a server with these arguments; at its end none of its processes may be left."""
    with ServerProcess([*EXACT, *arguments]) as process:
        server = Server(process)
        yield server
        server.client.close()
        processes = server.processes()
        took_s = process.end()
    assert alive(processes) == {}
    assert took_s < ENDING_S


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> None:
    # Servers and tests share the machine's few cores; processes started from here inherit this.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """One prefill worker and one decode worker, KV through shared memory."""
    yield from serving()
