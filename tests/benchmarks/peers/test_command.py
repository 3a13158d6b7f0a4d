"""The plan that arguments ask for; a server's processes, awaited until they answer, and ended with all they started."""

import argparse
import socket
import sys
from pathlib import Path

import pytest

from twostroke.benchmarks.peers import command as peers
from twostroke.benchmarks.peers.command import Command, ServerFailed, ServerProcess, target_of
from twostroke.benchmarks.peers.compare_servers import Target
from twostroke.protocol.errors import ConfigError

# Answers any request, and leaves a child in a session of its own, which no signal to the group would reach.
SERVER = """
import http.server, signal, subprocess, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background inherits as ignored
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'data: {"choices":[{"text":"a"}]}\\n\\ndata: [DONE]\\n\\n')
print(child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def server(tmp_path: Path, script: str) -> ServerProcess:
    port = free_port()
    command = Command("scripted", [sys.executable, "-c", script, str(port)], port)
    return ServerProcess(command, tmp_path / "log", start_limit_s=60.0)


def test_a_server_is_there_within_the_context_and_nothing_of_it_after(tmp_path: Path) -> None:
    with server(tmp_path, SERVER) as running:
        child = Path("/proc") / (tmp_path / "log").read_text().split()[0]
        assert child.exists()
        assert running.started_in_s > 0
        assert running.memory_gib() > 1e-3
    assert not child.exists() or "\nState:\tZ" in (child / "status").read_text()


def test_a_server_that_ends_while_it_starts_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="no such model"), server(tmp_path, "raise SystemExit('no such model')"):
        pass


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    return parser.parse_args(arguments)


def test_servers_that_run_are_named_with_their_addresses() -> None:
    assert target_of("a=http://127.0.0.1:1/v1/") == Target("a", "http://127.0.0.1:1")
    assert target_of("vllm") is None
    plan = peers.plan_of(parsed("m", "--vocab-size", "7", "--rounds", "2", "--servers", "a=http://127.0.0.1:1/v1"))
    assert (plan.model, plan.vocab_size, plan.rounds) == ("m", 7, 2)
    assert peers.plan_of(parsed("1b")).output_tokens == 64


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
        peers.plan_of(parsed(*arguments))


def test_the_models_tokenizer_has_a_text_for_every_id() -> None:
    tokenizer = peers.make_tokenizer(5000)
    assert tokenizer.get_vocab_size() == 5000
    assert all(tokenizer.decode([number], skip_special_tokens=False) for number in range(300, 5000))
