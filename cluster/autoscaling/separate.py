"""The policy of each role by itself: as many workers as there are requests at the role for, on average.

It needs no step costs and knows no promises. What distinguishes it from Ray Serve's own is what it shares with the
joint policy: up at once, down to the most that the last `cooldown_s` needed.
"""

import math

import numpy as np

from twostroke.cluster.autoscaling.config import AutoscalingConfig
from twostroke.cluster.autoscaling.demand import SETTLE_S, Need
from twostroke.cluster.autoscaling.history import Series, Window


def needs(window: Window, config: AutoscalingConfig) -> tuple[Need, Need]:
    """Of prefill and of decode workers."""
    prefill = _need(window, window.prefilling, config.prefill.ongoing)
    decode = _need(window, window.decoding, config.decode.ongoing)
    return prefill, decode


def _need(window: Window, ongoing: Series, each: float) -> Need:
    """`ongoing`: requests at the role at the end of each look; they are averaged over `SETTLE_S`."""
    if not len(ongoing):
        return Need(0, 0, 0.0)
    begin_s = window.at_s[0] - window.span_s[0]
    times = np.concatenate([[begin_s], window.at_s])
    area = np.concatenate([[0.0], np.cumsum(ongoing * window.span_s)])
    from_s = np.maximum(window.at_s - SETTLE_S, begin_s)
    averages = (area[1:] - np.interp(from_s, times, area)) / (window.at_s - from_s)
    now = float(averages[-1]) / each
    return Need(math.ceil(now - 1e-9), math.ceil(float(averages.max()) / each - 1e-9), now, from_backlog=True)
