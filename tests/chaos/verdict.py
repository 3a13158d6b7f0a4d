"""What a chaos run amounts to: figures by kind of fault, what failed, and one line of JSON."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.checker import Finding, check
from tests.chaos.client import Answer
from tests.chaos.faults import Injected
from tests.chaos.stalls import BOUNDS_S, Family, Window, normal_of, stalls_by_fault
from twostroke.loadtests.report.estimates import percentile

BACK_S = 10.0
"""From a kill to the new replica's being reached, at most."""
ROUTER_KILL_S = 3.0
"""So long after a router's kill what it had under way may break, and what the proxy still sends it."""
FAULTS_A_MINUTE = 23


@dataclass(frozen=True)
class Row:
    """One kind of fault."""

    name: str
    fired: int
    stalls: int  # streams that were under way
    p50_s: float
    p99_s: float
    most_s: float
    back_s: float | None  # the slowest


@dataclass(frozen=True)
class Verdict:
    """Everything that is to be told of a run."""

    rows: list[Row]
    findings: list[Finding]  # what must not be
    summary: dict[str, Any]
    failures: list[str]  # why the run has failed


def judge(
    answers: Sequence[Answer],
    expected: Mapping[int, Answer],
    faults: Sequence[Injected],
    *,
    minutes: float,
    leaked_blocks: int,
    deaths: int,
    slack: float = 1.0,
) -> Verdict:
    """`leaked_blocks` are those owned when nothing is under way any more; `deaths` of workers that nobody killed.

    All times may be `slack` times their bounds: a machine that others use, too, tells of what is lost, not of seconds.
    """
    kills = [fault.begin for fault in faults if fault.name == "kill router"]
    cut = [answer for answer in answers if _is_whole_or_left(answer) is False and _died_with(answer, kills)]
    judged = [answer for answer in answers if answer not in cut]
    findings = [finding for answer in judged for finding in check(answer, expected[answer.request.key])]
    findings += [
        Finding("lost", answer.request.key, answer.ended_at, f"refused: {answer.status} {answer.error}")
        for answer in judged
        if answer.status not in (200, 429)
    ]
    count = {
        verdict: sum(finding.verdict == verdict for finding in findings)
        for verdict in ("lost", "mismatched", "duplicates")
    }
    normal = {key: normal_of([answer]) for key, answer in expected.items()}
    windows = [Window(fault.family, fault.name, fault.begin, fault.end) for fault in faults]
    stalls = stalls_by_fault([answer for answer in judged if answer.is_accepted], normal, windows)
    rows = [_row(name, faults, stalls.get(name, [])) for name in sorted({fault.name for fault in faults})]
    by_family: dict[Family, list[float]] = defaultdict(list)
    for name, family in {(fault.name, fault.family) for fault in faults}:
        by_family[family] += stalls.get(name, [])
    p99 = {family: percentile(by_family[family], 99) or 0.0 for family in BOUNDS_S}
    backs = [fault.back_s for fault in faults if fault.back_s is not None]
    failures = [f"{number} {verdict}" for verdict, number in count.items() if number]
    failures += [
        f"stall P99 of {family} faults is {p99[family]:.1f} s, over {slack * bound:g}"
        for family, bound in BOUNDS_S.items()
        if p99[family] > slack * bound
    ]
    if len(faults) < FAULTS_A_MINUTE * minutes:
        failures.append(f"only {len(faults)} faults have fired, of {FAULTS_A_MINUTE * minutes:g} to come")
    if max(backs, default=0.0) > slack * BACK_S:
        failures.append(f"a replica came back after {max(backs):.1f} s, over {slack * BACK_S:g}")
    if leaked_blocks:
        failures.append(f"{leaked_blocks} blocks are owned when idle")
    if deaths:
        failures.append(f"{deaths} workers have ended without being killed")
    summary = {
        "faults": len(faults),
        **count,
        "stall_p99_s": round(max(p99["kill"], p99["stop"], p99["partition"], p99["network"]), 3),
        "stall_p99_by_family_s": {family: round(value, 3) for family, value in p99.items()},
        "back_most_s": round(max(backs, default=0.0), 2),
        "kills": len(backs),
        "requests": sum(answer.is_accepted for answer in answers),
        "tokens": sum(len(choice.tokens) for answer in answers for choice in answer.choices),
        "refused": sum(answer.status == 429 for answer in answers),
        "cut_by_router": len(cut),
        "leaked_blocks": leaked_blocks,
        "deaths": deaths,
        "passed": not failures,
    }
    return Verdict(rows, findings, summary, failures)


def _is_whole_or_left(answer: Answer) -> bool:
    return answer.left or answer.status == 429 or (answer.is_accepted and answer.has_end and answer.error is None)


def _died_with(answer: Answer, kills: Sequence[float]) -> bool:
    return any(
        answer.sent_at < kill + ROUTER_KILL_S and kill <= answer.ended_at < kill + ROUTER_KILL_S for kill in kills
    )


def _row(name: str, faults: Sequence[Injected], stalls: Sequence[float]) -> Row:
    ours = [fault for fault in faults if fault.name == name]
    backs = [fault.back_s for fault in ours if fault.back_s is not None]
    return Row(
        name,
        len(ours),
        len(stalls),
        percentile(stalls, 50) or 0.0,
        percentile(stalls, 99) or 0.0,
        max(stalls, default=0.0),
        max(backs, default=None),
    )
