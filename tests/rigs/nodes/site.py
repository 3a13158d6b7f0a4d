"""A small site on several nodes of this machine: what it is configured to be, and where its workers are."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tests.rigs.nodes.ray_nodes import Node, NodeFailed, NodeSpec, RayNodes
from twostroke.cluster.local.asking import fetch_status
from twostroke.protocol.errors import ConfigError

APPLICATION = "twostroke"
ROLE_LABEL = "twostroke-role"
READY_S = 240.0

WorkerRole = Literal["prefill", "decode"]
NO_STAGES: Mapping[WorkerRole, int] = {"prefill": 1, "decode": 1}


@dataclass(frozen=True)
class ListedWorker:
    """A worker as /status lists it."""

    role: WorkerRole
    worker_id: str
    node: str  # its IP address; of several stages the first's
    nodes: tuple[str, ...]  # of all its stages
    reachable: bool
    num_running: int  # requests


def node_for(role: Literal["prefill", "decode", "router", "head"]) -> NodeSpec:
    """A node that runs one worker of a role, or one router, or nothing but what a head does."""
    if role == "head":
        return NodeSpec(role, num_cpus=0, labels={ROLE_LABEL: role})
    num_cpus = 0 if role == "router" else 1
    return NodeSpec(role, num_cpus=num_cpus, labels={ROLE_LABEL: role}, resources={f"{role}_slot": 1})


def settings(
    num_prefill: int,
    num_decode: int,
    *,
    share_memory: bool,
    num_routers: int = 1,
    stages: Mapping[WorkerRole, int] = NO_STAGES,
) -> dict[str, Any]:
    """The sections of the configuration: one worker a node, or one of its `stages`, by the labels and resources of
    `node_for`.

    Machines that share memory have shared memory between them switched off: nodes of a real cluster have none.
    """

    def workers(role: WorkerRole, replicas: int) -> dict[str, Any]:
        return {
            "replicas": replicas,
            "pipeline_parallel": stages[role],
            "threads": 1,
            "num_blocks": 512,
            "node_labels": {ROLE_LABEL: role},
            "node_resources": {f"{role}_slot": 1},
        }

    return {
        "model": {"dtype": "float32"},  # whose answers don't depend on what else runs
        "prefill": workers("prefill", num_prefill),
        "decode": workers("decode", num_decode),
        "router": {
            "replicas": num_routers,
            "node_labels": {ROLE_LABEL: "router"},
            "decodes_alone": False,  # KV is to travel
            "roles": "fixed",
            "node_resources": {"router_slot": 1},  # one on each
        },
        **({"kv_transfer": {"transport": "tcp"}} if share_memory else {}),
    }


class Site:
    """The application on a cluster, for as long as that lasts."""

    def __init__(self, nodes: RayNodes, port: int, entry: Node | None = None):
        """`entry`: the node that requests are sent to; the head if none is named."""
        self._nodes = nodes
        self._port = port
        self.url = f"http://{(entry or nodes.head).address}:{port}"

    def deploy(self, sections: dict[str, Any]) -> None:
        """Hand the configuration to Serve. Raises NodeFailed."""
        self._nodes.serve_run(
            {
                "proxy_location": "EveryNode" if self._nodes.machines.has_own_ports else "HeadOnly",
                "http_options": {
                    "host": "0.0.0.0" if self._nodes.machines.has_own_ports else self._nodes.head.address,
                    "port": self._port,
                },
                "applications": [
                    {
                        "name": APPLICATION,
                        "route_prefix": "/",
                        "import_path": "twostroke.cluster.deployments.serve_app:build_app",
                        "args": sections,
                    }
                ],
            }
        )

    def status(self) -> dict[str, Any]:
        """Return the entry's status. Raises ConfigError where it does not answer."""
        return fetch_status(self.url)

    def workers(self) -> list[ListedWorker]:
        """Those that the router knows. Raises ConfigError where it doesn't answer."""
        return [
            ListedWorker(
                role=one["role"],
                worker_id=one["worker_id"],
                node=one["node"],
                nodes=tuple(one["nodes"]),
                reachable=one["reachable"],
                num_running=one["stats"]["num_running"] if one["stats"] else 0,
            )
            for one in self.status()["workers"]
        ]

    def await_workers(self, num_prefill: int, num_decode: int) -> list[ListedWorker]:
        """All of them, once all can be reached. Raises NodeFailed."""
        wanted = {"prefill": num_prefill, "decode": num_decode}

        def is_there() -> bool:
            there = [worker.role for worker in self.workers() if worker.reachable]
            return all(there.count(role) == count for role, count in wanted.items())  # type: ignore[arg-type]

        self.await_that(f"{num_prefill} prefill and {num_decode} decode workers can be reached", is_there)
        return self.workers()

    def await_that(self, what: str, condition: Callable[[], bool]) -> float:
        """Wait for a condition and return the seconds that it took. Meanwhile the site need not answer. Raises
        NodeFailed."""
        began = time.monotonic()
        while True:
            why = ""
            try:
                if condition():
                    return time.monotonic() - began
            except ConfigError as error:
                why = f": {error}"
            if time.monotonic() > began + READY_S:
                raise NodeFailed(f"not within {READY_S:g} s: {what}{why}")
            time.sleep(0.05)
