"""`twostroke plan`: which fleet serves a workload, by formulas first and by simulation for the best few.

Progress goes to stderr; with --json the last line on stdout is one JSON object. The same arguments give the same plan.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import msgspec
import yaml

from twostroke.cluster.config.config import read_config
from twostroke.cluster.config.model_folder import CONFIG_PATTERNS, resolve_model_folder
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.commands.arguments import (
    above_zero,
    add_workload,
    context_tokens,
    make_workload,
    positive_count,
)
from twostroke.loadtests.plan import SLO, Plan, Poisson
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.config import KVCacheDtype, ModelConfig, Quantization
from twostroke.model.published.hardware import EFFICIENCY, Hardware, known_hardware, read_efficiency
from twostroke.model.published.models import MODELS, known_as, published_model
from twostroke.planning.commands.options import TierHits, add_tiers, tier_lines, tiers_as_json
from twostroke.planning.costs.drafted_steps import drafted_step
from twostroke.planning.costs.profiles import among_busy, named_profile
from twostroke.planning.costs.roofline import WorkerHardware
from twostroke.planning.costs.tier_hits import PrefixHits
from twostroke.planning.layouts import TRIED_MODES, Mode
from twostroke.planning.search import (
    Budget,
    FleetSearch,
    PlanConstraints,
    check_floors,
    nowhere,
    profiles_of,
    worker_hardware,
)
from twostroke.planning.trials import PlannedLayout, decide, gpu_names, layout_settings, roofline_lines, sensitivities
from twostroke.planning.workload import SLOTargets, Workload, parse_promise, workload_sample
from twostroke.protocol.errors import ConfigError
from twostroke.worker.profile import WorkerProfile

MAX_CONTEXT = 32_768  # of a workload's requests, where nobody says


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help=f"a folder, a GGUF file, a hub id, or one of {', '.join(MODELS)}"
    )
    fleet = parser.add_argument_group("hardware")
    fleet.add_argument("--gpu", metavar="NAME[,NAME]", help=f"GPUs that may be bought: {gpu_names()}")
    fleet.add_argument(
        "--costs", metavar="NAME|FILE", help="workers as `bench machine` has measured them, instead of GPUs"
    )
    fleet.add_argument(
        "--gpus", type=positive_count, metavar="N", help="largest number of GPUs (with --costs: of workers)"
    )
    fleet.add_argument(
        "--modes",
        nargs="+",
        choices=get_args(Mode),
        default=TRIED_MODES,
        metavar="MODE",
        help=f"of fleets: {', '.join(get_args(Mode))} (as hybrid, but prefill workers write no answers, and not tried "
        "unless it is named)",
    )
    fleet.add_argument("--usd-per-hour", type=above_zero, metavar="USD", help="largest cost of all GPUs")
    fleet.add_argument("--price", metavar="NAME=USD[,...]", help="price of a GPU hour, in place of the assumed one")
    fleet.add_argument(
        "--link", type=above_zero, default=25e9, metavar="BYTES", help="bandwidth between workers, per second and GPU"
    )
    fleet.add_argument(
        "--efficiency",
        metavar="COMPUTE,READ",
        help=f"achieved parts of the peaks (default: {EFFICIENCY.compute},{EFFICIENCY.read})",
    )
    questions = parser.add_argument_group("targets")
    questions.add_argument(
        "--slo", metavar="TIMES", default="ttft_p90_s=1,tpot_p90_s=0.05", help="default: %(default)s"
    )
    questions.add_argument(
        "--rate", type=above_zero, metavar="RATE", help="requests a second (default: as many as can be)"
    )
    questions.add_argument(
        "--max-context", type=context_tokens, metavar="TOKENS", help="longer requests are rescaled to it"
    )
    add_workload(questions)
    add_repeated(questions)
    add_tiers(questions)
    model_form = parser.add_argument_group("model form")
    model_form.add_argument(
        "--quantization", default="auto,int8", metavar="KIND[,KIND]", help="that may be taken (%(default)s)"
    )
    model_form.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDtype), default="auto")
    output = parser.add_argument_group("output")
    output.add_argument("--formulas", action="store_true", help="simulate nothing")
    output.add_argument("--explain", action="store_true", help="show the roofline of the best layout's workers")
    output.add_argument("--report", type=Path, metavar="FOLDER", help="write its pictures there")
    output.add_argument("--output", type=Path, metavar="FILE", help="write the settings that serve the best layout")
    output.add_argument("--json", action="store_true", help="nothing but the last line")


def add_repeated(parser: argparse._ArgumentGroup, more: str = "") -> None:
    """Add the option of speculative decoding; `more` is said of its default."""
    parser.add_argument(
        "--repeated",
        type=parse_share,
        metavar="SHARE",
        help=f"share of answers that repeats earlier text, for drafts to find (default: that of --costs, or 0{more})",
    )


def with_repeated(profile: WorkerProfile, arguments: argparse.Namespace) -> WorkerProfile:
    """Return the worker for the workload that was asked for."""
    return profile if arguments.repeated is None else msgspec.structs.replace(profile, repeated=arguments.repeated)


def parse_share(text: str) -> float:
    """An argument's type."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text}: give a share, 0 to 1")
    return share


