"""A trace served by two prefill and two decode workers on virtual time: all parts real but the engine's arithmetic."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from msgspec import structs

from tests.simulation.fake_model import FakeEngine
from tests.simulation.fake_store import FakeStore, FakeSwapSpace
from tests.simulation.memory_network import MemoryFabric
from tests.simulation.memory_transport import LinkFabric
from tests.simulation.policies.traffic import ANSWER, TracedRequest
from tests.simulation.scenarios.scenario import Scenario, make_scenario
from tests.simulation.sim_fleet import SimFleet, SimProcess
from tests.simulation.sim_router import PROMISE_NOTHING, SimRouter
from tests.simulation.virtual_loop import run_virtually
from twostroke.decode_worker.config import DecodeConfig
from twostroke.model.step import BlockCopy, OnLayer, SequenceStep
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.protocol.errors import RequestError
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import GenerateRequest, Promise, SampledToken, SamplingParams
from twostroke.protocol.stats import Role, StepCosts
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.observe.stages import Stages
from twostroke.router.routing.chooser import Policy
from twostroke.router.slo.classes import SLOConfig


@dataclass(frozen=True)
class Calibration:
    """One kind of worker."""

    costs: StepCosts
    layout: KVLayout
    link_bytes_per_s: float
    source: str


SMALL_MODEL = Calibration(
    # 4,900 prompt tokens a second at 1k tokens, of which attention takes a tenth; steps of 3.2, 4.5 and 13 ms for 1, 8
    # and 32 requests with 256 tokens of context each.
    costs=StepCosts(base_s=2.9e-3, token_s=1.83e-4, pair_s=4.0e-8, row_s=2.0e-4, context_s=4.5e-7),
    layout=KVLayout("160m", "bfloat16", num_layers=12, num_kv_heads=4, head_dim=64, block_size=16),
    link_bytes_per_s=1e9,
    source="docs/performance-log.md: `twostroke bench engine` with the 160m model, 2 threads; a link of 1 GB/s",
)


class TimedEngine(FakeEngine):
    """Computes nothing. The store has few layers: the last one stands for the model's last, the others for the rest."""

    costs = SMALL_MODEL.costs

    def __init__(self, store: FakeStore, swap_space: FakeSwapSpace | None = None):
        super().__init__(store, swap_space)
        self._one_at_a_time = asyncio.Lock()
        self.busy_s = 0.0

    async def step(
        self,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        copies: Sequence[BlockCopy] = (),
    ) -> list[SampledToken | None]:
        async with self._one_at_a_time:
            seconds = self._seconds(batch)
            self.num_steps += 1
            self.busy_s += seconds
            if on_layer is None:
                await asyncio.sleep(seconds)
            else:
                await asyncio.sleep(seconds * (1 - 1 / SMALL_MODEL.layout.num_layers))
                for layer in range(self._num_layers - 1):
                    on_layer(layer)
                await asyncio.sleep(seconds / SMALL_MODEL.layout.num_layers)
                on_layer(self._num_layers - 1)
            return [None if one.draw is None else SampledToken(ANSWER) for one in batch]

    def _seconds(self, batch: Sequence[SequenceStep]) -> float:
        rows = [one.start + 1 for one in batch if len(one.token_ids) == 1]
        prompts = [(len(one.token_ids), one.start) for one in batch if len(one.token_ids) > 1]
        return (
            self.costs.base_s
            + sum(self.costs.prompt_s(num_new, num_before) for num_new, num_before in prompts)
            + self.costs.decode_s(len(rows), sum(rows))
        )


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
        windows=(0,) * FAKE_LAYERS,
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


# --- runs in numbers, over all seeds of a policy ---


@dataclass(frozen=True)
class Result:
    """One policy on one kind of trace. Times in seconds."""

    mean_ttft_s: float
    p90_ttft_s: float
    p99_ttft_s: float
    mean_tpot_s: float
    hit_rate: float  # prompt tokens that were cached, or pulled, of all
    prefill_busy: float
    decode_busy: float


def result_of(runs: Sequence[Run]) -> Result:
    """All requests of all runs count alike."""
    served = [one for run in runs for one in run.served]
    ttfts = [one.ttft_s for one in served]
    return Result(
        mean_ttft_s=mean(ttfts),
        p90_ttft_s=percentile(ttfts, 0.9),
        p99_ttft_s=percentile(ttfts, 0.99),
        mean_tpot_s=mean([one.tpot_s for one in served]),
        hit_rate=sum(one.num_cached_tokens for one in served) / sum(one.num_prompt_tokens for one in served),
        prefill_busy=mean([run.prefill_busy for run in runs]),
        decode_busy=mean([run.decode_busy for run in runs]),
    )


def mean(values: Sequence[float]) -> float:
    """Raises ZeroDivisionError for none."""
    return sum(values) / len(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them don't exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
