"""--arrivals and what belongs to it."""

import argparse
from typing import NoReturn

from loadtests.errors import LoadTestError
from loadtests.plan import Arrivals, Closed, Constant, Gamma, Poisson, Ramp, Replay, Step

KINDS = ("poisson", "gamma", "constant", "ramp", "step", "replay", "closed")


def add_arrival_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("when requests arrive")
    group.add_argument("--arrivals", choices=KINDS, default="poisson", help="default: %(default)s")
    group.add_argument("--rate", type=float, help="requests a second (of sessions, for chat); of ramp the first")
    group.add_argument("--cv", type=float, help="gamma: how bursty; 1 is Poisson, the Azure code trace has 13")
    group.add_argument("--to-rate", type=float, metavar="RATE", help="ramp: the last")
    group.add_argument("--steps", metavar="S:RATE,...", help="step: from when on which rate, as in 0:2,60:8,120:2")
    group.add_argument("--speed", type=float, default=1.0, help="replay: 2 is twice as fast as the trace (default: 1)")
    group.add_argument("--users", type=int, help="closed: how many, each with one request at a time")
    group.add_argument(
        "--think", type=float, default=0.0, metavar="S", help="closed: from an answer to the next request"
    )


def arrivals_of(arguments: argparse.Namespace) -> Arrivals:
    """Raises LoadTestError for what does not belong together. Values themselves are checked by the schedule."""
    match arguments.arrivals:
        case "poisson":
            return Poisson(_rate(arguments))
        case "gamma":
            return Gamma(_rate(arguments), _given(arguments.cv, "gamma", "--cv"))
        case "constant":
            return Constant(_rate(arguments))
        case "ramp":
            return Ramp(_rate(arguments), _given(arguments.to_rate, "ramp", "--to-rate"))
        case "step":
            if arguments.steps is None:
                _missing("step", "--steps")
            return Step(_steps(arguments.steps))
        case "replay":
            return Replay(arguments.speed)
        case _:
            users = int(_given(arguments.users, "closed", "--users"))
            if users < 1 or arguments.think < 0:
                raise LoadTestError(
                    f"--users {users} --think {arguments.think:g}: give at least 1 user, and no time below 0"
                )
            return Closed(users, arguments.think)


def _rate(arguments: argparse.Namespace) -> float:
    return _given(arguments.rate, arguments.arrivals, "--rate")


def _given(value: float | None, kind: str, option: str) -> float:
    if value is None:
        _missing(kind, option)
    return value


def _missing(kind: str, option: str) -> NoReturn:
    raise LoadTestError(f"--arrivals {kind} needs {option}")


def _steps(text: str) -> tuple[tuple[float, float], ...]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((float(at), float(rate)) for at, rate in pairs)
    except ValueError:
        raise LoadTestError(f"--steps {text}: write FROM:RATE pairs, as in 0:2,60:8") from None
