"""`python -m tests.loadtests.selfcheck`: can this machine's load generator be believed?

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
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from tests.loadtests.stub_server import (
    MIXED_LIMIT_S,
    MIXED_SLO,
    MODEL,
    VOCABULARY,
    Script,
    StubRequest,
    key_of,
    script_of,
    stub_server,
)
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.generator.runner import run_plan
from twostroke.loadtests.plan import SLO, Constant, Fixed, Plan, Poisson, Session
from twostroke.loadtests.report.estimates import percentile
from twostroke.loadtests.report.figures import Summary, summarise
from twostroke.loadtests.run_folder import Record, RunFolder
from twostroke.loadtests.workloads.prompts import token_ids
from twostroke.loadtests.workloads.sessions import sessions


def timing_errors(records: Iterable[Record], served: Sequence[StubRequest]) -> tuple[list[float], list[float]]:
    """Return the errors of the generator's TTFT and ITL against the stub's, for all whole answers, in seconds.

    TTFT runs from the scheduled instant to the first token, against the stub's time from the request's last byte to
    that token, so lateness in sending is an error too. ITL compares each gap. Raises LoadTestError where a record
    has no request at the stub, or another number of tokens, and where there are no gaps.
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
        itl_s += [abs(gap - (b - a)) for gap, (a, b) in zip(record.gaps_s, pairwise(stub.token_s), strict=True)]
    if not itl_s:
        raise LoadTestError("no answer of two tokens or more came whole: there are no times to compare")
    return ttft_s, itl_s


def rate_error(rate: float, served: Sequence[StubRequest]) -> float:
    """Return the relative error of the rate at which requests reached the stub."""
    if len(served) < 2:
        raise LoadTestError(f"the stub got {len(served)} requests: nothing can be said of their rate")
    arrived = sorted(each.arrived_s for each in served)
    return abs((len(arrived) - 1) / (arrived[-1] - arrived[0]) / rate - 1)


def scripts(plan: Plan, scenario: str, sessions: Iterable[Session]) -> list[Script]:
    """Return what the stub does with each session's only request."""
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


MOST_TIME_ERROR_S = 0.010  # P99
MOST_RATE_ERROR = 0.01
MOST_LOAD = 0.25  # of the cores, by others, for the figures to be the generator's own


def check_accuracy(folder: Path, seconds: float, processes: int) -> dict[str, Any]:
    """`steady`: streams enough for each process's core. Raises LoadTestError where a run can't be carried out."""
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
    run, summary, served = _outcome(plan, "steady", folder)
    ttft_s, itl_s = timing_errors((each for each in run.records() if each.scheduled_s >= plan.warm_up_s), served)
    return {
        "ttft_error_p99_s": percentile(ttft_s, 99),
        "itl_error_p99_s": percentile(itl_s, 99),
        "rate_error": rate_error(rate, served),
        "lag_p99_s": summary.lag.p99.value if summary.lag else 0.0,
        "valid": summary.validity.valid,
        "streams": rate * STREAM_S,  # at once, on average, all processes together
        "processes": processes,
        "generator_cpu": max(each.cpu_seconds / each.wall_seconds for each in run.facts().generators),  # of a core
        "num_requests": len(served),
    }


def check_attainment(folder: Path, seconds: float) -> dict[str, Any]:
    """`mixed`: refused, failed, broken, silent, slow and single-token answers among good ones. Raises as above."""
    plan = msgspec.structs.replace(
        _PLAN,
        arrivals=Poisson(MIXED_RATE),
        slo=MIXED_SLO,
        seconds=seconds,
        warm_up_s=seconds / 10,
        request_limit_s=MIXED_LIMIT_S,
    )
    _, summary, _ = _outcome(plan, "mixed", folder)
    expected = analytic_attainment(plan, "mixed", sessions(plan))
    measured = summary.attainment.value if summary.attainment else 0.0
    return {
        "attainment": measured,
        "attainment_expected": expected,
        "attainment_error": abs(measured - expected),
        "num_requests": summary.counts.scheduled,
        "valid": summary.validity.valid,
    }


def check_saturation(folder: Path) -> dict[str, Any]:
    """`immediate`, at a rate beyond one process. Raises as above."""
    plan = msgspec.structs.replace(_PLAN, arrivals=Constant(FLOOD_RATE), slo=MIXED_SLO, seconds=FLOOD_S)
    _, summary, _ = _outcome(plan, "immediate", folder)
    return {
        "saturated_is_invalid": not summary.validity.valid,
        "saturated_reasons": summary.validity.reasons,
        # What would have been believed of a server that answers within 1 ms.
        "saturated_ttft_p50_s": summary.ttft.p50.value if summary.ttft else None,
    }


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


def _outcome(plan: Plan, scenario: str, folder: Path) -> tuple[RunFolder, Summary, list[StubRequest]]:
    """Run against a stub of this scenario, into a subfolder of its name."""
    with stub_server(scenario) as (url, served):
        run = run_plan(msgspec.structs.replace(plan, url=url, name=f"selfcheck {scenario}"), folder / scenario)
    return run, summarise(run), served


def main() -> int:
    """0 where all held, 1 where not, 2 where a run can't be carried out."""
    parser = argparse.ArgumentParser(prog="python -m tests.loadtests.selfcheck", description=__doc__)
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
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="twostroke-selfcheck-") as folder:
            return _check(Path(folder), arguments.seconds, arguments.workers)
    except LoadTestError as error:
        _say(f"selfcheck: {error}")
        return 2


def _check(folder: Path, seconds: float, processes: int) -> int:
    load_average, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load_average > MOST_LOAD * cores:
        _say(f"this machine is busy ({load_average:.1f} processes want its {cores} cores): the errors will be theirs")
    _say(f"1 of 3: times and rate; {processes} x 50 streams, by {processes} processes, {seconds:g} s")
    steady = check_accuracy(folder, seconds, processes)
    _say("2 of 3: attainment, with refused, failed, broken and silent answers among good ones")
    mixed = check_attainment(folder, seconds)
    _say("3 of 3: more than the generator can send, to a server that answers at once: this must come out as invalid")
    flood = check_saturation(folder)
    headline = {
        "ttft_error_p99_s": steady["ttft_error_p99_s"],
        "itl_error_p99_s": steady["itl_error_p99_s"],
        "rate_error": steady["rate_error"],
        "attainment_error": mixed["attainment_error"],
        "saturated_is_invalid": flood["saturated_is_invalid"],
    }
    verdicts = {
        f"TTFT error P99 {steady['ttft_error_p99_s'] * 1e3:.2f} ms": steady["ttft_error_p99_s"] <= MOST_TIME_ERROR_S,
        f"ITL error P99 {steady['itl_error_p99_s'] * 1e3:.2f} ms": steady["itl_error_p99_s"] <= MOST_TIME_ERROR_S,
        f"rate off by {steady['rate_error']:.3%}": steady["rate_error"] <= MOST_RATE_ERROR,
        f"attainment {mixed['attainment']:.4f}, by construction {mixed['attainment_expected']:.4f}": (
            mixed["attainment_error"] < 1e-9
        ),
        "the generator's saturation is told from a slow server": flood["saturated_is_invalid"],
    }
    for what, holds in verdicts.items():
        _say(f"{'holds' if holds else 'FAILS'}: {what}")
    ok = all(verdicts.values())
    runs = {"steady": steady, "mixed": mixed, "immediate": flood}
    print(json.dumps(headline | {"ok": ok, "cores": cores, "load_average": load_average} | runs))
    return 0 if ok else 1


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
