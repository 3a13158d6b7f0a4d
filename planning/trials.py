"""Layouts on trial: how many requests a second they serve in time when the live router's decisions are simulated.

The coarse simulator serves the same requests, drawn from the workload, at rising rates until a promise is broken.
What a structure then serves as a part of what formulas said weighs it in the next round of the search.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from twostroke.planning.answer import Answer, answer_of
from twostroke.planning.coarse.fleet import Fleet, run
from twostroke.planning.coarse.live_router import LiveRouter
from twostroke.planning.coarse.workers import Request
from twostroke.planning.layouts import Layout
from twostroke.planning.search import Planned, Search, best_of_each
from twostroke.planning.workload import Promise, Workload
from twostroke.protocol.errors import ConfigError
from twostroke.router.slo.classes import SLOClass, SLOConfig
from twostroke.worker.profile import WorkerProfile

REQUESTS = 800
"""At least, of a trial."""
BATCHES = 4
"""Times what decode workers hold at once, at least: the first of them find an empty fleet, and are not judged."""
MOST_REQUESTS = 6000
STEP = 1.2  # between rates, until one holds and one does not
PRECISION = 0.05
FEW = 4  # layouts that are simulated in each of the first two rounds; then the best one, until it is known
ROUNDS = 10
RUNNERS_UP = 4
Structure = tuple[str, str, str]


def among_busy(
    profile: WorkerProfile, name: str | None = None, *, gpus: int = 1, usd_per_hour: float = 1.0
) -> WorkerProfile:
    """Return a measured worker as the formulas take it: the other workers of its machine are as busy as it is."""
    name = name or profile.name
    costs = profile.costs if profile.beside is None else profile.beside
    return replace(profile, name=name, hardware=name, costs=costs, beside=None, gpus=gpus, usd_per_hour=usd_per_hour)


def requests_at(workload: Workload, rate: float, count: int, seed: int = 0) -> list[Request]:
    """Poisson arrivals of requests of the workload: the same requests at every rate, in the same order."""
    draw = random.Random(seed)
    lengths = [draw.choice(workload.lengths) for _ in range(count)]
    gaps = [draw.expovariate(1.0) for _ in range(count)]
    now_s, requests = 0.0, []
    for gap, (prompt, answer) in zip(gaps, lengths, strict=True):
        now_s += gap / rate
        requests.append(Request(now_s, prompt, answer))
    return requests


def simulate(layout: Layout, promise: Promise, requests: Sequence[Request]) -> None:
    """Serves `requests`, writing into each when its tokens came."""
    slo = SLOConfig(classes=(SLOClass(name="standard", ttft_s=promise.ttft_s, tpot_s=promise.tpot_s),), admission=False)
    counts = layout.num_prefill, layout.num_decode
    fleet = Fleet(
        layout.decode,
        0.0,
        promise.ttft_s,
        promise.tpot_s,
        router=LiveRouter(slo, decodes_alone=layout.mode != "disaggregated"),
        prefill_kind=None
        if layout.prefill is None
        else replace(layout.prefill, kv_bytes=layout.decode.copies * layout.prefill.kv_bytes),
    )
    run(fleet, requests, lambda _: counts, counts, requests[-1].at_s)


def tails(layout: Layout, workload: Workload, promise: Promise, rate: float, seed: int = 0) -> tuple[float, float]:
    """TTFT and TPOT in seconds, each at the promise's own percentile, of all but the first requests."""
    held = layout.met(workload, promise, rate).batch * layout.num_decode
    count = min(MOST_REQUESTS, max(REQUESTS, int(BATCHES * held)))
    requests = requests_at(workload, rate, count, seed)
    simulate(layout, promise, requests)
    judged = requests[count // 4 :]
    ttfts = sorted(one.ttft_s for one in judged)
    tpots = sorted(one.tpot_s for one in judged if one.output_tokens > 1) or [0.0]
    return (
        ttfts[min(len(ttfts) - 1, int(promise.ttft_share * len(ttfts)))] + (layout.prefill or layout.decode).overhead_s,
        tpots[min(len(tpots) - 1, int(promise.tpot_share * len(tpots)))],
    )


def simulated_goodput(
    layout: Layout,
    workload: Workload,
    promise: Promise,
    expected: float,
    progress: Callable[[str], None],
    *,
    precision: float = PRECISION,
    seed: int = 0,
) -> float:
    """The highest rate that is found to keep both promises; the lowest that is not is near by `precision`.

    From `expected` on in steps, then halving. 0 where a hundredth of it keeps none.
    """

    def holds(rate: float) -> bool:
        ttft_s, tpot_s = tails(layout, workload, promise, rate, seed)
        progress(f"{rate:.3g} requests a second: TTFT {ttft_s:.3g} s, TPOT {tpot_s * 1000:.3g} ms")
        return ttft_s <= promise.ttft_s and tpot_s <= promise.tpot_s

    low = high = expected
    if holds(expected):
        while low == high or holds(high):
            low, high = high, high * STEP
    else:
        while low == high or not holds(low):
            low, high = low / STEP, low
            if low < 0.01 * expected:
                return 0.0
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Decision:
    """What a search and its trials end in."""

    answers: list[Answer]  # of layouts that were tried, where any was; the best first
    planned: list[Planned]  # all near ones, by formulas and weights
    weights: dict[Structure, float]  # what simulation made of formulas


def decide(
    search: Search,
    workload: Workload,
    promise: Promise,
    rate: float | None,
    say: Callable[[str], None],
    *,
    simulates: bool = True,
) -> Decision:
    """The search is repeated with what trials found until the best have been tried as they are.

    Raises ConfigError where no layout can be bought, or keeps the promise.
    """
    weights: dict[Structure, float] = {}
    simulated: dict[Layout, float] = {}
    planned = search.best(rate, weights)
    for number in range(ROUNDS if simulates else 0):
        unknown = [one for one in planned[: FEW if number < 2 else 1] if one.layout not in simulated]
        if not unknown:
            break
        for one in unknown:
            layout, expected = one.layout, search.goodput(one.layout)
            if expected <= 0:
                simulated[layout] = 0.0
                continue
            say(f"simulating {layout.mode}, {layout.num_prefill} prefill and {layout.num_decode} decode workers")
            simulated[layout] = simulated_goodput(layout, workload, promise, expected, say)
            weights[layout.structure] = simulated[layout] / expected
        planned = search.best(rate, weights)
    if not planned:
        raise ConfigError("--gpus, --usd-per-hour: not one worker that has room can be bought for that: allow more")
    if planned[0].goodput <= 0:
        raise ConfigError("--slo: no layout within the budget keeps it at any rate: ask for more time, or allow more")
    tried = [Planned(layout, served) for layout, served in simulated.items() if served > 0]
    best = best_of_each(tried or planned, rate)[: 1 + RUNNERS_UP]
    answers = [answer_of(one, workload, promise, rate, is_simulated=bool(tried)) for one in best]
    return Decision(answers, planned, weights)
