"""Calls over Serve's handles: handles that are none of Serve's, then its routing loop and our RequestRouter."""

import asyncio
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from twostroke.cluster.deployments.fleet import (
    METADATA_KEY,
    PROTOCOL_KEY,
    Departure,
    ServeFleet,
    WorkerDirectory,
    read_worker_metadata,
    worker_directory,
    worker_metadata,
)
from twostroke.cluster.deployments.replica_router import ReplicaByPeer
from twostroke.protocol.errors import RequestError, TransferFailed, WorkerFailed, WorkerLeaving, WorkerLost
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import ProbeTimes
from twostroke.protocol.requests import Address, DecodeReply, GenerateRequest, Peer, SamplingParams, Ticket
from twostroke.protocol.stats import WorkerInfo

PEER = Peer("d1", 2**62 + 1)
LAYOUT = KVLayout("digest", "bfloat16", 2, 4, 8, 16, tp_size=2)
ADDRESSES = (Address("127.0.0.1", 2), Address("127.0.0.1", 3))
INFO = WorkerInfo("decode", PEER, Address("127.0.0.1", 1), ADDRESSES, LAYOUT, 64, 1024)
REPLY = DecodeReply(3, "stop", 0, 0.0, 0.0, 0)
REQUEST = GenerateRequest("r1", "router", (1, 2, 3), 3, SamplingParams(), 8)


class FakeResponse:
    """A call under way, to be settled by the test."""

    def __init__(self) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.is_cancelled = False

    def __await__(self) -> Generator[Any, None, Any]:
        return self.result.__await__()

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeHandle:
    """A deployment handle that keeps the calls of its methods."""

    def __init__(self, name: str):
        self.deployment_name = name
        self.calls: list[tuple[tuple[Any, ...], FakeResponse]] = []
        self.called = asyncio.Event()

    prefill = decode = probe_source = probe_target = property(lambda self: self)

    def remote(self, *arguments: Any) -> FakeResponse:
        self.calls.append((arguments, FakeResponse()))
        self.called.set()
        return self.calls[-1][1]


@pytest.fixture
def handle(request: pytest.FixtureRequest) -> FakeHandle:
    handle = FakeHandle(request.node.name)  # a deployment of its own for each test: directories last
    worker_directory(handle.deployment_name).replace([INFO])
    return handle


async def called(handle: FakeHandle) -> tuple["asyncio.Task[DecodeReply]", FakeResponse]:
    """A decode call that has reached the handle."""
    fleet = ServeFleet(None, handle, grace_s=0.05)
    task = asyncio.create_task(fleet.decode(PEER, REQUEST, None))
    await handle.called.wait()
    return task, handle.calls[0][1]


async def test_a_call_names_its_worker_and_returns_the_reply(handle: FakeHandle) -> None:
    task, response = await called(handle)
    response.result.set_result(REPLY)
    assert await task == REPLY
    assert handle.calls[0][0] == (PEER, REQUEST, None, None)


async def test_cancelling_the_caller_cancels_the_call_in_the_replica(handle: FakeHandle) -> None:
    task, response = await called(handle)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert response.is_cancelled


async def test_a_call_fails_as_soon_as_its_worker_has_died(handle: FakeHandle) -> None:
    task, response = await called(handle)
    worker_directory(handle.deployment_name).remove(PEER)
    with pytest.raises(WorkerLost, match="d1 has died"):
        await task
    assert response.is_cancelled


async def test_a_worker_that_is_taken_down_ends_its_calls_and_gets_no_new_ones(handle: FakeHandle) -> None:
    task, response = await called(handle)
    worker_directory(handle.deployment_name).replace([])
    with pytest.raises(WorkerLeaving):
        await ServeFleet(None, handle, grace_s=0.05).decode(PEER, REQUEST, None)
    assert not task.done()
    response.result.set_result(REPLY)
    assert await task == REPLY
    assert len(handle.calls) == 1


async def test_calls_of_a_worker_that_is_taken_down_end_with_its_grace(handle: FakeHandle) -> None:
    task, response = await called(handle)
    worker_directory(handle.deployment_name).replace([])
    with pytest.raises(WorkerLeaving, match="its grace is over"):
        await task
    assert response.is_cancelled


async def test_calls_of_a_worker_that_is_there_again_outlast_the_grace(handle: FakeHandle) -> None:
    task, response = await called(handle)
    directory = worker_directory(handle.deployment_name)
    directory.replace([])
    directory.replace([INFO])
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, over.set)  # twice the grace
    await over.wait()
    response.result.set_result(REPLY)
    assert await task == REPLY


async def test_a_worker_that_dies_while_it_is_taken_down_is_lost_at_once(handle: FakeHandle) -> None:
    task, response = await called(handle)
    worker_directory(handle.deployment_name).replace([])
    response.result.set_exception(ActorDiedError())
    with pytest.raises(WorkerLost) as caught:
        await task
    assert type(caught.value) is WorkerLost


async def test_a_worker_that_is_not_there_is_not_called(handle: FakeHandle) -> None:
    fleet = ServeFleet(None, handle, grace_s=0.05)
    with pytest.raises(WorkerLost):
        await fleet.decode(Peer("d1", 5), REQUEST, None)  # an earlier incarnation
    assert handle.calls == []


