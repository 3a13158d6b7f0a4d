"""The capacity of a server: the highest rate at which an SLO is met, found by runs of one plan at different rates.

`find_capacity` is the same search over any function from a rate to an attainment, which formulas and simulations have.

Where attainment falls below a target is found by doubling and bisection. A search is repeated with other seeds, each on
its own points, so that its results are independent measurements of the same capacity; from how much they differ follows
the interval.

A sweep leaves a folder: sweep.json, and a run for each point in runs/; from both follow sweep.html and its plots.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.plan import Constant, Gamma, Plan, Poisson
from twostroke.loadtests.report.estimates import Estimate, number
from twostroke.loadtests.report.figures import Summary
from twostroke.loadtests.run_folder import write_json

# Student's t (W. S. Gosset, "The probable error of a mean", 1908): 97.5th percentile for 1, 2, ... degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
MAX_REPEATS = len(_T) + 1
SWEEP_FILE = "sweep.json"


class SweepPoint(msgspec.Struct, frozen=True):
    """One run at one rate. Several may have the same rate: runs repeated to know how much they differ."""

    rate: float  # asked, requests (sessions) a second
    folder: str  # of the run, relative to the sweep's
    attainment: float  # 0 to 1, of all scheduled in the window
    ttft_attainment: float
    tpot_attainment: float
    goodput: float  # requests met a second
    valid: bool


class Capacity(msgspec.Struct, frozen=True):
    """The highest rate at which `attainment` of the requests met the SLO."""

    attainment: float  # 0.9 or 0.99
    rate: Estimate | None  # requests a second; None: none of the rates tried reached it
    rate_per_worker: Estimate | None = None  # None where the number of workers isn't known
    is_lower_bound: bool = False  # a search ended without a valid run that missed it


class SweepResult(msgspec.Struct, frozen=True):
    """`sweep.json`."""

    name: str
    url: str
    points: tuple[SweepPoint, ...]  # by rate
    capacities: tuple[Capacity, ...]
    num_workers: int | None = None
    ended_early: str | None = None  # why not all was measured

    @property
    def valid(self) -> bool:
        """True if anything valid was measured. Capacities use valid runs alone."""
        return any(point.valid for point in self.points)


def sweep_point(rate: float, folder: str, summary: Summary) -> SweepPoint:
    """A run's figures as a point of a sweep; a run without requests in its window met nothing."""
    estimates = summary.attainment, summary.ttft_attainment, summary.tpot_attainment, summary.goodput
    attainment, of_ttft, of_tpot, goodput = (estimate.value if estimate else 0.0 for estimate in estimates)
    return SweepPoint(rate, folder, attainment, of_ttft, of_tpot, goodput, summary.validity.valid)


@dataclass(frozen=True)
class SearchRange:
    """Range and precision of a search."""

    start: float  # where the capacity is thought to be: the first rate, where nothing is known
    factor: float = 2.0  # between rates until the capacity lies between two
    precision: float = 0.1  # the end: the two differ by this share
    least: float = 0.01  # rates beyond these are not tried
    most: float = 10_000.0
    ceiling: float | None = None  # from here on up nothing can be measured


class Attained(NamedTuple):
    """An attainment at a rate."""

    rate: float
    attainment: float


class _Point(Protocol):
    @property
    def rate(self) -> float: ...

    @property
    def attainment(self) -> float: ...


PointT = TypeVar("PointT", bound=_Point)


def find_capacity(attainment: Callable[[float], float], target: float, search: SearchRange) -> float:
    """Return the highest rate at which `attainment` reaches `target`, and 0 where no rate does.

    `attainment` falls as the rate rises, or nearly so.
    """
    tried: list[Attained] = []
    while (rate := next_rate(tried, target, search)) is not None:
        tried.append(Attained(rate, attainment(rate)))
    found = crossing(tried, target)
    return 0.0 if found is None else found.rate


def next_rate(measured: Sequence[_Point], target: float, search: SearchRange) -> float | None:
    """The rate to measure next; None: the search is over.

    Noise may have a higher rate meet what a lower one has missed: what was missed at the lowest rate counts.
    """
    met, missed = bracket(measured, target)
    upper = search.ceiling if missed is None else missed.rate
    if met is None:
        wanted = search.start if upper is None else min(upper / search.factor, search.start)
        return None if upper is not None and upper <= search.least else max(wanted, search.least)
    if upper is None:
        return None if met.rate >= search.most else min(max(met.rate * search.factor, search.start), search.most)
    if upper <= met.rate * (1 + search.precision):
        return None
    if missed is None and met.rate * search.factor < upper:
        return met.rate * search.factor
    return math.sqrt(met.rate * upper)


def bracket(measured: Sequence[PointT], target: float) -> tuple[PointT | None, PointT | None]:
    """The highest rate that met the target, below the lowest that missed it, and that one."""
    missed = min((each for each in measured if each.attainment < target), key=lambda each: each.rate, default=None)
    met = max(
        (each for each in measured if each.attainment >= target and (missed is None or each.rate < missed.rate)),
        key=lambda each: each.rate,
        default=None,
    )
    return met, missed


@dataclass(frozen=True)
class Crossing:
    """The highest rate at which the target is met, by one search."""

    rate: float
    is_lower_bound: bool = False  # no rate has missed it


