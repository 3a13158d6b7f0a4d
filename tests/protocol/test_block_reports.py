"""Reports of a prefix cache to routers, on the network in memory and on virtual time."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from tests.rigs.played import played_by
from tests.worker.test_token_server import noting
from twostroke.protocol.block_hash import short_name, unpack_names
from twostroke.protocol.messages import BlocksChanged, BlocksHeld, Hello, ReportBlocks, TokenFrame, Welcome
from twostroke.protocol.requests import Address, Peer, SampledToken, TokenEvent
from twostroke.simulator.memory_network import MemoryConnection, MemoryFabric
from twostroke.simulator.virtual_loop import run_virtually
from twostroke.worker import token_server
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.token_server import TokenServer, TokenServerConfig

WORKER = Peer("prefill-0", 7)
PIECE = 8
NUM_BLOCKS = 5 * PIECE - 3


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_server, "PIECE_BLOCKS", PIECE)


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


def cache(pool: BlockPool, *numbers: int) -> None:
    """Put blocks of these names into the prefix cache, in the place of the oldest."""
    blocks = pool.allocate(len(numbers))
    for block, number in zip(blocks, numbers, strict=True):
        pool.publish(block, name(number))
    pool.release(blocks)


@dataclass
class Router:
    """One that believes what it is told."""

    connection: MemoryConnection
    names: set[int] = field(default_factory=set)
    sequence: int | None = None
    is_whole: bool = False
    pieces: int = 0
    changes: int = 0
    tokens: int = 0
    gaps: int = 0
    tiers: "Router | None" = None  # knows what it is told of KV tiers

    def ask(self, *, cache: bool = True, tiers: bool = True) -> None:
        self.connection.send(ReportBlocks(cache, tiers))

    async def read(self) -> None:
        while True:
            self.hear(await self.connection.receive())

    def hear(self, message: object) -> None:
        match message:
            case (BlocksHeld(is_tier=True) | BlocksChanged(is_tier=True)) as of_tiers if self.tiers is not None:
                self.tiers.hear(msgspec.structs.replace(of_tiers, is_tier=False))
            case BlocksHeld(packed, is_first, is_last, sequence, False):
                if is_first:
                    self.names.clear()
                self.names.update(unpack_names(packed))
                self.sequence, self.is_whole = sequence, is_last
                self.pieces += 1
            case BlocksChanged(sequence, stored, removed, False):
                if self.sequence is None or sequence != self.sequence + 1:
                    self.gaps += 1
                self.sequence = sequence
                self.names.update(unpack_names(stored))
                self.names.difference_update(unpack_names(removed))
                self.changes += 1
            case TokenFrame():
                self.tokens += 1


@dataclass
class Scene:
    """A started server over a block pool."""

    fabric: MemoryFabric
    pool: BlockPool
    server: TokenServer
    address: Address
    lost: list[tuple[str, str]]
    tiers: BlockPool | None

    async def connect(self, router_id: str = "router-0", *, reads: bool = True) -> Router:
        connection = await self.fabric.at(router_id).connect(self.address)
        connection.send(Hello(Peer(router_id, 1), WORKER))
        assert await connection.receive() == Welcome(WORKER)
        router = Router(connection, tiers=Router(connection))
        if reads:
            asyncio.create_task(router.read()).add_done_callback(lambda task: task.exception())
        return router

    def truth(self) -> set[int]:
        return {short_name(one) for one in self.pool.names(0, self.pool.num_blocks)}


def play(script: Callable[[Scene], Awaitable[None]], num_blocks: int = NUM_BLOCKS, *, has_tiers: bool = False) -> None:
    async def main() -> None:
        tiers = BlockPool(2 * num_blocks, 4) if has_tiers else None
        fabric, pool, lost = MemoryFabric(seed=1), BlockPool(num_blocks, 4), list[tuple[str, str]]()
        server = TokenServer(
            **noting(lost),
            peer=WORKER,
            network=fabric.at("prefill-0"),
            config=TokenServerConfig(lease_s=1000.0, max_unsent_bytes=100_000),
            blocks=pool,
            clock=asyncio.get_running_loop().time,
            tier_blocks=tiers,
        )
        await script(Scene(fabric, pool, server, await server.start("host"), lost, tiers))
        await server.close()
        for connection in list(fabric.connections):
            await connection.close()
        await asyncio.sleep(1.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtually(main())


@played_by(play)
async def test_a_router_that_asks_is_told_all_names_in_pieces_each_time_and_one_that_does_not_none(
    scene: Scene,
) -> None:
    router, other = await scene.connect(), await scene.connect("router-1")
    router.ask()
    await asyncio.sleep(0.2)
    assert (router.names, router.pieces, router.is_whole) == (set(), 2, True)  # the cache is empty
    cache(scene.pool, *range(NUM_BLOCKS))
    await asyncio.sleep(0.2)
    assert router.names == set(range(NUM_BLOCKS)) == scene.truth()
    pieces, router.names = router.pieces, {999}
    router.ask()
    await asyncio.sleep(0.2)
    assert (router.names, router.pieces - pieces, router.is_whole) == (scene.truth(), 5, True)
    assert (other.pieces, other.changes) == (0, 0)


@played_by(play)
async def test_changes_are_gathered_and_told_to_all_who_asked_under_one_number(scene: Scene) -> None:
    routers = [await scene.connect(f"router-{index}") for index in range(2)]
    for router in routers:
        router.ask()
    await asyncio.sleep(0.1)
    for number in range(10):
        cache(scene.pool, number)
    await asyncio.sleep(0.2)
    cache(scene.pool, 10)
    await asyncio.sleep(0.2)
    for router in routers:
        assert (router.changes, router.sequence, router.gaps) == (2, 2, 0)
        assert router.names == scene.truth() == set(range(11))


@played_by(play)
async def test_nothing_is_recorded_while_nobody_listens(scene: Scene) -> None:
    cache(scene.pool, 1)
    with pytest.raises(ValueError, match="no changes"):
        scene.pool.take_changes()
    router = await scene.connect()
    router.ask()
    await asyncio.sleep(0.1)
    cache(scene.pool, 2)
    await router.connection.close()
    await asyncio.sleep(0.1)
    with pytest.raises(ValueError, match="no changes"):
        scene.pool.take_changes()


@pytest.mark.parametrize("seed", range(20))
@played_by(play)
async def test_what_a_router_knows_is_right_though_the_cache_changes_while_it_is_told(scene: Scene, seed: int) -> None:
    draw = random.Random(seed)
    cache(scene.pool, *range(NUM_BLOCKS))
    slow = await scene.connect()
    routers = [slow, await scene.connect("router-1")]
    for _ in range(60):
        match draw.randrange(8):
            case 0:
                draw.choice(routers).ask()
            case 1:
                await asyncio.sleep(draw.choice((0.0, 0.001, 0.1)))
            case _:
                cache(scene.pool, *draw.sample(range(2 * NUM_BLOCKS), draw.choice((1, 3, NUM_BLOCKS))))
                await asyncio.sleep(0)
    for router in routers:
        router.ask()
    await asyncio.sleep(0.001)
    cache(scene.pool, *draw.sample(range(2 * NUM_BLOCKS), 3))
    await asyncio.sleep(1.0)
    for router in routers:
        assert router.is_whole
        assert router.gaps == 0
        assert router.names == scene.truth()


@played_by(play)
async def test_more_changes_than_can_be_told_at_once_are_told_as_all_names(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twostroke.protocol.block_hash.MAX_CHANGES", 20)
    router = await scene.connect()
    router.ask()
    await asyncio.sleep(0.1)
    before = router.pieces
    cache(scene.pool, *range(21))
    await asyncio.sleep(0.2)
    assert router.changes == 0
    assert router.pieces > before
    assert router.names == scene.truth() == set(range(21))
    cache(scene.pool, 30)
    await asyncio.sleep(0.2)
    assert (router.changes, router.gaps) == (1, 0)
    assert router.names == scene.truth()


@played_by(play, num_blocks=40_000)
async def test_all_names_of_a_large_cache_drop_no_router_and_pass_by_its_tokens(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_server, "PIECE_BLOCKS", 1000)
    cache(scene.pool, *range(40_000))  # 320 kB of names, where 100 kB unread get a router dropped
    router = await scene.connect(reads=False)
    router.ask()
    await asyncio.sleep(0.5)
    tokens_after: list[int] = []
    event = TokenEvent("request", 0, (SampledToken(5),))
    while not router.is_whole:
        scene.server.emit("router-0", [event])
        await asyncio.sleep(0.01)
        heard = await router.connection.receive()
        router.hear(heard)
        if isinstance(heard, TokenFrame):
            tokens_after.append(router.pieces)
    assert scene.lost == []
    assert router.names == scene.truth()
    assert min(tokens_after) < 20, "tokens wait for a part of the names only"


@played_by(play)
async def test_a_router_that_asks_and_never_reads_is_dropped_for_what_else_it_leaves_unread(scene: Scene) -> None:
    cache(scene.pool, *range(NUM_BLOCKS))
    router = await scene.connect(reads=False)
    router.ask()
    await asyncio.sleep(0.1)
    event = TokenEvent("request", 0, (SampledToken(5),) * 500)
    for _ in range(1000):
        scene.server.emit("router-0", [event])
    assert scene.lost == [("lost", "router-0")]
    cache(scene.pool, 100)


# --- KV tiers ---


@played_by(play, has_tiers=True)
async def test_blocks_of_tiers_are_told_and_numbered_apart_from_the_caches(scene: Scene) -> None:
    assert scene.tiers is not None
    router = await scene.connect()
    assert router.tiers is not None
    cache(scene.tiers, *range(100, 120))
    router.ask()
    await asyncio.sleep(0.2)
    assert (router.names, router.tiers.names, router.tiers.is_whole) == (set(), set(range(100, 120)), True)
    for number in range(3):
        cache(scene.pool, number)
        await asyncio.sleep(0.2)
    cache(scene.tiers, 7)
    await asyncio.sleep(0.2)
    assert (router.sequence, router.tiers.sequence, router.gaps, router.tiers.gaps) == (3, 1, 0, 0)
    assert router.names == scene.truth() == {0, 1, 2}
    assert router.tiers.names == {7, *range(100, 120)}


@played_by(play, has_tiers=True)
async def test_a_router_that_missed_news_of_one_is_told_that_one_anew(scene: Scene) -> None:
    router = await scene.connect()
    assert router.tiers is not None
    router.ask()
    await asyncio.sleep(0.2)
    pieces = router.pieces, router.tiers.pieces
    router.ask(cache=False)
    await asyncio.sleep(0.2)
    assert (router.pieces, router.tiers.pieces) == (pieces[0], 2 * pieces[1])
    router.ask(tiers=False)
    await asyncio.sleep(0.2)
    assert (router.pieces, router.tiers.pieces) == (2 * pieces[0], 2 * pieces[1])


@played_by(play, has_tiers=True)
async def test_no_change_of_tiers_is_recorded_once_the_router_has_left(scene: Scene) -> None:
    assert scene.tiers is not None
    router = await scene.connect()
    router.ask()
    await asyncio.sleep(0.1)
    await router.connection.close()
    await asyncio.sleep(0.1)
    with pytest.raises(ValueError, match="no changes"):
        scene.tiers.take_changes()


@played_by(play)
async def test_a_worker_without_tiers_tells_nothing_of_them(scene: Scene) -> None:
    router = await scene.connect()
    router.ask(cache=False)
    await asyncio.sleep(0.2)
    assert router.tiers is not None
    assert (router.pieces, router.tiers.pieces) == (0, 0)
