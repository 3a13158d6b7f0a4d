"""Two or more servers side by side: which is better, by how much, and where nothing of the kind is shown. Pure."""

import statistics
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from twostroke.loadtests.plan import Plan
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.figures import KindFigures, Spread, Summary
from twostroke.loadtests.report.sweep import SweepResult

Verdict = Literal["better", "worse", "no difference shown", "not judged"]
Unit = Literal["share", "rate", "seconds"]

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
    """Of another's figure to the first's, round by round."""

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


class Comparison(msgspec.Struct, frozen=True):
    """`comparison.json`; the first of `names` is what the others are compared with."""

    names: tuple[str, ...]
    figures: tuple[Compared, ...]  # of runs; of sweeps their capacities
    at_rates: tuple[AtRate, ...] = ()  # of sweeps
    warnings: tuple[str, ...] = ()  # why the figures may not be comparable, or mean little
    invalid_runs: int = 0


def compare_rounds(rounds: Sequence[Sequence[Summary]]) -> tuple[Compared, ...]:
    """`rounds` has each server's runs; the same number of them where rounds were taken in turns.

    Figures that nobody has are left out.
    """
    found = [(name, unit, higher, _of_all(rounds, figure)) for name, unit, higher, figure in _FIGURES]
    for kind in _common_kinds(rounds):
        for name, unit, higher, of_kind in _KIND_FIGURES:
            found.append((f"{kind}: {name}", unit, higher, _of_all(rounds, _kind_figure(kind, of_kind))))
    return tuple(
        compared(name, unit, higher, values)
        for name, unit, higher, values in found
        if any(value is not None for of_server in values for value in of_server)
    )


def compare_sweeps(sweeps: Sequence[SweepResult]) -> tuple[Compared, ...]:
    """Capacities, whole and for each worker."""
    result = []
    for level in sorted({capacity.attainment for sweep in sweeps for capacity in sweep.capacities}):
        found = [
            next((capacity for capacity in sweep.capacities if capacity.attainment == level), None) for sweep in sweeps
        ]
        whole = [[capacity.rate if capacity else None] for capacity in found]
        each = [[capacity.rate_per_worker if capacity else None] for capacity in found]
        result.append(compared(f"capacity at {level:.0%} (requests/s)", "rate", True, whole))
        if any(value is not None for (value,) in each):
            result.append(compared(f"capacity at {level:.0%} for each worker", "rate", True, each))
    return tuple(result)


def compared(name: str, unit: Unit, higher_is_better: bool, values: Sequence[Sequence[Estimate | None]]) -> Compared:
    """`values` has each server's estimates, one a round."""
    overall = tuple(over_rounds([value for value in of_server if value is not None]) for of_server in values)
    first, *others = values
    return Compared(
        name=name,
        unit=unit,
        higher_is_better=higher_is_better,
        values=overall,
        ratios=tuple(ratio_of(other, first) for other in others),
        verdicts=tuple(verdict_of(value, overall[0], higher_is_better) for value in overall[1:]),
    )


def over_rounds(estimates: Sequence[Estimate]) -> Estimate | None:
    """The median round's value, and an interval that holds those of all rounds: machines differ from minute to minute,
    and one round's interval knows nothing of that."""
    if not estimates:
        return None
    value = statistics.median(each.value for each in estimates)
    lows = [each.low for each in estimates if each.low is not None]
    highs = [each.high for each in estimates if each.high is not None]
    if len(lows) < len(estimates) or len(highs) < len(estimates):
        return Estimate(value)
    return Estimate(value, min(lows), max(highs))


