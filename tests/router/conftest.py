"""A fleet of fake workers: real token channels over loopback, tokens that are a function of the prefix."""

import asyncio
import contextlib
import itertools
import socket
import time
import zlib
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import httpx
import msgspec
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI

from twostroke.protocol.errors import ConnectionLost, WorkerLost
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import (
    Cancel,
    ChangeRole,
    Drain,
    Hello,
    Ping,
    PrefillFailed,
    RequestsBlocked,
    Resume,
    SendPrefix,
    StatsFrame,
    TokenFrame,
    Welcome,
)
from twostroke.protocol.network import Connection, Listener, TcpNetwork
from twostroke.protocol.requests import (
    Address,
    DecodeReply,
    GenerateRequest,
    Peer,
    PrefillReply,
    PromptScores,
    SampledToken,
    SamplingParams,
    Ticket,
    TokenEvent,
    finish_reason,
    forbidden_tokens,
    verify_ticket,
)
from twostroke.protocol.stats import Role, WorkerInfo, WorkerStats
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.generate.pipeline import FleetKnowledge, Pipeline
from twostroke.router.http.app import build_app
from twostroke.router.http.config import HttpConfig
from twostroke.router.http.doctor import Doctor
from twostroke.router.http.service import RouterService, ServiceConfig
from twostroke.router.openai import jobs
from twostroke.router.slo.classes import SLOConfig
from twostroke.router.text.generation_config import SamplingDefaults
from twostroke.router.text.tokenizer import TextTokenizer
from twostroke.router.token_channels import TokenChannelConfig, TokenChannels

SECRET = b"the cluster's secret"
VOCAB = 300


def next_token(request: GenerateRequest, prefix: Sequence[int]) -> SampledToken:
    """The fake model: a hash of the prefix and the seed, so that a resumed request must go on the same."""
    token = zlib.crc32(array("I", [*prefix, request.sampling.seed & 0xFFFF]).tobytes()) % VOCAB
    while token in forbidden_tokens(request, len(prefix) - request.num_prompt_tokens):
        token = (token + 1) % VOCAB
    wanted = request.sampling.logprobs
    if wanted is None:
        return SampledToken(token)
    return SampledToken(token, -0.5, tuple(((token + k) % VOCAB, -0.5 - k) for k in range(wanted)))


def expected_tokens(request: GenerateRequest) -> list[int]:
    """All output tokens of a request that starts afresh."""
    tokens = list(request.token_ids)
    outputs: list[int] = []
    while True:
        token = next_token(request, tokens).token_id
        tokens.append(token)
        outputs.append(token)
        if finish_reason(request, len(outputs), token):
            return outputs


