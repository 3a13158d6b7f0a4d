"""Layouts of a fleet, and how many requests a second each serves in time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from twostroke.planner.floors import usd_per_million
from twostroke.planner.queueing import (
    HANDOVER_S,
    NOTHING,
    Kind,
    Met,
    decoding,
    late_s,
    mixed,
    reading,
)
from twostroke.planner.workload import Promise, Workload

Mode = Literal["aggregated", "disaggregated", "hybrid"]
"""aggregated: decode workers read all prompts; disaggregated: none; hybrid: where that is quicker."""

READ_BY_DECODE = (0.1, 0.25)
"""Shares of prompts that a hybrid's decode workers are tried with."""
PRECISION = 0.005  # of a rate that is searched


@dataclass(frozen=True)
class Layout:
    """So many workers of these kinds."""

    mode: Mode
    decode: Kind
    num_decode: int
    prefill: Kind | None = None
    num_prefill: int = 0

    @cached_property
    def gpus(self) -> int:
        return self.decode.gpus * self.num_decode + (self.prefill.gpus * self.num_prefill if self.prefill else 0)

    @cached_property
    def usd_per_hour(self) -> float:
        of_prefill = self.prefill.usd_per_hour * self.num_prefill if self.prefill else 0.0
        return self.decode.usd_per_hour * self.num_decode + of_prefill

    @property
    def num_quantised(self) -> int:
        """Roles whose weights are not as the checkpoint has them."""
        return sum(kind is not None and kind.quantization != "auto" for kind in (self.prefill, self.decode))

    @property
    def structure(self) -> tuple[str, str, str]:
        """What layouts that differ in numbers alone have in common."""
        return self.mode, "" if self.prefill is None else self.prefill.name, self.decode.name

    def met(self, workload: Workload, promise: Promise, rate: float) -> Met:
        """What comes in time at `rate` requests a second."""
        if self.prefill is None:
            return mixed(self.decode, self.num_decode, workload, promise, rate, rate)
        if self.mode == "disaggregated":
            return self._apart(self.prefill, workload, promise, rate)
        return max(
            (self._shared(self.prefill, workload, promise, rate, share) for share in READ_BY_DECODE),
            key=lambda one: min(one.ttft, one.tpot, one.room),
        )

    def _apart(self, prefill: Kind, workload: Workload, promise: Promise, rate: float) -> Met:
        read = reading(prefill, self.num_prefill, workload, promise, rate)
        lates = [
            late_s(prefill, prompt, rate / self.num_prefill, workload.mean_prompt) for prompt, _ in workload.strata
        ]
        written = decoding(self.decode, self.num_decode, workload, promise, rate, lates)
        return Met(read.ttft, written.tpot, written.room, written.batch, read.ttft_binds, written.tpot_binds)

    def _shared(self, prefill: Kind, workload: Workload, promise: Promise, rate: float, share: float) -> Met:
        read = reading(prefill, self.num_prefill, workload, promise, rate * (1 - share))
        both = mixed(self.decode, self.num_decode, workload, promise, rate, rate * share)
        if both == NOTHING:
            return both
        ttft = read.ttft * (1 - share) + both.ttft * share
        return Met(ttft, both.tpot, both.room, both.batch, read.ttft_binds, both.tpot_binds)

    def goodput(self, workload: Workload, promise: Promise) -> float:
        """The most requests a second at which the promise holds; 0 where it never does."""
        return highest_rate(lambda rate: self.met(workload, promise, rate).holds(promise))

    def usd_per_million_tokens(self, workload: Workload, rate: float) -> float:
        """Of answers' tokens, at so many requests a second."""
        return usd_per_million(self.usd_per_hour, rate * workload.mean_answer)


def highest_rate(holds: Callable[[float], bool], first: float = 1.0) -> float:
    """By doubling and halving, to PRECISION; 0 where nothing holds. `holds` is to fall from true to false once."""
    low, high = 0.0, first
    if holds(first):
        while holds(high) and high < 1e9:
            low, high = high, high * 2
    else:
        low = first / 2
        while not holds(low):
            low, high = low / 2, low
            if low < 1e-6 * first:
                return 0.0
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


class Pools:
    """How much the workers of one role serve by themselves, remembered: what fleets are put together from."""

    def __init__(self, workload: Workload, promise: Promise) -> None:
        self._workload = workload
        self._promise = promise
        self._known: dict[tuple[str, str, int], float] = {}

    def read(self, kind: Kind, count: int) -> float:
        """Requests a second whose first tokens come in time."""
        return self._rate("read", kind, count, lambda rate: reading(kind, count, self._workload, self._promise, rate))

    def write(self, kind: Kind, count: int) -> float:
        """Requests a second whose answers come in time, whatever the link does."""
        lates = [HANDOVER_S] * len(self._workload.strata)
        return self._rate(
            "write", kind, count, lambda rate: decoding(kind, count, self._workload, self._promise, rate, lates)
        )

    def both(self, kind: Kind, count: int) -> float:
        """Requests a second that workers serve which read and write."""
        return self._rate(
            "both", kind, count, lambda rate: mixed(kind, count, self._workload, self._promise, rate, rate)
        )

    def _rate(self, what: str, kind: Kind, count: int, met: Callable[[float], Met]) -> float:
        key = what, kind.name, count
        if key not in self._known:
            self._known[key] = highest_rate(lambda rate: met(rate).holds(self._promise), first=float(count))
        return self._known[key]
