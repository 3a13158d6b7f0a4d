"""A real Prometheus scrapes a real server by deploy/'s files, and every panel of the dashboard is asked for its data.

    python -m tests.deploy.monitoring            about two minutes; the last line is JSON
    python -m tests.deploy.monitoring --upgrade  some minutes: a second server takes the first one's place under load,
                                                 and no alert may fire, or be about to once it is over

The server has two routers, an autoscaler and three SLO classes; HAProxy stands in front, as in deploy/. It gets a
little load, with requests that are refused and a decode worker killed amid: panels about faults have data, too.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.moments import send_at_moments
from tests.deploy.programs import DEPLOY, ROOT, find, haproxies
from tests.deploy.proxies import Proxy, running, started
from tests.rigs.completions import stream_completion
from tests.rigs.processes import comes
from twostroke.cluster.local.processes import become_subreaper, descendants, end_descendants
from twostroke.cluster.local.ray import free_ports
from twostroke.cluster.local.server_process import ServerFailed, ServerProcess, processes_named, twostroke_server

MONITORING = DEPLOY / "monitoring"
PROMETHEUS = MONITORING / "prometheus.yml"
RULES = MONITORING / "alerts.yml"
RULES_TEST = ROOT / "tests/deploy/alerts_test.yml"
DASHBOARD = MONITORING / "grafana-dashboard.json"

MODEL = "twostroke-bundled"
SETTINGS: dict[str, Any] = {
    "prefill": {"threads": 1},
    "decode": {"threads": 1, "replicas": 2},
    # Or the small model's prompts would never travel.
    "router": {"replicas": 2, "decodes_alone": False, "roles": "fixed"},
    "autoscaling": {"enabled": True, "prefill": {"max": 1}, "decode": {"max": 2, "min": 2}},
    "slo": {
        "classes": [
            {"name": "chat", "ttft_s": 5.0, "tpot_s": 1.0, "priority": 1},
            {"name": "batch"},
            {"name": "instant", "ttft_s": 0.0001},  # nobody can: refused
        ]
    },
}
LONG_STREAMS = 24
LONG_TOKENS = 400
SHARED = "The quick brown fox jumps over the lazy dog. " * 12

_SCRAPE_S = 'quantile_over_time(0.5, scrape_duration_seconds{job="twostroke"}[10m])'

EMPTY_UNTIL = {
    "Hottest experts": "the model has experts",
    "Copies of hot experts": "the model has experts, and copies of them",
    **dict.fromkeys(
        (
            *("Objects looked up", "Prompt tokens from tiers", "Tiers held, of their quota", "Tiers read and written"),
            *("Time in reads and writes of tiers", "Objects written, dropped and evicted"),
            "Tiers: what should stay 0",
        ),
        "the workers have KV tiers",
    ),
    "Queues by class": "a scrape finds requests that wait",
}
"""Panels that may be empty here, by what has to happen first. We see to refusals, errors and a lost worker."""


_SERIES = re.compile(r"\btwostroke:[a-zA-Z0-9_]+")
_RECORDED = re.compile(r"\b\w+:twostroke_\w+:\w+")


@dataclass(frozen=True)
class Query:
    """An expression of PromQL, and where it stands."""

    place: str
    text: str

    def series(self) -> set[str]:
        """Names of our series, those of histograms with their suffixes."""
        return set(_SERIES.findall(self.text))

    def recorded(self) -> set[str]:
        """Names of what rules record."""
        return set(_RECORDED.findall(self.text))


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return loaded


def panels() -> list[dict[str, Any]]:
    """Return the panels without the rows' titles."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def panel_queries() -> Iterator[Query]:
    for panel in panels():
        for target in panel["targets"]:
            yield Query(panel["title"], target["expr"])


def rules() -> list[dict[str, Any]]:
    loaded = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return [rule for group in loaded["groups"] for rule in group["rules"]]


