"""A server of OpenAI's completions in a process of its own that plays scripts, and stamps what it did.

What it does with a request follows from the prompt alone, so both sides know it. Bare asyncio, since every layer
between a timer and the socket would add to the errors that are to be measured. The first line of its output is the
port; on SIGTERM it writes its log (a line of JSON for each request) and ends.
"""

import argparse
import asyncio
import gc
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.plan import SLO
from twostroke.loadtests.workloads.arrivals import seed_of

KEY_TOKENS = 16  # of the prompt's beginning, that tell requests apart

Ending = Literal["whole", "broken", "silent"]
"""broken: the connection is closed before the stream's end; silent: nothing more comes, and it stays open."""


@dataclass(frozen=True)
class Script:
    """One answer. Instants are planned; the stub stamps what they really were."""

    status: int = 200  # of HTTP; all but 200 are answered at once
    ttft_s: float = 0.0  # from the request's last byte
    gaps_s: tuple[float, ...] = ()  # between tokens, of which there is one more
    ending: Ending = "whole"

    def meets(self, slo: SLO) -> bool:
        """As the definitions have it: only a whole answer counts, and one token has no time between tokens."""
        if self.status != 200 or self.ending != "whole":
            return False
        in_time = slo.ttft_s is None or self.ttft_s <= slo.ttft_s
        flows = slo.tpot_s is None or not self.gaps_s or sum(self.gaps_s) / len(self.gaps_s) <= slo.tpot_s
        return in_time and flows


def key_of(prompt: Sequence[int]) -> int:
    """What tells a prompt from others."""
    return seed_of("script", *prompt[:KEY_TOKENS])


def steady(draw: random.Random, tokens: int) -> Script:
    """A healthy server: 50 tokens a second, unevenly, and never two streams in step."""
    return Script(ttft_s=draw.uniform(0.05, 0.5), gaps_s=tuple(draw.uniform(0.005, 0.035) for _ in range(tokens - 1)))


def immediate(draw: random.Random, tokens: int) -> Script:
    """As fast as can be: whoever finds this server slow is slow."""
    return Script(ttft_s=0.001, gaps_s=(0.001,) * (tokens - 1))


# What meets MIXED_SLO does so with more than half a second to spare, and what misses it has twice what is allowed.
MIXED_SLO = SLO(ttft_s=1.0, tpot_s=0.2)
MIXED_LIMIT_S = 4.0  # after which the client gives up a silent answer
_FAST = (0.05, 0.01)
_MIXED: tuple[tuple[int, Script], ...] = (
    (8, Script(ttft_s=_FAST[0], gaps_s=(_FAST[1],) * 5)),
    (2, Script(ttft_s=0.3, gaps_s=(0.05,) * 4)),
    (2, Script(ttft_s=_FAST[0])),  # one token
    (1, Script(ttft_s=2.0)),  # one, late
    (2, Script(ttft_s=2.0, gaps_s=(_FAST[1],) * 5)),
    (2, Script(ttft_s=_FAST[0], gaps_s=(0.4,) * 4)),
    (1, Script(ttft_s=_FAST[0], gaps_s=(0.001,) * 4 + (2.1,))),  # a stall alone spoils the mean
    (1, Script(status=429)),
    (1, Script(status=503)),
    (1, Script(status=500)),
    (1, Script(ttft_s=_FAST[0], gaps_s=(_FAST[1],) * 5, ending="broken")),
    (1, Script(ttft_s=_FAST[0], gaps_s=(_FAST[1],) * 2, ending="silent")),
)


def mixed(draw: random.Random, tokens: int) -> Script:
    """All that can become of a request, whatever number of tokens it asks for."""
    return draw.choices([script for _, script in _MIXED], [weight for weight, _ in _MIXED])[0]


SCENARIOS: dict[str, Callable[[random.Random, int], Script]] = {
    "steady": steady,
    "immediate": immediate,
    "mixed": mixed,
}


def script_of(scenario: str, key: int, tokens: int) -> Script:
    """What becomes of the request with this key, which asks for `tokens` tokens."""
    return SCENARIOS[scenario](random.Random(key), tokens)


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
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
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


MODEL = "stub"
VOCABULARY = 32_000
END_LIMIT_S = 30.0


@dataclass
class Stub:
    """A running stub; what it served is known once it has ended."""

    url: str
    served: list[Served] = field(default_factory=list)


@contextmanager
def stub_server(scenario: str, log: Path) -> Iterator[Stub]:
    """Until the block's end; then `served` is filled from `log`. Raises LoadTestError where it did not start or end."""
    command = [sys.executable, "-m", "twostroke.loadtests.selfcheck.stub_server", "--scenario", scenario]
    command += ["--model", MODEL, "--log", str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port:
                raise LoadTestError(f"the stub server ended with {process.wait()} before it served")
            stub = Stub(f"http://127.0.0.1:{port}")
            yield stub
            process.terminate()
            if process.wait(END_LIMIT_S) != 0:
                raise LoadTestError(f"the stub server ended with {process.returncode}, and its log is not whole")
        finally:
            process.kill()
    decode = msgspec.json.Decoder(Served).decode
    stub.served += map(decode, log.read_bytes().splitlines())
