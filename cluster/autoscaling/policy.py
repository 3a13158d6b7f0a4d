"""The joint policy of prefill and decode workers: a look at the system and what it remembers in, a decision out.

The same code decides in the simulation (`tests/simulation/autoscaling`) and live (`serve_policy.py`).
"""

from dataclasses import dataclass

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.signals import Decision, Signals


@dataclass(frozen=True)
class Memory:
    """What the policy remembers between decisions; begins empty."""


def decide(signals: Signals, memory: Memory, config: AutoscalingConfig) -> tuple[Decision, Memory]:
    """How many workers each role is to have now."""
    raise NotImplementedError  # comes with the policy itself
