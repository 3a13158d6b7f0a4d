"""The whole path in one process, without Ray: real engines, real sockets, real transfers, the real pipeline."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from twostroke.cluster.config.sections import ModelSection, WorkerResources
from twostroke.cluster.config.worker_settings import WorkerSettings
from twostroke.cluster.ranks.worker_parts import WorkerParts, load_parts
from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.policy import DecodePolicy, EvenPolicy, decode_role
from twostroke.kvtiers.config import TiersConfig
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.transports.tcp import TcpStream
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.prefill_worker.policy import PrefillPolicy, prefill_role
from twostroke.protocol.clock import draw_epoch
from twostroke.protocol.errors import WorkerLost
from twostroke.protocol.messages import ProbeTimes
from twostroke.protocol.network import TcpNetwork
from twostroke.protocol.requests import DecodeReply, GenerateRequest, Peer, PrefillReply, SamplingParams, Ticket
from twostroke.protocol.stats import Role, WorkerInfo, WorkerStats
from twostroke.router.generate.config import PipelineConfig
from twostroke.router.generate.pipeline import FleetKnowledge, Pipeline
from twostroke.router.request_state import ChoiceJob, RequestState
from twostroke.router.token_channels import TokenChannels
from twostroke.worker.role import Policies
from twostroke.worker.token_server import TokenServerConfig
from twostroke.worker.worker import Worker

SECRET = b"a secret of these tests"
HOST = "127.0.0.1"
GREEDY = SamplingParams(temperature=0.0)
VOCAB = 96  # of the checkpoints that tests write

Answer = TypeVar("Answer")


ONLY_PAIRS: dict[str, Any] = {"roles": "fixed", "decodes_alone": False}
"""Each prompt goes by the prefill worker, whatever the router expects it to cost there."""


@dataclass(frozen=True)
class Shape:
    """Sizes and settings of a fleet."""

    transport: str | None  # None: aggregated, no prefill worker
    block_size: int = 16
    decode_block_size: int | None = None  # None: the same
    prefill_step_tokens: int = 2048
    decode_step_tokens: int = 512
    num_blocks: int = 2048
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    decode_quantization: str = "none"
    has_mtp: bool = False  # the model's MTP head is loaded
    num_prefill: int = 1
    num_decode: int = 1
    prefill_ranks: int = 1
    decode_ranks: int = 1
    prefill_stages: int = 1
    decode_stages: int = 1
    whole_experts: Role | None = None  # whose ranks hold some experts whole
    shares_context: tuple[Role, ...] = ()  # whose ranks share each block's tokens
    redundant_experts: int = 0  # and for how many of a layer's they have room beside
    router_wait_s: float = 30.0
    swap_bytes: int = 0
    decode: Mapping[str, Any] = field(default_factory=dict)  # more of DecodeConfig
    token_channel: Mapping[str, Any] = field(default_factory=dict)  # of TokenServerConfig
    pull_wait_s: float = 30.0  # an offer comes, however busy this machine is
    pipeline: PipelineConfig = field(default_factory=lambda: PipelineConfig(pulls=False, **ONLY_PAIRS))
    transfers: TransferConfig = field(default_factory=TransferConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)


@dataclass
class LocalFleet:
    """Implements router.fleet.Fleet over workers of this process."""

    infos: list[WorkerInfo] = field(default_factory=list)
    by_peer: dict[Peer, Worker] = field(default_factory=dict)
    parts: dict[Peer, WorkerParts] = field(default_factory=dict)

    def workers(self) -> Sequence[WorkerInfo]:
        return self.infos

    async def prefill(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> PrefillReply:
        return await self.by_peer[worker].prefill(request, ticket, pull)

    async def score_prompt(self, worker: Peer, request: GenerateRequest) -> PrefillReply:
        return await self.by_peer[worker].score_prompt(request)

    async def decode(
        self, worker: Peer, request: GenerateRequest, ticket: Ticket | None, pull: Ticket | None = None
    ) -> DecodeReply:
        return await self.by_peer[worker].decode(request, ticket, pull)

    async def probe_source(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> ProbeTimes:
        return await self.by_peer[worker].probe.source(tickets, num_tokens)

    async def probe_target(self, worker: Peer, tickets: Sequence[Ticket], num_tokens: int) -> None:
        await self.by_peer[worker].probe.target(tickets, num_tokens)

    def worker(self, role: Role, number: int = 0) -> Worker:
        """One of this role, in the order of their start."""
        return self.by_peer[[info.peer for info in self.infos if info.role == role][number]]

    def engine(self, role: Role, number: int = 0) -> Any:
        """The engine of one of this role."""
        peers = [info.peer for info in self.infos if info.role == role]
        return self.parts[peers[number]].deps.engine

    def stats(self, role: Role, number: int = 0) -> WorkerStats:
        """The numbers of one of this role."""
        return self.worker(role, number).stats()


@dataclass(frozen=True)
class Served:
    """A running fleet and the pipeline before it."""

    fleet: LocalFleet
    pipeline: Pipeline
    channels: TokenChannels

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams, states: list[RequestState] | None = None
    ) -> list[int]:
        """The output tokens of one request that ignores EOS. Its record is appended to `states`."""
        state = new_state(GenerateRequest("", "", tuple(prompt), len(prompt), sampling, max_tokens))
        if states is not None:
            states.append(state)
        tokens: list[int] = []
        async with contextlib.aclosing(self.pipeline.generate(state)) as events:
            async for event in events:
                assert event.index == len(tokens)
                tokens.extend(token.token_id for token in event.tokens)
        return tokens

    async def idle(self) -> None:
        """Return once no worker owns a block or serves a request."""
        # A link of torch.distributed may take several leases: TCPStore asks DNS for its peers' names, and each answer
        # that is lost costs it 5 s.
        async with asyncio.timeout(60):
            # Workers tell nobody when they become idle: that would be an event without a reader.
            while any(w.stats().owned_blocks or w.stats().num_running for w in self.fleet.by_peer.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def new_state(request: GenerateRequest) -> RequestState:
    """The record of a request that has just come."""
    return RequestState(ChoiceJob(request), time.monotonic())


Ask = Callable[[Served], Awaitable[list[list[int]]]]


def asking(prompts: Sequence[Sequence[int]], num_tokens: int) -> Ask:
    """Return what asks for a greedy answer of so many tokens to each of the prompts, all at once."""

    async def ask(served: Served) -> list[list[int]]:
        return await asyncio.gather(*(served.generate(prompt, num_tokens, GREEDY) for prompt in prompts))

    return ask


async def check_cold_and_warm(served: Served, ask: Ask, expected: list[list[int]]) -> dict[Role, int]:
    """Check the answers twice, and that no transfer failed. Return the blocks that were found the second time."""
    roles: set[Role] = {info.role for info in served.fleet.infos}
    assert await ask(served) == expected
    await served.idle()
    before = {role: served.fleet.stats(role).prefix_hits for role in roles}
    assert await ask(served) == expected, "with a warm prefix cache"
    await served.idle()
    stats = served.fleet.stats("decode")
    num_sent = 2 * len(expected) if "prefill" in roles else 0
    assert (stats.transfers_done, stats.transfers_failed) == (num_sent, 0)
    return {role: served.fleet.stats(role).prefix_hits - before[role] for role in roles}


def before_steps(engine: Any, deed: Callable[[int], Awaitable[None]]) -> None:
    """Have `deed` done before each of an engine's steps from now on; it gets the step's number, from 1 on."""
    step, numbers = engine.step, itertools.count(1)

    async def do_and_step(*args: Any) -> Any:
        await deed(next(numbers))
        return await step(*args)

    engine.step = do_and_step


def die_at(engine: Any, number: int) -> list[int]:
    """Have an engine fail from a step on, as one that is killed. Return a list that gets the steps' numbers."""
    failed: list[int] = []

    async def die(step: int) -> None:
        if step >= number:
            failed.append(step)
            raise WorkerLost("killed")

    before_steps(engine, die)
    return failed


