"""Servers for all clients, started by the command line of the main environment, ended by their ids; and programs run
with a home of their own that reach loopback alone."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
MAIN = ROOT / ".venv" / "bin"
CLOSED = "http://127.0.0.1:9"  # no proxy listens there: what is not for loopback fails
START_S, END_S, RUN_S, POLL_S = 400.0, 30.0, 300.0, 0.25


class Server(NamedTuple):
    url: str
    model: str

    def refused(self) -> list[str]:
        """Return the metric's lines that count requests answered with 4xx or 5xx, by their codes."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return [line for line in lines if line.startswith("twostroke:requests_refused_total")]


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    log = folder / "log"
    command = [str(MAIN / "twostroke"), "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT)
    try:
        limit = time.monotonic() + START_S
        while b"\ncurl " not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > limit:
                sys.exit(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(POLL_S)
        url = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
            yield Server(url, json.load(answer)["data"][0]["id"])
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        finally:
            process.kill()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves what `make serve` does: SmolLM2 where it is installed, else the bundled model.

    Neither was taught to call tools: they are told how, so that calls can be enforced.
    """
    with serving(tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Server]]:
    """Serves the model of scripted_model.py that makes a given call; one such server at a time."""
    running: dict[str, Server] = {}
    with ExitStack() as stack:

        def start(call: str) -> Server:
            if call not in running:
                stack.close()
                running.clear()
                folder = tmp_path_factory.mktemp("scripted")
                maker = [str(MAIN / "python"), str(Path(__file__).with_name("scripted_model.py"))]
                subprocess.run([*maker, str(folder / "scripted"), call], check=True, timeout=RUN_S)
                running[call] = stack.enter_context(serving(folder, "--model", str(folder / "scripted")))
            return running[call]

        yield start


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The folder in which `run` runs programs."""
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


@pytest.fixture
def run(work: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program with nothing of this shell's environment but PATH, and waits for it."""

    def run_program(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        assert Path(command[0]).exists(), f"{command[0]} is missing: `make test-clients` installs it"
        proxies = {"HTTP_PROXY": CLOSED, "HTTPS_PROXY": CLOSED, "NO_PROXY": "127.0.0.1"}
        settings = {"PATH": os.environ["PATH"], "HOME": str(work.parent), **proxies, **environment}
        ended = subprocess.run(
            list(map(str, command)),
            cwd=work,
            env=settings,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        print(ended.returncode, ended.stdout, ended.stderr)  # shown where a test fails
        return ended

    return run_program
