"""A server of OpenAI's completions that plays scripts (loadtests/selfcheck/script.py) and stamps what it did.

Bare asyncio, since every layer between a timer and the socket would add to the errors that are to be measured. The
first line of its output is the port; on SIGTERM it writes its log (a line of JSON for each request) and ends.
"""

import argparse
import asyncio
import gc
import json
import signal
import socket
import time
from pathlib import Path

import msgspec

from twostroke.loadtests.selfcheck.script import SCENARIOS, key_of, script_of


class Served(msgspec.Struct):
    """One request, by the machine's monotonic clock, which all processes share."""

    key: int
    arrived_s: float  # when its last byte was read
    token_s: list[float] = []  # when each token was handed to the socket


class _Body(msgspec.Struct):
    prompt: list[int]
    max_tokens: int


class Connection(asyncio.Protocol):
    """One request and its answer."""

    def __init__(self, scenario: str, model: str, log: list[Served]) -> None:
        self._scenario = scenario
        self._model = model
        self._log = log
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found or len(body) < _content_length(head):
            return
        now = time.monotonic()
        self._received = b""
        if head.startswith(b"GET /v1/models "):
            self._answer(200, {"object": "list", "data": [{"id": self._model, "object": "model", "owned_by": "stub"}]})
        elif head.startswith(b"POST /v1/completions "):
            self._play(now, msgspec.json.decode(body, type=_Body))
        else:
            self._answer(404, {"error": {"message": "the stub has no such path"}})

    def _play(self, now: float, body: _Body) -> None:
        self._served = Served(key_of(body.prompt), now)
        self._log.append(self._served)
        self._script = script_of(self._scenario, self._served.key, body.max_tokens)
        self._num_prompt_tokens = len(body.prompt)
        if self._script.status != 200:
            self._answer(self._script.status, {"error": {"message": "as the script says"}})
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            b"Connection: close\r\nX-Request-Id: %x\r\n\r\n" % self._served.key
        )
        self._next_at = now + self._script.ttft_s
        self._timer = self._loop.call_at(self._next_at, self._token)

    def _token(self) -> None:
        sent = len(self._served.token_s)
        self._served.token_s.append(time.monotonic())
        self._transport.write(_chunk({"choices": [{"index": 0, "text": " word", "finish_reason": None}]}))
        if sent < len(self._script.gaps_s):
            # From the planned instant on, so that what is late once does not make all that follows late.
            self._next_at += self._script.gaps_s[sent]
            self._timer = self._loop.call_at(self._next_at, self._token)
        else:
            self._end(sent + 1)

    def _end(self, num_tokens: int) -> None:
        if self._script.ending == "silent":
            return
        if self._script.ending == "whole":
            usage = {"prompt_tokens": self._num_prompt_tokens, "completion_tokens": num_tokens}
            self._transport.write(
                _chunk({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
                + _chunk({"choices": [], "usage": usage | {"total_tokens": sum(usage.values())}})
                + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
            )
        self._transport.close()

    def _answer(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        self._transport.write(
            b"HTTP/1.1 %d Stub\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
            % (status, len(body), body)
        )
        self._transport.close()


def _content_length(head: bytes) -> int:
    for field in head.split(b"\r\n")[1:]:
        name, _, value = field.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _chunk(content: object) -> bytes:
    event = b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


async def serve(scenario: str, model: str) -> list[Served]:
    """Until SIGTERM. Returns what was served."""
    log: list[Served] = []
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    server = await loop.create_server(lambda: Connection(scenario, model, log), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    gc.disable()  # a pause of the collector would be a token too late
    await ended.wait()
    server.close()
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=SCENARIOS, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--log", type=Path, required=True)
    arguments = parser.parse_args()
    log = asyncio.run(serve(arguments.scenario, arguments.model))
    arguments.log.write_bytes(b"".join(msgspec.json.encode(served) + b"\n" for served in log))


if __name__ == "__main__":
    main()
