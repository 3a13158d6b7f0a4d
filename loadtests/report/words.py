"""Wording of figures, plans and verdicts, in reports and on the console."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

from twostroke.loadtests.plan import SLO, Plan
from twostroke.loadtests.report.comparison import RunComparison, Unit
from twostroke.loadtests.report.estimates import (
    Estimate,
    duration,
    duration_estimate,
    number,
    number_estimate,
    percent_estimate,
    share,
)
from twostroke.loadtests.report.figures import Summary

Level = Literal["met", "partly", "missed", "unjudged"]

_LEVEL_WORDS = {
    "met": "That is 99% or more.",
    "partly": "That is 90% or more, but below 99%.",
    "missed": "That is below 90%: the server can't take this load within the SLO.",
}
HEADLINES = ("attainment", "goodput (", "TTFT P99", "TPOT P99", "ITL P99", "capacity")


def slo_words(slo: SLO) -> str:
    parts = [
        f"{name} ≤ {duration(limit_s)}" for name, limit_s in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)) if limit_s
    ]
    return " and ".join(parts) or "no SLO"


def setting_words(setting: msgspec.Struct, but: Collection[str] = ()) -> str:
    """Return an arrival's or a workload's tag and settings, without the fields `but`."""
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


def utilization_words(mfu: Mapping[str, float], mbu: Mapping[str, float]) -> str:
    """Return the mean utilisation per role over the run's samples."""
    return ", ".join(f"{role} {mfu[role]:.1%} and {mbu.get(role, 0.0):.1%}" for role in sorted(mfu, reverse=True))


def verdict(plan: Plan, summary: Summary) -> str:
    """Return what was asked and attained, in one or two sentences; of an invalid run, that it judges nothing."""
    counts = summary.counts
    if not summary.validity.valid:
        return "The run is invalid, so it does not judge the server."
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
    """Return the grade of the attainment, by the two shares that capacities are measured at."""
    if summary.attainment is None:
        return "unjudged"
    if summary.attainment.value >= 0.99:
        return "met"
    return "partly" if summary.attainment.value >= 0.9 else "missed"


def sweep_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return `plan_rows` of what a sweep's runs have in common. Rate and seed are each run's own."""
    arrivals = ("Arrivals", setting_words(plan.arrivals, but=("rate",)))
    return [arrivals if row[0] == "Arrivals" else row for row in plan_rows(plan) if row[0] != "Seed"]


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the plan as rows of a table."""
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


def comparison_sentences(comparison: RunComparison) -> list[str]:
    """Return for each of the others where it is better and where worse than the first."""
    first, *others = comparison.names
    if not comparison.figures:
        return ["There is nothing that both have."]
    sentences = []
    for index, name in enumerate(others):
        by_verdict: dict[str, list[str]] = {}
        for figure in comparison.figures:
            by_verdict.setdefault(figure.verdicts[index], []).append(figure.name)
        texts = [
            f"{word} than {first} in {', '.join(by_verdict[word])}"
            for word in ("better", "worse")
            if word in by_verdict
        ]
        same = [each for each in by_verdict.get("no difference shown", []) if each.startswith(HEADLINES)]
        if not texts:
            sentences.append(f"{name} against {first}: no difference shown.")
        else:
            rest = f" No difference shown in {', '.join(same)}." if same else ""
            sentences.append(f"{name} is {'; '.join(texts)}.{rest}")
    return sentences


def _value(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)
