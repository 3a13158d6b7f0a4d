"""The index of a tier's objects as routers are told of it, and counts of their uses. On virtual time."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from tests.protocol.test_block_reports import Router
from tests.rigs.played import played_by
from twostroke.kvtiers.tier_index import TierIndex, UseCounts
from twostroke.protocol.block_hash import short_name
from twostroke.protocol.messages import BlocksChanged, BlocksHeld
from twostroke.simulator.virtual_loop import run_virtually
from twostroke.worker import token_server as block_reports
from twostroke.worker.token_server import BlockReports

PIECE, ROWS = 8, 3


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reports, "PIECE_BLOCKS", PIECE)


def name(number: int) -> bytes:
    return bytes([0xA0]) + number.to_bytes(31, "little")


def rows(number: int, count: int = ROWS) -> bytes:
    """The hashes of an object's rows, which no other object has."""
    return b"".join((1000 * number + row).to_bytes(16, "little") for row in range(count))


def add(index: TierIndex, *numbers: int, count: int = ROWS) -> None:
    for number in numbers:
        index.add(name(number), rows(number, count))


class Wire:
    """A connection that carries one piece each time that it is let."""

    def __init__(self) -> None:
        self._may_go = asyncio.Event()
        self._may_go.set()

    async def drain(self) -> None:
        await self._may_go.wait()

    def stop(self) -> None:
        self._may_go.clear()

    def go_on(self) -> None:
        self._may_go.set()


@dataclass
class Scene:
    """A tier's index, reported to a router that believes what it is told."""

    index: TierIndex
    reports: BlockReports
    router: Router
    wire: Wire
    held: list[BlocksHeld] = field(default_factory=list)

    def ask(self) -> None:
        self.reports.begin("router-0", self.wire)  # type: ignore[arg-type]

    def truth(self) -> set[int]:
        packed = b"".join(self.index._rows.values())
        return {short_name(packed[start : start + 16]) for start in range(0, len(packed), 16)}


def play(script: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        index, router, wire = TierIndex(), Router(None, tiers=Router(None)), Wire()  # type: ignore[arg-type]
        held: list[BlocksHeld] = []

        def send(router_id: str, connection: object, message: BlocksHeld | BlocksChanged) -> None:
            router.hear(message)
            if isinstance(message, BlocksHeld):
                held.append(message)

        reports = BlockReports(index, send, is_tier=True)
        await script(Scene(index, reports, router.tiers, wire, held))  # type: ignore[arg-type]
        await reports.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtually(main())


@played_by(play)
async def test_a_router_is_told_every_object_that_was_there_in_pieces_of_whole_objects(scene: Scene) -> None:
    add(scene.index, *range(20))
    for number in (3, 4, 19):
        scene.index.discard(name(number))
    scene.ask()
    await asyncio.sleep(0.2)
    assert (scene.router.is_whole, scene.router.gaps) == (True, 0)
    assert scene.router.names == scene.truth()
    assert len(scene.router.names) == 17 * ROWS
    told = sum(len(message.names) // 8 for message in scene.held)
    assert (told, len(scene.held)) == (17 * ROWS, 8), "each object once"


@played_by(play)
async def test_a_router_is_told_what_comes_and_goes_afterwards(scene: Scene) -> None:
    add(scene.index, 1, 2)
    scene.ask()
    await asyncio.sleep(0.2)
    scene.index.discard(name(1))
    add(scene.index, 3)
    add(scene.index, 2)  # known already
    scene.index.discard(name(9))  # never was
    await asyncio.sleep(0.2)
    assert (scene.router.changes, scene.router.gaps) == (1, 0)
    assert scene.router.names == scene.truth() == {1000 * number + row for number in (2, 3) for row in range(ROWS)}
    scene.index.discard(name(3))
    add(scene.index, 3)
    await asyncio.sleep(0.2)
    assert scene.router.names == scene.truth()


@pytest.mark.parametrize("seed", range(20))
@played_by(play)
async def test_a_router_ends_up_right_though_the_index_changes_while_it_is_told(scene: Scene, seed: int) -> None:
    draw = random.Random(seed)
    add(scene.index, *range(30))
    scene.ask()
    for _ in range(80):
        match draw.randrange(6):
            case 0:
                draw.choice((scene.wire.stop, scene.wire.go_on))()
            case 1:
                await asyncio.sleep(draw.choice((0.0, 0.01, 0.1)))
            case 2:
                scene.ask()
            case 3 | 4:
                add(scene.index, draw.randrange(60), count=draw.choice((1, ROWS, ROWS, 2 * ROWS)))
            case _:
                scene.index.discard(name(draw.randrange(60)))
        await asyncio.sleep(0)
    scene.wire.go_on()
    await asyncio.sleep(1.0)
    assert (scene.router.is_whole, scene.router.gaps) == (True, 0)
    assert scene.router.names == scene.truth()
    assert len(scene.index) == len(scene.index.object_names())


@played_by(play)
async def test_the_place_of_a_forgotten_object_is_used_again(scene: Scene) -> None:
    for number in range(100):
        add(scene.index, number)
        if number >= 4:
            scene.index.discard(name(number - 4))
    assert (len(scene.index), scene.index.num_blocks) == (4, 5 * ROWS)
    scene.ask()
    await asyncio.sleep(0.2)
    assert scene.router.names == scene.truth()


@played_by(play)
async def test_nothing_is_recorded_once_the_router_has_left(scene: Scene) -> None:
    scene.ask()
    await asyncio.sleep(0.1)
    scene.reports.end("router-0")
    add(scene.index, 1)
    with pytest.raises(ValueError, match="no changes"):
        scene.index.take_changes()


# --- uses ---


def test_uses_of_a_name_are_counted_and_those_of_the_names_used_longest_ago_are_forgotten() -> None:
    uses = UseCounts(most_names=2)
    assert [uses.use(rows(number, 1)) for number in (1, 1, 2, 1)] == [1, 2, 1, 3]
    assert uses.use(rows(3, 1)) == 1  # 2 has been forgotten for it
    assert [uses.use(rows(number, 1)) for number in (1, 2)] == [4, 1]
