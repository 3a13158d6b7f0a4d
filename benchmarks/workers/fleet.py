"""Worker processes as a Fleet, so that the router's own pipeline drives them: the serving path without Ray and HTTP."""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec

from twostroke.benchmarks.workers.process import LINE_BYTES, Answer, Call, Notes, Settings
from twostroke.protocol.clock import draw_epoch
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.messages import ProbeTimes
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply, SamplingParams, Ticket
from twostroke.protocol.settings import to_plain
from twostroke.protocol.stats import WorkerInfo
from twostroke.router.channels.token_channels import TokenChannels
from twostroke.router.generate.pipeline import Pipeline, PipelineConfig
from twostroke.router.observe.stages import Stages

END_S = 30.0


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
            "twostroke.benchmarks.workers.process",
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
async def serve(prefill: Settings, decode: Settings) -> AsyncIterator[Served]:
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
            config=PipelineConfig(pulls=False),
        )
        yield Served(workers[0], workers[1], pipeline)
    finally:
        await channels.close()
        await asyncio.gather(*(worker.end() for worker in workers))
