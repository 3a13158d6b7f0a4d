"""Conversion of a command's arguments to a plan, shared by `run`, `sweep` and `compare`.

Each argument is checked as it is read; `make_plan` checks them together. The options of arrivals and workloads are the
fields of the plan's own classes.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.generator.run_facts import DEFAULT_URL, served_model, server_url
from twostroke.loadtests.generator.runner import run_plan
from twostroke.loadtests.plan import (
    SLO,
    Arrivals,
    Chat,
    Closed,
    Fixed,
    LongPrompts,
    Plan,
    SharedPrompt,
    Synthetic,
    TraceFile,
    Workload,
)
from twostroke.loadtests.report.checks import Check, append_markdown, write_junit
from twostroke.loadtests.report.figures import summarise
from twostroke.loadtests.run_folder import read_json
from twostroke.loadtests.workloads.synthetic import SHAPES
from twostroke.loadtests.workloads.traces import FORMATS

# MLPerf Inference's and DistServe's: time to first token and time per output token, in seconds.
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


LONG_SLO_S = {"ttft": 60.0, "tpot": 5.0}
"""Limits above these were probably meant in milliseconds."""


def above_zero(text: str) -> float:
    """An argument's type."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give more than 0")
    return value


def positive_count(text: str) -> int:
    """An argument's type."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: give at least 1")
    return value


def context_tokens(text: str) -> int:
    """An argument's type: a request has a token of its prompt, and one of its answer."""
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text}: give at least 2, a prompt's and an answer's")
    return value


def seconds_left_out(text: str) -> float:
    """An argument's type: 0 or more, and finite."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give 0 or more")
    return value


def parse_times(text: str) -> dict[str, float]:
    """An argument's type: `ttft=0.5,tpot=0.05`, or one of them alone."""
    return _times(text, above_zero)


def _times(text: str, kind: Callable[[str], float]) -> dict[str, float]:
    try:
        times = {name: kind(value) for name, _, value in (part.partition("=") for part in text.split(","))}
    except ValueError:
        times = {}
    if not times or not times.keys() <= {"ttft", "tpot"}:
        raise argparse.ArgumentTypeError(f"{text}: write, for example, ttft=0.5,tpot=0.05, or one of them")
    return times


def _seconds(text: str) -> float:
    return above_zero(text.removesuffix("ms")) / 1000 if text.endswith("ms") else above_zero(text.removesuffix("s"))


def parse_slo(text: str) -> SLO:
    """An argument's type: a preset's name, or times in seconds, or with `ms` or `s` behind them."""
    if text in SLO_PRESETS:
        return SLO_PRESETS[text]
    try:
        times = _times(text, _seconds)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or one of {', '.join(SLO_PRESETS)}") from None
    for name, limit_s in times.items():
        if limit_s > LONG_SLO_S[name]:
            print(
                f"--slo {text}: {name} is {limit_s:g} seconds; milliseconds are written {limit_s:g}ms", file=sys.stderr
            )
    return SLO(times.get("ttft"), times.get("tpot"))


