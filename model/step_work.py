"""FLOPs and bytes of a model's steps, as linear functions of a step's content. No torch.

The coefficients come once from the model's operations (model/operations.py), so a worker adds up a few products a step.
They never count too much: of layers with windows no attention is counted, nor are norms and activations.
"""

from dataclasses import dataclass
from typing import Literal

from twostroke.model.config import ModelShape
from twostroke.model.operations import AS_BF16, Held, Kind, Operation, decode_operations, prefill_operations

_BEYOND_WINDOWS = 1 << 20
"""Tokens of context at which no window grows any more."""


@dataclass(frozen=True)
class StepWork:
    """FLOPs and bytes of weights and KV, of all ranks together. The parts of a step are those of StepContent."""

    token_flops: float  # of a prompt token
    pair_flops: float  # of a prompt token and a token that it attends to
    row_flops: float  # of a request that decodes, its logits included
    context_flops: float  # of a token in its context
    weight_bytes: float  # of any step, experts aside
    expert_bytes: float  # of a step that reads all experts
    expert_share: float  # of the experts, that a token takes; 0: there are none
    context_bytes: float  # of a cached token's KV

    def flops(self, prompt_tokens: int, pairs: float, rows: int, context_tokens: int) -> float:
        """Floating-point operations of a step; a multiplication and an addition are two."""
        return (
            prompt_tokens * self.token_flops
            + pairs * self.pair_flops
            + rows * self.row_flops
            + context_tokens * self.context_flops
        )

    def read_bytes(self, prompt_tokens: int, rows: int, context_tokens: int) -> float:
        """Bytes that a step reads of weights and cached KV, each of them once."""
        experts = 0.0
        if self.expert_bytes:
            experts = self.expert_bytes * (1.0 - (1.0 - self.expert_share) ** (prompt_tokens + rows))
        return self.weight_bytes + experts + context_tokens * self.context_bytes


def step_work(shape: ModelShape, held: Held = AS_BF16) -> StepWork:
    """The coefficients of a model whose numbers are held in so many bytes."""
    far = _BEYOND_WINDOWS
    token, nearer, further = (prefill_operations(shape, 1, before, held, is_last=False) for before in (0, far, far + 1))
    row, short, longer = (decode_operations(shape, 1, context, held) for context in (0, far, far + 1))
    all_weights = _sum(decode_operations(shape, far, 0, held), "weight_bytes")
    share, expert_bytes = shape.expert_share, 0.0
    if 0 < share < 1:  # one token reads its share of the experts
        expert_bytes = (all_weights - _sum(row, "weight_bytes")) / (1 - share)
    return StepWork(
        token_flops=_sum(token, "flops", "product"),
        pair_flops=_sum(further, "flops", "attention") - _sum(nearer, "flops", "attention"),
        row_flops=_sum(row, "flops", "product"),
        context_flops=_sum(longer, "flops", "attention") - _sum(short, "flops", "attention"),
        weight_bytes=all_weights - expert_bytes,
        expert_bytes=expert_bytes,
        expert_share=share,
        context_bytes=_sum(longer, "kv_bytes") - _sum(short, "kv_bytes"),
    )


def _sum(
    operations: list[Operation], what: Literal["flops", "weight_bytes", "kv_bytes"], kind: Kind | None = None
) -> float:
    return float(sum(getattr(one, what) for one in operations if kind in (None, one.kind)))
