"""How many workers of each role the load needs: now, and over the last `cooldown_s`."""

import math
from dataclasses import dataclass

import numpy as np

from cluster.autoscaling import replay
from cluster.autoscaling.capacity import DecodeCapacity, decode_capacity, prompt_work_s
from cluster.autoscaling.config import AutoscalingConfig
from cluster.autoscaling.history import History, Look
from cluster.autoscaling.signals import RoleSignals, Signals
from protocol.step_costs import StepCosts

RATE_WINDOWS_S = (5.0, 15.0, 60.0)
"""A rate is taken over each of them; a short one counts only as far as chance doesn't explain it."""
SURE = 2.0
"""Standard deviations by which a short window's rate must be above the rest to be believed."""
SETTLE_S = 15.0
"""Requests that decode are averaged over so long: the promise a token is about an answer's mean."""
UNPROMISED_TTFT = 5.0
"""Where no TTFT is promised, prompts may take so many times what they take alone."""


@dataclass(frozen=True)
class Need:
    """Of one role, in workers. `now` counts what arrives and waits, `lately` what the window would have needed."""

    now: int
    lately: int
    load: float  # workers' worth of work that arrives, without any spare
    from_backlog: bool = False  # without what waits, `now` would be less
    known: bool = True  # False: no step costs yet

    @property
    def workers(self) -> int:
        """What is needed to be on time."""
        return max(self.now, self.lately)


UNKNOWN = Need(0, 0, 0.0, known=False)


def prefill_need(
    signals: Signals, history: History, config: AutoscalingConfig, startup_s: float, margin: float = 1.0
) -> Need:
    """Of prefill workers; `margin` times the work that there is. UNKNOWN without step costs."""
    role = signals.prefill
    if role.costs is None:
        return UNKNOWN
    works = [margin * _work_s(role.costs, role.step_tokens, look) for look in history.looks]
    requests = history.requests
    mean_s = sum(works) / requests if requests else 0.0
    wait_s = config.slack * (UNPROMISED_TTFT * mean_s if signals.ttft_s is None else signals.ttft_s)
    load = sure_rate(history, works)
    # With no prefill worker, prompts wait at the decode workers.
    queued_tokens = role.queued_tokens + (0 if role.running else signals.decode.queued_tokens)
    waiting = margin * queued_tokens * _token_s(role.costs, role.step_tokens, history)
    left = max(0.0, waiting + (load - role.running) * startup_s)  # when a worker that is asked for now can help
    if waiting <= role.running * wait_s:
        left = 0.0  # in time as it is
    clear_s = max(wait_s, startup_s, 1e-3)
    busy = 1 - config.spare
    rate_only = _ceil(load / busy)
    spans, work, counts = (np.array(list(column)) for column in _columns(history, works))
    lately = replay.prefill_workers(
        spans, work, counts, wait_s, config.attainment, config.spare, max(1, config.prefill.max)
    )
    now = _ceil((load + left / clear_s) / busy)
    return Need(now, lately, load, from_backlog=now > rate_only)


def decode_need(
    signals: Signals, history: History, config: AutoscalingConfig, prefill_workers: int, margin: float = 1.0
) -> Need:
    """Of decode workers behind so many prefill workers. UNKNOWN without step costs."""
    role = signals.decode
    if role.costs is None:
        return UNKNOWN
    each = capacity_of(role, signals.tpot_s, history, config.spare)
    rows = margin * _mean([look.decoding for look in history.last(SETTLE_S)])
    held = _ceil(rows / each.rows)
    if role.running and role.total_tokens:
        room = role.total_tokens / role.running * (1 - config.spare)
        held = max(held, _ceil(margin * role.owned_tokens / room))
    output = history.mean_output
    if output is None:
        return Need(held, held, 0.0, from_backlog=True)
    starts_per_s = sure_rate(history, [margin * look.requests for look in history.looks])
    load = starts_per_s * output / each.tokens_per_s
    spans, works, counts = (
        np.array(list(column)) for column in _columns(history, _prefill_works(signals, history, margin))
    )
    starts = margin * replay.departures(spans, works, counts, prefill_workers)
    at_once = replay.rows_at_once(spans, starts, output * each.step_s)
    lately = replay.decode_workers(starts, at_once, each.rows, config.attainment, config.decode.max)
    arriving = _ceil(load)
    return Need(max(arriving, held), lately, load, from_backlog=held > arriving)


def capacity_of(role: RoleSignals, tpot_s: float | None, history: History, spare: float) -> DecodeCapacity:
    """Of one decode worker, for requests as long as those of the window. Needs the role's step costs."""
    if role.costs is None:
        raise ValueError("nobody knows yet how long this role's steps take")
    kv_tokens = role.total_tokens / role.running if role.running else 0.0
    return decode_capacity(role.costs, _mean_context(role, history), tpot_s, kv_tokens, role.max_batch, spare)


def sure_rate(history: History, amounts: list[float]) -> float:
    """What comes a second, of amounts per look: the most that a window shows beyond chance.

    Chance is what the looks themselves vary by (their index of dispersion), so steady arrivals are believed within a
    few seconds, and bursts are left to the replay of the window, which knows how often they come.
    """
    looks = history.looks
    whole_s = sum(look.span_s for look in looks)
    if whole_s <= 0:
        return 0.0
    rate = sum(amounts) / whole_s
    if rate <= 0:
        return 0.0
    variance = sum((one - rate * look.span_s) ** 2 for one, look in zip(amounts, looks, strict=True)) / whole_s
    best = 0.0
    for window_s in RATE_WINDOWS_S:
        count = len(history.last(window_s))
        span_s = sum(look.span_s for look in looks[-count:])
        seen = sum(amounts[-count:]) / span_s if span_s > 0 else 0.0
        chance = SURE * math.sqrt(variance / span_s) if span_s < min(whole_s, RATE_WINDOWS_S[-1]) else 0.0
        best = max(best, seen - chance)
    return best


def _work_s(costs: StepCosts, step_tokens: int, look: Look) -> float:
    pairs = look.pairs
    if pairs <= 0 and look.requests > 0:  # a router that counts no pairs: as if all prompts of the look were alike
        each = look.new_tokens / look.requests
        pairs = look.new_tokens * ((look.prompt_tokens - look.new_tokens) / look.requests + each / 2)
    return prompt_work_s(costs, step_tokens, look.requests, look.new_tokens, pairs)


def _token_s(costs: StepCosts, step_tokens: int, history: History) -> float:
    """A waiting prompt token's time, with attention as it was of late."""
    tokens = sum(look.new_tokens for look in history.looks)
    if tokens <= 0:
        return costs.token_s + costs.base_s / step_tokens
    return sum(_work_s(costs, step_tokens, look) for look in history.looks) / tokens


def _prefill_works(signals: Signals, history: History, margin: float) -> list[float]:
    costs = signals.prefill.costs
    if costs is None:
        return [0.0] * len(history.looks)
    return [margin * _work_s(costs, signals.prefill.step_tokens, look) for look in history.looks]


def _mean_context(role: RoleSignals, history: History) -> float:
    """A row's tokens, in the middle of its answer, long answers counting for as long as they last."""
    requests = history.requests
    if not requests:
        return role.context_tokens / role.num_decoding if role.num_decoding else 0.0
    return sum(look.prompt_tokens for look in history.looks) / requests + (history.mean_output or 0.0)


def _columns(history: History, works: list[float]) -> tuple[list[float], list[float], list[float]]:
    return [look.span_s for look in history.looks], works, [look.requests for look in history.looks]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _ceil(workers: float) -> int:
    return math.ceil(workers - 1e-9)
