"""What simulations stand on: virtual time, the network and the links in memory, and the model that is a hash."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from tests.simulation.fake_model import FakeEngine, expected_tokens
from tests.simulation.fake_store import FakeStore, SpoilingPool, fake_layout
from tests.simulation.memory_network import HIGH_WATER_BYTES, KERNEL_BYTES, MemoryConnection, MemoryFabric
from tests.simulation.memory_transport import KINDS, LinkFabric, MemoryLink, memory_transports
from tests.simulation.virtual_loop import PROCESS, SimulationStuck, VirtualLoop, run_virtually
from twostroke.kvtransfer.rules.layout import Cut, Segment, cut_lane, plan_lanes
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.messages import Cancel, Run
from twostroke.protocol.network import Connection
from twostroke.protocol.requests import GenerateRequest, SamplingParams
from twostroke.worker.sequence import SequenceState

# --- virtual time: it jumps, it is ordered, and it never hangs ---


def test_an_hour_of_sleep_passes_at_once():
    async def main() -> float:
        await asyncio.sleep(3000.0)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_virtually(main()) == pytest.approx(3000.0)
    assert time.monotonic() - began < 60.0


def test_sleepers_wake_in_the_order_of_their_time():
    async def main() -> list[int]:
        woken: list[int] = []

        async def sleeper(number: int) -> None:
            await asyncio.sleep(number * 0.1)
            woken.append(number)

        await asyncio.gather(*(sleeper(number) for number in (3, 1, 2, 0)))
        return woken

    assert run_virtually(main()) == [0, 1, 2, 3]


def test_a_timeout_ends_a_wait_after_exactly_its_time():
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.5):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == pytest.approx(7.5)


def test_a_deadlock_raises_and_names_who_waits_where():
    async def waits_for_nobody() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(waits_for_nobody(), name="the forgotten one")

    with pytest.raises(SimulationStuck, match="deadlock") as caught:
        run_virtually(main())
    assert any("the forgotten one" in note and "waits_for_nobody" in note for note in caught.value.__notes__)


def test_timers_that_go_on_for_ever_are_stopped_by_the_limit():
    async def main() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(1.0)

    with pytest.raises(SimulationStuck, match="still running after 100"):
        run_virtually(main(), limit_s=100.0)


def test_tasks_that_run_without_time_passing_are_stopped():
    async def main() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(SimulationStuck, match="no time passes"):
        run_virtually(main())


def test_a_set_of_tasks_iterates_in_the_same_order_in_every_run():
    async def main() -> list[str]:
        tasks = {asyncio.create_task(asyncio.sleep(1.0), name=f"task {number}") for number in range(200)}
        order = [task.get_name() for task in tasks]
        await asyncio.gather(*tasks)
        return order

    assert run_virtually(main()) == run_virtually(main())


def test_a_stopped_process_does_nothing_until_it_is_continued_and_the_others_go_on():
    done: list[tuple[str, float]] = []

    async def ticks(name: str) -> None:
        PROCESS.set(name)
        for _ in range(3):
            # A task and a timer of the process are the process's own.
            await asyncio.create_task(asyncio.sleep(1.0))
            done.append((name, asyncio.get_running_loop().time()))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        both = asyncio.gather(ticks("stopped"), ticks("other"))
        await asyncio.sleep(1.5)
        loop.stop_process("stopped")
        await asyncio.sleep(8.5)
        loop.continue_process("stopped")
        await both

    run_virtually(main())
    assert [at for name, at in done if name == "other"] == pytest.approx([1.0, 2.0, 3.0])
    assert [at for name, at in done if name == "stopped"] == pytest.approx([1.0, 10.0, 11.0])


def test_a_process_that_is_stopped_for_ever_is_a_deadlock():
    async def main() -> None:
        PROCESS.set("stopped")
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.stop_process("stopped")
        await asyncio.sleep(1.0)

    with pytest.raises(SimulationStuck, match="deadlock"):
        run_virtually(main())


def test_work_in_a_thread_takes_no_virtual_time_and_its_error_comes_through():
    async def main() -> float:
        assert await asyncio.to_thread(sorted, [2, 1]) == [1, 2]
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        return asyncio.get_running_loop().time()

    assert run_virtually(main()) == 0.0


# --- the network keeps the promises of protocol/network.py ---


Scene = Callable[[MemoryFabric, MemoryConnection, MemoryConnection], Awaitable[None]]


def play(scene: Scene, seed: int = 1) -> None:
    """Run `scene` with the two ends of a connection."""

    async def main() -> None:
        fabric = MemoryFabric(seed)
        accepted: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
        over = asyncio.Event()

        async def handler(connection: Connection) -> None:
            accepted.set_result(connection)
            await over.wait()

        listener = await fabric.at("right").listen("", handler)
        near = await fabric.at("left").connect(listener.address)
        await scene(fabric, near, await accepted)  # type: ignore[arg-type]
        over.set()
        await near.close()
        await listener.close()

    run_virtually(main())


def test_messages_arrive_in_the_order_they_were_sent():
    async def scene(fabric: MemoryFabric, near: MemoryConnection, far: MemoryConnection) -> None:
        for number in range(300):
            near.send(Cancel(str(number)))
        assert [await far.receive() for _ in range(300)] == [Cancel(str(number)) for number in range(300)]

    for seed in range(5):
        play(scene, seed)


def test_what_was_sent_before_a_close_still_arrives_and_then_the_end():
    async def scene(fabric: MemoryFabric, near: MemoryConnection, far: MemoryConnection) -> None:
        near.send(Cancel("last words"))
        await near.close()
        assert await far.receive() == Cancel("last words")
        with pytest.raises(ConnectionLost):
            await far.receive()
        with pytest.raises(ConnectionLost):
            near.send(Cancel("too late"))

    play(scene)


def test_a_cut_loses_what_is_under_way_and_both_ends_learn_of_it():
    async def scene(fabric: MemoryFabric, near: MemoryConnection, far: MemoryConnection) -> None:
        near.send(Cancel("lost"))
        assert fabric.cut("left") > 0
        for end in (near, far):
            with pytest.raises(ConnectionLost):
                await end.receive()

    play(scene)


def test_a_reader_that_does_not_read_shows_in_the_unsent_bytes_and_holds_drain_up():
    async def scene(fabric: MemoryFabric, near: MemoryConnection, far: MemoryConnection) -> None:
        message = Cancel("x" * 1000)
        count = (HIGH_WATER_BYTES + KERNEL_BYTES) // 1000 + 2
        for _ in range(count):
            near.send(message)
        assert near.unsent_bytes > HIGH_WATER_BYTES
        draining = asyncio.create_task(near.drain())
        await asyncio.sleep(10.0)
        assert not draining.done()
        for _ in range(count):
            await far.receive()
        await draining
        assert near.unsent_bytes == 0

    play(scene)


def test_parted_hosts_cannot_connect_until_they_are_joined():
    async def main() -> None:
        fabric = MemoryFabric(1)

        async def handler(connection: Connection) -> None:
            with pytest.raises(ConnectionLost):
                await connection.receive()

        listener = await fabric.at("right").listen("", handler)
        fabric.part("left", "right")
        with pytest.raises(ConnectionLost):
            await fabric.at("left").connect(listener.address)
        fabric.join("left", "right")
        connection = await fabric.at("left").connect(listener.address)
        await connection.close()
        await asyncio.sleep(1.0)
        await listener.close()

    run_virtually(main())


# --- both kinds of links keep the promises of kvtransfer/link.py, and the store tells who breaks them ---


SEAL = 7
BLOCKS = 12

by_kind = pytest.mark.parametrize("kind", KINDS)


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


def carry_by(
    kind: str, scene: Callable[[Ends, MemoryLink, MemoryLink], Awaitable[None]], ends: Ends | None = None
) -> None:
    async def main() -> None:
        layout = fake_layout(num_layers=2, block_size=4)
        both = ends if ends is not None else Ends(layout, layout)
        await scene(both, *await both.join(kind))

    run_virtually(main())


def units(cut: Cut, blocks: tuple[int, ...], num_units: int, layer: int = 0) -> tuple[Segment, ...]:
    """The first units of a block table."""
    return cut.segments([Run(layer, 0, num_units)], blocks)


@by_kind
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

    carry_by(kind, scene, ends)


@by_kind
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

    carry_by(kind, scene)


@by_kind
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

    carry_by(kind, scene)


@by_kind
def test_a_discarded_chunk_leaves_the_next_one_whole(kind: str):
    async def scene(ends: Ends, near: MemoryLink, far: MemoryLink) -> None:
        source, target = ends.cuts
        sending = [asyncio.create_task(near.send(units(source, (block, 3), 2), SEAL)) for block in (1, 2)]
        await far.discard(2)
        assert await far.receive(units(target, (0, 1), 2), SEAL)
        await asyncio.gather(*sending)
        assert ends.target.read(0, (0,), 4) == ends.source.read(0, (2,), 4)

    carry_by(kind, scene)


@by_kind
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

    carry_by(kind, cancelled)
    carry_by(kind, closed)


@by_kind
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

    carry_by(kind, scene)


@by_kind
def test_a_pull_link_reads_the_source_only_when_the_target_receives(kind: str):
    async def scene(ends: Ends, near: MemoryLink, far: MemoryLink) -> None:
        await near.send(units(ends.cuts[0], (0,), 1), SEAL)
        ends.source.spoil([0])
        assert await far.receive(units(ends.cuts[1], (0,), 1), SEAL) is (kind == "memory")

    carry_by(kind, scene)


# --- the model agrees with its oracle, and only while every block is right ---


REQUEST = GenerateRequest(
    request_id="r",
    router_id="",
    token_ids=tuple(range(10)),
    num_prompt_tokens=10,
    sampling=SamplingParams(seed=5),
    max_tokens=8,
    min_tokens=2,
    stop_token_ids=(3,),
)


def generate(chunk: int, spoiled_block: int | None = None) -> list[int]:
    """All tokens of REQUEST by steps of the engine, with one block of the prompt spoiled before the last tokens."""

    async def main() -> list[int]:
        store = FakeStore(fake_layout(num_layers=2, block_size=4), num_blocks=8)
        pool, engine = SpoilingPool(store), FakeEngine(store)
        sequence = SequenceState(REQUEST, 4)
        while sequence.num_output_tokens < len(expected_tokens(REQUEST, 2)):
            count = min(chunk, sequence.num_uncomputed)
            sequence.reserve(pool, count)
            if spoiled_block is not None and sequence.num_output_tokens == 3:
                store.spoil([sequence.block_ids[spoiled_block]])
            (token,) = await engine.step([sequence.step(count)])
            sequence.num_computed += count
            if token is not None:
                sequence.append(token.token_id)
        await asyncio.sleep(0)
        return sequence.token_ids[10:]

    return run_virtually(main())


def test_the_engine_agrees_with_the_oracle_whatever_the_chunks():
    for chunk in (1, 3, 4, 64):
        assert generate(chunk) == expected_tokens(REQUEST, 2)


def test_one_wrong_block_anywhere_changes_the_tokens():
    expected = expected_tokens(REQUEST, 2)
    assert len(expected) > 5
    for block in range(3):
        assert generate(64, spoiled_block=block) != expected
