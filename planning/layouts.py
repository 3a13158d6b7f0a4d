"""Layouts of a fleet, and by formulas how many requests a second each serves in time.

Prompts wait at prefill workers as at an M/G/n queue, first come first served: the chance to wait is Erlang's (1917),
the mean wait Allen and Cunneen's (1978), and waits beyond it fall exponentially. A decode worker's rows share it:
their number has the product form of processor sharing whose pace depends on their number (Cohen 1979). A worker that
does both computes prompts in what its steps leave beside their rows (Agrawal et al., Sarathi-Serve, OSDI 2024).
Simulation then shows how far this is from what schedulers do."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostroke.decode_worker.config import DecodeConfig
from twostroke.loadtests.capacity import SearchRange, find_capacity
from twostroke.planning.costs.drafted_steps import drafted_step
from twostroke.planning.costs.roofline import usd_per_million
from twostroke.planning.workload import SLOTargets, Workload
from twostroke.router.routing.chooser import PathConfig
from twostroke.worker.profile import WorkerProfile

HANDOVER_S = 0.002  # of a prompt's last piece of KV, the bytes aside
JOIN_STEPS = 1.5  # that a new row waits for: the one that runs, and mostly the one scheduled ahead
TPOT_SAFETY = DecodeConfig().tpot_safety  # of the promised time a token, that a step is planned to take
MIN_CHUNK = DecodeConfig().min_chunk_tokens  # prompt tokens of such a step, whatever time they take
LINK_SHARE = 0.9  # of a link's bytes, that KV may take before it waits for the link
LATE_SHARE = 0.05  # of all answers, that miss their promise for nothing but late KV: then the link binds
VARIANCE_SHARE = 2 / 3
"""Part of a batch's variance at one moment that is left in its mean over one answer's time. The batch of
M/D/infinity correlates by 1 - t / T, whose double integral over an answer is 2/3."""
FULL = 0.01  # of the time that a batch may be the largest
Floats = NDArray[np.float64]
_NORMAL = NormalDist()


@dataclass(frozen=True)
class ExpectedAttainment:
    """Shares of requests that are on time, and what limits them."""

    ttft: float
    tpot: float
    room: float  # chance that the KV cache has room for whoever comes
    batch: float = 0.0  # of a decode worker
    ttft_binds: str = "FLOPs"
    tpot_binds: str = "bandwidth"
    ttft_s: float = math.inf  # mean

    def attainment(self, promise: SLOTargets) -> float:
        """Return what is met of the promise's shares, the scarcest; the promise is kept from 1 on."""
        return min(self.ttft / promise.ttft_share, self.tpot / promise.tpot_share, self.room / promise.tpot_share)

    def binds(self, promise: SLOTargets) -> str:
        """Return what is scarcest: the promise that is nearest to being broken."""
        slack = {
            self.ttft_binds: self.ttft - promise.ttft_share,
            self.tpot_binds: self.tpot - promise.tpot_share,
            "KV memory": self.room - promise.tpot_share,
        }
        return min(slack, key=lambda name: (slack[name], name))


NONE_MET = ExpectedAttainment(0.0, 0.0, 0.0)


def erlang_c(servers: int, load: float) -> float:
    """The chance to wait at so many servers (Erlang 1917); `load` is how many are busy on average, below `servers`."""
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


@dataclass(frozen=True)
class WaitTime:
    """Time that requests wait for service."""

    chance: float
    mean_s: float  # of all, also of those that don't wait

    def share_within(self, seconds: Floats) -> float:
        """Fraction of requests that wait at most `seconds`."""
        if self.mean_s <= 0:
            return float((seconds >= 0).mean())
        late = self.chance * np.exp(-np.maximum(seconds, 0.0) * self.chance / self.mean_s)
        return float(np.where(seconds < 0, 0.0, 1.0 - late).mean())


def queue_wait(rate: float, servers: int, mean_s: float, square_s: float) -> WaitTime | None:
    """Return the wait at an M/G/n queue with the given mean and mean square of service; None where it grows without
    bound.

    W = C / (n / E[S] - rate) (1 + cv^2) / 2 (Allen and Cunneen 1978; exact for one server, Pollaczek 1930).
    """
    load = rate * mean_s
    if load >= servers:
        return None
    chance = erlang_c(servers, load)
    variation = square_s / (mean_s * mean_s)  # 1 + cv^2
    return WaitTime(chance, chance / (servers / mean_s - rate) * variation / 2)


