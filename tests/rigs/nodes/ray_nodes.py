"""A Ray cluster whose nodes are machines of our own: started with `ray start`, as on real ones, and killed like them.

Ray's own command to end nodes is never used: it would end every Ray of the user on this machine.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.rigs.nodes.machines import Machine, Machines
from tests.rigs.nodes.redis import Redis
from twostroke.cluster.deployments.haproxy import haproxy_binary
from twostroke.cluster.deployments.proxies import NO_HAPROXY_SWITCHES, SWITCHES
from twostroke.cluster.local.ray import free_ports, haproxy_switches

HEAD_PORT = 6379
START_S = 120.0
NODE_STARTS = 4
"""A node that does not come up is started again, as systemd and KubeRay do: Ray's raylet waits 15 s for its agent,
which may take longer on a busy machine, and gives up (https://github.com/ray-project/ray/issues/65983)."""
HEADLESS_S = 600.0
"""Seconds that nodes live without their head, as in deploy/ray.env."""
STORE_BYTES = 80_000_000
"""Size of a node's object store. Ray's minimum is 75 MB, and we store next to nothing there."""

# Sockets of Ray and HAProxy have these in their paths, for which there are 97 characters.
_TEMPORARY, _FOLDERS = Path("/tmp"), "ts-nodes-"
_ROOT = Path(__file__).resolve().parents[3]
_UP = b"Ray runtime started."
_ASK_SERVE = """
import json, sys, ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(json.dumps({name: one.status.value for name, one in serve.status().applications.items()}))
"""

# A node that is killed is noticed within 2 s, one that is cut off within 8 s, in place of Ray's 15 s and more. A node
# on a machine that others keep busy may take a while to start, and to answer.
QUICK_NODE_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_raylet_start_wait_time_s": "60",
}


class NodeFailed(Exception):
    """A node did not start, or a command on one failed. The message has what it said."""


@dataclass(frozen=True)
class NodeSpec:
    """Description of a node. The name is for people."""

    name: str
    num_cpus: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Node:
    spec: NodeSpec
    is_head: bool
    machine: Machine
    process: "subprocess.Popen[bytes]"  # `ray start`
    log: Path
    starts: int = 1

    @property
    def address(self) -> str:
        return self.machine.address


