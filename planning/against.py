"""Running servers beside their simulation: what workers cost, and how many requests a second they serve.

`learn` puts loads that are not judged on a server. Workers tell what their steps cost, as they have learnt it from
steps under load (worker/step_costs.py); requests' stages tell what HTTP and calls take. `against` (`twostroke simulate
--against URL`) then sends each cell's plan, one workload at one rate, to the server and into the exact simulation:
ratios are simulated over measured. `measure` (`should-i-disaggregate`) starts a server for each way to spend this
machine, and has the load tests' search find its capacity, from the simulated capacity on.
"""

import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from twostroke.cluster.local.asking import ask, fetch_status
from twostroke.cluster.local.server_process import ServerProcess, twostroke_server
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.capacity import SearchRange, Sweep, SweepEnded, SweepResult, at_rate
from twostroke.loadtests.generator.run_facts import served_model
from twostroke.loadtests.generator.runner import run_plan
from twostroke.loadtests.plan import SLO, Closed, LongPrompts, Plan, Poisson
from twostroke.loadtests.plan import Workload as SentWorkload
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.figures import read_observations, summarise_observations
from twostroke.loadtests.report.pages import write_report
from twostroke.loadtests.run_folder import Record
from twostroke.planning.costs.drafted_steps import repeated_share
from twostroke.planning.costs.profiles import among_busy, write_profile
from twostroke.planning.exact import simulate_plan
from twostroke.planning.layouts import Layout, Mode, router_mode, router_settings
from twostroke.planning.trials import attained_shares, simulated_capacity
from twostroke.planning.workload import SLOTargets, Workload
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import Role, StepCosts, typical
from twostroke.router.routing.chooser import PathConfig
from twostroke.worker.profile import WorkerProfile

ALONE = Closed(1), LongPrompts(80, 28, 300, 16, 0.4)
"""One request at a time: no worker computes while another does."""
PAIRED = Closed(2), LongPrompts(80, 28, 300, 16, 0.4)
"""The load where there is one worker alone: prompts come while it decodes."""
BESIDE = Closed(7), LongPrompts(80, 60, 300, 2, 0.6)
"""Streams that never end and prompts that always wait: all workers compute all the time."""
LINK_BYTES_PER_S = 1e9  # transfers wait for prefill, so their seconds do not tell the link's speed
WARM_REQUESTS = 36  # of a simulated server, before a plan begins: its router learns what the real one knows
WARM_UP_S = 3.0  # of a cell
NEAR = 0.1  # a figure within this share of what was measured is near
FIGURES = ("ttft_mean_s", "ttft_p90_s", "tpot_mean_s", "tpot_p90_s")


class Cell(msgspec.Struct, frozen=True):
    """One workload at one rate: figures in seconds by their names."""

    workload: str
    rate: float
    answers: int
    failed: int  # or refused
    measured: dict[str, float]
    simulated: dict[str, float]
    repeated: float = 0.0  # share of the answers, as measured

    @property
    def ratios(self) -> dict[str, float]:
        return {name: self.simulated[name] / self.measured[name] for name in FIGURES if self.measured.get(name)}

    @property
    def near(self) -> list[str]:
        return [name for name, ratio in self.ratios.items() if abs(ratio - 1) <= NEAR]

    def row(self) -> str:
        """Return a row of a Markdown table: milliseconds measured, and the ratio, in bold where it is not near."""
        ratios = {name: f"{ratio:.2f}" for name, ratio in self.ratios.items()}
        shown = [
            f"{self.measured.get(name, 0.0) * 1e3:.4g}: "
            + (ratios[name] if name in self.near else f"**{ratios.get(name, '-')}**")
            for name in FIGURES
        ]
        return f"| {self.workload} | {self.rate:g} | {self.answers} | {' | '.join(shown)} |"


HEAD = (
    "| workload | requests/s | answers | TTFT mean | TTFT P90 | TPOT mean | TPOT P90 |",
    "|---|---|---|---|---|---|---|",
)


def figures_of(records: Iterable[Record], warm_up_s: float) -> tuple[dict[str, float], int, int]:
    """Return the figures of the answers after the warm-up, their number, and the number of requests without one."""
    observed = read_observations(records)
    inside = observed.scheduled_s >= warm_up_s
    whole = inside & observed.is_status("ok")
    found: dict[str, float] = {}
    for name, values in (("ttft", observed.ttft_s[whole]), ("tpot", observed.tpot_s[whole])):
        known = values[~np.isnan(values)]
        if len(known):
            found |= {f"{name}_mean_s": float(known.mean()), f"{name}_p90_s": float(np.percentile(known, 90))}
    return found, int(whole.sum()), int(inside.sum() - whole.sum())