def parse_steps(text: str) -> tuple[tuple[float, float], ...]:
    """An argument's type."""
    try:
        return tuple((float(at), float(rate)) for at, rate in (part.split(":") for part in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: write FROM:RATE pairs, as in 0:2,60:8") from None


def _by_tag(kinds: Any) -> dict[str, Any]:
    """The classes of a union by the names that plans and options have for them."""
    return {kind.__struct_config__.tag: kind for kind in get_args(kinds)}


_ARRIVALS: dict[str, type[Arrivals]] = _by_tag(Arrivals)
_WORKLOADS: dict[str, type[Fixed | Chat | SharedPrompt | LongPrompts]] = _by_tag(
    Fixed | Chat | SharedPrompt | LongPrompts
)
_Options = dict[str, tuple[str, Any, str, str]]
"""Options by field: the option, its type, its placeholder and its help."""

_ARRIVAL_OPTIONS: _Options = {
    "rate": ("--rate", float, "RATE", "requests a second (of sessions, for chat); of ramp the first"),
    "cv": (
        "--cv",
        float,
        "CV",
        "gamma: coefficient of variation of the gaps; 1 is Poisson, the Azure code trace has 13",
    ),
    "to_rate": ("--to-rate", float, "RATE", "ramp: final rate"),
    "steps": ("--steps", parse_steps, "S:RATE,...", "step: start and rate of each step, as in 0:2,60:8,120:2"),
    "speed": ("--speed", float, "FACTOR", "replay: 2 is twice as fast as the trace (default: 1)"),
    "users": ("--users", int, "N", "closed: number of users, each with one request at a time"),
    "think_s": ("--think", float, "S", "closed: seconds from an answer to the next request (default: 0)"),
}
_WORKLOAD_OPTIONS: _Options = {
    "input_tokens": (
        "--input-tokens",
        int,
        "N",
        "prompt tokens of a request; of chat, of a turn; of shared-prompt, of the request's own part",
    ),
    "output_tokens": ("--output-tokens", int, "N", "tokens of an answer"),
    "turns": ("--turns", float, "N", "chat: mean number of turns"),
    "think_s": ("--think-time", float, "S", "chat: mean seconds from an answer to the next turn"),
    "system_tokens": ("--system-tokens", int, "N", "chat: tokens of a system prompt"),
    "system_prompts": ("--system-prompts", int, "N", "chat: number of system prompts"),
    "shared_tokens": ("--shared-tokens", int, "N", "shared-prompt: tokens of a shared prompt"),
    "shared_prompts": ("--shared-prompts", int, "N", "shared-prompt: number of shared prompts"),
    "long_input_tokens": ("--long-input-tokens", int, "N", "long-prompts: tokens of a long prompt"),
    "long_output_tokens": ("--long-output-tokens", int, "N", "long-prompts: tokens of its answer"),
    "long_share": ("--long-share", float, "SHARE", "long-prompts: share of all requests, 0 to 1"),
}


def _given(arguments: argparse.Namespace, what: str, name: str, fields: tuple[str, ...], options: _Options) -> Any:
    """The fields that were given. Raises LoadTestError for an option of another kind of arrivals, or workload."""
    given = {field: value for field in options if (value := getattr(arguments, f"{what}_{field}")) is not None}
    for field in given:
        if field not in fields:
            own = ", ".join(options[field][0] for field in fields if field in options) or "none"
            raise LoadTestError(f"--{what} {name} has no {options[field][0]}; it has {own}")
    return given


def make_arrivals(arguments: argparse.Namespace) -> Arrivals:
    """Raises LoadTestError for what does not belong together. Values themselves are checked by the schedule."""
    name = arguments.arrivals
    kind = _ARRIVALS[name]
    given = _given(arguments, "arrivals", name, kind.__struct_fields__, _ARRIVAL_OPTIONS)
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in given:
            raise LoadTestError(f"--arrivals {name} needs {_ARRIVAL_OPTIONS[field.name][0]}")
    return kind(**given)


def make_workload(arguments: argparse.Namespace) -> Workload:
    """Raises LoadTestError for an unknown workload, or an option that is not its own."""
    name = arguments.workload
    kind = _WORKLOADS.get(name)
    given = _given(arguments, "workload", name, kind.__struct_fields__ if kind else (), _WORKLOAD_OPTIONS)
    if arguments.format is not None and (kind or name in SHAPES):
        raise LoadTestError(f"--format {arguments.format}: --workload {name} is no trace's file; leave it away")
    if kind:
        return kind(**given)
    if name in SHAPES:
        return Synthetic(name)
    if Path(name).is_file():
        return TraceFile(str(Path(name).resolve()), arguments.format or "auto")
    raise LoadTestError(f"--workload {name}: no such file, and none of {', '.join((*SHAPES, *_WORKLOADS))}")


def add_plan_arguments(parser: argparse.ArgumentParser, *, with_arrivals: bool = True, with_url: bool = True) -> None:
    """All that a plan is made of. A command may choose the rate itself, or the servers (and then the names of runs)."""
    if with_url:
        parser.add_argument("--url", help=f"the server (default: {DEFAULT_URL})")
        parser.add_argument("--name", help="name of the run in reports")
    where = "--url, if given" if with_url else "the servers that --urls names"
    parser.add_argument("--plan", type=Path, metavar="FILE", help=f"do what this plan.json says, on {where}")
    added = add_arrivals(parser.add_argument_group("arrivals")) if with_arrivals else []
    added += add_workload(parser.add_argument_group("workload"))
    added += add_options(parser.add_argument_group("the run"), _RUN_OPTIONS)
    server = parser.add_argument_group("server", "Twostroke tells the first three itself.")
    added += add_options(server, _SERVER_OPTIONS)
    prompts_help = "default: token ids, where the vocabulary is known"
    added.append(server.add_argument("--prompts", choices=("ids", "text"), help=prompts_help))
    eos_help = "let the model end its answers: they are then not as long as planned"
    added.append(server.add_argument("--stop-at-eos", action="store_true", help=eos_help))
    parser.set_defaults(not_beside_plan=added)


def add_arrivals(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    """The options that `make_arrivals` reads."""
    return [
        group.add_argument("--arrivals", choices=tuple(_ARRIVALS), default="poisson", help="default: %(default)s"),
        *(
            group.add_argument(option, dest=f"arrivals_{field}", type=kind, metavar=metavar, help=help_text)
            for field, (option, kind, metavar, help_text) in _ARRIVAL_OPTIONS.items()
        ),
    ]


def add_workload(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    """The options that `make_workload` reads."""
    names = ", ".join((*SHAPES, *_WORKLOADS))
    workload_help = f"{names}, or a trace's file (default: %(default)s)"
    added = [
        group.add_argument("--workload", default="azure-conv", help=workload_help),
        group.add_argument(
            "--format", choices=("auto", *FORMATS), help="format of a trace's file (default: by its columns)"
        ),
    ]
    for field, (option, kind, metavar, help_text) in _WORKLOAD_OPTIONS.items():
        uses = [f"{getattr(of(), field):g} for {name}" for name, of in _WORKLOADS.items() if hasattr(of, field)]
        help_text = f"{help_text} (default: {', '.join(uses)})"
        dest = f"workload_{field}"
        added.append(group.add_argument(option, dest=dest, type=kind, metavar=metavar, help=help_text))
    return added


Option = tuple[str, Callable[[str], Any], Any, str, str]
"""A name, what reads its value, the default, what stands for the value in the help, and the help itself."""

_RUN_OPTIONS: tuple[Option, ...] = (
    ("--seconds", above_zero, 60.0, "S", "duration of the arrivals, warm-up included"),
    ("--warm-up", float, 0.0, "S", "warm-up at the beginning, not judged"),
    ("--slo", parse_slo, None, "TIMES", f"ttft=S,tpot=S (or 500ms), one, or {', '.join(SLO_PRESETS)}"),
    ("--seed", int, 0, "N", "seed of the requests"),
    ("--workers", positive_count, 1, "N", "sending processes, about 50 streams each"),
    ("--request-limit", above_zero, 300.0, "S", "a slower answer is a failure"),
)
_SERVER_OPTIONS: tuple[Option, ...] = (
    ("--model", str, None, "NAME", "default: the first that the server lists"),
    ("--max-context", positive_count, None, "TOKENS", "longer requests are rescaled to it"),
    ("--vocabulary", positive_count, None, "N", "draw token ids below it"),
    ("--service-tier", str, None, "CLASS", "sent with each request"),
)


def add_options(group: argparse._ArgumentGroup, options: Iterable[Option]) -> list[argparse.Action]:
    return [
        group.add_argument(
            name,
            type=kind,
            default=default,
            metavar=metavar,
            help=help_text if default is None else f"{help_text} (default: %(default)s)",
        )
        for name, kind, default, metavar, help_text in options
    ]


def add_ci_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the options that write requirements and findings for CI systems."""
    group.add_argument(
        "--summary", type=Path, metavar="FILE", help="add a Markdown summary to it ($GITHUB_STEP_SUMMARY)"
    )
    group.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit's XML: a test for each requirement")


def tell_ci(arguments: argparse.Namespace, name: str, sentences: Sequence[str], checks: Sequence[Check]) -> bool:
    """Write what was asked for, and say what does not hold; returns whether all does. Raises LoadTestError."""
    for check in checks:
        if not check.holds:
            print(f"FAILED: {check.name}: {check.found}")
    if arguments.summary is not None:
        append_markdown(arguments.summary, f"Load test: {name}", sentences, checks)
    if arguments.junit is not None:
        write_junit(arguments.junit, f"loadtest {name}", checks)
    return all(check.holds for check in checks)


def make_plan(arguments: argparse.Namespace, arrivals: Arrivals | None = None) -> Plan:
    """The plan; asks the server what was not given. `arrivals` are those of commands that choose them.

    Raises LoadTestError for a wrong argument, or where no server answers.
    """
    if arguments.plan is not None:
        return _plan_of_file(arguments)
    if not 0 <= arguments.warm_up < arguments.seconds:
        raise LoadTestError(f"--warm-up {arguments.warm_up:g}: is part of --seconds {arguments.seconds:g}; give less")
    chosen = arrivals if arrivals is not None else make_arrivals(arguments)
    workload = make_workload(arguments)
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
        slo=arguments.slo or SLO(),
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
        action.option_strings[0]
        for action in arguments.not_beside_plan
        if getattr(arguments, action.dest) != action.default
    ]
    if beside:
        raise LoadTestError(f"{', '.join(beside)} can't stand beside --plan, which says all: change a copy of the file")
    if not arguments.plan.is_file():
        raise LoadTestError(f"--plan {arguments.plan}: no such file; name the plan.json in the folder of a run")
    plan = read_json(arguments.plan, Plan)
    return msgspec.structs.replace(plan, url=server_url(arguments.url or plan.url), name=arguments.name or plan.name)


FOLDER = "uncontended"
MIN_ANSWERS = 5


def add_slo_multiple(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slo-multiple",
        type=parse_times,
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
    if plan.slo != SLO():
        raise LoadTestError("--slo-multiple: there is an SLO already; leave it or this away")
    slo = measure_slo(plan, arguments.slo_multiple, folder / FOLDER)
    limits = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s}
    text = ", ".join(f"{name} {limit * 1e3:.4g} ms" for name, limit in limits.items() if limit is not None)
    print(f"SLO by one user alone: {text}", file=sys.stderr, flush=True)
    return msgspec.structs.replace(plan, slo=slo)


def measure_slo(plan: Plan, multiples: Mapping[str, float], folder: Path) -> SLO:
    """The multiples of the medians of an uncontended run, which lasts as long as the plan's and is left in `folder`.

    One user sends the plan's workload, each request when the one before is answered: what a machine of unknown speed
    can be asked for. Splitwise (Patel et al., ISCA 2024) judges so; CPUs and tiny models have no other sensible limits.
    Raises LoadTestError where fewer than 5 were answered, or the run can't be carried out.
    """
    alone = msgspec.structs.replace(
        plan,
        name=f"{plan.name}: uncontended",
        arrivals=Closed(users=1),
        num_workers=1,
        # Prompts of its own, lest the runs that follow find them cached.
        seed=plan.seed - 1,
    )
    summary = summarise(run_plan(alone, folder))
    if summary.counts.ok < MIN_ANSWERS:
        raise LoadTestError(
            f"the uncontended run had {summary.counts.ok} whole answers in {plan.seconds:g} s, too few for an SLO: "
            f"give more --seconds, or look into {folder}"
        )
    if "tpot" in multiples and summary.tpot is None:
        raise LoadTestError("no answer of the uncontended run has two tokens, so there is no TPOT: leave tpot away")
    spreads = {"ttft": summary.ttft, "tpot": summary.tpot}
    limits = {name: times * spread.p50.value for name, times in multiples.items() if (spread := spreads[name])}
    return SLO(limits.get("ttft"), limits.get("tpot"))