def wrapped(error: Exception) -> Exception:
    """Wrap an error as an actor call does."""
    return RayTaskError("decode", "a traceback", error).as_instanceof_cause()


@pytest.mark.parametrize("carry", [lambda error: error, wrapped], ids=["grpc", "actor"])
async def test_a_refusal_comes_back_as_the_worker_raised_it(
    handle: FakeHandle, carry: Callable[[Exception], Exception]
) -> None:
    task, response = await called(handle)
    response.result.set_exception(carry(RequestError("too long", param="prompt", status=413)))
    with pytest.raises(RequestError, match="too long") as caught:
        await task
    assert type(caught.value) is RequestError
    assert (caught.value.param, caught.value.status) == ("prompt", 413)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ActorDiedError(), WorkerLost),
        (wrapped(ValueError("a bug")), WorkerFailed),
        (ValueError("a bug"), WorkerFailed),
        (wrapped(WorkerLeaving("draining")), WorkerLeaving),
    ],
)
async def test_every_other_failure_is_the_workers(handle: FakeHandle, error: Exception, told: type[WorkerLost]) -> None:
    task, response = await called(handle)
    response.result.set_exception(error)
    with pytest.raises(WorkerLost) as caught:
        await task
    assert type(caught.value) is told


async def test_a_trial_goes_to_the_deployment_that_its_worker_is_of(request: pytest.FixtureRequest) -> None:
    prefill, decode = (FakeHandle(f"{request.node.name} {role}") for role in ("prefill", "decode"))
    worker_directory(decode.deployment_name).replace([INFO])
    fleet = ServeFleet(prefill, decode, grace_s=0.05)
    tickets = (Ticket(bytes(16), "doctor", PEER, PEER, ADDRESSES),)
    task = asyncio.create_task(fleet.probe_source(PEER, tickets, 64))
    await decode.called.wait()
    assert prefill.calls == []
    arguments, response = decode.calls[0]
    assert arguments == (PEER, tickets, 64)
    times = ProbeTimes((0.5,), "tcp", "why", ())
    response.result.set_result(times)
    assert await task == times
    with pytest.raises(WorkerLost, match="p9 is gone"):
        await fleet.probe_target(Peer("p9", 1), tickets, 64)


async def test_a_failed_trial_comes_back_as_the_worker_raised_it(handle: FakeHandle) -> None:
    fleet = ServeFleet(None, handle, grace_s=0.05)
    task = asyncio.create_task(fleet.probe_target(PEER, (), 64))
    await handle.called.wait()
    handle.calls[0][1].result.set_exception(wrapped(TransferFailed("the link broke")))
    with pytest.raises(TransferFailed, match="the link broke"):
        await task


def test_metadata_brings_the_worker_back_through_json() -> None:
    assert read_worker_metadata(json.loads(json.dumps(worker_metadata(INFO)))) == INFO


async def test_a_worker_of_another_version_is_left_out_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its calls would be misread, also where its metadata could be."""
    ours, older, newer = FakeReplica("ours"), FakeReplica("older"), FakeReplica("newer")
    del older.replica_metadata[PROTOCOL_KEY]
    newer.replica_metadata = {PROTOCOL_KEY: "0" * 16, METADATA_KEY: {"what": "nobody here knows"}}
    router = await router_of([ours, older, newer])
    router.update_replicas([ours, older, newer])
    directory = worker_directory(DEPLOYMENT.name)
    assert [info.peer for info in directory.workers()] == [ours.peer]
    assert directory.other_versions() == {"older", "newer"}
    assert [record.args for record in caplog.records if record.args] == [("newer",), ("older",)]
    with pytest.raises(WorkerLost, match="older is gone"):
        await choosing(router, call(older.peer, "a"))
    router.update_replicas([ours])
    assert directory.other_versions() == set()


async def test_a_fleet_names_those_of_another_version_by_role(handle: FakeHandle) -> None:
    prefill = FakeHandle("prefill of another version")
    worker_directory(prefill.deployment_name).replace([], {"p0"})
    assert ServeFleet(prefill, handle, grace_s=0.05).other_versions() == {"prefill": {"p0"}, "decode": set()}
    assert ServeFleet(None, handle, grace_s=0.05).other_versions() == {"decode": set()}


def test_a_directory_tells_who_left_and_nothing_else() -> None:
    directory, departures = WorkerDirectory(), list[tuple[frozenset[Peer], Departure]]()
    directory.watch(lambda workers, how: departures.append((workers, how)))
    directory.replace([INFO])
    directory.replace([INFO])
    assert departures == []
    directory.replace([])
    directory.remove(PEER)
    assert departures == [(frozenset({PEER}), Departure.LEAVES)]
    assert PEER not in directory
    directory.replace([INFO])
    directory.remove(PEER)
    assert departures[1:] == [(frozenset({PEER}), Departure.DIED)]


DEPLOYMENT = DeploymentID("DecodeWorker of a test", "app")


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


def test_what_the_fleet_shares_with_request_routers_is_not_in_the_module_that_serve_ships_by_value() -> None:
    """A copy of that module's globals in each process that has a handle would leave the fleet without workers."""
    assert worker_directory.__module__ != ReplicaByPeer.__module__
