"""What a model takes of a memory, and what that leaves for requests: arithmetic over its config alone."""

from dataclasses import dataclass

import torch

from twostroke.model.cache.kv_cache import kv_block_bytes
from twostroke.model.cache.memory import (
    CUDA_CONTEXT_BYTES,
    DEFAULT_BOUNDS,
    WORKER_BYTES,
    StepBounds,
    step_bytes_on_cpu,
)
from twostroke.model.config import Quantization
from twostroke.model.served import ServedModel


@dataclass(frozen=True)
class Fit:
    """A model on one worker. Bytes are each rank's."""

    parameters: int
    active_parameters: int
    weight_bytes: int
    step_bytes: int
    cache_bytes: int  # what is left for KV; negative where weights and steps don't fit
    kv_bytes_per_token: int  # of layers that keep all
    kv_window_bytes: int  # of what a request keeps at most of layers with a window, while it decodes
    max_context: int  # tokens
    max_requests: int  # of that context at once


def fit(
    model: ServedModel,
    dtype: torch.dtype,
    quantization: Quantization,
    *,
    kv_dtype: torch.dtype,
    memory: int,
    ranks: int = 1,
    stages: int = 1,
    expert_parallel: bool = False,
    is_gpu: bool = False,
    bounds: StepBounds = DEFAULT_BOUNDS,
) -> Fit:
    """On one worker of `ranks` a stage, each of which may take `memory` bytes; told is the largest stage's.

    The step is estimated as it is on CPUs: on a GPU it is measured when the engine is loaded, and takes no more.
    Raises ConfigError where so many ranks or stages can't share the model.
    """
    model.check_ranks(ranks, expert_parallel, stages)
    shape = model.shape
    weights = model.weight_bytes(dtype, quantization, ranks, expert_parallel, stages)
    step = step_bytes_on_cpu(shape, bounds, dtype)
    cache = memory - weights - step - (CUDA_CONTEXT_BYTES if is_gpu else WORKER_BYTES)
    groups, of_row = shape.kv_groups, kv_block_bytes(shape, 1, kv_dtype, ranks, stages)
    rows = max(0, cache // of_row)  # of one token and one group
    context = min(shape.max_position, groups.tokens_in(rows, 1, bounds.max_tokens))
    return Fit(
        parameters=model.num_parameters,
        active_parameters=model.num_active_parameters,
        weight_bytes=weights,
        step_bytes=step,
        cache_bytes=cache,
        kv_bytes_per_token=of_row * (groups.count - len(groups.windowed)),
        kv_window_bytes=of_row * sum(groups.most_rows(group, 1, 1) for group in groups.windowed),
        max_context=context,
        max_requests=rows // groups.blocks_of(context, 1, bounds.max_tokens) if context else 0,
    )
