"""The receiving end of links under measurement, in a process of its own:
`python -m twostroke.benchmarks.kv.link_process`.

Takes orders as JSON lines on its standard input, one after the other, and answers each on its standard output with the
moment of CLOCK_MONOTONIC at which it was done; all processes of a machine share that clock.
"""

import asyncio
import socket
import sys
import time
from typing import Literal

import msgspec

from twostroke.benchmarks.kv.limits import BareGroup, Case, Message, digest_s, memcpy_s, receive_bare
from twostroke.kvtransfer.link import DataLink, LinkParams
from twostroke.kvtransfer.transports import make_transports

HOST = "127.0.0.1"


class Order(msgspec.Struct, frozen=True):
    """What to do. `begin` makes the case's cache; `link` prepares a link, and `linked` waits for it."""

    what: Literal["begin", "link", "linked", "receive", "bare_tcp", "bare_gloo", "memcpy", "digest", "end"]
    case: Case | None = None
    transport: str = ""
    port: int = 0


class Done(msgspec.Struct, frozen=True):
    """The answer to an order."""

    at: float = 0.0
    seconds: float = 0.0  # where the work was timed here
    params: LinkParams = {}
    port: int = 0
    damaged: int = 0  # chunks


class _End:
    """One case's state."""

    def __init__(self, case: Case):
        self.message = Message(case)
        self.links: dict[str, DataLink] = {}
        self._bare: socket.socket | None = None
        self._listener = socket.create_server((HOST, 0))
        self._group: BareGroup | None = None

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def receive_bare(self) -> None:
        if self._bare is None:
            self._bare, _ = self._listener.accept()
        receive_bare(self._bare, self.message)

    def receive_group(self, port: int) -> None:
        if self._group is None:
            self._group = BareGroup(1, port, self.message)
        self._group.receive()

    def close(self) -> None:
        self._group = None
        self._listener.close()
        if self._bare is not None:
            self._bare.close()
        self.message.close()


async def receive_all(link: DataLink, message: Message) -> int:
    """Two chunks under way at a time, as in a transfer; returns how many came damaged."""
    damaged = 0
    turns = iter([(chunk, seal) for seal, chunk in enumerate(message.chunks)])

    async def mover() -> None:
        nonlocal damaged
        for chunk, seal in turns:
            damaged += not await link.receive(chunk, seal)

    await asyncio.gather(mover(), mover())
    return damaged


async def send_all(link: DataLink, message: Message) -> None:
    """The other end of `receive_all`."""
    turns = iter([(chunk, seal) for seal, chunk in enumerate(message.chunks)])

    async def mover() -> None:
        for chunk, seal in turns:
            await link.send(chunk, seal)

    await asyncio.gather(mover(), mover())


async def _serve_case(case: Case, orders: asyncio.StreamReader) -> None:
    end = _End(case)
    transports = {
        name: make_transports(name, end.message.cache).by_name[name] for name in ("tcp", "shm", "torch_distributed")
    }
    pending = {}
    _say(Done(time.monotonic(), port=end.port))
    try:
        while line := await orders.readline():
            order = msgspec.json.decode(line, type=Order)
            seconds, damaged, params = 0.0, 0, LinkParams()
            match order.what:
                case "link":
                    pending[order.transport] = await transports[order.transport].prepare(HOST, end.message.cut)
                    params = pending[order.transport].params
                case "linked":
                    end.links[order.transport] = await pending[order.transport].established()
                case "receive":
                    damaged = await receive_all(end.links[order.transport], end.message)
                case "bare_tcp":
                    end.receive_bare()
                case "bare_gloo":
                    end.receive_group(order.port)
                case "memcpy":
                    seconds = memcpy_s(end.message)
                case "digest":
                    seconds = digest_s(end.message)
                case "begin" | "end":
                    break
            _say(Done(time.monotonic(), seconds, params, damaged=damaged))
    finally:
        for link in end.links.values():
            await link.close()
        for transport in transports.values():
            await transport.close()
        end.close()
    _say(Done(time.monotonic()))


async def serve() -> None:
    """Case after case, until standard input ends."""
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        case = msgspec.json.decode(line, type=Order).case
        if case is not None:
            await _serve_case(case, orders)


def _say(done: Done) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(serve())
