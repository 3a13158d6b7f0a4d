"""Figures of a run, from its records: `report.json`. The definitions are those of docs/loadtests.md. Pure.

Records are read one by one into columns; 12,000 requests of 100 tokens take some 20 MB. The run is judged invalid where
the records describe the generator rather than the server.
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostroke.loadtests.plan import MAX_LAG_OF_SLO, SLO, Closed, Plan
from twostroke.loadtests.report.estimates import Estimate, Floats, Ints, Slices, duration, percentile, share
from twostroke.loadtests.run_folder import GeneratorHealth, Record, RunFacts, RunFolder, Sample, Status


class StagePart(msgspec.Struct, frozen=True):
    """A stretch of the mean answer."""

    name: str
    mean_s: float


CLIENT_PARTS = ("until the first token", "first to last token")
SERVER_PARTS = (
    "to the server and back",  # the sender's lag and the network: the client's TTFT less the server's
    "admission",
    "prefill queue",
    "prefill",
    "handing over",  # of the time to first token, what no worker accounts for: calls and their way back
    "KV transfer after prefill",
    "decode queue",
    "decode",
)


def server_parts(stages: Mapping[str, float], client_ttft_s: float, client_e2e_s: float) -> tuple[float, ...]:
    """The parts of one answer, in the order of SERVER_PARTS. Their sum is `client_e2e_s`.

    Where a decode worker computed the prompt itself there is no `prefill_s`: then its queue stands before prefill, and
    prefill is all from there to the first token.
    """
    ttft_s = min(stages.get("ttft_s", client_ttft_s), client_ttft_s)
    after_s = client_e2e_s - client_ttft_s
    admit_s = min(stages.get("admit_s", 0.0), ttft_s)
    decode_queue_s = stages.get("decode_queue_s", 0.0)
    left_s = ttft_s - admit_s
    if "prefill_s" not in stages:
        queue_s = min(decode_queue_s, left_s)
        return client_ttft_s - ttft_s, admit_s, queue_s, left_s - queue_s, 0.0, 0.0, 0.0, after_s
    queue_s = min(stages.get("prefill_queue_s", 0.0), left_s)
    prefill_s = min(stages["prefill_s"], left_s - queue_s)
    exposed_s = min(max(0.0, stages.get("transfer_s", 0.0) - queue_s - prefill_s), after_s)
    wait_s = min(decode_queue_s, after_s - exposed_s)
    return (
        client_ttft_s - ttft_s,
        admit_s,
        queue_s,
        prefill_s,
        left_s - queue_s - prefill_s,
        exposed_s,
        wait_s,
        after_s - exposed_s - wait_s,
    )


Bools = NDArray[np.bool_]
NAN = float("nan")
CLOCK_TOLERANCE_S = 1e-3  # a timer may fire a little early
TAIL_SHARE = 0.1  # of a request's gaps: the longest, which make its tail TBT
OF_RECORDS = ("scheduled_s", "sent_s", "end_s", "ttft_s", "tpot_s", "input_tokens", "output_tokens", "cached_tokens")


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
    ttft_s: Floats  # from the scheduled arrival
    tpot_s: Floats  # NaN for one token, too
    e2e_s: Floats  # from the scheduled arrival to the last token, of complete answers
    tail_tbt_s: Floats
    input_tokens: Floats
    output_tokens: Floats
    cached_tokens: Floats
    status: NDArray[np.str_]
    kind: NDArray[np.str_]
    gaps_s: Floats  # of all requests
    gap_row: Ints  # the row that each gap belongs to
    faults: list[tuple[Status, int | None, str] | None]  # status, HTTP's and words, of refused and failed ones
    unreadable: Bools  # failed since the client could not read the response
    stages: list[dict[str, float] | None]  # what the server told
    num_contradictions: int  # records whose moments can't have been in this order

    def __len__(self) -> int:
        return len(self.scheduled_s)

    def is_status(self, status: Status) -> Bools:
        found: Bools = self.status == status
        return found

    def met_ttft(self, slo: SLO, scale: float = 1.0) -> Bools:
        """Complete answers whose first text came within `scale` times the SLO; all complete ones where none is set."""
        complete = self.is_status("ok")
        return complete if slo.ttft_s is None else complete & (self.ttft_s <= slo.ttft_s * scale)  # NaN is a miss

    def met_tpot(self, slo: SLO, scale: float = 1.0) -> Bools:
        """Return which rows met the TPOT, as `met_ttft` does for the TTFT. One token has no time between tokens and
        counts as met."""
        complete = self.is_status("ok")
        if slo.tpot_s is None:
            return complete
        return complete & (np.isnan(self.tpot_s) | (self.tpot_s <= slo.tpot_s * scale))


def read_observations(records: Iterable[Record]) -> Observations:
    """All records, warm-up included."""
    columns = {name: array("d") for name in (*OF_RECORDS, "e2e_s", "tail_tbt_s")}
    gaps_s = array("d")
    num_gaps: list[int] = []
    statuses: list[Status] = []
    kinds: list[str] = []
    faults: list[tuple[Status, int | None, str] | None] = []
    unreadable: list[bool] = []
    stages: list[dict[str, float] | None] = []
    num_contradictions = 0
    for record in records:
        gaps_of_record = record.gaps_s
        values = {name: getattr(record, name) for name in OF_RECORDS}
        values["e2e_s"] = record.token_s[-1] - record.scheduled_s if record.status == "ok" and record.token_s else None
        values["tail_tbt_s"] = tail_tbt(gaps_of_record)
        for name, value in values.items():
            columns[name].append(NAN if value is None else value)
        gaps_s.extend(gaps_of_record)
        num_gaps.append(len(gaps_of_record))
        statuses.append(record.status)
        kinds.append(record.kind)
        is_fault = record.status in ("refused", "failed")
        faults.append((record.status, record.http_status, record.error or "no reason told") if is_fault else None)
        unreadable.append(record.is_unreadable)
        stages.append(record.stages)
        num_contradictions += not _is_possible(record)
    return Observations(
        **{name: np.array(column) for name, column in columns.items()},
        status=np.array(statuses, dtype=np.str_),
        kind=np.array(kinds, dtype=np.str_),
        gaps_s=np.array(gaps_s),
        gap_row=np.repeat(np.arange(len(num_gaps)), num_gaps),
        faults=faults,
        unreadable=np.array(unreadable, dtype=np.bool_),
        stages=stages,
        num_contradictions=num_contradictions,
    )


def _is_possible(record: Record) -> bool:
    """Scheduled, sent, answered token by token, ended: in this order."""
    moments = (record.sent_s, *record.token_s, record.end_s)
    if record.status == "unfinished" and not record.token_s:  # perhaps never sent
        return True
    return record.scheduled_s <= record.sent_s + CLOCK_TOLERANCE_S and all(a <= b for a, b in pairwise(moments))


MAX_CPU = 0.8  # of a core, mean over the run: its busiest moments are then above the 90% that Locust warns of
IDLE_CPU = 0.3  # of a core: a process that used less was not late by its own work
MAX_UNREADABLE = 0.01  # of the requests: above it the figures are of those that the client happened to understand
MAX_FAILED = 0.9  # of the requests that were not refused: above it something is wrong that is no matter of speed


class Validity(msgspec.Struct, frozen=True):
    """The reasons are for people."""

    valid: bool
    reasons: tuple[str, ...] = ()


def judge(plan: Plan, facts: RunFacts, observed: Observations, inside: Bools) -> Validity:
    """`inside` are the rows scheduled in the window."""
    reasons = []
    if not inside.any():
        reasons.append("no request was scheduled in the window, so nothing was measured")
    reasons += _failure_reasons(observed, inside)
    lag_limit_s = plan.slo.lag_limit_s
    lag_s = percentile((observed.sent_s - observed.scheduled_s)[inside], 99)
    if lag_limit_s is not None and lag_s is not None and lag_s > lag_limit_s:
        reasons.append(
            f"the generator sent late: P99 of the lag is {duration(lag_s)}, above {MAX_LAG_OF_SLO:.0%} of the "
            f"SLO ({duration(lag_limit_s)}); {_remedy(facts)}"
        )
    for generator in facts.generators:
        if _load(generator) > MAX_CPU:
            reasons.append(
                f"generator process {generator.worker} was saturated: {_load(generator):.0%} of a core, above "
                f"{MAX_CPU:.0%}; use more generator processes"
            )
    num_sent = sum(generator.num_sent for generator in facts.generators)
    if num_sent > len(observed):
        reasons.append(f"{num_sent} requests were sent, and only {len(observed)} have a record")
    if observed.num_contradictions:
        reasons.append(f"the moments of {observed.num_contradictions} records are in no possible order: a clock jumped")
    if facts.ended_early:
        last_s = float(np.max(observed.scheduled_s)) if len(observed) else 0.0
        reasons.append(f"the run was ended early: {last_s:.0f} s of {plan.seconds:.0f} s were sent")
    return Validity(not reasons, tuple(reasons))


def _failure_reasons(observed: Observations, inside: Bools) -> list[str]:
    """Return why the answers do not describe the server's speed, with the commonest error; none where they do."""
    num_answerable = int((inside & ~observed.is_status("refused")).sum())
    num_unreadable = int((inside & observed.unreadable).sum())
    num_failed = int((inside & observed.is_status("failed")).sum())
    if num_unreadable > MAX_UNREADABLE * num_answerable:
        what = f"the client could not read {num_unreadable} of {num_answerable} answers"
    elif num_failed > MAX_FAILED * num_answerable:
        what = f"{num_failed} of {num_answerable} requests failed"
    else:
        return []
    commonest, *_ = _errors(observed, inside & observed.is_status("failed"))
    return [f"{what}; {commonest.count} of them: {commonest.error}"]


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


