"""`twostroke loadtest selfcheck`: can this machine's load generator be believed?

It sends real load to a stub server in a process of its own, whose every instant is known, and compares. Both share this
machine, so run it while nothing else runs there. The last line of output is one JSON object.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import msgspec

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.selfcheck.checks import check_accuracy, check_attainment, check_saturation

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
