"""An entry point in a few lines, for the balancers' tests: it answers when the test says so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

READY = "/ready"


@dataclass(frozen=True)
class Asked:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class StubEntry:
    """`manner` is how it answers POSTs; GETs are answered, /ready by `is_ready`.

    stream: what the test puts into `events`, until None. answer: at once. refuse: 503. new: 404, as one that knows no
    application yet. break: not a byte.
    """

    name: str
    manner: str = "answer"
    is_ready: bool = True
    asked: list[Asked] = field(default_factory=list)  # POSTs, and GETs other than /ready
    events: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    client_gone: asyncio.Event = field(default_factory=asyncio.Event)
    checks: int = 0
    port: int = 0
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop as a process's end does: nobody listens any more, and what is in progress breaks off."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; returns whether another may follow."""
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = lines[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if path == READY:
            self.checks += 1
            writer.write(_whole(200 if self.is_ready else 503, b"{}"))
            return True
        self.asked.append(Asked(method, path, headers, body))
        if method == "GET" or self.manner == "answer":
            writer.write(_whole(200, self.name.encode()))
        elif self.manner == "refuse":
            writer.write(_whole(503, b'{"error":{"code":"no_path"}}', "Retry-After: 1\r\n"))
        elif self.manner == "new":
            writer.write(_whole(404, b'{"error":{"code":"not_found"}}'))
        elif self.manner == "stream":
            await self._stream(reader, writer)
            return False
        return self.manner != "break"

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        gone = asyncio.create_task(self._watch(reader))
        try:
            while (event := await self.events.get()) is not None:
                writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(1)
        self.client_gone.set()


def _whole(status: int, body: bytes, more: str = "") -> bytes:
    return f"HTTP/1.1 {status} Said\r\nContent-Length: {len(body)}\r\n{more}\r\n".encode() + body


@contextlib.asynccontextmanager
async def two_entries() -> AsyncIterator[tuple[StubEntry, StubEntry]]:
    """Both are listening."""
    entries = (StubEntry("one"), StubEntry("two"))
    try:
        for entry in entries:
            await entry.start()
        yield entries
    finally:
        for entry in entries:
            await entry.stop()
