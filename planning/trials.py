"""Layouts on trial, and the answer of a plan: which layout serves most, with what settings, and what limits it.

The coarse simulation serves the same requests, drawn from the workload, at the rates that the one search for a capacity
asks for. What a structure then serves as a part of what formulas said weighs it in the next round of the plan's search.
"""

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from twostroke.loadtests.capacity import SearchRange as CapacitySearch
from twostroke.loadtests.capacity import find_capacity
from twostroke.model.config import ModelConfig
from twostroke.model.costs.operations import Operation, decode_operations, prefill_operations
from twostroke.model.published.hardware import HARDWARE
from twostroke.planning.coarse.fleet import CoarseFleet, run
from twostroke.planning.coarse.simulated_router import SimulatedRouter
from twostroke.planning.coarse.workers import CoarseRequest
from twostroke.planning.costs.roofline import WorkerHardware
from twostroke.planning.layouts import TRIED_MODES, Layout, Mode, router_settings
from twostroke.planning.search import Budget, FleetSearch, Planned, best_of_each
from twostroke.planning.workload import SLOTargets, Workload
from twostroke.protocol.errors import ConfigError
from twostroke.router.slo.classes import SLOClass, SLOConfig
from twostroke.worker.profile import WorkerProfile

OVER = 1.03  # of the goodput: there the promise that breaks first is broken
RATE_FACTORS = (1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 6.4, 10.0)
PROMISE_FACTORS = (1.5, 2.0, 4.0)
PRICE_FACTORS = (1.25, 1.6, 2.5)


@dataclass(frozen=True)
class PlannedLayout:
    """A layout with its figures. Requests a second."""

    layout: Layout
    goodput: float  # simulated where it was, else by formulas
    is_simulated: bool
    binds: str
    usd_per_million_tokens: float

    def as_json(self) -> dict[str, Any]:
        """Return the layout for JSON."""
        layout, prefill, decode = self.layout, self.layout.prefill, self.layout.decode
        profiles = {**({} if prefill is None else {"prefill": prefill}), "decode": decode}
        return {
            "prefill": layout.num_prefill,
            "decode": layout.num_decode,
            "tp": {role: profile.ranks for role, profile in profiles.items()},
            "context_parallel": {role: profile.shares_contexts for role, profile in profiles.items()},
            "mode": layout.mode,
            "quantization": {role: profile.quantization for role, profile in profiles.items()},
            "goodput_rps": round(self.goodput, 3),
            "binds": self.binds,
            "usd_per_million_tokens": round(self.usd_per_million_tokens, 4),
            "hardware": {role: profile.hardware for role, profile in profiles.items()},
            "block_size": {role: profile.block_size for role, profile in profiles.items()},
            "gpus": layout.gpus,
            "usd_per_hour": round(layout.usd_per_hour, 4),
            "simulated": self.is_simulated,
        }

    def line(self) -> str:
        """Return the layout as one line for people."""
        return (
            f"{fleet_words(self.layout)}; {self.goodput:.3g} requests a second"
            f"{'' if self.is_simulated else ' by formulas alone'}, {self.layout.usd_per_hour:.2f} USD an hour, "
            f"{self.usd_per_million_tokens:.3g} USD a million tokens of answers; {self.binds} binds"
        )


def fleet_words(layout: Layout) -> str:
    """Return the number and kind of workers, for people."""

    def worker(profile: WorkerProfile) -> str:
        weights = "" if profile.quantization == "auto" else f" with {profile.quantization} weights"
        shared = " that share contexts" if profile.shares_contexts else ""
        return f"{profile.ranks} {profile.hardware}{shared}{weights}"

    parts = [] if layout.prefill is None else [f"{layout.num_prefill} prefill on {worker(layout.prefill)}"]
    return f"{layout.mode}: {' and '.join([*parts, f'{layout.num_decode} decode on {worker(layout.decode)}'])}"


