"""The same application under Ray Serve's own command line: a Serve config file, as `serve deploy` takes it, too."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import yaml

from cluster.descendants import descendants
from cluster.local_ray import free_ports
from tests.e2e.conftest import MODEL, alive

ROOT = Path(__file__).resolve().parent.parent.parent
START_S = 240.0
END_S = 30.0


def test_serve_run_starts_the_application_from_a_serve_config_file(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    config = {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "twostroke",
                "route_prefix": "/",
                "import_path": "cluster.serve_app:build_app",
                "args": {"prefill": {"replicas": 1, "num_blocks": 64}, "decode": {"num_blocks": 64}},
            }
        ],
    }
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    output = (tmp_path / "output").open("w+b")
    with (
        output,
        subprocess.Popen(
            [str(Path(sys.executable).parent / "serve"), "run", str(path)],
            cwd=ROOT,
            # A Ray of its own, whatever else runs on this machine.
            env=os.environ | {"RAY_ADDRESS": "local", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as run,
    ):
        processes: list[int] = []
        try:
            await_ready(f"http://127.0.0.1:{port}", run, tmp_path / "output")
            processes = descendants(run.pid)
            answer = post(f"http://127.0.0.1:{port}/v1/completions", {"model": MODEL, "prompt": "def", "max_tokens": 3})
            assert answer["usage"]["completion_tokens"] == 3
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=30) as reply:
                workers = json.load(reply)["workers"]
            assert sorted((worker["role"], worker["num_blocks"]) for worker in workers) == [
                ("decode", 64),
                ("prefill", 64),
            ]
        finally:
            run.send_signal(signal.SIGTERM)
            try:
                run.wait(END_S)
            finally:
                # Serve's own command makes no promise about its processes: what it leaves is ended here.
                for pid in alive(processes):
                    os.kill(pid, signal.SIGKILL)


def await_ready(url: str, run: "subprocess.Popen[bytes]", output: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert run.poll() is None, output.read_text()
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.2)


def post(url: str, body: dict[str, object]) -> dict[str, dict[str, int]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer: dict[str, dict[str, int]] = json.load(reply)
        return answer
