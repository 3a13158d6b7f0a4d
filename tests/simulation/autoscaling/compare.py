"""One trace, several scalers: fixed fleets for the peak, our policy, Ray Serve's."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.serve._private.common import DeploymentID
from ray.serve.autoscaling_policy import (
    _apply_delay_logic,
    _apply_scaling_factors,
    replica_queue_length_autoscaling_policy,
)
from ray.serve.config import AutoscalingConfig as RayAutoscalingConfig
from ray.serve.config import AutoscalingContext

from tests.simulation.autoscaling.traffic import Trace
from twostroke.cluster.autoscaling.demand import decode_capacity
from twostroke.cluster.autoscaling.samples import ScalingDecision
from twostroke.cluster.autoscaling.scaling_decision import PolicyMemory, decide
from twostroke.cluster.config.autoscaling import AutoscalingConfig
from twostroke.planning.coarse.day import reversals
from twostroke.planning.coarse.fleet import Change, CoarseFleet, Scaler, run
from twostroke.planning.coarse.simulated_router import SimulatedRouter
from twostroke.planning.coarse.workers import CoarseRequest
from twostroke.planning.layouts import Mode, router_settings
from twostroke.router.slo.classes import SLOClass, SLOConfig
from twostroke.worker.profile import WorkerProfile

HOUR_S = 3600.0


@dataclass(frozen=True)
class Outcome:
    """Figures of one scaler on one trace."""

    requests: int
    attainment: float  # of all requests, those with both times met
    ttft_attainment: float
    tpot_attainment: float
    worker_hours: float  # from order to gone, both roles
    mean_prefill: float  # targets, averaged over time
    mean_decode: float
    max_prefill: int
    max_decode: int
    prefill_reversals: int  # the most in any hour
    decode_reversals: int
    changes: int


def outcome(fleet: CoarseFleet, requests: Sequence[CoarseRequest], start: tuple[int, int], ends_s: float) -> Outcome:
    """Return the figures of a fleet that has served `requests` for `ends_s`."""
    first = [one.ttft_s <= fleet.ttft_s for one in requests]
    rest = [one.tpot_s <= fleet.tpot_s for one in requests]
    both = sum(ttft and tpot for ttft, tpot in zip(first, rest, strict=True))
    targets = [Change(0.0, *start), *(one for one in fleet.changes if one.at_s <= ends_s)]
    spans = [
        after.at_s - before.at_s for before, after in zip(targets, [*targets[1:], Change(ends_s, 0, 0)], strict=True)
    ]
    return Outcome(
        requests=len(requests),
        attainment=both / len(requests),
        ttft_attainment=sum(first) / len(requests),
        tpot_attainment=sum(rest) / len(requests),
        worker_hours=fleet.worker_s() / HOUR_S,
        mean_prefill=sum(one.prefill * span for one, span in zip(targets, spans, strict=True)) / ends_s,
        mean_decode=sum(one.decode * span for one, span in zip(targets, spans, strict=True)) / ends_s,
        max_prefill=max(one.prefill for one in targets),
        max_decode=max(one.decode for one in targets),
        prefill_reversals=reversals([(one.at_s, one.prefill) for one in targets]),
        decode_reversals=reversals([(one.at_s, one.decode) for one in targets]),
        changes=len(targets) - 1,
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


class RayServe:
    """Ray Serve's default policy for each role: its own code, defaults and signal, the ongoing requests.

    A request is ongoing at the decode deployment from the beginning, since that call is made together with the prefill.
    """

    def __init__(self, config: AutoscalingConfig, prefill_ongoing: float, decode_ongoing: float) -> None:
        self.prefill = None
        if config.prefill.max:
            self.prefill = _Deployment("prefill", config.prefill.min, config.prefill.max, prefill_ongoing)
        self.decode = _Deployment("decode", config.decode.min, config.decode.max, decode_ongoing)

    def __call__(self, fleet: CoarseFleet) -> tuple[int, int]:
        unread = fleet.requests - fleet.prefilled
        prefill = 0
        if self.prefill is not None:
            prefill = self.prefill.target(fleet.now_s, unread, len(fleet.running_prefill()), fleet.prefill_target)
        decode = self.decode.target(
            fleet.now_s, fleet.requests - fleet.ended, len(fleet.running_decode()), fleet.decode_target
        )
        return prefill, decode


class _Deployment:
    def __init__(self, name: str, least: int, most: int, ongoing: float) -> None:
        self.name = name
        self.config = RayAutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=ongoing)
        self.state: dict[str, Any] = {}
        self.ongoing: list[tuple[float, float]] = []  # of the last `look_back_period_s`

    def target(self, now_s: float, ongoing: float, running: int, target: int) -> int:
        self.ongoing = [one for one in self.ongoing if one[0] > now_s - self.config.look_back_period_s]
        self.ongoing.append((now_s, ongoing))
        context = AutoscalingContext(
            deployment_id=DeploymentID(self.name),
            deployment_name=self.name,
            app_name=None,
            current_num_replicas=running,
            target_num_replicas=target,
            running_replicas=[],
            total_num_requests=sum(count for _, count in self.ongoing) / len(self.ongoing),
            total_queued_requests=0.0,
            aggregated_metrics={},
            raw_metrics={},
            capacity_adjusted_min_replicas=self.config.min_replicas,
            capacity_adjusted_max_replicas=self.config.max_replicas or 1,
            policy_state=self.state,
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now_s,
            config=self.config,
        )
        wanted, _ = replica_queue_length_autoscaling_policy(context)
        scaled = _apply_scaling_factors(wanted, running, self.config)
        # What Serve itself calls, but with the simulation's clock.
        decided, self.state = _apply_delay_logic(max(0, scaled), target, self.config, self.state, _now=now_s)
        return min(max(decided, self.config.min_replicas), self.config.max_replicas or 1)


# --- one trace, several scalers ---


PEAK_ATTAINMENT = 0.99
"""A fixed fleet is large enough, in hindsight, when this share is served in time over the whole trace."""
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


def fleet_in_hindsight(trace: Trace, setting: Setting, most: tuple[int, int]) -> tuple[int, int]:
    """The smallest fixed fleet that is enough, each role found beside as many of the other as there may be."""
    if setting.is_aggregated:
        return 0, _least(sum(most), lambda count: _attained(trace, setting, (0, count)).attainment)
    prefill = _least(most[0], lambda count: _attained(trace, setting, (count, most[1])).ttft_attainment)
    decode = _least(most[1], lambda count: _attained(trace, setting, (prefill, count)).attainment)
    return prefill, decode


def _attained(trace: Trace, setting: Setting, fleet: tuple[int, int]) -> Outcome:
    return serve(trace, setting, Fixed(*fleet), fleet)


def _least(most: int, attained: Callable[[int], float]) -> int:
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if attained(middle) >= PEAK_ATTAINMENT:
            high = middle
        else:
            low = middle + 1
    return low


def _busiest(by_second: Mapping[int, float]) -> float:
    return max(sum(by_second.get(at_s + one, 0.0) for one in range(BUSIEST_S)) for at_s in list(by_second))
