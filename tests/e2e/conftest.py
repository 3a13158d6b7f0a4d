"""Real servers for the tests: started by the command line, ended by their ids, and nothing may be left of them.

And what holds for each of them, by whatever way KV travels: that the doctor finds the way sound, and the tokens to be
those that the engine alone draws. Each server has more to show, and starting one takes longer than most of that.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.rigs.processes import alive, eventually
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.processes import descendants
from twostroke.cluster.local.server_process import ServerProcess, twostroke_server
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.engine_config import EngineConfig
from twostroke.model.load import load_engine
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import SamplingParams

MODEL = "twostroke-bundled"
PROMPT = "import os\n\ndef list_files(path):\n"
ENDING_S = 10.0  # from Ctrl-C to the last process's end
# Where outputs are compared: bf16 leaves near-ties that the order of additions decides.
EXACT = ("--dtype", "float32")
NEW_TOKENS = 32
BLOCK_SIZE = 16
# Lengths on both sides of the borders of blocks and chunks.
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100, 255, 256, 257, 400, 511, 513, 700)
PROMPTS = [[300 + (7 * index + 13 * position) % 3000 for position in range(n)] for index, n in enumerate(LENGTHS)]


class Server:
    """A running server and what a test asks of it."""

    def __init__(self, process: ServerProcess):
        self.process = process
        self.url = process.url
        self.client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="unused", max_retries=0, timeout=60)

    def status(self) -> dict[str, Any]:
        return fetch_status(self.url, timeout_s=30)

    def workers(self, role: str) -> list[dict[str, Any]]:
        return [worker for worker in self.status()["workers"] if worker["role"] == role]

    def owned_blocks(self) -> int:
        return self._of_all("owned_blocks")

    def _of_all(self, number: str) -> int:
        """Return the sum over all workers that can be reached."""
        stats = [worker["stats"] for worker in self.status()["workers"]]
        return sum(one[number] for one in stats if one is not None)

    def check_ways(self, transport: str | None) -> None:
        """`twostroke doctor` measures every way that KV takes, all by `transport`, and leaves nothing."""
        command = [sys.executable, "-m", "twostroke.cluster.cli", "doctor", "--url", self.url, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        begin, *pairs, end = [json.loads(line) for line in done.stdout.splitlines()]
        assert (begin["event"], begin["pairs"], end) == ("begin", len(pairs), {"event": "end", "failed": 0})
        ways = [("prefill", "decode"), ("decode", "prefill")] if transport else []
        assert [(pair["source_role"], pair["target_role"]) for pair in pairs] == ways
        for pair in pairs:
            assert pair["transport"] == transport
            assert pair["why"]
            assert (pair["missing"] == []) == (transport == "shm")  # nothing is better on one machine
            assert 1e7 < pair["bytes_per_s"] < 1e12
            assert 1e-5 < pair["round_trip_s"] < 1.0
        eventually("all blocks are free again", lambda: self.owned_blocks() == 0)

    def check_tokens(self, expected: list[list[int]]) -> None:
        """All prompts at once get the tokens that the engine alone draws, and none is computed for want of its KV."""

        def complete(prompt: list[int]) -> list[int]:
            return self.greedy_tokens(prompt, NEW_TOKENS)[0]

        failed = self._of_all("transfers_failed")
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            cold = list(clients.map(complete, PROMPTS))
            warm = list(clients.map(complete, PROMPTS))  # from the prefix cache
        assert cold == expected
        assert warm == expected
        assert self._of_all("transfers_failed") == failed
        assert self._of_all("transfers_done") > 0 or not self.workers("prefill")

    def greedy_tokens(self, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
        """Return the tokens of a request that nothing ends early, and how much of its prompt was cached."""
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


def log_lines(folder: Path, request_id: str = "") -> list[dict[str, Any]]:
    """The JSON lines about one request, or about any, that routers and workers wrote below a folder of Ray's, each
    process's in their order. A line that is being written is left out."""
    lines: list[dict[str, Any]] = []
    for file in sorted(folder.glob("**/session_2*/logs/serve/twostroke_*.log")):
        for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
            if request_id in line and line.endswith("\n"):
                lines.append(json.loads(line))
    return [line for line in lines if line.get("request_id") and request_id in ("", line["request_id"])]


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
def expected() -> list[list[int]]:
    """Return what one engine in this process draws for PROMPTS, one after the other, each in one chunk."""
    loaded = load_engine(
        EngineConfig(model_dir=BUNDLED_MODEL_DIR, dtype="float32", block_size=BLOCK_SIZE, num_blocks=64, threads=1)
    )

    async def generate(prompt: Sequence[int]) -> list[int]:
        table = list(range(-(-(len(prompt) + NEW_TOKENS) // BLOCK_SIZE)))
        tokens = list(prompt)
        computed = 0
        while len(tokens) < len(prompt) + NEW_TOKENS:
            draw = Draw(SamplingParams(temperature=0.0), history=tokens, num_prompt_tokens=len(prompt))
            (sampled,) = await loaded.engine.step([SequenceStep(tokens[computed:], computed, table, draw)])
            assert sampled is not None
            computed = len(tokens)
            tokens.append(sampled.token_id)
        return tokens[len(prompt) :]

    async def generate_all() -> list[list[int]]:
        return [await generate(prompt) for prompt in PROMPTS]

    try:
        return asyncio.run(generate_all())
    finally:
        loaded.engine.close()
