"""`twostroke bench plan`: how much of the best layout's goodput the planner's choice loses, by measuring every layout.

The cores of this machine are spent in four ways: one worker with all of them; two that read and write; one that reads
and one that writes; and these two where the second may read, too. Of each a server is started, its workers' costs are
learnt, and a workload is put on it at rates around the one where the promise breaks. The planner sees the costs alone.

All is kept in a folder, and told of all that is there: a machine that others use is measured in several turns.
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from twostroke.benchmarks.console import conclude, positive, say
from twostroke.cluster.local.processes import interrupt_once
from twostroke.loadtests import LoadTestError
from twostroke.loadtests.capacity import at_rate
from twostroke.loadtests.commands.arguments import above_zero, add_workload, context_tokens, workload_of
from twostroke.loadtests.generator.runner import run_plan
from twostroke.loadtests.plan import SLO, Plan, Poisson
from twostroke.loadtests.report.estimates import Estimate
from twostroke.loadtests.report.figures import read_observations
from twostroke.loadtests.run_folder import make_folder
from twostroke.planning.agreement import WARM_UP_S, learn_under_load, plan_for
from twostroke.planning.calibration import MIXED
from twostroke.planning.capacities import TARGET, Point, measured_capacity
from twostroke.planning.commands.plan import sample_of
from twostroke.planning.layouts import Layout
from twostroke.planning.modes import Counts, Mode, pace_of, server_in, write_kind
from twostroke.planning.profiles import profile_of
from twostroke.planning.search import Budget, Search
from twostroke.planning.trials import among_busy, decide, simulated_goodput
from twostroke.planning.workload import Promise, Workload, promise_of
from twostroke.protocol.errors import ConfigError
from twostroke.worker.profile import WorkerProfile

HALVES = 2  # a machine's, in which the planner counts: a worker takes one or both
STEP = 1.25  # between the first two rates; steps grow until one rate holds and one does not
NEAR = 1.1  # rates that are no further apart are measured again
LEARNT_AT = (0.3, 0.7)
"""Of what workers could read at most, the loads under which costs are learnt."""
POINTS_FILE = "points.json"


@dataclass(frozen=True)
class Candidate:
    """One way to spend the machine."""

    name: str
    mode: Mode
    counts: Counts
    profile: str  # of its workers: half, or whole

    def layout(self, profiles: Mapping[str, WorkerProfile]) -> Layout:
        """As the planner knows it."""
        profile, counts = profiles[self.profile], self.counts
        return Layout(self.mode, profile, counts.decode, profile if counts.prefill else None, counts.prefill)


CANDIDATES = {
    one.name: one
    for one in (
        Candidate("disaggregated", "disaggregated", Counts(1, 1), "half"),
        Candidate("one", "aggregated", Counts(0, 1), "whole"),
        Candidate("two", "aggregated", Counts(0, 2), "half"),
        Candidate("hybrid", "hybrid", Counts(1, 1), "half"),
    )
}
"""In this order: the costs of half a machine are learnt where there are both roles."""
LEARNT_BY = {"half": "disaggregated", "whole": "one"}


class Turn(msgspec.Struct, frozen=True):
    """One run of the workload on one layout."""

    layout: str
    rate: float
    requests: int
    ttft_met: int
    tpot_met: int
    pace: float  # of the machine before, against when the costs were learnt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="bundled", metavar="DIR|ID", help="as `serve` takes it (default: bundled)")
    add_workload(parser.add_argument_group("what is sent"))
    parser.add_argument("--slo", metavar="TIMES", default="ttft_p90_s=1,tpot_p90_s=0.05", help="default: %(default)s")
    parser.add_argument(
        "--max-context", type=context_tokens, default=2048, metavar="TOKENS", help="longer ones are rescaled"
    )
    parser.add_argument("--layouts", nargs="*", choices=tuple(CANDIDATES), default=tuple(CANDIDATES), metavar="NAME")
    parser.add_argument("--runs", type=positive, default=4, help="of each of these layouts, by rates as they come out")
    parser.add_argument(
        "--seconds", type=above_zero, default=30.0, metavar="S", help=f"of a run, {WARM_UP_S:g} warm-up"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="go on with what is there (default: regret-<time>)")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0, or 1 where not all layouts have a goodput yet. The last line is JSON. Raises ConfigError."""
    folder: Path = arguments.output or Path(f"regret-{datetime.now():%Y%m%d-%H%M%S}")
    promise = promise_of(arguments.slo)
    interrupt_once()
    try:
        make_folder(folder)
        workload = _workload(arguments)
    except LoadTestError as error:
        raise ConfigError(str(error)) from error
    turns, failed = _read(folder / POINTS_FILE), dict[str, str]()
    for name in (name for name in CANDIDATES if name in arguments.layouts):
        try:
            for turn in _measure(CANDIDATES[name], arguments, workload, promise, folder, turns):
                turns.append(turn)
                say(line_of(turn))
                (folder / POINTS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(turns)) + b"\n")
        except (ConfigError, LoadTestError, OSError) as error:
            failed[name] = str(error).splitlines()[0]
            say(f"{name} is given up: {error}")
    for line in table(turns):
        say(line)
    if missing := [name for name in LEARNT_BY if not (folder / f"{name}.json").exists()]:
        conclude({"folder": str(folder), "failed": failed, "missing": [LEARNT_BY[name] for name in missing]})
        return 1
    planned = planned_goodputs(_kinds(folder), workload, promise)
    told = verdict_of(planned, goodputs(turns))
    conclude({"folder": str(folder), "failed": failed, **told})
    return 0 if told["regret"] is not None else 1