def rule_queries() -> Iterator[Query]:
    for rule in rules():
        yield Query(rule.get("alert") or rule["record"], rule["expr"])


async def load(url: str, rate: float, seconds: float) -> int:
    """Streams of two classes, some refused and some wrong; returns how many the server must have begun."""
    bodies = [_body(number) for number in range(round(rate * seconds))]
    moments = (number / rate for number in range(len(bodies)))
    await send_at_moments(moments, lambda number, _: stream_completion(url, bodies[number]))
    return sum("temperature" not in body for body in bodies)


def _body(number: int) -> dict[str, Any]:
    tier = "instant" if number % 10 == 9 else ("chat", "batch")[number % 2]
    body = {"model": MODEL, "prompt": f"{SHARED}{number}", "max_tokens": 24, "service_tier": tier}
    return body | {"temperature": -1} if number % 17 == 16 else body


def prometheus_config(operators: str, folder: Path) -> dict[str, Any]:
    """deploy/prometheus.yml, often enough for a short look, of a server without keys, and without the Ray clusters that
    this machine may have."""
    config: dict[str, Any] = yaml.safe_load(PROMETHEUS.read_text(encoding="utf-8"))
    config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(RULES)]
    for job in config["scrape_configs"]:
        job.pop("authorization", None)
        for static in job.get("static_configs", ()):
            static["targets"] = [operators.removeprefix("http://")]
        for listed in job.get("file_sd_configs", ()):
            listed["files"] = [f"{folder}/no_ray.json"]
    return config


@contextmanager
def prometheus(program: str, operators: str, folder: Path) -> Iterator[str]:
    """Start Prometheus; yield its address."""
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(prometheus_config(operators, folder)), encoding="utf-8")
    (port,) = free_ports(1)
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder}/data", "--log.level=warn"]
    with started([*command, f"--web.listen-address=127.0.0.1:{port}"], (port,), folder / "prometheus.log"):
        yield f"http://127.0.0.1:{port}"


async def values(client: httpx.AsyncClient, expression: str) -> list[float]:
    """Return an expression's values now, without NaN."""
    told = await _asked(client, "query", expression)
    return [value for value in (float(one["value"][1]) for one in told) if not math.isnan(value)]


async def has_data(client: httpx.AsyncClient, expression: str, seconds: float) -> bool:
    """Return whether a panel would show anything of the last `seconds`."""
    now = time.time()
    told = await _asked(client, "query_range", expression, start=now - seconds, end=now, step=1)
    return any(not math.isnan(float(value)) for one in told for _, value in one["values"])


async def _asked(client: httpx.AsyncClient, kind: str, expression: str, **more: float) -> list[dict[str, Any]]:
    for name, value in (("$__rate_interval", "1m"), ("$__range", "10m"), ("$job", "twostroke")):
        expression = expression.replace(name, value)
    answer = await client.post(f"/api/v1/{kind}", data={"query": expression, **more})
    assert answer.status_code == 200, f"{expression}: {answer.text}"
    result: list[dict[str, Any]] = answer.json()["data"]["result"]
    return result


async def judge(client: httpx.AsyncClient, sound: int, seconds: float) -> dict[str, Any]:
    """Return which panels have data, whether counters add up over routers, and the state of rules and targets."""
    without: dict[str, list[str]] = {}
    for panel in panels():
        empty = [one["expr"] for one in panel["targets"] if not await has_data(client, one["expr"], seconds)]
        if empty:
            without[panel["title"]] = empty
    groups = (await client.get("/api/v1/rules")).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    targets = (await client.get("/api/v1/targets")).json()["data"]["activeTargets"]
    begun = sum(await values(client, "twostroke:request_prompt_tokens_count"))
    return {
        "panels": len(panels()),
        "with_data": len(panels()) - len(without),
        "without_data": without,
        "unexpected": sorted(set(without) - set(EMPTY_UNTIL)),
        "rules": len(rules),
        "rules_in_error": [rule["name"] for rule in rules if rule["health"] != "ok"],
        "firing": sorted({rule["name"] for rule in rules if rule.get("state") == "firing"}),
        "targets_up": sorted(one["labels"]["job"] for one in targets if one["health"] == "up"),
        "routers": len(await values(client, "count by (router) (twostroke:router_ready)")),
        "router_counter_resets": sum(await values(client, "sum(resets(twostroke:prompt_tokens_total[10m]))")),
        "choices_sent": sound,
        "choices_counted": int(begun),
        "scrape_ms_p50": round(1000 * max(await values(client, _SCRAPE_S))),
        "scrape_samples": int(max(await values(client, 'scrape_samples_scraped{job="twostroke"}'))),
    }


