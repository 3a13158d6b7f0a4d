"""The whole path in one process, without Ray: real engines, real sockets, real transfers, the real pipeline."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from decode_worker.config import DecodeConfig
from decode_worker.worker import DecodeWorker
from kvtransfer.config import TransferConfig
from kvtransfer.receiver import KVReceiver
from kvtransfer.sender import KVSender
from kvtransfer.transports import make_transport
from model.block_pool import BlockPool
from model.load import EngineConfig, LoadedEngine, load_engine
from prefill_worker.config import PrefillConfig
from prefill_worker.worker import PrefillWorker
from protocol.clock import draw_epoch
from protocol.requests import DecodeReply, GenerateRequest, PrefillReply, SamplingParams
from protocol.stats import WorkerInfo, WorkerStats
from protocol.tcp_network import TcpNetwork
from protocol.tickets import Peer, Ticket
from router.pipeline import Pipeline
from router.stages import Stages
from router.token_channels import TokenChannels

SECRET = b"a secret of these tests"
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Shape:
    """How a fleet is built."""

    transport: str | None  # None: aggregated, no prefill worker
    block_size: int = 16
    prefill_step_tokens: int = 2048
    decode_step_tokens: int = 512
    num_blocks: int = 2048
    dtype: str = "float32"


@dataclass
class LocalFleet:
    """Implements router.fleet.Fleet over workers of this process."""

    infos: list[WorkerInfo] = field(default_factory=list)
    by_peer: dict[Peer, PrefillWorker | DecodeWorker] = field(default_factory=dict)

    def workers(self) -> Sequence[WorkerInfo]:
        return self.infos

    async def prefill(self, worker: Peer, request: GenerateRequest, ticket: Ticket | None) -> PrefillReply:
        called = self.by_peer[worker]
        assert isinstance(called, PrefillWorker)
        return await called.prefill(request, ticket)

    async def decode(self, worker: Peer, request: GenerateRequest, ticket: Ticket | None) -> DecodeReply:
        called = self.by_peer[worker]
        assert isinstance(called, DecodeWorker)
        return await called.decode(request, ticket)

    def stats(self, role: str) -> WorkerStats:
        """The numbers of the only worker of this role."""
        (info,) = [info for info in self.infos if info.role == role]
        return self.by_peer[info.peer].stats()


@dataclass(frozen=True)
class Served:
    """A running fleet and the pipeline before it."""

    fleet: LocalFleet
    pipeline: Pipeline

    async def generate(self, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams) -> list[int]:
        """The output tokens of one request that ignores EOS."""
        request = GenerateRequest("", "", tuple(prompt), len(prompt), sampling, max_tokens)
        tokens: list[int] = []
        async with contextlib.aclosing(self.pipeline.generate(request, Stages(time.monotonic()))) as events:
            async for event in events:
                assert event.index == len(tokens)
                tokens.extend(token.token_id for token in event.tokens)
        return tokens

    async def idle(self) -> None:
        """Return once no worker owns a block or serves a request."""
        async with asyncio.timeout(10):
            # Workers tell nobody when they become idle: that would be an event without a reader.
            while any(w.stats().owned_blocks or w.stats().num_running for w in self.fleet.by_peer.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serve(folder: Path, shape: Shape) -> AsyncIterator[Served]:
    """One decode worker, and one prefill worker where the shape names a transport."""
    fleet = LocalFleet()
    network = TcpNetwork(SECRET)
    async with contextlib.AsyncExitStack() as stack:

        def load() -> LoadedEngine:
            loaded = load_engine(
                EngineConfig(
                    folder,
                    dtype=shape.dtype,  # type: ignore[arg-type]
                    block_size=shape.block_size,
                    num_blocks=shape.num_blocks,
                    threads=1,
                )
            )
            stack.callback(loaded.engine.close)
            return loaded

        loaded = load()
        peer = Peer("decode", draw_epoch())
        receiver = None
        if shape.transport is not None:
            transport = make_transport(shape.transport, loaded.kv_cache)
            stack.push_async_callback(transport.close)
            receiver = KVReceiver(
                peer=peer,
                store=loaded.kv_cache,
                network=network,
                transport=transport,
                config=TransferConfig(),
                clock=time.monotonic,
                secret=SECRET,
            )
        decode = DecodeWorker(
            peer=peer,
            config=DecodeConfig(max_step_tokens=shape.decode_step_tokens, max_batch=min(256, shape.decode_step_tokens)),
            engine=loaded.engine,
            store=loaded.kv_cache,
            pool=BlockPool(loaded.num_blocks, shape.block_size),
            network=network,
            receiver=receiver,
            clock=time.monotonic,
            max_context=loaded.max_context,
        )
        stack.push_async_callback(decode.stop)
        fleet.infos.append(await decode.start(HOST))
        fleet.by_peer[peer] = decode

        if shape.transport is not None:
            loaded = load()
            peer = Peer("prefill", draw_epoch())
            transport = make_transport(shape.transport, loaded.kv_cache)
            stack.push_async_callback(transport.close)
            sender = KVSender(
                peer=peer,
                store=loaded.kv_cache,
                network=network,
                transport=transport,
                config=TransferConfig(),
                clock=time.monotonic,
            )
            prefill = PrefillWorker(
                peer=peer,
                config=PrefillConfig(max_step_tokens=shape.prefill_step_tokens),
                engine=loaded.engine,
                store=loaded.kv_cache,
                pool=BlockPool(loaded.num_blocks, shape.block_size),
                network=network,
                sender=sender,
                clock=time.monotonic,
                max_context=loaded.max_context,
            )
            stack.push_async_callback(prefill.stop)
            fleet.infos.append(await prefill.start(HOST))
            fleet.by_peer[peer] = prefill

        router = Peer("router", draw_epoch())
        channels = TokenChannels(network=network, peer=router, clock=time.monotonic)
        stack.push_async_callback(channels.close)
        yield Served(
            fleet, Pipeline(fleet=fleet, channels=channels, secret=SECRET, clock=time.monotonic, router=router)
        )
