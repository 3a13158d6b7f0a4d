"""One trace, several scalers: a fixed fleet for the peak, our policy, Ray Serve's."""

from dataclasses import dataclass

from cluster.autoscaling.config import AutoscalingConfig
from tests.simulation.autoscaling.fleet import Fleet, Scaler, run
from tests.simulation.autoscaling.outcome import Outcome, outcome
from tests.simulation.autoscaling.scalers import Fixed
from tests.simulation.autoscaling.traffic import Trace
from tests.simulation.autoscaling.workers import Kind

PEAK_ATTAINMENT = 0.99
"""A fixed fleet is enough for the peak, and no larger, when it serves so many in time over the whole trace."""


@dataclass(frozen=True)
class Setting:
    """What all scalers of a comparison have in common."""

    kind: Kind
    ttft_s: float
    tpot_s: float
    startup_s: float


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


def fixed_for_peak(trace: Trace, setting: Setting, config: AutoscalingConfig) -> tuple[tuple[int, int], Outcome]:
    """The smallest fixed fleet that is enough, each role found beside as many of the other as there may be."""
    p = _least(
        trace, setting, config, lambda workers: (workers, config.decode.max), config.prefill.max, "ttft_attainment"
    )
    d = _least(trace, setting, config, lambda workers: (p, workers), config.decode.max, "attainment")
    return (p, d), serve(trace, setting, Fixed(p, d), (p, d))


def _least(trace, setting, config, fleet_of, most, figure):  # type: ignore[no-untyped-def]
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        result = serve(trace, setting, Fixed(*fleet_of(middle)), fleet_of(middle))
        if getattr(result, figure) >= PEAK_ATTAINMENT:
            high = middle
        else:
            low = middle + 1
    return low
