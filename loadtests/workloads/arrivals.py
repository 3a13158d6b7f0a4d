"""When sessions begin. Pure: the same arrivals and seed give the same moments in every process and on every machine.

Poisson arrivals of a changing rate are made by a time change: arrivals of rate 1 are drawn on the axis of the expected
number of arrivals, and each is put at the moment at which so many are expected. The mean is exact at every moment.
"""

import hashlib
import math
import random
from collections.abc import Iterator
from itertools import count, pairwise, repeat, takewhile

from twostroke.loadtests import LoadTestError
from twostroke.loadtests.plan import Arrivals, Closed, Constant, Gamma, Poisson, Ramp, RateSteps


def arrival_times(arrivals: Arrivals, seconds: float, seed: int) -> Iterator[float]:
    """Moments in seconds from 0, rising, all below `seconds`; of a closed loop zeros without an end.

    A replay has its trace's times, which aren't known here (loadtests/workloads/sessions.py). Raises LoadTestError for
    settings that make no sense.
    """
    draw = random.Random(f"arrivals {seed}")
    match arrivals:
        case Poisson(rate=rate):
            times = _running_sum(_gamma_gaps(_positive("poisson", "rate", rate), 1.0, draw))
        case Gamma(rate=rate, cv=cv):
            times = _running_sum(_gamma_gaps(_positive("gamma", "rate", rate), _positive("gamma", "cv", cv), draw))
        case Constant(rate=rate):
            spacing = _positive("constant", "rate", rate)
            times = (index / spacing for index in count())
        case Ramp(rate=first, to_rate=last):
            times = _ramp(first, last, seconds, draw)
        case RateSteps(steps=steps):
            times = _steps(steps, seconds, draw)
        case Closed(users=users, think_s=think_s):
            if users < 1 or not 0 <= think_s < math.inf:
                raise LoadTestError(
                    f"closed arrivals have {users} users who think {think_s:g} s: give at least 1 and 0"
                )
            return repeat(0.0)
        case _:
            raise LoadTestError("replay: only a workload with times of its own can be replayed; give arrivals a rate")
    return takewhile(lambda at: at < seconds, times)


def gamma_times(rate: float, cv: float, draw: random.Random) -> Iterator[float]:
    """Endless rising moments with gaps of a gamma distribution: mean 1 / rate, standard deviation cv / rate."""
    return _running_sum(_gamma_gaps(rate, cv, draw))


def _gamma_gaps(rate: float, cv: float, draw: random.Random) -> Iterator[float]:
    """The first is the wait from a moment chosen blindly, which is likelier within a long gap: a gap weighted by its
    length, of which a uniform share is left. Without this a burst would begin every run, and with a CV of 13 the mean
    number would be (CV^2 - 1) / 2 = 84 arrivals too high. (Cox, Renewal Theory, 1962, section 5: the equilibrium
    renewal process.)
    """
    shape = 1.0 / cv**2
    scale = 1.0 / (rate * shape)
    yield draw.random() * draw.gammavariate(shape + 1.0, scale)
    while True:
        yield draw.gammavariate(shape, scale)


def _ramp(first: float, last: float, seconds: float, draw: random.Random) -> Iterator[float]:
    """`first` t + (last - first) t^2 / (2 seconds) arrivals are expected up to t; solved for t."""
    if not (0 <= first < math.inf and 0 <= last < math.inf) or first == last == 0:
        raise LoadTestError(f"ramp from {first:g} to {last:g}: give rates from 0 on, not both 0")
    growth = (last - first) / seconds
    expected_in_all = (first + last) / 2 * seconds
    numbers = takewhile(lambda number: number < expected_in_all, _running_sum(_gamma_gaps(1.0, 1.0, draw)))
    return (2 * number / (first + math.sqrt(first * first + 2 * growth * number)) for number in numbers)


def _steps(steps: tuple[tuple[float, float], ...], seconds: float, draw: random.Random) -> Iterator[float]:
    if not steps or steps[0][0] != 0:
        raise LoadTestError("step arrivals: the first step is to begin at 0")
    if any(not before[0] < after[0] < math.inf for before, after in pairwise(steps)):
        raise LoadTestError("step arrivals: each step is to begin later than the one before")
    if any(not 0 <= rate < math.inf for _, rate in steps):
        raise LoadTestError("step arrivals: give rates from 0 on")
    ends = (*(begin for begin, _ in steps[1:]), max(seconds, steps[-1][0]))
    lasting = ((end - begin, rate) for (begin, rate), end in zip(steps, ends, strict=True))
    return changed_times(lasting, _running_sum(_gamma_gaps(1.0, 1.0, draw)))


def changed_times(rates: Iterator[tuple[float, float]], numbers: Iterator[float]) -> Iterator[float]:
    """Endless moments on the axis of expected arrivals (`numbers`, rising) put on the axis of time.

    `rates` says for how many seconds each rate holds, one after another from 0.
    """
    number = next(numbers)
    begin = expected = 0.0
    for lasts_s, rate in rates:
        expected_after = expected + rate * lasts_s if rate else expected
        while number < expected_after:
            yield begin + (number - expected) / rate
            number = next(numbers)
        begin, expected = begin + lasts_s, expected_after


def _running_sum(gaps: Iterator[float]) -> Iterator[float]:
    at = 0.0
    for gap in gaps:
        at += gap
        yield at


def _positive(kind: str, name: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise LoadTestError(f"{kind} arrivals have {name} {value:g}: give a number above 0")
    return value


def derive_seed(*parts: int | str) -> int:
    """63 bits; other parts, other bits."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
