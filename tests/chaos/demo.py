"""`make cluster-demo`: a cluster of several nodes on this machine, under load, one of which dies.

Progress goes to people; the last line is one JSON object.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Literal, get_args

from rich import box
from rich.table import Table

from tests.chaos.answers import survival
from tests.chaos.load import ServerAddress, SteadyLoad, answers_of_all, event_loop_beside, plain_request
from tests.chaos.strikes import DRAIN_S, Scene
from tests.rigs.nodes.machines import IsolatedMachines, LoopbackMachines, Machines, why_not
from tests.rigs.nodes.ray_nodes import Node, NodeFailed, RayNodes
from tests.rigs.nodes.redis import Redis
from tests.rigs.nodes.site import NO_STAGES, ListedWorker, Site, WorkerRole, node_for, settings
from twostroke.cluster.commands.doctor import fetch_report
from twostroke.cluster.commands.status import table_console
from twostroke.cluster.local.processes import become_subreaper, end_descendants, interrupt_once
from twostroke.cluster.local.ray import free_ports
from twostroke.protocol.errors import ConfigError

Fault = Literal["node", "drain", "router", "head"]
ISOLATED_PORT = 8000  # in a network of the machines' own
NUM_REQUESTS = 8  # different ones
PATIENCE_S = 300.0
"""Longest time of a whole request; one that takes longer is lost."""
BEFORE_S, AFTER_S = 4.0, 4.0  # of load, around what happens
IMPOLITE_S = 2.0
OUTLIVES_HEAD: tuple[Fault, ...] = ("router", "head")
"""Faults for which routers need nodes of their own, to which requests are sent."""


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


def main(words: Sequence[str] | None = None) -> int:
    """Return 0 where the cluster healed and no request was lost or answered wrongly, 2 for a wrong argument, else 1."""
    parser = argparse.ArgumentParser(prog="make cluster-demo", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(words))
    except ConfigError as error:
        print(f"cluster-demo: {error}", file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Show the fault that the arguments name. Raises ConfigError."""
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
        return _Demo(arguments, machines).run()
    except NodeFailed as error:
        print(f"cluster-demo: {error}")
        return 1
    finally:
        end_descendants(IMPOLITE_S)  # the machines have ended theirs; this is for what went wrong


def choose_machines(choice: Literal["namespaces", "loopback"] | None) -> Machines:
    """Raises ConfigError for namespaces that can't be had."""
    if choice == "loopback":
        return LoopbackMachines()
    obstacle = why_not()
    if obstacle is None:
        return IsolatedMachines()
    if choice == "namespaces":
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
    def __init__(self, arguments: argparse.Namespace, machines: Machines):
        self._arguments = arguments
        self._fault: Fault = arguments.fault
        self._machines = machines
        self._console = table_console()
        self._began = time.monotonic()
        self._num: dict[WorkerRole, int] = {"prefill": arguments.prefill, "decode": arguments.decode}
        self._stages: dict[WorkerRole, int] = {**NO_STAGES, arguments.victim: arguments.pipeline}
        self._num_routers = 2 if self._fault in OUTLIVES_HEAD else 0  # on nodes of their own

    def run(self) -> int:
        """Show all of it; returns the exit code. Raises NodeFailed, ConfigError."""
        own_ports = self._machines.has_own_ports
        kind = "namespaces of their own" if own_ports else "the loopback interface"
        roles = ["router"] * self._num_routers
        roles += [role for role, count in self._num.items() for _ in range(count * self._stages[role])]
        counts = {f"num_{role}": count for role, count in self._num.items()}
        self._say(f"Starting {1 + len(roles)} nodes on this machine, on {kind} ...")
        with ExitStack() as stack:
            stack.enter_context(self._machines)
            redis = Redis() if self._fault == "head" else None
            drain_s = DRAIN_S if self._fault == "drain" else 0.0
            head = node_for("head" if self._num_routers else "router")
            cluster = stack.enter_context(RayNodes(self._machines, head, redis=redis, drain_s=drain_s))
            nodes = [cluster.add(node_for(role)) for role in roles]  # type: ignore[arg-type]
            for node in nodes:
                cluster.await_up(node)
            self._say("All nodes are up. Deploying, each role to the nodes of its label ...")
            port = ISOLATED_PORT if own_ports else free_ports(1)[0]
            site = Site(cluster, port, nodes[0] if self._num_routers else None)
            num_routers = self._num_routers or 1
            site.deploy(settings(**counts, share_memory=not own_ports, num_routers=num_routers, stages=self._stages))
            self._show([cluster.head, *nodes], site.await_workers(**counts))
            links = [line for line in fetch_report(site.url) if line["event"] == "pair"]
            names = ", ".join(sorted({str(one["transport"]) for one in links}))
            self._say(f"KV travels between nodes by {names} ({len(links)} ways, all tried).")
            return self._strike(Scene(cluster, site, nodes, counts, self._say))

    def _strike(self, scene: Scene) -> int:
        site, rate = scene.site, self._arguments.rate
        model = site.status()["model"]
        requests = [plain_request(model, key) for key in range(NUM_REQUESTS)]
        target = ServerAddress(site.url)
        with event_loop_beside() as do:
            try:
                expected = do(answers_of_all(target, requests, 1))
            except RuntimeError as error:
                raise NodeFailed(str(error)) from error
            self._say(f"Load: {rate:g} requests a second, of {requests[0].body['max_tokens']} tokens each ...")
            load = SteadyLoad(target, requests, seed=1, rate=rate, limit_s=PATIENCE_S)
            do(load.start())
            time.sleep(BEFORE_S)
            match self._fault:
                case "node":
                    fault = scene.lose_node(self._arguments.victim, unplug=self._arguments.unplug)
                case "drain":
                    fault = scene.drain_node(self._arguments.victim)
                case "router":
                    fault = scene.lose_router()
                case "head":
                    fault = scene.lose_head()
            self._show([scene.cluster.head, *scene.nodes], site.workers())
            time.sleep(AFTER_S)
            self._say("Waiting for the last answers ...")
            do(load.stop())
        for reason in sorted({answer.error for answer in load.answers if answer.error is not None}):
            self._say(f"Lost: {reason}")
        verdict = survival(load.answers, expected, fault.begin)
        facts = {"fault": self._fault, "nodes": 1 + len(scene.nodes), "stages": self._arguments.pipeline}
        facts |= {**asdict(verdict), **fault.figures, "took_s": time.monotonic() - self._began}
        print(json.dumps({name: round(one, 2) if isinstance(one, float) else one for name, one in facts.items()}))
        # Nobody can go on with a dead router's streams.
        lost = verdict.lost_new if self._fault == "router" else verdict.lost
        return 0 if lost == verdict.mismatched == 0 else 1

    def _show(self, nodes: Sequence[Node], workers: Sequence[ListedWorker]) -> None:
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

    def _say(self, text: str) -> None:
        self._console.print(f"[dim]{time.monotonic() - self._began:6.1f} s[/]  {text}", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