def prefill_alone_s(profile: WorkerProfile, prompt: int) -> float:
    """A prompt's time at an idle prefill worker."""
    return profile.costs.prefill_s(prompt, 0, profile.step_tokens)


def _prefill_busy_s(profile: WorkerProfile, prompt: int) -> float:
    """Return the seconds that a prompt adds where others wait: steps are full and share the time of reading the
    weights."""
    steps = -(-prompt // profile.step_tokens)
    return prefill_alone_s(profile, prompt) - profile.costs.weights_s * (steps - prompt / profile.step_tokens)


def late_s(sender: WorkerProfile, prompt: int, rate_each: float, mean_prompt: float, copies: int = 1) -> float:
    """Return the seconds from the first token until the KV is at the decode worker; infinite where the link cannot
    carry it all.

    `copies` are the decode worker's. Layers travel while later ones are computed, so the delay is what the link is
    slower by, or the last layer.
    """
    token_s = copies * sender.kv_bytes / sender.link_bytes_per_s
    used = rate_each * mean_prompt * token_s
    if used >= LINK_SHARE:
        return math.inf
    whole_s = prompt * token_s / (1 - used)
    hidden_s = sender.costs.prompt_s(prompt)
    return HANDOVER_S + max(whole_s - hidden_s, whole_s / sender.num_layers)


def rows_s(profile: WorkerProfile, batch: float, context: float) -> float:
    """A decode step of so many rows."""
    costs = profile.costs
    return costs.reading_s(batch) + batch * (costs.row_s + context * costs.context_s)


@lru_cache(maxsize=64)
def _steps_s(profile: WorkerProfile, context: float) -> Floats:
    """Return the times of steps of 1, 2, ... rows, in seconds."""
    return np.array([rows_s(profile, rows, context) for rows in range(1, profile.max_batch + 1)])


@lru_cache(maxsize=64)
def _drafts(
    profile: WorkerProfile, context: float, pace_s: float, *, has_prompts: bool = False
) -> tuple[Floats, Floats]:
    """Return the seconds that drafts add to steps of 1, 2, ... rows, and the tokens of a request in such a step."""
    counts = range(1, profile.max_batch + 1)
    steps = [drafted_step(profile, rows, context, pace_s, has_prompts=has_prompts) for rows in counts]
    return np.array([one.drafted_s for one in steps]), np.array([one.tokens for one in steps])


@dataclass(frozen=True)
class BatchSizes:
    """Distribution of a decode worker's number of rows, as an arriving request sees it."""

    chances: Floats  # of 0, 1, 2, ...

    @cached_property
    def mean(self) -> float:
        return float(self.chances @ np.arange(len(self.chances)))

    @cached_property
    def variance(self) -> float:
        return float(self.chances @ np.arange(len(self.chances)) ** 2) - self.mean**2

    def batch_sum(self, mean: float, square: float) -> tuple[float, float]:
        """Mean and variance of what all rows have together, of whom each has `mean`, and of its square `square`."""
        return self.mean * mean, self.mean * (square - mean * mean) + self.variance * mean * mean


def batch_sizes(
    profile: WorkerProfile, workload: Workload, rate: float, pace_s: float = 0.0, share: float = 0.0
) -> BatchSizes | None:
    """Return the batch at `rate` requests a second; for `share` of the time steps have prompts, and take `pace_s` at
    least.

    Rows share a worker, and each gains a token per step, or more where drafts are accepted. The chance of n rows is
    that of n - 1 times rate * answer * step(n) / tokens of step(n) / n, however long answers are (Cohen, The multiple
    phase service network with generalized processor sharing, 1979). It is Poisson's where steps take the same time, and
    geometric where all of a step is the rows'. None where the batch is often `max_batch`.
    """
    steps_s = _steps_s(profile, workload.mean_context)
    added_s, tokens = _drafts(profile, workload.mean_context, pace_s)
    beside_s, tokens_beside = _drafts(profile, workload.mean_context, pace_s, has_prompts=True)
    ratios = (
        share * (np.maximum(pace_s, steps_s) + beside_s) / tokens_beside + (1 - share) * (steps_s + added_s) / tokens
    )
    ratios *= rate * workload.mean_answer / np.arange(1, len(steps_s) + 1)
    logarithms = np.concatenate(([0.0], np.cumsum(np.log(ratios))))
    weights = np.exp(logarithms - logarithms.max())
    chances = weights / weights.sum()
    return BatchSizes(chances) if chances[-1] < FULL else None


def _within(mean: float, variance: float, most: float) -> float:
    """The chance that a sum is at most so much: gamma's, by the cube root of Wilson and Hilferty (1931)."""
    if most <= 0 or mean <= 0:
        return float(most >= 0 and mean <= 0)
    ninth = variance / (9 * mean * mean)
    if ninth < 1e-12:
        return float(mean <= most)
    return _NORMAL.cdf(((most / mean) ** (1 / 3) - 1 + ninth) / math.sqrt(ninth))


def room_chance(profile: WorkerProfile, workload: Workload, batch: BatchSizes) -> float:
    """The chance that the cache holds all rows; requests as they are met in it."""
    return _within(*batch.batch_sum(*workload.held), profile.kv_tokens)


def _steps_within(
    profile: WorkerProfile, workload: Workload, batch: BatchSizes, limits_s: Sequence[float], pace_s: float
) -> float:
    """The share of answers over whose time the mean step, or its part for a token, takes no longer than its limit, one
    a stratum.

    A step reads weights, and its own row and context beside those of the others, as the answer met them (Wolff,
    Poisson arrivals see time averages, 1982).
    """
    costs = profile.costs
    of_row = costs.row_s + workload.mean_context * costs.context_s
    square = costs.row_s * (costs.row_s + 2 * workload.mean_context * costs.context_s)
    square += workload.context_square * costs.context_s**2
    mean, variance = batch.batch_sum(of_row, square)
    reading_s = costs.reading_s(batch.mean + 1)
    step = drafted_step(profile, batch.mean + 1, workload.mean_context, pace_s)
    part = step.token_s / step.plain_s
    mean, variance = part * mean, part * part * variance
    met = 0.0
    for (prompt, answer), limit_s in zip(workload.strata, limits_s, strict=True):
        own_s = costs.row_s + (prompt + answer / 2) * costs.context_s
        met += 1.0 if answer == 1 else _within(mean, VARIANCE_SHARE * variance, limit_s - part * (reading_s + own_s))
    return met / len(limits_s)


def _step_binds(profile: WorkerProfile, batch: float, context: float) -> str:
    """Return what a decode step spends most of its time on."""
    computing_s = batch * profile.costs.row_s
    return "FLOPs" if computing_s > rows_s(profile, batch, context) / 2 else "bandwidth"


def decode_attainment(
    profile: WorkerProfile, count: int, workload: Workload, promise: SLOTargets, rate: float, lates: list[float]
) -> ExpectedAttainment:
    """Decode workers that only write. `lates`: of each of the workload's strata, when its KV is there."""
    pace_s = promise.tpot_s * TPOT_SAFETY
    batch = batch_sizes(profile, workload, rate / count, pace_s)
    if batch is None:
        return replace(NONE_MET, ttft=1.0, tpot_binds=_step_binds(profile, profile.max_batch, workload.mean_context))
    step_s = rows_s(profile, batch.mean + 1, workload.mean_context)
    limits = [
        promise.tpot_s - (late_s + JOIN_STEPS * step_s) / max(1, answer - 1)
        for (_, answer), late_s in zip(workload.strata, lates, strict=True)
    ]
    met = _steps_within(profile, workload, batch, limits, pace_s)
    is_late = _steps_within(profile, workload, batch, [promise.tpot_s] * len(limits), pace_s) - met > LATE_SHARE
    binds = "link" if is_late else _step_binds(profile, batch.mean, workload.mean_context)
    return ExpectedAttainment(1.0, met, room_chance(profile, workload, batch), batch.mean, tpot_binds=binds)


@lru_cache(maxsize=64)
def _prefill_times_s(profile: WorkerProfile, strata: tuple[tuple[int, int], ...]) -> tuple[Floats, Floats, Floats]:
    """Return the seconds of each stratum's prompt: alone, where others wait, and beside rows, which read the weights
    anyway."""
    alone = np.array([prefill_alone_s(profile, prompt) for prompt, _ in strata])
    busy = np.array([_prefill_busy_s(profile, prompt) for prompt, _ in strata])
    return alone, busy, np.array([profile.costs.prompt_s(prompt) for prompt, _ in strata])


def prefill_attainment(
    profile: WorkerProfile, count: int, workload: Workload, promise: SLOTargets, rate: float
) -> ExpectedAttainment:
    """Prefill workers, of all of them together."""
    alone, times, _ = _prefill_times_s(profile, workload.strata)
    wait = queue_wait(rate, count, float(times.mean()), float((times**2).mean()))
    binds = "FLOPs" if profile.costs.prompt_s(int(workload.mean_prompt)) > profile.costs.weights_s else "bandwidth"
    if wait is None:
        return replace(NONE_MET, tpot=1.0, room=1.0, ttft_binds=binds)
    met = wait.share_within(promise.ttft_s - profile.overhead_s - alone)
    return ExpectedAttainment(
        met, 1.0, 1.0, ttft_binds=binds, ttft_s=profile.overhead_s + wait.mean_s + float(alone.mean())
    )


def idle_share(profile: WorkerProfile, count: int, workload: Workload, rate: float) -> float:
    """Return the part of their time that prefill workers have no prompt."""
    _, times, _ = _prefill_times_s(profile, workload.strata)
    return max(0.0, 1.0 - rate * float(times.mean()) / count)


@lru_cache(maxsize=64)
def _stretches(profile: WorkerProfile, context: float, pace_s: float, token_s: float) -> Floats:
    """Return by what factor a prompt is slower beside 1, 2, ... rows, where `token_s` is the time of one of its
    tokens."""
    beside_s = _steps_s(profile, context)
    longest_s = beside_s + np.maximum(1.0, profile.step_tokens - np.arange(1, len(beside_s) + 1)) * token_s
    steps_s = np.maximum(np.minimum(pace_s, longest_s), beside_s + MIN_CHUNK * token_s)
    return (steps_s + _drafts(profile, context, pace_s, has_prompts=True)[0]) / (steps_s - beside_s)


def mixed_attainment(
    profile: WorkerProfile, count: int, workload: Workload, promise: SLOTargets, rate: float, read_rate: float
) -> ExpectedAttainment:
    """Workers that write `rate` answers a second, all of them together, and read the prompts of `read_rate`.

    Beside n rows a step takes up to TPOT_SAFETY of the promise, and reads in what the rows leave of it.
    """
    costs, context, pace_s = profile.costs, workload.mean_context, promise.tpot_s * TPOT_SAFETY
    prompt = max(1, int(workload.mean_prompt))
    alone, _, beside = _prefill_times_s(profile, workload.strata)
    stretches = _stretches(profile, context, pace_s, costs.prompt_s(prompt) / prompt)
    busy = 0.0
    while True:  # it rises to the least fixed point
        batch = batch_sizes(profile, workload, rate / count, pace_s, busy)
        if batch is None:
            return replace(NONE_MET, ttft_binds="FLOPs", tpot_binds=_step_binds(profile, profile.max_batch, context))
        idle, with_rows = float(batch.chances[0]), batch.chances[1:]
        times = idle * alone + float(with_rows @ stretches) * beside
        new = min(1.0, read_rate / count * float(times.mean()))
        if abs(new - busy) < 1e-3:
            break
        busy = new
    squares = idle * alone**2 + float(with_rows @ stretches**2) * beside**2
    wait = queue_wait(read_rate, count, float(times.mean()), float(squares.mean()))
    beside_s = rows_s(profile, batch.mean, context)
    tpot_binds = _step_binds(profile, batch.mean, context)
    if wait is None:
        return replace(NONE_MET, ttft_binds="FLOPs", tpot_binds=tpot_binds)
    joined_s = (1 - idle) * beside_s / 2  # until the step that runs has ended
    return ExpectedAttainment(
        wait.share_within(promise.ttft_s - profile.overhead_s - times - joined_s),
        _steps_within(profile, workload, batch, [promise.tpot_s] * len(times), pace_s),
        room_chance(profile, workload, batch),
        batch.mean,
        ttft_binds="FLOPs" if costs.prompt_s(prompt) > beside_s else "bandwidth",
        tpot_binds=tpot_binds,
        ttft_s=profile.overhead_s + wait.mean_s + float(times.mean()) + joined_s,
    )


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
