"""Real servers for the tests: started by the command line, ended by their ids, and nothing may be left of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.rigs.processes import alive, eventually
from twostroke.benchmarks.server_process import ServerProcess, twostroke_server
from twostroke.cluster.local.processes import descendants

MODEL = "twostroke-bundled"
PROMPT = "import os\n\ndef list_files(path):\n"
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

    def greedy_tokens(self, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
        """What a request is answered with that nothing ends early, and how much of its prompt was found in caches."""
        answer = self.client.completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        token_ids: list[int] = answer.choices[0].model_dump()["token_ids"]
        return token_ids, details.cached_tokens or 0 if details else 0

    def long_stream(self) -> "openai.Stream[openai.types.Completion]":
        body = {"ignore_eos": True}
        return self.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8000, stream=True, extra_body=body)

    def read_until_cut_off(self) -> None:
        """Read a long answer, until the server's end cuts it off."""
        with contextlib.suppress(openai.APIError, httpx.HTTPError):
            for _ in self.long_stream():
                pass

    def processes(self) -> list[int]:
        return descendants(self.process.pid)


def serving(*arguments: str, under_a_stream: bool = False) -> Iterator[Server]:
    """The body of a fixture: a server with these arguments; at its end none of its processes may be left.

    It is ended by Ctrl-C when it is idle, or by SIGTERM in the middle of an answer.
    """
    with twostroke_server([*EXACT, *arguments]) as process:
        server = Server(process)
        yield server
        answering = threading.Thread(target=server.read_until_cut_off) if under_a_stream else None
        if answering is not None:
            answering.start()
            eventually("the answer has begun", lambda: server.owned_blocks() > 0)
        processes = server.processes()
        assert len(processes) > 5
        took_s = process.end(signal.SIGTERM if under_a_stream else signal.SIGINT)
        if answering is not None:
            answering.join()
        server.client.close()
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
