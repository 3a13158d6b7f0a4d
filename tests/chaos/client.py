"""A client that writes down all that it gets and when: one streamed completion on a connection of its own."""

import asyncio
import json
import time
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
    # HTTP/1.0: the answer comes in no chunks, and ends with the connection.
    head = (
        f"POST /v1/completions HTTP/1.0\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**22)
    try:
        writer.write(head.encode() + payload)
        await _read_head(reader, answer)
        if not answer.is_accepted:
            answer.error = (await reader.read(2000)).decode(errors="replace")
            return
        pieces = 0
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
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


async def _read_head(reader: asyncio.StreamReader, answer: Answer) -> None:
    status = await reader.readline()
    if not status:
        raise ConnectionResetError("closed without an answer")
    answer.status = int(status.split()[1])
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        if name.lower() == "retry-after":
            answer.retry_after_s = float(value)


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
