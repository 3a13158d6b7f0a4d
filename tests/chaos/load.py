"""A steady load of streams whose answers are known, to see what becomes of each while something dies.

`make cluster-demo` and `make chaos` send it. Clients write down each token with its time; what they saw is judged
when all is over (verdict.py).
"""

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from twostroke.loadtests.generator.http_stream import BadResponse, Piece, body_text, read_response, sse_events

MODEL = "twostroke-bundled"


@dataclass(frozen=True)
class ServerAddress:
    """The address of requests, and their API key."""

    url: str
    api_key: str = ""

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises OSError."""
        parts = urlsplit(self.url)
        return await asyncio.open_connection(parts.hostname, parts.port)

    def head(self, num_bytes: int) -> bytes:
        """The head of a request for a completion whose body has so many bytes."""
        lines = (
            "POST /v1/completions HTTP/1.1",
            f"Host: {urlsplit(self.url).netloc}",
            *([f"Authorization: Bearer {self.api_key}"] if self.api_key else []),
            "Content-Type: application/json",
            f"Content-Length: {num_bytes}",
            "Connection: close",
        )
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


@dataclass(frozen=True)
class KeyedRequest:
    """One request. `key` names it: equal requests are answered with equal tokens, whatever happens."""

    key: int
    body: dict[str, Any]

    @property
    def num_choices(self) -> int:
        choices: int = self.body["n"]
        return choices

    @property
    def schema(self) -> dict[str, Any] | None:
        """Return what its answers are held to."""
        return self.body.get("guided_json")


def plain_request(model: str, key: int, *, prompt_tokens: int = 100, max_tokens: int = 400) -> KeyedRequest:
    """Make a greedy request for exactly so many tokens, whose prompt is its key's own."""
    prompt = [300 + (key * 37 + i * 11) % 700 for i in range(prompt_tokens)]  # ordinary tokens in any vocabulary
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "n": 1, "temperature": 0, "ignore_eos": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    return KeyedRequest(key, body | streamed)


PATIENCE_S = 60.0
"""Longest time of a whole request; one that takes longer is lost."""


@dataclass
class ClientChoice:
    """The answer of one choice. Times are of `time.monotonic`."""

    pieces: list[tuple[float, list[int]]] = field(default_factory=list)  # token ids, by arrival
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # of the tokens in the text, where logprobs are told

    @property
    def tokens(self) -> list[int]:
        return [token for _, tokens in self.pieces for token in tokens]


@dataclass
class ClientAnswer:
    """The answer to one request, as its client saw it."""

    request: KeyedRequest
    sent_at: float
    ended_at: float = 0.0
    status: int | None = None  # None: no answer at all
    retry_after_s: float | None = None
    choices: list[ClientChoice] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    has_end: bool = False  # the [DONE]
    error: str | None = None
    left: bool = False  # the client did, on purpose

    @property
    def is_accepted(self) -> bool:
        return self.status == 200


async def ask(
    target: ServerAddress, request: KeyedRequest, *, leave_after: int | None = None, limit_s: float = PATIENCE_S
) -> ClientAnswer:
    """Send the request and take what comes, to its end or until about `leave_after` events have come."""
    answer = ClientAnswer(request, time.monotonic(), choices=[ClientChoice() for _ in range(request.num_choices)])
    pieces: list[Piece] = []
    try:
        async with asyncio.timeout(limit_s):
            answer.left = await _receive(target, request, pieces, leave_after)
    except TimeoutError:
        answer.error = f"no end after {limit_s:g} s"
    except OSError as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended_at = time.monotonic()
    try:
        _read(pieces, answer)
    except (BadResponse, ValueError) as error:
        answer.error = answer.error or str(error)  # why the connection broke says more
    return answer


async def _receive(target: ServerAddress, request: KeyedRequest, pieces: list[Piece], leave_after: int | None) -> bool:
    """Return whether the client has left before the server hung up. Raises OSError."""
    payload = json.dumps(request.body).encode()
    reader, writer = await target.connect()
    num_events = 0
    try:
        writer.write(target.head(len(payload)) + payload)
        while data := await reader.read(65536):
            pieces.append((time.monotonic(), data))
            num_events += data.count(b"data: ")
            if leave_after is not None and num_events >= leave_after:
                return True
    finally:
        writer.close()
    return False