def run(arguments: argparse.Namespace) -> int:
    """Returns 0. Raises ConfigError for what can't be planned."""
    try:
        return _plan(arguments)
    except LoadTestError as error:
        raise ConfigError(str(error)) from error


@dataclass(frozen=True)
class PlanRequest:
    """Arguments of a plan."""

    shape: ModelConfig
    workload: Workload
    promise: SLOTargets
    terms: PlanConstraints
    hardware: Mapping[str, Hardware]  # by name; none where workers are measured
    tiers: TierHits | None = None

    def machine(self, profile: WorkerProfile) -> WorkerHardware:
        hardware, shares = self.hardware[profile.hardware], profile.shares_contexts
        return worker_hardware(hardware, profile.ranks, profile.quantization, self.terms, shares_contexts=shares)


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.model is None:
        raise ConfigError("plan: name a MODEL")
    if arguments.costs is not None and arguments.gpu is not None:
        raise ConfigError("--costs: beside --gpu: give one of them")
    shape, promise = model_of(arguments.model), parse_promise(arguments.slo)
    plan = plan_for(arguments, shape)
    workload = workload_sample(plan, Path(arguments.workload).stem)
    hardware = {} if arguments.costs is not None else {one.name: one for one in _hardware(arguments)}
    request = PlanRequest(shape, workload, promise, _terms(arguments), hardware, TierHits.of(arguments, plan))
    profiles, hits = _kinds(arguments, request)
    budget = Budget(arguments.gpus, arguments.usd_per_hour)
    search = FleetSearch(profiles, profiles, workload, promise, budget, arguments.modes)
    _say(f"{len(profiles)} profiles of worker have room; searching")
    found = decide(search, workload, promise, arguments.rate, _say, simulates=not arguments.formulas)
    best = found.answers[0]
    settings = layout_settings(
        best.layout,
        arguments.model,
        promise,
        kv_cache_dtype=arguments.kv_cache_dtype,
        on_cpu=not any(one.is_gpu for one in hardware.values()),
    )
    read_config(settings)
    text = yaml.safe_dump(settings, sort_keys=False)
    if arguments.output is not None:
        try:
            arguments.output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {arguments.output}: {error.strerror}") from error
    _say("searching for what would change the answer")
    nearby = best.layout, found.planned, workload, promise, budget, arguments.rate, found.weights
    changes = list(sensitivities(*nearby, arguments.modes))
    if arguments.report is not None:
        _draw(arguments.report, best, request)
    of_best = hits.get((best.layout.prefill or best.layout.decode).name)
    if not arguments.json:
        _print(arguments, request, found.answers, changes, text, of_best)
    told = {
        "best": best.as_json(),
        "runners_up": [one.as_json() for one in found.answers[1:]],
        "what_would_change_it": changes,
    }
    print(json.dumps(told if of_best is None else told | {"prefix_hits": tiers_as_json(of_best)}))
    return 0


