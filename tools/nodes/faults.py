"""What `twostroke cluster-demo` does to a cluster under load, and how long it takes to be whole again."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twostroke.cluster.autoscaling.serve_policy import DEPLOYMENTS, ROUTER
from twostroke.cluster.local.processes import descendants
from twostroke.tools.nodes.machines import IsolatedMachine
from twostroke.tools.nodes.ray_nodes import Node, NodeFailed, RayNodes
from twostroke.tools.nodes.site import APPLICATION, READY_S, Site, Worker, WorkerRole, node_for

Fault = Literal["node", "drain", "router", "head"]
DRAIN_S = 300.0


@dataclass(frozen=True)
class Scene:
    cluster: RayNodes
    site: Site
    nodes: Sequence[Node]  # all but the head
    counts: Mapping[str, int]  # `num_prefill` and `num_decode`
    say: Callable[[str], None]

    def busiest(self, role: WorkerRole) -> Worker:
        """Raises NodeFailed where none comes to have something to do."""
        if role == "decode":  # it is to have something to lose; a prompt is read too soon to be seen
            self.site.await_that("a decode worker is busy", lambda: self._busiest(role).num_running > 0)
        return self._busiest(role)

    def _busiest(self, role: WorkerRole) -> Worker:
        return max((one for one in self.site.workers() if one.role == role), key=lambda one: one.num_running)

    def node_of(self, worker: Worker) -> Node:
        return next(node for node in self.nodes if node.address == worker.node)

    def is_known(self, worker: Worker) -> bool:
        return worker.worker_id in {one.worker_id for one in self.site.workers()}


@dataclass(frozen=True)
class Outcome:
    struck_at: float  # of `time.monotonic`
    figures: Mapping[str, float | str]  # seconds since then, by their names; and what else there is to tell
    nodes: Sequence[Node]  # that are there now, without the head


def lose_node(scene: Scene, role: WorkerRole, *, unplug: bool) -> Outcome:
    """Kill the node of the worker that has most to do, or of a later stage of it, or cut its cable, and start
    another. Raises NodeFailed."""
    cluster, site = scene.cluster, scene.site
    worker = scene.busiest(role)
    address = max(worker.nodes, key=lambda one: (one != worker.node, one))
    node = next(node for node in scene.nodes if node.address == address)
    what = "Cutting the cable of" if unplug else "Killing every process of"
    scene.say(f"{what} the node {node.address}: {role} worker {worker.worker_id}, {worker.num_running} running ...")
    if unplug and isinstance(node.machine, IsolatedMachine):
        node.machine.unplug()
    else:
        node.machine.kill()
    struck = time.monotonic()
    successor = cluster.add(node_for(role))
    noticed_s = site.await_that("the dead worker is out", lambda: not scene.is_known(worker))
    scene.say(f"The router has dropped the worker after {noticed_s:.1f} s.")
    cluster.await_up(successor)
    node_s = time.monotonic() - struck
    scene.say(f"A new node is up, {successor.address}.")
    site.await_workers(**scene.counts)
    healed_s = time.monotonic() - struck
    scene.say(f"Healed after {healed_s:.1f} s:")
    figures = {"noticed_s": noticed_s, "new_node_s": node_s, "healed_s": healed_s}
    return Outcome(struck, figures, [*(one for one in scene.nodes if one is not node), successor])


def drain_node(scene: Scene, role: WorkerRole) -> Outcome:
    """Tell the node whose worker has most to do to end, while another one has room. Raises NodeFailed."""
    spare = scene.cluster.add(node_for(role))
    scene.cluster.await_up(spare)
    worker = scene.busiest(role)
    node = scene.node_of(worker)
    scene.say(
        f"Telling the node {node.address} to end: {role} worker {worker.worker_id}, {worker.num_running} running ..."
    )
    node.machine.interrupt(node.process)
    struck = time.monotonic()
    deadline = struck + DRAIN_S + READY_S
    while node.process.poll() is None:
        if time.monotonic() > deadline:
            raise NodeFailed(f"{node.address} has not left after {DRAIN_S + READY_S:g} s")
        time.sleep(0.05)
    left_s = time.monotonic() - struck
    scene.say(f"It has left after {left_s:.1f} s.")
    scene.site.await_workers(**scene.counts)
    return Outcome(struck, {"left_s": left_s}, [*(one for one in scene.nodes if one is not node), spare])


def lose_router(scene: Scene) -> Outcome:
    """Kill the process of a router that has streams, not of the node that requests are sent to. Raises NodeFailed."""
    scene.busiest("decode")
    routers = [node for node in scene.nodes if node.spec.name == "router"]
    victim = next(node for node in routers if node.address not in scene.site.url)
    pid = _replica(victim, ROUTER)
    scene.say(f"Killing the router on {victim.address} ...")
    os.kill(pid, signal.SIGKILL)
    struck = time.monotonic()
    back_s = scene.site.await_that("there is a new router", lambda: _find_replica(victim, ROUTER) not in (None, pid))
    return Outcome(struck, {"new_router_s": back_s}, scene.nodes)


def lose_head(scene: Scene) -> Outcome:
    """Kill the head with all of its processes, start a new one in its place, and see whether it looks after the
    application: whether a worker that then dies is replaced. Raises NodeFailed."""
    cluster, site = scene.cluster, scene.site
    scene.busiest("decode")
    scene.say(f"Killing every process of the head {cluster.head.address} ...")
    cluster.head.machine.kill()
    struck = time.monotonic()
    head = cluster.replace_head()
    cluster.await_up(head)
    head_s = time.monotonic() - struck
    scene.say(f"A new head is up after {head_s:.1f} s. Waiting for what Serve says ...")
    state = ""

    def runs() -> bool:
        nonlocal state
        state = cluster.serve_status().get(APPLICATION, "unknown")
        return state == "RUNNING"

    site.await_that("Serve says that the application runs", runs)
    running_s = time.monotonic() - struck
    worker = scene.busiest("decode")
    scene.say(f"It runs, after {running_s:.1f} s. Killing decode worker {worker.worker_id} ...")
    os.kill(_replica(scene.node_of(worker), DEPLOYMENTS["decode"]), signal.SIGKILL)
    killed = time.monotonic()
    site.await_that("the dead worker is out", lambda: not scene.is_known(worker))
    site.await_workers(**scene.counts)
    replaced_s = time.monotonic() - killed
    figures = {
        "new_head_s": head_s,
        "head_starts": head.starts,
        "running_s": running_s,
        "worker_replaced_s": replaced_s,
    }
    return Outcome(struck, {"application": state, **figures}, scene.nodes)


def _replica(node: Node, deployment: str) -> int:
    """The process of a deployment's replica there. Raises NodeFailed."""
    pid = _find_replica(node, deployment)
    if pid is None:
        raise NodeFailed(f"no replica of {deployment} runs on {node.address}")
    return pid


def _find_replica(node: Node, deployment: str) -> int | None:
    title = f"ServeReplica:{APPLICATION}:{deployment}".encode()
    for pid in descendants(node.process.pid):
        try:
            if title in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        except OSError:  # it has just ended
            continue
    return None