class RayNodes:
    """A context manager: inside it there is a head; at its end no process and no file is left."""

    def __init__(self, machines: Machines, head: NodeSpec, *, redis: Redis | None = None, drain_s: float = 0.0):
        """`redis`: where the head keeps its state, so that `replace_head` can go on with it. `drain_s`: what a node
        that is told to end has, to take its replicas elsewhere."""
        self.machines = machines
        self._head_spec = head
        self._redis = redis
        self._drain_s = drain_s
        self._secret = secrets.token_hex(16)  # of our own connections
        self._ray_token = secrets.token_hex(32)
        self._folder = Path()
        self._nodes: list[Node] = []
        self._launched = 0
        self._head: Node | None = None
        self._ports: tuple[int, ...] = ()
        self._switches: Mapping[str, str] = NO_HAPROXY_SWITCHES

    def __enter__(self) -> "RayNodes":
        _remove_stale_folders()
        self._folder = _TEMPORARY / f"{_FOLDERS}{os.getpid()}"
        self._folder.mkdir(mode=0o700)
        try:
            self._ports = tuple(free_ports(2))
            if self.machines.has_own_ports and haproxy_binary() is not None:
                stats, metrics, fallback = free_ports(3)
                # Serve adds the node's id to the files' names.
                self._switches = haproxy_switches(self._folder, stats=stats, metrics=metrics, fallback=fallback)
            if self._redis is not None:
                self._redis.start(self.machines.add(), self._folder)
            self._head = self._start(self._head_spec, self.machines.add(), is_head=True)
            self.await_up(self._head)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    @property
    def head(self) -> Node:
        assert self._head is not None  # inside of the context
        return self._head

    @property
    def gcs_address(self) -> str:
        return f"{self.head.address}:{HEAD_PORT if self.machines.has_own_ports else self._ports[0]}"

    def add(self, spec: NodeSpec) -> Node:
        """A new node, on a machine of its own. It is up after `await_up`."""
        return self._start(spec, self.machines.add(), is_head=False)

    def replace_head(self) -> Node:
        """A new head with the address and, where there is a Redis, the state of one whose machine was killed. It is up
        after `await_up`."""
        self._head = self._start(self._head_spec, self.machines.replace(self.head.machine), is_head=True)
        return self._head

    def await_up(self, node: Node) -> None:
        """Starts it again, on another machine in its place, where it does not come up. Raises NodeFailed after
        NODE_STARTS."""
        while (failure := self._why_down(node)) is not None:
            if node.starts == NODE_STARTS:
                raise NodeFailed(f"{node.spec.name} {failure}")
            node.machine.kill()
            node.machine = self.machines.replace(node.machine)
            node.process, node.log = self._launch(node.spec, node.machine, is_head=node.is_head)
            node.starts += 1

    def _why_down(self, node: Node) -> str | None:
        """None once it is up; else why it has not come up."""
        deadline = time.monotonic() + START_S
        while True:
            has_ended = node.process.poll() is not None
            text = node.log.read_bytes()
            if _UP in text:
                return None
            if has_ended or time.monotonic() > deadline:
                when = "has ended" if has_ended else f"is not up after {START_S:g} s"
                return f"{when}: {text.decode(errors='replace')}"
            time.sleep(0.05)

    def serve_run(self, config: Mapping[str, Any]) -> None:
        """Deploy what a Serve configuration file would say, as `serve run` on the head does. Raises NodeFailed."""
        path, log = self._folder / "serve.yaml", self._folder / "serve.log"
        path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
        serve = str(Path(sys.executable).parent / "serve")
        command = [serve, "run", "--non-blocking", "--address", self.gcs_address, str(path)]
        process = self.head.machine.start(command, self._environment(), log)
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode != 0:
            text = log.read_text(errors="replace")
            raise NodeFailed(f"{' '.join(command)} ended with {process.returncode}: {text}")

    def serve_status(self) -> dict[str, str]:
        """Return the state of each application, from Serve's controller on the head. Raises NodeFailed."""
        log = self._folder / "status.log"
        log.unlink(missing_ok=True)
        process = self.head.machine.start(
            [sys.executable, "-c", _ASK_SERVE, self.gcs_address], self._environment(), log
        )
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        text = log.read_text(errors="replace")
        if process.returncode != 0:
            raise NodeFailed(f"Serve's state can't be had: {text}")
        applications: dict[str, str] = json.loads(text.splitlines()[-1])
        return applications

    def _start(self, spec: NodeSpec, machine: Machine, *, is_head: bool) -> Node:
        node = Node(spec, is_head, machine, *self._launch(spec, machine, is_head=is_head))
        self._nodes.append(node)
        return node

    def _launch(self, spec: NodeSpec, machine: Machine, *, is_head: bool) -> tuple["subprocess.Popen[bytes]", Path]:
        """`ray start` and what it says, in a folder of its own."""
        self._launched += 1
        number = self._launched
        folder = self._folder / str(number)
        folder.mkdir()
        log = self._folder / f"{number}-{spec.name}.log"
        command = [
            str(Path(sys.executable).parent / "ray"),
            "start",
            "--block",
            "--disable-usage-stats",
            f"--node-ip-address={machine.address}",
            f"--temp-dir={folder}",
            f"--num-cpus={spec.num_cpus}",
            "--num-gpus=0",
            "--include-log-monitor=false",
            f"--object-store-memory={STORE_BYTES}",
            f"--labels={','.join(f'{name}={value}' for name, value in spec.labels.items())}",
            f"--resources={json.dumps(dict(spec.resources))}",
        ]
        environment = self._environment()
        if is_head:
            command += ["--head", "--include-dashboard=false"]
            if self._redis is not None:
                environment["RAY_REDIS_ADDRESS"] = self._redis.address
                command.append(f"--redis-password={self._redis.password}")
            if not self.machines.has_own_ports:
                command += [f"--port={self._ports[0]}", f"--ray-client-server-port={self._ports[1]}"]
        else:
            command.append(f"--address={self.gcs_address}")
        return machine.start(command, environment, log), log

    def _environment(self) -> dict[str, str]:
        """Ours, with Ray's switches, and this checkout importable by all that Ray starts."""
        inherited = os.environ.get("PYTHONPATH")
        return {
            **os.environ,
            **SWITCHES,
            **self._switches,
            **QUICK_NODE_CHECKS,
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": f"{self._drain_s:g}",
            # Longer than a new head takes to come, of all that a node lives without one.
            "RAY_gcs_rpc_server_reconnect_timeout_s": f"{HEADLESS_S:g}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._ray_token,
            "TWOSTROKE_SECRET": self._secret,
            "PYTHONPATH": f"{_ROOT}{os.pathsep}{inherited}" if inherited else str(_ROOT),
        }

    def _remove(self) -> None:
        """Files go when the machines that write them have."""
        for node in self._nodes:
            node.machine.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _remove_stale_folders() -> None:
    """Those of processes that were killed before they could do it."""
    for folder in _TEMPORARY.glob(f"{_FOLDERS}*"):
        if not Path("/proc", folder.name.removeprefix(_FOLDERS)).exists():
            shutil.rmtree(folder, ignore_errors=True)