def plan_for(url: str, workload: SentWorkload, seconds: float, seed: int, longest: int | None) -> Plan:
    """Return a plan of one request a second for the model that the server has. Raises LoadTestError."""
    model = served_model(url, None)
    return Plan(
        url=url,
        model=model.name,
        max_context=min(model.max_context or 4096, longest or 1 << 30),
        arrivals=Poisson(1.0),
        workload=workload,
        slo=SLO(),
        seconds=seconds,
        seed=seed,
        warm_up_s=WARM_UP_S,
        vocabulary=model.vocabulary or 0,
    )


def learn(url: str, folder: Path, *, seconds: float, seed: int) -> dict[Role, WorkerProfile]:
    """Put the learning loads of so many seconds on the server, and return what a worker of each role costs.

    Raises ConfigError where a worker has not learnt yet, and LoadTestError where a load can't be sent.
    """
    found: list[dict[Role, WorkerProfile]] = []
    loads = (ALONE, BESIDE) if len(fetch_status(url)["workers"]) > 1 else (PAIRED,)
    for number, (arrivals, workload) in enumerate(loads):
        plan = plan_for(url, workload, seconds, seed + 1000 + number, None)
        plan = msgspec.structs.replace(plan, arrivals=arrivals)
        found.append(profiles_of(fetch_status(url), records_of(plan, folder / str(number))))
    first, *more = found
    return {
        role: msgspec.structs.replace(one, beside=more[0][role].costs) if more else one for role, one in first.items()
    }


def records_of(plan: Plan, folder: Path) -> list[Record]:
    """Carry out the plan and return its records. Raises LoadTestError where the run is no measurement of the server."""
    run = run_plan(plan, folder, show=False)
    records = list(run.records())
    validity = summarise_observations(plan, run.facts(), read_observations(records), ()).validity
    if not validity.valid:
        raise LoadTestError(f"the load on {plan.url} says nothing of the server: {'; '.join(validity.reasons)}")
    return records


def profiles_of(status: dict[str, Any], records: Sequence[Record]) -> dict[Role, WorkerProfile]:
    """Return a profile of each role from what `/status` and the stages of requests tell."""
    of_requests = [(one, one.stages) for one in records if one.stages and one.ttft_s and "ttft_s" in one.stages]
    stages_seen = [stages | {"e2e_s": one.ttft_s or 0.0} for one, stages in of_requests]
    if not stages_seen:
        raise ConfigError("--against: no request of the learning load told its stages; is it a server of ours?")
    http_s = statistics.fmean(one["e2e_s"] - one["ttft_s"] + one.get("admit_s", 0.0) for one in stages_seen)
    calls_s = [
        max(0.0, one["ttft_s"] - one.get("admit_s", 0.0) - one.get("prefill_queue_s", 0.0) - one["prefill_s"])
        for one in stages_seen
        if "prefill_s" in one
    ]
    senders = [one["stats"] for one in status["workers"] if one["role"] == "prefill"]
    computed, sent = (sum(one[name] for one in senders) for name in ("computed_tokens", "transfer_bytes"))
    kv_bytes = sent / computed if computed and sent else 1.0
    reads_alone = _typical([one for one in status["workers"] if one["role"] == "decode"])
    if not calls_s and reads_alone is not None:
        # Decode workers that compute prompts do not tell a prompt's own time, and their first token comes one way.
        left_s = [
            stages["ttft_s"]
            - stages.get("admit_s", 0.0)
            - stages.get("decode_queue_s", 0.0)
            - reads_alone.prefill_s((one.input_tokens or 0) - (one.cached_tokens or 0), one.cached_tokens or 0, 2048)
            for one, stages in of_requests
        ]
        calls_s = [2 * max(0.0, statistics.fmean(left_s))]
    found: dict[Role, WorkerProfile] = {}
    for role in ("prefill", "decode"):
        workers = [one for one in status["workers"] if one["role"] == role]
        if not workers:
            continue
        # Decode workers may have read all prompts: then prefill workers, on the same machine, cost what those cost.
        costs = _typical(workers) or _typical(status["workers"])
        if costs is None:
            raise ConfigError(f"--against: no {role} worker has learnt its costs yet; give a longer --learn")
        found[role] = WorkerProfile(
            name=f"{status['model']}-{role}",
            costs=costs,
            kv_bytes=kv_bytes,
            kv_tokens=min(one["num_blocks"] * one["block_size"] for one in workers),
            link_bytes_per_s=LINK_BYTES_PER_S,
            step_tokens=2048,
            max_batch=256,
            source=f"learnt under load by a server of {len(status['workers'])} workers",
            num_layers=12,
            http_s=http_s,
            call_s=statistics.fmean(calls_s) if calls_s else None,
        )
    return found


