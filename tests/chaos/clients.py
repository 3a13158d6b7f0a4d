"""The clients of a chaos run: what they ask for, drawn from a seed, and what they write down of each answer."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from twostroke.loadtests.generator.http_stream import BadResponse, Piece, events_of, response_of, text_of

MODEL = "twostroke-bundled"

# Some prompts begin alike, so that caches are hit and prefixes pulled beside all the KV that travels.
NUM_PREFIXES = 4
PREFIX_TOKENS = 192
SHORTEST, LONGEST = 20, 600  # prompts, in tokens
LONG_ANSWER = 1200  # tokens: a few streams live through several faults
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["first", "second", None]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9999}, "maxItems": 4},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
MOST_RECORDS = 8  # some fit into their `max_tokens`, others don't


@dataclass(frozen=True)
class Target:
    """Where requests go, and the API key that they have."""

    url: str
    api_key: str

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises OSError."""
        parts = urlsplit(self.url)
        return await asyncio.open_connection(parts.hostname, parts.port)

    async def status_of_models(self) -> int:
        """The status of GET /v1/models; 0 where the connection breaks, as at a router that is killed."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await self.connect()
                try:
                    writer.write(self.head(0).replace(b"POST /v1/completions", b"GET /v1/models"))
                    return int((await reader.readline()).split()[1])
                finally:
                    writer.close()
        except (OSError, IndexError, TimeoutError):
            return 0

    def head(self, num_bytes: int) -> bytes:
        """The head of a request for a completion whose body has so many bytes."""
        lines = (
            "POST /v1/completions HTTP/1.1",
            f"Host: {urlsplit(self.url).netloc}",
            f"Authorization: Bearer {self.api_key}",
            "Content-Type: application/json",
            f"Content-Length: {num_bytes}",
            "Connection: close",
        )
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


@dataclass(frozen=True)
class ClientRequest:
    """One request. `key` names it: equal requests are answered with equal tokens, whatever happens."""

    key: int
    body: dict[str, Any]

    @property
    def num_choices(self) -> int:
        choices: int = self.body["n"]
        return choices

    @property
    def schema(self) -> dict[str, Any] | None:
        """What its answers are held to."""
        return self.body.get("guided_json")


def draw_requests(seed: int, count: int) -> list[ClientRequest]:
    """`count` different requests."""
    draw = random.Random(seed)
    prefixes = [_tokens(draw, PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    requests = []
    for key in range(count):
        body = _body(draw, prefixes, is_long=key % 15 == 14)
        if key % 5 == 3 or key % 30 == 14:
            least = LONG_ANSWER if key % 30 == 14 else draw.randint(1, MOST_RECORDS)
            schema = {"type": "array", "items": RECORD, "minItems": least, "maxItems": least + 1}
            body |= {"guided_json": schema, "ignore_eos": False, "stop": []}
        requests.append(ClientRequest(key, body))
    return requests


def _body(draw: random.Random, prefixes: list[list[int]], *, is_long: bool) -> dict[str, Any]:
    length = round(SHORTEST * (LONGEST / SHORTEST) ** draw.random())
    prompt = _tokens(draw, length)
    if draw.random() < 0.3:
        prompt = (draw.choice(prefixes) + prompt)[:LONGEST]
    n = draw.choices((1, 2, 3), (70, 20, 10))[0]
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": LONG_ANSWER if is_long else draw.randint(30, 300) // n,
        "n": 1 if is_long else n,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "ignore_eos": draw.random() < 0.9,
        "seed": draw.getrandbits(31),
        "temperature": draw.choice((0.0, 0.0, 0.7, 1.0)),
    }
    if draw.random() < 0.3:
        body |= {"top_p": 0.9, "top_k": 50}
    if draw.random() < 0.5:  # they show KV that is a little wrong long before a token does
        body["logprobs"] = 2
    if draw.random() < 0.2:
        body["stop"] = draw.sample(["\n\n", "return", ")\n", " the", "self."], 2)
    if draw.random() < 0.15:
        body |= {"frequency_penalty": 0.4, "repetition_penalty": 1.1}
    return body


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randint(300, 3300) for _ in range(count)]


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


async def ask(target: Target, request: ClientRequest, *, leave_after: int | None = None) -> Answer:
    """Send the request and take what comes, to its end or until about `leave_after` events have come."""
    answer = Answer(request, time.monotonic(), choices=[Choice() for _ in range(request.num_choices)])
    came: list[Piece] = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            answer.left = await _receive(target, request, came, leave_after)
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


async def _receive(target: Target, request: ClientRequest, came: list[Piece], leave_after: int | None) -> bool:
    """Whether the client has left before the server hung up. Raises OSError."""
    payload = json.dumps(request.body).encode()
    reader, writer = await target.connect()
    num_events = 0
    try:
        writer.write(target.head(len(payload)) + payload)
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


RETRY_S = 1.0
PAUSE_S = (0.1, 0.9)  # between two requests of a client: steady load, and no more than the machine can do


class SteadyLoad:
    """Keeps `clients` requests under way between `start` and `stop`, and all answers in `answers`."""

    def __init__(self, target: Target, requests: Sequence[ClientRequest], clients: int, seed: int):
        self.answers: list[Answer] = []
        self.under_way = 0
        self._target = target
        self._requests = requests
        self._clients = clients
        self._draw = random.Random(seed)
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._run()) for _ in range(self._clients)]

    async def stop(self) -> None:
        """Let what is under way end; nothing new begins."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def one_more(self, *, leave_after: int | None = None) -> Answer:
        """Send a request; returns its answer, which is among `answers` too."""
        self.under_way += 1
        try:
            answer = await ask(self._target, self._draw.choice(self._requests), leave_after=leave_after)
        finally:
            self.under_way -= 1
        self.answers.append(answer)
        return answer

    async def _run(self) -> None:
        while not self._stopping:
            answer = await self.one_more()
            if not answer.is_accepted:  # 429: another time; anything else is looked at when all is over
                await asyncio.sleep(min(answer.retry_after_s or RETRY_S, RETRY_S))
            await asyncio.sleep(self._draw.uniform(*PAUSE_S))


async def answers_of_all(target: Target, requests: Sequence[ClientRequest], clients: int) -> dict[int, Answer]:
    """Each request's answer, by key, with as many under way as the steady load has."""
    found: dict[int, Answer] = {}
    left = list(reversed(requests))
    draw = random.Random(len(requests))

    async def run() -> None:
        while left:
            request = left.pop()
            found[request.key] = await ask(target, request)
            await asyncio.sleep(draw.uniform(*PAUSE_S))

    began = time.monotonic()
    await asyncio.gather(*(run() for _ in range(clients)))
    took_s = time.monotonic() - began
    for answer in found.values():
        if not answer.has_end or answer.error is not None:
            raise RuntimeError(f"a request failed without any fault: {answer.status} {answer.error}")
    tokens = sum((answer.usage or {})["completion_tokens"] for answer in found.values())
    print(f"    {len(found)} requests without faults: {tokens} tokens in {took_s:.1f} s", flush=True)
    return found
