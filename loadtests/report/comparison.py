"""Two or more servers side by side: which is better, by how much, and where nothing of the kind is shown. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from twostroke.loadtests.capacity import SweepResult
from twostroke.loadtests.plan import Plan
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.figures import Spread, Summary

Verdict = Literal["better", "worse", "no difference shown", "not judged"]
Unit = Literal["share", "rate", "seconds"]  # of shares and rates more is better, of seconds less
_Figure = tuple[str, Unit, Estimate | None]

COMPARED_FIELDS = (
    "arrivals",
    "workload",
    "slo",
    "seconds",
    "warm_up_s",
    "max_context",
    "prompts",
    "ignore_eos",
    "service_tier",
    "request_limit_s",
)


class Ratio(msgspec.Struct, frozen=True):
    """Ratio of another's figure to the first's, round by round."""

    median: float
    low: float
    high: float


class Compared(msgspec.Struct, frozen=True):
    """One figure of all; values in the order of the names, ratios and verdicts of all but the first."""

    name: str
    unit: Unit
    higher_is_better: bool
    values: tuple[Estimate | None, ...]
    ratios: tuple[Ratio | None, ...]
    verdicts: tuple[Verdict, ...]  # of each against the first


class AtRate(msgspec.Struct, frozen=True):
    """Runs of several sweeps at one rate."""

    rate: float
    figures: tuple[Compared, ...]


class RunComparison(msgspec.Struct, frozen=True):
    """`comparison.json`; the first of `names` is what the others are compared with."""

    names: tuple[str, ...]
    figures: tuple[Compared, ...]  # of runs; of sweeps their capacities
    at_rates: tuple[AtRate, ...] = ()  # of sweeps
    warnings: tuple[str, ...] = ()  # why the figures may not be comparable, or mean little
    invalid_runs: int = 0


def compare_rounds(rounds: Sequence[Sequence[Summary]]) -> tuple[Compared, ...]:
    """`rounds` has each server's runs; the same number of them where rounds were taken in turns.

    Figures that not all know of, or that nobody has, are left out.
    """
    tables = [[{name: (unit, value) for name, unit, value in _figures_of(run)} for run in runs] for runs in rounds]
    found = []
    for name, (unit, _) in tables[0][0].items():
        if all(name in run for runs in tables for run in runs):
            values = [[run[name][1] for run in runs] for runs in tables]
            if any(value is not None for of_server in values for value in of_server):
                found.append(compared(name, unit, values))
    return tuple(found)


def compare_sweeps(sweeps: Sequence[SweepResult]) -> tuple[Compared, ...]:
    """Capacities, whole and for each worker."""
    result = []
    for of_level in zip(*(sweep.capacities for sweep in sweeps), strict=True):
        name = f"capacity at {of_level[0].attainment:.0%}"
        result.append(compared(f"{name} (requests/s)", "rate", [[capacity.rate] for capacity in of_level]))
        if any(capacity.rate_per_worker for capacity in of_level):
            per_worker = [[capacity.rate_per_worker] for capacity in of_level]
            result.append(compared(f"{name} for each worker", "rate", per_worker))
    return tuple(result)


def compared(name: str, unit: Unit, values: Sequence[Sequence[Estimate | None]]) -> Compared:
    """`values` has each server's estimates, one a round."""
    higher_is_better = unit != "seconds"
    overall = tuple(over_rounds([value for value in of_server if value is not None]) for of_server in values)
    first, *others = values
    return Compared(
        name=name,
        unit=unit,
        higher_is_better=higher_is_better,
        values=overall,
        ratios=tuple(round_ratio(other, first) for other in others),
        verdicts=tuple(interval_verdict(value, overall[0], higher_is_better) for value in overall[1:]),
    )


def over_rounds(estimates: Sequence[Estimate]) -> Estimate | None:
    """The median round's value, and an interval that holds those of all rounds: machines differ from minute to minute,
    and one round's interval knows nothing of that."""
    if not estimates:
        return None
    value = statistics.median(each.value for each in estimates)
    known = [(each.low, each.high) for each in estimates if each.low is not None and each.high is not None]
    if len(known) < len(estimates):
        return Estimate(value)
    return Estimate(value, min(low for low, _ in known), max(high for _, high in known))


def round_ratio(others: Sequence[Estimate | None], firsts: Sequence[Estimate | None]) -> Ratio | None:
    """Rounds are paired; None where none has both, or the first's figure is 0."""
    ratios = [
        other.value / first.value
        for other, first in zip(others, firsts, strict=False)
        if other is not None and first is not None and first.value
    ]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def interval_verdict(value: Estimate | None, first: Estimate | None, higher_is_better: bool) -> Verdict:
    """Better or worse only where the intervals lie apart. That is stricter than a test at 5%, and should be: many
    figures are compared at once, and one in twenty would differ by chance."""
    overlaps = value.overlaps(first) if value is not None and first is not None else None
    if value is None or first is None or overlaps is None:
        return "not judged"
    if overlaps:
        return "no difference shown"
    return "better" if (value.value > first.value) == higher_is_better else "worse"


def differences(plans: Mapping[str, Plan]) -> list[str]:
    """Return in words what the servers were asked differently from the first."""
    first, *others = plans
    found = []
    for name in others:
        fields = [field for field in COMPARED_FIELDS if getattr(plans[name], field) != getattr(plans[first], field)]
        if fields:
            found.append(f"{name} was not asked the same as {first}: {', '.join(fields)} differ")
    return found


def _figures_of(summary: Summary) -> list[_Figure]:
    """All that is compared of a run; its kinds' too, where it has several."""
    figures: list[_Figure] = [
        ("attainment", "share", summary.attainment),
        ("TTFT met", "share", summary.ttft_attainment),
        ("TPOT met", "share", summary.tpot_attainment),
        ("goodput (requests/s)", "rate", summary.goodput),
        ("goodput for each worker", "rate", summary.goodput_per_worker),
        ("output (tokens/s)", "rate", summary.output_rate),
    ]
    times: list[tuple[str, Spread | None]] = [
        ("TTFT", summary.ttft),
        ("TPOT", summary.tpot),
        ("ITL", summary.itl),
        ("tail TBT", summary.tail_tbt_by_request),
        ("E2E", summary.e2e),
    ]
    for name, spread in times:
        figures.append((f"{name} P50", "seconds", spread.p50 if spread else None))
        figures.append((f"{name} P99", "seconds", spread.p99 if spread else None))
    for kind in summary.by_kind if len(summary.by_kind) > 1 else ():
        figures.append((f"{kind.kind}: attainment", "share", kind.attainment))
        figures.append((f"{kind.kind}: TTFT P99", "seconds", kind.ttft.p99 if kind.ttft else None))
        figures.append((f"{kind.kind}: ITL P99", "seconds", kind.itl.p99 if kind.itl else None))
    return figures
