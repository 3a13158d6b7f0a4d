"""The faults of `make cluster-demo`: a cluster under load is harmed, and timed until it is whole again."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.answers import Injected
from tests.rigs.nodes.machines import IsolatedMachine
from tests.rigs.nodes.ray_nodes import Node, NodeFailed, RayNodes
from tests.rigs.nodes.site import APPLICATION, READY_S, ListedWorker, Site, WorkerRole, node_for
from twostroke.cluster.autoscaling.serve_policy import DEPLOYMENTS, ROUTER
from twostroke.cluster.local.processes import descendants
from twostroke.cluster.local.server_process import processes_named

DRAIN_S = 300.0


@dataclass
class Scene:
    """A cluster, its application and who is told of what happens; `nodes` are all but the head."""

    cluster: RayNodes
    site: Site
    nodes: Sequence[Node]
    counts: Mapping[str, int]  # `num_prefill` and `num_decode`
    say: Callable[[str], None]

    def busiest(self, role: WorkerRole) -> ListedWorker:
        """Return the worker that has most to do. Raises NodeFailed where none comes to have something."""

        def busiest() -> ListedWorker:
            return max((one for one in self.site.workers() if one.role == role), key=lambda one: one.num_running)

        if role == "decode":  # it is to have something to lose; a prompt is computed too soon to be seen
            self.site.await_that("a decode worker is busy", lambda: busiest().num_running > 0)
        return busiest()

    def node_of(self, worker: ListedWorker) -> Node:
        return next(node for node in self.nodes if node.address == worker.node)

    def await_out(self, worker: ListedWorker) -> float:
        """Return how long it took until routers no longer knew the worker. Raises NodeFailed."""

        def is_out() -> bool:
            return worker.worker_id not in {one.worker_id for one in self.site.workers()}

        return self.site.await_that("the dead worker is out", is_out)

    def lose_node(self, role: WorkerRole, *, unplug: bool) -> Injected:
        """Kill the node of the worker that has most to do, or of a later stage of it, or cut its cable, and start
        another. Raises NodeFailed."""
        worker = self.busiest(role)
        address = max(worker.nodes, key=lambda one: (one != worker.node, one))
        node = next(node for node in self.nodes if node.address == address)
        what = "Cutting the cable of" if unplug else "Killing every process of"
        self.say(f"{what} the node {address}: {role} worker {worker.worker_id}, {worker.num_running} running ...")
        if unplug and isinstance(node.machine, IsolatedMachine):
            node.machine.unplug()
        else:
            node.machine.kill()
        struck = time.monotonic()
        successor = self.cluster.add(node_for(role))
        noticed_s = self.await_out(worker)
        self.say(f"The router has dropped the worker after {noticed_s:.1f} s.")
        self.cluster.await_up(successor)
        node_s = time.monotonic() - struck
        self.say(f"A new node is up, {successor.address}.")
        self.site.await_workers(**self.counts)
        self.nodes = [*(one for one in self.nodes if one is not node), successor]
        healed = time.monotonic()
        self.say(f"Healed after {healed - struck:.1f} s:")
        figures = {"noticed_s": noticed_s, "new_node_s": node_s, "healed_s": healed - struck}
        return Injected("lose node", "kill", struck, healed, f"{address} is gone", healed - struck, figures)

    def drain_node(self, role: WorkerRole) -> Injected:
        """Tell the node whose worker has most to do to end, while another one has room. Raises NodeFailed."""
        spare = self.cluster.add(node_for(role))
        self.cluster.await_up(spare)
        worker = self.busiest(role)
        node = self.node_of(worker)
        runs = f"{role} worker {worker.worker_id}, {worker.num_running} running"
        self.say(f"Telling the node {node.address} to end: {runs} ...")
        node.machine.interrupt(node.process)
        struck = time.monotonic()
        while node.process.poll() is None:
            if time.monotonic() > struck + DRAIN_S + READY_S:
                raise NodeFailed(f"{node.address} has not left after {DRAIN_S + READY_S:g} s")
            time.sleep(0.05)
        left_s = time.monotonic() - struck
        self.say(f"It has left after {left_s:.1f} s.")
        self.site.await_workers(**self.counts)
        self.nodes = [*(one for one in self.nodes if one is not node), spare]
        return Injected("drain node", "load", struck, time.monotonic(), "it has ended", None, {"left_s": left_s})

    def lose_router(self) -> Injected:
        """Kill the process of a router that has streams, not of the node that requests are sent to. Raises
        NodeFailed."""
        self.busiest("decode")
        routers = [node for node in self.nodes if node.spec.name == "router"]
        victim = next(node for node in routers if node.address not in self.site.url)
        self.say(f"Killing the router on {victim.address} ...")
        pid, struck = kill_replica(victim, ROUTER)
        back_s = self.site.await_that(
            "there is a new router", lambda: any(one != pid for one in replicas_on(victim, ROUTER))
        )
        figures = {"new_router_s": back_s}
        return Injected("kill router", "load", struck, time.monotonic(), f"pid {pid} gone", back_s, figures)

    def lose_head(self) -> Injected:
        """Kill the head with all of its processes, start a new one in its place, and see whether a worker that dies
        after that is replaced. Raises NodeFailed."""
        cluster, site = self.cluster, self.site
        self.busiest("decode")
        self.say(f"Killing every process of the head {cluster.head.address} ...")
        cluster.head.machine.kill()
        struck = time.monotonic()
        head = cluster.replace_head()
        cluster.await_up(head)
        head_s = time.monotonic() - struck
        self.say(f"A new head is up after {head_s:.1f} s. Waiting for what Serve says ...")
        site.await_that(
            "Serve says that the application runs", lambda: cluster.serve_status().get(APPLICATION) == "RUNNING"
        )
        running_s = time.monotonic() - struck
        worker = self.busiest("decode")
        self.say(f"It runs, after {running_s:.1f} s. Killing decode worker {worker.worker_id} ...")
        _, killed = kill_replica(self.node_of(worker), DEPLOYMENTS["decode"])
        self.await_out(worker)
        site.await_workers(**self.counts)
        figures: dict[str, float | str] = {
            "application": "RUNNING",
            "new_head_s": head_s,
            "head_starts": head.starts,
            "running_s": running_s,
            "worker_replaced_s": time.monotonic() - killed,
        }
        return Injected("lose head", "kill", struck, time.monotonic(), "its processes are gone", head_s, figures)


def replicas_on(node: Node, deployment: str) -> list[int]:
    """Return the ids of the processes of a deployment's replicas on a node."""
    return processes_named(f"ServeReplica:{APPLICATION}:{deployment}", descendants(node.process.pid))


def kill_replica(node: Node, deployment: str) -> tuple[int, float]:
    """Kill a deployment's replica on a node; return its process id, and when. Raises NodeFailed."""
    found = replicas_on(node, deployment)
    if not found:
        raise NodeFailed(f"no replica of {deployment} runs on {node.address}")
    os.kill(found[0], signal.SIGKILL)
    return found[0], time.monotonic()
