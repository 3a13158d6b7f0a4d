"""Both kinds of links in memory keep the promises of kvtransfer/link.py, and the store tells who breaks them."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.simulation.fake_store import FakeStore, SpoilingPool, fake_layout
from tests.simulation.memory_transport import KINDS, LinkFabric, MemoryLink, memory_transports
from tests.simulation.virtual_loop import run_virtually
from twostroke.kvtransfer.rules.layout import Cut, Segment, cut_lane, plan_lanes
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import Run

SEAL = 7
BLOCKS = 12

pytestmark = pytest.mark.parametrize("kind", KINDS)


class Ends:
    """A link with the stores on both of its sides; the source's holds a different value in each place."""

    def __init__(self, source: KVLayout, target: KVLayout):
        self.source, self.target = FakeStore(source, num_blocks=BLOCKS), FakeStore(target, num_blocks=BLOCKS)
        for layer, memory in enumerate(self.source.layers):
            memory.flat = range(1000 * layer, 1000 * layer + memory.size)
        self.links = LinkFabric(bytes_per_s=1e5, establish_s=1.0)
        self.cuts = cut_lane(plan_lanes(1, 1, source.num_kv_heads)[0], source, target, "raw")

    async def join(self, kind: str) -> tuple[MemoryLink, MemoryLink]:
        near = memory_transports(self.links, "source", self.source).by_name[kind]
        far = memory_transports(self.links, "target", self.target).by_name[kind]
        pending = await far.prepare("target", self.cuts[1])
        sending = await near.join(pending.params, self.cuts[0])
        return sending, await pending.established()  # type: ignore[return-value]


def play(kind: str, scene: Callable[[Ends, MemoryLink, MemoryLink], Awaitable[None]], ends: Ends | None = None) -> None:
    async def main() -> None:
        layout = fake_layout(num_layers=2, block_size=4)
        both = ends if ends is not None else Ends(layout, layout)
        await scene(both, *await both.join(kind))

    run_virtually(main())


def units(cut: Cut, blocks: tuple[int, ...], num_units: int, layer: int = 0) -> tuple[Segment, ...]:
    """The first units of a block table."""
    return cut.segments([Run(layer, 0, num_units)], blocks)


@pytest.mark.parametrize("sizes", [(4, 4), (2, 4), (4, 2), (6, 4)])
def test_units_arrive_where_their_positions_lie_whatever_the_block_sizes(kind: str, sizes: tuple[int, int]):
    ends = Ends(*(fake_layout(num_layers=1, block_size=size) for size in sizes))
    tables = tuple(tuple(range(BLOCKS - 1, -1, -1))[: 12 // size] for size in sizes)
    num_units = 12 // ends.cuts[0].unit_tokens

    async def scene(_: Ends, near: MemoryLink, far: MemoryLink) -> None:
        sent = units(ends.cuts[0], tables[0], num_units)
        receiving = asyncio.create_task(far.receive(units(ends.cuts[1], tables[1], num_units), SEAL))
        await near.send(sent, SEAL)
        assert await receiving
        assert ends.target.read(0, tables[1], 12) == ends.source.read(0, tables[0], 12)

    play(kind, scene, ends)


def test_calls_that_overlap_are_carried_out_in_their_order(kind: str):
    async def scene(ends: Ends, near: MemoryLink, far: MemoryLink) -> None:
        source, target = ends.cuts
        sending = [asyncio.create_task(near.send(units(source, (block,), 1), block)) for block in range(5)]
        assert (
            await asyncio.gather(*(far.receive(units(target, (block + 5,), 1), block) for block in range(5)))
            == [True] * 5
        )
        await asyncio.gather(*sending)
        for block in range(5):
            assert ends.target.read(0, (block + 5,), 4) == ends.source.read(0, (block,), 4)

    play(kind, scene)


def test_a_changed_byte_or_another_seal_breaks_the_digest(kind: str):
    async def scene(ends: Ends, near: MemoryLink, far: MemoryLink) -> None:
        source, target = ends.cuts

        async def carry(sealed: int, expected: int) -> bool:
            receiving = asyncio.create_task(far.receive(units(target, (0, 1), 2), expected))
            await near.send(units(source, (0, 1), 2), sealed)
            return await receiving

        assert await carry(1, 1)
        assert not await carry(1, 2)
        ends.links.damage = lambda data: data.__setitem__(0, data[0] ^ 1)
        assert not await carry(1, 1)

    play(kind, scene)


def test_a_discarded_chunk_leaves_the_next_one_whole(kind: str):
    async def scene(ends: Ends, near: MemoryLink, far: MemoryLink) -> None:
        source, target = ends.cuts
        sending = [asyncio.create_task(near.send(units(source, (block, 3), 2), SEAL)) for block in (1, 2)]
        await far.discard(2)
        assert await far.receive(units(target, (0, 1), 2), SEAL)
        await asyncio.gather(*sending)
        assert ends.target.read(0, (0,), 4) == ends.source.read(0, (2,), 4)

    play(kind, scene)


def test_a_cancelled_call_or_a_close_breaks_the_link_for_both_sides(kind: str):
    async def cancelled(ends: Ends, near: MemoryLink, far: MemoryLink) -> None:
        receiving = asyncio.create_task(far.receive(units(ends.cuts[1], (0,), 1), SEAL))
        await asyncio.sleep(0.001)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        with pytest.raises(ConnectionLost):
            await near.send(units(ends.cuts[0], (0,), 1), SEAL)

    async def closed(ends: Ends, near: MemoryLink, far: MemoryLink) -> None:
        await near.close()
        with pytest.raises(ConnectionLost):
            await far.receive(units(ends.cuts[1], (0,), 1), SEAL)

    play(kind, cancelled)
    play(kind, closed)


def test_a_block_that_is_freed_or_given_away_while_a_link_writes_into_it_is_noticed(kind: str):
    async def scene(ends: Ends, near: MemoryLink, far: MemoryLink) -> None:
        pool = SpoilingPool(ends.target)
        for given_away in (False, True):
            ends.target.violations.clear()
            table = tuple(pool.allocate(BLOCKS))
            receiving = asyncio.create_task(far.receive(units(ends.cuts[1], table[:2], 2), SEAL))
            await asyncio.sleep(0)
            pool.release(table)
            if given_away:
                pool.allocate(BLOCKS)
            await near.send(units(ends.cuts[0], (0, 1), 2), SEAL)
            await receiving
            assert ends.target.violations
            assert ("another's" in ends.target.violations[0]) is given_away

    play(kind, scene)


def test_a_pull_link_reads_the_source_only_when_the_target_receives(kind: str):
    async def scene(ends: Ends, near: MemoryLink, far: MemoryLink) -> None:
        await near.send(units(ends.cuts[0], (0,), 1), SEAL)
        ends.source.spoil([0])
        assert await far.receive(units(ends.cuts[1], (0,), 1), SEAL) is (kind == "memory")

    play(kind, scene)
