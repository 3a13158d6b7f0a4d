"""Runs in numbers: means and percentiles over all seeds of a policy."""

from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulation.policies.deployment import Run


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


def result_of(runs: Sequence[Run]) -> Result:
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