def _typical(workers: Sequence[dict[str, Any]]) -> StepCosts | None:
    costs = [one["stats"]["costs"] for one in workers]
    return typical(None if one is None else StepCosts(*one) for one in costs)


def layout_of(profiles: dict[Role, WorkerProfile], prefill: int, decode: int, mode: Mode) -> Layout:
    return Layout(mode, profiles["decode"], decode, profiles.get("prefill") if prefill else None, prefill)


def simulated(plan: Plan, layout: Layout) -> list[Record]:
    """Return the records that the load test would have left of this plan."""
    return simulate_plan(plan, layout, warm=WARM_REQUESTS)


def compare(plan: Plan, name: str, rate: float, layout: Layout, folder: Path) -> Cell:
    """Put the plan on the server, and into the simulation. Raises LoadTestError."""
    planned, counters = at_rate(plan, rate), DraftCounters.of(plan.url)
    measured, answers, failed = figures_of(records_of(planned, folder), plan.warm_up_s)
    layout = layout.with_repeated(counters.repeated_since(plan.url))
    expected, _, _ = figures_of(simulated(planned, layout), plan.warm_up_s)
    return Cell(name, rate, answers, failed, measured, expected, layout.decode.repeated)


class DraftCounters(NamedTuple):
    """Counters of a server's workers at one moment."""

    accepted: int  # tokens of answers that came as drafts
    generated: int

    @staticmethod
    def of(url: str) -> "DraftCounters":
        """Return those of this moment."""
        rows = [one["stats"] for one in fetch_status(url)["workers"]]
        return DraftCounters(sum(one["accepted_tokens"] for one in rows), sum(one["generated_tokens"] for one in rows))

    def repeated_since(self, url: str) -> float:
        """Return the share of the answers since then that repeats earlier text."""
        now = DraftCounters.of(url)
        return repeated_share(now.accepted - self.accepted, now.generated - self.generated)


def against(
    url: str,
    workload: tuple[str, SentWorkload],
    rates: Sequence[float],
    folder: Path,
    say: Callable[[str], None],
    *,
    seconds: float,
    learn_s: float,
    seed: int,
    longest: int | None,
    router: PathConfig | None = None,
) -> list[Cell]:
    """Return a cell for each rate; `folder` keeps profiles and cells. Raises ConfigError and LoadTestError."""
    seed += time.time_ns() // 1_000_000 % (1 << 30)  # prompts of its own, or the server would find them cached
    profiles = learn(url, folder / "learning", seconds=learn_s, seed=seed)
    for role, profile in profiles.items():
        write_profile(profile, folder / f"{role}.json")
        say(f"{role}: {msgspec.json.encode(profile).decode()}")
    roles = [one["role"] for one in fetch_status(url)["workers"]]
    prefill, decode = roles.count("prefill"), roles.count("decode")
    mode = router_mode(prefill, router or PathConfig())
    layout, cells = layout_of(profiles, prefill, decode, mode), list[Cell]()
    plan = plan_for(url, workload[1], seconds, seed + 1, longest)
    for line in HEAD:
        say(line)
    for number, rate in enumerate(rates):
        reseeded = msgspec.structs.replace(plan, seed=plan.seed + number)
        cells.append(compare(reseeded, workload[0], rate, layout, folder / f"{number}-{rate:g}"))
        say(cells[-1].row())
        (folder / "cells.json").write_text(json.dumps([msgspec.to_builtins(one) for one in cells], indent=1) + "\n")
    return cells


TARGET = 0.9  # of the requests, that are to meet both times
READY_S = 120.0  # from the first word of a server until its workers take requests
POLL_S = 0.25
FACTOR, PRECISION = 1.25, 0.08  # of the search for a measured capacity
ROLES: tuple[Role, ...] = ("prefill", "decode")


