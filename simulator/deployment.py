"""A trace served on virtual time, event by event: all parts real but the engine's arithmetic."""

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import structs

from twostroke.decode_worker.config import DecodeConfig
from twostroke.model.step import BlockCopy, OnLayer, SequenceStep
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.protocol.errors import ConfigError, RequestError
from twostroke.protocol.requests import GenerateRequest, Promise, SampledToken, SamplingParams
from twostroke.protocol.stats import Role
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.request_state import ChoiceJob, RequestState
from twostroke.router.routing.chooser import Policy, Roles
from twostroke.router.slo.classes import SLOConfig
from twostroke.simulator.memory_network import MemoryFabric
from twostroke.simulator.memory_store import FakeStore, FakeSwapSpace
from twostroke.simulator.memory_transport import LinkFabric
from twostroke.simulator.sim_fleet import PROMISE_NOTHING, FleetPlan, SimFleet, SimProcess, SimRouter
from twostroke.simulator.virtual_loop import run_virtually
from twostroke.worker.config import QueuePolicy, SpeculationConfig
from twostroke.worker.profile import BLOCK_TOKENS, WorkerProfile
from twostroke.worker.step_costs import StepContent

ANSWER = 7
"""The token that simulated engines draw, and the first of those that they draw in pieces that repeat."""
NEW = 1 << 20
"""The first of the tokens that they draw elsewhere, each once."""
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0
STRETCH = 24  # tokens that are one token again and again, a piece's own, or that are new, in one piece
STANDARD = Promise()
LIMIT_S = 1e6  # of virtual time
_TICK_S = 1e-9
WARM_PROMPTS, WARM_ANSWER, WARM_AT_A_TIME = (16, 400, 64, 200, 30, 128), 16, 3  # tokens, and requests
UNANSWERED_S = 1.0  # for which a user pauses who was refused, as the load test's do
FAKE_LAYERS = 2
FAKE_TOKEN_BYTES = 8 * FAKE_LAYERS  # simulator/memory_store.py


@dataclass(frozen=True)
class TracedRequest:
    """One request of a trace, or of a conversation the first."""

    at_s: float  # of a later turn: seconds of thinking after the answer before it
    token_ids: tuple[int, ...]  # of a later turn: what is new in it
    num_output_tokens: int
    promise: Promise = STANDARD
    then: tuple["TracedRequest", ...] = ()
    """Later turns. Each has before it what was said so far, and is asked only where that was answered."""


@dataclass(frozen=True)
class Users:
    """A closed loop: so many users, each of whom asks again `think_s` after an answer, until `seconds` are over."""

    count: int
    think_s: float
    seconds: float