async def measure(
    server: ServerProcess, proxy: Proxy, prometheus_url: str, rate: float, seconds: float
) -> dict[str, Any]:
    loading = asyncio.create_task(load(proxy.url, rate, seconds))
    await asyncio.sleep(seconds / 2)
    long = {"model": MODEL, "max_tokens": LONG_TOKENS, "ignore_eos": True}
    amid = [
        asyncio.create_task(stream_completion(proxy.url, long | {"prompt": f"{number}: {SHARED}"}))
        for number in range(LONG_STREAMS)
    ]
    await asyncio.sleep(0.3)  # until both decode workers have some of them
    victims = processes_named("ServeReplica:twostroke:DecodeWorker", descendants(server.pid))
    os.kill(victims[0], signal.SIGKILL)
    sound = await loading + LONG_STREAMS
    await asyncio.gather(*amid)
    await asyncio.sleep(3.0)  # some scrapes
    async with httpx.AsyncClient(base_url=prometheus_url, timeout=30) as client:
        return await judge(client, sound, seconds)


# --- an upgrade ---

UPGRADED: dict[str, Any] = {
    "prefill": {"threads": 1},
    "decode": {"threads": 1},
    "router": {"decodes_alone": False, "roles": "fixed", "drain_notice_s": 6.0},
    "autoscaling": {"enabled": True, "prefill": {"max": 2}, "decode": {"max": 2}},
    "slo": {"classes": [{"name": "batch"}]},
}
GRACE_S = 13.0
STARTS = 3
ENDED_S = 90.0
SETTLED_S = 100.0
"""Seconds after the first server's end; longer than TwostrokeDown takes to fire."""


class StickyAddress:
    """Address like Kubernetes' Service `twostroke-routers`: each connection goes to the server that had the last
    one, while that is ready, else to the other."""

    def __init__(self, ports: list[int]):
        self._ports = ports
        self.passed: list[int] = []  # the port of each connection

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with httpx.AsyncClient(timeout=2) as client:
                for _ in self._ports:
                    with contextlib.suppress(httpx.TransportError):
                        if (await client.get(f"http://127.0.0.1:{self._ports[0]}/ready")).status_code == 200:
                            break
                    self._ports.append(self._ports.pop(0))
            self.passed.append(self._ports[0])
            there, onward = await asyncio.open_connection("127.0.0.1", self._ports[0])
            await asyncio.gather(_pump(reader, onward), _pump(there, writer))
        except OSError:
            writer.close()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
    target.close()


