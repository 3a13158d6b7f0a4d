"""What the policy sees: the load as it *arrives*, and the workers as they are. Plain numbers; no Ray, no clock."""

from dataclasses import dataclass, field

from twostroke.cluster.autoscaling.reasons import Reason
from twostroke.protocol.step_costs import StepCosts


@dataclass(frozen=True)
class Arrived:
    """Counters since the routers started, of all that came, the refused included: demand isn't what was served.

    A counter that falls, as when a router ends, counts as one that stood still.
    """

    requests: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0  # of these, found in a prefix cache
    prompt_pairs: float = 0.0  # sum of n (p + n / 2), n new tokens after p cached: attention's part of a prompt's time
    output_tokens: float = 0.0  # of the answers that have ended
    ended: float = 0.0  # requests whose answers have ended


@dataclass(frozen=True)
class RoleSignals:
    """The workers of one role together."""

    running: int  # that can take requests: neither starting nor draining
    target: int  # asked for last; another number than `running`: a change is under way
    gpus_each: float = 0.0
    costs: StepCosts | None = None  # of a typical worker, fitted to warm steps alone; None: nobody knows yet
    queued_requests: int = 0
    queued_tokens: int = 0  # prompt tokens still to be computed
    num_decoding: int = 0
    context_tokens: int = 0  # of those
    owned_tokens: int = 0  # room in KV blocks that requests hold
    total_tokens: int = 0  # all room in KV blocks
    max_batch: int = 256  # requests in one step of a worker
    step_tokens: int = 2048  # prompt tokens in one step of a worker


@dataclass(frozen=True)
class Signals:
    """One look at the system."""

    at_s: float  # of a monotonic clock
    arrived: Arrived
    prefill: RoleSignals
    decode: RoleSignals
    ttft_s: float | None = None  # the tightest promise among the SLO classes that are asked for; None: none
    tpot_s: float | None = None


@dataclass(frozen=True)
class Decision:
    """How many workers each role is to have, and why."""

    prefill: int
    decode: int
    prefill_reason: Reason
    decode_reason: Reason
    demand: dict[str, float] = field(default_factory=dict)  # the numbers it came from, for people
