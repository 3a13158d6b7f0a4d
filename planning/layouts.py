"""Layouts of a fleet, and how many requests a second each serves in time."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import msgspec

from twostroke.loadtests.capacity import SearchRange, find_capacity
from twostroke.planning.costs.drafted_steps import drafted_step
from twostroke.planning.costs.roofline import usd_per_million
from twostroke.planning.queueing import (
    HANDOVER_S,
    NONE_MET,
    ExpectedAttainment,
    decode_attainment,
    idle_share,
    late_s,
    mixed_attainment,
    prefill_attainment,
)
from twostroke.planning.workload import SLOTargets, Workload
from twostroke.router.routing.chooser import PathConfig
from twostroke.worker.profile import WorkerProfile

Work = Literal["prefill", "decode", "both"]
Mode = Literal["aggregated", "disaggregated", "hybrid", "fixed"]
"""aggregated: decode workers compute all prompts; disaggregated: none; hybrid: workers of either role compute prompts
and write answers where that is quicker; fixed: the same, but only decode workers write answers."""
TRIED_MODES: tuple[Mode, ...] = ("aggregated", "disaggregated", "hybrid")
"""Modes that are compared where nobody names others."""

HALVINGS = 5  # of the interval in which the share of prompts lies that a hybrid's decode workers read
STEP, PRECISION = 1.2, 0.005  # of a rate that is sought: the step from a guess, and where it ends


def router_settings(mode: Mode) -> dict[str, Any]:
    """Return the router's settings of a mode: in a disaggregated fleet every prompt goes by a pair."""
    has_fixed_roles = mode in ("disaggregated", "fixed")
    return {"decodes_alone": mode != "disaggregated", "roles": "fixed" if has_fixed_roles else "flexible"}


def router_mode(num_prefill: int, config: PathConfig) -> Mode:
    """Return the mode of a server with these settings of its router."""
    if not num_prefill:
        return "aggregated"
    if not config.decodes_alone:
        return "disaggregated"
    return "fixed" if config.roles == "fixed" else "hybrid"


