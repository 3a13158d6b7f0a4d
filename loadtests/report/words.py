"""How figures, plans and verdicts are said: in reports and on the console."""

import math
from typing import Any

import msgspec

from loadtests.plan import SLO, Plan
from loadtests.report.estimates import Estimate
from loadtests.report.figures import Summary


def duration(seconds: float | None) -> str:
    """With the unit that suits its size: 0.25 ms, 40 ms, 1.2 s; a dash for None."""
    if seconds is None or math.isnan(seconds):
        return "–"
    if abs(seconds) >= 1 or seconds == 0:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds * 1e3)} ms"


def number(value: float | None) -> str:
    return "–" if value is None else _digits(value)


def percent(part: float | None) -> str:
    """With a digit after the point; 100% and 0% are exact, so 0.9999 is 99.99%."""
    if part is None:
        return "–"
    for digits in (1, 2, 3, 4):
        text = f"{part:.{digits}%}"
        if float(text[:-1]) not in (0.0, 100.0) or part in (0.0, 1.0):
            break
    return text.replace(".0%", "%") if part in (0.0, 1.0) else text


def estimated(estimate: Estimate | None, say: Any) -> str:
    """The value as `say` says it, and its interval in brackets."""
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return str(say(estimate.value))
    return f"{say(estimate.value)} ({say(estimate.low)} to {say(estimate.high)})"


def slo_words(slo: SLO) -> str:
    parts = [
        f"{name} ≤ {duration(limit_s)}" for name, limit_s in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)) if limit_s
    ]
    return " and ".join(parts) or "no SLO"


def setting_words(setting: msgspec.Struct) -> str:
    """Of arrivals or a workload: its tag and what it is set to."""
    tag = type(setting).__struct_config__.tag
    values = ", ".join(
        f"{name.replace('_', ' ')} {_value(value)}" for name, value in msgspec.structs.asdict(setting).items()
    )
    return f"{tag} ({values})" if values else str(tag)


def workers_words(num_workers: dict[str, int]) -> str:
    return " + ".join(f"{count} {role}" for role, count in sorted(num_workers.items(), reverse=True)) or "not told"


def verdict(plan: Plan, summary: Summary) -> str:
    """What was asked and attained, in one or two sentences."""
    counts = summary.counts
    if not counts.scheduled:
        return "No request was scheduled in the window."
    asked = slo_words(plan.slo)
    what = "were answered whole" if asked == "no SLO" else f"met {asked}"
    text = (
        f"{estimated(summary.attainment, percent)} of {counts.scheduled:,} requests {what}, at "
        f"{number(summary.offered_rate)} requests/s. Goodput: {estimated(summary.goodput, number)} requests/s"
    )
    if summary.goodput_per_worker is not None:
        workers = workers_words(summary.num_workers)
        text += f", {number(summary.goodput_per_worker.value)} for each worker ({workers})"
    return text + "."


def _digits(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