async def upgrade(program: str, folder: Path) -> dict[str, Any]:
    config = folder / "server.yaml"
    config.write_text(yaml.safe_dump(UPGRADED), encoding="utf-8")
    ports = free_ports(2)
    first = await _server(config, ports[0])
    address = StickyAddress(ports)
    async with address as url:
        with (
            running("haproxy", haproxies()[0], ports, folder) as proxy,
            prometheus(program, url, folder) as prometheus_url,
        ):
            began = time.time()
            loading = asyncio.create_task(_load_until_cancelled(proxy.url))
            second = await _server(config, ports[1])
            os.kill(first.pid, signal.SIGINT)
            assert await comes(lambda: first.pid not in descendants(), ENDED_S)
            first.end()
            switched = time.time()
            await asyncio.sleep(SETTLED_S)
            loading.cancel()
            sent, failed = await loading
            async with httpx.AsyncClient(base_url=prometheus_url, timeout=30) as client:
                seen = await _asked(client, "query_range", "ALERTS", start=began, end=time.time(), step=1)
                now = await _asked(client, "query", "ALERTS")
                scrapes = await values(client, f"sum_over_time(up{{job='twostroke'}}[{time.time() - began:.0f}s])")
            await asyncio.to_thread(second.end)
    states = [(one["metric"]["alertstate"], one["metric"]["alertname"], len(one["values"])) for one in seen]
    return {
        "before_s": round(switched - began),
        "after_s": round(time.time() - switched),
        "requests": sent,
        "failed": failed,
        "scrapes_of_each": [address.passed.count(port) for port in ports],
        "scrapes_up": int(sum(scrapes)),
        "fired": sorted({name for state, name, _ in states if state == "firing"}),
        "pending_s": {name: seconds for state, name, seconds in states if state == "pending"},
        "pending_at_the_end": sorted({one["metric"]["alertname"] for one in now}),
    }


async def _server(config: Path, port: int) -> ServerProcess:
    """Started again where Ray's raylet gives up on its agent, as it does on a busy machine."""
    for _ in range(STARTS - 1):
        with contextlib.suppress(ServerFailed):
            return await _start(config, port)
    return await _start(config, port)


async def _start(config: Path, port: int) -> ServerProcess:
    server = twostroke_server(["--config", str(config), "--grace", str(GRACE_S)], port=port)
    await asyncio.to_thread(server.__enter__)
    return server


async def _load_until_cancelled(url: str) -> tuple[int, int]:
    """Requests one after the other; how many there were, and how many of them had no whole answer."""
    sent = failed = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            body = {"model": MODEL, "prompt": f"{SHARED}{sent}", "max_tokens": 24, "ignore_eos": True}
            sent += 1
            answer = await stream_completion(url, body)
            failed += not answer.arrivals or b"data: [DONE]" not in b"".join(data for _, data in answer.arrivals)
            await asyncio.sleep(0.5)
    return sent, failed


def main() -> int:
    """Returns 1 where a panel that should have data has none, a rule fails, or counters don't add up; after an upgrade
    where an alert fired."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second (%(default)s)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of load (%(default)s)")
    parser.add_argument("--upgrade", action="store_true", help="from one server to another, in place of the above")
    arguments = parser.parse_args()
    if find("prometheus") is None or not haproxies():
        print("Prometheus or HAProxy is missing: make tools", file=sys.stderr)
        return 2
    become_subreaper()
    with tempfile.TemporaryDirectory(prefix="twostroke-monitoring-") as name:
        folder = Path(name)
        if arguments.upgrade:
            try:
                told = asyncio.run(upgrade(find("prometheus") or "", folder))
            finally:
                end_descendants(patience_s=5.0)
            print(json.dumps(told))
            return 1 if told["fired"] or told["pending_at_the_end"] or told["failed"] else 0
        config = folder / "server.yaml"
        config.write_text(yaml.safe_dump(SETTINGS), encoding="utf-8")
        try:
            with ExitStack() as stack:
                server = stack.enter_context(twostroke_server(["--config", str(config)]))
                entries = [server.port, server.port]
                proxy = stack.enter_context(running("haproxy", haproxies()[0], entries, folder))
                url = stack.enter_context(prometheus(find("prometheus") or "", proxy.operators_url, folder))
                told = asyncio.run(measure(server, proxy, url, arguments.rate, arguments.seconds))
        finally:
            end_descendants(patience_s=5.0)
    print(json.dumps(told))
    adds_up = told["choices_counted"] == told["choices_sent"] and told["router_counter_resets"] == 0
    return 0 if adds_up and not told["unexpected"] and not told["rules_in_error"] else 1


if __name__ == "__main__":
    sys.exit(main())
