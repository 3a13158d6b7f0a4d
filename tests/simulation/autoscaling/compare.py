"""One trace, several scalers: fixed fleets for the peak, our policy, Ray Serve's."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.simulation.autoscaling.fleet import Fleet, Scaler, run
from tests.simulation.autoscaling.outcome import Outcome, outcome
from tests.simulation.autoscaling.scalers import Fixed
from tests.simulation.autoscaling.traffic import Trace
from tests.simulation.autoscaling.workers import Kind
from twostroke.cluster.autoscaling.demand import decode_capacity
from twostroke.cluster.config.autoscaling import AutoscalingConfig

PEAK_ATTAINMENT = 0.99
"""With hindsight, a fixed fleet is enough, and no larger, when it serves so many in time over the whole trace."""
BUSIEST_S = 10
"""Without a replay, who provisions for the peak counts what came in the busiest so many seconds."""


@dataclass(frozen=True)
class Setting:
    """What all scalers of a comparison have in common."""

    kind: Kind
    ttft_s: float
    tpot_s: float
    startup_s: float
    is_aggregated: bool = False  # decode workers read the prompts, and there are no others


def serve(trace: Trace, setting: Setting, scaler: Scaler, start: tuple[int, int], after_s: float = 0.0) -> Outcome:
    """The trace from beginning to end, and `after_s` without traffic."""
    return serve_with_fleet(trace, setting, scaler, start, after_s)[0]


def serve_with_fleet(
    trace: Trace, setting: Setting, scaler: Scaler, start: tuple[int, int], after_s: float = 0.0
) -> tuple[Outcome, Fleet]:
    """The same, and the fleet as it is then."""
    fleet = Fleet(setting.kind, setting.startup_s, setting.ttft_s, setting.tpot_s)
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
