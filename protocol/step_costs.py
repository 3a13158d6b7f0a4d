"""How long an engine step takes, as a function of what is in it: workers fit it, routers and schedulers ask it.

The form is that of the rooflines of prefill and decode: a constant (weights are read once a step), the products of
prompt tokens, attention over pairs of a prompt token and what it sees, then what every decoding row and every token of
its context add.
"""

from collections.abc import Iterable

import msgspec

LEAST_STRETCH = 1.5
"""A promise that not even a request alone could keep limits a step to so many times what it takes alone."""


class StepCosts(msgspec.Struct, frozen=True, array_like=True):
    """Seconds a unit; none is negative."""

    base_s: float  # of any step
    token_s: float  # of a prompt token
    pair_s: float  # of a prompt token and a token that it attends to: n new after p cached tokens are n * (p + n / 2)
    row_s: float  # of a request that decodes
    context_s: float  # of a token in the context of a request that decodes, or before a chunk of a prompt
    num_samples: int = 0  # steps behind this

    def prompt_s(self, num_new: int, num_before: int = 0) -> float:
        """What `num_new` prompt tokens after `num_before` others add to steps, the constant aside."""
        return num_new * (self.token_s + self.pair_s * (num_before + num_new / 2))

    def decode_s(self, num_rows: int, num_context_tokens: int) -> float:
        """What so many decoding requests with so many tokens of context, all together, add to a step."""
        return num_rows * self.row_s + num_context_tokens * self.context_s

    def prefill_s(self, num_new: int, num_before: int, step_tokens: int) -> float:
        """A whole prompt's time in steps of `step_tokens` tokens of its own, with nobody else in them."""
        if num_new <= 0:
            return 0.0
        num_steps = -(-num_new // step_tokens)
        num_read = num_steps * num_before + step_tokens * num_steps * (num_steps - 1) // 2  # before each step's chunk
        return num_steps * self.base_s + num_read * self.context_s + self.prompt_s(num_new, num_before)


def typical(costs: Iterable[StepCosts | None]) -> StepCosts | None:
    """Costs of the worker in the middle, by a step of some prompt and some rows; None, of cold workers, don't count.

    They are one worker's and no means of several: numbers that were fitted together only make sense together.
    """
    known = sorted((one for one in costs if one is not None), key=_usual_s)
    return known[(len(known) - 1) // 2] if known else None


def _usual_s(costs: StepCosts) -> float:
    return costs.base_s + costs.prompt_s(512) + costs.decode_s(8, 8 * 512)
