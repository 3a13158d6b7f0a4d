"""`twostroke bench autoscaling`: a load that rises to four times what it was and falls again, and workers that follow.

A first server with one worker of each kind tells how long a prompt takes alone, and so the calm rate; and how long an
answer takes at that rate, and so the size of the decode workers' KV caches. One worker of each kind is enough for the
calm rate, and too few for four times that. A second server has the autoscaler. Every answer is counted, and so is
every token of it.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from twostroke.benchmarks.clients import Mix, send_arrivals
from twostroke.benchmarks.console import add_load_arguments, conclude, positive
from twostroke.cluster.local.asking import fetch_status
from twostroke.cluster.local.server_process import twostroke_server
from twostroke.loadtests.report.estimates import percentile
from twostroke.loadtests.run_folder import Record

CLASS = "standard"
ROLES = ("prefill", "decode")
LEAST = {"prefill": 1, "decode": 1}
STEP = 4.0  # times the load
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
class Pace:
    """What this machine can do, with one worker of each kind."""

    rate: float  # requests a second, while it is calm
    ttft_s: float  # of a request alone
    tpot_s: float  # while it is calm


@dataclass(frozen=True)
class Sight:
    """What GET /status told of the autoscaler, so many seconds after the beginning."""

    at: float
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
    """What happened, phase by phase."""

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
    with tempfile.TemporaryDirectory(prefix="twostroke-autoscaling-") as folder:
        path = Path(folder) / "config.yaml"  # YAML takes JSON
        path.write_text(json.dumps(_workers()))
        with twostroke_server([*arguments.serve, "--config", str(path)]) as server:
            mix = Mix(fetch_status(server.url)["model"], {CLASS: 1.0}, arguments.prompt_tokens, arguments.max_tokens)
            pace = asyncio.run(measure_pace(server.url, mix))
        print(f"TTFT {pace.ttft_s * 1e3:.0f} ms; at {pace.rate:.2f}/s, which is calm, TPOT {pace.tpot_s * 1e3:.1f} ms")
        path.write_text(json.dumps(scaled_config(pace, mix, arguments.most, arguments.cooldown)))
        with twostroke_server([*arguments.serve, "--config", str(path)]) as server:
            story = asyncio.run(tell(server.url, mix, pace.rate, arguments.calm_seconds, arguments.step_seconds))
    figures = {"rate": pace.rate, **summarise(story)}
    conclude(figures)
    return 0 if holds(figures) else 1


def _workers() -> dict[str, Any]:
    one = {"replicas": 1, "threads": 1}
    return {"prefill": dict(one), "decode": dict(one), "slo": {"classes": [{"name": CLASS}]}}


def scaled_config(pace: Pace, mix: Mix, most: int, cooldown_s: float) -> dict[str, Any]:
    """Of a server whose decode workers have room for twice the requests that are there while it is calm."""
    config = _workers()
    rows = max(LEAST_ROWS, math.ceil(ROOM * pace.rate * mix.max_tokens * pace.tpot_s))
    config["decode"]["num_blocks"] = rows * (math.ceil((mix.prompt_tokens + mix.max_tokens) / BLOCK_TOKENS) + 1)
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


async def measure_pace(url: str, mix: Mix) -> Pace:
    """Medians, after some requests that warm everything up. Raises ValueError where an answer is not whole."""
    draw = random.Random(1)
    times = [await mix.ask_alone(url, draw) for _ in range(2 * ALONE_REQUESTS)]
    alone_s = statistics.median(ttft_s for ttft_s, _ in times[ALONE_REQUESTS:])
    rate = CALM / alone_s
    calm = await send_arrivals(url, mix.arrivals(rate, TRY_S, seed=7))
    return Pace(rate, alone_s, statistics.median(one.tpot_s for one in calm if one.tpot_s is not None))


async def tell(url: str, mix: Mix, rate: float, calm_s: float, step_s: float) -> Story:
    """Calm, then the step, then calm again until there are as many workers as there were."""
    await send_arrivals(url, mix.arrivals(rate / 2, WARM_S, seed=8))
    story = Story()
    began = time.perf_counter()
    watching = asyncio.create_task(_watch(url, began, story.sights))
    try:
        story.calm = await send_arrivals(url, mix.arrivals(rate, calm_s, seed=1000))
        story.rose_at = time.perf_counter() - began
        rising = mix.arrivals(STEP * rate, step_s, seed=2000)
        story.step = await send_arrivals(url, rising, lambda: _have_grown(story.sights))
        story.fell_at = time.perf_counter() - began
        story.after = await send_arrivals(url, mix.arrivals(rate, BACK_S, seed=3000), lambda: _is_back(story.sights))
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # what else has ended it is not passed over
            await watching
    return story


async def _watch(url: str, began: float, sights: list[Sight]) -> None:
    while True:
        told = (await asyncio.to_thread(fetch_status, url))["autoscaling"]
        if told is not None:
            sight = Sight.of(time.perf_counter() - began, told["roles"])
            if not sights or (sight.target, sight.running) != (sights[-1].target, sights[-1].running):
                counts = ", ".join(f"{role} {sight.running[role]} of {sight.target[role]}" for role in ROLES)
                print(
                    f"{sight.at:6.1f} s  {counts}  ({', '.join(str(sight.change[role]) for role in ROLES)})", flush=True
                )
            sights.append(sight)
        await asyncio.sleep(LOOK_S)


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
        ttft_s = [one.ttft_s for one in getattr(story, name) if one.ttft_s is not None]
        figures[f"ttft_p50_{name}_s"] = percentile(ttft_s, 50)
        figures[f"ttft_p99_{name}_s"] = percentile(ttft_s, 99)
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