SLO_SCALES = tuple(float(scale) for scale in np.geomspace(0.25, 4.0, 33))
MAX_ERRORS_SHOWN = 10
BUNDLED_GAP_S = 1e-4  # no model is as fast: the server or the network sent these events together
_CODE = re.compile(r'"code"\s*:\s*"([^"]+)"')
_WITH_DIGITS = re.compile(r"[\w.-]*\d[\w.-]*")


class Spread(msgspec.Struct, frozen=True):
    """Spread of a quantity, in seconds. The intervals are of P50 and P99."""

    count: int
    mean: float
    p50: Estimate
    p90: float
    p95: float
    p99: Estimate
    max: float


class Counts(msgspec.Struct, frozen=True):
    """Requests scheduled in the window, by what became of them: scheduled = ok + refused + failed + unfinished."""

    scheduled: int
    ok: int
    refused: int
    failed: int
    unfinished: int
    met: int  # both SLOs
    met_ttft: int
    met_tpot: int

    @property
    def admitted(self) -> int:
        """Those that the server did not refuse."""
        return self.scheduled - self.refused


class KindFigures(msgspec.Struct, frozen=True):
    """Figures of the requests of one kind."""

    kind: str
    counts: Counts
    attainment: Estimate | None
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None


class FrequentError(msgspec.Struct, frozen=True):
    """The same code, or the same words but for their numbers, of so many requests."""

    count: int
    status: Status
    http_status: int | None
    error: str  # of the first of them


