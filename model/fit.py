"""What a model takes of a memory, and what that leaves for requests: arithmetic over its shape alone. No torch here."""

from dataclasses import dataclass

from twostroke.model.config import ModelShape
from twostroke.model.sizes import (
    CUDA_CONTEXT_BYTES,
    DEFAULT_BOUNDS,
    WORKER_BYTES,
    StepBounds,
    communicator_bytes,
    kv_block_bytes,
    step_bytes_on_cpu,
)


@dataclass(frozen=True)
class Fit:
    """A model on one worker. Bytes are each rank's."""

    weight_bytes: int
    step_bytes: int
    cache_bytes: int  # what is left for KV; negative where weights and steps don't fit
    kv_bytes_per_token: int  # of layers that keep all
    kv_window_bytes: int  # of what a request keeps at most of layers with a window, while it decodes
    max_context: int  # tokens
    max_requests: int  # of that context at once
    rows: int  # that the cache has room for: KV of one token in one group of layers

    def requests_of(self, shape: ModelShape, context: int, bounds: StepBounds = DEFAULT_BOUNDS) -> int:
        """How many requests of `context` tokens, prompt and answer together, have room at once."""
        return self.rows // shape.kv_groups.blocks_of(context, 1, bounds.max_tokens)


def fit(
    shape: ModelShape,
    weights: int,
    *,
    itemsize: int,
    kv_itemsize: int,
    memory: int,
    ranks: int = 1,
    stages: int = 1,
    context_ranks: int = 1,
    is_gpu: bool = False,
    bounds: StepBounds = DEFAULT_BOUNDS,
) -> Fit:
    """On one worker of so many stages of `ranks`, each of which has at most `weights` bytes and may take `memory`.

    Of latents `context_ranks` share each block's tokens. `itemsize` is a number's of activations, `kv_itemsize` of keys
    and values. The step is estimated as it is on CPUs: on a GPU it is measured when the engine is loaded, and takes no
    more.
    """
    step = step_bytes_on_cpu(shape, bounds, itemsize)
    process = CUDA_CONTEXT_BYTES + communicator_bytes(ranks, stages) if is_gpu else WORKER_BYTES
    cache = memory - weights - step - process
    # As many rows as the ranks that share blocks have together.
    groups, of_row = shape.kv_groups, kv_block_bytes(shape, 1, kv_itemsize, ranks, stages)
    rows = max(0, cache // of_row) * context_ranks
    context = min(shape.max_position, groups.tokens_in(rows, 1, bounds.max_tokens))
    return Fit(
        weight_bytes=weights,
        step_bytes=step,
        cache_bytes=cache,
        kv_bytes_per_token=of_row * (groups.count - len(groups.windowed)) // context_ranks,
        kv_window_bytes=of_row * sum(groups.most_rows(group, 1, 1) for group in groups.windowed),
        max_context=context,
        max_requests=rows // groups.blocks_of(context, 1, bounds.max_tokens) if context else 0,
        rows=rows,
    )
