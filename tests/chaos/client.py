"""A client that writes down all that it gets and when: one streamed completion on a connection of its own."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tests.chaos.requests import ClientRequest
from twostroke.loadtests.generator.http_stream import BadResponse, Piece, events_of, response_of, text_of

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
    """Send the request and take what comes, to its end or until about `leave_after` events have come."""
    answer = Answer(request, time.monotonic(), choices=[Choice() for _ in range(request.num_choices)])
    came: list[Piece] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer.left = await _receive(url, request, came, leave_after)
    except TimeoutError:
        answer.error = f"no end after {PATIENCE_S:g} s"
    except OSError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended_at = time.monotonic()
    try:
        _read(came, answer)
    except (BadResponse, ValueError) as error:
        answer.error = answer.error or str(error)  # why the connection broke says more
    return answer


async def _receive(url: str, request: ClientRequest, came: list[Piece], leave_after: int | None) -> bool:
    """Whether the client has left before the server hung up. Raises OSError."""
    parts = urlsplit(url)
    payload = json.dumps(request.body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    num_events = 0
    try:
        writer.write(head.encode() + payload)
        while data := await reader.read(65536):
            came.append((time.monotonic(), data))
            num_events += data.count(b"data: ")
            if leave_after is not None and num_events >= leave_after:
                return True
    finally:
        writer.close()
    return False


def _read(came: list[Piece], answer: Answer) -> None:
    """Raises BadResponse or ValueError where that breaks off, or is no answer; what came before is in `answer`."""
    head, body = response_of(came)
    answer.status = head.status
    if not answer.is_accepted:
        answer.retry_after_s = float(head.fields["retry-after"]) if "retry-after" in head.fields else None
        answer.error = answer.error or text_of(body)
        return
    for event in events_of(body):
        if event.data == b"[DONE]":
            answer.has_end = True
        else:
            _take(answer, json.loads(event.data), event.at)


def _take(answer: Answer, event: dict[str, Any], at: float) -> None:
    if "error" in event:
        answer.error = str(event["error"])
        return
    if event.get("usage") is not None:
        answer.usage = event["usage"]
    for told in event["choices"]:
        choice = answer.choices[told["index"]]
        choice.text += told["text"]
        if told.get("token_ids"):
            choice.pieces.append((at, told["token_ids"]))
        if told["finish_reason"] is not None:
            choice.finish_reasons.append(told["finish_reason"])
        if told["logprobs"] is not None:
            choice.logprobs += told["logprobs"]["token_logprobs"]
            choice.offsets += told["logprobs"]["text_offset"]
