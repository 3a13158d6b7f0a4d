"""Layouts on trial: how many requests a second they serve in time when the live router's decisions are simulated.

The coarse simulation serves the same requests, drawn from the workload, at the rates that the one search for a capacity
asks for. What a structure then serves as a part of what formulas said weighs it in the next round of the plan's search.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from twostroke.loadtests.capacity import SearchRange as CapacitySearch
from twostroke.loadtests.capacity import find_capacity
from twostroke.planning.answer import PlannedLayout, planned_layout
from twostroke.planning.coarse.fleet import CoarseFleet, run
from twostroke.planning.coarse.simulated_router import SimulatedRouter
from twostroke.planning.coarse.workers import CoarseRequest
from twostroke.planning.layouts import Layout, router_settings
from twostroke.planning.search import FleetSearch, Planned, best_of_each
from twostroke.planning.workload import SLOTargets, Workload
from twostroke.protocol.errors import ConfigError
from twostroke.router.slo.classes import SLOClass, SLOConfig

REQUESTS = 800
"""Minimum requests of a trial."""
BATCHES = 4
"""Minimum requests of a trial, in what decode workers hold at once: the first find an empty fleet, and do not count."""
MAX_REQUESTS = 6000
STEP, PRECISION, LEAST = 1.2, 0.05, 0.01  # of a rate that is sought, and the part of the guess below which none is
NUM_SIMULATED = 6  # layouts that are simulated in each of the first two rounds; then the best one, until it is known
ROUNDS = 10
RUNNERS_UP = 4
Structure = tuple[str, str, str]
Watch = Callable[[CoarseFleet], None]


def requests_at(workload: Workload, rate: float, count: int, seed: int = 0) -> list[CoarseRequest]:
    """Return Poisson arrivals of requests of the workload: the same requests at every rate, in the same order."""
    draw = random.Random(seed)
    lengths = [draw.choice(workload.lengths) for _ in range(count)]
    gaps = [draw.expovariate(1.0) for _ in range(count)]
    now_s, requests = 0.0, []
    for gap, (prompt, answer) in zip(gaps, lengths, strict=True):
        now_s += gap / rate
        requests.append(CoarseRequest(now_s, prompt, answer))
    return requests


def simulate(
    layout: Layout, promise: SLOTargets, requests: Sequence[CoarseRequest], watch: Watch | None = None
) -> None:
    """Serve `requests`, writing into each when its tokens came; `watch` sees the fleet every second."""
    slo = SLOConfig(classes=(SLOClass(name="standard", ttft_s=promise.ttft_s, tpot_s=promise.tpot_s),), admission=False)
    counts = layout.num_prefill, layout.num_decode
    sender = layout.prefill
    fleet = CoarseFleet(
        layout.decode,
        0.0,
        promise.ttft_s,
        promise.tpot_s,
        router=SimulatedRouter(slo, **router_settings(layout.mode)),
        prefill_profile=None if sender is None else replace(sender, kv_bytes=layout.decode.copies * sender.kv_bytes),
    )

    def look(fleet: CoarseFleet) -> tuple[int, int]:
        if watch is not None:
            watch(fleet)
        return counts

    run(fleet, requests, look, counts, requests[-1].at_s)


@dataclass(frozen=True)
class AttainmentShares:
    """The shares of requests whose first token, whose other tokens, and all of whose tokens came in time."""

    ttft: float
    tpot: float
    both: float

    def attainment(self, promise: SLOTargets) -> float:
        """Return what is met of the promise's shares, the scarcer; the promise is kept from 1 on."""
        return min(self.ttft / promise.ttft_share, self.tpot / promise.tpot_share)


def attained_shares(
    layout: Layout, workload: Workload, promise: SLOTargets, rate: float, seed: int = 0
) -> AttainmentShares:
    """Simulate the layout at a rate, and judge all but the first requests."""
    held = layout.met(workload, promise, rate).batch * layout.num_decode
    count = min(MAX_REQUESTS, max(REQUESTS, int(BATCHES * held)))
    requests = requests_at(workload, rate, count, seed)
    simulate(layout, promise, requests)
    overhead_s = (layout.prefill or layout.decode).overhead_s
    judged = requests[count // 4 :]
    met = [(one.ttft_s + overhead_s <= promise.ttft_s, one.tpot_s <= promise.tpot_s) for one in judged]
    several = [tpot for one, (_, tpot) in zip(judged, met, strict=True) if one.output_tokens > 1]
    return AttainmentShares(
        sum(ttft for ttft, _ in met) / len(met),
        sum(several) / len(several) if several else 1.0,
        sum(ttft and tpot for ttft, tpot in met) / len(met),
    )


def simulated_capacity(
    attainment: Callable[[float], float], expected: float, target: float = 1.0, precision: float = PRECISION
) -> float:
    """Return the highest rate whose simulation reaches the target; 0 where a hundredth of the expected does not."""
    search = CapacitySearch(expected, factor=STEP, precision=precision, least=LEAST * expected, most=1e9)
    return find_capacity(attainment, target, search)


def simulated_goodput(
    layout: Layout, workload: Workload, promise: SLOTargets, expected: float, say: Callable[[str], None], seed: int = 0
) -> float:
    """Return the highest rate at which the simulated layout keeps both promises."""

    def attainment(rate: float) -> float:
        shares = attained_shares(layout, workload, promise, rate, seed)
        say(f"{rate:.3g} requests a second: TTFT in time {shares.ttft:.1%}, TPOT {shares.tpot:.1%}")
        return shares.attainment(promise)

    return simulated_capacity(attainment, expected)


@dataclass(frozen=True)
class TrialResults:
    """The result of a search and its trials."""

    answers: list[PlannedLayout]  # of layouts that were tried, where any was; the best first
    planned: list[Planned]  # all near ones, by formulas and weights
    weights: dict[Structure, float]  # what simulation made of formulas


def decide(
    search: FleetSearch,
    workload: Workload,
    promise: SLOTargets,
    rate: float | None,
    say: Callable[[str], None],
    *,
    simulates: bool = True,
) -> TrialResults:
    """The search is repeated with what trials found until the best have been tried as they are.

    Raises ConfigError where no layout can be bought, or keeps the promise.
    """
    weights: dict[Structure, float] = {}
    simulated: dict[Layout, float] = {}
    planned = search.best(rate, weights)
    for number in range(ROUNDS if simulates else 0):
        unknown = [one for one in planned[: NUM_SIMULATED if number < 2 else 1] if one.layout not in simulated]
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
    answers = [planned_layout(one, workload, promise, rate, is_simulated=bool(tried)) for one in best]
    return TrialResults(answers, planned, weights)
