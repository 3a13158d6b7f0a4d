"""`twostroke loadtest selfcheck`: can this machine's load generator be believed?

It sends real load to a stub server in a process of its own, whose every instant is known, and compares: how true its
times, its rate, its attainment and its verdict are. Both share this machine, so run it while nothing else runs there.
The last line of output is one JSON object.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.generator.runner import run_plan
from twostroke.loadtests.plan import SLO, Constant, Fixed, Plan, Poisson, Session
from twostroke.loadtests.report.estimates import percentile
from twostroke.loadtests.report.figures import Summary, summarise
from twostroke.loadtests.run_folder import Record, RunFolder
from twostroke.loadtests.selfcheck.stub_server import (
    MIXED_LIMIT_S,
    MIXED_SLO,
    MODEL,
    VOCABULARY,
    Script,
    Served,
    key_of,
    script_of,
    stub_server,
)
from twostroke.loadtests.workloads.prompts import token_ids
from twostroke.loadtests.workloads.sessions import sessions


@dataclass(frozen=True)
class Errors:
    """How far the generator's times are from the stub's, in seconds, whichever way."""

    ttft_s: list[float]
    itl_s: list[float]

    def ttft_p99_s(self) -> float:
        return percentile(self.ttft_s, 99) or 0.0

    def itl_p99_s(self) -> float:
        return percentile(self.itl_s, 99) or 0.0


def timing_errors(records: Iterable[Record], served: Sequence[Served]) -> Errors:
    """Of all whole answers. TTFT: from the scheduled instant to the first token, against the stub's time from the
    request's last byte to that token, so that lateness in sending is an error too. ITL: each gap.

    Raises LoadTestError where a record has no request at the stub, or not as many tokens, and where there are no gaps.
    """
    by_key = {f"{each.key:x}": each for each in served}
    ttft_s: list[float] = []
    itl_s: list[float] = []
    for record in records:
        if record.status != "ok" or record.ttft_s is None:
            continue
        stub = by_key.get(record.request_id or "")
        if stub is None or len(stub.token_s) != len(record.token_s):
            raise LoadTestError(f"session {record.session} got another number of tokens than the stub has sent")
        ttft_s.append(abs(record.ttft_s - (stub.token_s[0] - stub.arrived_s)))
        sent = zip(stub.token_s, stub.token_s[1:], strict=False)
        itl_s += [abs(gap - (after - before)) for gap, (before, after) in zip(record.gaps_s, sent, strict=True)]
    if not itl_s:
        raise LoadTestError("no answer of two tokens or more came whole: there are no times to compare")
    return Errors(ttft_s, itl_s)


def rate_error(rate: float, served: Sequence[Served]) -> float:
    """How far the rate at which requests reached the stub is from `rate`, asked as a constant one; a share of it."""
    if len(served) < 2:
        raise LoadTestError(f"the stub got {len(served)} requests: nothing can be said of their rate")
    arrived = sorted(each.arrived_s for each in served)
    return abs((len(arrived) - 1) / (arrived[-1] - arrived[0]) / rate - 1)


def scripts(plan: Plan, scenario: str, sessions: Iterable[Session]) -> list[Script]:
    """What the stub does with each session's only request."""
    turns = [session.turns[0] for session in sessions]
    return [script_of(scenario, key_of(token_ids(turn.prompt, plan.vocabulary)), turn.output_tokens) for turn in turns]


def analytic_attainment(plan: Plan, scenario: str, sessions: Iterable[Session]) -> float:
    """The share of the requests scheduled after the warm-up whose script meets the plan's SLO."""
    judged = scripts(plan, scenario, (session for session in sessions if session.at_s >= plan.warm_up_s))
    return sum(script.meets(plan.slo) for script in judged) / len(judged)


