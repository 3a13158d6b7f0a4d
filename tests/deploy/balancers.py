"""Real servers behind the real balancers: streams as they would come without one, and load while an entry point fails.

    python -m tests.deploy.balancers            some minutes; the last line is JSON

HAProxy and nginx, with the files of deploy/, stand side by side in front of two `twostroke serve`. While both are under
load, one server's router is killed, then its proxy, then the server drains, then all its processes are killed at once.
A request counts as new where it was sent after the fault had begun: of these none may fail, with either balancer. What
was under way at that moment is told apart: begun streams can't be gone on with by a balancer.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.moments import send_at_moments
from tests.deploy.programs import find, haproxies
from tests.deploy.proxies import Proxy, running
from tests.rigs.completions import stream_completion
from tests.rigs.processes import comes
from twostroke.cluster.local.processes import become_subreaper, descendants, end_descendants
from twostroke.cluster.local.server_process import processes_named, twostroke_server
from twostroke.loadtests.generator.http_stream import ClientExchange, read_stream

MODEL = "twostroke-bundled"
SETTINGS = {"router": {"drain_notice_s": 6.0}, "prefill": {"threads": 1}, "decode": {"threads": 1}}
GRACE_S = 13.0
AGAIN_S = 90.0  # for a server to be ready again
TOKENS = 200
PACE_S = 0.02
PACED_EVENTS = 150


@dataclass
class Counts:
    """Outcomes of the requests through one balancer in one phase."""

    new: int = 0  # sent after the fault had begun
    new_failed: int = 0
    old: int = 0  # under way then
    old_failed: int = 0  # before their first byte
    old_cut: int = 0  # after it
    failures: list[str] = field(default_factory=list)


def outcome(result: ClientExchange) -> str:
    """done, cut (an answer that began and did not end), or what was said instead."""
    raw = b"".join(data for _, data in result.arrivals)
    if not raw.startswith(b"HTTP/1.1 200"):
        return raw.split(b"\r\n", 1)[0].decode(errors="replace") or f"no answer: {result.broken}"
    return "done" if b"data: [DONE]" in raw else "cut"


async def ask(url: str, number: int) -> ClientExchange:
    body = {"model": MODEL, "prompt": f"Request {number} tells of", "max_tokens": TOKENS, "ignore_eos": True}
    return await stream_completion(url, body)


async def phase(
    proxies: dict[str, Proxy], rate: float, before_s: float, after_s: float, fault: Callable[[], Awaitable[None]]
) -> dict[str, Counts]:
    """Load by each balancer at `rate` a second, with the fault amid; returns when all is answered."""
    fault_at = math.inf

    async def harm() -> None:
        nonlocal fault_at
        await asyncio.sleep(before_s)
        fault_at = time.perf_counter()
        await fault()

    harming = asyncio.create_task(harm())

    def moments() -> Iterator[float]:
        for number in itertools.count():
            if number / rate >= before_s + after_s and harming.done():
                return
            yield number / rate

    async def ask_by_all(number: int, _: float) -> list[ClientExchange]:
        return await asyncio.gather(*(ask(proxy.url, number) for proxy in proxies.values()))

    counts = {name: Counts() for name in proxies}
    for answers in await send_at_moments(moments(), ask_by_all):
        for of_one, result in zip(counts.values(), answers, strict=True):
            told = outcome(result)
            ended_at = result.arrivals[-1][0] if result.arrivals else math.inf
            if result.sent_at >= fault_at:
                of_one.new += 1
                of_one.new_failed += told != "done"
            elif told != "done" or ended_at >= fault_at:
                of_one.old += 1
                of_one.old_cut += told == "cut"
                of_one.old_failed += told not in ("done", "cut")
            if told != "done":
                of_one.failures.append(f"{result.sent_at - fault_at:+.2f} s: {told}")
    await harming
    return counts


async def gaps(url: str) -> dict[str, float]:
    """Return how a stream's events arrive: milliseconds between them, and events per packet."""
    result = await ask(url, 0)
    times = read_stream(result).token_times
    between = sorted(1000 * (later - earlier) for earlier, later in itertools.pairwise(times))
    return {
        "gap_ms_p50": round(statistics.median(between), 2),
        "gap_ms_p90": round(between[len(between) * 9 // 10], 2),
        "gap_ms_max": round(between[-1], 2),
        "events_a_packet": round(len(times) / (len(result.arrivals) - 1), 2),
    }


async def paced_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An entry point whose events come at a steady pace: what a balancer adds to their gaps is its own."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        if head.startswith(b"POST"):
            began = time.perf_counter()
            for number in range(PACED_EVENTS):
                await asyncio.sleep(began + number * PACE_S - time.perf_counter())
                writer.write(b'25\r\ndata: {"choices":[{"text":"%04d"}]}\n\n\r\n' % number)
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    except ConnectionError:
        pass  # a health check has seen enough
    finally:
        writer.close()


async def paced_gaps(programs: dict[str, str], folder: Path) -> dict[str, dict[str, float]]:
    """Return the gaps without a balancer, and through each."""
    server = await asyncio.start_server(paced_stream, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    told = {"direct": await gaps(f"http://127.0.0.1:{port}")}
    for name, program in programs.items():
        balancer = running(name, program, [port, port], folder)
        proxy = await asyncio.to_thread(balancer.__enter__)
        try:
            told[name] = await gaps(proxy.url)
        finally:
            await asyncio.to_thread(balancer.__exit__, None, None, None)
    server.close()
    return told


class Servers:
    """Two servers; the first is the one that is harmed."""

    def __init__(self, folder: Path):
        config = folder / "server.yaml"
        config.write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
        self._arguments = ["--config", str(config), "--grace", str(GRACE_S)]
        self.first = twostroke_server(self._arguments)
        self.second = twostroke_server(self._arguments)

    async def start(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(server.__enter__) for server in (self.first, self.second)))

    async def start_first_again(self) -> None:
        self.first = twostroke_server(self._arguments, port=self.first.port)
        await asyncio.to_thread(self.first.__enter__)

    async def kill_router(self) -> None:
        _kill(processes_named("ServeReplica:twostroke:Router", descendants(self.first.pid)))

    async def kill_proxy(self) -> None:
        _kill(processes_named("haproxy", descendants(self.first.pid)))

    async def drain(self) -> None:
        os.kill(self.first.pid, signal.SIGINT)
        assert await comes(lambda: self.first.pid not in descendants(), AGAIN_S)
        self.first.end()

    async def kill_all(self) -> None:
        _kill([self.first.pid, *descendants(self.first.pid)])

    async def await_ready(self) -> None:
        assert await comes(self._is_ready, AGAIN_S)

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.first.url}/ready").status_code == 200
        return False


def _kill(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it went with another
            os.kill(pid, signal.SIGKILL)


async def measure(rate: float, folder: Path) -> dict[str, Any]:
    programs = {"haproxy": haproxies()[0], "nginx": find("nginx") or ""}
    told: dict[str, Any] = {"paced_streams": await paced_gaps(programs, folder), "faults": {}}
    print(json.dumps(told["paced_streams"]), flush=True)
    servers = Servers(folder)
    print("Starting two servers ...", flush=True)
    await servers.start()
    with ExitStack() as stack:
        entries = [servers.first.port, servers.second.port]
        proxies = {
            name: stack.enter_context(running(name, program, entries, folder)) for name, program in programs.items()
        }
        for fault_name, fault in (
            ("router_killed", servers.kill_router),
            ("proxy_killed", servers.kill_proxy),
            ("drained", servers.drain),
            ("server_killed", servers.kill_all),
        ):
            counts = await phase(proxies, rate, 4.0, 10.0, fault)
            told["faults"][fault_name] = {name: asdict(count) for name, count in counts.items()}
            print(fault_name, json.dumps(told["faults"][fault_name]), flush=True)
            if fault_name == "drained":
                await servers.start_first_again()
            if fault_name != "server_killed":
                await servers.await_ready()
                await asyncio.sleep(8.0)  # until balancers have noticed, too
    told["new_failed"] = sum(one["new_failed"] for both in told["faults"].values() for one in both.values())
    told["new"] = sum(one["new"] for both in told["faults"].values() for one in both.values())
    return told


def main() -> int:
    """Returns 1 where a new request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second by each balancer (%(default)s)")
    arguments = parser.parse_args()
    if not haproxies() or find("nginx") is None:
        print("HAProxy or nginx is missing: make tools", file=sys.stderr)
        return 2
    become_subreaper()
    with tempfile.TemporaryDirectory(prefix="twostroke-balancers-") as folder:
        try:
            told = asyncio.run(measure(arguments.rate, Path(folder)))
        finally:
            end_descendants(patience_s=5.0)
    print(json.dumps(told))
    return 1 if told["new_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
