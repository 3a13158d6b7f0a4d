"""What one decode worker can do, from what its steps cost. Formulas: docs/autoscaling.md."""

from dataclasses import dataclass

from twostroke.protocol.step_costs import LEAST_STRETCH, StepCosts

LEAST_SPARE = 0.05
"""Where nothing is promised a token, a step may take so much longer than an empty one: 1 / this, at most."""


@dataclass(frozen=True)
class DecodeCapacity:
    """How much one decode worker takes without breaking the promise; all its rows alike."""

    rows: float  # requests at once
    step_s: float  # with so many

    @property
    def tokens_per_s(self) -> float:
        """What it writes then."""
        return self.rows / self.step_s


def decode_capacity(
    costs: StepCosts, context: float, tpot_s: float | None, kv_tokens: float, max_batch: int, spare: float
) -> DecodeCapacity:
    """The most rows with `context` tokens each whose step keeps the promise and whose KV has room, less `spare`.

    Solving the fixed point t = base / (1 - (tokens/s) (row + context x context_s)) for the tokens/s at which t is what
    is promised gives the same. `kv_tokens` 0: nobody knows how much room there is.
    """
    row_s = max(1e-9, costs.row_s + context * costs.context_s)
    rows = min((longest_step_s(costs, tpot_s, spare) - costs.base_s) / row_s, float(max_batch))
    if kv_tokens > 0 and context > 0:
        rows = min(rows, kv_tokens * (1 - spare) / context)
    rows = max(1.0, rows)
    return DecodeCapacity(rows, costs.base_s + rows * row_s)


def longest_step_s(costs: StepCosts, tpot_s: float | None, spare: float) -> float:
    """What a step with rows may take."""
    if tpot_s is None:
        return costs.base_s / max(spare, LEAST_SPARE)
    return max(tpot_s * (1 - spare), costs.base_s * LEAST_STRETCH)  # an impossible promise is no reason for more
