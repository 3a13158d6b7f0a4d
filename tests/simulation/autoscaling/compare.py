"""One trace, two scalers: a fixed fleet for the peak, and our policy."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.simulation.autoscaling.traffic import Trace
from twostroke.cluster.autoscaling.demand import decode_capacity
from twostroke.cluster.autoscaling.samples import ScalingDecision
from twostroke.cluster.autoscaling.scaling_decision import PolicyMemory, decide
from twostroke.cluster.config.autoscaling import AutoscalingConfig
from twostroke.planning.coarse.fleet import Change, CoarseFleet, Scaler, reversals, run
from twostroke.planning.coarse.simulated_router import SimulatedRouter
from twostroke.planning.coarse.workers import CoarseRequest
from twostroke.planning.layouts import Mode, router_settings
from twostroke.router.slo.classes import SLOClass, SLOConfig
from twostroke.worker.profile import WorkerProfile

HOUR_S = 3600.0


@dataclass(frozen=True)
class Outcome:
    """Figures of one scaler on one trace."""

    attainment: float  # of all requests, those with both times met
    worker_hours: float  # from order to gone, both roles
    prefill_reversals: int  # the most in any hour
    decode_reversals: int


def outcome(fleet: CoarseFleet, requests: Sequence[CoarseRequest], start: tuple[int, int], ends_s: float) -> Outcome:
    """Return the figures of a fleet that has served `requests` for `ends_s`."""
    in_time = sum(one.ttft_s <= fleet.ttft_s and one.tpot_s <= fleet.tpot_s for one in requests)
    targets = [Change(0.0, *start), *(one for one in fleet.changes if one.at_s <= ends_s)]
    return Outcome(
        attainment=in_time / len(requests),
        worker_hours=fleet.worker_s() / HOUR_S,
        prefill_reversals=reversals([(one.at_s, one.prefill) for one in targets]),
        decode_reversals=reversals([(one.at_s, one.decode) for one in targets]),
    )


# --- who says how many workers there are ---


@dataclass
class Fixed:
    """Always the same."""

    prefill: int
    decode: int

    def __call__(self, fleet: CoarseFleet) -> tuple[int, int]:
        return self.prefill, self.decode


@dataclass
class Ours:
    """`twostroke.cluster.autoscaling.scaling_decision.decide`, asked at every look."""

    config: AutoscalingConfig
    memory: PolicyMemory = field(default_factory=PolicyMemory)
    decisions: list[tuple[float, ScalingDecision]] = field(default_factory=list)  # that changed anything

    def __call__(self, fleet: CoarseFleet) -> tuple[int, int]:
        decision, self.memory = decide(fleet.signals(), self.memory, self.config)
        if (decision.prefill, decision.decode) != (fleet.prefill_target, fleet.decode_target):
            self.decisions.append((fleet.now_s, decision))
        return decision.prefill, decision.decode


# --- one trace, several scalers ---


BUSIEST_S = 10
"""Width in seconds of the busiest moment for which one provisions without a replay."""


@dataclass(frozen=True)
class Setting:
    """Settings that all scalers of a comparison share."""

    kind: WorkerProfile
    ttft_s: float
    tpot_s: float
    startup_s: float
    mode: Mode = "hybrid"

    @property
    def is_aggregated(self) -> bool:
        """Decode workers compute the prompts, and there are no others."""
        return self.mode == "aggregated"


def serve(trace: Trace, setting: Setting, scaler: Scaler, start: tuple[int, int], after_s: float = 0.0) -> Outcome:
    """The trace from beginning to end, and `after_s` without traffic."""
    return serve_with_fleet(trace, setting, scaler, start, after_s)[0]


def serve_with_fleet(
    trace: Trace, setting: Setting, scaler: Scaler, start: tuple[int, int], after_s: float = 0.0
) -> tuple[Outcome, CoarseFleet]:
    """The same, and the fleet as it is then."""
    promised = SLOClass(name="standard", ttft_s=setting.ttft_s, tpot_s=setting.tpot_s)
    router = SimulatedRouter(SLOConfig(classes=(promised,), admission=False), **router_settings(setting.mode))
    fleet = CoarseFleet(setting.kind, setting.startup_s, setting.ttft_s, setting.tpot_s, router)
    requests = trace.fresh()
    ends_s = trace.ends_s + after_s
    run(fleet, requests, scaler, start, ends_s)
    return outcome(fleet, requests, start, ends_s), fleet


def fleet_for_busiest(trace: Trace, setting: Setting, config: AutoscalingConfig) -> tuple[int, int]:
    """(prefill, decode) workers that do the work of the busiest `BUSIEST_S` seconds within as long, less `spare`.

    Aggregated ones do both, each by itself.
    """
    costs = setting.kind.costs
    work: dict[int, float] = defaultdict(float)
    tokens: dict[int, float] = defaultdict(float)
    context = 0
    for at_s, prompt, output in trace.requests:
        work[int(at_s)] += costs.prefill_s(prompt, 0, setting.kind.step_tokens)
        tokens[int(at_s)] += output
        context += prompt + output
    each = decode_capacity(
        costs,
        context / len(trace.requests),
        setting.tpot_s,
        setting.kind.kv_tokens,
        setting.kind.max_batch,
        config.spare,
    )
    prefill, decode = _busiest(work) / BUSIEST_S / (1 - config.spare), _busiest(tokens) / BUSIEST_S / each.tokens_per_s
    return (0, math.ceil(prefill + decode)) if setting.is_aggregated else (math.ceil(prefill), math.ceil(decode))


def _busiest(by_second: Mapping[int, float]) -> float:
    return max(sum(by_second.get(at_s + one, 0.0) for one in range(BUSIEST_S)) for at_s in list(by_second))
