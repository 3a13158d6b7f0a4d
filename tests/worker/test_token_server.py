"""The worker's end of the token channel, on the network in memory and on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.rigs.played import played_by
from twostroke.protocol.errors import ConnectionLost
from twostroke.protocol.messages import (
    Cancel,
    Drain,
    Hello,
    Message,
    Ping,
    PrefillFailed,
    Refuse,
    RequestsBlocked,
    SendPrefix,
    StatsFrame,
    TokenFrame,
    Welcome,
)
from twostroke.protocol.requests import Address, BlockedRequest, Peer, SampledToken, TokenEvent
from twostroke.protocol.stats import WorkerStats
from twostroke.simulator.memory_network import MemoryConnection, MemoryFabric
from twostroke.simulator.virtual_loop import VirtualLoop, run_virtually
from twostroke.worker.scheduling.block_pool import BlockPool
from twostroke.worker.token_server import TokenServer, TokenServerConfig

WORKER = Peer("decode-0", 7)
CONFIG = TokenServerConfig(stats_interval_s=0.5, lease_s=3.0, max_unsent_bytes=100_000)
STATS = WorkerStats(num_running=3)


def event(index: int, size: int = 1) -> TokenEvent:
    return TokenEvent("request", index, (SampledToken(5),) * size)


@dataclass
class Scene:
    """A started server, and what it told its worker."""

    fabric: MemoryFabric
    server: TokenServer
    address: Address
    heard: list[tuple[str, str]] = field(default_factory=list)

    async def connect(self, router_id: str = "router-0", receiver: Peer = WORKER) -> MemoryConnection:
        """A connection that has said hello."""
        connection = await self.fabric.at(router_id).connect(self.address)
        connection.send(Hello(Peer(router_id, 1), receiver))
        return connection

    async def welcomed(self, router_id: str = "router-0", known: tuple[BlockedRequest, ...] = ()) -> MemoryConnection:
        """A connection that has read its welcome, what the worker knows, and the first statistics."""
        connection = await self.connect(router_id)
        assert await connection.receive() == Welcome(WORKER)
        assert await connection.receive() == RequestsBlocked(known)
        assert await connection.receive() == StatsFrame(STATS)
        return connection


def noting(heard: list[tuple[str, str]]) -> dict[str, Callable[..., Any]]:
    """What a token server calls of its worker, each call noted."""

    def on_message(message: Message) -> None:
        match message:
            case Cancel(request_id):
                heard.append(("cancel", request_id))
            case PrefillFailed(request_id):
                heard.append(("prefill failed", request_id))
            case SendPrefix(ticket, token_ids, cache_salt, _):
                heard.append(("prefix", f"{ticket.request_id} {token_ids} {cache_salt!r}"))
            case Drain():
                heard.append(("drain", ""))

    def on_router_lost(router_id: str) -> None:
        heard.append(("lost", router_id))

    return {"on_message": on_message, "on_router_lost": on_router_lost, "stats": lambda: STATS}


def play(script: Callable[[Scene], Awaitable[None]]) -> None:
    """Run `script` beside a server, and see that nothing is left of either."""

    async def main() -> None:
        fabric = MemoryFabric(seed=1)
        heard: list[tuple[str, str]] = []
        server = TokenServer(
            **noting(heard),
            peer=WORKER,
            network=fabric.at("decode-0"),
            config=CONFIG,
            blocks=BlockPool(1, 16),
            clock=asyncio.get_running_loop().time,
        )
        await script(Scene(fabric, server, await server.start("host"), heard))
        await server.close()
        await server.close()
        for connection in list(fabric.connections):
            await connection.close()
        await asyncio.sleep(1.0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not fabric.listeners

    run_virtually(main())


async def next_but_stats(connection: MemoryConnection) -> Message:
    while isinstance(message := await connection.receive(), StatsFrame):
        pass
    return message


@played_by(play)
async def test_a_router_is_welcomed_and_gets_statistics_at_once_and_then_regularly(scene: Scene) -> None:
    connection = await scene.welcomed()
    assert scene.server.is_connected("router-0")
    began = asyncio.get_running_loop().time()
    assert began < CONFIG.stats_interval_s
    for _ in range(4):
        assert await connection.receive() == StatsFrame(STATS)
    assert 1.4 < asyncio.get_running_loop().time() - began < 2.2


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(Peer("router-0", 1), Peer("decode-0", 8)), "restarted"),
        (Hello(Peer("router-0", 1), Peer("decode-9", 7)), "this is worker decode-0"),
        (Ping(), "expected a Hello"),
    ],
)
@played_by(play)
async def test_a_router_of_another_worker_is_refused(scene: Scene, hello: Message, reason: str) -> None:
    connection = await scene.fabric.at("router-0").connect(scene.address)
    connection.send(hello)
    answer = await connection.receive()
    assert isinstance(answer, Refuse)
    assert reason in answer.reason
    with pytest.raises(ConnectionLost):
        await connection.receive()
    assert not scene.server.is_connected("router-0")
    assert scene.heard == []


@played_by(play)
async def test_a_lost_router_is_reported_once(scene: Scene) -> None:
    connection = await scene.welcomed()
    await connection.close()
    await asyncio.sleep(0.1)
    assert scene.heard == [("lost", "router-0")]
    assert not scene.server.is_connected("router-0")
    scene.server.emit("router-0", [event(0)])


@played_by(play)
async def test_a_newer_connection_of_a_router_replaces_the_older(scene: Scene) -> None:
    older = await scene.welcomed()
    newer = await scene.welcomed()
    assert scene.heard == [("lost", "router-0")], "requests that relied on the older one are lost"
    with pytest.raises(ConnectionLost):
        await next_but_stats(older)
    scene.server.emit("router-0", [event(0)])
    assert await next_but_stats(newer) == TokenFrame((event(0),))
    await asyncio.sleep(1.0)
    assert scene.server.is_connected("router-0")
    assert scene.heard == [("lost", "router-0")]


@played_by(play)
async def test_a_router_that_does_not_read_is_dropped(scene: Scene) -> None:
    await scene.welcomed("router-0")  # and never reads again
    other = await scene.welcomed("router-1")
    frames = 0
    while scene.server.is_connected("router-0"):
        scene.server.emit("router-0", [event(frames, size=500)])
        frames += 1
        assert frames < 1000
    assert scene.heard == [("lost", "router-0")]
    scene.server.emit("router-1", [event(0)])
    assert await next_but_stats(other) == TokenFrame((event(0),))


@played_by(play)
async def test_a_silent_router_is_dropped_after_a_lease_and_one_that_pings_is_not(scene: Scene) -> None:
    await scene.welcomed("router-0")
    pinging = await scene.welcomed("router-1")
    for _ in range(5):
        await asyncio.sleep(1.0)
        pinging.send(Ping())
    assert scene.heard == [("lost", "router-0")]
    assert scene.server.is_connected("router-1")


@played_by(play)
async def test_a_stall_of_the_workers_own_loop_drops_no_router_that_pinged(scene: Scene) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    pinging = await scene.welcomed()
    pinging.send(Ping())
    loop._now += 10 * CONFIG.lease_s  # the ping lies unread meanwhile
    for _ in range(3):
        await asyncio.sleep(1.0)
        pinging.send(Ping())
    assert scene.server.is_connected("router-0")
    assert scene.heard == []


@played_by(play)
async def test_a_router_that_sends_what_it_must_not_is_dropped(scene: Scene) -> None:
    connection = await scene.welcomed()
    connection.send(TokenFrame((event(0),)))
    await asyncio.sleep(0.1)
    assert scene.heard == [("lost", "router-0")]


@played_by(play)
async def test_what_a_connection_that_was_replaced_still_carried_counts_for_nothing(scene: Scene) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    older, other = await scene.welcomed(), await scene.welcomed("router-1")
    newer = await scene.connect()
    older.send(RequestsBlocked((OTHER,)))
    loop._now += 1.0  # the worker finds both at once
    assert await next_but_stats(newer) == Welcome(WORKER)
    assert await next_but_stats(newer) == RequestsBlocked(())
    other.send(RequestsBlocked((GUILTY,)))
    async with asyncio.timeout(1.0):
        assert await next_but_stats(newer) == RequestsBlocked((GUILTY,))


GUILTY, OTHER = BlockedRequest(b"g" * 16, 600.0), BlockedRequest(b"o" * 16, 600.0)


@played_by(play)
async def test_a_blocked_request_is_reported_once_to_all_routers_but_its_sender(scene: Scene) -> None:
    telling, *others = [await scene.welcomed(f"router-{number}") for number in range(3)]
    telling.send(RequestsBlocked((GUILTY,)))
    for other in others:
        assert await next_but_stats(other) == RequestsBlocked((GUILTY,))
        other.send(RequestsBlocked((GUILTY,)))  # as a router would that has found out the same
    telling.send(RequestsBlocked((GUILTY, OTHER)))
    for other in others:
        assert await next_but_stats(other) == RequestsBlocked((OTHER,))
    scene.server.emit("router-0", [event(0)])
    assert await next_but_stats(telling) == TokenFrame((event(0),)), "it is told nothing that it knows"
    assert scene.heard == [], "the worker makes nothing of it"


@played_by(play)
async def test_a_connection_that_never_says_hello_ends_after_a_lease(scene: Scene) -> None:
    connection = await scene.fabric.at("router-0").connect(scene.address)
    with pytest.raises(ConnectionLost):
        await connection.receive()
    assert asyncio.get_running_loop().time() < 4.0
    assert scene.heard == []
