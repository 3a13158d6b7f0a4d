"""One worker alone on virtual time, with a router's connection: for the workers' own tests."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.fake_model import FakeEngine, expected_tokens
from tests.simulation.fake_store import FakeStore, FakeSwapSpace, SpoilingPool, fake_layout
from tests.simulation.memory_network import MemoryConnection, MemoryFabric
from tests.simulation.memory_transport import KINDS, LinkFabric, memory_transports
from tests.simulation.virtual_loop import describe, run_virtually
from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.worker import DecodeWorker
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender
from twostroke.kvtransfer.transports import Transports
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.prefill_worker.worker import PrefillWorker
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import (
    Convicted,
    Hello,
    KVHello,
    KVNotSent,
    Offer,
    Reach,
    StatsFrame,
    TokenFrame,
    Welcome,
)
from twostroke.protocol.network import Connection
from twostroke.protocol.requests import Address, GenerateRequest, Peer, SamplingParams, Ticket, mint_ticket
from twostroke.protocol.stats import WorkerInfo, WorkerStats
from twostroke.worker.worker import Equipment

SECRET = b"a secret of tests"
PREFILL, DECODE, ROUTER = Peer("prefill-0", 11), Peer("decode-0", 22), "router-0"
LAYERS, BLOCK = 2, 4
TRANSFERS = TransferConfig(lease_s=2.0, progress_s=4.0)


def a_request(length: int = 10, name: str = "r", **fields: Any) -> GenerateRequest:
    """A request of the router's; prompts of one length are equal."""
    values: dict[str, Any] = {"sampling": SamplingParams(seed=3), "max_tokens": 6} | fields
    return GenerateRequest(
        request_id=name,
        router_id=ROUTER,
        token_ids=tuple(range(length)),
        num_prompt_tokens=length,
        **values,
    )


def expected(request: GenerateRequest) -> list[tuple[int, int]]:
    """(index, token) of its whole answer."""
    return list(enumerate(expected_tokens(request, LAYERS)))


@dataclass(frozen=True)
class Parts:
    """A worker's blocks and both sides of its transfers."""

    store: FakeStore
    pool: SpoilingPool
    transports: Transports
    sender: KVSender
    receiver: KVReceiver


def make_parts(
    peer: Peer, fabric: MemoryFabric, links: LinkFabric, *, num_blocks: int = 32, block_size: int = BLOCK
) -> Parts:
    """All that a worker named `peer` needs besides an engine. Sender, receiver and transports are to be closed."""
    store = FakeStore(fake_layout(num_layers=LAYERS, block_size=block_size), num_blocks=num_blocks)
    transports = memory_transports(links, peer.worker_id, store)
    network, clock = fabric.at(peer.worker_id), asyncio.get_running_loop().time
    return Parts(
        store,
        SpoilingPool(store),
        transports,
        KVSender(peer=peer, store=store, network=network, transports=transports, config=TRANSFERS, clock=clock),
        KVReceiver(
            peer=peer,
            store=store,
            network=network,
            transports=transports,
            config=TRANSFERS,
            clock=clock,
            secret=SECRET,
        ),
    )


