"""The joint policy of prefill and decode workers: a look at the system and what it remembers in, a decision out.

The same code decides in the simulation (`tests/simulation/autoscaling`) and live (`serve_policy.py`). Nothing here does
I/O, reads a clock or knows Ray.
"""

import math
from dataclasses import dataclass, field, replace

from twostroke.cluster.autoscaling import separate
from twostroke.cluster.autoscaling.aggregated import aggregated_need
from twostroke.cluster.autoscaling.budget import Claim, share
from twostroke.cluster.autoscaling.changes import Needs, RoleMemory, Wish, wish
from twostroke.cluster.autoscaling.config import AutoscalingConfig
from twostroke.cluster.autoscaling.demand import NONE, SETTLE_S, Need, decode_need, prefill_need
from twostroke.cluster.autoscaling.history import History, Window
from twostroke.cluster.autoscaling.reasons import Reason
from twostroke.cluster.autoscaling.signals import Decision, Signals

MARGIN = 1.05
"""A role shrinks only to what would serve so many times the load."""


@dataclass(frozen=True)
class Memory:
    """What the policy remembers between decisions; begins empty."""

    history: History = field(default_factory=History)
    decided_s: float | None = None
    prefill: RoleMemory = field(default_factory=RoleMemory)
    decode: RoleMemory = field(default_factory=RoleMemory)


def decide(signals: Signals, memory: Memory, config: AutoscalingConfig) -> tuple[Decision, Memory]:
    """How many workers each role is to have now.

    May be called as often as one likes, best about once a second: what arrives is then known by the second. A new
    decision is made every `interval_s`; in between the targets stay.
    """
    now_s = signals.at_s
    memory = replace(
        memory,
        history=memory.history.seen(signals, config.cooldown_s),
        prefill=memory.prefill.seen(signals.prefill, now_s),
        decode=memory.decode.seen(signals.decode, now_s),
    )
    if memory.decided_s is not None and 0 <= now_s - memory.decided_s < config.interval_s - 1e-6:
        held = Decision(signals.prefill.target, signals.decode.target, Reason.BETWEEN, Reason.BETWEEN)
        return held, memory
    decision = _decision(_with_known_costs(signals, memory), memory, config)
    return decision, replace(
        memory,
        decided_s=now_s,
        prefill=memory.prefill.changed(signals.prefill.target, decision.prefill, now_s),
        decode=memory.decode.changed(signals.decode.target, decision.decode, now_s),
    )


def _with_known_costs(signals: Signals, memory: Memory) -> Signals:
    """Costs that no worker tells now are those last told; with no prefill worker ever, those of the decode workers."""
    decode = signals.decode.costs or memory.decode.costs
    prefill = signals.prefill.costs or memory.prefill.costs or (None if signals.prefill.running else decode)
    return replace(
        signals, prefill=replace(signals.prefill, costs=prefill), decode=replace(signals.decode, costs=decode)
    )


def _decision(signals: Signals, memory: Memory, config: AutoscalingConfig) -> Decision:
    window = memory.history.window()
    idle = _idle(signals, memory.history, config)
    if config.policy == "separate":
        need = separate.needs(window, config)
        prefill, decode = (Needs(one, one, idle) for one in need)
    else:
        prefill, decode = _joint_needs(signals, window, memory, config, idle)
    p = wish(signals.prefill, prefill, config.prefill, memory.prefill, config, signals.at_s)
    d = wish(signals.decode, decode, config.decode, memory.decode, config, signals.at_s)
    claims = (
        Claim(signals.prefill.target, _needed(prefill.need, p), p.workers, config.prefill, signals.prefill.gpus_each),
        Claim(signals.decode.target, _needed(decode.need, d), d.workers, config.decode, signals.decode.gpus_each),
    )
    counts = share(*claims, config.budget)
    gave = (counts[0] < min(p.workers, claims[0].has), counts[1] < min(d.workers, claims[1].has))
    reasons = (_reason(p, claims[0].has, counts[0], gave[1]), _reason(d, claims[1].has, counts[1], gave[0]))
    return Decision(*counts, *reasons, demand=_numbers(signals, window, memory, prefill, decode))


def _joint_needs(
    signals: Signals, window: Window, memory: Memory, config: AutoscalingConfig, idle: bool
) -> tuple[Needs, Needs]:
    """Decode workers see arrivals as prefill workers let them through, so prefill is planned first."""
    if config.prefill.max == 0:
        need, more = (
            aggregated_need(signals, window, config, memory.decode.startup_s, margin) for margin in (1.0, MARGIN)
        )
        return Needs(NONE, NONE, idle), Needs(need, more, idle)
    found = []
    for margin in (1.0, MARGIN):
        p = prefill_need(signals, window, config, memory.prefill.startup_s, margin)
        workers = max(signals.prefill.target, min(p.workers, config.prefill.max))
        d = decode_need(signals, window, config, memory.decode.startup_s, workers, margin)
        if config.prefill.min == 0 and p.known and p.load <= config.spare * max(1, d.workers):
            p = replace(p, now=0, lately=0)  # so little that decode workers read it in the time they have to spare
        found.append((p, d))
    (p, d), (more_p, more_d) = found
    return Needs(p, more_p, idle), Needs(d, more_d, idle)


def _idle(signals: Signals, history: History, config: AutoscalingConfig) -> bool:
    there = (signals.prefill, signals.decode)
    busy = any(role.num_decoding or role.queued_requests or role.queued_tokens for role in there)
    return (
        not busy
        and not any(look.requests for look in history.looks)
        and signals.at_s - history.began_s >= config.cooldown_s
    )


def _needed(need: Need, wished: Wish) -> int:
    """What a role's share of the budget goes by: its need, or what it wishes where that is not known."""
    return need.workers if need.known else wished.workers


def _reason(wished: Wish, has: int, gets: int, other_gave: bool) -> Reason:
    if gets == wished.workers:
        return Reason.TAKEN if other_gave and gets > has else wished.reason
    if gets < has:
        return Reason.GIVEN if has <= wished.workers or wished.reason is not Reason.ABOVE_MAX else Reason.ABOVE_MAX
    if gets > has:
        return Reason.TAKEN if other_gave else wished.reason
    return Reason.BUDGET


def _numbers(signals: Signals, window: Window, memory: Memory, prefill: Needs, decode: Needs) -> dict[str, float]:
    count = window.count_of_last(SETTLE_S)
    span_s = float(window.span_s[-count:].sum()) or math.inf
    prompts_at = signals.prefill if signals.prefill.running else signals.decode
    return {
        "requests_per_s": float(window.requests[-count:].sum()) / span_s,
        "prompt_tokens_per_s": float(window.new_tokens[-count:].sum()) / span_s,
        "queued_tokens": float(prompts_at.queued_tokens),
        "output_tokens_per_request": window.mean_output or 0.0,
        "prefill_load": prefill.need.load,
        "prefill_now": float(prefill.need.now),
        "prefill_lately": float(prefill.need.lately),
        "prefill_startup_s": memory.prefill.startup_s,
        "decode_load": decode.need.load,
        "decode_now": float(decode.need.now),
        "decode_lately": float(decode.need.lately),
        "decode_startup_s": memory.decode.startup_s,
    }
