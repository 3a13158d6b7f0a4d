"""`twostroke cluster-demo`: a cluster of several nodes on this machine, under load, one of which dies.

Progress goes to people; the last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal, get_args

from rich import box
from rich.console import Console
from rich.table import Table

from twostroke.cluster.commands.doctor import fetch_report
from twostroke.cluster.commands.status import table_console
from twostroke.cluster.local.processes import become_subreaper, end_descendants, interrupt_once
from twostroke.cluster.local.ray import free_ports
from twostroke.protocol.errors import ConfigError
from twostroke.tools.nodes.faults import DRAIN_S, Fault, Outcome, Scene, drain_node, lose_head, lose_node, lose_router
from twostroke.tools.nodes.load import Answer, Request, SteadyLoad, Verdict, ask
from twostroke.tools.nodes.machines import IsolatedMachines, LoopbackMachines, Machines, why_not
from twostroke.tools.nodes.ray_nodes import Node, NodeFailed, RayNodes
from twostroke.tools.nodes.redis import Redis
from twostroke.tools.nodes.site import NO_STAGES, Site, Worker, WorkerRole, node_for, settings

ISOLATED_PORT = 8000  # in a network of the machines' own
BEFORE_S, AFTER_S = 4.0, 4.0  # of load, around what happens
IMPOLITE_S = 2.0
OUTLIVES_HEAD: tuple[Fault, ...] = ("router", "head")
"""With routers on nodes of their own, to which requests are sent."""


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
    parser.add_argument(
        "--fault",
        choices=get_args(Fault),
        default="node",
        help="what happens: a worker's node dies; one is told to end, and drains; a router's process dies; the head "
        "dies, whose state is in a Redis (default: %(default)s)",
    )
    parser.add_argument("--victim", choices=("prefill", "decode"), default="decode", help="whose node dies or drains")
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
    if not machines.has_own_ports:
        if arguments.unplug:
            raise ConfigError("--unplug: on the loopback interface there is no cable to cut")
        if arguments.fault in OUTLIVES_HEAD:
            raise ConfigError(f"--fault {arguments.fault}: on the loopback interface the head alone takes requests")
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
    if arguments.unplug and arguments.fault != "node":
        raise ConfigError(f"--unplug: with --fault node alone, not {arguments.fault}")
    if not 0.1 <= arguments.rate <= 50:
        raise ConfigError(f"--rate {arguments.rate:g}: requests a second, from 0.1 to 50")


class _Demo:
    def __init__(self, arguments: argparse.Namespace, machines: Machines, console: Console):
        self._arguments = arguments
        self._fault: Fault = arguments.fault
        self._machines = machines
        self._console = console
        self._began = time.monotonic()
        self._num: dict[WorkerRole, int] = {"prefill": arguments.prefill, "decode": arguments.decode}
        self._stages: dict[WorkerRole, int] = {**NO_STAGES, arguments.victim: arguments.pipeline}
        self._num_routers = 2 if self._fault in OUTLIVES_HEAD else 0  # on nodes of their own

    def run(self) -> int:
        """The whole show; returns the exit code. Raises NodeFailed, ConfigError."""
        kind = "namespaces of their own" if self._machines.has_own_ports else "the loopback interface"
        num_nodes = {role: count * self._stages[role] for role, count in self._num.items()}
        self._say(f"Starting {1 + self._num_routers + sum(num_nodes.values())} nodes on this machine, on {kind} ...")
        with ExitStack() as stack:
            stack.enter_context(self._machines)
            cluster = RayNodes(
                self._machines,
                node_for("head" if self._num_routers else "router"),
                redis=Redis() if self._fault == "head" else None,
                drain_s=DRAIN_S if self._fault == "drain" else 0.0,
            )
            stack.enter_context(cluster)
            routers = [cluster.add(node_for("router")) for _ in range(self._num_routers)]
            nodes = [
                *routers,
                *(cluster.add(node_for(role)) for role, count in num_nodes.items() for _ in range(count)),
            ]
            for node in nodes:
                cluster.await_up(node)
            self._say("All nodes are up. Deploying, each role to the nodes of its label ...")
            port = ISOLATED_PORT if self._machines.has_own_ports else free_ports(1)[0]
            site = Site(cluster, port, routers[0] if routers else None)
            share_memory = not self._machines.has_own_ports
            num_routers = self._num_routers or 1
            site.deploy(
                settings(**self._counts(), share_memory=share_memory, num_routers=num_routers, stages=self._stages)
            )
            workers = site.await_workers(**self._counts())
            self._show([cluster.head, *nodes], workers)
            self._show_links(site)
            return self._strike(Scene(cluster, site, nodes, self._counts(), self._say))

    def _strike(self, scene: Scene) -> int:
        site = scene.site
        request = Request(model=site.status()["model"])
        expected = {prompt: _known(ask(site.url, request, prompt)) for prompt in range(request.num_prompts)}
        self._say(f"Load: {self._arguments.rate:g} requests a second, of {request.max_tokens} tokens each ...")
        with SteadyLoad(site.url, request, self._arguments.rate, expected) as load:
            time.sleep(BEFORE_S)
            outcome = self._hurt(scene)
            self._show([scene.cluster.head, *outcome.nodes], site.workers())
            time.sleep(AFTER_S)
            self._say("Waiting for the last answers ...")
        verdict = load.verdict(outcome.struck_at)
        self._conclude(verdict, outcome)
        # Nobody can go on with a dead router's streams.
        lost = verdict.lost_new if self._fault == "router" else verdict.lost
        return 0 if lost == verdict.mismatched == 0 else 1

    def _hurt(self, scene: Scene) -> Outcome:
        role: WorkerRole = self._arguments.victim
        match self._fault:
            case "node":
                return lose_node(scene, role, unplug=self._arguments.unplug)
            case "drain":
                return drain_node(scene, role)
            case "router":
                return lose_router(scene)
            case "head":
                return lose_head(scene)

    def _conclude(self, verdict: Verdict, outcome: Outcome) -> None:
        for reason in verdict.reasons:
            self._say(f"Lost: {reason}")
        told = {
            "fault": self._fault,
            "nodes": 1 + len(outcome.nodes),
            "stages": self._arguments.pipeline,
            "requests": verdict.requests,
            "lost": verdict.lost,
            "lost_new": verdict.lost_new,
            "mismatched": verdict.mismatched,
            "longest_pause_s": verdict.longest_pause_s,
            "answered_again_s": verdict.answered_again_s,
            "slowest_first_token_s": verdict.slowest_first_token_s,
            **outcome.figures,
            "took_s": time.monotonic() - self._began,
        }
        print(
            json.dumps({name: round(one, 2) if isinstance(one, float) else one for name, one in told.items()}),
            flush=True,
        )

    def _show(self, nodes: Sequence[Node], workers: Sequence[Worker]) -> None:
        table = Table("node", "role", "address", "runs", box=box.SIMPLE_HEAD)
        for node in nodes:
            label = next(iter(node.spec.labels.values()))
            here = [
                f"{one.role} worker {one.worker_id}" + (", a stage" if len(one.nodes) > 1 else "")
                for one in workers
                if node.address in one.nodes
            ]
            here += ["a router"] if label == "router" else []
            here += ["Serve's controller"] if node is nodes[0] else []
            table.add_row("head" if node is nodes[0] else node.spec.name, label, node.address, ", ".join(here))
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
