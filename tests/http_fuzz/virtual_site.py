"""The whole server in one process and on virtual time: app, service, pipeline and workers as they are, engines faked.

A request that waits for something that never comes takes virtual time, which costs nothing and can be told exactly;
one that computes for too long takes time of this thread, whatever else the machine does.
"""

import asyncio
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import httpx

from tests.simulation.fake_model import VOCAB, FakeEngine
from tests.simulation.scenarios.scenario import make_scenario
from twostroke.decode_worker.config import DecodeConfig
from twostroke.model.step import SequenceStep
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.protocol.messages import ProbeTimes
from twostroke.protocol.requests import Peer, SampledToken, Ticket
from twostroke.router.generate.fleet_knowledge import FleetKnowledge
from twostroke.router.generate.pipeline import Pipeline
from twostroke.router.http.app import build_app
from twostroke.router.http.doctor import Doctor
from twostroke.router.http.service import RouterService, ServiceConfig
from twostroke.router.text.tokenizer import TextTokenizer
from twostroke.simulator.memory_network import MemoryFabric
from twostroke.simulator.memory_transport import LinkFabric
from twostroke.simulator.sim_fleet import SECRET, SimFleet

MODEL = "fake"
MODEL_FOLDER = Path(__file__).parents[2] / "model" / "bundled"
_YEAR_2026 = 1.8e9


@dataclass(frozen=True)
class Answer:
    """A whole response, and what it took."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    virtual_s: float  # from the request to the last byte
    engine_s: float  # of these, in which the workers' engines computed
    cpu_s: float  # of this thread


class VirtualSite(AbstractAsyncContextManager["VirtualSite"]):
    """A server with one prefill and one decode worker; ask it only inside the context, on a VirtualLoop."""

    def __init__(self, tokenizer: TextTokenizer):
        self._tokenizer = tokenizer
        self._loop = asyncio.get_running_loop()
        scenario = replace(
            make_scenario(0),
            windows=(0,),
            prefill_block_size=16,
            decode_block_size=16,
            transports=("memory",),
            num_prefill=1,
            num_decode=1,
            prefill_blocks=512,
            decode_blocks=2048,
            swap_blocks=0,
            prefill=PrefillConfig(),
            decode=DecodeConfig(),
            max_chunk_bytes=65536,
            link_bytes_per_s=1e8,
        )
        self._fabric = MemoryFabric(0)
        self._fleet = _Fleet(scenario, _Engine.of_role, self._fabric, LinkFabric(bytes_per_s=1e8), lambda line: None)

    async def __aenter__(self) -> Self:
        fleet, clock = self._fleet, self._loop.time
        self._engines = [(await fleet.start(role)).engine for role in ("prefill", "decode")]
        peer = Peer("router", 1)
        knowledge = FleetKnowledge(network=self._fabric.at(peer.worker_id), router=peer, clock=clock)
        self._channels = knowledge.channels
        self._pipeline = Pipeline(fleet=fleet, knowledge=knowledge, secret=SECRET)
        self._service = RouterService(
            config=ServiceConfig(model_name=MODEL),
            tokenizer=self._tokenizer,
            fleet=fleet,
            channels=self._channels,
            pipeline=self._pipeline,
            clock=clock,
            wall_clock=lambda: _YEAR_2026 + clock(),
        )
        expected = {"prefill": 1, "decode": 1}
        doctor = Doctor(fleet=fleet, stats=self._channels.stats, secret=SECRET, expected=lambda: expected)
        self.app = build_app(self._service, doctor)
        await self._service.start()
        while self._service.missing():  # noqa: ASYNC110  (virtual time)
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Raises AssertionError where a request has left something behind."""
        for process in self._fleet.processes.values():
            async with asyncio.timeout(30):
                await process.worker.drain()
            process.pool.check_integrity()
            assert process.pool.owned_blocks == 0, f"{process.host} still owns blocks"
        assert self._pipeline.in_flight == 0
        await self._service.close()
        for process in list(self._fleet.processes.values()):
            await self._fleet.end(process)
        await self._fleet.close()

    async def ask(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """The answer to one request, read to its end."""
        given = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        request = httpx.Request(method, url, headers=given, content=body)
        began, engines_began = self._loop.time(), self._engine_s
        with _no_garbage_collection():
            cpu_began = time.thread_time()
            response = await httpx.ASGITransport(self.app).handle_async_request(request)
            cpu_s = time.thread_time() - cpu_began
        return Answer(
            response.status_code,
            response.headers,
            await response.aread(),
            virtual_s=self._loop.time() - began,
            engine_s=self._engine_s - engines_began,
            cpu_s=cpu_s,
        )

    @property
    def _engine_s(self) -> float:
        return sum(engine.busy_s for engine in self._engines)


class _Engine(FakeEngine):
    """Counts its time, and tells log-probabilities."""

    busy_s = 0.0

    async def _run(self, *arguments: Any) -> list[SampledToken | None]:
        began = asyncio.get_running_loop().time()
        try:
            return await super()._run(*arguments)
        finally:
            self.busy_s += asyncio.get_running_loop().time() - began

    def _draw(self, one: SequenceStep) -> SampledToken | None:
        drawn = super()._draw(one)
        if drawn is None or one.draw is None or one.draw.sampling.logprobs is None:
            return drawn
        others = range(1, one.draw.sampling.logprobs + 1)
        top = tuple(((drawn.token_id + i) % VOCAB, -float(i)) for i in others)
        return SampledToken(drawn.token_id, -0.5, top)


class _Fleet(SimFleet):
    """Can be examined, too."""

    async def probe_source(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> ProbeTimes:
        return await self.processes[worker].worker.probe.source(tickets, num_tokens)

    async def probe_target(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> None:
        await self.processes[worker].worker.probe.target(tickets, num_tokens)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Skip the full collection: with thousands of tests in this process it takes a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
