"""`twostroke cluster-demo`: a cluster of several nodes on this machine, under load, one of whose nodes dies.

Progress goes to people; the last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

from twostroke.cluster.commands.doctor import fetch_report
from twostroke.cluster.commands.status import table_console
from twostroke.cluster.local.processes import become_subreaper, end_descendants, interrupt_once
from twostroke.cluster.local.ray import free_ports
from twostroke.protocol.errors import ConfigError
from twostroke.tools.nodes.load import Answer, Request, SteadyLoad, Verdict, ask
from twostroke.tools.nodes.machines import IsolatedMachine, IsolatedMachines, LoopbackMachines, Machines, why_not
from twostroke.tools.nodes.ray_nodes import Node, NodeFailed, RayNodes
from twostroke.tools.nodes.site import NO_STAGES, Site, Worker, WorkerRole, node_for, settings

ISOLATED_PORT = 8000  # in a network of the machines' own
BEFORE_S, AFTER_S = 4.0, 4.0  # of load, around what happens
IMPOLITE_S = 2.0


@dataclass(frozen=True)
class Healing:
    """Seconds since the node died."""

    noticed_s: float  # the router has heard that its worker is gone
    node_s: float  # the new node is up
    healed_s: float  # as many workers as before can be reached


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers, each on a node (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=2, help="decode workers, each on a node (default: %(default)s)")
    parser.add_argument(
        "--pipeline",
        type=int,
        default=1,
        metavar="N",
        help="stages of each worker of the role whose node dies, each on a node of its own (default: %(default)s)",
    )
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second (default: %(default)s)")
    parser.add_argument("--victim", choices=("prefill", "decode"), default="decode", help="whose node dies")
    parser.add_argument(
        "--unplug", action="store_true", help="cut the node's cable, instead of killing all of its processes"
    )
    parser.add_argument(
        "--machines",
        choices=("namespaces", "loopback"),
        help="what nodes run on: in namespaces of their own (needs root), or side by side on the loopback interface; "
        "by default the first where it can be had",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 where the cluster healed and no request was lost or answered wrongly, else 1. Raises ConfigError."""
    _check(arguments)
    machines = choose_machines(arguments.machines)
    if arguments.unplug and not machines.has_own_ports:
        raise ConfigError("--unplug: on the loopback interface there is no cable to cut")
    interrupt_once()
    become_subreaper()
    try:
        return _Demo(arguments, machines, table_console()).run()
    except NodeFailed as error:
        print(f"twostroke: {error}")
        return 1
    finally:
        end_descendants(IMPOLITE_S)  # the machines have ended theirs; this is for what went wrong


def choose_machines(asked: Literal["namespaces", "loopback"] | None) -> Machines:
    """Raises ConfigError for namespaces that can't be had."""
    if asked == "loopback":
        return LoopbackMachines()
    obstacle = why_not()
    if obstacle is None:
        return IsolatedMachines()
    if asked == "namespaces":
        raise ConfigError(f"--machines namespaces: {obstacle}")
    return LoopbackMachines()


def _check(arguments: argparse.Namespace) -> None:
    for role, least in (("prefill", 1), ("decode", 2)):
        count = getattr(arguments, role)
        if not least <= count <= 16:
            raise ConfigError(f"--{role} {count}: nodes, from {least} to 16")
    if not 1 <= arguments.pipeline <= 4:
        raise ConfigError(f"--pipeline {arguments.pipeline}: stages, from 1 to 4")
    if not 0.1 <= arguments.rate <= 50:
        raise ConfigError(f"--rate {arguments.rate:g}: requests a second, from 0.1 to 50")


