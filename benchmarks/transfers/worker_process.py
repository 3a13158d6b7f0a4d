"""One worker in a process of its own, without Ray, and such processes as a Fleet for the router's own pipeline.

Together they are the serving path without Ray and HTTP. Calls go through a manager of the standard library's
multiprocessing, whose threads wait while the worker's own loop works. The process notes when the engine began the first
step of each request and ended the step that drew its first token: moments of CLOCK_MONOTONIC, which all processes of a
machine share.
"""

import asyncio
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.managers import BaseManager, RemoteError
from typing import Any, Literal, TypeVar

from twostroke.cluster.config.sections import ModelSection, WorkerResources
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.ranks.worker_parts import load_parts
from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.policy import decode_role
from twostroke.kvtransfer.config import TransferConfig, TransportName
from twostroke.model.step import BlockCopy, Engine, OnLayer, SequenceStep
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.prefill_worker.policy import prefill_role
from twostroke.protocol.clock import draw_epoch
from twostroke.protocol.errors import TwostrokeError, WorkerLost
from twostroke.protocol.garbage import freeze_start_up
from twostroke.protocol.messages import ProbeTimes
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import (
    DecodeReply,
    GenerateRequest,
    Peer,
    PrefillReply,
    Promise,
    SampledToken,
    SamplingParams,
    Ticket,
    TokenEvent,
)
from twostroke.protocol.stats import Role, WorkerInfo, WorkerStats
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.generate.pipeline import FleetKnowledge, Pipeline
from twostroke.router.request_state import ChoiceJob, RequestState
from twostroke.worker.worker import Worker

HOST = "127.0.0.1"
SECRET = "a secret of these processes alone"
MAX_CALLS = 1024  # at a time, each of which has a thread on both sides

Result = TypeVar("Result")


@dataclass(frozen=True)
class Settings:
    """Settings of a worker process."""

    role: Role
    model: str  # its folder
    num_blocks: int
    block_size: int
    transport: TransportName = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    tcp_max_bytes_per_s: int | None = None
    decode: DecodeConfig = field(default_factory=DecodeConfig)


@dataclass(frozen=True)
class Moments:
    """Moments of one request, in seconds of CLOCK_MONOTONIC."""

    first_step_began: float
    first_token_drawn: float


@dataclass(frozen=True)
class Notes:
    """Notes of a process: moments by the prompt's first token, which the benches make unique."""

    moments: dict[str, Moments]
    stats: WorkerStats


class NotingEngine:
    """An Engine that passes everything on and notes when."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._began: dict[int, float] = {}
        self.moments: dict[str, Moments] = {}

    async def step(
        self,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        copies: Sequence[BlockCopy] = (),
    ) -> list[SampledToken | None]:
        began = time.monotonic()
        sampled = await self._engine.step(batch, on_layer, copies)
        ended = time.monotonic()
        for entry, token in zip(batch, sampled, strict=True):
            # A prompt's chunks begin at 0, or where a cached prefix ends; only the last one draws.
            if entry.start == 0:
                self._began[entry.token_ids[0]] = began
            if token is not None and entry.draw is not None:
                name = entry.draw.history[0]
                self.moments.setdefault(str(name), Moments(self._began.pop(name, began), ended))
        return sampled

    @property
    def num_broken_rows(self) -> int:
        return self._engine.num_broken_rows


class Hosted:
    """An object with an event loop in a process of its own. Its methods block the thread that calls."""

    def __init__(self) -> None:
        threading.Thread(target=_end_with_parent, name="watch parent", daemon=True).start()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="loop", daemon=True).start()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class HostedWorker(Hosted):
    """A worker: loads its model, and serves."""

    def __init__(self, settings: Settings):
        super().__init__()
        self._run(self._start(settings))

    def info(self) -> WorkerInfo:
        return self._info

    def prefill(self, request: GenerateRequest, ticket: Ticket | None) -> PrefillReply:
        return self._run(self._worker.prefill(request, ticket))

    def decode(self, request: GenerateRequest, ticket: Ticket | None) -> DecodeReply:
        return self._run(self._worker.decode(request, ticket))

    def notes(self) -> Notes:
        """Return the notes since the last time."""
        moments, self._engine.moments = self._engine.moments, {}
        return Notes(moments, self._worker.stats())

    def stop(self) -> None:
        self._run(self._worker.stop())
        self._run(self._parts.close())

    async def _start(self, settings: Settings) -> None:
        secret = SECRET.encode()
        config = PrefillConfig() if settings.role == "prefill" else settings.decode
        peer, network = Peer(f"{settings.role}-{os.getpid()}", draw_epoch()), TcpNetwork(secret)
        self._parts = await load_parts(
            WorkerSettings(
                model=ModelSection(path=settings.model, dtype="bfloat16"),
                resources=WorkerResources(num_blocks=settings.num_blocks),
                max_step_tokens=config.max_step_tokens,
                max_batch=config.max_batch,
                block_size=settings.block_size,
                device=settings.device,
                threads=settings.threads,
                transfer=TransferConfig(transport=settings.transport, tcp_max_bytes_per_s=settings.tcp_max_bytes_per_s),
            ),
            peer,
            network,
            secret,
            host=HOST,
        )
        self._engine = NotingEngine(self._parts.deps.engine)
        deps = replace(self._parts.deps, engine=self._engine)
        role = prefill_role(config) if isinstance(config, PrefillConfig) else decode_role(config)
        self._worker = Worker(role, deps)
        self._info = await self._worker.start(HOST)
        freeze_start_up()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class _Manager(BaseManager):
    """Starts a process and connects to it."""


class HostProcess:
    """The process of something Hosted, from its start to its end."""

    def __init__(self, kind: type[Hosted], *arguments: object):
        _Manager.register(kind.__name__, kind)
        self._kind = kind
        self._arguments = arguments
        self._manager = _Manager(ctx=multiprocessing.get_context("spawn"))
        self._threads = ThreadPoolExecutor(MAX_CALLS)
        self._hosted: Any = None  # its proxy, once it has started

    async def start(self, method: str) -> Any:
        """Returns once it serves, with what a method returns. Raises WorkerLost where it doesn't come to that."""
        await self._in_thread(self._manager.start)
        self._hosted = await self._in_thread(getattr(self._manager, self._kind.__name__), *self._arguments)
        return await self.call(method)

    async def call(self, method: str, *arguments: object) -> Any:
        """Call a method there. Raises WorkerLost where the process ends or the call fails."""
        return await self._in_thread(getattr(self._hosted, method), *arguments)

    async def end(self) -> None:
        """Let it stop, then end its process, wherever it is."""
        try:
            if self._hosted is not None:
                await self.call("stop")
        finally:
            if hasattr(self._manager, "shutdown"):  # it has started
                await self._in_thread(self._manager.shutdown)
            self._threads.shutdown()

    async def _in_thread(self, function: Any, *arguments: object) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
        except (TwostrokeError, RemoteError, EOFError, OSError) as error:
            raise WorkerLost(f"{type(error).__name__}: {error}") from error


