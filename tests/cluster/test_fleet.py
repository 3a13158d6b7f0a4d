"""Calls over Serve's handles, with handles that are not Serve's."""

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from cluster.fleet import ServeFleet
from cluster.worker_directory import WorkerDirectory, directory_of, read_worker_metadata, worker_metadata
from protocol.errors import ConnectionLost, RequestError, WorkerLost
from protocol.requests import DecodeReply, GenerateRequest, SamplingParams
from protocol.stats import WorkerInfo
from protocol.tickets import Address, Peer

PEER = Peer("d1", 2**62 + 1)
INFO = WorkerInfo("decode", PEER, Address("127.0.0.1", 1), Address("127.0.0.1", 2), "print", 16, 64, 1024)
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
    """A deployment handle with one method, `decode`, that keeps its calls."""

    def __init__(self, name: str):
        self.deployment_name = name
        self.calls: list[tuple[tuple[Any, ...], FakeResponse]] = []
        self.called = asyncio.Event()

    @property
    def decode(self) -> "FakeHandle":
        return self

    def remote(self, *arguments: Any) -> FakeResponse:
        self.calls.append((arguments, FakeResponse()))
        self.called.set()
        return self.calls[-1][1]


@pytest.fixture
def handle(request: pytest.FixtureRequest) -> FakeHandle:
    handle = FakeHandle(request.node.name)  # a deployment of its own for each test: directories last
    directory_of(handle.deployment_name).replace([INFO])
    return handle


async def called(handle: FakeHandle) -> tuple["asyncio.Task[DecodeReply]", FakeResponse]:
    """A decode call that has reached the handle."""
    fleet = ServeFleet(None, handle)
    task = asyncio.create_task(fleet.decode(PEER, REQUEST, None))
    await handle.called.wait()
    return task, handle.calls[0][1]


async def test_a_call_names_its_worker_and_returns_the_reply(handle: FakeHandle) -> None:
    task, response = await called(handle)
    response.result.set_result(REPLY)
    assert await task == REPLY
    assert handle.calls[0][0] == (PEER, REQUEST, None)


async def test_cancelling_the_caller_cancels_the_call_in_the_replica(handle: FakeHandle) -> None:
    task, response = await called(handle)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert response.is_cancelled


async def test_a_call_fails_as_soon_as_its_worker_has_left(handle: FakeHandle) -> None:
    task, response = await called(handle)
    directory_of(handle.deployment_name).remove(PEER)
    with pytest.raises(WorkerLost, match="d1 is gone"):
        await task
    assert response.is_cancelled


async def test_a_worker_that_is_not_there_is_not_called(handle: FakeHandle) -> None:
    fleet = ServeFleet(None, handle)
    with pytest.raises(WorkerLost):
        await fleet.decode(Peer("d1", 5), REQUEST, None)  # an earlier incarnation
    assert handle.calls == []


async def test_an_aggregated_fleet_has_nobody_to_prefill(handle: FakeHandle) -> None:
    fleet = ServeFleet(None, handle)
    assert list(fleet.workers()) == [INFO]
    with pytest.raises(WorkerLost):
        await fleet.prefill(PEER, REQUEST, None)


def wrapped(error: Exception) -> Exception:
    """As an actor call brings what the worker raised."""
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
    "error", [ActorDiedError(), wrapped(ValueError("a bug")), ValueError("a bug"), ConnectionLost("no token channel")]
)
async def test_every_other_failure_counts_as_a_lost_worker(handle: FakeHandle, error: Exception) -> None:
    task, response = await called(handle)
    response.result.set_exception(error)
    with pytest.raises(WorkerLost):
        await task


def test_metadata_brings_the_worker_back() -> None:
    assert read_worker_metadata(worker_metadata(INFO)) == INFO


def test_a_directory_tells_who_left_and_nothing_else() -> None:
    directory, departures = WorkerDirectory(), list[frozenset[Peer]]()
    directory.watch(departures.append)
    directory.replace([INFO])
    directory.replace([INFO])
    assert departures == []
    directory.replace([])
    directory.remove(PEER)
    assert departures == [frozenset({PEER})]
    assert PEER not in directory
