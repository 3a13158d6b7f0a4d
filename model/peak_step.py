"""The largest step that an engine will be given, run once on a GPU to see what memory it takes."""

import torch

from model.config import ModelConfig
from model.decoder import Decoder
from model.kv_cache import make_kv_cache
from model.memory_plan import GpuMemory, StepBounds
from model.runner import ModelRunner, TokenSampler
from model.step import Draw, SequenceStep
from protocol.requests import SamplingParams


def measure_gpu(
    decoder: Decoder,
    sampler: TokenSampler,
    config: ModelConfig,
    bounds: StepBounds,
    *,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    max_context: int,
    share: float,
) -> GpuMemory:
    """Run the largest step with draws over a cache of one block, in which all tokens lie on each other."""
    cache = make_kv_cache(config, num_blocks=1, block_size=block_size, dtype=dtype, device=device, model_digest="")
    runner = ModelRunner(decoder, sampler, cache, max_context)
    weights = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.run(largest_batch(bounds, block_size, max_context))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - weights
    cache.close()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total=total, free=free, share=share, weights=weights, peak_step=peak)


def largest_batch(bounds: StepBounds, block_size: int, max_context: int) -> list[SequenceStep]:
    """As many sequences as a step may have, with all the tokens that it may have, each drawing at random."""
    count = max(1, min(bounds.max_sequences, bounds.max_tokens))
    sampling = SamplingParams(temperature=1.0, top_p=0.9, top_k=0)
    left = bounds.max_tokens
    batch: list[SequenceStep] = []
    for index in range(count):
        length = min(max_context - 1, left // (count - index)) or 1
        left -= length
        batch.append(
            SequenceStep(
                token_ids=[0] * length,
                start=0,
                block_ids=[0] * -(-length // block_size),
                draw=Draw(sampling, history=[0] * length, num_prompt_tokens=length),
            )
        )
    return batch
