"""One worker in a process of its own, without Ray, and such processes as a Fleet for the router's own pipeline.

Together they are the serving path without Ray and HTTP.

`python -m twostroke.benchmarks.worker_process SETTINGS` takes calls as JSON lines on its standard input and answers on
its standard output; it ends with its input. It notes when the engine began the first step of each request and ended the
step that drew its first token: moments of CLOCK_MONOTONIC, which all processes of a machine share.
"""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from twostroke.cluster.config.sections import ModelSection, TransportChoice, WorkerResources
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.ranks.worker_parts import load_parts
from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.worker import DecodeWorker
from twostroke.kvtransfer.config import TransferConfig
from twostroke.model.step import BlockCopy, Engine, OnLayer, SequenceStep
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.prefill_worker.worker import PrefillWorker
from twostroke.protocol.clock import draw_epoch
from twostroke.protocol.errors import TwostrokeError, WorkerLost
from twostroke.protocol.messages import ProbeTimes
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import (
    DecodeReply,
    GenerateRequest,
    Peer,
    PrefillReply,
    SampledToken,
    SamplingParams,
    Ticket,
)
from twostroke.protocol.settings import from_plain, to_plain
from twostroke.protocol.stats import Role, WorkerInfo, WorkerStats
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.generate.pipeline import Pipeline
from twostroke.router.observe.stages import Stages

LINE_BYTES = 16 * 1024 * 1024
HOST = "127.0.0.1"
END_S = 30.0


class Settings(msgspec.Struct, frozen=True):
    """What a worker process is told."""

    role: Role
    model: str  # its folder
    dtype: Literal["bfloat16", "float32"]
    num_blocks: int
    block_size: int
    transport: TransportChoice
    secret: str
    threads: int = 1
    tcp_max_bytes_per_s: int | None = None
    decode: DecodeConfig = DecodeConfig()


class Call(msgspec.Struct, frozen=True):
    """One call: of a request, or, without one, for what the process has noted."""

    number: int
    request: GenerateRequest | None = None
    ticket: Ticket | None = None


class Moments(msgspec.Struct, frozen=True):
    """Of one request, in seconds of CLOCK_MONOTONIC."""

    first_step_began: float
    first_token_drawn: float


class Notes(msgspec.Struct, frozen=True):
    """What a process has noted: moments by the prompt's first token, which the benches make unique."""

    moments: dict[str, Moments]
    stats: WorkerStats


class Answer(msgspec.Struct, frozen=True):
    """To the call of this number: what came of it, or the text of its error. Number 0 tells of the start."""

    number: int
    info: WorkerInfo | None = None
    prefill: PrefillReply | None = None
    decode: DecodeReply | None = None
    notes: Notes | None = None
    error: str | None = None


class WorkerProcess:
    """A worker process, from its start to its end."""

    def __init__(self, settings: Settings):
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._numbers = 0

    async def start(self) -> WorkerInfo:
        """Returns once it serves. Raises WorkerLost where it ends instead; its standard error says why."""
        started: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[0] = started
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "twostroke.benchmarks.worker_process",
            msgspec.json.encode(self._settings, enc_hook=to_plain).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        self._reading = asyncio.create_task(self._read(self._process))
        info = (await started).info
        if info is None:
            raise WorkerLost("the worker process did not say who it is")
        return info

    async def call(self, request: GenerateRequest | None = None, ticket: Ticket | None = None) -> Answer:
        """What comes of a call. Raises WorkerLost where the process ends or the call fails."""
        if self._process is None or self._process.stdin is None:
            raise WorkerLost("the worker process was not started")
        self._numbers += 1
        number = self._numbers
        waiting: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        self._process.stdin.write(msgspec.json.encode(Call(number, request, ticket)) + b"\n")
        try:
            answer = await waiting
        finally:
            self._waiting.pop(number, None)
        if answer.error is not None:
            raise WorkerLost(answer.error)
        return answer

    async def notes(self) -> Notes:
        """What it has noted since the last time."""
        notes = (await self.call()).notes
        if notes is None:
            raise WorkerLost("the worker process has no notes")
        return notes

    async def end(self) -> None:
        """Let it end by itself, and kill it should it not."""
        if self._process is None or self._process.stdin is None or self._reading is None:
            return
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reading

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        decoder = msgspec.json.Decoder(Answer)
        while process.stdout is not None and (line := await process.stdout.readline()):
            answer = decoder.decode(line)
            waiting = self._waiting.get(answer.number)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(WorkerLost("the worker process has ended"))


