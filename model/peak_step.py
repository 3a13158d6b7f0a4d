"""The largest steps that an engine will be given, run once on a GPU to see what memory they take."""

from dataclasses import replace

import torch

from twostroke.model.config import ModelConfig
from twostroke.model.cuda_graphs import GRAPH_BYTES, batch_sizes
from twostroke.model.decoder import Decoder
from twostroke.model.kv_cache import KVCache
from twostroke.model.memory_plan import GpuMemory, StepBounds
from twostroke.model.runner import ModelRunner, TokenSampler
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import SamplingParams


def measure_gpu(
    decoder: Decoder,
    sampler: TokenSampler,
    config: ModelConfig,
    bounds: StepBounds,
    kv_cache: KVCache,
    *,
    max_context: int,
    share: float,
    is_captured: bool,
) -> GpuMemory:
    """Run the largest steps with draws over a cache of one block, in which all tokens lie on each other; closes it.

    `is_captured`: whether decode steps will be, which the memory of a step and of its logits belongs to for good.
    """
    block_size, device = kv_cache.block_size, kv_cache.tensors[0].device
    runner = ModelRunner(decoder, sampler, kv_cache, max_context)
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_reserved(device)

    def peak(batch: list[SequenceStep]) -> int:
        """What torch took from the device, holes included."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        runner.run(batch)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_reserved(device) - weights

    # With log-probabilities the sampler is another one.
    peak_step = max(peak(largest_batch(bounds, block_size, max_context, logprobs)) for logprobs in (None, 20))
    graphs = 0
    if is_captured:
        inputs = 2 * bounds.max_sequences * -(-max_context // block_size) * torch.int32.itemsize  # block tables
        logits = bounds.max_sequences * config.vocab_size * torch.float32.itemsize
        decodes = largest_batch(replace(bounds, max_tokens=bounds.max_sequences), block_size, max_context, None)
        graphs = peak(decodes) + inputs + logits + len(batch_sizes(bounds.max_sequences)) * GRAPH_BYTES
    kv_cache.close()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total, free, share, weights, peak_step, graphs)


def largest_batch(
    bounds: StepBounds, block_size: int, max_context: int, logprobs: int | None = None
) -> list[SequenceStep]:
    """As many sequences as a step may have, with all the tokens that it may have, each drawing at random."""
    count = max(1, min(bounds.max_sequences, bounds.max_tokens))
    sampling = SamplingParams(temperature=1.0, top_p=0.9, top_k=0, logprobs=logprobs)
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
