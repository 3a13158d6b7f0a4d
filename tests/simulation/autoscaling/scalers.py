"""Who says how many workers there are: a fixed number, our policy, or Ray Serve's own."""

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

from tests.simulation.autoscaling.fleet import Fleet
from twostroke.cluster.autoscaling.policy import Memory, decide
from twostroke.cluster.autoscaling.readings import Decision
from twostroke.cluster.config.autoscaling import AutoscalingConfig


@dataclass
class Fixed:
    """Always the same."""

    prefill: int
    decode: int

    def __call__(self, fleet: Fleet) -> tuple[int, int]:
        return self.prefill, self.decode


@dataclass
class Ours:
    """`twostroke.cluster.autoscaling.policy.decide`, asked at every look."""

    config: AutoscalingConfig
    memory: Memory = field(default_factory=Memory)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)  # that changed anything

    def __call__(self, fleet: Fleet) -> tuple[int, int]:
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

    def __call__(self, fleet: Fleet) -> tuple[int, int]:
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