INPUT_TOKENS = 64
STREAMS = 50  # at once, of each sending process
STREAM_TOKENS = 250  # 20 ms after each other, on average
STREAM_S = 0.275 + (STREAM_TOKENS - 1) * 0.02
STEADY_SLO = SLO(ttft_s=0.2)  # P99 of the lag may be 5% of it: 10 ms
MIXED_RATE = 20.0
FLOOD_RATE = 10_000.0  # requests a second, several times what one process can send
FLOOD_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """One run, and what the stub did."""

    folder: RunFolder
    summary: Summary
    served: list[Served]


class Accuracy(msgspec.Struct, frozen=True):
    """`steady`: streams enough for each process's core."""

    ttft_error_p99_s: float
    itl_error_p99_s: float
    rate_error: float  # share of the rate asked
    lag_p99_s: float
    valid: bool
    streams: float  # at once, on average, all processes together
    processes: int
    generator_cpu: float  # of a core, the busiest process
    num_requests: int


class Attainment(msgspec.Struct, frozen=True):
    """`mixed`: refused, failed, broken, silent, slow and single-token answers among good ones."""

    attainment: float
    attainment_expected: float
    attainment_error: float
    num_requests: int
    valid: bool


class Saturation(msgspec.Struct, frozen=True):
    """`immediate`, at a rate beyond one process."""

    saturated_is_invalid: bool
    saturated_reasons: tuple[str, ...]
    saturated_ttft_p50_s: float | None  # what would have been believed of a server that answers within 1 ms


def check_accuracy(folder: Path, seconds: float, processes: int) -> Accuracy:
    """Raises LoadTestError where a run can't be carried out; so do the others."""
    rate = processes * STREAMS / STREAM_S
    plan = msgspec.structs.replace(
        _PLAN,
        arrivals=Constant(rate),
        workload=Fixed(INPUT_TOKENS, STREAM_TOKENS),
        slo=STEADY_SLO,
        seconds=seconds,
        num_workers=processes,
        warm_up_s=STREAM_S,  # until then there are fewer streams
    )
    outcome = _outcome(plan, "steady", folder)
    judged = (record for record in outcome.folder.records() if record.scheduled_s >= plan.warm_up_s)
    errors = timing_errors(judged, outcome.served)
    lag = outcome.summary.lag
    return Accuracy(
        ttft_error_p99_s=errors.ttft_p99_s(),
        itl_error_p99_s=errors.itl_p99_s(),
        rate_error=rate_error(rate, outcome.served),
        lag_p99_s=lag.p99.value if lag else 0.0,
        valid=outcome.summary.validity.valid,
        streams=rate * STREAM_S,
        processes=processes,
        generator_cpu=max(each.cpu_seconds / each.wall_seconds for each in outcome.folder.facts().generators),
        num_requests=len(outcome.served),
    )


def check_attainment(folder: Path, seconds: float) -> Attainment:
    plan = msgspec.structs.replace(
        _PLAN,
        arrivals=Poisson(MIXED_RATE),
        slo=MIXED_SLO,
        seconds=seconds,
        warm_up_s=seconds / 10,
        request_limit_s=MIXED_LIMIT_S,
    )
    outcome = _outcome(plan, "mixed", folder)
    expected = analytic_attainment(plan, "mixed", sessions(plan))
    measured = outcome.summary.attainment.value if outcome.summary.attainment else 0.0
    return Attainment(
        attainment=measured,
        attainment_expected=expected,
        attainment_error=abs(measured - expected),
        num_requests=outcome.summary.counts.scheduled,
        valid=outcome.summary.validity.valid,
    )


def check_saturation(folder: Path) -> Saturation:
    plan = msgspec.structs.replace(_PLAN, arrivals=Constant(FLOOD_RATE), slo=MIXED_SLO, seconds=FLOOD_S)
    summary = _outcome(plan, "immediate", folder).summary
    return Saturation(
        saturated_is_invalid=not summary.validity.valid,
        saturated_reasons=summary.validity.reasons,
        saturated_ttft_p50_s=summary.ttft.p50.value if summary.ttft else None,
    )


