"""What one engine step takes and gives. No torch here: schedulers and simulations use these too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from model.token_counts import TokenCounts
from protocol.requests import SampledToken, SamplingParams


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """One request's part of a step: some tokens to run through the model, and perhaps a token to draw after them."""

    token_ids: Sequence[int]  # the tokens whose KV this step computes: a chunk of the prompt, or the last drawn token
    start: int  # the position of the first of them; KV of all before it is in `block_ids`
    block_ids: Sequence[int]  # the block table; covers start + len(token_ids) tokens
    draw: "Draw | None"  # None: a chunk that does not end the prompt; no logits are computed


@dataclass(frozen=True, slots=True)
class Draw:
    """How to draw the token at position `start + len(token_ids)`."""

    sampling: SamplingParams
    history: Sequence[int]  # all token ids so far, prompt first, for the penalties
    num_prompt_tokens: int  # how many of `history` are the prompt
    forbidden: tuple[int, ...] = ()  # tokens that may not be drawn (stop tokens before `min_tokens`)
    counts: TokenCounts | None = None  # of `history`, where penalties need them; None: counted when they are needed


OnLayer = Callable[[int], None]
"""Called on the event loop once a layer's KV of the whole batch is in the cache, with the layer's index, in order."""


class Engine(Protocol):
    """Runs steps, one at a time. Live: `model/engine.py`, on its own thread. Simulated: tests/simulation."""

    async def step(self, batch: Sequence[SequenceStep], on_layer: OnLayer | None = None) -> list[SampledToken | None]:
        """Compute KV for the batch into the cache and draw tokens; one result per entry, None where it draws none.

        All `on_layer` calls are made before this returns. Cancelling the caller does not stop a step under way:
        the step runs to its end, and the next call waits for it. A raised error means that the engine is dead.
        """

    @property
    def num_broken_rows(self) -> int:
        """Rows of logits so far that held NaN or +inf: 0 with a sound model and cache."""
