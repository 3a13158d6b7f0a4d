"""Links against the machine's limits, turn by turn: limit, subject, limit, ..., between two processes."""

import asyncio
import contextlib
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from twostroke.benchmarks.kv.limits import BareGroup, Case, Message, send_bare
from twostroke.benchmarks.kv.link_process import HOST, Done, Order, send_all
from twostroke.cluster.local.ray import free_ports
from twostroke.kvtransfer.link import DataLink
from twostroke.kvtransfer.transports import make_transports
from twostroke.protocol.errors import TransferFailed

Subject = Literal["tcp", "shm", "torch_distributed"]


@dataclass(frozen=True)
class Ratios:
    """Of one case: medians over its turns. Links carry digests and check them, limits don't."""

    tcp_over_bare: float
    shm_over_memcpy: float
    gloo_over_bare: float
    digest_share: float  # what one side's digests add, of the tcp link's time
    tcp_bytes_per_s: float
    shm_bytes_per_s: float
    gloo_bytes_per_s: float


class Peer:
    """The other process."""

    def __init__(self, process: asyncio.subprocess.Process):
        self._process = process

    async def order(self, order: Order) -> Done:
        """Have it done. Raises TransferFailed where the process ends."""
        self.begin(order)
        return await self.done()

    def begin(self, order: Order) -> None:
        if self._process.stdin is None:
            raise TransferFailed("the peer has no input")
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    async def done(self) -> Done:
        line = b"" if self._process.stdout is None else await self._process.stdout.readline()
        if not line:
            raise TransferFailed("the peer has ended; its standard error says why")
        return msgspec.json.decode(line, type=Done)


@contextlib.asynccontextmanager
async def peer_process() -> AsyncIterator[Peer]:
    """Ends with its input."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "twostroke.benchmarks.kv.link_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Peer(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()


async def measure_case(peer: Peer, case: Case, rounds: int) -> Ratios:
    """All links of one case."""
    message = Message(case)
    begun = await peer.order(Order("begin", case))
    transports = {
        name: make_transports(name, message.cache).by_name[name] for name in ("tcp", "shm", "torch_distributed")
    }
    links: dict[str, DataLink] = {}
    bare = socket.create_connection((HOST, begun.port))
    group_port = free_ports(1)[0]
    group: list[BareGroup] = []

    async def over_link(name: Subject) -> float:
        peer.begin(Order("receive", transport=name))
        began = time.monotonic()
        await send_all(links[name], message)
        done = await peer.done()
        if done.damaged:
            raise TransferFailed(f"{done.damaged} chunks came damaged over {name}")
        return done.at - began

    async def over_bare() -> float:
        peer.begin(Order("bare_tcp"))
        began = time.monotonic()
        await asyncio.to_thread(send_bare, bare, message)
        return (await peer.done()).at - began

    async def over_group() -> float:
        peer.begin(Order("bare_gloo", port=group_port))
        if not group:
            group.append(await asyncio.to_thread(BareGroup, 0, group_port, message))
        began = time.monotonic()
        await asyncio.to_thread(group[0].send)
        return (await peer.done()).at - began

    async def memcpy() -> float:
        return (await peer.order(Order("memcpy"))).seconds

    async def digest() -> float:
        return (await peer.order(Order("digest"))).seconds

    try:
        for name, transport in transports.items():
            params = (await peer.order(Order("link", transport=name))).params
            peer.begin(Order("linked", transport=name))
            links[name] = await transport.join(params, message.cut)
            await peer.done()
        tcp, tcp_s = await _in_turns(over_bare, lambda: over_link("tcp"), rounds)
        shm, shm_s = await _in_turns(memcpy, lambda: over_link("shm"), rounds)
        gloo, gloo_s = await _in_turns(over_group, lambda: over_link("torch_distributed"), rounds)
        digest_over_tcp, _ = await _in_turns(digest, lambda: over_link("tcp"), rounds)
    finally:
        for link in links.values():
            await link.close()
        for transport in transports.values():
            await transport.close()
        bare.close()
        group.clear()
        message.close()
    await peer.order(Order("end"))
    moved = message.num_bytes
    return Ratios(tcp, shm, gloo, digest_over_tcp, moved / tcp_s, moved / shm_s, moved / gloo_s)


async def _in_turns(
    limit: Callable[[], Awaitable[float]], subject: Callable[[], Awaitable[float]], rounds: int
) -> tuple[float, float]:
    """Medians of limit / subject, each subject against the limits on both sides of it, and of the subject's seconds."""
    await limit()
    await subject()
    limits, subjects = [await limit()], []
    for _ in range(rounds):
        subjects.append(await subject())
        limits.append(await limit())
    ratios = [(limits[i] + limits[i + 1]) / 2 / each for i, each in enumerate(subjects)]
    return statistics.median(ratios), statistics.median(subjects)