class ProcessFleet:
    """Worker processes, and the router's pipeline before them, whose Fleet this implements."""

    def __init__(self, settings: Sequence[Settings]):
        self._processes = [HostProcess(HostedWorker, one) for one in settings]
        self._by_peer: dict[Peer, HostProcess] = {}
        self._infos: list[WorkerInfo] = []
        router, secret = Peer("router", draw_epoch()), SECRET.encode()
        knowledge = FleetKnowledge(
            network=TcpNetwork(secret),
            router=router,
            clock=time.monotonic,
            config=PipelineConfig(pulls=False, roles="fixed", decodes_alone=len(settings) == 1),
        )
        self._channels = knowledge.channels
        self._pipeline = Pipeline(fleet=self, knowledge=knowledge, secret=secret)

    async def start(self) -> None:
        """Side by side. Raises WorkerLost where one doesn't come to serve."""
        self._infos = list(await asyncio.gather(*(process.start("info") for process in self._processes)))
        self._by_peer = {info.peer: process for info, process in zip(self._infos, self._processes, strict=True)}
        freeze_start_up()  # of the router's part, which is this process

    async def end(self) -> None:
        await self._channels.close()
        await asyncio.gather(*(process.end() for process in self._processes))

    def workers(self) -> Sequence[WorkerInfo]:
        return self._infos

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        del pull  # benches switch pulls off
        reply: PrefillReply = await self._by_peer[worker].call("prefill", request, ticket)
        return reply

    async def score_prompt(self, worker: Peer, request: GenerateRequest) -> PrefillReply:
        reply: PrefillReply = await self._by_peer[worker].call("score_prompt", request)
        return reply

    async def decode(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> DecodeReply:
        del pull  # benches switch pulls off
        reply: DecodeReply = await self._by_peer[worker].call("decode", request, ticket)
        return reply

    async def probe_source(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> ProbeTimes:
        raise WorkerLost("a bench's workers make no trial transfers")

    async def probe_target(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> None:
        raise WorkerLost("a bench's workers make no trial transfers")

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, promise: Promise | None = None
    ) -> AsyncGenerator[TokenEvent, None]:
        """The events of one greedy request; to be closed, as the pipeline's are."""
        request = GenerateRequest(
            "",
            "",
            tuple(prompt),
            len(prompt),
            SamplingParams(temperature=0.0),
            max_tokens,
            promise=promise or Promise(),
        )
        async with contextlib.aclosing(
            self._pipeline.generate(RequestState(ChoiceJob(request), time.monotonic()))
        ) as events:
            async for event in events:
                yield event

    async def notes(self) -> list[Notes]:
        """Return each worker's notes since the last time."""
        notes: list[Notes] = await asyncio.gather(*(process.call("notes") for process in self._processes))
        return notes


@contextlib.asynccontextmanager
async def serve_workers(*settings: Settings) -> AsyncIterator[ProcessFleet]:
    """A decode worker, alone or with a prefill worker; they have ended when the context has."""
    served = ProcessFleet(settings)
    try:
        await served.start()
        yield served
    finally:
        await served.end()
