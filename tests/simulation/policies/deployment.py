"""A trace served by two prefill and two decode workers on virtual time: all parts real but the engine's arithmetic."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace

from msgspec import structs

from tests.simulation.memory_network import MemoryFabric
from tests.simulation.memory_transport import LinkFabric
from tests.simulation.policies.calibration import SMALL_MODEL
from tests.simulation.policies.timed_engine import TimedEngine
from tests.simulation.policies.traffic import TracedRequest
from tests.simulation.scenario import Scenario, make_scenario
from tests.simulation.sim_fleet import SimFleet, SimProcess
from tests.simulation.sim_router import PROMISE_NOTHING, SimRouter
from tests.simulation.virtual_loop import run_virtually
from twostroke.decode_worker.config import DecodeConfig
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.protocol.errors import RequestError
from twostroke.protocol.requests import GenerateRequest, Promise, SamplingParams
from twostroke.protocol.stats import Role
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.observe.stages import Stages
from twostroke.router.routing.chooser import Policy
from twostroke.router.slo.classes import SLOConfig

PREFILL_CACHE_TOKENS = 32_000
"""Of each prefill worker: less than all conversations that are under way, so that it matters who gets which."""
DECODE_CACHE_TOKENS = 64_000
FAKE_LAYERS = 2
FAKE_TOKEN_BYTES = 8 * FAKE_LAYERS  # tests/simulation/fake_store.py


@dataclass(frozen=True)
class Served:
    """What became of one request. Times in seconds; `refused`: with 429, and nothing else is known."""

    promise: Promise
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    refused: bool = False
    computed_twice: bool = False  # by the decode worker, though a prefill worker was asked to


@dataclass(frozen=True)
class Run:
    """One trace under one policy."""

    served: tuple[Served, ...]
    prefill_busy: float  # share of its time that a prefill worker computed, mean
    decode_busy: float


class _Fleet(SimFleet):
    """Workers that tell routers the small model's layout, and whose links are as fast as its KV is large."""

    engine_type = TimedEngine

    async def start(self, role: Role) -> SimProcess:
        process = await super().start(role)
        process.info = structs.replace(process.info, layout=SMALL_MODEL.layout)
        return process


def serve(
    trace: list[TracedRequest],
    policy: Policy,
    *,
    seed: int = 0,
    slo: SLOConfig = PROMISE_NOTHING,
    decode_cache_tokens: int = DECODE_CACHE_TOKENS,
) -> Run:
    """Run the trace to its end; with classes that promise something, some requests are refused."""
    scenario = _scenario(policy, seed, decode_cache_tokens)
    return run_virtually(_Deployment(trace, scenario, slo).run(), limit_s=100_000.0)


class _Deployment:
    def __init__(self, trace: list[TracedRequest], scenario: Scenario, slo: SLOConfig):
        self._trace = trace
        self._slo = slo
        self._scenario = scenario

    async def run(self) -> Run:
        self._clock = asyncio.get_running_loop().time
        scenario = self._scenario
        fabric = MemoryFabric(scenario.seed, typical_latency_s=0.0002)
        fleet = _Fleet(scenario, fabric, LinkFabric(bytes_per_s=scenario.link_bytes_per_s), lambda line: None)
        roles: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
        processes = [await fleet.start(role) for role in roles]
        router = SimRouter(0, fleet, fabric, scenario.pipeline, self._slo)
        began_s = self._clock()
        clients = [asyncio.create_task(self._client(number, one, router)) for number, one in enumerate(self._trace)]
        served = await asyncio.gather(*clients)
        seconds = self._clock() - began_s
        busy = [process.engine.busy_s / seconds for process in processes if isinstance(process.engine, TimedEngine)]
        await router.close()
        for process in processes:
            await fleet.end(process)
        await fleet.close()
        return Run(tuple(served), prefill_busy=sum(busy[:2]) / 2, decode_busy=sum(busy[2:]) / 2)

    async def _client(self, number: int, traced: TracedRequest, router: SimRouter) -> Served:
        await asyncio.sleep(traced.at_s)
        request = GenerateRequest(
            request_id=f"template-{number}",
            router_id="",
            token_ids=traced.token_ids,
            num_prompt_tokens=len(traced.token_ids),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=traced.num_output_tokens,
            promise=traced.promise,
        )
        stages = Stages(arrive=self._clock())
        served = Served(traced.promise, traced.at_s, request.num_prompt_tokens, traced.num_output_tokens)
        try:
            await router.spawn(_read(router, request, stages))
        except RequestError as error:
            if error.status != 429:
                raise
            return replace(served, refused=True)
        finally:
            router.admission.ended(request, stages.num_output_tokens, stages.predicted, stages.tpot_s)
        if stages.first_token is None or stages.finish is None:
            raise RuntimeError(f"{request.request_id} has ended without a token")
        return replace(
            served,
            num_cached_tokens=stages.num_cached_tokens,
            ttft_s=stages.first_token - stages.arrive,
            tpot_s=(stages.finish - stages.first_token) / max(1, traced.num_output_tokens - 1),
            computed_twice=stages.transfer_s == 0.0,
        )


async def _read(router: SimRouter, request: GenerateRequest, stages: Stages) -> None:
    async with aclosing(router.pipeline.generate(request, stages)) as events:
        async for _ in events:
            pass


def _scenario(policy: Policy, seed: int, decode_cache_tokens: int) -> Scenario:
    block_size = SMALL_MODEL.layout.block_size
    real_token_bytes = SMALL_MODEL.layout.block_bytes * SMALL_MODEL.layout.num_layers / block_size
    return replace(
        make_scenario(0),
        seed=seed,
        num_layers=FAKE_LAYERS,
        prefill_block_size=block_size,
        decode_block_size=block_size,
        transports=("memory_pull",),
        num_routers=1,
        num_prefill=2,
        num_decode=2,
        prefill_blocks=PREFILL_CACHE_TOKENS // block_size,
        decode_blocks=decode_cache_tokens // block_size,
        swap_blocks=0,
        prefill=PrefillConfig(),
        decode=DecodeConfig(),
        pipeline=PipelineConfig(policy=policy, request_timeout_s=10_000.0),
        max_chunk_bytes=1 << 22,
        link_bytes_per_s=SMALL_MODEL.link_bytes_per_s * FAKE_TOKEN_BYTES / real_token_bytes,
        max_context=8192,
    )
