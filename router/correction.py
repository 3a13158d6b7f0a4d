"""How wrong predictions have been lately: a factor that makes the next ones right nine times out of ten.

The mean of actual over predicted times alone would be too short for every second request; like TCP's timers (RFC 6298),
some deviations are added to it. Times that are short against the limit are dominated by what no cost model knows (HTTP,
the wait for the running step), and their ratio says nothing of long ones: so both sides are taken with a part of the
limit added. As time passes the factor goes back to 1, so that what was learnt under one load does not rule another, and
a wrong one can't refuse everybody for good.
"""

import math

LEAST, MOST = 0.5, 4.0
_GAIN = 0.05  # of the newest ratio in the mean: the last 20 or so count
_DEVIATIONS = 1.5  # mean absolute ones, to about the 90th percentile
_FORGET_S = 10.0
_PART_OF_LIMIT = 0.25


class Correction:
    """Of one kind of time, of the requests of one class."""

    def __init__(self) -> None:
        self._mean = 1.0
        self._deviation = 0.0
        self._at: float | None = None

    def learn(self, predicted_s: float, actual_s: float, limit_s: float, now: float) -> None:
        """A request for which `predicted_s` was expected took `actual_s`; `limit_s` was its promise."""
        added = _PART_OF_LIMIT * limit_s
        ratio = min(max((actual_s + added) / (predicted_s + added), LEAST), MOST)
        mean, deviation = self._now(now)
        self._mean = mean + _GAIN * (ratio - mean)
        self._deviation = deviation + _GAIN * (abs(ratio - mean) - deviation)
        self._at = now

    def factor(self, now: float) -> float:
        """Within LEAST and MOST."""
        mean, deviation = self._now(now)
        return min(max(mean + _DEVIATIONS * deviation, LEAST), MOST)

    def corrected(self, predicted_s: float, limit_s: float, now: float) -> float:
        """What nine requests out of ten will stay below."""
        added = _PART_OF_LIMIT * limit_s
        return (predicted_s + added) * self.factor(now) - added

    def _now(self, now: float) -> tuple[float, float]:
        if self._at is None:
            return 1.0, 0.0
        kept = math.exp((self._at - now) / _FORGET_S)
        return 1.0 + (self._mean - 1.0) * kept, self._deviation * kept
