"""The workers as the router's pipeline sees them, over Serve's handles, and who of them is alive, as Serve tells.

Serve makes a RequestRouter for each handle (`replica_router.py`), which writes the directories here that the fleet
reads. It ships that class to its users by value, globals of its module included: what both sides share must not live
in that module.

A worker that Serve takes down gets no new calls; those that it has go on until they end, or until its grace is over.
Serve itself ends its process only once it has no call any more, or after a time of its own, which is longer.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec
from ray.exceptions import RayError, RayTaskError
from ray.serve.handle import DeploymentHandle

from twostroke.protocol.errors import RequestError, TransferFailed, WorkerFailed, WorkerLeaving, WorkerLost
from twostroke.protocol.messages import PROTOCOL, ProbeTimes
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply, Ticket
from twostroke.protocol.stats import ROLES, Role, WorkerInfo

METADATA_KEY = "worker_info"
PROTOCOL_KEY = "protocol"

_log = logging.getLogger(__name__)


def worker_metadata(info: WorkerInfo) -> dict[str, object]:
    """Return what a worker's `record_replica_metadata` returns: plain JSON types, because Serve's controller carries
    it."""
    return {METADATA_KEY: msgspec.to_builtins(info), PROTOCOL_KEY: PROTOCOL}


def read_worker_metadata(metadata: dict[str, object]) -> WorkerInfo | None:
    """Return the worker of a replica's metadata; None for one of another version, whose messages would be misread.

    Raises msgspec.ValidationError or KeyError for metadata of something that is no worker of ours.
    """
    if metadata.get(PROTOCOL_KEY) != PROTOCOL:
        return None
    return msgspec.convert(metadata[METADATA_KEY], WorkerInfo)


class Departure(Enum):
    """Reason of a worker's departure."""

    LEAVES = "leaves"  # Serve takes it down, and its process goes on for a while
    DIED = "died"


Watcher = Callable[[frozenset[Peer], Departure], None]


class WorkerDirectory:
    """The live workers of one deployment, as this process was told last. Safe to use from any thread.

    Serve may run its routers on a thread of their own, so watchers are called on whatever thread brings the news.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[Peer, WorkerInfo] = {}
        self._other_versions: frozenset[str] = frozenset()
        self._watchers: list[Watcher] = []

    def workers(self) -> tuple[WorkerInfo, ...]:
        return tuple(self._workers.values())

    def other_versions(self) -> frozenset[str]:
        """Names of the workers that run another version, and are not called."""
        return self._other_versions

    def __contains__(self, peer: Peer) -> bool:
        return peer in self._workers

    def watch(self, on_departed: Watcher) -> None:
        """Call `on_departed` with the workers that are no longer here, whenever some are, and how they went."""
        with self._lock:
            self._watchers.append(on_departed)

    def replace(self, workers: Iterable[WorkerInfo], other_versions: Iterable[str] = ()) -> None:
        """These may be called now, and no others. Serve takes those down that are not there any more.

        `other_versions` names the workers that are there, too, and run another version.
        """
        before, self._other_versions = self._other_versions, frozenset(other_versions)
        for name in sorted(self._other_versions - before):
            _log.warning(
                "worker %s runs another version than this router and is left out: roll all nodes to one version "
                "(docs/hosts.md)",
                name,
            )
        self._replace(workers, Departure.LEAVES)

    def remove(self, peer: Peer) -> None:
        """This one has died."""
        self._replace([info for info in self.workers() if info.peer != peer], Departure.DIED)

    def _replace(self, workers: Iterable[WorkerInfo], how: Departure) -> None:
        with self._lock:
            # A new dict, not a changed one: readers on other threads iterate over the old one.
            before, self._workers = self._workers, {info.peer: info for info in workers}
            departed = frozenset(before.keys() - self._workers.keys())
            watchers = tuple(self._watchers)
        if departed:
            for on_departed in watchers:
                on_departed(departed, how)


# Serve constructs RequestRouters itself, from a class and JSON arguments: a name is all that can be handed to them.
_directories: dict[str, WorkerDirectory] = {}


def worker_directory(deployment: str) -> WorkerDirectory:
    """This process's directory for the deployment of that name."""
    return _directories.setdefault(deployment, WorkerDirectory())