def ratio_of(others: Sequence[Estimate | None], firsts: Sequence[Estimate | None]) -> Ratio | None:
    """Rounds are paired; None where none has both, or the first's figure is 0."""
    ratios = [
        other.value / first.value
        for other, first in zip(others, firsts, strict=False)
        if other is not None and first is not None and first.value
    ]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def verdict_of(value: Estimate | None, first: Estimate | None, higher_is_better: bool) -> Verdict:
    """Better or worse only where the intervals lie apart. That is stricter than a test at 5%, and should be: many
    figures are compared at once, and one in twenty would differ by chance."""
    overlaps = value.overlaps(first) if value is not None and first is not None else None
    if value is None or first is None or overlaps is None:
        return "not judged"
    if overlaps:
        return "no difference shown"
    return "better" if (value.value > first.value) == higher_is_better else "worse"


def differences(names: Sequence[str], plans: Sequence[Plan]) -> list[str]:
    """What the servers were asked otherwise than the first, in words."""
    found = []
    for name, plan in zip(names[1:], plans[1:], strict=True):
        fields = [field for field in COMPARED_FIELDS if getattr(plan, field) != getattr(plans[0], field)]
        if fields:
            found.append(f"{name} was not asked the same as {names[0]}: {', '.join(fields)} differ")
    return found


def _spread(
    part: Callable[[Summary], Spread | None], which: Literal["p50", "p99"]
) -> Callable[[Summary], Estimate | None]:
    def figure(summary: Summary) -> Estimate | None:
        spread = part(summary)
        return None if spread is None else spread.p50 if which == "p50" else spread.p99

    return figure


_FIGURES: tuple[tuple[str, Unit, bool, Callable[[Summary], Estimate | None]], ...] = (
    ("attainment", "share", True, lambda summary: summary.attainment),
    ("TTFT met", "share", True, lambda summary: summary.ttft_attainment),
    ("TPOT met", "share", True, lambda summary: summary.tpot_attainment),
    ("goodput (requests/s)", "rate", True, lambda summary: summary.goodput),
    ("goodput for each worker", "rate", True, lambda summary: summary.goodput_per_worker),
    ("output (tokens/s)", "rate", True, lambda summary: summary.output_rate),
    ("TTFT P50", "seconds", False, _spread(lambda summary: summary.ttft, "p50")),
    ("TTFT P99", "seconds", False, _spread(lambda summary: summary.ttft, "p99")),
    ("TPOT P50", "seconds", False, _spread(lambda summary: summary.tpot, "p50")),
    ("TPOT P99", "seconds", False, _spread(lambda summary: summary.tpot, "p99")),
    ("ITL P50", "seconds", False, _spread(lambda summary: summary.itl, "p50")),
    ("ITL P99", "seconds", False, _spread(lambda summary: summary.itl, "p99")),
    ("tail TBT P99", "seconds", False, _spread(lambda summary: summary.tail_tbt_by_request, "p99")),
    ("E2E P50", "seconds", False, _spread(lambda summary: summary.e2e, "p50")),
    ("E2E P99", "seconds", False, _spread(lambda summary: summary.e2e, "p99")),
)
_KIND_FIGURES: tuple[tuple[str, Unit, bool, Callable[[KindFigures], Estimate | None]], ...] = (
    ("attainment", "share", True, lambda kind: kind.attainment),
    ("TTFT P99", "seconds", False, lambda kind: kind.ttft.p99 if kind.ttft else None),
    ("ITL P99", "seconds", False, lambda kind: kind.itl.p99 if kind.itl else None),
)


def _of_all(
    rounds: Sequence[Sequence[Summary]], figure: Callable[[Summary], Estimate | None]
) -> list[list[Estimate | None]]:
    return [[figure(summary) for summary in of_server] for of_server in rounds]


def _common_kinds(rounds: Sequence[Sequence[Summary]]) -> list[str]:
    """None where requests are of one kind only."""
    kinds = [{kind.kind for kind in summary.by_kind} for of_server in rounds for summary in of_server]
    common = set.intersection(*kinds) if kinds else set()
    return sorted(common) if len(common) > 1 else []


def _kind_figure(name: str, figure: Callable[[KindFigures], Estimate | None]) -> Callable[[Summary], Estimate | None]:
    return lambda summary: next((figure(kind) for kind in summary.by_kind if kind.kind == name), None)
