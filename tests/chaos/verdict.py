"""Verdict of a chaos run: forbidden answers, clients' waits, and one line of JSON.

Every accepted answer must be the very answer that the request gets without faults, and of the schema that it was asked
for, if any. A wait is the time from sending to a
choice's first token, or between two pieces of it. What the same request waits at most without faults, under the same
load, is normal; the rest is stall. A wait is charged to the faults during which it went on, to each of the kind that
may stall longest among them, but to none for longer than since it struck.

Answers and faults go in, findings and figures come out; nothing here does I/O.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from tests.chaos.answers import ChoiceWait, Family, Finding, Flaw, Injected, check, waits
from tests.chaos.load import ClientAnswer
from tests.integration.schemas import takes
from twostroke.loadtests.report.estimates import percentile

STEP_BOUND_S = 5.0  # after which a step is hung: `max_step_s` of the server
BOUNDS_S: dict[Family, float] = {
    "kill": 2.0,
    "hang": 3.0 + STEP_BOUND_S,
    "stop": 5.0,
    "partition": 5.0,
    "network": 2.0,
    "load": math.inf,
}
"""Largest stall that 99 of 100 streams may see, in seconds. More load than there is room for may make clients wait."""


def check_schema(answer: ClientAnswer) -> list[Finding]:
    """Find choices that ended by themselves and are not of the schema that was asked for."""
    if not answer.is_accepted or (schema := answer.request.schema) is None:
        return []
    return [
        Finding("invalid", answer.request.key, answer.ended_at, f"choice {index}: is not of its schema")
        for index, choice in enumerate(answer.choices)
        if choice.finish_reasons == ["stop"] and not takes(schema, choice.text)
    ]


@dataclass(frozen=True)
class Normal:
    """Longest waits of a request without faults, in seconds."""

    first_s: float
    between_s: float


def normal_of(answer: ClientAnswer) -> Normal:
    """The longest waits in this answer, which was given without faults."""
    first, between = (
        max((wait.length_s for wait in waits(answer) if wait.is_first is is_first), default=0.0)
        for is_first in (True, False)
    )
    return Normal(first, between)


def stalls_by_fault(
    answers: Sequence[ClientAnswer], normal: Mapping[int, Normal], faults: Sequence[Injected]
) -> dict[str, list[float]]:
    """Return for each fault's name the longest stall of each stream that ran while such a fault was felt."""
    found: dict[str, list[float]] = defaultdict(list)
    for answer in answers:
        usual = normal[answer.request.key]
        met = [fault for fault in faults if fault.begin < answer.ended_at and answer.sent_at < fault.end]
        longest = {fault: 0.0 for fault in met}
        for wait in waits(answer):
            stall_s = wait.length_s - (usual.first_s if wait.is_first else usual.between_s)
            if stall_s > 0:
                for fault in _charged(wait, met):
                    longest[fault] = max(longest[fault], min(stall_s, wait.end - fault.begin))
        for fault, stall_s in longest.items():
            found[fault.name].append(stall_s)
    return dict(found)


def _charged(wait: ChoiceWait, faults: Sequence[Injected]) -> list[Injected]:
    during = [fault for fault in faults if fault.begin < wait.end and wait.begin < fault.end]
    most = max((BOUNDS_S[fault.family] for fault in during), default=0.0)
    return [fault for fault in during if BOUNDS_S[fault.family] == most]


