"""Traces: two of public files, by hand, and synthetic ones that imitate them. The rate is scaled, not the burstiness.

A rate is raised by putting several requests in each one's place, within a second after it; times are never compressed,
so bursts come as suddenly, last as long, and are as far above the mean.
"""

import csv
import random
from dataclasses import dataclass
from datetime import datetime
from math import cos, log, pi
from pathlib import Path

from twostroke.planning.coarse.workers import CoarseRequest

DAY_S = 86400.0


@dataclass(frozen=True)
class Trace:
    """Requests by time. They are filled in as they are served, so make the trace anew for each run: `fresh`."""

    name: str
    requests: tuple[tuple[float, int, int], ...]  # when, prompt tokens, output tokens
    ends_s: float

    def fresh(self) -> list[CoarseRequest]:
        """Return the requests as yet unserved."""
        return [CoarseRequest(*one) for one in self.requests]


def azure_file(path: Path, copies: int = 1, seed: int = 0) -> Trace:
    """A file of Azure's 2023 traces, each request `copies` times."""
    rng = random.Random(seed)
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    begin = _azure_time(rows[0]["TIMESTAMP"])
    requests = []
    for row in rows:
        at_s = _azure_time(row["TIMESTAMP"]) - begin
        tokens = int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"]))
        requests += [(at_s + (rng.random() if copy else 0.0), *tokens) for copy in range(copies)]
    return _trace(f"{path.stem} x{copies}", requests)


def begun_later(trace: Trace, by_s: float) -> Trace:
    """The same from `by_s` on, and then its beginning: what comes of it must not hang on when its bursts come."""
    whole_s = trace.ends_s + 1.0
    requests = [((at_s - by_s) % whole_s, prompt, output) for at_s, prompt, output in trace.requests]
    return _trace(f"{trace.name}, from {by_s:g} s on", requests, trace.ends_s)


def servegen_day(rates: Path, lengths: Path, model: str, day: int, peak_rps: float, seed: int = 0) -> Trace:
    """A day of ServeGen's 10-minute rates, the highest scaled to `peak_rps`: Poisson within a window, lengths drawn.

    Windows without any rate are gaps in the source: they get the rate of the window before.
    """
    with rates.open(newline="") as lines:
        of_model = [float(row["rate_rps"]) for row in csv.DictReader(lines) if row["model"] == model]
    windows = of_model[day * 144 : (day + 1) * 144]
    for index, rate in enumerate(windows):
        if rate <= 0:
            windows[index] = windows[index - 1] if index else max(windows)
    with lengths.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["model"] == model]
    bins = {name: _bins(rows, name) for name in ("input_tokens", "output_tokens")}
    rng = random.Random(seed)
    scale = peak_rps / max(windows)
    requests = []
    for index, rate in enumerate(windows):
        times = _poisson(rng, rate * scale, index * 600.0, 600.0)
        prompts, outputs = (_drawn(rng, *bins[name], len(times)) for name in ("input_tokens", "output_tokens"))
        requests += zip(times, prompts, outputs, strict=True)
    return _trace(f"servegen {model} day {day}", requests, DAY_S)


def bursts(seed: int, seconds: float, rate: float = 1.0) -> Trace:
    """Return a trace like Azure's code trace: silences of 50 s on average, then 35 s of seconds that differ by
    lognormal factors. At `rate` 1 some 2.6 requests a second, gaps with a CV of about 13, up to 70 in one second;
    lengths as there.

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


def _bins(rows: list[dict[str, str]], name: str) -> tuple[list[tuple[int, int]], list[float]]:
    of_name = [row for row in rows if row["field"] == name]
    bounds = [(int(row["tokens_from"]), int(row["tokens_to"])) for row in of_name]
    return bounds, [float(row["prob"]) for row in of_name]


def _drawn(rng: random.Random, bins: list[tuple[int, int]], weights: list[float], count: int) -> list[int]:
    return [max(1, rng.randint(*bounds)) for bounds in rng.choices(bins, weights, k=count)]


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


def _azure_time(text: str) -> float:
    return datetime.fromisoformat(text[:26]).timestamp()  # of seven digits after the point Python reads six


def _between(value: float, low: int, high: int) -> int:
    return max(low, min(high, round(value)))


def _mu(mean: float) -> float:
    """Return mu of a lognormal with sigma 1 and this mean."""
    return log(mean) - 0.5