class ScalePoint(msgspec.Struct, frozen=True):
    """Attainment, had the SLO been `scale` times what it was: the same answers judged otherwise."""

    scale: float
    attainment: float
    ttft_attainment: float
    tpot_attainment: float


class DraftFigures(msgspec.Struct, frozen=True):
    """Speculative decoding from the window's first sample on, over all workers."""

    drafted_tokens: float
    acceptance_rate: float  # accepted of the drafted tokens
    accepted_per_token: float  # of the answers' tokens
    tokens_per_step: float  # that a decode step of a request brings


class Summary(msgspec.Struct, frozen=True):
    """A run's figures; rates are per second of the window, None where nothing was measured."""

    name: str
    url: str
    started_at: str
    window_s: float
    counts: Counts
    attainment: Estimate | None  # None without an SLO, here and in the next three
    ttft_attainment: Estimate | None
    tpot_attainment: Estimate | None
    goodput: Estimate | None  # requests that met both SLOs
    num_workers: dict[str, float]  # by role, the mean where they came and went; empty where the server does not tell
    goodput_per_worker: Estimate | None
    mfu: dict[str, float]  # by role: mean model FLOPs utilisation, 0 to 1; empty where the server does not tell
    mbu: dict[str, float]
    drafts: DraftFigures | None  # None where the server does not tell, or drafts nothing
    offered_rate: float  # requests scheduled
    output_rate: Estimate  # tokens of complete answers
    input_rate: float
    cached_share: float | None  # of the prompt tokens, where the server tells
    user_rate: float | None  # tokens a second that a user sees: 1 / median TPOT
    ttft: Spread | None  # of complete answers, here and below
    tpot: Spread | None
    itl: Spread | None
    bundled_share: float | None  # of the gaps: below 0.1 ms, so that the events came together
    tail_tbt: float | None  # mean of the longest tenth of all gaps
    tail_tbt_by_request: Spread | None
    e2e: Spread | None
    normalised_latency: Spread | None  # E2E / output tokens, which is not TPOT
    lag: Spread | None
    stages: list[StagePart]
    by_kind: list[KindFigures]
    errors: list[FrequentError]
    slo_scales: list[ScalePoint]
    validity: Validity
    notes: list[str]  # what readers must know of a valid run, too


