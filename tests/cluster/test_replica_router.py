"""Serve's own routing loop with our RequestRouter, and replicas that are none."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from twostroke.cluster.deployments.directory import ReplicaByPeer, worker_metadata
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import Address, Peer
from twostroke.protocol.stats import WorkerInfo

DEPLOYMENT = DeploymentID("DecodeWorker of a test", "app")
LAYOUT = KVLayout("digest", "bfloat16", 2, 4, 8, 16)


class FakeReplica:
    """A replica that tells how long its queue is once it is let."""

    max_ongoing_requests = 100

    def __init__(self, name: str):
        address = Address("127.0.0.1", 1)
        self.peer = Peer(name, 7)
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.replica_metadata = worker_metadata(WorkerInfo("decode", self.peer, address, (address,), LAYOUT, 64, 1024))
        self.may_answer = asyncio.Event()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await self.may_answer.wait()
        return 0


async def router_of(replicas: Sequence[FakeReplica]) -> ReplicaByPeer:
    router = ReplicaByPeer(DEPLOYMENT, DeploymentHandleSource.REPLICA)
    router.initialize_state()
    router.update_replicas(list(replicas))
    return router


def call(peer: Peer, internal_id: str) -> PendingRequest:
    """A call as a handle makes it: all calls of one HTTP request have its internal id."""
    return PendingRequest([peer], {}, RequestMetadata(request_id=internal_id, internal_request_id=internal_id))


def choosing(router: ReplicaByPeer, request: PendingRequest) -> "asyncio.Task[Any]":
    return asyncio.create_task(router._choose_replica_for_request(request))


@pytest.mark.parametrize("ids", ["two", "one"])
async def test_a_call_waits_for_its_own_replica_while_later_ones_get_theirs(ids: str) -> None:
    slow, quick = FakeReplica("slow"), FakeReplica("quick")
    router = await router_of([slow, quick])
    first = choosing(router, call(slow.peer, "a"))
    second = choosing(router, call(quick.peer, "b" if ids == "two" else "a"))
    third = choosing(router, call(slow.peer, "c" if ids == "two" else "a"))
    quick.may_answer.set()
    async with asyncio.timeout(10):
        assert await second is quick
        assert not first.done()
        slow.may_answer.set()
        assert await first is slow
        assert await third is slow
    assert router._pending_requests_by_id == {}


async def test_a_call_for_a_worker_that_is_gone_fails_and_is_forgotten() -> None:
    here = FakeReplica("here")
    here.may_answer.set()
    router = await router_of([here])
    with pytest.raises(WorkerLost, match="elsewhere is gone"):
        await choosing(router, call(Peer("elsewhere", 7), "a"))
    assert await choosing(router, call(here.peer, "b")) is here
    assert router._pending_requests_by_id == {}
