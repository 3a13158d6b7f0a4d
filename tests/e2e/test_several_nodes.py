"""A Ray cluster of five nodes on this machine: roles on the nodes of their labels, a prefill worker whose stages are on
two of them, KV between nodes, nodes that die.

In network namespaces where they can be had (root), else on the loopback interface.
"""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Literal

import pytest

from tests.chaos import load
from tests.chaos.demo import ISOLATED_PORT, choose_machines
from tests.chaos.load import ClientAnswer
from tests.e2e.conftest import MODEL, log_lines
from tests.rigs.nodes.ray_nodes import Node, NodeSpec, RayNodes
from tests.rigs.nodes.site import ListedWorker, Site, WorkerRole, node_for, settings
from twostroke.cluster.commands.doctor import fetch_report
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.ray import free_ports

SHORT = 16  # tokens
LONG = 1000  # some seconds: a worker tells twice a second that it is busy


def ask(url: str, max_tokens: int, prompt: int) -> ClientAnswer:
    return asyncio.run(load.ask(load.ServerAddress(url), load.plain_request(MODEL, prompt, max_tokens=max_tokens)))


@dataclass
class Cluster:
    rays: RayNodes
    site: Site
    sections: dict[str, Any]  # of the configuration
    nodes: list[Node]  # those of workers that live

    def of(self, role: str) -> list[str]:
        """The addresses of the nodes with a role's label."""
        return sorted(node.address for node in self.nodes if node.spec.name == role)

    def workers(self, role: str) -> list[ListedWorker]:
        return [worker for worker in self.site.workers() if worker.role == role]


def labelled(role: Literal["prefill", "decode"]) -> NodeSpec:
    """A node that has room for either role: its label decides."""
    return replace(node_for(role), resources={"prefill_slot": 1, "decode_slot": 1})


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with choose_machines(None) as machines, RayNodes(machines, node_for("router")) as rays:
        nodes = [rays.add(labelled(role)) for role in ("prefill", "prefill", "decode", "decode")]
        for node in nodes:
            rays.await_up(node)
        site = Site(rays, ISOLATED_PORT if machines.has_own_ports else free_ports(1)[0])
        stages: dict[WorkerRole, int] = {"prefill": 2, "decode": 1}
        sections = settings(1, 2, share_memory=not machines.has_own_ports, stages=stages)
        sections["logging"] = {"format": "json"}
        site.deploy(sections)
        site.await_workers(1, 2)
        yield Cluster(rays, site, sections, nodes)


def whole(answer: ClientAnswer) -> str:
    assert answer.has_end, answer
    assert answer.error is None, answer
    return answer.choices[0].text


def test_each_role_runs_on_the_nodes_of_its_label_as_the_serve_file_says(cluster: Cluster) -> None:
    (prefill,) = cluster.workers("prefill")
    assert sorted(prefill.nodes) == cluster.of("prefill")
    assert prefill.node in prefill.nodes
    assert sorted(worker.node for worker in cluster.workers("decode")) == cluster.of("decode")
    (num_blocks,) = {worker["num_blocks"] for worker in cluster.site.status()["workers"]}
    assert num_blocks == cluster.sections["decode"]["num_blocks"]


def test_kv_travels_between_nodes_by_tcp(cluster: Cluster) -> None:
    def transfers() -> tuple[int, int]:
        stats = [one["stats"] for one in cluster.site.status()["workers"] if one["role"] == "decode"]
        return sum(one["transfers_done"] for one in stats), sum(one["transfers_failed"] for one in stats)

    assert transfers() == (0, 0)
    whole(ask(cluster.site.url, SHORT, prompt=0))
    cluster.site.await_that("a decode worker has told of the transfer", lambda: transfers() == (1, 0))
    links = [line for line in fetch_report(cluster.site.url) if line["event"] == "pair"]
    assert {(link["transport"], link["error"]) for link in links} == {("tcp", None)}
    workers = [worker.worker_id for worker in cluster.site.workers()]
    assert {(link["source"], link["target"]) for link in links} == set(permutations(workers, 2))


