"""The policy of each role by itself: as many workers as there are requests at the role for, on average.

It needs no step costs and knows no promises. What distinguishes it from Ray Serve's own is what it shares with the
joint policy: up at once, down to the most that the last `cooldown_s` needed.
"""

import math

from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.demand import SETTLE_S, Need
from cluster.autoscaling.history import History, Look


def needs(history: History, config: AutoscalingConfig) -> tuple[Need, Need]:
    """Of prefill and of decode workers."""
    prefill = _need([(look, look.prefilling) for look in history.looks], config.prefill.ongoing)
    decode = _need([(look, look.decoding) for look in history.looks], config.decode.ongoing)
    return prefill, decode


def _need(ongoing: list[tuple[Look, float]], each: float) -> Need:
    """`ongoing`: requests at the role when each look was taken."""
    averages = []
    first, span_s, total = 0, 0.0, 0.0
    for look, count in ongoing:
        span_s += look.span_s
        total += count * look.span_s
        while span_s - ongoing[first][0].span_s >= SETTLE_S:
            span_s -= ongoing[first][0].span_s
            total -= ongoing[first][0].span_s * ongoing[first][1]
            first += 1
        averages.append(max(0.0, total) / span_s)
    if not averages:
        return Need(0, 0, 0.0)
    return Need(
        math.ceil(averages[-1] / each - 1e-9),
        math.ceil(max(averages) / each - 1e-9),
        averages[-1] / each,
        from_backlog=True,
    )
