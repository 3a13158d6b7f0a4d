"""--arrivals and what belongs to it."""

import argparse
import math
from typing import Any

from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.plan import Arrivals, Closed, Constant, Gamma, Poisson, Ramp, Replay, Step

_OPTIONS = {
    "poisson": ("rate",),
    "gamma": ("rate", "cv"),
    "constant": ("rate",),
    "ramp": ("rate", "to_rate"),
    "step": ("steps",),
    "replay": ("speed",),
    "closed": ("users", "think"),
}


def add_arrival_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("when requests arrive")
    group.add_argument("--arrivals", choices=tuple(_OPTIONS), default="poisson", help="default: %(default)s")
    group.add_argument("--rate", type=float, help="requests a second (of sessions, for chat); of ramp the first")
    group.add_argument("--cv", type=float, help="gamma: how bursty; 1 is Poisson, the Azure code trace has 13")
    group.add_argument("--to-rate", type=float, metavar="RATE", help="ramp: the last")
    group.add_argument("--steps", metavar="S:RATE,...", help="step: from when on which rate, as in 0:2,60:8,120:2")
    group.add_argument("--speed", type=float, help="replay: 2 is twice as fast as the trace (default: 1)")
    group.add_argument("--users", type=int, help="closed: how many, each with one request at a time")
    group.add_argument(
        "--think", type=float, metavar="S", help="closed: from an answer to the next request (default: 0)"
    )


def arrivals_of(arguments: argparse.Namespace) -> Arrivals:
    """Raises LoadTestError for what does not belong together. Values themselves are checked by the schedule."""
    own = _OPTIONS[arguments.arrivals]
    for name in sorted({name for names in _OPTIONS.values() for name in names}):
        if name not in own and getattr(arguments, name) is not None:
            raise LoadTestError(
                f"--arrivals {arguments.arrivals} has no {_option(name)}; it has {', '.join(map(_option, own))}"
            )
    match arguments.arrivals:
        case "poisson":
            return Poisson(_given(arguments, "rate"))
        case "gamma":
            return Gamma(_given(arguments, "rate"), _given(arguments, "cv"))
        case "constant":
            return Constant(_given(arguments, "rate"))
        case "ramp":
            return Ramp(_given(arguments, "rate"), _given(arguments, "to_rate"))
        case "step":
            return Step(_steps(_given(arguments, "steps")))
        case "replay":
            return Replay(1.0 if arguments.speed is None else arguments.speed)
        case _:
            users, think_s = _given(arguments, "users"), arguments.think or 0.0
            if users < 1 or not 0 <= think_s < math.inf:
                raise LoadTestError(f"--users {users} --think {think_s:g}: give at least 1 user, and no time below 0")
            return Closed(users, think_s)


def _given(arguments: argparse.Namespace, name: str) -> Any:
    value = getattr(arguments, name)
    if value is None:
        raise LoadTestError(f"--arrivals {arguments.arrivals} needs {_option(name)}")
    return value


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _steps(text: str) -> tuple[tuple[float, float], ...]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return tuple((float(at), float(rate)) for at, rate in pairs)
    except ValueError:
        raise LoadTestError(f"--steps {text}: write FROM:RATE pairs, as in 0:2,60:8") from None
