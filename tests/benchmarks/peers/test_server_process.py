"""A server's processes: awaited until they answer, ended with all that they started."""

import socket
import sys
from pathlib import Path

import pytest

from twostroke.benchmarks.peers.run_comparison import Command, ServerFailed, ServerProcess

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
    return ServerProcess(command, "m", tmp_path / "log", start_limit_s=60.0)


def test_a_server_is_there_within_the_context_and_nothing_of_it_after(tmp_path: Path) -> None:
    with server(tmp_path, SERVER) as running:
        child = Path("/proc") / (tmp_path / "log").read_text().split()[0]
        assert child.exists()
        assert running.started_in_s > 0
        assert running.memory_bytes() > 2**20
    assert not child.exists() or "\nState:\tZ" in (child / "status").read_text()


def test_a_server_that_ends_while_it_starts_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="no such model"), server(tmp_path, "raise SystemExit('no such model')"):
        pass
