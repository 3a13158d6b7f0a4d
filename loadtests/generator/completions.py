"""One streamed completion: the request as it is sent, and what its answer says about tokens and times."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from loadtests.generator.sse import BadResponse, Event, Piece, body_of, events_of


@dataclass
class Exchange:
    """A request and the raw bytes that came back. Times are of `time.perf_counter`."""

    sent_at: float
    arrivals: list[Piece] = field(default_factory=list)
    broken: str | None = None  # why the connection failed


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    sent_at: float
    token_times: tuple[float, ...]  # one for each event that brought tokens; some servers put several into one
    prompt_tokens: int
    completion_tokens: int  # as the server's `usage` says

    @property
    def ttft_s(self) -> float:
        """Seconds from sending to the first token."""
        return self.token_times[0] - self.sent_at

    @property
    def ended_at(self) -> float:
        return self.token_times[-1]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between events with tokens, just as they came."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]


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


def read_answer(exchange: Exchange) -> Answer:
    """What the bytes of an exchange say. Raises BadResponse for all but a complete answer."""
    if exchange.broken is not None:
        raise BadResponse(exchange.broken)
    token_times: list[float] = []
    usage: dict[str, Any] | None = None
    complete = False
    for event in events_of(body_of(exchange.arrivals)):
        if event.data == b"[DONE]":
            complete = True
            break
        message = _message_of(event)
        usage = message.get("usage") or usage
        if any(_has_token(choice) for choice in message.get("choices", ())):
            token_times.append(event.at)
    if not complete:
        raise BadResponse("the stream has no end")
    if usage is None:
        raise BadResponse("the stream tells no usage, which says how many tokens it had")
    if not token_times:
        raise BadResponse("the stream has no tokens")
    return Answer(exchange.sent_at, tuple(token_times), int(usage["prompt_tokens"]), int(usage["completion_tokens"]))


def _message_of(event: Event) -> dict[str, Any]:
    """The chunk of an answer that an event holds. Raises BadResponse for anything else, the server's errors too."""
    try:
        message = json.loads(event.data)
    except ValueError:
        raise BadResponse(f"an event is no JSON: {event.data[:100]!r}") from None
    if not isinstance(message, dict) or message.get("error"):
        raise BadResponse(f"the server says {event.data[:300].decode(errors='replace')}")
    return message


def _has_token(choice: dict[str, Any]) -> bool:
    """An event without text may still bring a token (half a character); one that only ends the stream brings none."""
    return bool(choice.get("text")) or choice.get("finish_reason") is None


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