class ServeFleet:
    """A `twostroke.router.fleet.Fleet`. Made and used on one event loop, the router replica's."""

    def __init__(self, prefill: DeploymentHandle | None, decode: DeploymentHandle, *, grace_s: float):
        """`prefill` is None in aggregated mode. What a leaving worker has under way may take `grace_s`."""
        self._loop = asyncio.get_running_loop()
        self._grace_s = grace_s
        self._calls: dict[Peer, set[asyncio.Future[WorkerLost]]] = {}
        handles = [decode] if prefill is None else [prefill, decode]
        for handle in handles:
            _ = handle.decode  # a method's look-up initialises the handle: from now on Serve tells it of the replicas
        self._handles = [(handle, worker_directory(handle.deployment_name)) for handle in handles]
        for _, directory in self._handles:
            directory.watch(self._on_departed)

    def workers(self) -> Sequence[WorkerInfo]:
        return [info for _, directory in self._handles for info in directory.workers()]

    def other_versions(self) -> Mapping[Role, Collection[str]]:
        """Names of the workers that run another version than this router, and are left out."""
        roles = ROLES[-len(self._handles) :]  # a decode deployment is always there, and the last
        return {role: directory.other_versions() for role, (_, directory) in zip(roles, self._handles, strict=True)}

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        reply: PrefillReply = await self._call("prefill", worker, request, ticket, pull)
        return reply

    async def score_prompt(self, worker: Peer, request: GenerateRequest) -> PrefillReply:
        reply: PrefillReply = await self._call("score_prompt", worker, request)
        return reply

    async def decode(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> DecodeReply:
        reply: DecodeReply = await self._call("decode", worker, request, ticket, pull)
        return reply

    async def probe_source(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> ProbeTimes:
        times: ProbeTimes = await self._call("probe_source", worker, tickets, num_tokens)
        return times

    async def probe_target(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> None:
        await self._call("probe_target", worker, tickets, num_tokens)

    def _home(self, worker: Peer) -> tuple[DeploymentHandle, WorkerDirectory]:
        """The deployment that the worker is a replica of. Raises WorkerLeaving where it is in none."""
        for handle, directory in self._handles:
            if worker in directory:
                return handle, directory
        raise WorkerLeaving(f"worker {worker.worker_id} is gone")

    async def _call(self, method: str, worker: Peer, *arguments: Any) -> Any:
        """Call `method` on exactly `worker`.

        Raises WorkerLost as soon as Serve tells that it has died, WorkerLeaving where it is not to be called any more.
        """
        handle, directory = self._home(worker)
        departed: asyncio.Future[WorkerLost] = self._loop.create_future()
        calls = self._calls.setdefault(worker, set())
        calls.add(departed)
        response = None
        try:
            # After the future is in place: a departure from here on is seen.
            if worker not in directory:
                raise WorkerLeaving(f"worker {worker.worker_id} is gone")
            response = getattr(handle, method).remote(worker, *arguments)
            answer = asyncio.ensure_future(_result(response))
            try:
                await asyncio.wait((answer, departed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not answer.done():
                    # Cancelling our wait alone would leave the method running in the replica.
                    response.cancel()
                    answer.cancel()
            if not answer.done():
                raise departed.result()
            return answer.result()
        finally:
            calls.discard(departed)
            if not calls and self._calls.get(worker) is calls:
                del self._calls[worker]

    def _on_departed(self, workers: frozenset[Peer], how: Departure) -> None:
        """Handle a departure. It may be called on any thread."""
        self._loop.call_soon_threadsafe(self._part_with, workers, how)

    def _part_with(self, workers: frozenset[Peer], how: Departure) -> None:
        for worker in workers & self._calls.keys():
            if how is Departure.DIED:
                self._fail_calls(worker, WorkerLost(f"worker {worker.worker_id} has died"))
            else:
                self._loop.call_later(self._grace_s, self._end_grace, worker)

    def _end_grace(self, worker: Peer) -> None:
        if any(worker in directory for _, directory in self._handles):
            return  # Serve has named it again
        self._fail_calls(worker, WorkerLeaving(f"worker {worker.worker_id} is taken down, and its grace is over"))

    def _fail_calls(self, worker: Peer, error: WorkerLost) -> None:
        for departed in self._calls.get(worker, ()):
            if not departed.done():
                departed.set_result(error)


async def _result(response: Any) -> Any:
    """The call's result. Raises RequestError where the worker refuses, TransferFailed, WorkerLost where it is gone, and
    WorkerFailed for all else."""
    try:
        return await response
    except Exception as error:
        # Serve's two ways to carry a call differ: actor calls wrap the worker's exception, gRPC brings it bare.
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, RequestError | TransferFailed | WorkerLost):
            raise cause from None
        is_gone = isinstance(cause, RayError)  # Ray's own word: the actor died, or can't be reached
        lost = WorkerLost if is_gone else WorkerFailed
        raise lost(f"the worker's call failed: {type(cause).__name__}: {cause}") from error