class _Demo:
    def __init__(self, arguments: argparse.Namespace, machines: Machines, console: Console):
        self._arguments = arguments
        self._machines = machines
        self._console = console
        self._began = time.monotonic()
        self._num: dict[WorkerRole, int] = {"prefill": arguments.prefill, "decode": arguments.decode}
        self._stages: dict[WorkerRole, int] = {**NO_STAGES, arguments.victim: arguments.pipeline}

    def run(self) -> int:
        """The whole show; returns the exit code. Raises NodeFailed."""
        kind = "namespaces of their own" if self._machines.has_own_ports else "the loopback interface"
        num_nodes = {role: count * self._stages[role] for role, count in self._num.items()}
        self._say(f"Starting {1 + sum(num_nodes.values())} nodes on this machine, on {kind} ...")
        with ExitStack() as stack:
            stack.enter_context(self._machines)
            cluster = stack.enter_context(RayNodes(self._machines, node_for("router")))
            nodes = [cluster.add(node_for(role)) for role, count in num_nodes.items() for _ in range(count)]
            for node in nodes:
                cluster.await_up(node)
            self._say("All nodes are up. Deploying, each role to the nodes of its label ...")
            port = ISOLATED_PORT if self._machines.has_own_ports else free_ports(1)[0]
            site = Site(cluster, port)
            share_memory = not self._machines.has_own_ports
            site.deploy(settings(**self._counts(), share_memory=share_memory, stages=self._stages))
            workers = site.await_workers(**self._counts())
            self._show([cluster.head, *nodes], workers)
            self._show_links(site)
            return self._strike(cluster, site, nodes)

    def _strike(self, cluster: RayNodes, site: Site, nodes: Sequence[Node]) -> int:
        request = Request(model=site.status()["model"])
        expected = {prompt: _known(ask(site.url, request, prompt)) for prompt in range(request.num_prompts)}
        self._say(f"Load: {self._arguments.rate:g} requests a second, of {request.max_tokens} tokens each ...")
        with SteadyLoad(site.url, request, self._arguments.rate, expected) as load:
            time.sleep(BEFORE_S)
            healing = self._replace(cluster, site, nodes)
            time.sleep(AFTER_S)
            self._say("Waiting for the last answers ...")
        verdict = load.verdict()
        self._conclude(verdict, healing, num_nodes=len(nodes) + 1)
        return 0 if verdict.lost == verdict.mismatched == 0 else 1

    def _replace(self, cluster: RayNodes, site: Site, nodes: Sequence[Node]) -> Healing:
        """Kill the node of the worker that has most to do, or of one of its stages, and put a new one in its place."""
        role = self._arguments.victim
        if role == "decode":  # it is to have something to lose; a prompt is read too soon to be seen
            site.await_that("a decode worker is busy", lambda: self._busiest(site).num_running > 0)
        worker = self._busiest(site)
        address = max(worker.nodes, key=lambda one: (one != worker.node, one))
        node = next(node for node in nodes if node.address == address)
        what = "Cutting the cable of" if self._arguments.unplug else "Killing every process of"
        self._say(f"{what} the node {node.address}: {role} worker {worker.worker_id}, {worker.num_running} running ...")
        if self._arguments.unplug and isinstance(node.machine, IsolatedMachine):
            node.machine.unplug()
        else:
            node.machine.kill()
        struck = time.monotonic()
        successor = cluster.add(node_for(role))
        gone = site.await_that("the dead worker is out", lambda: worker.worker_id not in _ids(site.workers()))
        self._say(f"The router has dropped the worker after {gone:.1f} s.")
        cluster.await_up(successor)
        node_s = time.monotonic() - struck
        self._say(f"A new node is up, {successor.address}.")
        workers = site.await_workers(**self._counts())
        healed_s = time.monotonic() - struck
        self._say(f"Healed after {healed_s:.1f} s:")
        self._show([cluster.head, *(one for one in nodes if one is not node), successor], workers)
        return Healing(gone, node_s, healed_s)

    def _busiest(self, site: Site) -> Worker:
        role = self._arguments.victim
        return max((one for one in site.workers() if one.role == role), key=lambda one: one.num_running)

    def _conclude(self, verdict: Verdict, healing: Healing, num_nodes: int) -> None:
        for reason in verdict.reasons:
            self._say(f"Lost: {reason}")
        print(
            json.dumps(
                {
                    "nodes": num_nodes,
                    "stages": self._arguments.pipeline,
                    "requests": verdict.requests,
                    "lost": verdict.lost,
                    "mismatched": verdict.mismatched,
                    "longest_pause_s": round(verdict.longest_pause_s, 2),
                    "noticed_s": round(healing.noticed_s, 2),
                    "new_node_s": round(healing.node_s, 2),
                    "healed_s": round(healing.healed_s, 2),
                    "took_s": round(time.monotonic() - self._began, 1),
                }
            ),
            flush=True,
        )

    def _show(self, nodes: Sequence[Node], workers: Sequence[Worker]) -> None:
        table = Table("node", "role", "address", "runs", box=box.SIMPLE_HEAD)
        for node in nodes:
            here = [
                f"{one.role} worker {one.worker_id}" + (", a stage" if len(one.nodes) > 1 else "")
                for one in workers
                if node.address in one.nodes
            ]
            runs = ", ".join(here) or "router, Serve's controller"
            table.add_row(node.spec.name, next(iter(node.spec.labels.values())), node.address, runs)
        self._console.print(table)

    def _show_links(self, site: Site) -> None:
        links = {(one["source"], one["target"]): one for one in fetch_report(site.url) if one["event"] == "pair"}
        names = sorted({str(one["transport"]) for one in links.values()})
        self._say(f"KV travels between nodes by {', '.join(names)} ({len(links)} ways, all tried).")

    def _counts(self) -> dict[str, int]:
        return {f"num_{role}": count for role, count in self._num.items()}

    def _say(self, text: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._began:6.1f} s[/]  {text}", soft_wrap=True, highlight=False)


def _known(answer: Answer) -> str:
    """What is answered while nothing is wrong. Raises NodeFailed."""
    if answer.error is not None:
        raise NodeFailed(f"a request failed before any node died: {answer.error}")
    return answer.text


def _ids(workers: Sequence[Worker]) -> set[str]:
    return {worker.worker_id for worker in workers}
