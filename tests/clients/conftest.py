"""One server for all clients, started by the command line of the main environment, ended by its id."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

TWOSTROKE = Path(__file__).parents[2] / ".venv" / "bin" / "twostroke"
START_S, END_S, POLL_S = 400.0, 30.0, 0.25


class Server(NamedTuple):
    url: str
    model: str


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves what `make serve` does: SmolLM2 where it is installed, else the bundled model.

    Neither was taught to call tools: they are told how, so that calls can be enforced.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    folder = tmp_path_factory.mktemp("server")
    log, config = folder / "log", folder / "cluster.yaml"
    config.write_text("model:\n  response_template: hermes\n", encoding="utf-8")
    command = [str(TWOSTROKE), "serve", "--host", "127.0.0.1", "--port", str(port), "--config", str(config)]
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