def test_every_node_with_a_replica_serves_http(cluster: Cluster) -> None:
    """One that has a stage alone has no replica."""
    if not cluster.rays.machines.has_own_ports:
        pytest.skip("on the loopback interface only one node can listen on the port: namespaces need root")
    for worker in (*cluster.workers("prefill"), *cluster.workers("decode")):
        url = cluster.site.url.replace(cluster.rays.head.address, worker.node)
        # Serve starts each node's proxy by itself, however far the application is.
        cluster.site.await_that(f"{url} answers", lambda url=url: bool(fetch_status(url)))  # type: ignore[misc]
        assert whole(ask(url, SHORT, prompt=1)) == whole(ask(cluster.site.url, SHORT, prompt=1))


def test_a_stages_dead_node_ends_its_worker_and_a_new_node_brings_it_back(cluster: Cluster) -> None:
    """Answers are the same with the worker of stages, without any prefill worker, and with its successor."""
    (before,) = cluster.workers("prefill")
    address = next(address for address in before.nodes if address != before.node)
    (node,) = [node for node in cluster.nodes if node.address == address]
    answers = [whole(ask(cluster.site.url, SHORT, prompt=5))]
    node.machine.kill()
    cluster.site.await_that("its worker is gone", lambda: not cluster.workers("prefill"))
    answers.append(whole(ask(cluster.site.url, SHORT, prompt=5)))
    successor = cluster.rays.add(labelled("prefill"))
    cluster.nodes = [successor, *(one for one in cluster.nodes if one is not node)]
    cluster.site.await_workers(1, 2)
    (after,) = cluster.workers("prefill")
    assert sorted(after.nodes) == cluster.of("prefill")
    answers.append(whole(ask(cluster.site.url, SHORT, prompt=5)))
    assert len(set(answers)) == 1


def test_a_dead_nodes_requests_go_on_elsewhere_and_a_new_node_takes_its_place(cluster: Cluster) -> None:
    def busy() -> list[ListedWorker]:
        return [worker for worker in cluster.workers("decode") if worker.num_running]

    # Workers' numbers lag behind: the last one may still tell of another test's request.
    cluster.site.await_that("no decode worker is busy", lambda: not busy())
    answers: list[ClientAnswer] = []
    asking = threading.Thread(target=lambda: answers.append(ask(cluster.site.url, LONG, prompt=2)))
    asking.start()
    answering: list[ListedWorker] = []

    def one_answers() -> bool:
        answering[:] = busy()
        return bool(answering)

    cluster.site.await_that("a decode worker answers", one_answers)
    (victim,) = answering
    (node,) = [node for node in cluster.nodes if node.address == victim.node]
    node.machine.kill()
    successor = cluster.rays.add(labelled("decode"))
    asking.join()
    undisturbed = ask(cluster.site.url, LONG, prompt=2)  # while the new node starts
    assert [whole(answer) for answer in answers] == [whole(undisturbed)]
    follow_retried(cluster, victim.worker_id)

    cluster.nodes = [successor, *(one for one in cluster.nodes if one is not node)]
    cluster.site.await_that(
        "a worker runs on the new node",
        lambda: any(worker.node == successor.address for worker in cluster.workers("decode")),
    )
    cluster.site.await_workers(1, 2)
    assert sorted(worker.node for worker in cluster.workers("decode")) == cluster.of("decode")
    for prompt in range(4):
        assert whole(ask(cluster.site.url, 8, prompt)) == whole(ask(cluster.site.url, 8, prompt))


def follow_retried(cluster: Cluster, victim: str) -> None:
    """The lines of the request that the victim was serving have one id, over router and both decode workers."""
    folder = cluster.rays.head.log.parent
    (access,) = [line for line in log_lines(folder) if line.get("attempts", 0) > 1 and victim in line["decode_workers"]]
    lines = log_lines(folder, access["request_id"])
    failed = next(line for line in lines if line["level"] == "warning" and line["role"] == "router")
    (resumed,) = [line for line in lines if line["message"] == "a stream goes on at another attempt"]
    (decoded,) = [line for line in lines if line["message"] == "decode is done"]
    assert (failed["attempt"], failed["decode_worker"]) == (1, victim)
    assert resumed["attempt"] == decoded["attempt"] == access["attempts"] == 2
    assert resumed["decode_worker"] == decoded["worker_id"] != victim
    assert access["decode_workers"] == [victim, decoded["worker_id"]]