def _workload(arguments: argparse.Namespace) -> Workload:
    plan = Plan("planned", "", arguments.max_context, Poisson(1.0), workload_of(arguments), SLO(), seconds=1e9)
    return sample_of(plan, arguments.workload)


def _kinds(folder: Path) -> dict[str, WorkerProfile]:
    sizes = {"half": 1, "whole": HALVES}
    return {name: among_busy(profile_of(str(folder / f"{name}.json")), name, gpus=size) for name, size in sizes.items()}


# --- the plan ---


def planned_goodputs(profiles: Mapping[str, WorkerProfile], workload: Workload, promise: Promise) -> dict[str, float]:
    """What the planner expects of each layout, the one that it chooses first. Raises ConfigError where none holds."""
    workers = list(profiles.values())
    search = Search(workers, workers, workload, promise, Budget(gpus=HALVES))
    answers = decide(search, workload, promise, None, lambda line: None).answers
    known = {candidate.layout(profiles): name for name, candidate in CANDIDATES.items()}
    return {known[one.layout]: one.goodput for one in answers}


# --- the measurement ---


def _measure(
    candidate: Candidate,
    arguments: argparse.Namespace,
    workload: Workload,
    promise: Promise,
    folder: Path,
    before: Sequence[Turn],
) -> Iterator[Turn]:
    """Put the workload on one layout, so many times, at rates that follow from all turns so far."""
    mine = [turn for turn in before if turn.layout == candidate.name]
    one = {"name": "standard", "ttft_s": promise.ttft_s, "tpot_s": promise.tpot_s}
    settings = {"model": {"path": arguments.model}, "slo": {"classes": [one], "admission": False}}
    learnt = folder / f"{candidate.profile}.json"
    say(f"{candidate.name}: starting {candidate.counts.prefill} prefill and {candidate.counts.decode} decode workers")
    with server_in(candidate.mode, candidate.counts, settings) as url:
        if not learnt.exists():
            if candidate.name != LEARNT_BY[candidate.profile]:
                raise ConfigError(
                    f"--layouts: {LEARNT_BY[candidate.profile]} comes first, what workers cost is learnt there"
                )
            write_kind(_learn(candidate, url, arguments, folder), learnt)
        profile = profile_of(str(learnt))
        expected = _expected(candidate, profile, workload, promise)
        plan = plan_for(url, workload_of(arguments), arguments.seconds, WARM_UP_S, 0, arguments.max_context)
        for _ in range(arguments.runs):
            pace = pace_of(url, plan.model, profile, seed=len(mine))
            rate = next_rate(mine, expected / pace)
            # The same number, the same requests, whatever the layout.
            asked = msgspec.structs.replace(
                at_rate(plan, rate), seed=1 + len(mine), slo=SLO(promise.ttft_s, promise.tpot_s)
            )
            mine.append(_turn(candidate, asked, rate, pace, folder))
            yield mine[-1]


def _learn(candidate: Candidate, url: str, arguments: argparse.Namespace, folder: Path) -> WorkerProfile:
    """From requests one by one, then under two loads of another workload than the one that is planned for."""
    say(f"{candidate.name}: learning what workers cost")

    def loads(profile: WorkerProfile) -> tuple[float, float]:
        low, high = (share * reading_rate(profile, candidate.counts) for share in LEARNT_AT)
        return low, high

    counts, seconds = candidate.counts, arguments.seconds
    return learn_under_load(url, candidate.mode, counts, loads, folder, seconds=seconds, seed=0)


def reading_rate(profile: WorkerProfile, counts: Counts) -> float:
    """MIXED's requests a second whose prompts keep all workers that read busy, answers aside."""
    prompts = ((MIXED.input_tokens, 1 - MIXED.long_share), (MIXED.long_input_tokens, MIXED.long_share))
    costs = profile.beside or profile.costs
    seconds = sum(
        share * (profile.prompt_s + costs.prefill_s(tokens, 0, profile.step_tokens)) for tokens, share in prompts
    )
    return (counts.prefill or counts.decode) / seconds


