"""A server on loopback that answers from a script, and notes what it was asked."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
REFUSAL = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull"


@dataclass
class ScriptedServer:
    """`answer` makes the raw pieces of a response out of a request's body; each is flushed by itself."""

    answer: Callable[[dict[str, Any]], Sequence[bytes]]
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    written_at: list[float] = field(default_factory=list)  # of each piece, by the client's clock
    open_now: int = 0
    most_open: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        body = json.loads(await reader.readexactly(int(length.split(b":")[1])))
        self.bodies.append({**body, "path": head.split(b" ")[1].decode()})
        for piece in self.answer(body):
            self.written_at.append(time.perf_counter())
            writer.write(piece)
            await writer.drain()
        self.open_now -= 1
        writer.close()


@asynccontextmanager
async def scripted_server(answer: Callable[[dict[str, Any]], Sequence[bytes]]) -> AsyncIterator[ScriptedServer]:
    """Serves on a free port while the context lasts."""
    script = ScriptedServer(answer)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield script


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def event(message: dict[str, Any]) -> bytes:
    return chunk(b"data: " + json.dumps(message).encode() + b"\n\n")


def token_event(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": None})


def delta_event(content: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish_reason}]})


def end(prompt_tokens: int, completion_tokens: int) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"choices": [], "usage": usage}) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
