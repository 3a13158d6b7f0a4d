"""One streamed completion: the request as it is sent, and the raw bytes that come back, each stamped as it comes."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from twostroke.loadtests.generator.sse import Piece


@dataclass
class Exchange:
    """A request and the raw bytes that came back. Times are of `time.perf_counter`."""

    sent_at: float
    arrivals: list[Piece] = field(default_factory=list)
    broken: str | None = None  # why the connection failed


def completion_body(model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """A request for exactly `max_tokens` greedy tokens, streamed. `ignore_eos` is no field of OpenAI's API, but of
    all servers of open models."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class _Receiver(asyncio.Protocol):
    def __init__(self, exchange: Exchange, done: "asyncio.Future[None]"):
        self._exchange = exchange
        self._done = done

    def data_received(self, data: bytes) -> None:
        self._exchange.arrivals.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self._exchange.broken = str(error)
        if not self._done.done():
            self._done.set_result(None)


async def exchange(base_url: str, body: dict[str, Any], time_limit_s: float) -> Exchange:
    """POST `body` to `base_url`/completions on a connection of its own and take all that comes.

    Never raises for what the server does: the result then says why it is broken.
    """
    parts = urlsplit(base_url)
    payload = json.dumps(body).encode()
    head = (
        f"POST {parts.path.rstrip('/')}/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    result = Exchange(time.perf_counter())
    try:
        async with asyncio.timeout(time_limit_s):
            transport, _ = await loop.create_connection(
                lambda: _Receiver(result, done), parts.hostname or "127.0.0.1", parts.port or 80
            )
            try:
                transport.write(head.encode() + payload)
                await done
            finally:
                transport.close()
    except TimeoutError:
        result.broken = f"no answer within {time_limit_s:g} s"
    except OSError as error:
        result.broken = f"no connection: {error}"
    return result
