"""Whether a run tells of the server, or of the generator. A run that is not valid is no measurement."""

import msgspec
import numpy as np

from twostroke.loadtests.plan import MOST_LAG_OF_SLO, Plan
from twostroke.loadtests.report.estimates import percentile
from twostroke.loadtests.report.observations import Bools, Observations
from twostroke.loadtests.run_folder import GeneratorHealth, RunFacts

MOST_CPU = 0.8  # of a core, mean over the run: its busiest moments are then above the 90% that Locust warns of
IDLE_CPU = 0.3  # of a core: a process that used less was not late by its own work


class Validity(msgspec.Struct, frozen=True):
    """The reasons are for people."""

    valid: bool
    reasons: tuple[str, ...] = ()


def judge(plan: Plan, facts: RunFacts, seen: Observations, inside: Bools) -> Validity:
    """`inside` are the rows scheduled in the window."""
    reasons = []
    if not inside.any():
        reasons.append("no request was scheduled in the window, so nothing was measured")
    lag_limit_s = plan.slo.lag_limit_s
    lag_s = percentile((seen.sent_s - seen.scheduled_s)[inside], 99)
    if lag_limit_s is not None and lag_s is not None and lag_s > lag_limit_s:
        reasons.append(
            f"the generator sent late: P99 of the lag is {_ms(lag_s)}, above {MOST_LAG_OF_SLO:.0%} of the "
            f"SLO ({_ms(lag_limit_s)}); {_remedy(facts)}"
        )
    for generator in facts.generators:
        if _load(generator) > MOST_CPU:
            reasons.append(
                f"generator process {generator.worker} was saturated: {_load(generator):.0%} of a core, above "
                f"{MOST_CPU:.0%}; use more generator processes"
            )
    num_sent = sum(generator.num_sent for generator in facts.generators)
    if num_sent > len(seen):
        reasons.append(f"{num_sent} requests were sent, and only {len(seen)} have a record")
    if seen.num_contradictions:
        reasons.append(f"the moments of {seen.num_contradictions} records are in no possible order: a clock jumped")
    if facts.ended_early:
        last_s = float(np.max(seen.scheduled_s)) if len(seen) else 0.0
        reasons.append(f"the run was ended early: {last_s:.0f} s of {plan.seconds:.0f} s were sent")
    return Validity(not reasons, tuple(reasons))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _load(generator: GeneratorHealth) -> float:
    """Cores that it used, mean over the run."""
    return generator.cpu_seconds / generator.wall_seconds if generator.wall_seconds > 0 else 0.0


def _remedy(facts: RunFacts) -> str:
    """Against sending late: it depends on whether the generator was busy itself."""
    loads = [_load(generator) for generator in facts.generators]
    if loads and max(loads) < IDLE_CPU:
        return (
            f"its processes used {max(loads):.0%} of a core, so something else kept the machine busy: use "
            "another machine for the generator, or leave it a core"
        )
    return "use more generator processes or machines, or a lower rate"
