"""One worker alone on virtual time, with a router's connection, and another to pull from: for the workers' tests."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.rigs.played import Script, played_by
from tests.simulation.fake_model import FakeEngine, expected_tokens
from twostroke.decode_worker.config import DecodeConfig
from twostroke.decode_worker.policy import DecodePolicy, EvenPolicy, decode_role
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.ranks import Outgoing
from twostroke.prefill_worker.config import PrefillConfig
from twostroke.prefill_worker.policy import PrefillPolicy, prefill_role
from twostroke.protocol.errors import ConnectionLost, TransferFailed
from twostroke.protocol.messages import (
    Hello,
    KVHello,
    KVNotSent,
    Offer,
    Reach,
    RequestsBlocked,
    StatsFrame,
    TokenFrame,
    Welcome,
)
from twostroke.protocol.network import Connection
from twostroke.protocol.requests import (
    Address,
    GenerateRequest,
    Peer,
    SampledToken,
    SamplingParams,
    Ticket,
    mint_ticket,
)
from twostroke.protocol.stats import Role, WorkerInfo, WorkerStats
from twostroke.simulator.memory_network import MemoryConnection, MemoryFabric
from twostroke.simulator.memory_store import FakeStore, FakeSwapSpace, SpoilingPool, fake_layout
from twostroke.simulator.memory_transport import KINDS, LinkFabric, Parts, parts_around
from twostroke.simulator.sim_fleet import SimStorage, SimTiers, TierPlan
from twostroke.simulator.virtual_loop import describe, run_virtually
from twostroke.worker.deps import WorkerDeps
from twostroke.worker.role import Policies
from twostroke.worker.scheduling.job import SequenceState
from twostroke.worker.transfers import PrefixExports, Transfers
from twostroke.worker.worker import Worker

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
    return list(enumerate(expected_tokens(request, (0,) * LAYERS)))


def make_parts(
    peer: Peer, fabric: MemoryFabric, links: LinkFabric, *, num_blocks: int = 32, block_size: int = BLOCK
) -> Parts:
    """All that a worker named `peer` needs besides an engine."""
    store = FakeStore(fake_layout(num_layers=LAYERS, block_size=block_size), num_blocks=num_blocks)
    return parts_around(store, peer, fabric.at(peer.worker_id), links, TRANSFERS, SECRET)


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
        """True where the request has its answer: the first token with the reply, or all by the token channel."""
        if self.info.role == "prefill":
            return list(enumerate(token.token_id for token in reply.event.tokens)) == expected(request)[:1]
        await a_moment()
        return self.events()[request.request_id] == expected(request)

    async def connect_router(self, router_id: str = ROUTER) -> MemoryConnection:
        """Open a token channel, and keep what comes in `frames` and `not_sent`."""
        connection = await self.fabric.at(router_id).connect(self.info.token_address)
        connection.send(Hello(Peer(router_id, 1), self.info.peer))
        assert isinstance(await connection.receive(), Welcome)
        assert isinstance(await connection.receive(), RequestsBlocked)
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
        """Start a listener that never sends a message: transfers to it end by their lease. Return its address."""

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
    script: Callable[[Rig], Awaitable[None]], *, role: Role, num_blocks: int = 32, swap_blocks: int = 0, **config: Any
) -> None:
    """Run `script` with a worker; afterwards nothing of it may be left."""

    async def main() -> None:
        async with running_worker(role, num_blocks, swap_blocks, config) as rig:
            await script(rig)
        assert rig.pool.owned_blocks == rig.worker.stats().swapped_blocks == 0
        rig.pool.check_integrity()
        await asyncio.sleep(1.0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, [describe(task) for task in left if task is not None]

    run_virtually(main())


def of_both_roles(**settings: Any) -> Callable[[Script], Callable[..., None]]:
    """A test that is played with a prefill worker, and again with a decode worker."""
    return lambda test: pytest.mark.parametrize("role", ["prefill", "decode"])(
        played_by(play, "role", **settings)(test)
    )


@asynccontextmanager
async def running_worker(
    role: Role,
    num_blocks: int,
    swap_blocks: int,
    config: dict[str, Any],
    tiers: tuple[SimStorage, TierPlan] | None = None,
) -> AsyncIterator[Rig]:
    """Start a worker, with tiers over this storage where there is one."""
    fabric, links = MemoryFabric(seed=1), LinkFabric(bytes_per_s=1e5)
    clock = asyncio.get_running_loop().time
    peer = PREFILL if role == "prefill" else DECODE
    parts = make_parts(peer, fabric, links, num_blocks=num_blocks)
    swap_space = FakeSwapSpace(parts.store, num_blocks=swap_blocks) if swap_blocks else None
    pool, engine = parts.pool, FakeEngine(parts.store, swap_space)
    own: SimTiers | None = None
    if tiers is not None:
        storage, plan = tiers
        own = storage.make_tiers(plan, role, peer, parts.store.layout, parts.network, links, TRANSFERS)
    deps = WorkerDeps(
        peer,
        engine,
        parts.store,
        pool,
        parts.network,
        parts.sender,
        parts.receiver,
        clock,
        max_context=100,
        tiers=None if own is None else own.tiers,
    )
    if role == "prefill":
        worker_role = prefill_role(PrefillConfig(**config))
    else:
        worker_role = decode_role(DecodeConfig(**{"max_batch": 8, "max_step_tokens": 16} | config))
    policies: Policies = {"prefill": PrefillPolicy, "decode": DecodePolicy, "even": EvenPolicy}
    worker = Worker(worker_role, deps, swap_space, policies)
    rig = Rig(worker, await worker.start("host"), pool, engine, fabric, links)
    await rig.connect_router()
    try:
        yield rig
    finally:
        await worker.stop()
        await parts.close()
        if own is not None:
            await own.parts.transports.close()
        for connection in (rig.router, rig.prefill):
            if connection is not None:
                await connection.close()


def begin(call: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """Start a call of the worker."""
    return asyncio.create_task(call, name="call")


async def a_moment() -> None:
    """Wait until frames under way have arrived."""
    await asyncio.sleep(0.1)


# --- a worker beside the rig's, whose prefix cache holds what it is told to ---


SOURCE = Peer("source-9", 99)


@dataclass
class Source:
    """Another worker, with nothing but a cache and the sending side of its transfers."""

    rig: Rig
    peer: Peer
    parts: Parts
    exports: PrefixExports
    transfers: Transfers

    async def compute(self, request: GenerateRequest) -> None:
        """Have the request's whole blocks in the cache."""
        sequence = SequenceState(request, self.parts.store.layout.block_size)
        sequence.reserve(self.parts.pool, sequence.num_uncomputed)
        await FakeEngine(self.parts.store).step([sequence.step(sequence.num_uncomputed)])
        sequence.computed(self.parts.pool, len(request.token_ids))
        sequence.reset(self.parts.pool)

    def ticket(self, name: str = "r", target: Peer | None = None, secret: bytes = SECRET) -> Ticket:
        """Permission for a transfer from here to the rig's worker, or `target`."""
        info = self.rig.info
        return mint_ticket(secret, name, self.peer, target or info.peer, info.transfer_addresses)

    def send(self, ticket: Ticket, request: GenerateRequest) -> bool:
        """Send a prefix, like PrefixExports.send_prefix."""
        return self.exports.send_prefix(ticket, request.token_ids, request.cache_salt, request.log_context)

    def offer(self, request: GenerateRequest) -> Ticket:
        """Send what is cached of a request to the rig's worker, which is to be told so with this ticket."""
        ticket = self.ticket(request.request_id)
        self.send(ticket, request)
        return ticket

    async def hand_over(self, ticket: Ticket, request: GenerateRequest) -> tuple[Outgoing, SampledToken | None]:
        """Compute a prompt, and offer all of it as a prefill worker does; the first token is to be committed."""
        sequence = SequenceState(request, self.parts.store.layout.block_size)
        num_tokens = sequence.num_uncomputed
        sequence.reserve(self.parts.pool, num_tokens)
        (token,) = await FakeEngine(self.parts.store).step([sequence.step(num_tokens)])
        transfer = self.parts.sender.begin_transfer(ticket, num_tokens, sequence.block_ids, num_tokens)

        async def see_off() -> None:
            with suppress(TransferFailed):
                await transfer.done()
            sequence.reset(self.parts.pool)

        self.transfers.track(see_off(), "hand over")
        return transfer, token

    def vanish(self) -> None:
        """Nothing of this worker reaches anybody any more."""
        self.rig.fabric.cut(self.peer.worker_id)
        self.rig.links.cut(self.peer.worker_id)


@asynccontextmanager
async def source_beside(
    rig: Rig, num_cached: int = 0, *, peer: Peer = SOURCE, block_size: int = BLOCK
) -> AsyncIterator[Source]:
    """It has the blocks of so many tokens of a request cached. Afterwards nothing of it may be left."""
    parts = make_parts(peer, rig.fabric, rig.links, block_size=block_size)
    transfers = Transfers()
    exports = PrefixExports(sender=parts.sender, pool=parts.pool, transfers=transfers)
    try:
        source = Source(rig, peer, parts, exports, transfers)
        if num_cached:
            await source.compute(a_request(num_cached))
        yield source
    finally:
        await parts.sender.close()
        await transfers.all_ended()
        await parts.close()
        assert parts.pool.owned_blocks == 0
        parts.pool.check_integrity()
