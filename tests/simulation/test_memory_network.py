"""The network in memory keeps the promises of protocol/network.py."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.simulation.memory_network import HIGH_WATER_BYTES, KERNEL_BYTES, MemoryConnection, MemoryFabric
from tests.simulation.virtual_loop import run_virtually
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import Cancel
from twostroke.protocol.network import Connection

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
