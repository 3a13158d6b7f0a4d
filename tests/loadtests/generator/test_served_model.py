"""What a server tells of its model."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.cluster.command_line import answering
from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.generator.run_facts import ServedModel, api_key, served_model

VOCABULARY = 4097


class Ours(BaseHTTPRequestHandler):
    """Knows as many token ids as it says nowhere."""

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "m", "max_model_len": 8192, "owned_by": "twostroke"}]})

    def do_POST(self) -> None:
        (token_id,) = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["tokens"]
        self._answer(200 if token_id < VOCABULARY else 400, {})

    def _answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silence."""


@pytest.fixture
def ours() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Ours) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_our_server_s_vocabulary_is_found_by_what_it_refuses(ours: str) -> None:
    assert served_model(ours) == ServedModel("m", 8192, VOCABULARY)


def test_another_server_is_asked_for_its_models_alone() -> None:
    models = {"data": [{"id": "llama", "owned_by": "vllm", "max_model_len": 4096}]}
    with answering({"/v1/models": json.dumps(models).encode()}) as url:
        assert served_model(url, "llama") == ServedModel("llama", 4096, 0)


@pytest.mark.parametrize(
    ("body", "status", "fault"),
    [
        (b"{}", 200, "no list of models"),
        (b"<html>", 200, "no list of models"),
        (b'{"data": []}', 200, "serves no model"),
        (b"{}", 401, "OPENAI_API_KEY"),
        (b"{}", 404, "answers 404"),
        (b'{"data": [{"id": "m", "owned_by": "twostroke", "max_model_len": null}]}', 200, "no decode worker"),
    ],
)
def test_a_server_that_is_none_is_refused(body: bytes, status: int, fault: str) -> None:
    with answering({"/v1/models": body}, status) as url, pytest.raises(LoadTestError, match=fault):
        served_model(url)


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("ftp://127.0.0.1", "write http://HOST:PORT"),
        ("http://", "write http://HOST:PORT"),
        ("http://127.0.0.1:80x", "nonnumeric port"),
        ("http://127.0.0.1:9/v1/", "leave /v1 away"),
        ("http://127.0.0.1:9", "Connection refused; is it started"),
    ],
)
def test_a_url_at_which_no_server_can_be_is_told_with_the_way_out(url: str, fault: str) -> None:
    with pytest.raises(LoadTestError, match=fault):
        served_model(url)


def test_a_key_of_ours_wins_over_openai_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TWOSTROKE_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert api_key() == "theirs"
    monkeypatch.setenv("TWOSTROKE_API_KEY", "ours")
    assert api_key() == "ours"