@dataclass
class FakeWorker:
    """One worker, which may `die()`. Tests may set `gate` (a decode step takes one permit), `refusal` and others."""

    role: Role
    name: str
    listener: Listener | None = None
    info: WorkerInfo | None = None
    owned: set[str] = field(default_factory=set)
    seen: list[GenerateRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    told_prefill_failed: list[str] = field(default_factory=list)
    told_to_leave: int = 0
    obeys: bool = True  # an operator's orders
    is_mute: bool = False  # its process is stopped: it answers no ping
    is_leaving: bool = False  # the fleet names it no more, and it goes on
    connections: dict[str, Connection] = field(default_factory=dict)
    stats: WorkerStats = field(default_factory=lambda: WorkerStats(total_blocks=100, free_blocks=100))
    gate: asyncio.Semaphore | None = None
    prefill_gate: asyncio.Event | None = None
    refusal: Exception | None = None
    script: Sequence[int] | None = None  # its output tokens, in place of the fake model's
    poison: Callable[[Sequence[int]], bool] | None = None  # it dies of drawing the token after these
    dying: asyncio.Task[None] | None = None
    keeps_kv: bool = False  # a prefill worker that can't reach the decode worker
    corrupt: Callable[[TokenEvent], TokenEvent] | None = None
    pulls: list[Ticket] = field(default_factory=list)
    prefixes: list[SendPrefix] = field(default_factory=list)
    prompt_ready: dict[str, asyncio.Event] = field(default_factory=dict)
    calls: set[asyncio.Task[object]] = field(default_factory=set)
    dead: bool = False
    epoch: int = 6

    async def start(self) -> None:
        self.dead = False
        self.epoch += 1
        self.listener = await TcpNetwork(SECRET).listen("127.0.0.1", self._serve)
        self.info = WorkerInfo(
            role=self.role,
            peer=Peer(self.name, self.epoch),
            token_address=self.listener.address,
            transfer_addresses=(Address("127.0.0.1", 1),),
            layout=KVLayout("fake", "float32", 2, 2, 8, 16),
            num_blocks=100,
            max_context=512,
        )

    async def die(self) -> None:
        self.dead = True
        for call in list(self.calls):
            call.cancel()
        await self.close()

    async def close(self) -> None:
        if self.listener is not None:
            await self.listener.close()
        self.connections.clear()

    async def _serve(self, connection: Connection) -> None:
        hello = await connection.receive()
        assert isinstance(hello, Hello)
        connection.send(Welcome(self.info.peer))
        connection.send(RequestsBlocked(()))
        connection.send(StatsFrame(self.stats))
        self.connections[hello.sender.worker_id] = connection
        try:
            while True:
                message = await connection.receive()
                match message:
                    case Ping():
                        if not self.is_mute:
                            connection.send(Ping())
                    case Cancel():
                        self.cancelled.append(message.request_id)
                    case Drain(is_ordered):
                        self.told_to_leave += 1
                        if is_ordered and self.obeys:
                            self.tell(is_draining=True)
                    case Resume() if self.obeys:
                        self.tell(is_draining=False)
                    case ChangeRole(role) if self.obeys:
                        self.tell(step_role=role)
                    case SendPrefix():
                        self.prefixes.append(message)
                    case PrefillFailed():
                        self.told_prefill_failed.append(message.request_id)
                        self.ready(message.request_id).set()
        except ConnectionLost:
            self.connections.pop(hello.sender.worker_id, None)

    def tell(self, **numbers) -> None:
        """Change its numbers, and send them to all routers."""
        self.stats = msgspec.structs.replace(self.stats, **numbers)
        for connection in self.connections.values():
            connection.send(StatsFrame(self.stats))

    def ready(self, request_id: str) -> asyncio.Event:
        return self.prompt_ready.setdefault(request_id, asyncio.Event())

    @contextlib.contextmanager
    def _own(self, request: GenerateRequest):
        task = asyncio.current_task()
        if self.dead:
            raise WorkerLost("it is dead")
        self.calls.add(task)
        self.owned.add(request.request_id)
        self.seen.append(request)
        try:
            if self.refusal is not None:
                raise self.refusal
            yield
        except asyncio.CancelledError:
            if self.dead:
                raise WorkerLost("it died") from None
            raise
        finally:
            self.calls.discard(task)
            self.owned.discard(request.request_id)
            self.prompt_ready.pop(request.request_id, None)

    def _draw(self, request: GenerateRequest, prefix: Sequence[int]) -> SampledToken:
        if self.script is None:
            return next_token(request, prefix)
        return SampledToken(self.script[len(prefix) - request.num_prompt_tokens], -0.5)

    async def _die_of_poison(self, tokens: Sequence[int]) -> None:
        if self.poison is not None and self.poison(tokens):
            await asyncio.sleep(0.03)  # an engine's step takes its time
            self.dying = asyncio.create_task(self.die())
            await asyncio.Event().wait()

    async def prefill(self, request: GenerateRequest, decode: "FakeWorker | None") -> PrefillReply:
        with self._own(request):
            if self.prefill_gate is not None:
                await self.prefill_gate.wait()
            await self._die_of_poison(request.token_ids)
            token = self._draw(request, request.token_ids)
            given = request.num_output_tokens_given
            finish = finish_reason(request, given + 1, token.token_id)
            if decode is not None and not self.keeps_kv:
                decode.ready(request.request_id).set()
            return PrefillReply(TokenEvent(request.request_id, given, (token,), finish), 3, 0.01, 0.02)

    async def read(self, request: GenerateRequest) -> PrefillReply:
        """The fake model finds an even token t after any other the likeliest, and of an odd one t + 1."""
        reply, (_, *targets) = await self.prefill(request, None), request.token_ids
        wanted = request.scoring.logprobs
        scores = None
        if wanted is not None:
            ids = [[t + t % 2 + k for k in range(wanted)] for t in targets]
            logprobs = [[-1 - t % 2, *[-1 - k for k in range(wanted)]] for t in targets]
            scores = PromptScores(
                wanted,
                np.array(ids, np.int32).tobytes(),
                np.array(logprobs, np.float32).tobytes(),
                np.array([1 + t % 2 for t in targets], np.int32).tobytes(),
            )
        embedding = b""
        if request.scoring.pooling is not None:
            vector = np.array([*request.token_ids[:4], 1.0, 0.0, 0.0, 0.0][:4], np.float32)
            embedding = (vector / np.linalg.norm(vector)).tobytes()
        if request.max_tokens == 0:
            event = TokenEvent(request.request_id, reply.event.index, (), "length")
            reply = msgspec.structs.replace(reply, event=event)
        return msgspec.structs.replace(reply, scores=scores, embedding=embedding)

    def note_pull(self, ticket: Ticket) -> None:
        """A prefix is on its way, or so the router says."""
        verify_ticket(SECRET, ticket, source=ticket.source, target=self.info.peer)
        self.pulls.append(ticket)

    async def decode(self, request: GenerateRequest, ticket: Ticket | None) -> DecodeReply:
        with self._own(request):
            if ticket is not None:
                verify_ticket(SECRET, ticket, source=ticket.source, target=self.info.peer)
                await self.ready(request.request_id).wait()
            tokens = list(request.token_ids)
            while True:
                if self.gate is not None:
                    await self.gate.acquire()
                else:
                    await asyncio.sleep(0)
                await self._die_of_poison(tokens)
                token = self._draw(request, tokens)
                index = len(tokens) - request.num_prompt_tokens
                tokens.append(token.token_id)
                finish = finish_reason(request, index + 1, token.token_id)
                event = TokenEvent(request.request_id, index, (token,), finish)
                if self.corrupt is not None:
                    event = self.corrupt(event)
                self.connections[request.router_id].send(TokenFrame((event,)))
                if finish:
                    return DecodeReply(index + 1, finish, 5, 0.03, 0.04, 0)


class FakeFleet:
    """Implements router.fleet.Fleet."""

    def __init__(self, workers: list[FakeWorker]):
        self.all = {worker.name: worker for worker in workers}

    def workers(self) -> list[WorkerInfo]:
        return [worker.info for worker in self.all.values() if not (worker.dead or worker.is_leaving)]

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        if pull is not None:
            self.all[worker.worker_id].note_pull(pull)
        decode = None if ticket is None else self.all[ticket.target.worker_id]
        return await self.all[worker.worker_id].prefill(request, decode)

    async def score_prompt(self, worker: Peer, request: GenerateRequest) -> PrefillReply:
        return await self.all[worker.worker_id].read(request)

    async def decode(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> DecodeReply:
        if pull is not None:
            assert ticket is None
            self.all[worker.worker_id].note_pull(pull)
        return await self.all[worker.worker_id].decode(request, ticket)

    @property
    def owned(self) -> set[str]:
        return {request_id for worker in self.all.values() for request_id in worker.owned}


@dataclass
class Rig:
    """A fleet and a pipeline on it."""

    fleet: FakeFleet
    channels: TokenChannels
    pipeline: Pipeline
    knowledge: FleetKnowledge

    def __getitem__(self, name: str) -> FakeWorker:
        return self.fleet.all[name]


# Quick, and yet no quicker than a busy machine: a channel that is given up for its slowness is another test.
QUICK = TokenChannelConfig(ping_s=0.05, silence_s=3.0, connect_s=30.0, backoff_first_s=0.01, backoff_most_s=0.05)
PATIENCE = PipelineConfig(
    roles="fixed", retry_wait_s=2.0, retry_poll_s=0.01, reply_grace_s=0.2, prefill_failed_repeat_s=0.02
)


_open_rigs: list[FakeFleet] = []


@contextlib.asynccontextmanager
async def _running(num_prefill: int, num_decode: int, pipeline_config: PipelineConfig = PATIENCE) -> AsyncIterator[Rig]:
    before = asyncio.all_tasks()
    workers = [FakeWorker("prefill", f"p{i}") for i in range(num_prefill)]
    workers += [FakeWorker("decode", f"d{i}") for i in range(num_decode)]
    for worker in workers:
        await worker.start()
    fleet = FakeFleet(workers)
    router = Peer("router-0", 11)
    knowledge = FleetKnowledge(
        network=TcpNetwork(SECRET), router=router, clock=time.monotonic, config=pipeline_config, channel=QUICK
    )
    channels = knowledge.channels
    pipeline = Pipeline(fleet=fleet, knowledge=knowledge, secret=SECRET)
    _open_rigs.append(fleet)
    try:
        yield Rig(fleet, channels, pipeline, knowledge)
        assert pipeline.in_flight == 0
    finally:
        _open_rigs.remove(fleet)
        await channels.close()
        for worker in workers:
            await worker.close()
    await asyncio.sleep(0)
    if not _open_rigs:  # the channels of a rig around this one may have been lost and made anew meanwhile
        assert asyncio.all_tasks() - {asyncio.current_task()} <= before


@pytest.fixture
def fleet_of():
    """Call it as `async with fleet_of(prefills, decodes) as rig`. No task may be left behind."""
    return _running


@pytest.fixture
def until():
    """Call it as `await until(lambda: condition)`; fails after twenty seconds."""

    async def wait(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110  (the conditions are of many kinds)
                await asyncio.sleep(0.002)

    return wait


@pytest.fixture
def expected():
    return expected_tokens


@pytest.fixture
def a_request():
    """Makes the template of a request; keyword arguments replace fields."""

    def make(**changes) -> GenerateRequest:
        base = GenerateRequest("template", "", (1, 2, 3, 4, 5), 5, SamplingParams(seed=9), 12)
        return msgspec.structs.replace(base, **changes)

    return make


MODEL_FOLDER = Path(__file__).parents[2] / "model" / "bundled"


@pytest.fixture(scope="session")
def tokenizer():
    return TextTokenizer.load(MODEL_FOLDER)


@dataclass
class Site:
    """A served app: `http` talks to it in process, `url` over a socket."""

    rig: Rig
    service: RouterService
    app: FastAPI
    http: httpx.AsyncClient
    url: str


@contextlib.asynccontextmanager
async def _listening(app: FastAPI) -> AsyncIterator[str]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", ws="none", log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        async with asyncio.timeout(10):
            while not server.started:  # noqa: ASYNC110  (uvicorn has no event for it)
                await asyncio.sleep(0.005)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@pytest.fixture(autouse=True)
def _seeds_in_order(monkeypatch) -> None:
    """Requests without a seed get 1, 2, 3, ..: random ones end an answer early once in fifty runs of a test."""
    seeds = itertools.count(1)
    monkeypatch.setattr(jobs, "secrets", SimpleNamespace(randbits=lambda bits: next(seeds)))


@pytest.fixture
def site_of(fleet_of, tokenizer):
    """Call it as `async with site_of(prefills, decodes) as site`."""

    @contextlib.asynccontextmanager
    async def make(
        num_prefill: int,
        num_decode: int,
        *,
        listen: bool = False,
        slo=SLOConfig(),  # noqa: B008  (frozen)
        tenants=None,
        defaults=SamplingDefaults(),  # noqa: B008  (frozen)
        scaling=lambda: None,
        speaks=tokenizer,
        pipeline_config=PATIENCE,
        **config,
    ) -> AsyncIterator[Site]:
        async with fleet_of(num_prefill, num_decode, pipeline_config) as rig:
            service = RouterService(
                config=ServiceConfig(model_name="fake", expects_prefill=num_prefill > 0, http=HttpConfig(**config)),
                tokenizer=speaks,
                fleet=rig.fleet,
                channels=rig.channels,
                pipeline=rig.pipeline,
                slo=slo,
                tenants=tenants,
                keys_age_s=float,
                sampling_defaults=defaults,
                scaling=scaling,
            )
            doctor = Doctor(fleet=rig.fleet, stats=rig.channels.stats, secret=SECRET, expected=dict)
            app = build_app(service, doctor)
            await service.start()
            transport = httpx.ASGITransport(app, raise_app_exceptions=True)
            try:
                async with contextlib.AsyncExitStack() as stack:
                    url = await stack.enter_async_context(_listening(app)) if listen else ""
                    http = await stack.enter_async_context(
                        httpx.AsyncClient(transport=transport, base_url="http://router")
                    )
                    yield Site(rig, service, app, http, url)
                assert not rig.fleet.owned
            finally:
                await service.close()

    return make
