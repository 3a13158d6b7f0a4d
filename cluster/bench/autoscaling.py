"""`twostroke bench autoscaling`: a load that rises to four times what it was and falls again, and workers that follow.

A first server with one worker of each kind tells how long a request takes alone. From that come the rate and the size
of the decode workers' KV caches: one worker of each kind is enough for the rate, and too few for four times the rate.
A second server has the autoscaler. Every answer is counted, and so is every token of it.
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster.bench.arguments import positive
from cluster.bench.open_loop import Mix, Outcome, send_all
from cluster.bench.serving import percentile
from cluster.bench.stream_client import stream_completion
from cluster.commands.status import fetch_status
from cluster.server_process import ServerProcess

CLASS = "standard"
ROLES = ("prefill", "decode")
STEP = 4.0  # times the load
CALM = 0.25  # of one prefill worker's time, before and after
ALONE_REQUESTS = 12
BESIDE_OTHERS = 1.5  # a decode step takes so much longer, roughly, than alone
BLOCK_TOKENS = 16
LOOK_S = 0.5
BACK_S = 120.0  # for the workers to become as few as they were


@dataclass(frozen=True)
class Alone:
    """A request's times by itself, in seconds."""

    ttft_s: float
    tpot_s: float


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

    calm: list[Outcome] = field(default_factory=list)
    step: list[Outcome] = field(default_factory=list)
    after: list[Outcome] = field(default_factory=list)
    sights: list[Sight] = field(default_factory=list)
    rose_at: float = 0.0
    fell_at: float = 0.0

    def outcomes(self) -> Iterator[Outcome]:
        """All of them."""
        yield from (*self.calm, *self.step, *self.after)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--calm-seconds", type=positive, default=20, help="before the step (default: %(default)s)")
    parser.add_argument("--step-seconds", type=positive, default=60, help="at four times that (default: %(default)s)")
    parser.add_argument("--most", type=positive, default=2, help="workers of each kind (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=positive, default=512, help="tokens a prompt (default: %(default)s)")
    parser.add_argument("--max-tokens", type=positive, default=192, help="tokens an answer (default: %(default)s)")
    parser.add_argument("--cooldown", type=positive, default=15, help="cooldown_s (default: %(default)s)")
    parser.add_argument("serve", nargs="*", metavar="SERVE_ARG", help="after `--`: arguments for `twostroke serve`")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns 0, or 1 where an answer was lost or a role did not follow. Raises ServerDied."""
    with tempfile.TemporaryDirectory(prefix="twostroke-autoscaling-") as folder:
        path = Path(folder) / "config.yaml"  # YAML takes JSON
        path.write_text(json.dumps(_workers()))
        with ServerProcess([*arguments.serve, "--config", str(path)]) as server:
            mix = Mix(fetch_status(server.url)["model"], {CLASS: 1.0}, arguments.prompt_tokens, arguments.max_tokens)
            alone = asyncio.run(measure_alone(server.url, mix))
        rate = CALM / alone.ttft_s
        print(f"alone: TTFT {alone.ttft_s * 1e3:.0f} ms, TPOT {alone.tpot_s * 1e3:.2f} ms; calm: {rate:.2f}/s")
        path.write_text(json.dumps(scaled_config(alone, rate, mix, arguments.most, arguments.cooldown)))
        with ServerProcess([*arguments.serve, "--config", str(path)]) as server:
            story = asyncio.run(
                tell(server.url, mix, rate, calm_s=arguments.calm_seconds, step_s=arguments.step_seconds)
            )
    figures = {"rate": rate, **summarise(story)}
    for name, value in figures.items():
        print(f"{name:>20}  {value:.4g}" if isinstance(value, float) else f"{name:>20}  {value}")
    print(json.dumps(figures))
    return 0 if holds(figures) else 1


def _workers() -> dict[str, Any]:
    one = {"replicas": 1, "threads": 1}
    return {"prefill": dict(one), "decode": dict(one), "slo": {"classes": [{"name": CLASS}]}}


def scaled_config(alone: Alone, rate: float, mix: Mix, most: int, cooldown_s: float) -> dict[str, Any]:
    """Of a server whose decode workers have room for twice the requests that are there at `rate`."""
    config = _workers()
    at_once = rate * mix.max_tokens * alone.tpot_s * BESIDE_OTHERS
    rows = max(3, math.ceil(2 * at_once))
    config["decode"]["num_blocks"] = rows * (math.ceil((mix.prompt_tokens + mix.max_tokens) / BLOCK_TOKENS) + 1)
    # Promises that say how long prompts may wait; what is late is served all the same.
    promise = {"name": CLASS, "ttft_s": max(1.0, 5 * alone.ttft_s), "tpot_s": max(0.05, 10 * alone.tpot_s)}
    config["slo"] = {"classes": [promise], "admission": False}
    config["router"] = {"drain_grace_s": 2}  # shorter than answers may take here: some are handed over
    config["autoscaling"] = {
        "enabled": True,
        "prefill": {"min": 1, "max": most},
        "decode": {"min": 1, "max": most},
        "interval_s": 1,
        "cooldown_s": cooldown_s,
        "reversals_per_hour": 20,
    }
    return config


async def measure_alone(url: str, mix: Mix) -> Alone:
    """Medians, after some that warm everything up."""
    draw = random.Random(1)
    ttft_s: list[float] = []
    tpot_s: list[float] = []
    for _ in range(2 * ALONE_REQUESTS):
        result = await stream_completion(url, mix.body(draw, None))
        times = result.token_times()
        ttft_s.append(times[0] - result.sent_at)
        tpot_s.append((times[-1] - times[0]) / max(1, mix.max_tokens - 1))
    return Alone(statistics.median(ttft_s[ALONE_REQUESTS:]), statistics.median(tpot_s[ALONE_REQUESTS:]))


async def tell(url: str, mix: Mix, rate: float, *, calm_s: float, step_s: float) -> Story:
    """Calm, then the step, then calm again until all that had come has gone."""
    story = Story()
    began = time.perf_counter()
    watching = asyncio.create_task(_watch(url, began, story.sights))
    try:
        story.calm = await send_all(url, mix.arrivals(rate, calm_s, seed=1))
        story.rose_at = time.perf_counter() - began
        story.step = await send_all(url, mix.arrivals(STEP * rate, step_s, seed=2))
        story.fell_at = time.perf_counter() - began
        seed = 3
        while time.perf_counter() - began < story.fell_at + BACK_S and not _is_back(story.sights):
            story.after += await send_all(url, mix.arrivals(rate, 5.0, seed))
            seed += 1
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
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


def _is_back(sights: Sequence[Sight]) -> bool:
    if not sights:
        return False
    first, last = sights[0], sights[-1]
    return last.target == last.running == first.target


def summarise(story: Story) -> dict[str, Any]:
    """Figures of the whole story."""
    outcomes = list(story.outcomes())
    failures = [one for one in outcomes if one.status != "ok"]
    figures: dict[str, Any] = {
        "answers": len(outcomes),
        "lost": len(failures),
        "first_failure": failures[0].why or failures[0].status if failures else None,
    }
    for role in ROLES:
        least, most = story.sights[0].target[role], max(one.target[role] for one in story.sights)
        figures |= {
            f"{role}_least": least,
            f"{role}_most": most,
            f"{role}_ran_most": max(one.running[role] for one in story.sights),
            f"{role}_at_end": story.sights[-1].running[role],
            f"{role}_asked_after_s": _first(story, lambda one, role=role, least=least: one.target[role] > least),
            f"{role}_there_after_s": _first(story, lambda one, role=role, least=least: one.running[role] > least),
            f"{role}_changes": sum(a.target[role] != b.target[role] for a, b in pairwise(story.sights)),
            f"{role}_reasons": sorted({one.change[role] or "" for one in story.sights} - {""}),
        }
    figures["back_after_s"] = story.sights[-1].at - story.fell_at if _is_back(story.sights) else None
    for name in ("calm", "step", "after"):
        ttft_s = [one.ttft_s for one in getattr(story, name) if one.ttft_s is not None]
        figures[f"ttft_p50_{name}_s"] = percentile(ttft_s, 50)
        figures[f"ttft_p99_{name}_s"] = percentile(ttft_s, 99)
    return figures


def _first(story: Story, is_there: Any) -> float | None:
    """Seconds from the step until a sight is like that."""
    return next((one.at - story.rose_at for one in story.sights if one.at >= story.rose_at and is_there(one)), None)


def holds(figures: Mapping[str, Any]) -> bool:
    """Nothing was lost, and both roles grew, with workers that came, and are as they were."""
    grew = all(figures[f"{role}_ran_most"] > figures[f"{role}_least"] for role in ROLES)
    is_back = all(figures[f"{role}_at_end"] == figures[f"{role}_least"] for role in ROLES)
    return figures["answers"] > 0 and figures["lost"] == 0 and grew and is_back
