"""The number of workers that the load needs, now and over the last `cooldown_s`, computed from step costs.

Demand is counted where requests arrive, not where they end. The arrivals of the last `cooldown_s` are replayed by
sample through fewer workers as a fluid. Samples are about a second wide, so bursts are visible. Work is in seconds of
one worker. Formulas: docs/design/autoscaling.md.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from twostroke.cluster.autoscaling.samples import Arrived, RoleSignals, Signals
from twostroke.cluster.config.autoscaling import AutoscalingConfig
from twostroke.protocol.stats import MIN_STRETCH, StepCosts

Series = NDArray[np.float64]

MAX_LOOKS = 600
"""The window has no more samples than this; they are at least a second wide."""


class DemandSample(NamedTuple):
    """Arrivals between two moments, and the queue at the second of them."""

    at_s: float
    span_s: float
    decoding: float  # requests at decode workers, waiting ones included
    arrived: Arrived


@dataclass(frozen=True)
class Window:
    """The samples as columns, oldest first."""

    at_s: Series
    span_s: Series
    requests: Series
    prompt_tokens: Series
    new_tokens: Series  # of the prompt tokens, those in no prefix cache
    pairs: Series  # of new tokens with those before them: attention's part of the prompts' time
    decoding: Series  # requests at decode workers, waiting ones included
    mean_output: float | None  # tokens of an answer; None: none has ever ended

    def times(self, factor: float) -> "Window":
        """Return the window with this many times the requests."""
        of_load = ("requests", "prompt_tokens", "new_tokens", "pairs", "decoding")
        return replace(self, **{name: factor * getattr(self, name) for name in of_load})

    def count_of_last(self, span_s: float) -> int:
        """Return how many samples lie within the last `span_s`; at least one, if there is any."""
        if not len(self.at_s):
            return 0
        return max(1, int(len(self.at_s) - np.searchsorted(self.at_s, self.at_s[-1] - span_s, side="right")))


@dataclass(frozen=True)
class History:
    """The samples of one window, oldest first, and the counters at the last one."""

    samples: tuple[DemandSample, ...] = ()
    total: Arrived | None = None
    began_s: float = 0.0
    at_s: float = 0.0
    mean_output: float | None = None  # of the last answers known before the window

    def updated(self, signals: Signals, window_s: float) -> "History":
        """This history and what has come since. Signals out of order change nothing."""
        if self.total is None:
            return History(total=signals.arrived, began_s=signals.at_s, at_s=signals.at_s)
        if signals.at_s <= self.at_s:
            return self
        decoding = float(signals.decode.num_decoding + signals.decode.queued_requests)
        sample = DemandSample(signals.at_s, signals.at_s - self.at_s, decoding, signals.arrived.since(self.total))
        samples = self.samples
        if samples and samples[-1].span_s + sample.span_s <= max(1.0, window_s / MAX_LOOKS):
            sample = sample._replace(
                span_s=samples[-1].span_s + sample.span_s, arrived=samples[-1].arrived.plus(sample.arrived)
            )
            samples = samples[:-1]
        first = 0
        mean = self.mean_output
        while first < len(samples) and samples[first].at_s <= signals.at_s - window_s:
            left = samples[first].arrived
            mean = left.output_tokens / left.ended if left.ended else mean
            first += 1
        return replace(
            self, samples=(*samples[first:], sample), total=signals.arrived, at_s=signals.at_s, mean_output=mean
        )

    def window(self) -> Window:
        """Return the samples as columns."""
        rows = [(sample.at_s, sample.span_s, sample.decoding, *sample.arrived) for sample in self.samples]
        columns = np.array(rows, dtype=np.float64).reshape(-1, 3 + len(Arrived._fields)).T
        at_s, span_s, decoding, requests, prompt_tokens, cached_tokens, pairs, output_tokens, ended = columns
        return Window(
            at_s=at_s,
            span_s=span_s,
            requests=requests,
            prompt_tokens=prompt_tokens,
            new_tokens=np.maximum(prompt_tokens - cached_tokens, 0.0),
            pairs=pairs,
            decoding=decoding,
            mean_output=float(output_tokens.sum() / ended.sum()) if ended.any() else self.mean_output,
        )


def backlogs(spans: Series, work: Series, workers: float) -> Series:
    """Work that is left at the end of each sample when so many workers do what they can (Lindley's recursion)."""
    drift: Series = np.cumsum(work - workers * spans)
    return drift - np.minimum.accumulate(np.minimum(drift, 0.0))


def prefill_workers(spans: Series, work: Series, requests: Series, wait_s: float, attainment: float, most: int) -> int:
    """The fewest, up to `most`, that let `attainment` of the requests wait at most `wait_s`."""
    total = requests.sum()
    if total <= 0:
        return 0
    fewest = max(1, int(np.ceil(work.sum() / max(spans.sum(), 1e-9))))
    for workers in range(fewest, most):
        waits = backlogs(spans, work, workers) / workers
        if requests[waits <= wait_s].sum() >= attainment * total:
            return workers
    return most


def departures(spans: Series, work: Series, requests: Series, workers: float) -> Series:
    """Requests whose prompts end in each sample: a burst reaches the decode workers as slowly as it is prefilled."""
    total_work = work.sum()
    if total_work <= 0 or workers <= 0:
        return requests
    arrived = np.concatenate([[0.0], np.cumsum(work)])
    counted = np.concatenate([[0.0], np.cumsum(requests)])
    done = np.concatenate([[0.0], arrived[1:] - backlogs(spans, work, workers)])
    left: Series = np.diff(np.interp(done, arrived, counted))  # prompts leave in the order in which they came
    return left


def rows_at_once(spans: Series, starts: Series, stay_s: float) -> Series:
    """Requests that decode at the end of each sample when each stays for `stay_s`."""
    times = np.concatenate([[0.0], np.cumsum(spans)])
    begun = np.concatenate([[0.0], np.cumsum(starts)])
    stay_s = max(stay_s, 1e-3)
    longest = np.minimum(stay_s, np.maximum(times[1:], 1e-9))
    if stay_s >= spans.min(initial=np.inf):
        at_once: Series = begun[1:] - np.interp(times[1:] - longest, times, begun)
        return at_once
    return starts / spans * stay_s  # shorter than a sample: its mean


def decode_workers(starts: Series, rows: Series, rows_each: float, attainment: float, most: int) -> int:
    """The fewest, up to `most`, that have room for all rows when `attainment` of the requests start."""
    total = starts.sum()
    if total <= 0:
        return 0
    order = np.argsort(rows)
    share = np.cumsum(starts[order]) / total
    enough = rows[order][min(int(np.searchsorted(share, attainment - 1e-9)), len(rows) - 1)]
    return int(min(most, max(1, np.ceil(enough / rows_each - 1e-9))))


MIN_SPARE = 0.05
"""Smallest `spare` of the bound on a step without a TPOT promise, which is 1 / spare of an empty step's time."""


@dataclass(frozen=True)
class DecodeCapacity:
    """Capacity of one decode worker within the promise, with all its rows alike."""

    rows: float  # requests at once
    step_s: float  # with so many

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second that the worker generates at capacity."""
        return self.rows / self.step_s


def decode_capacity(
    costs: StepCosts, context: float, tpot_s: float | None, kv_tokens: float, max_batch: int, spare: float
) -> DecodeCapacity:
    """The most rows with `context` tokens each whose step keeps the promise and whose KV has room, less `spare`.

    Solving the fixed point t = base / (1 - (tokens/s) (row + context x context_s)) for the tokens/s at which t is what
    is promised gives the same. `kv_tokens` 0: nobody knows how much room there is.
    """
    row_s = max(1e-9, costs.row_s + context * costs.context_s)
    rows = rows_within(costs, longest_step_s(costs, tpot_s, spare), row_s, float(max_batch))
    if kv_tokens > 0 and context > 0:
        rows = min(rows, kv_tokens * (1 - spare) / context)
    rows = max(1.0, rows)
    return DecodeCapacity(rows, costs.reading_s(rows) + rows * row_s)


def rows_within(costs: StepCosts, step_s: float, row_s: float, most: float) -> float:
    """Return how many rows, up to `most`, fit in a step of `step_s` seconds, with the experts that they read."""
    low, high = (step_s - costs.weights_s) / row_s, (step_s - costs.base_s) / row_s  # all read, and none
    while high - low > 1e-6 * high and low < most:
        middle = (low + high) / 2
        if costs.reading_s(max(0.0, middle)) + middle * row_s > step_s:
            high = middle
        else:
            low = middle
    return min(high, most)


def longest_step_s(costs: StepCosts, tpot_s: float | None, spare: float) -> float:
    """Return the longest time that a step with rows may take, in seconds."""
    if tpot_s is None:
        return costs.weights_s / max(spare, MIN_SPARE)
    # An impossible promise is no reason for more.
    return max(tpot_s * (1 - spare), costs.reading_s(1) * MIN_STRETCH)


RATE_S = 60.0
"""A rate of late is taken over so long, and over what a worker takes to start, if that is less."""
SHORTEST_RATE_S = 5.0
SURE = 2.0
"""Standard deviations by which a rate of late must be above the rest to be believed."""
SETTLE_S = 15.0
"""Requests that decode are averaged over so long: the promise a token is about an answer's mean."""
UNPROMISED_TTFT = 5.0
"""Assumed TTFT without a promise, as a multiple of a prompt's own time."""


@dataclass(frozen=True)
class RoleDemand:
    """Number of workers that a role needs. `now` counts what arrives and waits; `lately` is what the window would have
    needed."""

    now: int
    lately: int
    load: float  # workers' worth of work that arrives, without any spare
    from_backlog: bool = False  # without what waits, `now` would be less
    known: bool = True  # False: no step costs yet

    @property
    def workers(self) -> int:
        """Return the number of workers that is needed to be on time."""
        return max(self.now, self.lately)


UNKNOWN = RoleDemand(0, 0, 0.0, known=False)
NONE = RoleDemand(0, 0, 0.0)


def prompt_work_s(costs: StepCosts, step_tokens: int, window: Window) -> Series:
    """Seconds of one prefill worker that each sample's prompts take, each prompt in steps of its own."""
    tokens, requests = window.new_tokens, window.requests
    if window.pairs.any():
        pairs = window.pairs
    else:  # the routers count none: as if all prompts of a sample were alike
        pairs = tokens * (window.prompt_tokens - tokens / 2) / np.maximum(requests, 1.0)
    steps = np.where(tokens > 0, np.maximum(requests, tokens / step_tokens), 0.0)
    work: Series = steps * costs.weights_s + tokens * costs.token_s + pairs * costs.pair_s
    return work


@dataclass(frozen=True)
class RoleWork:
    """Work of one role in seconds of a worker per sample, and its waiting part."""

    all: Series
    prompts: Series  # of `all`: what a prompt's wait is made of
    queued_tokens: int  # of prompts


def prefill_demand(signals: Signals, window: Window, config: AutoscalingConfig, startup_s: float) -> RoleDemand:
    """Return the demand for prefill workers. It is UNKNOWN without step costs."""
    role = signals.prefill
    if role.costs is None:
        return UNKNOWN
    prompts = prompt_work_s(role.costs, role.step_tokens, window)
    # With no prefill worker, prompts wait at the decode workers.
    queued_tokens = role.queued_tokens + (0 if role.running else signals.decode.queued_tokens)
    work = RoleWork(prompts, prompts, queued_tokens)
    return prompt_demand(role, work, signals.ttft_s, window, config, config.prefill.max, startup_s)


def prompt_demand(
    role: RoleSignals,
    work: RoleWork,
    ttft_s: float | None,
    window: Window,
    config: AutoscalingConfig,
    most: int,
    startup_s: float,
) -> RoleDemand:
    """Return the demand for workers that compute prompts, alone or beside decodes."""
    requests = float(window.requests.sum())
    mean_s = float(work.prompts.sum()) / requests if requests else 0.0
    if ttft_s is None:
        ttft_s = UNPROMISED_TTFT * mean_s
    wait_s = _wait_s(config, ttft_s, mean_s)
    lately = prefill_workers(window.span_s, work.all, window.requests, wait_s, config.attainment, most)
    load = sure_rate(window, work.all, startup_s)
    waiting_s = work.queued_tokens * _token_s(role, work.prompts, window)
    other_load = float((work.all - work.prompts).sum()) / max(float(window.span_s.sum()), 1e-9)
    in_time_s = max(0.0, role.running - other_load) * config.slack * ttft_s
    # What will wait too long when a worker that is asked for now can help.
    backlog = max(0.0, waiting_s - in_time_s + (load - role.running) * startup_s) if waiting_s > in_time_s else 0.0
    clear_s = max(config.slack * ttft_s, startup_s, SHORTEST_RATE_S)
    busy = 1 - config.spare
    now = _ceil((load + backlog / clear_s) / busy)
    return RoleDemand(now, lately, load, from_backlog=now > _ceil(load / busy))


def decode_demand(
    signals: Signals,
    window: Window,
    config: AutoscalingConfig,
    startup_s: float,
    prefill_workers: int,
) -> RoleDemand:
    """Return the demand for decode workers behind this many prefill workers. It is UNKNOWN without step costs."""
    role = signals.decode
    if role.costs is None:
        return UNKNOWN
    each = worker_capacity(role, signals.tpot_s, window, config.spare)
    needed_now = workers_held(role, window, each, config.spare)
    if window.mean_output is None:
        return RoleDemand(needed_now, needed_now, 0.0, from_backlog=True)
    load = sure_rate(window, window.requests, startup_s) * window.mean_output / each.tokens_per_s
    starts = window.requests
    if signals.prefill.costs is not None:
        work = prompt_work_s(signals.prefill.costs, signals.prefill.step_tokens, window)
        starts = departures(window.span_s, work, starts, prefill_workers)
    at_once = rows_at_once(window.span_s, starts, window.mean_output * each.step_s)
    lately = decode_workers(starts, at_once, each.rows, config.attainment, config.decode.max)
    return RoleDemand(max(_ceil(load), needed_now), lately, load, from_backlog=needed_now > _ceil(load))


def aggregated_demand(signals: Signals, window: Window, config: AutoscalingConfig, startup_s: float) -> RoleDemand:
    """Return the demand for aggregated workers. It is UNKNOWN without step costs.

    Their steps take as long as the TPOT promise allows, and the part that rows leave is for prompts. The work of both
    adds up in seconds of a worker, and a prompt waits for answers as well as for earlier prompts.
    """
    role = signals.decode
    if role.costs is None:
        return UNKNOWN
    each = worker_capacity(role, signals.tpot_s, window, config.spare)
    # A single row may take longer than is promised, and a step without a constant has no longest of its own. Prompts
    # have all experts read, whatever is promised.
    longest_s = longest_step_s(role.costs, signals.tpot_s, config.spare)
    if role.costs.experts_s:
        longest_s = max(longest_s, MIN_STRETCH * role.costs.weights_s)
    pace_s = max(longest_s, each.step_s)
    rows = rows_at_once(window.span_s, window.requests, (window.mean_output or 0.0) * pace_s)
    prompts = prompt_work_s(role.costs, role.step_tokens, window)
    work = _work_s(role, role.costs, prompts, rows, pace_s, window)
    todo = RoleWork(work, prompts, role.queued_tokens)
    need = prompt_demand(role, todo, signals.ttft_s, window, config, config.decode.max, startup_s)
    room = decode_workers(window.requests, rows, each.rows, config.attainment, config.decode.max)
    needed_now = workers_held(role, window, each, config.spare)
    return replace(
        need,
        now=max(need.now, needed_now),
        lately=max(need.lately, room),
        from_backlog=need.from_backlog or needed_now > need.now,
    )


def _work_s(
    role: RoleSignals, costs: StepCosts, prompts: Series, rows: Series, pace_s: float, window: Window
) -> Series:
    """Seconds of a worker by sample. A step's constant is paid by whoever needs more steps: chunks of prompts, or rows.

    Rows need a step every `pace_s`, in every worker, so what is left for all other work is less by that share.
    """
    answers = rows * window.span_s / pace_s * (costs.row_s + mean_context(role, window) * costs.context_s)
    in_others_steps = prompt_work_s(msgspec.structs.replace(costs, base_s=0.0, experts_s=0.0), role.step_tokens, window)
    work: Series = np.maximum(prompts + answers, (in_others_steps + answers) / (1 - costs.weights_s / pace_s))
    return work


def workers_held(role: RoleSignals, window: Window, each: DecodeCapacity, spare: float) -> int:
    """Decode workers that have a place and KV for all requests that decode, or wait to."""
    count = window.count_of_last(SETTLE_S)
    needed_now = _ceil(float(window.decoding[-count:].mean()) / each.rows) if count else 0
    if role.running and role.total_tokens:
        room = role.total_tokens / role.running * (1 - spare)
        needed_now = max(needed_now, _ceil(role.owned_tokens / room))
    return needed_now


def worker_capacity(role: RoleSignals, tpot_s: float | None, window: Window, spare: float) -> DecodeCapacity:
    """Return one decode worker's capacity for the window's requests. Raises ValueError without step costs."""
    if role.costs is None:
        raise ValueError("nobody knows yet how long this role's steps take")
    kv_tokens = role.total_tokens / role.running if role.running else 0.0
    return decode_capacity(role.costs, mean_context(role, window), tpot_s, kv_tokens, role.max_batch, spare)


def sure_rate(window: Window, amounts: Series, startup_s: float) -> float:
    """Return a rate per second from amounts per sample: the window's mean, or the recent rate as far as chance does
    not explain it.

    Recent is the last minute, or a worker's start-up time if that is longer: a burst that ends before a worker could
    help asks for nothing here and is left to the replay. Chance is the difference between successive samples, which a
    lasting change of the load does not raise.
    """
    whole_s = float(window.span_s.sum())
    if whole_s <= 0:
        return 0.0
    rates = amounts / window.span_s
    variance = float((np.diff(rates) ** 2).mean()) / 2 if len(rates) > 1 else 0.0
    best = float(amounts.sum()) / whole_s
    for of_late_s in (min(RATE_S, max(SHORTEST_RATE_S, startup_s)), RATE_S):
        count = window.count_of_last(of_late_s)
        rate = float(amounts[-count:].sum() / window.span_s[-count:].sum())
        best = max(best, rate - SURE * math.sqrt(variance / count))
    return best


def _wait_s(config: AutoscalingConfig, ttft_s: float, mean_s: float) -> float:
    """Return how long a prompt of mean length may wait, in seconds; a part of the promise where promises are hardly
    longer than prompts."""
    return max(config.slack * ttft_s, ttft_s - mean_s)


def _token_s(role: RoleSignals, work: Series, window: Window) -> float:
    """A waiting prompt token's time, with attention as it was of late."""
    tokens = float(window.new_tokens.sum())
    if tokens > 0:
        return float(work.sum()) / tokens
    return role.costs.token_s + role.costs.weights_s / role.step_tokens if role.costs else 0.0


def mean_context(role: RoleSignals, window: Window) -> float:
    """A row's tokens: its prompt and, since long answers are there for longer, not half but all of a mean answer."""
    requests = float(window.requests.sum())
    if not requests:
        return role.context_tokens / role.num_decoding if role.num_decoding else 0.0
    return float(window.prompt_tokens.sum()) / requests + (window.mean_output or 0.0)


def _ceil(workers: float) -> int:
    return math.ceil(workers - 1e-9)