@dataclass(frozen=True)
class Candidate:
    """One way to spend this machine, with the numbers of its workers."""

    name: str
    mode: Mode
    prefill: int
    decode: int

    def layout(self, profiles: Mapping[Role, WorkerProfile]) -> Layout:
        """Return the layout as plans know it, whose workers are all busy."""
        busy = {role: among_busy(one) for role, one in profiles.items()}
        return Layout(self.mode, busy["decode"], self.decode, busy["prefill"] if self.prefill else None, self.prefill)


@dataclass(frozen=True)
class Measured:
    """A candidate's profiles and sweep. Rates are requests a second."""

    profiles: Mapping[Role, WorkerProfile]
    sweep: SweepResult

    @property
    def capacity(self) -> Estimate | None:
        """Return the rate at which TARGET of the requests meet both times; None where only a bound is known."""
        found = next((one for one in self.sweep.capacities if one.attainment == TARGET), None)
        return None if found is None or found.is_lower_bound else found.rate


def say(line: str) -> None:
    """Tell people on stderr how it goes: stdout is the answer's."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def candidate_server(candidate: Candidate, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a server's URL once its workers take requests; it has ended when the context has. Raises ServerFailed.

    `settings` are those of a configuration file.
    """
    changed: dict[str, dict[str, Any]] = {
        "prefill": {"replicas": candidate.prefill},
        "decode": {"replicas": candidate.decode},
        "router": router_settings(candidate.mode),
    }
    merged = {**settings, **{name: {**(settings.get(name) or {}), **more} for name, more in changed.items()}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "serving.yaml"
        path.write_text(json.dumps(merged))  # JSON is YAML, too
        with twostroke_server(["--config", str(path)]) as server:
            _await_ready(server)
            yield server.url


def _await_ready(server: ServerProcess) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with ask(server.url, "ready", timeout_s=2.0):
                return
        except (OSError, HTTPException) as error:
            if time.monotonic() > deadline:
                raise ConfigError(f"the server's workers are not ready after {READY_S:g} s: {error}") from error
            time.sleep(POLL_S)


def capacity_by_simulation(
    layout: Layout, workload: Workload, promise: SLOTargets, first: float, seed: int = 0, target: float = TARGET
) -> float:
    """Return the rate at which `target` of the requests meet both times in the coarse simulation."""
    return simulated_capacity(lambda rate: attained_shares(layout, workload, promise, rate, seed).both, first, target)


def measure(
    candidate: Candidate,
    settings: Mapping[str, Any],
    make_plan: Callable[[str], Plan],
    sample: Workload,
    folder: Path,
    say: Callable[[str], None],
    *,
    learn_s: float,
    budget_s: float,
    rates: list[float] | None = None,
) -> Measured:
    """Serve the candidate, learn its costs, and find its capacity, or measure these rates alone.

    `make_plan` makes the plan for a server's URL. Raises ConfigError, LoadTestError and OSError.
    """
    say(f"{candidate.name}: starting {candidate.prefill} prefill and {candidate.decode} decode workers")
    with candidate_server(candidate, settings) as url:
        profiles = learn(url, folder / f"learning-{time.time_ns()}", seconds=learn_s, seed=0)
        _write_profiles(folder, profiles)
        plan = make_plan(url)
        expected = capacity_by_simulation(candidate.layout(profiles), sample, _targets(plan.slo), 1.0)
        say(f"{candidate.name}: {expected:.3g} requests a second are expected")
        counters = DraftCounters.of(url)
        sweep = Sweep(
            plan,
            folder,
            lambda one, path: write_report(run_plan(one, path, show=False)),
            say,
            budget_s,
            targets=(TARGET,),
        )
        try:
            if rates:
                sweep.measure(rates, 1)
            else:
                sweep.find(SearchRange(expected or 1.0, factor=FACTOR, precision=PRECISION), 1)
        except SweepEnded as reason:
            sweep.end_early(str(reason))
        # The workload's own share, which later simulations of these profiles count with.
        repeated = counters.repeated_since(url)
        profiles = {role: msgspec.structs.replace(one, repeated=repeated) for role, one in profiles.items()}
        _write_profiles(folder, profiles)
    return Measured(profiles, sweep.result)


def _write_profiles(folder: Path, profiles: Mapping[Role, WorkerProfile]) -> None:
    for role, profile in profiles.items():
        write_profile(profile, _file(folder, role))


def _targets(slo: SLO) -> SLOTargets:
    return SLOTargets(slo.ttft_s or 1e9, slo.tpot_s or 1e9)


def _file(folder: Path, role: Role) -> Path:
    return folder / f"{role}.json"