def summarise(folder: RunFolder) -> Summary:
    """The figures of a run's folder. Raises LoadTestError where it is no such, or a record can't be read."""
    return summarise_observations(folder.plan(), folder.facts(), read_observations(folder.records()), folder.samples())


def pooled(runs: Iterable[RunFolder]) -> Observations:
    """The requests in the windows of all these runs, as if they were of one."""
    return read_observations(chain.from_iterable(map(_judged_records, runs)))


def _judged_records(run: RunFolder) -> list[Record]:
    records = list(run.records())
    begin_s, end_s = judged_window(run.plan(), run.facts(), [record.scheduled_s for record in records])
    return [record for record in records if begin_s <= record.scheduled_s < end_s]


def judged_window(plan: Plan, facts: RunFacts, scheduled_s: Sequence[float] | Floats) -> tuple[float, float]:
    """When judged requests were scheduled: [begin, end). Of a run that was ended early until its last request."""
    end_s = plan.seconds
    if facts.ended_early and len(scheduled_s):
        end_s = min(end_s, float(np.max(scheduled_s)) + 1e-9)
    return plan.warm_up_s, max(end_s, plan.warm_up_s + 1e-9)


def judged_rows(plan: Plan, facts: RunFacts, observed: Observations) -> Bools:
    """Those scheduled in the window."""
    begin_s, end_s = judged_window(plan, facts, observed.scheduled_s)
    return (observed.scheduled_s >= begin_s) & (observed.scheduled_s < end_s)


def summarise_observations(plan: Plan, facts: RunFacts, observed: Observations, samples: Sequence[Sample]) -> Summary:
    begin_s, end_s = judged_window(plan, facts, observed.scheduled_s)
    inside = judged_rows(plan, facts, observed)
    window_s = end_s - begin_s
    slices = Slices(begin_s, end_s)
    complete = inside & observed.is_status("ok")
    counts = _counts(plan.slo, observed, inside)
    judged = counts.scheduled if plan.slo != SLO() else 0
    met = inside & observed.met_ttft(plan.slo) & observed.met_tpot(plan.slo)
    goodput = slices.rate(slices.of(observed.scheduled_s[met])) if plan.slo != SLO() else None
    workers = num_workers(facts, samples)
    tpot = _spread(observed, observed.tpot_s, complete, slices)
    return Summary(
        name=plan.name,
        url=plan.url,
        started_at=facts.started_at,
        window_s=window_s,
        counts=counts,
        attainment=share(counts.met, judged),
        ttft_attainment=share(counts.met_ttft, judged),
        tpot_attainment=share(counts.met_tpot, judged),
        goodput=goodput,
        num_workers=workers,
        mfu=means_by_role((one.role, one.mfu) for one in samples if begin_s <= one.at_s < end_s),
        mbu=means_by_role((one.role, one.mbu) for one in samples if begin_s <= one.at_s < end_s),
        drafts=draft_figures(one for one in samples if begin_s <= one.at_s),
        goodput_per_worker=goodput.divided_by(sum(workers.values())) if goodput and workers else None,
        offered_rate=counts.scheduled / window_s,
        output_rate=slices.rate(
            slices.of(observed.scheduled_s[complete]), np.nan_to_num(observed.output_tokens[complete])
        ),
        input_rate=float(np.nansum(observed.input_tokens[complete])) / window_s,
        cached_share=_cached_share(observed, complete),
        user_rate=1 / tpot.p50.value if tpot and tpot.p50.value > 0 else None,
        ttft=_spread(observed, observed.ttft_s, complete, slices),
        tpot=tpot,
        itl=_gap_spread(observed, complete, slices),
        bundled_share=_bundled_share(observed, complete),
        tail_tbt=tail_tbt(observed.gaps_s[complete[observed.gap_row]]),
        tail_tbt_by_request=_spread(observed, observed.tail_tbt_s, complete, slices),
        e2e=_spread(observed, observed.e2e_s, complete, slices),
        normalised_latency=_spread(observed, observed.e2e_s / np.maximum(observed.output_tokens, 1), complete, slices),
        lag=_spread(observed, observed.sent_s - observed.scheduled_s, inside, slices),
        stages=mean_stages(observed, complete),
        by_kind=[
            _kind(plan.slo, observed, str(kind), inside & (observed.kind == kind), slices)
            for kind in np.unique(observed.kind)
        ],
        errors=_errors(observed, inside),
        slo_scales=scale_points(plan.slo, observed, inside) if judged else [],
        validity=judge(plan, facts, observed, inside),
        notes=summary_notes(plan, observed),
    )


