"""How many workers an aggregated server needs, where decode workers read the prompts themselves.

A worker that writes answers takes as long for a step as their promise allows; of this, what its rows leave is for
prompts (`decode_worker/step_budget.py`). So the work of both adds up, in seconds of a worker, and a prompt waits for
answers as well as for the prompts before it.
"""

from dataclasses import replace

import msgspec
import numpy as np

from twostroke.cluster.autoscaling import replay
from twostroke.cluster.autoscaling.capacity import longest_step_s
from twostroke.cluster.autoscaling.config import AutoscalingConfig
from twostroke.cluster.autoscaling.demand import (
    UNKNOWN,
    Need,
    Work,
    capacity_of,
    mean_context,
    need_of,
    prompt_work_s,
    workers_held,
)
from twostroke.cluster.autoscaling.history import Series, Window
from twostroke.cluster.autoscaling.signals import RoleSignals, Signals
from twostroke.protocol.step_costs import StepCosts


def aggregated_need(
    signals: Signals, window: Window, config: AutoscalingConfig, startup_s: float, margin: float = 1.0
) -> Need:
    """Of decode workers; `margin` times the work that there is. UNKNOWN without step costs."""
    role = signals.decode
    if role.costs is None:
        return UNKNOWN
    each = capacity_of(role, signals.tpot_s, window, config.spare)
    # A single row may take longer than is promised, and a step without a constant has no longest of its own.
    pace_s = max(longest_step_s(role.costs, signals.tpot_s, config.spare), each.step_s)
    starts = margin * window.requests
    rows = replay.rows_at_once(window.span_s, starts, (window.mean_output or 0.0) * pace_s)
    prompts = margin * prompt_work_s(role.costs, role.step_tokens, window)
    work = _work_s(role, role.costs, prompts, rows, pace_s, window, margin)
    need = need_of(
        role,
        Work(work, prompts, role.queued_tokens),
        signals.ttft_s,
        window,
        config,
        config.decode.max,
        startup_s,
        margin,
    )
    room = replay.decode_workers(starts, rows, each.rows, config.attainment, config.decode.max)
    held = workers_held(role, window, each, config.spare, margin)
    return replace(
        need,
        now=max(need.now, held),
        lately=max(need.lately, room),
        from_backlog=need.from_backlog or held > need.now,
    )


def _work_s(
    role: RoleSignals, costs: StepCosts, prompts: Series, rows: Series, pace_s: float, window: Window, margin: float
) -> Series:
    """Seconds of a worker by look. A step's constant is paid by whoever needs more steps: chunks of prompts, or rows.

    Rows need a step every `pace_s`, in every worker, so what is left for all other work is less by that share.
    """
    answers = rows * window.span_s / pace_s * (costs.row_s + mean_context(role, window) * costs.context_s)
    in_others_steps = margin * prompt_work_s(msgspec.structs.replace(costs, base_s=0.0), role.step_tokens, window)
    work: Series = np.maximum(prompts + answers, (in_others_steps + answers) / (1 - costs.base_s / pace_s))
    return work
