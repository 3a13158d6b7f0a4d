"""`twostroke bench autoscaling`: a load that rises to four times what it was and falls again, and workers that follow.

A first server with one worker of each kind tells how long a prompt takes alone, and so the calm rate; and how long an
answer takes at that rate, and so the size of the decode workers' KV caches. One worker of each kind is enough for the
calm rate, and too few for four times that. A second server has the autoscaler. Every answer is counted, and so is
every token of it.
"""

import argparse
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from twostroke.benchmarks.clients import exact, latencies, medians_alone, plan_at, send_whole, spread
from twostroke.benchmarks.console import add_load_arguments, conclude, positive, say
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.server_process import config_file, twostroke_server
from twostroke.loadtests.generator.alone import send
from twostroke.loadtests.plan import Fixed, Poisson
from twostroke.loadtests.report.estimates import percentile
from twostroke.loadtests.run_folder import Record

CLASS = "standard"
ROLES = ("prefill", "decode")
LEAST = {"prefill": 1, "decode": 1}
RISE = 4.0  # times the load
CALM = 0.25  # of one prefill worker's time, before and after
ALONE_REQUESTS = 12
ROOM = 2.0  # of a decode worker, in requests that there are at the calm rate
LEAST_ROWS = 4
TRY_S = 10.0  # at the calm rate, to find that out
WARM_S = 8.0  # at half of it, for workers to learn what their steps cost
BLOCK_TOKENS = 16
LOOK_S = 0.5
BACK_S = 180.0  # for the workers to become as few as they were


@dataclass(frozen=True)
class MachinePace:
    """The pace of this machine with one worker of each kind."""

    rate: float  # requests a second, while it is calm
    ttft_s: float  # of a request alone
    tpot_s: float  # while it is calm


@dataclass(frozen=True)
class Sight:
    """The autoscaler, as GET /status told of it."""

    at: float  # of `time.monotonic`
    running: Mapping[str, int]
    target: Mapping[str, int]
    change: Mapping[str, str | None]  # the reason of the last one

    @classmethod
    def of(cls, at: float, roles: Mapping[str, Mapping[str, Any]]) -> "Sight":
        return cls(
            at,
            {role: told["running"] for role, told in roles.items()},
            {role: told["target"] for role, told in roles.items()},
            {role: told["last_change"] for role, told in roles.items()},
        )


