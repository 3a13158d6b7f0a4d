"""A trace under a policy on two prefill and two decode workers of the small model, and what came of it in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.planning.costs.profiles import SMALL
from twostroke.router.routing.chooser import Policy, Roles
from twostroke.router.slo.classes import SLOConfig
from twostroke.simulator import deployment
from twostroke.simulator.deployment import SimulatedRun, TracedRequest
from twostroke.simulator.sim_fleet import PROMISE_NOTHING

PREFILL_CACHE_TOKENS = 32_000
"""Cache of each prefill worker: less than all running conversations need, so that it matters who gets which."""
DECODE_CACHE_TOKENS = 64_000


def serve(
    trace: list[TracedRequest],
    policy: Policy,
    *,
    seed: int = 0,
    slo: SLOConfig = PROMISE_NOTHING,
    decode_cache_tokens: int = DECODE_CACHE_TOKENS,
    roles: Roles = "flexible",
) -> SimulatedRun:
    """Run the trace to its end; with classes that promise something, some requests are refused."""
    return deployment.serve(
        trace,
        policy,
        SMALL,
        prefill_cache_tokens=PREFILL_CACHE_TOKENS,
        decode_cache_tokens=decode_cache_tokens,
        seed=seed,
        slo=slo,
        roles=roles,
    )


@dataclass(frozen=True)
class Result:
    """One policy on one kind of trace. Times in seconds."""

    mean_ttft_s: float
    p90_ttft_s: float
    p99_ttft_s: float
    mean_tpot_s: float
    hit_rate: float  # prompt tokens that were cached, or pulled, of all
    prefill_busy: float
    decode_busy: float


def result_of(runs: Sequence[SimulatedRun]) -> Result:
    """All requests of all runs count alike."""
    served = [one for run in runs for one in run.served]
    ttfts = [one.ttft_s for one in served]
    return Result(
        mean_ttft_s=mean(ttfts),
        p90_ttft_s=percentile(ttfts, 0.9),
        p99_ttft_s=percentile(ttfts, 0.99),
        mean_tpot_s=mean([one.tpot_s for one in served]),
        hit_rate=sum(one.num_cached_tokens for one in served) / sum(one.num_prompt_tokens for one in served),
        prefill_busy=mean([run.prefill_busy for run in runs]),
        decode_busy=mean([run.decode_busy for run in runs]),
    )


def mean(values: Sequence[float]) -> float:
    """Raises ZeroDivisionError for none."""
    return sum(values) / len(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them don't exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
