"""Step budgets for schedulers under test."""

from twostroke.decode_worker.step_budget import StepBudget
from twostroke.protocol.stats import StepCosts


def step_budget(
    max_step_tokens: int = 512,
    costs: StepCosts | None = None,
    *,
    tpot_safety: float = 1.0,
    stall_factor: float = 2.0,
    min_chunk_tokens: int = 1,
) -> StepBudget:
    """Without costs only `max_step_tokens` counts, up to 64 tokens."""
    return StepBudget(max_step_tokens, lambda: costs, tpot_safety, stall_factor, min_chunk_tokens)