def model_of(name: str) -> ModelConfig:
    """The table's, whoever's copy is meant; else of the folder, file or hub id. Raises ConfigError."""
    known = known_as(name)
    if known is not None:
        return published_model(known)
    return load_model_config(resolve_model_folder(name, CONFIG_PATTERNS))


def workload_for(arguments: argparse.Namespace, shape: ModelConfig) -> Workload:
    """The lengths of some requests: each turn of a session is one, with all that was said before in its prompt.

    Raises LoadTestError.
    """
    return workload_sample(plan_for(arguments, shape), Path(arguments.workload).stem)


def plan_for(arguments: argparse.Namespace, shape: ModelConfig) -> Plan:
    """Return the load test whose requests a plan looks at. Raises LoadTestError."""
    most = min(arguments.max_context or MAX_CONTEXT, shape.max_position)
    return Plan(
        url="planned",
        model=arguments.model,
        max_context=most,
        arrivals=Poisson(1.0),
        workload=make_workload(arguments),
        slo=SLO(),
        seconds=1e9,
    )


def _terms(arguments: argparse.Namespace) -> PlanConstraints:
    kv = None if arguments.kv_cache_dtype == "auto" else 1.0
    return PlanConstraints(
        kv_itemsize=kv, link_bytes_per_s=arguments.link, efficiency=read_efficiency(arguments.efficiency)
    )


def _prices(text: str | None) -> dict[str, float]:
    prices = {}
    for part in (text or "").split(",") if text else ():
        name, _, value = part.partition("=")
        try:
            prices[name] = float(value)
        except ValueError:
            prices[name] = 0.0
        if not 0 < prices[name] < math.inf:
            raise ConfigError(f"--price {text}: write NAME=USD for each, as in h100-80gb=2.5")
    return prices


def _hardware(arguments: argparse.Namespace) -> list[Hardware]:
    if arguments.gpu is None:
        raise ConfigError(f"--gpu: name one or more of {gpu_names()}, or give --costs")
    found, prices = [known_hardware(name) for name in dict.fromkeys(arguments.gpu.split(","))], _prices(arguments.price)
    if unknown := prices.keys() - {one.name for one in found}:
        raise ConfigError(f"--price: {', '.join(sorted(unknown))} is none of --gpu {arguments.gpu}")
    return [replace(one, usd_per_hour=prices.get(one.name, one.usd_per_hour)) for one in found]


def _quantizations(arguments: argparse.Namespace) -> list[Quantization]:
    known = get_args(Quantization)
    found = list(dict.fromkeys(arguments.quantization.split(",")))
    if unknown := [name for name in found if name not in known]:
        raise ConfigError(f"--quantization {unknown[0]}: none of {', '.join(known)}")
    return found


def _kinds(arguments: argparse.Namespace, request: PlanRequest) -> tuple[list[WorkerProfile], dict[str, PrefixHits]]:
    """Return the workers, and by their names what those with tiers find there."""
    shape, workload, terms = request.shape, request.workload, request.terms
    hits: dict[str, PrefixHits] = {}

    def with_tiers(profile: WorkerProfile) -> WorkerProfile:
        if request.tiers is not None:
            profile, hits[profile.name] = request.tiers.apply(profile, workload.mean_prompt)
        return profile

    if arguments.costs is not None:
        return [_measured(arguments, request, with_tiers)], hits
    hardware, quantizations = list(request.hardware.values()), _quantizations(arguments)
    profiles = [
        with_tiers(with_repeated(profile, arguments))
        for one in hardware
        for profile in profiles_of(shape, one, quantizations, workload, terms)
    ]
    computed = min((one.computed for one in hits.values()), default=1.0)
    repeated = arguments.repeated or 0.0
    check_floors(shape, hardware, quantizations, workload, request.promise, terms, repeated, computed)
    if not profiles:
        raise nowhere(shape, hardware, workload, terms)
    return profiles, hits