@dataclass
class Rig:
    """A started worker and all that it stands on."""

    worker: Any
    info: WorkerInfo
    pool: SpoilingPool
    engine: FakeEngine
    fabric: MemoryFabric
    links: LinkFabric
    frames: list[TokenFrame] = field(default_factory=list)
    numbers: list[WorkerStats] = field(default_factory=list)  # as the router was told of them
    not_sent: list[str] = field(default_factory=list)  # requests whose KV did not leave, as their router was told
    router: MemoryConnection | None = None
    prefill: MemoryConnection | None = None

    def events(self) -> dict[str, list[tuple[int, int]]]:
        """(index, token) of every token that reached the router, by request."""
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for frame in self.frames:
            for event in frame.events:
                found[event.request_id] += [
                    (event.index + offset, token.token_id) for offset, token in enumerate(event.tokens)
                ]
        return found

    def ticket(self, name: str = "r", source: Peer = PREFILL, target_address: Address | None = None) -> Ticket:
        """Permission for a transfer from `source` to DECODE."""
        own = self.info.transfer_addresses if self.info.role == "decode" else (Address("nobody", 1),)
        return mint_ticket(SECRET, name, source, DECODE, (target_address,) if target_address else own)

    def ask(self, request: GenerateRequest, ticket: Ticket | None = None, pull: Ticket | None = None) -> Any:
        """The worker's call, `prefill` or `decode`."""
        return getattr(self.worker, self.info.role)(request, ticket, pull)

    async def is_right(self, request: GenerateRequest, reply: Any) -> bool:
        """Whether the request has got its answer: the first token with the reply, or all by the token channel."""
        if self.info.role == "prefill":
            return list(enumerate(token.token_id for token in reply.event.tokens)) == expected(request)[:1]
        await a_moment()
        return self.events()[request.request_id] == expected(request)

    async def connect_router(self, router_id: str = ROUTER) -> MemoryConnection:
        """Open a token channel, and keep what comes in `frames` and `not_sent`."""
        connection = await self.fabric.at(router_id).connect(self.info.token_address)
        connection.send(Hello(Peer(router_id, 1), self.info.peer))
        assert isinstance(await connection.receive(), Welcome)
        assert isinstance(await connection.receive(), Convicted)
        asyncio.create_task(self._listen(connection), name="a router's reader")  # noqa: RUF006  (ends with it)
        self.router = connection
        return connection

    async def offer(self, length: int = 10, name: str = "r") -> Ticket:
        """Offer a transfer as PREFILL would, of which nothing more will come; returns its ticket."""
        connection = await self.fabric.at("prefill-0").connect(self.info.transfer_addresses[0])
        connection.send(Hello(PREFILL, DECODE, KVHello(self.info.layout, 0, "raw", Reach(KINDS, "one machine", "cpu"))))
        assert isinstance(await connection.receive(), Welcome)
        ticket = self.ticket(name)
        connection.send(Offer(ticket, length))
        self.prefill = connection
        await asyncio.sleep(0.1)
        return ticket

    async def silent_peer(self, worker_id: str) -> Address:
        """Where somebody listens who never says a word: transfers to it end by their lease."""

        async def say_nothing(connection: Connection) -> None:
            with suppress(ConnectionLost):
                while True:
                    await connection.receive()

        return (await self.fabric.at(worker_id).listen("", say_nothing)).address

    async def _listen(self, connection: MemoryConnection) -> None:
        while True:
            try:
                message = await connection.receive()
            except ConnectionLost:
                return
            assert isinstance(message, StatsFrame | TokenFrame | KVNotSent)
            if isinstance(message, KVNotSent):
                self.not_sent.append(message.request_id)
            if isinstance(message, TokenFrame):
                self.frames.append(message)
            if isinstance(message, StatsFrame):
                self.numbers.append(message.stats)


def play(
    script: Callable[[Rig], Awaitable[None]], *, role: str, num_blocks: int = 32, swap_blocks: int = 0, **config: Any
) -> None:
    """Run `script` with a worker; afterwards nothing of it may be left."""

    async def main() -> None:
        async with _running(role, num_blocks, swap_blocks, config) as rig:
            await script(rig)
        assert rig.pool.owned_blocks == rig.worker.stats().swapped_blocks == 0
        rig.pool.check_integrity()
        await asyncio.sleep(1.0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, [describe(task) for task in left if task is not None]

    run_virtually(main())


@asynccontextmanager
async def _running(role: str, num_blocks: int, swap_blocks: int, config: dict[str, Any]) -> AsyncIterator[Rig]:
    fabric, links = MemoryFabric(seed=1), LinkFabric(bytes_per_s=1e5)
    clock = asyncio.get_running_loop().time
    peer = PREFILL if role == "prefill" else DECODE
    parts = make_parts(peer, fabric, links, num_blocks=num_blocks)
    swap_space = FakeSwapSpace(parts.store, num_blocks=swap_blocks) if swap_blocks else None
    store, pool, network = parts.store, parts.pool, fabric.at(peer.worker_id)
    engine = FakeEngine(store, swap_space)
    equipment = Equipment(peer, engine, store, pool, network, parts.sender, parts.receiver, clock, max_context=100)
    worker: PrefillWorker | DecodeWorker
    if role == "prefill":
        worker = PrefillWorker(PrefillConfig(**config), equipment)
    else:
        config = {"max_batch": 8, "max_step_tokens": 16} | config
        worker = DecodeWorker(DecodeConfig(**config), equipment, swap_space)
    rig = Rig(worker, await worker.start("host"), pool, engine, fabric, links)
    await rig.connect_router()
    try:
        yield rig
    finally:
        await worker.stop()
        await parts.transports.close()
        for connection in (rig.router, rig.prefill):
            if connection is not None:
                await connection.close()


def begin(call: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """Start a call of the worker."""
    return asyncio.create_task(call, name="call")


async def a_moment() -> None:
    """Until frames under way have arrived."""
    await asyncio.sleep(0.1)