def flip_a_bit(monkeypatch: pytest.MonkeyPatch, is_meant: Callable[[TcpStream], bool] = lambda _: True) -> list[int]:
    """Have the first piece that a TCP link which `is_meant` reads arrive with a wrong bit.

    Return a list that then has the piece's bytes.
    """
    read, flipped = TcpStream._read, list[int]()

    def read_and_flip(stream: TcpStream, views: Sequence[memoryview]) -> int:
        num_bytes = read(stream, views)
        if not flipped and is_meant(stream):
            flipped.append(views[0].nbytes)
            views[0].cast("B")[views[0].nbytes // 2] ^= 1
        return num_bytes

    monkeypatch.setattr(TcpStream, "_read", read_and_flip)
    return flipped


@contextlib.asynccontextmanager
async def serve(folder: Path, shape: Shape) -> AsyncIterator[Served]:
    """Decode workers, and prefill workers where the shape names a transport."""
    fleet = LocalFleet()
    network = TcpNetwork(SECRET)
    async with contextlib.AsyncExitStack() as stack:
        for number in range(shape.num_decode):
            await _add_worker(stack, folder, shape, "decode", f"decode-{number}", fleet)
        for number in range(0 if shape.transport is None else shape.num_prefill):
            await _add_worker(stack, folder, shape, "prefill", f"prefill-{number}", fleet)
        router = Peer("router", draw_epoch())
        knowledge = FleetKnowledge(network=network, router=router, clock=time.monotonic, config=shape.pipeline)
        stack.push_async_callback(knowledge.channels.close)
        pipeline = Pipeline(fleet=fleet, knowledge=knowledge, secret=SECRET)
        yield Served(fleet, pipeline, knowledge.channels)


def of_one_worker(folder: Path, ask: Callable[[Served], Awaitable[Answer]], shape: Shape | None = None) -> Answer:
    """Return the right answer: that of one worker of one rank with room for everything."""

    async def run() -> Answer:
        async with serve(folder, shape or Shape(None, num_blocks=256)) as served:
            return await ask(served)

    return asyncio.run(run())


def worker_settings(folder: Path, shape: Shape, role: Role, ranks: int) -> WorkerSettings:
    """Return the settings of a worker's ranks."""
    return WorkerSettings(
        model=ModelSection(
            path=str(folder),
            dtype=shape.dtype,  # type: ignore[arg-type]
            kv_cache_dtype=shape.kv_cache_dtype,  # type: ignore[arg-type]
            quantization=shape.decode_quantization if role == "decode" else "none",  # type: ignore[arg-type]
        ),
        resources=WorkerResources(
            num_blocks=shape.num_blocks,
            tensor_parallel=ranks,
            pipeline_parallel=shape.prefill_stages if role == "prefill" else shape.decode_stages,
            expert_parallel=role == shape.whole_experts,
            context_parallel=role in shape.shares_context,
            redundant_experts=shape.redundant_experts if role == shape.whole_experts and ranks > 1 else 0,
        ),
        max_step_tokens=shape.prefill_step_tokens,
        max_batch=64,
        block_size=(role == "decode" and shape.decode_block_size) or shape.block_size,
        device="cpu",
        threads=1,
        transfer=shape.transfers.model_copy(update={"transport": shape.transport or "tcp"}),
        swap_bytes=shape.swap_bytes,
        has_mtp=shape.has_mtp,
        tiers=shape.tiers,
    )


async def _add_worker(
    stack: contextlib.AsyncExitStack, folder: Path, shape: Shape, role: Role, name: str, fleet: LocalFleet
) -> None:
    """Start a worker, whose rank 0 is in this process; the stack ends it and all that it stands on."""
    peer, network = Peer(name, draw_epoch()), TcpNetwork(SECRET)
    ranks = shape.prefill_ranks if role == "prefill" else shape.decode_ranks
    settings = worker_settings(folder, shape, role, ranks)
    parts = await load_parts(settings, peer, network, SECRET, host=HOST)
    stack.push_async_callback(parts.close)
    if role == "prefill":
        config = PrefillConfig(
            max_step_tokens=shape.prefill_step_tokens,
            pull_wait_s=shape.pull_wait_s,
            token_channel=TokenServerConfig(**shape.token_channel),
        )
        worker_role = prefill_role(config)
    else:
        decode_config = DecodeConfig(
            max_step_tokens=shape.decode_step_tokens,
            router_wait_s=shape.router_wait_s,
            token_channel=TokenServerConfig(**shape.token_channel),
            **{"max_batch": min(256, shape.decode_step_tokens), **shape.decode},
        )
        worker_role = decode_role(decode_config)
    policies: Policies = {"prefill": PrefillPolicy, "decode": DecodePolicy, "even": EvenPolicy}
    worker = Worker(worker_role, parts.deps, parts.rank.loaded.swap_space, policies)
    stack.push_async_callback(worker.stop)
    parts.watch(worker.engine_lost)
    fleet.infos.append(await worker.start(HOST))
    fleet.by_peer[peer], fleet.parts[peer] = worker, parts