def planned_layout(
    planned: Planned, workload: Workload, promise: SLOTargets, rate: float | None, *, is_simulated: bool
) -> PlannedLayout:
    """`rate`: what is asked of it, where that is less than it serves; cost follows what is served."""
    layout, goodput = planned.layout, planned.goodput
    served = goodput if rate is None else min(rate, goodput)
    binds = layout.met(workload, promise, layout.goodput(workload, promise, goodput) * OVER).binds(promise)
    cost = layout.usd_per_million_tokens(workload, served) if served > 0 else float("inf")
    return PlannedLayout(layout, goodput, is_simulated, binds, cost)


def layout_settings(
    layout: Layout, model: str, promise: SLOTargets, *, kv_cache_dtype: str, on_cpu: bool
) -> dict[str, Any]:
    """A configuration file's content. Workers of different GPUs find theirs by the node label `gpu`."""
    profiles = [profile for profile in (layout.prefill, layout.decode) if profile is not None]
    differ = len({profile.hardware for profile in profiles}) > 1

    def section(profile: WorkerProfile, count: int) -> dict[str, Any]:
        sections: dict[str, Any] = {
            "replicas": count,
            "max_step_tokens": profile.step_tokens,
            "quantization": profile.quantization,
        }
        if profile.ranks > 1:
            sections["tensor_parallel"] = profile.ranks
        if profile.shares_contexts:
            sections["context_parallel"] = True
        if not on_cpu:
            sections |= {"num_gpus": 1, "block_size": profile.block_size}
        return sections | ({"node_labels": {"gpu": profile.hardware}} if differ else {})

    settings: dict[str, Any] = {"model": {"path": model}}
    if kv_cache_dtype != "auto":
        settings["model"]["kv_cache_dtype"] = kv_cache_dtype
    settings["prefill"] = {"replicas": 0}
    if layout.prefill is not None:
        settings["prefill"] = section(layout.prefill, layout.num_prefill)
        settings["router"] = router_settings(layout.mode)
    settings["decode"] = section(layout.decode, layout.num_decode) | {"max_batch": layout.decode.max_batch}
    one = {"name": "standard", "ttft_s": promise.ttft_s, "tpot_s": promise.tpot_s}
    return settings | {"slo": {"classes": [one]}}


# --- what would change the answer ---


def sensitivities(
    chosen: Layout,
    structures: Sequence[Planned],
    workload: Workload,
    promise: SLOTargets,
    budget: Budget,
    rate: float | None,
    weights: dict[tuple[str, str, str], float],
    modes: Collection[Mode] = TRIED_MODES,
) -> Iterator[str]:
    """Return where another kind of layout, among those that came near, would be better, by formulas. `weights` holds
    what simulation made of each structure."""
    prefill = _distinct(planned.layout.prefill for planned in structures)
    decode = _distinct(planned.layout.decode for planned in structures)
    found = False

    def first_other(name: str, unit: str, base: float, factors: Sequence[float], search_at: Any) -> Iterator[str]:
        nonlocal found
        for direction, word in ((1, "above"), (-1, "below")):
            for factor in factors:
                value = base * factor**direction
                planned = search_at(value)
                if planned is not None and _layout_kind(planned.layout) != _layout_kind(chosen):
                    found = True
                    yield f"{name} {word} about {value:.3g} {unit}: {fleet_words(planned.layout)}"
                    break

    def best(search: FleetSearch, rate: float | None) -> Planned | None:
        """None where nothing keeps the promise at that rate."""
        planned = search.best(rate, weights)
        return planned[0] if planned and planned[0].goodput > 0 and planned[0].goodput >= (rate or 0.0) else None

    def with_promise(changed: SLOTargets) -> Planned | None:
        return best(FleetSearch(prefill, decode, workload, changed, budget, modes), rate)

    if rate is not None:
        search = FleetSearch(prefill, decode, workload, promise, budget, modes)

        def at_rate(value: float) -> Planned | None:
            return best(search, value)

        yield from first_other("a rate", "requests a second", rate, RATE_FACTORS, at_rate)
    yield from first_other(
        "a TTFT promise",
        "s",
        promise.ttft_s,
        PROMISE_FACTORS,
        lambda value: with_promise(replace(promise, ttft_s=value)),
    )
    yield from first_other(
        "a TPOT promise",
        "s",
        promise.tpot_s,
        PROMISE_FACTORS,
        lambda value: with_promise(replace(promise, tpot_s=value)),
    )
    hardware = {profile.hardware: profile.usd_per_hour / profile.gpus for profile in (*prefill, *decode)}
    if len(hardware) > 1 and rate is not None:
        for name, price in hardware.items():

            def at_price(value: float, name: str = name, price: float = price) -> Planned | None:
                prefills, decodes = (_at_price(profiles, name, value / price) for profiles in (prefill, decode))
                return best(FleetSearch(prefills, decodes, workload, promise, budget, modes), rate)

            yield from first_other(f"a price of {name}", "USD an hour", price, PRICE_FACTORS, at_price)
    if not found:
        yield "nothing near: the same profile of layout wins at all rates, promises and prices that were tried"