def _read(pieces: list[Piece], answer: ClientAnswer) -> None:
    """Raises BadResponse or ValueError where that breaks off, or is no answer; what came before is in `answer`."""
    head, body = read_response(pieces)
    answer.status = head.status
    if not answer.is_accepted:
        answer.retry_after_s = float(head.fields["retry-after"]) if "retry-after" in head.fields else None
        answer.error = answer.error or body_text(body)
        return
    for event in sse_events(body):
        if event.data == b"[DONE]":
            answer.has_end = True
        else:
            _take(answer, json.loads(event.data), event.at)


def _take(answer: ClientAnswer, event: dict[str, Any], at: float) -> None:
    if "error" in event:
        answer.error = str(event["error"])
        return
    if event.get("usage") is not None:
        answer.usage = event["usage"]
    for changed in event["choices"]:
        choice = answer.choices[changed["index"]]
        choice.text += changed["text"]
        if changed.get("token_ids"):
            choice.pieces.append((at, changed["token_ids"]))
        if changed["finish_reason"] is not None:
            choice.finish_reasons.append(changed["finish_reason"])
        if changed["logprobs"] is not None:
            choice.logprobs += changed["logprobs"]["token_logprobs"]
            choice.offsets += changed["logprobs"]["text_offset"]


RETRY_S = 1.0
PAUSE_S = (0.1, 0.9)  # between two requests of a client: steady load, and no more than the machine can do


class SteadyLoad:
    """Sends requests between `start` and `stop`, and keeps all answers in `answers`.

    `clients` send one after another, with a pause between; or `rate` a second are sent, however the server fares.
    """

    def __init__(
        self,
        target: ServerAddress,
        requests: Sequence[KeyedRequest],
        seed: int,
        *,
        clients: int = 0,
        rate: float | None = None,
        limit_s: float = PATIENCE_S,
    ):
        self.answers: list[ClientAnswer] = []
        self.under_way = 0
        self._target = target
        self._requests = requests
        self._draw = random.Random(seed)
        self._clients = clients
        self._rate = rate
        self._limit_s = limit_s
        self._stopping = False
        self._tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._ask_in_turn()) for _ in range(self._clients)]
        if self._rate is not None:
            self._tasks.append(asyncio.create_task(self._ask_at(self._rate)))

    async def stop(self) -> None:
        """Let what is under way end; nothing new begins."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def one_more(self, *, leave_after: int | None = None) -> ClientAnswer:
        """Send a request; returns its answer, which is among `answers` too."""
        self.under_way += 1
        request = self._draw.choice(self._requests)
        try:
            answer = await ask(self._target, request, leave_after=leave_after, limit_s=self._limit_s)
        finally:
            self.under_way -= 1
        self.answers.append(answer)
        return answer

    async def _ask_in_turn(self) -> None:
        while not self._stopping:
            answer = await self.one_more()
            if not answer.is_accepted:  # 429: another time; anything else is looked at when all is over
                await asyncio.sleep(min(answer.retry_after_s or RETRY_S, RETRY_S))
            await asyncio.sleep(self._draw.uniform(*PAUSE_S))

    async def _ask_at(self, rate: float) -> None:
        asking: list[asyncio.Task[ClientAnswer]] = []
        began = time.monotonic()
        while not self._stopping:
            asking.append(asyncio.create_task(self.one_more()))
            await asyncio.sleep(began + len(asking) / rate - time.monotonic())
        await asyncio.gather(*asking)


async def answers_of_all(
    target: ServerAddress, requests: Sequence[KeyedRequest], clients: int
) -> dict[int, ClientAnswer]:
    """Return each request's answer by key, with as many under way as the steady load has. Raises RuntimeError."""
    found: dict[int, ClientAnswer] = {}
    left = list(reversed(requests))
    draw = random.Random(len(requests))

    async def run() -> None:
        while left:
            request = left.pop()
            found[request.key] = await ask(target, request)
            await asyncio.sleep(draw.uniform(*PAUSE_S))

    await asyncio.gather(*(run() for _ in range(clients)))
    for answer in found.values():
        if not answer.has_end or answer.error is not None:
            raise RuntimeError(f"a request failed without any fault: {answer.status} {answer.error}")
    return found


@contextmanager
def event_loop_beside() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Give a function that runs a coroutine on another thread's event loop and returns what it returns."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="load", daemon=True)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result()
    finally:  # what still waits for an answer ends with this process
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