def crossing(measured: Sequence[_Point], target: float) -> Crossing | None:
    """Return where the straight line between the two enclosing rates crosses the target; None if no rate has met it."""
    met, missed = bracket(measured, target)
    if met is None:
        return None
    if missed is None:
        return Crossing(met.rate, is_lower_bound=True)
    share = (met.attainment - target) / (met.attainment - missed.attainment)
    return Crossing(met.rate + share * (missed.rate - met.rate))


def interval(rates: Sequence[float]) -> tuple[float, float] | None:
    """95% for the mean of the rates' logarithms (rates are above 0), by Student's t; None of fewer than two."""
    if not 2 <= len(rates) <= MAX_REPEATS:
        return None
    logarithms = [math.log(rate) for rate in rates]
    half = _T[len(rates) - 2] * stdev(logarithms) / math.sqrt(len(rates))
    return math.exp(mean(logarithms) - half), math.exp(mean(logarithms) + half)


def geometric_mean(rates: Sequence[float]) -> float:
    if len(set(rates)) == 1:
        return rates[0]  # a rate that was asked for, and no 15.999999999999998
    return math.exp(mean(math.log(rate) for rate in rates))


TARGETS = (0.9, 0.99)
NARROW_FACTOR = 1.25  # between the rates of a search that knows where to look
DEEPEST = 8.0  # times lower: so far below the capacity at 90% that at 99% is looked for, and a first valid run
RUNS = "runs"
ATTEMPTS = 2  # at one rate, until the run is a valid one

RunAt = Callable[[Plan, Path], Summary]
"""Carries out a plan, into a folder, and sums it up. Raises LoadTestError."""


class SweepEnded(Exception):
    """Reason to stop. What was measured stays."""


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
    targets: tuple[float, ...] = TARGETS

    def __post_init__(self) -> None:
        at_rate(self.plan, 1.0)  # arrivals without a rate are refused before anything runs
        self._began = self.clock()
        self._longest_run_s = self.plan.seconds
        self._ceiling: float | None = None  # the lowest rate at which all runs were invalid
        self._invalid: str | None = None  # why
        self._measured: list[SweepPoint] = []  # by the search under way, or the last
        self._found: dict[float, list[Crossing]] = {target: [] for target in self.targets}  # by those that ended

    def find(self, search: SearchRange, repeats: int) -> None:
        """Search for the capacity at each target, `repeats` times. Raises SweepEnded, or LoadTestError."""
        for _ in range(repeats):
            self._measured = []
            least = search.least
            for target in self.targets:
                here = replace(search, least=least)
                known = [found.rate for found in self._found[target]]
                if known:
                    here = replace(here, start=geometric_mean(known), factor=NARROW_FACTOR)
                self._search(here, target)
                found = crossing(self._measured, target)
                if found is not None:
                    self._found[target].append(found)
                    least = max(least, found.rate / DEEPEST)
            write_json(self.folder / SWEEP_FILE, self.result)
            if self._invalid is not None and any(self._capacity(target).is_lower_bound for target in self.targets):
                raise SweepEnded(self._invalid)

    def _search(self, search: SearchRange, target: float) -> None:
        """Search for one target. A rate that cannot be measured says nothing about lower ones: an overloaded server
        takes the generator's cores, too, where they share a machine."""
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
            for target in self.targets:
                if (found := crossing(self._measured, target)) is not None:
                    self._found[target].append(found)
            write_json(self.folder / SWEEP_FILE, self.result)

    @property
    def result(self) -> SweepResult:
        """Return the result of what has been measured so far."""
        return SweepResult(
            name=self.plan.name,
            url=self.plan.url,
            points=tuple(sorted(self.points, key=lambda point: point.rate)),
            capacities=tuple(self._capacity(target) for target in self.targets),
            num_workers=self.num_workers,
            ended_early=self.ended_early,
        )

    def end_early(self, reason: str) -> None:
        """Say in what is left why not all was measured. Raises LoadTestError where nothing was."""
        if not self.points:
            raise LoadTestError(f"nothing was measured: {reason}")
        self.ended_early = reason
        write_json(self.folder / SWEEP_FILE, self.result)

    def _measure(self, rate: float) -> str | None:
        """One valid run. An invalid one may have been disturbed: it is made once more; then the rate, and all above,
        are given up, and the reason is returned."""
        for _ in range(ATTEMPTS):
            summary = self._run(rate)
            if summary.validity.valid:
                self._measured.append(self.points[-1])
            write_json(self.folder / SWEEP_FILE, self.result)
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
        number_of_run = len(self.points) + 1
        name = f"{RUNS}/{number_of_run:03d}-{rate:.4g}"
        plan = msgspec.structs.replace(
            at_rate(self.plan, rate),
            name=f"{self.plan.name} at {number(rate)}/s",
            seed=self.plan.seed + number_of_run,  # prompts of its own, or the server would find them cached
        )
        summary = self.run_at(plan, self.folder / name)
        self._longest_run_s = max(self._longest_run_s, self.clock() - began)
        point = sweep_point(rate, name, summary)
        self.points.append(point)
        self.num_workers = round(sum(summary.num_workers.values())) or None
        self.say(
            f"{number_of_run}: {number(rate)}/s: {point.attainment:.1%} met (TTFT {point.ttft_attainment:.1%}, "
            f"TPOT {point.tpot_attainment:.1%}), goodput {point.goodput:.3g}/s"
        )
        return summary

    def _capacity(self, target: float) -> Capacity:
        """Return the capacity by the searches that ended, or by what the first one knows so far."""
        under_way = crossing(self._measured, target)
        found = self._found[target] or ([under_way] if under_way else [])
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