@dataclass(frozen=True)
class Layout:
    """Numbers of workers of given profiles."""

    mode: Mode
    decode: WorkerProfile
    num_decode: int
    prefill: WorkerProfile | None = None
    num_prefill: int = 0

    @cached_property
    def gpus(self) -> int:
        return self.decode.gpus * self.num_decode + (self.prefill.gpus * self.num_prefill if self.prefill else 0)

    @cached_property
    def usd_per_hour(self) -> float:
        of_prefill = self.prefill.usd_per_hour * self.num_prefill if self.prefill else 0.0
        return self.decode.usd_per_hour * self.num_decode + of_prefill

    def with_repeated(self, repeated: float) -> "Layout":
        """Return the layout for a workload of whose answers so much repeats earlier text."""
        prefill = None if self.prefill is None else msgspec.structs.replace(self.prefill, repeated=repeated)
        return replace(self, decode=msgspec.structs.replace(self.decode, repeated=repeated), prefill=prefill)

    @property
    def num_quantised(self) -> int:
        """Roles whose weights are not as the checkpoint has them."""
        return sum(profile is not None and profile.quantization != "auto" for profile in (self.prefill, self.decode))

    @property
    def structure(self) -> tuple[str, str, str]:
        """Return what layouts that differ only in numbers have in common."""
        return self.mode, "" if self.prefill is None else self.prefill.name, self.decode.name

    def met(self, workload: Workload, promise: SLOTargets, rate: float) -> ExpectedAttainment:
        """Return what is on time at `rate` requests a second."""
        if self.prefill is None:
            return mixed_attainment(self.decode, self.num_decode, workload, promise, rate, rate)
        if self.mode == "disaggregated":
            return self._apart(self.prefill, workload, promise, rate)
        return self._shared(self.prefill, workload, promise, rate)

    def _apart(
        self, prefill: WorkerProfile, workload: Workload, promise: SLOTargets, rate: float
    ) -> ExpectedAttainment:
        read = prefill_attainment(prefill, self.num_prefill, workload, promise, rate)
        lates = [
            late_s(prefill, prompt, rate / self.num_prefill, workload.mean_prompt, self.decode.copies)
            for prompt, _ in workload.strata
        ]
        written = decode_attainment(self.decode, self.num_decode, workload, promise, rate, lates)
        return ExpectedAttainment(
            read.ttft, written.tpot, written.room, written.batch, read.ttft_binds, written.tpot_binds
        )

    def _shared(
        self, prefill: WorkerProfile, workload: Workload, promise: SLOTargets, rate: float
    ) -> ExpectedAttainment:
        """Prompts go where they are read sooner, until both ways take as long (Wardrop 1952).

        Idle prefill workers write answers, unless roles are fixed.
        """
        written = self._answers_by_prefill(prefill, workload, rate) if self.mode == "hybrid" else 0.0
        low, high = 0.0, 1.0  # of prompts that decode workers read
        read = both = NONE_MET
        share = 0.0
        for _ in range(HALVINGS):
            share = (low + high) / 2
            read = prefill_attainment(prefill, self.num_prefill, workload, promise, rate * (1 - share))
            both = mixed_attainment(self.decode, self.num_decode, workload, promise, rate - written, rate * share)
            low, high = (share, high) if read.ttft_s > both.ttft_s else (low, share)
        ttft = read.ttft * (1 - share) + both.ttft * share
        return ExpectedAttainment(ttft, both.tpot, both.room, both.batch, read.ttft_binds, both.tpot_binds)

    def _answers_by_prefill(self, prefill: WorkerProfile, workload: Workload, rate: float) -> float:
        """Return how many answers a second prefill workers write: each one at a time while it is idle.

        The router sends no more there, since streams with a promise would wait for steps of prompts.
        """
        idle = idle_share(prefill, self.num_prefill, workload, rate)
        each_s = workload.mean_answer * drafted_step(prefill, 1, workload.mean_context).token_s
        return min(idle * rate, idle * self.num_prefill / each_s)

    def goodput(self, workload: Workload, promise: SLOTargets, near: float = 1.0) -> float:
        """The most requests a second at which the promise holds (Zhong et al., DistServe, 2024); 0 where it never does.

        `near`: a guess, from which on it is sought.
        """
        return highest_rate(lambda rate: self.met(workload, promise, rate), promise, near)

    def usd_per_million_tokens(self, workload: Workload, rate: float) -> float:
        """Return USD per million answer tokens at `rate` requests a second."""
        return usd_per_million(self.usd_per_hour, rate * workload.mean_answer)


def highest_rate(met: Callable[[float], ExpectedAttainment], promise: SLOTargets, near: float = 1.0) -> float:
    """Return the most requests a second at which what is `met` keeps the promise, and 0 where no rate does.

    `near` is a guess, from which on the rate is sought.
    """
    search = SearchRange(near, factor=STEP, precision=PRECISION, least=1e-6 * near, most=1e9)
    return find_capacity(lambda rate: met(rate).attainment(promise), 1.0, search)


class Pools:
    """Capacity of pools of workers of one role, remembered; fleets are put together from them."""

    def __init__(self, workload: Workload, promise: SLOTargets) -> None:
        self._workload = workload
        self._promise = promise
        self._lates = [HANDOVER_S] * len(workload.strata)
        self._known: dict[tuple[Work, str], dict[int, float]] = defaultdict(dict)

    def met(self, work: Work, profile: WorkerProfile, count: int, rate: float) -> ExpectedAttainment:
        """Return what is on time where `count` workers do the work and nothing else limits them."""
        workload, promise = self._workload, self._promise
        match work:
            case "prefill":
                return prefill_attainment(profile, count, workload, promise, rate)
            case "decode":
                return decode_attainment(profile, count, workload, promise, rate, self._lates)
            case "both":
                return mixed_attainment(profile, count, workload, promise, rate, rate)

    def holds(self, work: Work, profile: WorkerProfile, count: int, rate: float) -> bool:
        """Return whether so many workers keep the promise at a rate."""
        return self.met(work, profile, count, rate).attainment(self._promise) >= 1.0

    def rate(self, work: Work, profile: WorkerProfile, count: int) -> float:
        """The most requests a second at which they do."""
        known = self._known[work, profile.name]
        if count not in known:
            nearest = min(known, key=lambda one: abs(one - count), default=None)
            near = count * (1.0 if nearest is None else known[nearest] / nearest)
            known[count] = highest_rate(
                lambda rate: self.met(work, profile, count, rate), self._promise, near or float(count)
            )
        return known[count]