_PLAN = Plan(
    url="",
    model=MODEL,
    max_context=INPUT_TOKENS + STREAM_TOKENS,
    arrivals=Constant(1.0),
    workload=Fixed(INPUT_TOKENS, 2),
    slo=SLO(),
    seconds=1.0,
    vocabulary=VOCABULARY,
    request_limit_s=60.0,
)


def _outcome(plan: Plan, scenario: str, folder: Path) -> Outcome:
    """Run against a stub of this scenario, into a subfolder of its name."""
    run = RunFolder(folder / scenario)
    run.path.mkdir(parents=True, exist_ok=True)
    with stub_server(scenario, run.path / "stub.jsonl") as stub:
        run_plan(msgspec.structs.replace(plan, url=stub.url, name=f"selfcheck {scenario}"), run.path)
    return Outcome(run, summarise(run), stub.served)


MOST_TIME_ERROR_S = 0.010  # P99
MOST_RATE_ERROR = 0.01
MOST_LOAD = 0.25  # of the cores, by others, for the figures to be the generator's own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="sending processes, 50 streams each; leave a core free for the stub (default: 1)",
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="length of the two timed runs each (default: 60)"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the runs' folders here (default: they go)")


def run(arguments: argparse.Namespace) -> int:
    """0 where all held, 1 where not. Raises LoadTestError where a run can't be carried out."""
    if arguments.workers < 1:
        raise LoadTestError(f"--workers {arguments.workers}: give at least 1")
    if arguments.seconds < 10:
        raise LoadTestError(f"--seconds {arguments.seconds:g}: give at least 10, or too little is measured")
    if arguments.output is not None:
        return _check(arguments.output, arguments.seconds, arguments.workers)
    with tempfile.TemporaryDirectory(prefix="twostroke-selfcheck-") as folder:
        return _check(Path(folder), arguments.seconds, arguments.workers)


def _check(folder: Path, seconds: float, processes: int) -> int:
    load_average, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load_average > MOST_LOAD * cores:
        _say(f"this machine is busy ({load_average:.1f} processes want its {cores} cores): the errors will be theirs")
    _say(f"1 of 3: times and rate; {processes} x 50 streams, by {processes} processes, {seconds:g} s")
    accuracy = check_accuracy(folder, seconds, processes)
    _say("2 of 3: attainment, with refused, failed, broken and silent answers among good ones")
    attainment = check_attainment(folder, seconds)
    _say("3 of 3: more than the generator can send, to a server that answers at once: this must come out as invalid")
    saturation = check_saturation(folder)
    verdicts = {
        f"TTFT error P99 {accuracy.ttft_error_p99_s * 1e3:.2f} ms": accuracy.ttft_error_p99_s <= MOST_TIME_ERROR_S,
        f"ITL error P99 {accuracy.itl_error_p99_s * 1e3:.2f} ms": accuracy.itl_error_p99_s <= MOST_TIME_ERROR_S,
        f"rate off by {accuracy.rate_error:.3%}": accuracy.rate_error <= MOST_RATE_ERROR,
        f"attainment {attainment.attainment:.4f}, by construction {attainment.attainment_expected:.4f}": (
            attainment.attainment_error < 1e-9
        ),
        "the generator's saturation is told from a slow server": saturation.saturated_is_invalid,
    }
    for what, holds in verdicts.items():
        _say(f"{'holds' if holds else 'FAILS'}: {what}")
    headline = {
        "ttft_error_p99_s": accuracy.ttft_error_p99_s,
        "itl_error_p99_s": accuracy.itl_error_p99_s,
        "rate_error": accuracy.rate_error,
        "attainment_error": attainment.attainment_error,
        "saturated_is_invalid": saturation.saturated_is_invalid,
        "ok": all(verdicts.values()),
        "cores": cores,
        "load_average": load_average,
    }
    runs = {"steady": accuracy, "mixed": attainment, "immediate": saturation}
    print(json.dumps(headline | {name: msgspec.to_builtins(figures) for name, figures in runs.items()}))
    return 0 if headline["ok"] else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
