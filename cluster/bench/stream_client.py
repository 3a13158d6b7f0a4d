"""A client that costs next to nothing: it stamps raw bytes as they come, and reads them when all is over.

Server and client share the machine's cores; a client that parsed JSON meanwhile would be measured too.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class StreamResult:
    """One streamed completion as it went over the wire. Times are of `time.perf_counter`."""

    sent_at: float
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)
    broken: str | None = None  # why the connection ended early

    def token_times(self) -> list[float]:
        """When each event with tokens came. Raises ValueError for an answer that is no complete stream."""
        if self.broken is not None:
            raise ValueError(self.broken)
        raw = b"".join(data for _, data in self.arrivals)
        if not raw.startswith(b"HTTP/1.1 200"):
            raise ValueError(raw[:300].decode(errors="replace"))
        if b"data: [DONE]" not in raw:
            raise ValueError("the stream has no end")
        times: list[float] = []
        buffered = b""
        for at, data in self.arrivals:
            *events, buffered = (buffered + data).split(b"\n\n")
            times += [at for event in events if b'"choices":[{' in event]
        return times

    def usage(self) -> dict[str, Any]:
        """The usage that the last event before the end tells."""
        raw = b"".join(data for _, data in self.arrivals)
        line = next(line for line in reversed(raw.split(b"\n")) if b'"usage":{' in line)
        usage: dict[str, Any] = json.loads(line.removeprefix(b"data: "))["usage"]
        return usage


class _Receiver(asyncio.Protocol):
    def __init__(self, result: StreamResult, done: "asyncio.Future[None]"):
        self._result = result
        self._done = done

    def data_received(self, data: bytes) -> None:
        self._result.arrivals.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._result.broken = str(error)
        if not self._done.done():
            self._done.set_result(None)


async def stream_completion(url: str, body: dict[str, Any]) -> StreamResult:
    """POST `body` to /v1/completions on a connection of its own and take all that comes. Raises OSError."""
    parts = urlsplit(url)
    host = parts.hostname or "127.0.0.1"
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    result = StreamResult(time.perf_counter())
    transport, _ = await loop.create_connection(lambda: _Receiver(result, done), host, parts.port or 80)
    try:
        # Asyncio's transports write at once where the socket takes it.
        transport.write(head.encode() + payload)
        await done
    finally:
        transport.close()
    return result
