"""A client that writes down all that it gets and when: one streamed completion on a connection of its own."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.chaos.requests import ClientRequest

PATIENCE_S = 60.0
"""A request that takes longer in all is lost."""


@dataclass
class Choice:
    """What came of one choice. Times are of `time.monotonic`."""

    pieces: list[tuple[float, list[int]]] = field(default_factory=list)  # token ids, by arrival
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of the tokens in the text, where logprobs are told

    @property
    def tokens(self) -> list[int]:
        return [token for _, tokens in self.pieces for token in tokens]


@dataclass
class Answer:
    """What came of one request."""

    request: ClientRequest
    sent_at: float
    ended_at: float = 0.0
    status: int | None = None  # None: no answer at all
    retry_after_s: float | None = None
    choices: list[Choice] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    has_end: bool = False  # the [DONE]
    error: str | None = None
    left: bool = False  # the client did, on purpose

    @property
    def is_accepted(self) -> bool:
        return self.status == 200


async def ask(url: str, request: ClientRequest, *, leave_after: int | None = None) -> Answer:
    """Send the request and take what comes, to its end or until `leave_after` pieces have come."""
    answer = Answer(request, time.monotonic(), choices=[Choice() for _ in range(request.num_choices)])
    try:
        async with asyncio.timeout(PATIENCE_S):
            await _converse(url, answer, leave_after)
    except TimeoutError:
        answer.error = f"no end after {PATIENCE_S:g} s"
    except (OSError, ValueError, asyncio.IncompleteReadError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended_at = time.monotonic()
    return answer


async def _converse(url: str, answer: Answer, leave_after: int | None) -> None:
    parts = urlsplit(url)
    payload = json.dumps(answer.request.body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(head.encode() + payload)
        headers = await _read_head(reader, answer)
        body = _chunks(reader) if headers.get("transfer-encoding") == "chunked" else _rest(reader)
        if not answer.is_accepted:
            answer.retry_after_s = float(headers["retry-after"]) if "retry-after" in headers else None
            answer.error = b"".join([part async for part in body])[:2000].decode(errors="replace")
            return
        pieces = 0
        async with aclosing(_events(body)) as events:
            async for data in events:
                if data == b"[DONE]":
                    answer.has_end = True
                    continue
                _take(answer, json.loads(data))
                pieces += 1
                if leave_after is not None and pieces >= leave_after:
                    answer.left = True
                    return
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader, answer: Answer) -> dict[str, str]:
    """Set the status; returns the headers. Raises ConnectionResetError where none come."""
    status = await reader.readline()
    if not status:
        raise ConnectionResetError("closed without an answer")
    answer.status = int(status.split()[1])
    headers: dict[str, str] = {}
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip().lower()
    return headers


async def _chunks(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    """A chunked body. Raises ConnectionResetError or IncompleteReadError where it breaks off."""
    while True:
        line = await reader.readline()
        if not line:
            raise ConnectionResetError("closed in the middle of the answer")
        size = int(line.split(b";")[0], 16)
        if size == 0:
            return
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    while data := await reader.read(65536):
        yield data


async def _events(body: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The data of server-sent events."""
    buffered = b""
    async with aclosing(body):
        async for part in body:
            *events, buffered = (buffered + part).split(b"\n\n")
            for event in events:
                for line in event.split(b"\n"):
                    if line.startswith(b"data: "):
                        yield line[6:]


def _take(answer: Answer, event: dict[str, Any]) -> None:
    now = time.monotonic()
    if "error" in event:
        answer.error = str(event["error"])
        return
    if event.get("usage") is not None:
        answer.usage = event["usage"]
    for told in event["choices"]:
        choice = answer.choices[told["index"]]
        choice.text += told["text"]
        if told.get("token_ids"):
            choice.pieces.append((now, told["token_ids"]))
        if told["finish_reason"] is not None:
            choice.finish_reasons.append(told["finish_reason"])
        if told["logprobs"] is not None:
            choice.logprobs += told["logprobs"]["token_logprobs"]
            choice.offsets += told["logprobs"]["text_offset"]
