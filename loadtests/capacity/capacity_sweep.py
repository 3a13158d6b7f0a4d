"""Many runs of one plan at different rates, and the capacity that follows from them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from twostroke.loadtests.capacity.bisection import Crossing, Measured, Search, crossing, geometric_mean, interval, next_rate
from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.plan import Constant, Gamma, Plan, Poisson
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.figures import Summary
from twostroke.loadtests.report.sweep import Capacity, SweepPoint, SweepResult, point_of, write_sweep
from twostroke.loadtests.report.words import number

TARGETS = (0.9, 0.99)
NARROW_FACTOR = 1.25  # between the rates of a search that knows where to look
DEEPEST = 8.0  # times lower: so far below the capacity at 90% that at 99% is looked for, and a first valid run
RUNS = "runs"
ATTEMPTS = 2  # at one rate, until the run is a valid one

RunAt = Callable[[Plan, Path], Summary]
"""Carries out a plan, into a folder, and sums it up. Raises LoadTestError."""


class SweepEnded(Exception):
    """Why no further run is made; what was measured stays."""


@dataclass
class Sweep:
    """A sweep as it goes on. `result` and sweep.json have, at every moment, what is known so far."""

    plan: Plan
    folder: Path
    run_at: RunAt
    say: Callable[[str], None]
    budget_s: float  # no run begins that would end after it
    clock: Callable[[], float] = time.monotonic
    points: list[SweepPoint] = field(default_factory=list)
    num_workers: int | None = None
    ended_early: str | None = None

    def __post_init__(self) -> None:
        at_rate(self.plan, 1.0)  # arrivals without a rate are refused before anything runs
        self._began = self.clock()
        self._longest_run_s = self.plan.seconds
        self._num_runs = 0
        self._ceiling: float | None = None  # the lowest rate at which all runs were invalid
        self._invalid: str | None = None  # why
        self._measured: list[Measured] = []  # by the search under way, or the last
        self._found: dict[float, list[Crossing | None]] = {target: [] for target in TARGETS}  # by those that ended

    def find(self, search: Search, repeats: int) -> None:
        """Search for the capacity at each target, `repeats` times. Raises SweepEnded, or LoadTestError."""
        for _ in range(repeats):
            self._measured = []
            least = search.least
            for target in TARGETS:
                here = replace(search, least=least)
                known = self._rates(target)
                if known:
                    here = replace(here, start=geometric_mean(known), factor=NARROW_FACTOR)
                self._search(here, target)
                self._found[target].append(found := crossing(self._measured, target))
                if found is not None:
                    least = max(least, found.rate / DEEPEST)
            write_sweep(self.folder, self.result)
            if self._invalid is not None and any(self._capacity(target).is_lower_bound for target in TARGETS):
                raise SweepEnded(self._invalid)

    def _search(self, search: Search, target: float) -> None:
        """What can't be measured at one rate may be below it: a server that is asked too much takes the generator's
        cores, too, where they share a machine."""
        while (rate := next_rate(self._measured, target, replace(search, ceiling=self._ceiling))) is not None:
            self._invalid = self._measure(rate) or self._invalid
            if self._invalid is not None and not self._measured and rate <= search.start / DEEPEST:
                raise SweepEnded(self._invalid)

    def measure(self, rates: Sequence[float], repeats: int) -> None:
        """Measure these rates alone, all of them `repeats` times. Raises SweepEnded, or LoadTestError."""
        for _ in range(repeats):
            self._measured = []
            for rate in rates:
                self._invalid = self._measure(rate)
                if self._invalid is not None:
                    raise SweepEnded(self._invalid)
            for target in TARGETS:
                self._found[target].append(crossing(self._measured, target))
            write_sweep(self.folder, self.result)

    @property
    def result(self) -> SweepResult:
        """Of what was measured so far."""
        return SweepResult(
            name=self.plan.name,
            url=self.plan.url,
            points=tuple(sorted(self.points, key=lambda point: point.rate)),
            capacities=tuple(self._capacity(target) for target in TARGETS),
            num_workers=self.num_workers,
            ended_early=self.ended_early,
        )

    def end_early(self, reason: str) -> None:
        """Say in what is left why not all was measured. Raises LoadTestError where nothing was."""
        if not self.points:
            raise LoadTestError(f"nothing was measured: {reason}")
        self.ended_early = reason
        write_sweep(self.folder, self.result)

    def _measure(self, rate: float) -> str | None:
        """One valid run. An invalid one may have been disturbed: it is made once more; then the rate, and all above,
        are given up, and the reason is returned."""
        for _ in range(ATTEMPTS):
            summary = self._run(rate)
            if summary.validity.valid:
                self._measured.append(Measured(rate, summary.attainment.value if summary.attainment else 0.0))
            write_sweep(self.folder, self.result)
            if summary.validity.valid:
                return None
            reasons = "; ".join(summary.validity.reasons)
            self.say(f"  no measurement: {reasons}")
        self._ceiling = rate
        return f"at {number(rate)}/s the runs are invalid: {reasons}"

    def _run(self, rate: float) -> Summary:
        began = self.clock()
        if began - self._began + self._longest_run_s > self.budget_s:
            raise SweepEnded(f"the budget of {self.budget_s:g} s leaves no time for another run")
        self._num_runs += 1
        name = f"{RUNS}/{self._num_runs:03d}-{rate:.4g}"
        # Each run has prompts of its own, or the server would find them cached.
        plan = msgspec.structs.replace(at_rate(self.plan, rate), name=f"{self.plan.name} at {number(rate)}/s")
        plan = msgspec.structs.replace(plan, seed=self.plan.seed + self._num_runs)
        summary = self.run_at(plan, self.folder / name)
        self._longest_run_s = max(self._longest_run_s, self.clock() - began)
        point = point_of(rate, name, summary)
        self.points.append(point)
        self.num_workers = round(sum(summary.num_workers.values())) or None
        self.say(
            f"{self._num_runs}: {number(rate)}/s: {point.attainment:.1%} met (TTFT {point.ttft_attainment:.1%}, "
            f"TPOT {point.tpot_attainment:.1%}), goodput {point.goodput:.3g}/s"
        )
        return summary

    def _rates(self, target: float) -> list[float]:
        return [found.rate for found in self._found[target] if found is not None]

    def _capacity(self, target: float) -> Capacity:
        """By the searches that came to an end; by what is known of the first while there are none."""
        found = [each for each in self._found[target] or [crossing(self._measured, target)] if each is not None]
        if not found:
            return Capacity(target, None)
        rates = [each.rate for each in found]
        is_lower_bound = any(each.is_lower_bound for each in found)
        low, high = (None, None) if is_lower_bound else interval(rates) or (None, None)
        rate = Estimate(geometric_mean(rates), low, high)
        per_worker = rate.divided_by(self.num_workers) if self.num_workers else None
        return Capacity(target, rate, per_worker, is_lower_bound)


def at_rate(plan: Plan, rate: float) -> Plan:
    """The plan with another rate. Raises LoadTestError for arrivals that have no one rate."""
    match plan.arrivals:
        case Poisson() | Gamma() | Constant() as arrivals:
            return msgspec.structs.replace(plan, arrivals=msgspec.structs.replace(arrivals, rate=rate))
        case _:
            raise LoadTestError("a sweep sets the rate: use poisson, gamma or constant arrivals")
