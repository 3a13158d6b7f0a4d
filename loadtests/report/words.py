"""How figures, plans and verdicts are said: in reports and on the console."""

import math
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

from twostroke.loadtests.plan import SLO, Plan
from twostroke.loadtests.report.comparison import Comparison, Unit
from twostroke.loadtests.report.estimates import Estimate, share
from twostroke.loadtests.report.figures import Summary

MISSING = "-"
Level = Literal["met", "partly", "missed", "unjudged"]

_LEVEL_WORDS = {
    "met": "That is 99% or more.",
    "partly": "That is 90% or more, but below 99%.",
    "missed": "That is below 90%: the server can't take this load within the SLO.",
}
HEADLINES = ("attainment", "goodput (", "TTFT P99", "TPOT P99", "ITL P99", "capacity")


def duration(seconds: float | None) -> str:
    """With the unit that suits its size: 0.25 ms, 40 ms, 1.2 s; a dash for None."""
    if seconds is None or math.isnan(seconds):
        return MISSING
    factor, unit = _unit(seconds)
    return f"{number(seconds * factor)} {unit}"


def number(value: float | None) -> str:
    """Three digits, or all of those before the point."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(part: float | None) -> str:
    """With a digit after the point; more where it would be rounded to 0% or 100%, which it isn't."""
    if part is None:
        return MISSING
    if part in (0.0, 1.0):
        return f"{part:.0%}"
    digits = next((digits for digits in (1, 2, 3) if 0 < round(part, digits + 2) < 1), 4)
    return f"{part:.{digits}%}"


def duration_estimate(estimate: Estimate | None) -> str:
    """The value and its interval, in one unit and with equally many digits: 36.5 ms (35.9–37.0)."""
    if estimate is None:
        return MISSING
    factor, unit = _unit(estimate.value)
    value, interval = _alike(estimate, factor)
    return f"{value} {unit}{interval}"


def number_estimate(estimate: Estimate | None) -> str:
    return MISSING if estimate is None else "".join(_alike(estimate, 1.0))


def percent_estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return MISSING
    if estimate.low is None or estimate.high is None:
        return percent(estimate.value)
    return f"{percent(estimate.value)} ({percent(estimate.low)[:-1]}–{percent(estimate.high)[:-1]})"


def slo_words(slo: SLO) -> str:
    parts = [
        f"{name} ≤ {duration(limit_s)}" for name, limit_s in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)) if limit_s
    ]
    return " and ".join(parts) or "no SLO"


def setting_words(setting: msgspec.Struct, but: Collection[str] = ()) -> str:
    """Of arrivals or a workload: its tag and what it is set to, without the fields `but`."""
    tag = type(setting).__struct_config__.tag
    values = ", ".join(
        f"{name.replace('_', ' ')} {_value(value)}"
        for name, value in msgspec.structs.asdict(setting).items()
        if name not in but
    )
    return f"{tag} ({values})" if values else str(tag)


def workers_words(num_workers: Mapping[str, float]) -> str:
    return (
        " + ".join(f"{number(count)} {role}" for role, count in sorted(num_workers.items(), reverse=True)) or "not told"
    )


def verdict(plan: Plan, summary: Summary) -> str:
    """What was asked and attained, in one or two sentences."""
    counts = summary.counts
    if not counts.scheduled:
        return "No request was scheduled in the window."
    at_rate = f"at {number(summary.offered_rate)} requests/s."
    if summary.attainment is None:
        whole = percent_estimate(share(counts.ok, counts.scheduled))
        return f"{whole} of {counts.scheduled:,} requests were answered whole, {at_rate} No SLO was asked for."
    text = (
        f"{percent_estimate(summary.attainment)} of {counts.scheduled:,} requests met {slo_words(plan.slo)}, "
        f"{at_rate} {_LEVEL_WORDS[level(summary)]} Goodput: {number_estimate(summary.goodput)} requests/s"
    )
    if summary.goodput_per_worker is not None:
        workers = workers_words(summary.num_workers)
        text += f", {number(summary.goodput_per_worker.value)} for each worker ({workers})"
    return text + "."


def level(summary: Summary) -> Level:
    """How the attainment is judged: by the two shares that capacities are asked for."""
    if summary.attainment is None:
        return "unjudged"
    if summary.attainment.value >= 0.99:
        return "met"
    return "partly" if summary.attainment.value >= 0.9 else "missed"


def sweep_rows(plan: Plan) -> list[tuple[str, str]]:
    """As `plan_rows`, of what a sweep's runs have in common: rate and seed are each run's own."""
    arrivals = ("Arrivals", setting_words(plan.arrivals, but=("rate",)))
    return [arrivals if row[0] == "Arrivals" else row for row in plan_rows(plan) if row[0] != "Seed"]


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """What was asked, for tables."""
    return [
        ("SLO", slo_words(plan.slo)),
        ("Arrivals", setting_words(plan.arrivals)),
        ("Workload", setting_words(plan.workload)),
        ("Length", f"{number(plan.seconds)} s, of which {number(plan.warm_up_s)} s are warm-up"),
        ("Model", plan.model),
        ("Service tier", plan.service_tier or "none sent"),
        ("Seed", str(plan.seed)),
    ]


def in_unit(unit: Unit, estimate: Estimate | None) -> str:
    say = {"share": percent_estimate, "rate": number_estimate, "seconds": duration_estimate}
    return say[unit](estimate)


def comparison_sentences(comparison: Comparison) -> list[str]:
    """For each of the others, where it is better and where worse than the first."""
    first, *others = comparison.names
    if not comparison.figures:
        return ["There is nothing that both have."]
    sentences = []
    for index, name in enumerate(others):
        by_verdict: dict[str, list[str]] = {}
        for figure in comparison.figures:
            by_verdict.setdefault(figure.verdicts[index], []).append(figure.name)
        said = [
            f"{word} than {first} in {', '.join(by_verdict[word])}"
            for word in ("better", "worse")
            if word in by_verdict
        ]
        same = [each for each in by_verdict.get("no difference shown", []) if each.startswith(HEADLINES)]
        if not said:
            sentences.append(f"{name} against {first}: no difference shown.")
        else:
            rest = f" No difference shown in {', '.join(same)}." if same else ""
            sentences.append(f"{name} is {'; '.join(said)}.{rest}")
    return sentences


def _unit(seconds: float) -> tuple[float, str]:
    return (1.0, "s") if abs(seconds) >= 1 or seconds == 0 else (1e3, "ms")


def _alike(estimate: Estimate, factor: float) -> tuple[str, str]:
    """The value, and its interval in brackets, empty where there is none; as many decimals as suit the value."""
    size = abs((estimate.value or estimate.high or 0.0) * factor)
    decimals = 0 if size >= 100 or not size else 1 if size >= 10 else 2 if size >= 1 else 3
    value, *ends = (
        MISSING if each is None else f"{each * factor:,.{decimals}f}"
        for each in (estimate.value, estimate.low, estimate.high)
    )
    return value, "" if MISSING in ends else f" ({'–'.join(ends)})"


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)
