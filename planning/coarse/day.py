"""A day whose rate rises and falls as a trace's does, and what a fleet that follows it costs."""

import csv
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from twostroke.loadtests.plan import RateSteps
from twostroke.planning.coarse.fleet import Change, CoarseFleet
from twostroke.protocol.errors import ConfigError

HOUR_S = 3600.0
DAY_S = 86_400.0
TIME, RATE, NAME = "t_s", "rate_rps", "model"
"""The columns, as in ServeGen's rates summed up (Xiang et al., arXiv:2505.09999); the last may be missing."""


def day_rates(text: str, mean_rate: float) -> RateSteps:
    """Poisson arrivals at the rates of `FILE` or `FILE:NAME`, its first day, scaled so that their mean is `mean_rate`.

    NAME says which of the models that a file has. Raises ConfigError.
    """
    path, name = Path(text), ""
    if not path.is_file() and ":" in text:
        of_file, _, name = text.rpartition(":")
        path = Path(of_file)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = [(row.get(NAME, ""), float(row[TIME]), float(row[RATE])) for row in csv.DictReader(file)]
    except OSError as error:
        raise ConfigError(f"--day {path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"--day {path}: wants columns {TIME} and {RATE} with numbers: {error}") from error
    names = sorted({one for one, _, _ in rows})
    if name not in names and len(names) > 1:
        raise ConfigError(f"--day {text}: the file has several models; name one after a colon, of {', '.join(names)}")
    steps = [(at_s, rate) for one, at_s, rate in rows if at_s < DAY_S and name in (one, "")]
    mean = statistics.fmean(rate for _, rate in steps) if steps else 0.0
    if not steps or steps[0][0] != 0 or mean <= 0:
        raise ConfigError(f"--day {text}: wants rates above 0 whose times begin at 0")
    return RateSteps(tuple((at_s, rate * mean_rate / mean) for at_s, rate in steps))


def scaling_cost(fleet: CoarseFleet, start: tuple[int, int], ends_s: float) -> dict[str, float]:
    """Return what a fleet that served until `ends_s` cost: worker-hours from each order on, the most workers of each
    role, and the most reversals of a role in any hour."""
    targets = [Change(0.0, *start), *(one for one in fleet.changes if one.at_s <= ends_s)]
    return {
        "worker_hours": round(fleet.worker_s() / HOUR_S, 2),
        "most_prefill": max(one.prefill for one in targets),
        "most_decode": max(one.decode for one in targets),
        "prefill_reversals": reversals([(one.at_s, one.prefill) for one in targets]),
        "decode_reversals": reversals([(one.at_s, one.decode) for one in targets]),
        "changes": len(targets) - 1,
    }


def reversals(counts: Sequence[tuple[float, int]]) -> int:
    """The most turns, from up to down or back, within any hour of (when, how many)."""
    turns: list[float] = []
    went = 0
    for (_, before), (at_s, after) in pairwise(counts):
        way = (after > before) - (after < before)
        if way and went and way != went:
            turns.append(at_s)
        went = way or went
    return max((sum(at_s <= one < at_s + HOUR_S for one in turns) for at_s in turns), default=0)