@dataclass
class Story:
    """The answers of each phase, and the autoscaler meanwhile."""

    calm: list[Record] = field(default_factory=list)
    step: list[Record] = field(default_factory=list)
    after: list[Record] = field(default_factory=list)
    sights: list[Sight] = field(default_factory=list)
    rose_at: float = 0.0
    fell_at: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calm-seconds", type=positive, default=20, help="before the step (default: %(default)s)")
    parser.add_argument(
        "--step-seconds", type=positive, default=90, help="at four times that, at most (default: %(default)s)"
    )
    parser.add_argument("--most", type=positive, default=2, help="workers of each kind (default: %(default)s)")
    parser.add_argument("--cooldown", type=positive, default=30, help="cooldown_s (default: %(default)s)")
    add_load_arguments(parser, prompt_tokens=512, max_tokens=256)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns 0, or 1 where an answer was lost or a role did not follow. Raises ServerFailed."""
    lengths = Fixed(arguments.prompt_tokens, arguments.max_tokens)
    with config_file(_workers()) as path, twostroke_server([*arguments.serve, "--config", path]) as server:
        pace = measure_pace(server.url, lengths)
    print(f"TTFT {pace.ttft_s * 1e3:.0f} ms; at {pace.rate:.2f}/s, which is calm, TPOT {pace.tpot_s * 1e3:.1f} ms")
    config = scaled_config(pace, lengths, arguments.most, arguments.cooldown)
    with config_file(config) as path, twostroke_server([*arguments.serve, "--config", path]) as server:
        story = tell(server.url, lengths, pace.rate, arguments.calm_seconds, arguments.step_seconds)
    figures = {"rate": pace.rate, **summarise(story)}
    conclude(figures)
    return 0 if holds(figures) else 1


def _workers() -> dict[str, Any]:
    one = {"replicas": 1, "threads": 1}
    return {"prefill": dict(one), "decode": dict(one), "slo": {"classes": [{"name": CLASS}]}}


def scaled_config(pace: MachinePace, lengths: Fixed, most: int, cooldown_s: float) -> dict[str, Any]:
    """Return the configuration whose decode workers have room for twice the requests that a calm load has."""
    config = _workers()
    rows = max(LEAST_ROWS, math.ceil(ROOM * pace.rate * lengths.output_tokens * pace.tpot_s))
    config["decode"]["num_blocks"] = rows * (
        math.ceil((lengths.input_tokens + lengths.output_tokens) / BLOCK_TOKENS) + 1
    )
    # Promises that say how long prompts may wait; what is late is served all the same.
    promise = {"name": CLASS, "ttft_s": max(1.0, 5 * pace.ttft_s), "tpot_s": max(0.1, 10 * pace.tpot_s)}
    config["slo"] = {"classes": [promise], "admission": False}
    config["router"] = {"drain_grace_s": 2}  # shorter than answers may take here: some are handed over
    config["autoscaling"] = {
        "enabled": True,
        **{role: {"min": LEAST[role], "max": most} for role in ROLES},
        "interval_s": 1,
        "cooldown_s": cooldown_s,
        "reversals_per_hour": 20,
    }
    return config


def measure_pace(url: str, lengths: Fixed) -> MachinePace:
    """Return medians, after some requests that warm everything up. Raises ValueError where an answer is not whole."""
    alone_s, _ = medians_alone(url, lengths, ALONE_REQUESTS)
    rate = CALM / alone_s
    calm = send_whole(plan_at(url, Poisson(rate), lengths, TRY_S, seed=7))
    return MachinePace(rate, alone_s, percentile(spread(calm, "tpot_s"), 50) or 0.0)


def tell(url: str, lengths: Fixed, rate: float, calm_s: float, step_s: float) -> Story:
    """Send a calm load, then the step, then a calm load again until there are as many workers as there were."""

    def answers(times: float, seconds: float, seed: int, is_over: Callable[[], bool] = lambda: False) -> list[Record]:
        sent = send(plan_at(url, Poisson(times * rate), lengths, seconds, seed=seed), is_over)
        return [exact(record) for record in sent.records]

    answers(0.5, WARM_S, 8)
    with _watching(url) as sights:
        calm = answers(1.0, calm_s, 1000)
        rose_at = time.monotonic()
        step = answers(RISE, step_s, 2000, lambda: _have_grown(sights))
        fell_at = time.monotonic()
        after = answers(1.0, BACK_S, 3000, lambda: _is_back(sights))
    return Story(calm, step, after, sights, rose_at, fell_at)


@contextmanager
def _watching(url: str) -> Iterator[list[Sight]]:
    """Give what GET /status tells meanwhile, twice a second. An error ends the bench with the context."""
    sights: list[Sight] = []
    failed: list[Exception] = []
    over = threading.Event()

    def watch() -> None:
        try:
            while not over.wait(LOOK_S):
                if (scaling := fetch_status(url)["autoscaling"]) is not None:
                    sights.append(_shown(Sight.of(time.monotonic(), scaling["roles"]), sights))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield sights
    finally:
        over.set()
        thread.join()
    if failed:
        raise failed[0]


def _shown(sight: Sight, before: Sequence[Sight]) -> Sight:
    """Return a sight, told to those who wait where it differs from the one before."""
    if not before or (sight.target, sight.running) != (before[-1].target, before[-1].running):
        counts = ", ".join(f"{role} {sight.running[role]} of {sight.target[role]}" for role in ROLES)
        say(f"{counts}  ({', '.join(str(sight.change[role]) for role in ROLES)})")
    return sight


def _have_grown(sights: Sequence[Sight]) -> bool:
    return bool(sights) and all(sights[-1].running[role] > LEAST[role] for role in ROLES)


def _is_back(sights: Sequence[Sight]) -> bool:
    return bool(sights) and sights[-1].target == sights[-1].running == LEAST


def summarise(story: Story) -> dict[str, Any]:
    """Figures of the whole story."""
    outcomes = [*story.calm, *story.step, *story.after]
    failures = [one for one in outcomes if one.status != "ok"]
    figures: dict[str, Any] = {
        "answers": len(outcomes),
        "lost": len(failures),
        "first_failure": failures[0].error or failures[0].status if failures else None,
    }
    for role in ROLES:
        figures |= {
            f"{role}_most": max(one.target[role] for one in story.sights),
            f"{role}_ran_most": max(one.running[role] for one in story.sights),
            f"{role}_at_end": story.sights[-1].running[role],
            f"{role}_asked_after_s": _first_growth(story, role, "target"),
            f"{role}_there_after_s": _first_growth(story, role, "running"),
            f"{role}_changes": sum(a.target[role] != b.target[role] for a, b in pairwise(story.sights)),
            f"{role}_reasons": sorted({one.change[role] or "" for one in story.sights} - {""}),
        }
    figures["back_after_s"] = story.sights[-1].at - story.fell_at if _is_back(story.sights) else None
    for name in ("calm", "step", "after"):
        of_phase = latencies(getattr(story, name))
        figures |= {f"ttft_{p}_{name}_s": of_phase[f"ttft_{p}_s"] for p in ("p50", "p99")}
    return figures


def _first_growth(story: Story, role: str, count: Literal["target", "running"]) -> float | None:
    """Seconds from the step until there are more of a role's workers than at first; None: there never were."""
    moments = (one.at - story.rose_at for one in story.sights if getattr(one, count)[role] > LEAST[role])
    return next((moment for moment in moments if moment >= 0), None)


def holds(figures: Mapping[str, Any]) -> bool:
    """Nothing was lost, and both roles grew, with workers that came, and are as they were."""
    grew = all(figures[f"{role}_ran_most"] > LEAST[role] for role in ROLES)
    is_back = all(figures[f"{role}_at_end"] == LEAST[role] for role in ROLES)
    return figures["answers"] > 0 and figures["lost"] == 0 and grew and is_back