BACK_S = 10.0
"""Seconds from a kill until the new replica is reached, at most."""
ROUTER_KILL_S = 3.0
"""Seconds after a router's kill in which its requests, and what the proxy still sends it, may break."""
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
    answers: Sequence[ClientAnswer],
    expected: Mapping[int, ClientAnswer],
    faults: Sequence[Injected],
    *,
    minutes: float,
    leaked_blocks: int,
    deaths: int,
    never_ended: int = 0,
    slack: float = 1.0,
) -> Verdict:
    """`leaked_blocks` are those owned when nothing is under way any more; `deaths` of workers that nobody killed;
    `never_ended` connections that clients stalled on, and that the server still had open at the end.

    All times may be `slack` times their bounds: a machine that others use, too, tells of what is lost, not of seconds.
    Workers that come back later leave less to harm meanwhile, so as many fewer faults have to fire.
    """
    kills = [fault.begin for fault in faults if fault.name == "kill router"]
    cut = [answer for answer in answers if not _is_whole_or_left(answer) and _died_with(answer, kills)]
    judged = [answer for answer in answers if answer not in cut]
    findings = [finding for answer in judged for finding in check(answer, expected[answer.request.key])]
    findings += [finding for answer in judged for finding in check_schema(answer)]
    findings += [
        Finding("lost", answer.request.key, answer.ended_at, f"refused: {answer.status} {answer.error}")
        for answer in judged
        if answer.status not in (200, 429)
    ]
    count = {flaw: sum(finding.flaw == flaw for finding in findings) for flaw in get_args(Flaw)}
    normal = {key: normal_of(answer) for key, answer in expected.items()}
    stalls = stalls_by_fault([answer for answer in judged if answer.is_accepted], normal, faults)
    rows = [_row(name, faults, stalls.get(name, [])) for name in sorted({fault.name for fault in faults})]
    by_family: dict[Family, list[float]] = defaultdict(list)
    for name, family in {(fault.name, fault.family) for fault in faults}:
        by_family[family] += stalls.get(name, [])
    p99 = {family: percentile(by_family[family], 99) or 0.0 for family in BOUNDS_S}
    backs = [fault.back_s for fault in faults if fault.back_s is not None]
    failures = [f"{number} {flaw}" for flaw, number in count.items() if number]
    failures += [
        f"stall P99 of {family} faults is {p99[family]:.1f} s, over {slack * bound:g}"
        for family, bound in BOUNDS_S.items()
        if p99[family] > slack * bound
    ]
    least = FAULTS_A_MINUTE * minutes / slack
    if len(faults) < least:
        failures.append(f"only {len(faults)} faults have fired, of {least:g} to come")
    if max(backs, default=0.0) > slack * BACK_S:
        failures.append(f"a replica came back after {max(backs):.1f} s, over {slack * BACK_S:g}")
    if leaked_blocks:
        failures.append(f"{leaked_blocks} blocks are owned when idle")
    if deaths:
        failures.append(f"{deaths} workers have ended without being killed")
    if never_ended:
        failures.append(f"{never_ended} stalled connections were never ended")
    summary = {
        "faults": len(faults),
        **count,
        "stall_p99_s": round(max(p99["kill"], p99["hang"], p99["stop"], p99["partition"], p99["network"]), 3),
        "stall_p99_by_family_s": {family: round(value, 3) for family, value in p99.items()},
        "back_most_s": round(max(backs, default=0.0), 2),
        "kills": len(backs),
        "requests": sum(answer.is_accepted for answer in answers),
        "tokens": sum(len(choice.tokens) for answer in answers for choice in answer.choices),
        "constrained_through_kills": sum(_lived_through(answer, faults) for answer in judged),
        "refused": sum(answer.status == 429 for answer in answers),
        "cut_by_router": len(cut),
        "leaked_blocks": leaked_blocks,
        "deaths": deaths,
        "never_ended": never_ended,
        "passed": not failures,
    }
    return Verdict(rows, findings, summary, failures)


def _lived_through(answer: ClientAnswer, faults: Sequence[Injected]) -> bool:
    """Return whether an answer under a schema had some of its tokens, and not all, when a decode worker was killed."""
    kills = [fault.begin for fault in faults if fault.name == "kill decode"]
    times = [at for choice in answer.choices for at, _ in choice.pieces]
    is_held = answer.request.schema is not None and bool(times)
    return is_held and any(min(times) < kill < max(times) for kill in kills)


def _is_whole_or_left(answer: ClientAnswer) -> bool:
    return answer.left or answer.status == 429 or (answer.is_accepted and answer.has_end and answer.error is None)


def _died_with(answer: ClientAnswer, kills: Sequence[float]) -> bool:
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