def _expected(candidate: Candidate, profile: WorkerProfile, workload: Workload, promise: Promise) -> float:
    """Where to begin: at what the planner expects."""
    layout = candidate.layout({candidate.profile: among_busy(profile, candidate.profile)})
    return (
        simulated_goodput(layout, workload, promise, layout.goodput(workload, promise) or 1.0, lambda line: None) or 1.0
    )


def _turn(candidate: Candidate, asked: Plan, rate: float, pace: float, folder: Path) -> Turn:
    of_run = folder / f"{candidate.name}-{time.time_ns()}"
    seen = read_observations(run_plan(asked, of_run, show=False).records())
    inside = seen.scheduled_s >= asked.warm_up_s
    ttft_met, tpot_met = inside & seen.met_ttft(asked.slo), inside & seen.met_tpot(asked.slo)
    return Turn(candidate.name, rate, int(inside.sum()), int(ttft_met.sum()), int(tpot_met.sum()), pace)


def next_rate(turns: Sequence[Turn], first: float) -> float:
    """Around the rate at which the promise breaks: it is bracketed, halved, and its ends are then measured again."""
    points = pooled(turns)
    if not points:
        return round(first, 3)
    holding = [one.rate for one in points if one.attainment.value >= TARGET]
    broken = [one.rate for one in points if one.attainment.value < TARGET]
    if not broken or not holding:
        step = STEP ** len(points)
        return round(max(holding) * step if holding else min(broken) / step, 3)
    low, high = sorted((max(holding), min(broken)))
    if high / low > NEAR:
        return round(math.sqrt(low * high), 3)
    return min((one for one in points if low <= one.rate <= high), key=lambda one: one.requests).rate


def pooled(turns: Sequence[Turn]) -> list[Point]:
    """By rate; what is scarcer counts, first tokens in time or the others."""
    by_rate: dict[float, list[Turn]] = defaultdict(list)
    for turn in turns:
        by_rate[turn.rate].append(turn)
    return [
        Point(
            rate,
            min(sum(one.ttft_met for one in alike), sum(one.tpot_met for one in alike)),
            sum(one.requests for one in alike),
        )
        for rate, alike in sorted(by_rate.items())
    ]


def goodputs(turns: Sequence[Turn]) -> dict[str, Estimate]:
    """By layout, where a rate holds and a higher one does not; requests a second."""
    found = {name: measured_capacity(pooled([turn for turn in turns if turn.layout == name])) for name in CANDIDATES}
    return {name: one for name, one in found.items() if one is not None}


# --- the answer ---


def verdict_of(planned: Mapping[str, float], measured: Mapping[str, Estimate]) -> dict[str, Any]:
    """`regret`: the share of the best layout's goodput that the plan's choice loses, None until all are measured.

    From `regret_low` to `regret_high` it may be, as far as the goodputs' intervals say.
    """
    chosen = next(iter(planned))
    told: dict[str, Any] = {
        "chosen": chosen,
        "best": None,
        "regret": None,
        "regret_low": None,
        "regret_high": None,
        "planned_rps": {name: round(rate, 3) for name, rate in planned.items()},
        "measured_rps": {name: msgspec.to_builtins(one) for name, one in measured.items()},
    }
    if measured.keys() != CANDIDATES.keys():
        return told
    mine, others = measured[chosen], [one for name, one in measured.items() if name != chosen]

    def lost(of_mine: float, of_others: float) -> float:
        return max(0.0, 1 - of_mine / of_others) if of_others > 0 else 0.0

    return told | {
        "best": max(measured, key=lambda name: measured[name].value),
        "regret": lost(mine.value, max(one.value for one in others)),
        "regret_low": lost(mine.high or mine.value, max(one.low or 0.0 for one in others)),
        "regret_high": lost(mine.low or 0.0, max(one.high or one.value for one in others)),
    }


def line_of(turn: Turn) -> str:
    """For people."""
    ttft, tpot = (100 * met / max(1, turn.requests) for met in (turn.ttft_met, turn.tpot_met))
    return (
        f"{turn.layout} at {turn.rate:.3g}/s: {turn.requests} requests, TTFT met by {ttft:.0f}%, TPOT by {tpot:.0f}%; "
        f"the machine's pace {turn.pace:.2f}"
    )


def table(turns: Sequence[Turn]) -> list[str]:
    """Markdown, a row a layout."""
    lines = ["| layout | requests a second: met | goodput | pace |", "|---|---|---|---|"]
    for name in CANDIDATES:
        mine = [turn for turn in turns if turn.layout == name]
        if not mine:
            continue
        found = goodputs(mine).get(name)
        points = ", ".join(f"{one.rate:.3g}: {one.attainment.value:.0%} of {one.requests}" for one in pooled(mine))
        value = "-" if found is None else f"{found.value:.3g} ({found.low or 0:.3g} to {found.high or 0:.3g})"
        paces = [turn.pace for turn in mine]
        lines.append(f"| {name} | {points} | {value} | {min(paces):.2f} to {max(paces):.2f} |")
    return lines


def _read(path: Path) -> list[Turn]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Turn])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