@dataclass
class ProcessFleet:
    """Implements router.fleet.Fleet over worker processes."""

    processes: dict[Peer, WorkerProcess] = field(default_factory=dict)
    infos: list[WorkerInfo] = field(default_factory=list)

    def workers(self) -> Sequence[WorkerInfo]:
        return self.infos

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        del pull  # benches switch pulls off
        reply = (await self.processes[worker].call(request, ticket)).prefill
        if reply is None:
            raise WorkerLost("the prefill worker has no reply")
        return reply

    async def decode(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> DecodeReply:
        del pull  # benches switch pulls off
        reply = (await self.processes[worker].call(request, ticket)).decode
        if reply is None:
            raise WorkerLost("the decode worker has no reply")
        return reply

    async def probe_source(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> ProbeTimes:
        raise WorkerLost("a bench's workers make no trial transfers")

    async def probe_target(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> None:
        raise WorkerLost("a bench's workers make no trial transfers")


@dataclass(frozen=True)
class Served:
    """One prefill and one decode worker, and the pipeline before them."""

    prefill: WorkerProcess
    decode: WorkerProcess
    pipeline: Pipeline

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> Stages:
        """Run one greedy request to its end."""
        stages = Stages(time.monotonic())
        request = GenerateRequest("", "", tuple(prompt), len(prompt), SamplingParams(temperature=0.0), max_tokens)
        async with contextlib.aclosing(self.pipeline.generate(request, stages)) as events:
            async for _ in events:
                pass
        return stages


@contextlib.asynccontextmanager
async def serve_workers(prefill: Settings, decode: Settings) -> AsyncIterator[Served]:
    """Both workers, started side by side; they have ended when the context has."""
    fleet = ProcessFleet()
    workers = [WorkerProcess(prefill), WorkerProcess(decode)]
    router = Peer("router", draw_epoch())
    secret = prefill.secret.encode()
    channels = TokenChannels(network=TcpNetwork(secret), peer=router, clock=time.monotonic)
    try:
        fleet.infos = list(await asyncio.gather(*(worker.start() for worker in workers)))
        fleet.processes = {info.peer: worker for info, worker in zip(fleet.infos, workers, strict=True)}
        pipeline = Pipeline(
            fleet=fleet,
            channels=channels,
            secret=secret,
            clock=time.monotonic,
            router=router,
            config=PipelineConfig(pulls=False, decodes_alone=False),
        )
        yield Served(workers[0], workers[1], pipeline)
    finally:
        await channels.close()
        await asyncio.gather(*(worker.end() for worker in workers))


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


async def serve(settings: Settings) -> None:
    """Run the worker until standard input ends."""
    secret = settings.secret.encode()
    config = PrefillConfig() if settings.role == "prefill" else settings.decode
    peer, network = Peer(f"{settings.role}-{os.getpid()}", draw_epoch()), TcpNetwork(secret)
    parts = await load_parts(
        WorkerSettings(
            model=ModelSection(path=settings.model, dtype=settings.dtype),
            resources=WorkerResources(num_blocks=settings.num_blocks),
            max_step_tokens=config.max_step_tokens,
            max_batch=config.max_batch,
            block_size=settings.block_size,
            tensor_parallel=1,
            device="cpu",
            threads=settings.threads,
            transport=settings.transport,
            tcp_streams=4,
            tcp_max_bytes_per_s=settings.tcp_max_bytes_per_s,
            transfer=TransferConfig(),
        ),
        peer,
        network,
        secret,
        host=HOST,
    )
    engine = NotingEngine(parts.equipment.engine)
    equipment = replace(parts.equipment, engine=engine)
    worker = PrefillWorker(config, equipment) if isinstance(config, PrefillConfig) else DecodeWorker(config, equipment)
    calls: set[asyncio.Task[None]] = set()
    try:
        parts.watch(worker.engine_lost)
        _say(Answer(0, info=await worker.start(HOST)))
        async for call in _calls():
            task = asyncio.create_task(_answer(worker, engine, call))
            calls.add(task)
            task.add_done_callback(calls.discard)
    finally:
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await worker.stop()
        await parts.close()


async def _answer(worker: PrefillWorker | DecodeWorker, engine: NotingEngine, call: Call) -> None:
    try:
        if call.request is None:
            notes = Notes(dict(engine.moments), worker.stats())
            engine.moments.clear()
            _say(Answer(call.number, notes=notes))
        elif isinstance(worker, PrefillWorker):
            _say(Answer(call.number, prefill=await worker.prefill(call.request, call.ticket)))
        else:
            _say(Answer(call.number, decode=await worker.decode(call.request, call.ticket)))
    except TwostrokeError as error:
        _say(Answer(call.number, error=f"{type(error).__name__}: {error}"))


async def _calls() -> AsyncIterator[Call]:
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    decoder = msgspec.json.Decoder(Call)
    try:
        while line := await reader.readline():
            yield decoder.decode(line)
    finally:
        transport.close()


def _say(answer: Answer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=Settings, dec_hook=from_plain)))


if __name__ == "__main__":
    main()