def _layout_kind(layout: Layout) -> tuple[str, str, str]:
    """Quantisation aside: mode, and GPUs by role."""
    prefill = "" if layout.prefill is None else layout.prefill.hardware
    return layout.mode, prefill, layout.decode.hardware


def _distinct(profiles: Any) -> list[WorkerProfile]:
    return list({profile.name: profile for profile in profiles if profile is not None}.values())


def _at_price(profiles: Sequence[WorkerProfile], hardware: str, factor: float) -> list[WorkerProfile]:
    return [
        structs.replace(one, usd_per_hour=one.usd_per_hour * factor) if one.hardware == hardware else one
        for one in profiles
    ]


# --- the roofline in words ---


def roofline_lines(shape: ModelConfig, machine: WorkerHardware, workload: Workload, batch: int) -> Iterator[str]:
    """The operations of a prompt and of a decode step of this workload on one worker."""
    hardware = machine.hardware
    roofs = " and ".join(
        f"{hardware.flops_per_s[number] / 1e12:.3g} TFLOP/s in {number}, ridge at {hardware.ridge(number):.0f}"
        for number in dict.fromkeys((hardware.native, machine.number(shape)))
    )
    yield (
        f"{hardware.title} x{machine.ranks}: {hardware.read_bytes_per_s / 1e12:.3g} TB/s, {roofs} "
        f"({hardware.source}); steps are expected to get {machine.efficiency.compute:.0%} of the FLOPs "
        f"and {machine.efficiency.read:.0%} of the bytes"
    )
    prompt, context = int(workload.mean_prompt), workload.mean_context
    yield from _table(f"prefill of {prompt} tokens", shape, machine, prefill_operations(shape, prompt, 0, machine.held))
    decode = decode_operations(shape, batch, context, machine.held)
    yield from _table(f"decode of {batch} rows, {context:.0f} tokens of context each", shape, machine, decode)


def _table(title: str, shape: ModelConfig, machine: WorkerHardware, operations: Sequence[Operation]) -> Iterator[str]:
    total_s = sum(machine.operation_s(shape, one) for one in operations)
    yield f"{title}: {total_s * 1000:.3g} ms, sums and host aside"
    yield f"  {'':24}{'GFLOP':>12}{'MB':>10}{'FLOP/byte':>11}{'bound by':>12}{'of time':>9}"
    for one in operations:
        bound = machine.bound(shape, one)
        share = machine.operation_s(shape, one) / total_s
        figures = f"{one.flops / 1e9:>12.4g}{one.bytes / 1e6:>10.4g}{one.intensity:>11.3g}"
        yield f"  {one.name:24}{figures}{bound:>12}{share:>9.1%}"


def gpu_names() -> str:
    return ", ".join(HARDWARE)


# --- trials ---


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
    if sender is not None:
        sender = structs.replace(sender, kv_bytes=layout.decode.copies * sender.kv_bytes)
    fleet = CoarseFleet(
        layout.decode,
        0.0,
        promise.ttft_s,
        promise.tpot_s,
        router=SimulatedRouter(slo, **router_settings(layout.mode)),
        prefill_profile=None
        if sender is None
        else structs.replace(sender, kv_bytes=layout.decode.copies * sender.kv_bytes),
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
