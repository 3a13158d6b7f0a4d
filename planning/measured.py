"""Layouts of this machine, each served for real: what its workers cost, and how many requests a second it serves.

Of each candidate a server is started and its workers' costs are learnt. The load tests' search for a capacity then puts
the workload on it, from the simulated capacity on. A folder keeps the profiles and the sweep of each candidate.
"""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec

from twostroke.cluster.local.asking import ask
from twostroke.cluster.local.server_process import ServerProcess, twostroke_server
from twostroke.loadtests.capacity import SearchRange, Sweep, SweepEnded, SweepResult
from twostroke.loadtests.generator.runner import run_plan
from twostroke.loadtests.plan import SLO, Plan
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.pages import write_report
from twostroke.planning.against import DraftCounters, learn
from twostroke.planning.costs.profiles import among_busy, write_profile
from twostroke.planning.layouts import Layout, Mode, router_settings
from twostroke.planning.trials import attained_shares, simulated_capacity
from twostroke.planning.workload import SLOTargets, Workload
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.stats import Role
from twostroke.worker.profile import WorkerProfile

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
        expected = capacity_by_simulation(candidate.layout(profiles), sample, _promise(plan.slo), 1.0)
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


def _promise(slo: SLO) -> SLOTargets:
    return SLOTargets(slo.ttft_s or 1e9, slo.tpot_s or 1e9)


def _file(folder: Path, role: Role) -> Path:
    return folder / f"{role}.json"
