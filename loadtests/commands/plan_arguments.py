"""From a command's arguments to a plan: what `run` and `sweep` share."""

import argparse
from pathlib import Path

import msgspec

from twostroke.loadtests.commands.arrival_arguments import add_arrival_arguments, arrivals_of
from twostroke.loadtests.commands.workload_arguments import add_workload_arguments, workload_of
from twostroke.loadtests.errors import LoadTestError
from twostroke.loadtests.generator.served_model import served_model
from twostroke.loadtests.plan import SLO, Arrivals, Plan
from twostroke.loadtests.run_folder import read_plan

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
