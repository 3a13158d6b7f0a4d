"""From a run's records to its figures: `report.json`. The definitions are docs/loadtests.md's. Pure.

Of where an answer's time went, the server's stages (docs/observability.md) overlap: KV travels while the prompt is
computed, so `transfer_s` begins with the attempt; and `decode_s` begins with the first token, which the prefill worker
sends before the KV has arrived. So that nothing counts twice, of the transfer only what goes on after prefill is a
part, and decode begins after it and after the wait for the first decode step. Only durations are subtracted, never
moments of two clocks.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from twostroke.loadtests.plan import SLO, Plan
from twostroke.loadtests.report.estimates import Estimate, Floats, Slices, percentile, share
from twostroke.loadtests.report.observations import Bools, Observations, Validity, judge, read_observations, tail_tbt
from twostroke.loadtests.run_folder import RunFacts, RunFolder, Sample, Status


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


def mean_parts(answers: Iterable[tuple[Mapping[str, float] | None, float, float]]) -> list[StagePart]:
    """Means over (the server's stages, client TTFT, client time to the last token) of complete answers.

    With stages from every answer these are SERVER_PARTS, otherwise CLIENT_PARTS; empty without answers.
    """
    known = list(answers)
    if not known:
        return []
    names: tuple[str, ...] = CLIENT_PARTS
    parts: list[tuple[float, ...]] = [(ttft_s, e2e_s - ttft_s) for _, ttft_s, e2e_s in known]
    if all(stages for stages, _, _ in known):
        names = SERVER_PARTS
        parts = [server_parts(stages or {}, ttft_s, e2e_s) for stages, ttft_s, e2e_s in known]
    means = [sum(column) / len(known) for column in zip(*parts, strict=True)]
    return [StagePart(name, mean_s) for name, mean_s in zip(names, means, strict=True)]


SLO_SCALES = tuple(float(scale) for scale in np.geomspace(0.25, 4.0, 33))
MOST_ERRORS_SHOWN = 10
BUNDLED_GAP_S = 1e-4  # no model is as fast: the server or the network sent these events together
_CODE = re.compile(r'"code"\s*:\s*"([^"]+)"')
_WITH_DIGITS = re.compile(r"[\w.-]*\d[\w.-]*")


class Spread(msgspec.Struct, frozen=True):
    """How a quantity is spread, in seconds; the intervals are of P50 and P99."""

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
    """Of the requests of one kind."""

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
    return summary_of(folder.plan(), folder.facts(), read_observations(folder.records()), folder.samples())


def window_of(plan: Plan, facts: RunFacts, seen: Observations) -> tuple[float, float]:
    """When judged requests were scheduled: [begin, end). Of a run that was ended early until its last request."""
    end_s = plan.seconds
    if facts.ended_early and len(seen):
        end_s = min(end_s, float(seen.scheduled_s.max()) + 1e-9)
    return plan.warm_up_s, max(end_s, plan.warm_up_s + 1e-9)


def judged_rows(plan: Plan, facts: RunFacts, seen: Observations) -> Bools:
    """Those scheduled in the window."""
    return seen.between(*window_of(plan, facts, seen))


def summary_of(plan: Plan, facts: RunFacts, seen: Observations, samples: Sequence[Sample]) -> Summary:
    begin_s, end_s = window_of(plan, facts, seen)
    inside = seen.between(begin_s, end_s)
    window_s = end_s - begin_s
    slices = Slices(begin_s, end_s)
    complete = inside & seen.is_status("ok")
    met_ttft, met_tpot = seen.met_ttft(plan.slo), seen.met_tpot(plan.slo)
    counts = _counts(seen, inside, met_ttft, met_tpot)
    judged = counts.scheduled if plan.slo != SLO() else 0
    goodput = slices.rate(slices.of(seen.scheduled_s[inside & met_ttft & met_tpot])) if plan.slo != SLO() else None
    workers = num_workers(facts, samples)
    tpot = _spread(seen, seen.tpot_s, complete, slices)
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
        goodput_per_worker=goodput.divided_by(sum(workers.values())) if goodput and workers else None,
        offered_rate=counts.scheduled / window_s,
        output_rate=slices.rate(slices.of(seen.scheduled_s[complete]), np.nan_to_num(seen.output_tokens[complete])),
        input_rate=float(np.nansum(seen.input_tokens[complete])) / window_s,
        cached_share=_cached_share(seen, complete),
        user_rate=1 / tpot.p50.value if tpot and tpot.p50.value > 0 else None,
        ttft=_spread(seen, seen.ttft_s, complete, slices),
        tpot=tpot,
        itl=_gap_spread(seen, complete, slices),
        bundled_share=_bundled_share(seen, complete),
        tail_tbt=tail_tbt(seen.gaps_s[complete[seen.gap_row]]),
        tail_tbt_by_request=_spread(seen, seen.tail_tbt_s, complete, slices),
        e2e=_spread(seen, seen.e2e_s, complete, slices),
        normalised_latency=_spread(seen, seen.e2e_s / np.maximum(seen.output_tokens, 1), complete, slices),
        lag=_spread(seen, seen.sent_s - seen.scheduled_s, inside, slices),
        stages=stages_of(seen, complete),
        by_kind=[
            _kind(plan.slo, seen, name, inside & (seen.kind == index), slices)
            for index, name in sorted(enumerate(seen.kinds), key=lambda pair: pair[1])
        ],
        errors=_errors(seen, inside),
        slo_scales=[_at_scale(plan, seen, inside, scale) for scale in SLO_SCALES] if judged else [],
        validity=judge(plan, facts, seen, inside),
        notes=notes_of(plan, seen),
    )


def num_workers(facts: RunFacts, samples: Sequence[Sample]) -> dict[str, float]:
    """By role: what the server told before the run, or, where others were seen during it, the mean of the samples."""
    told = facts.server.get("workers")
    workers = told if isinstance(told, list) else []
    before = Counter(str(each["role"]) for each in workers if isinstance(each, dict) and "role" in each)
    seen = Counter(role for role, _ in {(sample.role, sample.worker) for sample in samples})
    if not seen or before == seen:
        return {role: float(count) for role, count in before.items()}
    num_moments = len({sample.at_s for sample in samples})
    return {role: count / num_moments for role, count in Counter(sample.role for sample in samples).items()}


def stages_of(seen: Observations, complete: Bools) -> list[StagePart]:
    """Mean parts of complete answers that had a token."""
    rows = np.flatnonzero(complete & ~np.isnan(seen.e2e_s))
    return mean_parts((seen.stages[row], float(seen.ttft_s[row]), float(seen.e2e_s[row])) for row in rows)


def notes_of(plan: Plan, seen: Observations) -> list[str]:
    notes = []
    if seen.num_without_usage:
        notes.append(
            f"{seen.num_without_usage} answers do not tell how many tokens they have: their events are counted, so "
            "that their TPOT is at most what is shown."
        )
    if plan.slo == SLO():
        notes.append("No SLO was asked for, so there is no attainment and no goodput, and lag is not judged.")
    if plan.arrivals.__struct_config__.tag == "closed":
        notes.append("A closed loop: a slow server is asked less, so don't compare this run with open loops.")
    return notes


def _counts(seen: Observations, rows: Bools, met_ttft: Bools, met_tpot: Bools) -> Counts:
    by_status = {status: int((rows & seen.is_status(status)).sum()) for status in ("ok", "refused", "failed")}
    total = int(rows.sum())
    return Counts(
        scheduled=total,
        **by_status,
        unfinished=total - sum(by_status.values()),
        met=int((rows & met_ttft & met_tpot).sum()),
        met_ttft=int((rows & met_ttft).sum()),
        met_tpot=int((rows & met_tpot).sum()),
    )


def _kind(slo: SLO, seen: Observations, name: str, rows: Bools, slices: Slices) -> KindFigures:
    counts = _counts(seen, rows, seen.met_ttft(slo), seen.met_tpot(slo))
    complete = rows & seen.is_status("ok")
    return KindFigures(
        kind=name,
        counts=counts,
        attainment=share(counts.met, counts.scheduled if slo != SLO() else 0),
        ttft=_spread(seen, seen.ttft_s, complete, slices),
        tpot=_spread(seen, seen.tpot_s, complete, slices),
        itl=_gap_spread(seen, complete, slices),
    )


def _spread(seen: Observations, values: Floats, rows: Bools, slices: Slices) -> Spread | None:
    known = rows & ~np.isnan(values)
    return _spread_of(values[known], seen.scheduled_s[known], slices)


def _gap_spread(seen: Observations, rows: Bools, slices: Slices) -> Spread | None:
    """Gaps pooled over the requests; each belongs to the slice in which its request was scheduled."""
    chosen = rows[seen.gap_row]
    return _spread_of(seen.gaps_s[chosen], seen.scheduled_s[seen.gap_row[chosen]], slices)


def _spread_of(values: Floats, at_s: Floats, slices: Slices) -> Spread | None:
    index = slices.of(at_s)
    p50, p99 = slices.percentile(values, index, 50), slices.percentile(values, index, 99)
    p90, p95 = percentile(values, 90), percentile(values, 95)
    if p50 is None or p99 is None or p90 is None or p95 is None:
        return None
    return Spread(len(values), float(values.mean()), p50, p90, p95, p99, float(values.max()))


def _bundled_share(seen: Observations, complete: Bools) -> float | None:
    gaps_s = seen.gaps_s[complete[seen.gap_row]]
    return float((gaps_s < BUNDLED_GAP_S).mean()) if len(gaps_s) else None


def _cached_share(seen: Observations, complete: Bools) -> float | None:
    told = complete & ~np.isnan(seen.cached_tokens) & ~np.isnan(seen.input_tokens)
    total = float(seen.input_tokens[told].sum())
    return float(seen.cached_tokens[told].sum()) / total if total else None


def _errors(seen: Observations, inside: Bools) -> list[FrequentError]:
    """The most frequent first."""
    found: Counter[tuple[Status, int | None, str]] = Counter()
    first: dict[tuple[Status, int | None, str], str] = {}
    for status in ("refused", "failed"):
        for row in np.flatnonzero(inside & seen.is_status(status)):
            fault = seen.faults[row]
            if fault is not None:
                http_status, error = fault
                key: tuple[Status, int | None, str] = (status, http_status, gist_of(error))
                found[key] += 1
                first.setdefault(key, error)
    return [
        FrequentError(count, status, http_status, first[status, http_status, gist])
        for (status, http_status, gist), count in found.most_common(MOST_ERRORS_SHOWN)
    ]


def gist_of(error: str) -> str:
    """What errors of one kind share: the code of an OpenAI API's error, else the words without numbers and ids."""
    code = _CODE.search(error)
    return code[1] if code else _WITH_DIGITS.sub("#", error)


def _at_scale(plan: Plan, seen: Observations, inside: Bools, scale: float) -> ScalePoint:
    ttft, tpot = seen.met_ttft(plan.slo, scale)[inside], seen.met_tpot(plan.slo, scale)[inside]
    return ScalePoint(scale, float((ttft & tpot).mean()), float(ttft.mean()), float(tpot.mean()))
