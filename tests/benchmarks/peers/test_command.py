"""The plan that arguments ask for; a server's process, awaited until it answers, and ended."""

import argparse
import sys
from pathlib import Path

import pytest

from twostroke.benchmarks.peers import command as peers
from twostroke.benchmarks.peers.command import answers, target_of
from twostroke.benchmarks.peers.compare_servers import PeerServer
from twostroke.cluster.local.processes import descendants
from twostroke.cluster.local.ray import free_ports
from twostroke.cluster.local.server_process import ServerFailed, ServerProcess
from twostroke.protocol.errors import ConfigError

# Answers any request.
SERVER = """
import http.server, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background inherits as ignored
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices":[{"text":"a"}]}\\n\\ndata: [DONE]\\n\\n')
print("here I am", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(script: str, log: Path | None = None) -> ServerProcess:
    (port,) = free_ports(1)
    return ServerProcess([sys.executable, "-c", script, str(port)], port, answers, log=log)


def test_a_server_answers_within_the_context_and_is_gone_after(tmp_path: Path) -> None:
    with server(SERVER, tmp_path / "log") as running:
        assert running.output().startswith("here I am")
        assert running.started_in_s > 0
        assert peers.memory_gib(running.pid) > 1e-3
    assert running.pid not in descendants()
    assert (tmp_path / "log").read_text().startswith("here I am")


def test_a_server_that_ends_while_it_starts_is_told_with_its_last_words() -> None:
    with pytest.raises(ServerFailed, match="no such model"), server("raise SystemExit('no such model')"):
        pass


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    return parser.parse_args(arguments)


def test_servers_that_run_are_named_with_their_addresses() -> None:
    assert target_of("a=http://127.0.0.1:1/v1/") == PeerServer("a", "http://127.0.0.1:1")
    assert target_of("vllm") is None
    plan = peers.comparison_of(
        parsed("m", "--vocab-size", "7", "--rounds", "2", "--servers", "a=http://127.0.0.1:1/v1")
    )
    assert (plan.model, plan.vocab_size, plan.rounds) == ("m", 7, 2)
    assert peers.comparison_of(parsed("1b")).output_tokens == 64


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["small", "--servers", "http://127.0.0.1:1/v1"], "NAME=http"),
        (["small", "--servers", "a=127.0.0.1:1"], "NAME=http"),
        (["m", "--servers", "vllm"], "is started for small and 1b alone"),
        (["m", "--servers", "a=http://127.0.0.1:1/v1"], "--vocab-size"),
    ],
)
def test_what_can_be_neither_started_nor_asked_is_refused(arguments: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        peers.comparison_of(parsed(*arguments))


def test_the_models_tokenizer_has_a_text_for_every_id() -> None:
    tokenizer = peers.make_tokenizer(5000)
    assert tokenizer.get_vocab_size() == 5000
    assert all(tokenizer.decode([number], skip_special_tokens=False) for number in range(300, 5000))
