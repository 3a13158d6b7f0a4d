"""A TCP proxy between two workers, whose bytes towards the target can be damaged or cut off at an exact one."""

import asyncio
import contextlib
import random
from collections.abc import Callable

from twostroke.protocol.requests import Address

Mangle = Callable[[int, bytes], bytes | None]
"""(how many bytes have gone before, bytes) -> what goes on in their place; None: the connection is cut."""


def unharmed(_: int, data: bytes) -> bytes:
    return data


class Proxy:
    """Forwards every connection to `upstream`, which may be told after the first one has come."""

    def __init__(self) -> None:
        self.upstream: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        self.mangle: Mangle = unharmed
        self.forwarded = 0  # bytes towards the target, over all connections
        self.fired = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> Address:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return Address(*self._server.sockets[0].getsockname()[:2])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut_at(self, num_bytes: int) -> None:
        """Forward so many bytes, then break all connections there are; later ones are left alone."""

        def mangle(before: int, data: bytes) -> bytes | None:
            if before + len(data) < num_bytes:
                return data
            self.mangle = unharmed
            self.fired.set()
            return None

        self.mangle = mangle

    def flip_at(self, index: int) -> None:
        """Flip a bit of byte `index`."""

        def mangle(before: int, data: bytes) -> bytes:
            if not before <= index < before + len(data):
                return data
            self.mangle = unharmed
            self.fired.set()
            damaged = bytearray(data)
            damaged[index - before] ^= 1
            return bytes(damaged)

        self.mangle = mangle

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.close())  # also where it was cancelled before its first step

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream = await self.upstream
        try:
            far_reader, far_writer = await asyncio.open_connection(upstream.host, upstream.port)
        except OSError:  # the target is gone, and so is whoever wants to reach it
            return
        ways = [
            asyncio.ensure_future(self._forward(reader, far_writer, mangled=True)),
            asyncio.ensure_future(self._forward(far_reader, writer, mangled=False)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (writer, far_writer):  # before anything is awaited: `close` may cancel this too
                each.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, mangled: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if mangled:
                    before, self.forwarded = self.forwarded, self.forwarded + len(data)
                    changed = self.mangle(before, data)
                    if changed is None:
                        return
                    data = changed
                writer.write(data)
                await writer.drain()


def draw_byte(seed: str, num_bytes: int) -> int:
    """A place among `num_bytes`, the same each time for the same seed."""
    return random.Random(seed).randrange(num_bytes)
