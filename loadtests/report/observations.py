"""A run's records as columns, and whether they tell of the server or of the generator: then the run is invalid.

One value a request, and the gaps of all requests in one array. Records are read one by one; of 12,000 requests of 100
tokens some 20 MB are kept.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostroke.loadtests.plan import MOST_LAG_OF_SLO, SLO, Plan
from twostroke.loadtests.report.estimates import Floats, Ints, percentile
from twostroke.loadtests.run_folder import GeneratorHealth, Record, RunFacts, Status

Bools = NDArray[np.bool_]

STATUSES: tuple[Status, ...] = get_args(Status)
NAN = float("nan")
CLOCK_TOLERANCE_S = 1e-3  # a timer may fire a little early
TAIL_SHARE = 0.1  # of a request's gaps: the longest, which make its tail TBT


def tail_tbt(gaps: Sequence[float] | Floats) -> float | None:
    """Mean of the longest tenth of `gaps`, at least one of them; None without any."""
    if not len(gaps):
        return None
    num_tail = max(1, round(len(gaps) * TAIL_SHARE))
    return float(np.sort(gaps)[-num_tail:].mean())


@dataclass(frozen=True)
class Observations:
    """Columns of equal length, a row for each request; seconds, NaN where there is none."""

    scheduled_s: Floats
    sent_s: Floats
    end_s: Floats
    status: Ints  # index into STATUSES
    kind: Ints  # index into `kinds`
    ttft_s: Floats  # from the scheduled arrival
    tpot_s: Floats  # NaN for one token, too
    e2e_s: Floats  # from the scheduled arrival to the last token, of complete answers
    tail_tbt_s: Floats
    input_tokens: Floats
    output_tokens: Floats
    cached_tokens: Floats
    gaps_s: Floats  # of all requests
    gap_row: Ints  # the row that each gap belongs to
    kinds: tuple[str, ...]
    faults: tuple[tuple[int | None, str] | None, ...]  # HTTP status and words, of refused and failed ones
    stages: tuple[dict[str, float] | None, ...]  # what the server told
    num_without_usage: int  # complete answers that tell no number of tokens
    num_contradictions: int  # records whose moments can't have been in this order

    def __len__(self) -> int:
        return len(self.scheduled_s)

    def is_status(self, status: Status) -> Bools:
        found: Bools = self.status == STATUSES.index(status)
        return found

    def between(self, begin_s: float, end_s: float) -> Bools:
        """The rows scheduled in [begin_s, end_s)."""
        return (self.scheduled_s >= begin_s) & (self.scheduled_s < end_s)

    def met_ttft(self, slo: SLO, scale: float = 1.0) -> Bools:
        """Complete answers whose first text came within `scale` times the SLO; all complete ones where none is set."""
        complete = self.is_status("ok")
        return complete if slo.ttft_s is None else complete & (self.ttft_s <= slo.ttft_s * scale)  # NaN is a miss

    def met_tpot(self, slo: SLO, scale: float = 1.0) -> Bools:
        """As `met_ttft`. One token has no time between tokens, and counts as met."""
        complete = self.is_status("ok")
        if slo.tpot_s is None:
            return complete
        return complete & (np.isnan(self.tpot_s) | (self.tpot_s <= slo.tpot_s * scale))


def read_observations(records: Iterable[Record]) -> Observations:
    """All records, warm-up included."""
    times: list[tuple[float, ...]] = []
    statuses: list[int] = []
    kinds: dict[str, int] = {}
    kind_of_row: list[int] = []
    faults: list[tuple[int | None, str] | None] = []
    stages: list[dict[str, float] | None] = []
    gaps = array("d")
    num_gaps: list[int] = []
    num_without_usage = num_contradictions = 0
    for record in records:
        complete = record.status == "ok"
        row_gaps = record.gaps_s
        times.append(
            (
                record.scheduled_s,
                record.sent_s,
                record.end_s,
                _or_nan(record.ttft_s),
                _or_nan(record.tpot_s),
                record.token_s[-1] - record.scheduled_s if complete and record.token_s else NAN,
                _or_nan(tail_tbt(row_gaps)),
                _or_nan(record.input_tokens),
                _or_nan(record.output_tokens),
                _or_nan(record.cached_tokens),
            )
        )
        statuses.append(STATUSES.index(record.status))
        kind_of_row.append(kinds.setdefault(record.kind, len(kinds)))
        faults.append(None if complete else (record.http_status, record.error or "no reason told"))
        stages.append(record.stages)
        gaps.extend(row_gaps)
        num_gaps.append(len(row_gaps))
        num_without_usage += complete and record.output_tokens is None
        num_contradictions += not _is_possible(record)
    columns = np.array(times, dtype=np.float64).reshape(len(times), 10).T
    scheduled_s, sent_s, end_s, ttft_s, tpot_s, e2e_s, tail_tbt_s, input_tokens, output_tokens, cached_tokens = columns
    return Observations(
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        end_s=end_s,
        status=np.array(statuses, dtype=np.int64),
        kind=np.array(kind_of_row, dtype=np.int64),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        e2e_s=e2e_s,
        tail_tbt_s=tail_tbt_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached_tokens,
        gaps_s=np.array(gaps, dtype=np.float64),
        gap_row=np.repeat(np.arange(len(times)), num_gaps),
        kinds=tuple(kinds),
        faults=tuple(faults),
        stages=tuple(stages),
        num_without_usage=num_without_usage,
        num_contradictions=num_contradictions,
    )


def _or_nan(value: float | None) -> float:
    return NAN if value is None else float(value)


def _is_possible(record: Record) -> bool:
    """Scheduled, sent, answered token by token, ended: in this order."""
    moments = (record.sent_s, *record.token_s, record.end_s)
    if record.status == "unfinished" and not record.token_s:  # perhaps never sent
        return True
    return record.scheduled_s <= record.sent_s + CLOCK_TOLERANCE_S and all(a <= b for a, b in pairwise(moments))


MOST_CPU = 0.8  # of a core, mean over the run: its busiest moments are then above the 90% that Locust warns of
IDLE_CPU = 0.3  # of a core: a process that used less was not late by its own work


class Validity(msgspec.Struct, frozen=True):
    """The reasons are for people."""

    valid: bool
    reasons: tuple[str, ...] = ()


def judge(plan: Plan, facts: RunFacts, seen: Observations, inside: Bools) -> Validity:
    """`inside` are the rows scheduled in the window."""
    reasons = []
    if not inside.any():
        reasons.append("no request was scheduled in the window, so nothing was measured")
    lag_limit_s = plan.slo.lag_limit_s
    lag_s = percentile((seen.sent_s - seen.scheduled_s)[inside], 99)
    if lag_limit_s is not None and lag_s is not None and lag_s > lag_limit_s:
        reasons.append(
            f"the generator sent late: P99 of the lag is {_ms(lag_s)}, above {MOST_LAG_OF_SLO:.0%} of the "
            f"SLO ({_ms(lag_limit_s)}); {_remedy(facts)}"
        )
    for generator in facts.generators:
        if _load(generator) > MOST_CPU:
            reasons.append(
                f"generator process {generator.worker} was saturated: {_load(generator):.0%} of a core, above "
                f"{MOST_CPU:.0%}; use more generator processes"
            )
    num_sent = sum(generator.num_sent for generator in facts.generators)
    if num_sent > len(seen):
        reasons.append(f"{num_sent} requests were sent, and only {len(seen)} have a record")
    if seen.num_contradictions:
        reasons.append(f"the moments of {seen.num_contradictions} records are in no possible order: a clock jumped")
    if facts.ended_early:
        last_s = float(np.max(seen.scheduled_s)) if len(seen) else 0.0
        reasons.append(f"the run was ended early: {last_s:.0f} s of {plan.seconds:.0f} s were sent")
    return Validity(not reasons, tuple(reasons))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _load(generator: GeneratorHealth) -> float:
    """Cores that it used, mean over the run."""
    return generator.cpu_seconds / generator.wall_seconds if generator.wall_seconds > 0 else 0.0


def _remedy(facts: RunFacts) -> str:
    """Against sending late: it depends on whether the generator was busy itself."""
    loads = [_load(generator) for generator in facts.generators]
    if loads and max(loads) < IDLE_CPU:
        return (
            f"its processes used {max(loads):.0%} of a core, so something else kept the machine busy: use "
            "another machine for the generator, or leave it a core"
        )
    return "use more generator processes or machines, or a lower rate"
