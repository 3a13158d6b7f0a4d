"""From a command's arguments to a plan: what `run`, `sweep` and `compare` share."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import msgspec

from twostroke.loadtests.capacity import measure_slo, parse_multiples
from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.generator.run_facts import served_model
from twostroke.loadtests.plan import (
    SLO,
    Arrivals,
    Chat,
    Closed,
    Constant,
    Fixed,
    Gamma,
    LongPrompts,
    Plan,
    Poisson,
    Ramp,
    Replay,
    SharedPrompt,
    Step,
    Synthetic,
    TraceFile,
    Workload,
)
from twostroke.loadtests.run_folder import read_plan
from twostroke.loadtests.workloads.synthetic import SHAPES

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


_WORKLOAD_OPTIONS: dict[str, tuple[type, str]] = {
    "input_tokens": (int, "of a request; of chat of a turn, of shared-prompt the request's own"),
    "output_tokens": (int, "of an answer"),
    "turns": (float, "chat: mean number of turns"),
    "think_s": (float, "chat: mean seconds from an answer to the next turn"),
    "system_tokens": (int, "chat: of a system prompt"),
    "system_prompts": (int, "chat: how many there are"),
    "shared_tokens": (int, "shared-prompt: of a shared prompt"),
    "shared_prompts": (int, "shared-prompt: how many there are"),
    "long_input_tokens": (int, "long-prompts: of a long prompt"),
    "long_output_tokens": (int, "long-prompts: of its answer"),
    "long_share": (float, "long-prompts: of all requests, 0 to 1"),
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "fixed": {"input_tokens": 512, "output_tokens": 128},
    "chat": {name: getattr(Chat(), name) for name in Chat.__struct_fields__},
    "shared-prompt": {"shared_tokens": 1024, "shared_prompts": 4, "input_tokens": 128, "output_tokens": 128},
    "long-prompts": {
        "input_tokens": 64,
        "output_tokens": 256,
        "long_input_tokens": 4096,
        "long_output_tokens": 16,
        "long_share": 0.1,
    },
}


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is sent")
    names = ", ".join((*SHAPES, *_DEFAULTS))
    group.add_argument("--workload", default="azure-conv", help=f"{names}, or a trace's file (default: %(default)s)")
    group.add_argument(
        "--format",
        choices=("auto", "azure", "mooncake", "burstgpt", "bailian"),
        help="of a trace's file (default: by its columns)",
    )
    for name, (kind, help_text) in _WORKLOAD_OPTIONS.items():
        uses = [f"{defaults[name]:g} for {workload}" for workload, defaults in _DEFAULTS.items() if name in defaults]
        unit = "S" if name.endswith("_s") else "N"
        option = "--" + name.removesuffix("_s").replace("_", "-") + ("-time" if name == "think_s" else "")
        group.add_argument(option, dest=name, type=kind, metavar=unit, help=f"{help_text} (default: {', '.join(uses)})")


def workload_of(arguments: argparse.Namespace) -> Workload:
    """Raises LoadTestError for an unknown workload, or an option that is not its own."""
    name = arguments.workload
    given = {option: value for option in _WORKLOAD_OPTIONS if (value := getattr(arguments, option)) is not None}
    defaults = _DEFAULTS.get(name, {})
    if others := given.keys() - defaults.keys():
        raise LoadTestError(
            f"--workload {name} has no {', '.join(sorted(others))}; it has {', '.join(defaults) or 'none'}"
        )
    values = defaults | given
    if arguments.format is not None and name in (*SHAPES, *_DEFAULTS):
        raise LoadTestError(f"--format {arguments.format}: --workload {name} is no trace's file; leave it away")
    match name:
        case "fixed":
            return Fixed(**values)
        case "chat":
            return Chat(**values)
        case "shared-prompt":
            return SharedPrompt(prompts=values.pop("shared_prompts"), **values)
        case "long-prompts":
            return LongPrompts(**values)
        case _ if name in SHAPES:
            return Synthetic(name)
        case _ if Path(name).is_file():
            return TraceFile(str(Path(name).resolve()), arguments.format or "auto")
        case _:
            names = ", ".join((*SHAPES, *_DEFAULTS))
            raise LoadTestError(f"--workload {name}: no such file, and none of {names}")


DEFAULT_URL = "http://127.0.0.1:8000"

# MLPerf Inference's and DistServe's (SLO.md): time to first token and time per output token, in seconds.
SLO_PRESETS = {
    "mlperf-8b-server": SLO(2.0, 0.1),
    "mlperf-8b-interactive": SLO(0.5, 0.03),
    "mlperf-70b-server": SLO(2.0, 0.2),
    "mlperf-70b-interactive": SLO(0.45, 0.04),
    "mlperf-405b-server": SLO(6.0, 0.175),
    "mlperf-405b-interactive": SLO(4.5, 0.08),
    "distserve-13b-chat": SLO(0.25, 0.1),
    "distserve-13b-code": SLO(0.125, 0.2),
    "distserve-13b-summarisation": SLO(15.0, 0.15),
}


def add_plan_arguments(parser: argparse.ArgumentParser, *, with_arrivals: bool = True, with_url: bool = True) -> None:
    """All that a plan is made of. A command may choose the rate itself, or the servers (and then the names of runs)."""
    _add(parser, with_arrivals, with_url)
    alone = argparse.ArgumentParser()
    _add(alone, with_arrivals, with_url)
    parser.set_defaults(plan_defaults=vars(alone.parse_args([])))


def _add(parser: argparse.ArgumentParser, with_arrivals: bool, with_url: bool) -> None:
    if with_url:
        parser.add_argument("--url", help=f"the server (default: {DEFAULT_URL})")
        parser.add_argument("--name", help="of the run, in reports")
    where = "--url, if given" if with_url else "the servers that --urls names"
    parser.add_argument("--plan", type=Path, metavar="FILE", help=f"do what this plan.json says, on {where}")
    if with_arrivals:
        add_arrival_arguments(parser)
    add_workload_arguments(parser)
    _add_run_arguments(parser.add_argument_group("the run"))
    _add_server_arguments(
        parser.add_argument_group("what the server is asked", "Twostroke tells the first three itself.")
    )


def _add_run_arguments(run: argparse._ArgumentGroup) -> None:
    run.add_argument("--seconds", type=float, default=60.0, help="of arrivals, warm-up included (default: 60)")
    run.add_argument("--warm-up", type=float, default=0.0, metavar="S", help="of these; not judged (default: 0)")
    run.add_argument("--slo", default="", metavar="TIMES", help=f"ttft=S,tpot=S, one, or {', '.join(SLO_PRESETS)}")
    run.add_argument("--seed", type=int, default=0, help="another seed, other requests (default: 0)")
    run.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes that send, about 50 streams each (default: 1)"
    )
    run.add_argument(
        "--request-limit", type=float, default=300.0, metavar="S", help="a slower answer is a failure (default: 300)"
    )


def _add_server_arguments(server: argparse._ArgumentGroup) -> None:
    server.add_argument("--model", help="default: the first that the server lists")
    server.add_argument("--max-context", type=int, metavar="TOKENS", help="longer requests are rescaled to it")
    server.add_argument("--vocabulary", type=int, metavar="N", help="draw token ids below it")
    server.add_argument("--prompts", choices=("ids", "text"), help="default: token ids, where the vocabulary is known")
    server.add_argument("--service-tier", metavar="CLASS", help="sent with each request")
    server.add_argument(
        "--stop-at-eos", action="store_true", help="let the model end its answers: they are then not as long as planned"
    )


def plan_of(arguments: argparse.Namespace, arrivals: Arrivals | None = None) -> Plan:
    """The plan; asks the server what was not given. `arrivals` are those of commands that choose them.

    Raises LoadTestError for a wrong argument, or where no server answers.
    """
    if arguments.plan is not None:
        return _plan_of_file(arguments)
    _check(arguments)
    chosen = arrivals if arrivals is not None else arrivals_of(arguments)
    workload, slo = workload_of(arguments), slo_of(arguments.slo)
    url = server_url(arguments.url or DEFAULT_URL)
    model = served_model(url, arguments.model)
    max_context = arguments.max_context or model.max_context
    if max_context is None:
        raise LoadTestError(f"{url} does not tell the model's context: give --max-context")
    vocabulary = arguments.vocabulary or model.vocabulary
    return Plan(
        url=url,
        model=model.name,
        max_context=max_context,
        arrivals=chosen,
        workload=workload,
        slo=slo,
        seconds=arguments.seconds,
        name=arguments.name or Path(arguments.workload).stem,
        seed=arguments.seed,
        warm_up_s=arguments.warm_up,
        service_tier=arguments.service_tier,
        request_limit_s=arguments.request_limit,
        num_workers=arguments.workers,
        prompts=arguments.prompts or ("ids" if vocabulary else "text"),
        vocabulary=vocabulary,
        ignore_eos=not arguments.stop_at_eos,
    )


def _plan_of_file(arguments: argparse.Namespace) -> Plan:
    """A plan to be repeated exactly; where the server is and how the run is called may be others."""
    beside = [
        f"--{name.replace('_', '-')}"
        for name, default in arguments.plan_defaults.items()
        if name not in ("url", "name", "plan") and getattr(arguments, name) != default
    ]
    if beside:
        raise LoadTestError(f"{', '.join(beside)} can't stand beside --plan, which says all: change a copy of the file")
    if not arguments.plan.is_file():
        raise LoadTestError(f"--plan {arguments.plan}: no such file; name the plan.json in the folder of a run")
    plan = read_plan(arguments.plan)
    return msgspec.structs.replace(plan, url=server_url(arguments.url or plan.url), name=arguments.name or plan.name)


def server_url(text: str) -> str:
    """The server's address, also from what clients of OpenAI's API are given (http://h:8000/v1), or h:8000 alone."""
    url = text.strip() if "://" in text else f"http://{text.strip()}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def slo_of(text: str) -> SLO:
    """`ttft=0.5,tpot=0.05`, one of them alone, a preset's name, or nothing. Raises LoadTestError."""
    if text in SLO_PRESETS:
        return SLO_PRESETS[text]
    times: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            times[f"{name.strip()}_s"] = _positive(float(value))
        except ValueError:
            raise LoadTestError(
                f"--slo {text}: {part!r} is no NAME=SECONDS; write, for example, ttft=0.5,tpot=0.05"
            ) from None
    try:
        return SLO(**times)
    except TypeError:
        raise LoadTestError(
            f"--slo {text}: give ttft=SECONDS, tpot=SECONDS, both, or one of {', '.join(SLO_PRESETS)}"
        ) from None


def _positive(value: float) -> float:
    if not 0 < value < float("inf"):
        raise ValueError(value)
    return value


def _check(arguments: argparse.Namespace) -> None:
    for name in ("seconds", "workers", "request_limit"):
        if not 0 < getattr(arguments, name) < float("inf"):
            raise LoadTestError(f"--{name.replace('_', '-')} {getattr(arguments, name):g}: give more than 0")
    if not 0 <= arguments.warm_up < arguments.seconds:
        raise LoadTestError(f"--warm-up {arguments.warm_up:g}: is part of --seconds {arguments.seconds:g}; give less")
    for name in ("max_context", "vocabulary"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise LoadTestError(f"--{name.replace('_', '-')} {value}: give at least 1")


FOLDER = "uncontended"


def add_slo_multiple(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slo-multiple",
        metavar="TIMES",
        help="instead of --slo, in multiples of what one user alone gets, who is measured first, for as long as a run "
        "lasts: ttft=5,tpot=2, or one of them",
    )


def with_slo_multiple(plan: Plan, arguments: argparse.Namespace, folder: Path) -> Plan:
    """The plan with the SLO that was asked for as a multiple, measured into a subfolder; as it is where none was.

    Raises LoadTestError for a wrong argument, or where it can't be measured.
    """
    if arguments.slo_multiple is None:
        return plan
    multiples = parse_multiples(arguments.slo_multiple)
    if plan.slo != SLO():
        raise LoadTestError("--slo-multiple: there is an SLO already; leave it or this away")
    slo = measure_slo(plan, multiples, folder / FOLDER)
    limits = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s}
    text = ", ".join(f"{name} {limit * 1e3:.4g} ms" for name, limit in limits.items() if limit is not None)
    print(f"SLO by one user alone: {text}", file=sys.stderr, flush=True)
    return msgspec.structs.replace(plan, slo=slo)
