"""A server of OpenAI's completions in a process of its own that plays scripts, and stamps what it did.

What it does with a request follows from the prompt alone, so both sides know it. Bare asyncio, since every layer
between a timer and the socket would add to the errors that are to be measured.
"""

import asyncio
import gc
import json
import multiprocessing
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.plan import SLO
from twostroke.loadtests.workloads.arrivals import derive_seed

MODEL = "stub"
VOCABULARY = 32_000
END_LIMIT_S = 30.0
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
        """Return whether it meets the SLO. Only a whole answer counts, and one token has no time between tokens."""
        if self.status != 200 or self.ending != "whole":
            return False
        in_time = slo.ttft_s is None or self.ttft_s <= slo.ttft_s
        flows = slo.tpot_s is None or not self.gaps_s or sum(self.gaps_s) / len(self.gaps_s) <= slo.tpot_s
        return in_time and flows


def key_of(prompt: Sequence[int | str]) -> int:
    """Return a key that tells a prompt from others."""
    return derive_seed("script", *prompt[:KEY_TOKENS])


def steady(draw: random.Random, tokens: int) -> Script:
    """A healthy server: 50 tokens a second, unevenly, and never two streams in step."""
    return Script(ttft_s=draw.uniform(0.05, 0.5), gaps_s=tuple(draw.uniform(0.005, 0.035) for _ in range(tokens - 1)))


def immediate(draw: random.Random, tokens: int) -> Script:
    """Answer as fast as possible. A client that finds this server slow is slow itself."""
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
    """Return what happens to the request with this key, which asks for `tokens` tokens."""
    return SCENARIOS[scenario](random.Random(key), tokens)


class StubRequest(msgspec.Struct):
    """One request, by the machine's monotonic clock, which all processes share."""

    key: int
    arrived_s: float  # when its last byte was read
    token_s: list[float] = []  # when each token was handed to the socket


@contextmanager
def stub_server(scenario: str) -> Iterator[tuple[str, list[StubRequest]]]:
    """Its URL, and what it served, which is known at the block's end. Raises LoadTestError where it can't be run."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_stub_process, args=(scenario, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        served: list[StubRequest] = []
        yield f"http://127.0.0.1:{_told(ours)}", served
        ours.send("end")
        served += _told(ours)
    finally:
        process.kill()
        process.join()


def _told(stub: Connection) -> Any:
    if stub.poll(END_LIMIT_S):
        try:
            return stub.recv()
        except EOFError:
            pass
    raise LoadTestError("the stub server did not start, or end, as it should")


def _stub_process(scenario: str, control: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the generator's
    control.send(asyncio.run(_serve(scenario, control)))


async def _serve(scenario: str, control: Connection) -> list[StubRequest]:
    """Tells its port, and serves until it is told something, or who started it is gone. Returns what was served."""
    served: list[StubRequest] = []
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(control.fileno(), ended.set)
    server = await asyncio.start_server(partial(_converse, scenario, served), "127.0.0.1", 0, backlog=4096)
    control.send(server.sockets[0].getsockname()[1])
    gc.disable()  # a pause of the collector would be a token too late
    await ended.wait()
    server.close()
    return served


class _StubBody(msgspec.Struct):
    max_tokens: int
    prompt: list[int] | str = ""
    messages: list[dict[str, str]] = []

    @property
    def tokens(self) -> Sequence[int | str]:
        """The prompt's; of text and of chats each word is one."""
        text = " ".join(message["content"] for message in self.messages) or self.prompt
        return text.split() if isinstance(text, str) else text


async def _converse(
    scenario: str, served: list[StubRequest], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One request and its answer."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        body = await reader.readexactly(int(length[1]) if length else 0)
        now = time.monotonic()
        if head.startswith(b"GET /v1/models "):
            card = {"id": MODEL, "object": "model", "owned_by": "stub"}
            writer.write(_answer(200, {"object": "list", "data": [card]}))
        elif head.startswith((b"POST /v1/completions ", b"POST /v1/chat/completions ")):
            await _play(scenario, served, now, msgspec.json.decode(body, type=_StubBody), reader, writer)
        else:
            writer.write(_answer(404, {"error": {"message": "the stub has no such path"}}))
    except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
        pass  # the client is gone, or the stub's time is over
    finally:
        writer.close()


async def _play(
    scenario: str,
    served: list[StubRequest],
    now: float,
    body: _StubBody,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    request = StubRequest(key_of(body.tokens), now)
    served.append(request)
    script = script_of(scenario, request.key, body.max_tokens)
    if script.status != 200:
        writer.write(_answer(script.status, {"error": {"message": "as the script says"}}))
        return
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
        b"Connection: close\r\nX-Request-Id: %x\r\n\r\n" % request.key
    )
    content = {"delta": {"content": " word"}} if body.messages else {"text": " word"}
    due = now
    for wait_s in (script.ttft_s, *script.gaps_s):
        due += wait_s  # from the planned instant on, so that what is late once does not make all that follows late
        await asyncio.sleep(due - time.monotonic())
        if reader.at_eof() or writer.is_closing():
            return
        request.token_s.append(time.monotonic())
        writer.write(_chunk({"choices": [{"index": 0, **content, "finish_reason": None}]}))
    if script.ending == "silent":
        await reader.read()  # until the client gives up
    elif script.ending == "whole":
        usage = {"prompt_tokens": len(body.tokens), "completion_tokens": len(request.token_s)}
        writer.write(
            _chunk({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
            + _chunk({"choices": [], "usage": usage | {"total_tokens": sum(usage.values())}})
            + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        )


def _answer(status: int, content: object) -> bytes:
    body = json.dumps(content).encode()
    head = b"HTTP/1.1 %d Stub\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (status, len(body)) + body


def _chunk(content: object) -> bytes:
    event = b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)
