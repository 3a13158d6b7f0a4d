"""Costs as they are under load: learnt from probes, then scaled until a simulated load is as slow as the measured one.

Probes come one after the other. Under load a step finds its weights gone from the caches, and router, HTTP and clients
on its core. One mixed load, at a low and at a high rate, therefore goes to the server and into the simulator; what a
prompt's token costs is scaled by the ratio of the mean TTFTs, and what else is in a step by that of the mean TPOTs, a
few times over, as each moves the other. The low rate tells of workers by themselves (`costs`), the high one of
workers beside each other (`beside`); where there is no `beside`, both tell of `costs`.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from twostroke.loadtests.plan import LongPrompts, Plan
from twostroke.planning.modes import slowed
from twostroke.worker.profile import WorkerProfile

MIXED = LongPrompts(80, 28, 300, 16, 0.25)
"""The load: not one of those that are told."""
TURNS = 6
FORCE = 0.7  # power of a ratio that is believed in one turn: waiting in line makes of a small difference a large one
MOST = 3.0  # times, in one turn


class Seen(NamedTuple):
    """A load that was measured."""

    plan: Plan
    figures: Mapping[str, float]  # ttft_mean_s, tpot_mean_s
    others: float  # as WorkerProfile.others


Simulate = Callable[[Plan, WorkerProfile, float], Mapping[str, float]]
"""Figures of the plan, with so many others."""


def calibrated(profile: WorkerProfile, low: Seen, high: Seen, simulate: Simulate) -> WorkerProfile:
    """The profile whose simulated loads come nearest to the measured ones.

    A load without figures (nobody answered) changes nothing.
    """
    best, nearest = profile, math.inf
    for _ in range(TURNS):
        ratios = [_ratios(seen.figures, simulate(seen.plan, profile, seen.others)) for seen in (low, high)]
        distance = sum(abs(math.log(ratio)) for pair in ratios for ratio in pair)
        if distance < nearest:
            best, nearest = profile, distance
        (low_prompts, low_steps), (high_prompts, high_steps) = [[_held(ratio) for ratio in pair] for pair in ratios]
        if profile.beside is None:
            prompts, steps = math.sqrt(low_prompts * high_prompts), math.sqrt(low_steps * high_steps)
            profile = msgspec.structs.replace(
                profile, costs=slowed(profile.costs, prompts, steps), prompt_s=profile.prompt_s * prompts
            )
        else:
            profile = msgspec.structs.replace(
                profile,
                costs=slowed(profile.costs, low_prompts, low_steps),
                beside=slowed(profile.beside, high_prompts, high_steps),
                prompt_s=profile.prompt_s * low_prompts,
            )
    return best


def _ratios(measured: Mapping[str, float], simulated: Mapping[str, float]) -> tuple[float, float]:
    """Measured over simulated: of TTFT, and of TPOT."""
    ttft, tpot = (
        measured[name] / simulated[name] if measured.get(name) and simulated.get(name) else 1.0
        for name in ("ttft_mean_s", "tpot_mean_s")
    )
    return ttft, tpot


def _held(ratio: float) -> float:
    return float(min(max(ratio**FORCE, 1 / MOST), MOST))
