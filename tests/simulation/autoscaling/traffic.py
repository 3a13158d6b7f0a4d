"""Synthetic traces that imitate public ones."""

import random
from dataclasses import dataclass
from math import cos, log, pi

from twostroke.planning.coarse.workers import CoarseRequest


@dataclass(frozen=True)
class Trace:
    """Requests by time. They are filled in as they are served, so make the trace anew for each run: `fresh`."""

    name: str
    requests: tuple[tuple[float, int, int], ...]  # when, prompt tokens, output tokens
    ends_s: float

    def fresh(self) -> list[CoarseRequest]:
        """Return the requests as yet unserved."""
        return [CoarseRequest(*one) for one in self.requests]


def bursts(seed: int, seconds: float, rate: float = 1.0) -> Trace:
    """Return a trace like Azure's code trace: silences of 50 s on average, then 35 s of seconds that differ by
    lognormal factors.

    At `rate` 1 some 2.6 requests a second, gaps with a CV of about 13, up to 70 in one second; lengths as there.
    """
    rng = random.Random(seed)
    requests = []
    at_s = 0.0
    while at_s < seconds:
        at_s += rng.expovariate(1 / 50)
        until_s = at_s + rng.expovariate(1 / 35)
        while at_s < min(until_s, seconds):
            second = rng.lognormvariate(1.37, 0.9) * rate
            requests += [
                (
                    time,
                    _between(rng.lognormvariate(7.0, 1.36), 17, 7437),
                    _between(rng.lognormvariate(2.79, 0.85), 6, 1899),
                )
                for time in _poisson(rng, second, at_s, 1.0)
            ]
            at_s += 1.0
    return _trace("bursts", requests, seconds)


def diurnal(seed: int, seconds: float, low_rps: float, peak_rps: float, prompt: int = 920, output: int = 155) -> Trace:
    """One day within `seconds`: the rate goes from low to peak and back as a cosine, in steps of a minute."""
    rng = random.Random(seed)
    requests = []
    minutes = int(seconds // 60)
    for minute in range(minutes):
        rate = low_rps + (peak_rps - low_rps) * (1 - cos(2 * pi * minute / minutes)) / 2
        requests += [
            (
                time,
                _between(rng.lognormvariate(_mu(prompt), 1.0), 8, 8192),
                _between(rng.expovariate(1 / output), 2, 2000),
            )
            for time in _poisson(rng, rate, minute * 60.0, 60.0)
        ]
    return _trace("diurnal", requests, seconds)


def steps(
    seed: int, rates: tuple[tuple[float, float], ...], ends_s: float, prompt: int = 920, output: int = 155
) -> Trace:
    """Poisson arrivals of requests that are all alike; (from when, rate)."""
    rng = random.Random(seed)
    requests = []
    for (at_s, rate), until_s in zip(rates, [*(at_s for at_s, _ in rates[1:]), ends_s], strict=True):
        requests += [(time, prompt, output) for time in _poisson(rng, rate, at_s, until_s - at_s)]
    return _trace("steps", requests, ends_s)


def _poisson(rng: random.Random, rate: float, begin_s: float, span_s: float) -> list[float]:
    times = []
    at_s = begin_s
    while rate > 0:
        at_s += rng.expovariate(rate)
        if at_s >= begin_s + span_s:
            break
        times.append(at_s)
    return times


def _trace(name: str, requests: list[tuple[float, int, int]], ends_s: float | None = None) -> Trace:
    ordered = tuple(sorted(requests))
    return Trace(name, ordered, ordered[-1][0] if ends_s is None else ends_s)


def _between(value: float, low: int, high: int) -> int:
    return max(low, min(high, round(value)))


def _mu(mean: float) -> float:
    """Return mu of a lognormal with sigma 1 and this mean."""
    return log(mean) - 0.5