def _measured(
    arguments: argparse.Namespace, request: PlanRequest, with_tiers: Callable[[WorkerProfile], WorkerProfile]
) -> WorkerProfile:
    workload, promise = request.workload, request.promise
    known = with_tiers(with_repeated(named_profile(arguments.costs), arguments))
    prices = _prices(arguments.price)
    if workload.longest > known.kv_tokens:
        raise ConfigError(
            f"--costs {arguments.costs}: a request of {workload.longest:,} tokens has no room in {known.kv_tokens:,}"
        )
    shortest_s = min(known.costs.prefill_s(prompt, 0, known.step_tokens) for prompt, _ in workload.lengths)
    token_s = drafted_step(known, 1, int(workload.mean_context)).token_s
    for name, asked_s, floor_s in (("ttft", promise.ttft_s, shortest_s), ("tpot", promise.tpot_s, token_s)):
        if asked_s < floor_s:
            raise ConfigError(f"--slo {name} of {asked_s:g} s: below the floor of {floor_s:.3g} s of such a worker")
    return among_busy(known, usd=prices.get(known.name, 1.0))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print(
    arguments: argparse.Namespace,
    request: PlanRequest,
    answers: Sequence[PlannedLayout],
    changes: Sequence[str],
    text: str,
    hits: PrefixHits | None,
) -> None:
    best, workload, promise = answers[0], request.workload, request.promise
    print(
        f"{workload.name}: prompts of {workload.mean_prompt:.0f} tokens, answers of {workload.mean_answer:.0f}, means; "
        f"longest request {workload.longest:,}"
    )
    for line in () if hits is None else tier_lines(hits):
        print(line)
    print(f"best: {best.line()}")
    if arguments.rate is not None and best.goodput < arguments.rate:
        print(f"      the {arguments.rate:g} requests a second that are asked are more than the budget serves in time")
    for one in answers[1:]:
        print(f"then: {one.line()}")
    print("what would change the answer:")
    for line in changes:
        print(f"  {line}")
    if arguments.explain and arguments.costs is None:
        batch = max(
            1,
            round(
                best.layout.met(
                    workload, promise, min(best.goodput, 0.95 * best.layout.goodput(workload, promise))
                ).batch
            ),
        )
        for profile in {one.name: one for one in (best.layout.prefill, best.layout.decode) if one is not None}.values():
            print()
            for line in roofline_lines(request.shape, request.machine(profile), workload, batch):
                print(line)
    copy = ", with your copy of the model as its path" if arguments.model in MODELS else ""
    print(f"\n# serve it: twostroke serve --config FILE{copy}\n{text}")


def _draw(folder: Path, best: PlannedLayout, request: PlanRequest) -> None:
    from twostroke.planning.costs.pictures import batch_sweep, phases, roofline, write_pictures

    decode, workload = best.layout.decode, request.workload
    batches = [1 << power for power in range(10) if 1 << power <= 2 * decode.max_batch]
    full = int(min(decode.max_batch, decode.kv_tokens / workload.held[0]))
    rates = [batch / drafted_step(decode, batch, workload.mean_context).token_s for batch in batches]
    pictures = [batch_sweep(batches, {decode.name: rates}, {"saturated": full})]
    if decode.hardware in request.hardware:
        machine, prompt = request.machine(decode), int(workload.mean_prompt)
        of_phases = phases(request.shape, machine.held, prompt, max(1, full), int(workload.mean_context))
        pictures.append(roofline(machine, request.shape, of_phases))
    write_pictures(folder, pictures)