class WorkerCrash(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker that crashes; another starts in its place at once."""

    at_s: float
    role: Role
    which: int = 0  # of those that are there, in turn


@dataclass(frozen=True)
class SimulatedRequest:
    """Outcome of one request. Times are in seconds. `refused` means 429, and nothing else is known."""

    promise: Promise
    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    refused: bool = False
    computed_twice: bool = False  # by the decode worker, though a prefill worker was asked to
    token_s: tuple[float, ...] = ()  # when the client was told of each event
    ended_at: Role = "decode"  # role of the worker that wrote the last token
    num_moves: int = 0  # times that its stream went on at another worker


@dataclass(frozen=True)
class SimulatedRun:
    """One trace under one policy."""

    served: tuple[SimulatedRequest, ...]
    prefill_busy: float  # share of its time that a prefill worker computed, mean; 0 without any
    decode_busy: float


class SharedMachine:
    """Resources that workers of one machine share: each other worker that computes slows a step by as much as one
    does (`WorkerProfile.beside`)."""

    def __init__(self) -> None:
        self._computing = 0
        self._waiting: list[asyncio.Future[bool]] = []

    async def compute(self, alone_s: float, beside_s: float, part: float = 1.0) -> None:
        """Return when this part of a step is done, which takes so long with nobody, or somebody, beside it."""
        if alone_s == beside_s:
            await asyncio.sleep(part * alone_s)
            return
        loop = asyncio.get_running_loop()
        self._change(1)
        try:
            is_done = False
            while not is_done:
                whole_s = alone_s + (self._computing - 1) * (beside_s - alone_s)
                began, changed = loop.time(), loop.create_future()
                self._waiting.append(changed)
                timer = loop.call_later(max(0.0, part * whole_s), _settle, changed, True)
                is_done = await changed
                timer.cancel()
                part -= (loop.time() - began) / whole_s
        finally:
            self._change(-1)

    def _change(self, by: int) -> None:
        """Somebody begins or ends: whoever computes looks how far it has come, and goes on at another pace."""
        self._computing += by
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            _settle(one, False)


def _settle(future: "asyncio.Future[bool]", is_done: bool) -> None:
    if not future.done():
        future.set_result(is_done)


class TimedEngine:
    """Computes nothing. The store has few layers: the last one stands for the model's last, the others for the rest."""

    num_broken_rows = 0

    def __init__(self, profile: WorkerProfile, machine: SharedMachine):
        self.died: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.busy_s = 0.0
        self._profile = profile
        self._machine = machine
        self._one_at_a_time = asyncio.Lock()

    async def step(
        self,
        batch: Sequence[SequenceStep],
        on_layer: OnLayer | None = None,
        copies: Sequence[BlockCopy] = (),
    ) -> list[SampledToken | None]:
        """Run a step as Engine.step does. Copies take no time."""
        async with self._one_at_a_time:
            content, began = StepContent.of(batch), asyncio.get_running_loop().time()
            alone_s = content.expected_s(self._profile.costs)
            beside_s = content.expected_s(self._profile.beside or self._profile.costs)
            last_layer = 0.0 if on_layer is None else 1 / self._profile.num_layers
            await self._machine.compute(alone_s, beside_s, 1 - last_layer)
            if on_layer is not None:
                for layer in range(FAKE_LAYERS - 1):
                    on_layer(layer)
                await self._machine.compute(alone_s, beside_s, last_layer)
                on_layer(FAKE_LAYERS - 1)
            self.busy_s += asyncio.get_running_loop().time() - began
            repeated = self._profile.repeated
            return [
                None if one.draw is None else SampledToken(answer_token(one.start + len(one.token_ids), repeated))
                for one in batch
            ]


def answer_token(position: int, repeated: float) -> int:
    """Return the token at a position of any sequence, of which the share `repeated` is in pieces that repeat."""
    if not repeated:
        return ANSWER
    piece = position // STRETCH
    # Multiples of the golden ratio are even over the whole: short answers have the share, too.
    return ANSWER + piece if piece * GOLDEN % 1.0 < repeated else NEW + position


class _Fleet(SimFleet[TimedEngine]):
    """Workers that tell routers their profile's layout, and whose links are as fast as its KV is large."""

    def __init__(self, plan: FleetPlan, profiles: Mapping[Role, WorkerProfile], fabric: MemoryFabric):
        sender, machine = profiles["prefill"], SharedMachine()

        def engine(role: Role, store: FakeStore, swap_space: FakeSwapSpace | None) -> TimedEngine:
            return TimedEngine(profiles[role], machine)

        links = LinkFabric(bytes_per_s=sender.link_bytes_per_s * FAKE_TOKEN_BYTES / sender.kv_bytes)
        super().__init__(plan, engine, fabric, links, lambda line: None)
        self._call_s = profiles["decode"].call_s
        self._layout = profiles["decode"].layout
        self._machine = "shared" if any(profile.beside for profile in profiles.values()) else ""

    async def start(self, role: Role) -> SimProcess[TimedEngine]:
        process = await super().start(role)
        process.info = structs.replace(process.info, layout=self._layout, machine=self._machine)
        return process

    def _latency(self) -> float:
        return super()._latency() if self._call_s is None else self._call_s / 2


def serve(
    trace: Iterable[TracedRequest],
    policy: Policy,
    profile: WorkerProfile,
    *,
    prefill_profile: WorkerProfile | None = None,
    users: Users | None = None,
    decodes_alone: bool = True,
    roles: Roles = "flexible",
    prefill: int = 2,
    decode: int = 2,
    prefill_cache_tokens: int,
    decode_cache_tokens: int,
    seed: int = 0,
    slo: SLOConfig = PROMISE_NOTHING,
    faults: Sequence[WorkerCrash] = (),
    progress: Callable[[int], None] | None = None,
    max_context: int = 8192,
    until_s: float = math.inf,
    warm: int = 0,
    queue: QueuePolicy = "edf",
) -> SimulatedRun:
    """Run the trace to its end; with classes that promise something, some requests are refused.

    Without prefill workers the fleet is aggregated; with them, decode workers read prompts where that is quicker,
    unless not `decodes_alone`. With `users` each takes the next of `trace`, whenever that was to come; what is to be
    asked after `until_s` in a conversation is not. Before the trace begins, `warm` requests of many lengths teach the
    workers what their steps cost, as a server that has been used knows. `progress` is told how many requests have
    ended. `profile` is of decode workers, and, unless `prefill_profile` is given, of all.
    """
    sender = structs.replace(prefill_profile or profile, repeated=profile.repeated)
    drafts = SpeculationConfig(method="ngram" if profile.repeated else "off")
    plan = FleetPlan(
        seed=seed,
        windows=(0,) * FAKE_LAYERS,
        prefill_block_size=BLOCK_TOKENS,
        decode_block_size=BLOCK_TOKENS,
        transports=("memory_pull",),
        prefill_blocks=prefill_cache_tokens // BLOCK_TOKENS,
        decode_blocks=decode_cache_tokens // BLOCK_TOKENS,
        swap_blocks=0,
        prefill=PrefillConfig(
            max_step_tokens=sender.step_tokens, max_batch=sender.max_batch, queue=queue, speculation=drafts
        ),
        decode=DecodeConfig(
            max_step_tokens=profile.step_tokens, max_batch=profile.max_batch, queue=queue, speculation=drafts
        ),
        max_chunk_bytes=1 << 22,
        max_context=max_context,
    )
    pipeline = PipelineConfig(policy=policy, request_timeout_s=10_000.0, decodes_alone=decodes_alone, roles=roles)
    deployment = _Deployment(trace, plan, {"prefill": sender, "decode": profile}, pipeline, slo, users, until_s, warm)
    deployment.progress = progress
    return run_virtually(deployment.run(prefill, decode, faults), limit_s=LIMIT_S)


class _Deployment:
    def __init__(
        self,
        trace: Iterable[TracedRequest],
        plan: FleetPlan,
        profiles: Mapping[Role, WorkerProfile],
        pipeline: PipelineConfig,
        slo: SLOConfig,
        users: Users | None,
        until_s: float,
        warm: int,
    ):
        self._trace = iter(trace)
        self._users = users
        self._until_s = until_s
        self._warm = warm
        self._served: list[SimulatedRequest] = []
        self._plan = plan
        self._profiles = profiles
        self._http_s = profiles["decode"].http_s
        self._pipeline = pipeline
        self._slo = slo
        self._num_ended = 0
        self.progress: Callable[[int], None] | None = None

    async def run(self, prefill: int, decode: int, faults: Sequence[WorkerCrash]) -> SimulatedRun:
        self._clock = asyncio.get_running_loop().time
        fabric = MemoryFabric(self._plan.seed, typical_latency_s=0.0002)
        fleet = _Fleet(self._plan, self._profiles, fabric)
        prefills: list[Role] = ["prefill"] * prefill
        decodes: list[Role] = ["decode"] * decode
        processes = [await fleet.start(role) for role in (*prefills, *decodes)]
        router = SimRouter(0, fleet, fabric, self._pipeline, self._slo)
        await self._warm_up(router)
        began_s = self._clock()
        striking = [asyncio.create_task(_strike(fault, fleet)) for fault in faults]
        self._began_s = began_s
        self._served.clear()
        asking: list[asyncio.Task[Any]]
        if self._users is None:
            asking = [asyncio.create_task(self._converse(one, one.at_s, router)) for one in self._trace]
        else:
            users = self._users
            asking = [asyncio.create_task(self._use(users, router)) for _ in range(users.count)]
        try:
            await asyncio.gather(*asking)
        finally:
            seconds = max(self._clock() - began_s, _TICK_S)
            for task in (*striking, *asking):
                task.cancel()
            await asyncio.gather(*striking, *asking, return_exceptions=True)
            await router.close()
            for process in list(fleet.processes.values()):
                await fleet.end(process)
            await fleet.close()
        served = sorted(self._served, key=lambda one: one.at_s)
        busy = [process.engine.busy_s / seconds for process in processes]
        prefill_busy = sum(busy[:prefill]) / prefill if prefill else 0.0
        return SimulatedRun(tuple(served), prefill_busy, decode_busy=sum(busy[prefill:]) / decode)

    async def _warm_up(self, router: SimRouter) -> None:
        self._began_s = self._clock()
        lengths = [WARM_PROMPTS[number % len(WARM_PROMPTS)] for number in range(self._warm)]
        for number in range(0, len(lengths), WARM_AT_A_TIME):
            requests = [
                TracedRequest(0.0, tuple(random.Random(number + index).choices(range(10_000), k=tokens)), WARM_ANSWER)
                for index, tokens in enumerate(lengths[number : number + WARM_AT_A_TIME])
            ]
            await asyncio.gather(*(self._converse(one, 0.0, router) for one in requests))

    async def _use(self, users: Users, router: SimRouter) -> None:
        at_s = 0.0
        while at_s < users.seconds and (traced := next(self._trace, None)) is not None:
            at_s = await self._converse(traced, at_s, router) + users.think_s

    async def _converse(self, first: TracedRequest, at_s: float, router: SimRouter) -> float:
        """All turns of one conversation, from `at_s` on, as far as they are answered. Returns when the last ended."""
        history: tuple[int, ...] = ()
        for traced in (first, *first.then):
            if traced is not first:
                at_s = self._clock() - self._began_s + traced.at_s
                if at_s >= self._until_s:
                    break
            await asyncio.sleep(max(0.0, self._began_s + at_s - self._clock()))
            history += traced.token_ids
            served = await self._ask(history, at_s, traced, router)
            self._served.append(served)
            if served.refused:
                await asyncio.sleep(0.0 if self._users is None else UNANSWERED_S)
                break
            repeated = self._profiles["decode"].repeated
            places = range(len(history), len(history) + traced.num_output_tokens)
            history += tuple([answer_token(place, repeated) for place in places])
        return self._clock() - self._began_s

    async def _ask(
        self, history: tuple[int, ...], at_s: float, traced: TracedRequest, router: SimRouter
    ) -> SimulatedRequest:
        request = GenerateRequest(
            request_id=f"template-{len(self._served)}",
            router_id="",
            token_ids=history,
            num_prompt_tokens=len(history),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=traced.num_output_tokens,
            promise=traced.promise,
        )
        state = RequestState(ChoiceJob(request), self._clock())
        served = SimulatedRequest(traced.promise, at_s, request.num_prompt_tokens, traced.num_output_tokens)
        token_s: list[float] = []
        try:
            await asyncio.sleep(self._http_s / 2)
            await router.spawn(self._read(router, state, token_s))
        except RequestError as error:
            if error.status not in (429, 503):
                raise ConfigError(f"a request of the workload can't be served: {error}") from error
            return replace(served, refused=True)
        finally:
            router.admission.ended(request, state.num_output_tokens, state.predicted, state.tpot_s)
            self._num_ended += 1
            if self.progress is not None:
                self.progress(self._num_ended)
        if state.first_token is None or state.finish is None or state.path is None:
            raise RuntimeError(f"{request.request_id} has ended without a token")
        return replace(
            served,
            num_cached_tokens=state.num_cached_tokens,
            ttft_s=state.first_token - state.arrive + self._http_s / 2,
            tpot_s=(state.finish - state.first_token) / max(1, traced.num_output_tokens - 1),
            computed_twice=state.transfer_s == 0.0,
            ended_at=state.path.decode.role,
            num_moves=len(state.moves),
            token_s=tuple(moment - self._began_s + self._http_s / 2 for moment in token_s),
        )

    async def _read(self, router: SimRouter, state: RequestState, token_s: list[float]) -> None:
        async with aclosing(router.pipeline.generate(state)) as events:
            async for _ in events:
                token_s.append(self._clock())


async def _strike(fault: WorkerCrash, fleet: SimFleet[TimedEngine]) -> None:
    await asyncio.sleep(fault.at_s)
    there = [one for one in fleet.processes.values() if one.info.role == fault.role]
    if there:
        await fleet.replace(there[fault.which % len(there)])