def num_workers(facts: RunFacts, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the number of workers by role: what the server reported before the run, or the mean of the samples if
    that differs."""
    listed = facts.server.get("workers")
    workers = listed if isinstance(listed, list) else []
    before = Counter(str(each["role"]) for each in workers if isinstance(each, dict) and "role" in each)
    counted = Counter(role for role, _ in {(sample.role, sample.worker) for sample in samples})
    if not counted or before == counted:
        return {role: float(count) for role, count in before.items()}
    num_moments = len({sample.at_s for sample in samples})
    return {role: count / num_moments for role, count in Counter(sample.role for sample in samples).items()}


def means_by_role(known: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """The mean of each role's values that are known."""
    values: dict[str, list[float]] = {}
    for role, value in known:
        if value is not None:
            values.setdefault(role, []).append(value)
    return {role: sum(each) / len(each) for role, each in values.items()}


def draft_figures(samples: Iterable[Sample]) -> DraftFigures | None:
    """Return what became of drafts between the samples of each worker; one that began anew counts from 0."""
    sums = np.zeros(3)
    before: dict[tuple[str, str], Floats] = {}
    for one in samples:
        if one.draft_tokens is None or one.accepted_tokens is None or one.generated_tokens is None:
            continue
        now = np.array([one.draft_tokens, one.accepted_tokens, one.generated_tokens])
        earlier = before.get((one.role, one.worker), now)
        sums += now if (now < earlier).any() else now - earlier
        before[one.role, one.worker] = now
    drafted, accepted, generated = sums.tolist()
    if not drafted or accepted >= generated:
        return None
    return DraftFigures(drafted, accepted / drafted, accepted / generated, generated / (generated - accepted))


def mean_stages(observed: Observations, complete: Bools) -> list[StagePart]:
    """Mean parts of complete answers that had a token; none without answers.

    With stages from every answer these are SERVER_PARTS, otherwise CLIENT_PARTS.
    """
    rows = np.flatnonzero(complete & ~np.isnan(observed.e2e_s))
    if not len(rows):
        return []
    names: tuple[str, ...] = CLIENT_PARTS
    parts: list[tuple[float, ...]] = [
        (observed.ttft_s[row], observed.e2e_s[row] - observed.ttft_s[row]) for row in rows
    ]
    if all(observed.stages[row] for row in rows):
        names = SERVER_PARTS
        parts = [server_parts(observed.stages[row] or {}, observed.ttft_s[row], observed.e2e_s[row]) for row in rows]
    return [StagePart(name, float(mean_s)) for name, mean_s in zip(names, np.mean(parts, axis=0), strict=True)]


def scale_points(slo: SLO, observed: Observations, rows: Bools) -> list[ScalePoint]:
    """Return the points of these rows at each of SLO_SCALES."""
    points = []
    for scale in SLO_SCALES:
        ttft, tpot = observed.met_ttft(slo, scale)[rows], observed.met_tpot(slo, scale)[rows]
        points.append(ScalePoint(scale, float((ttft & tpot).mean()), float(ttft.mean()), float(tpot.mean())))
    return points


def summary_notes(plan: Plan, observed: Observations) -> list[str]:
    notes = []
    if num_without_usage := int((observed.is_status("ok") & np.isnan(observed.output_tokens)).sum()):
        notes.append(
            f"{num_without_usage} answers do not tell how many tokens they have: their events are counted, so "
            "that their TPOT is at most what is shown."
        )
    if plan.slo == SLO():
        notes.append("No SLO was asked for, so there is no attainment and no goodput, and lag is not judged.")
    if isinstance(plan.arrivals, Closed):
        notes.append("A closed loop: a slow server is asked less, so don't compare this run with open loops.")
    return notes


def _counts(slo: SLO, observed: Observations, rows: Bools) -> Counts:
    met_ttft, met_tpot = rows & observed.met_ttft(slo), rows & observed.met_tpot(slo)
    by_status = Counter(observed.status[rows].tolist())
    return Counts(
        scheduled=int(rows.sum()),
        ok=by_status["ok"],
        refused=by_status["refused"],
        failed=by_status["failed"],
        unfinished=by_status["unfinished"],
        met=int((met_ttft & met_tpot).sum()),
        met_ttft=int(met_ttft.sum()),
        met_tpot=int(met_tpot.sum()),
    )


def _kind(slo: SLO, observed: Observations, name: str, rows: Bools, slices: Slices) -> KindFigures:
    counts = _counts(slo, observed, rows)
    complete = rows & observed.is_status("ok")
    return KindFigures(
        kind=name,
        counts=counts,
        attainment=share(counts.met, counts.scheduled if slo != SLO() else 0),
        ttft=_spread(observed, observed.ttft_s, complete, slices),
        tpot=_spread(observed, observed.tpot_s, complete, slices),
        itl=_gap_spread(observed, complete, slices),
    )


def _spread(observed: Observations, values: Floats, rows: Bools, slices: Slices) -> Spread | None:
    known = rows & ~np.isnan(values)
    return _sliced_spread(values[known], observed.scheduled_s[known], slices)


def _gap_spread(observed: Observations, rows: Bools, slices: Slices) -> Spread | None:
    """Gaps pooled over the requests; each belongs to the slice in which its request was scheduled."""
    chosen = rows[observed.gap_row]
    return _sliced_spread(observed.gaps_s[chosen], observed.scheduled_s[observed.gap_row[chosen]], slices)


def _sliced_spread(values: Floats, at_s: Floats, slices: Slices) -> Spread | None:
    index = slices.of(at_s)
    p50, p99 = slices.percentile(values, index, 50), slices.percentile(values, index, 99)
    p90, p95 = percentile(values, 90), percentile(values, 95)
    if p50 is None or p99 is None or p90 is None or p95 is None:
        return None
    return Spread(len(values), float(values.mean()), p50, p90, p95, p99, float(values.max()))


def _bundled_share(observed: Observations, complete: Bools) -> float | None:
    gaps_s = observed.gaps_s[complete[observed.gap_row]]
    return float((gaps_s < BUNDLED_GAP_S).mean()) if len(gaps_s) else None


def _cached_share(observed: Observations, complete: Bools) -> float | None:
    known = complete & ~np.isnan(observed.cached_tokens) & ~np.isnan(observed.input_tokens)
    total = float(observed.input_tokens[known].sum())
    return float(observed.cached_tokens[known].sum()) / total if total else None


def _errors(observed: Observations, inside: Bools) -> list[FrequentError]:
    """The most frequent first."""
    found: dict[tuple[Status, int | None, str], list[str]] = {}
    for row in np.flatnonzero(inside):
        fault = observed.faults[row]
        if fault is not None:
            status, http_status, error = fault
            found.setdefault((status, http_status, error_gist(error)), []).append(error)
    frequent = sorted(found.items(), key=lambda each: len(each[1]), reverse=True)[:MAX_ERRORS_SHOWN]
    return [FrequentError(len(errors), status, http_status, errors[0]) for (status, http_status, _), errors in frequent]


def error_gist(error: str) -> str:
    """Return what errors of one kind share: the code of an OpenAI API's error, else the words without numbers and
    ids."""
    code = _CODE.search(error)
    return code[1] if code else _WITH_DIGITS.sub("#", error)
