"""The section `autoscaling` of the configuration; `prefill.replicas` and `decode.replicas` say where to begin."""

from dataclasses import dataclass, field
from typing import Literal

from protocol.errors import ConfigError


@dataclass(frozen=True)
class RoleLimits:
    """How many workers a role may have. Raises ConfigError."""

    min: int = 1
    max: int = 1
    ongoing_requests: float = 8.0  # at each worker: what the policy `separate` aims at

    def __post_init__(self) -> None:
        if not 0 <= self.min <= self.max:
            raise ConfigError(f"min: {self.min} must be from 0 to max, which is {self.max}")


@dataclass(frozen=True)
class AutoscalingConfig:
    """When workers come and go."""

    enabled: bool = False
    # joint: ours, both roles together (`policy.py`). separate: Ray Serve's own, each role by the requests it has.
    policy: Literal["joint", "separate"] = "joint"
    prefill: RoleLimits = field(default_factory=RoleLimits)
    decode: RoleLimits = field(default_factory=RoleLimits)
    budget: float | None = None  # GPUs of both roles together, or workers where they have none; None: the maxima
    interval_s: float = 5.0  # between decisions
    cooldown_s: float = 120.0  # after a role's last change until it may shrink
    slack: float = 0.5  # of the TTFT that is promised: within so much of it a backlog is to be worked off
    spare: float = 0.15  # of each role's capacity that is kept free
