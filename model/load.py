"""From a model folder to a running engine.

The largest steps that an engine will be given, run once on a GPU to see what memory they take.
"""

import logging
from dataclasses import dataclass, replace

import torch

from twostroke.model.architectures.decoder import Decoder
from twostroke.model.backend import Backend
from twostroke.model.cache.kv_cache import KVCache, kv_block_bytes, make_kv_cache
from twostroke.model.cache.memory import (
    GpuMemory,
    StepBounds,
    available_bytes,
    cache_bytes_on_gpu,
    check_memory,
    describe_cache,
    gibibytes,
    step_bytes_on_cpu,
)
from twostroke.model.cache.swap_space import SwapSpace
from twostroke.model.captured_steps import CapturedSteps
from twostroke.model.checkpoint.decoder_weights import load_decoder_weights
from twostroke.model.checkpoint.quantization import weight_bytes
from twostroke.model.checkpoint.weights import Checkpoint
from twostroke.model.config import ModelConfig, load_model_config
from twostroke.model.cuda.graphs import GRAPH_BYTES, CudaGraphSteps, batch_sizes
from twostroke.model.engine import ThreadEngine
from twostroke.model.engine_config import (
    EngineConfig,
    blocks_in,
    check_cores,
    resolve_device,
    resolve_dtype,
    resolve_max_context,
    resolve_num_blocks,
)
from twostroke.model.parallel.tensor_parallel import (
    DrawnElsewhere,
    GroupRanks,
    RankPlace,
    Shard,
    SingleRank,
    TensorParallel,
    check_size,
)
from twostroke.model.runner import ModelRunner, TokenSampler
from twostroke.model.sampling.sampler import Sampler
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.errors import ConfigError
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


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedEngine:
    """An engine ready to step, and what its worker must know of it."""

    engine: ThreadEngine
    parallel: TensorParallel
    kv_cache: KVCache
    model_config: ModelConfig
    num_blocks: int
    max_context: int  # tokens of prompt and output together
    swap_space: SwapSpace | None = None


def load_engine(config: EngineConfig, place: RankPlace | None = None) -> LoadedEngine:
    """Load, check and warm up; blocks the caller. Raises ConfigError with one line that a user can act on.

    `place` is for an engine of several ranks, and for them alone; all have to load at the same time.
    """
    if (place is None) != (config.tensor_parallel == 1):
        raise ValueError(f"{place} is no place among {config.tensor_parallel} ranks")
    model_config = load_model_config(config.model_dir)
    check_size(model_config, config.tensor_parallel)
    shard = Shard(0 if place is None else place.rank, config.tensor_parallel)
    checkpoint = Checkpoint(config.model_dir, model_config)
    check_cores(config)
    device = resolve_device(config)
    dtype = resolve_dtype(config.dtype, checkpoint.dtype, device)
    needed = _needed_bytes(config, model_config, checkpoint, device, dtype)
    num_blocks = resolve_num_blocks(config, model_config, dtype, sum(needed))
    max_context = resolve_max_context(config, model_config, num_blocks)
    _check_memory(config, model_config, needed, device, dtype, num_blocks)
    made: list[tuple[TensorParallel, KVCache, SwapSpace | None]] = []

    def build() -> ModelRunner:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # where this thread's kernels go
        parallel = SingleRank() if place is None else GroupRanks(shard, place.rendezvous, device)
        backend = _backend(device)
        weights = load_decoder_weights(
            checkpoint, model_config, dtype, device, max_context, backend, config.quantization, shard
        )
        decoder = Decoder(model_config, weights, backend, parallel)
        sampler = _sampler(model_config.vocab_size, device) if shard.rank == 0 else DrawnElsewhere()

        def cache_of(blocks: int, digest: str) -> KVCache:
            return make_kv_cache(
                model_config,
                num_blocks=blocks,
                block_size=config.block_size,
                dtype=dtype,
                device=device,
                model_digest=digest,
                tp_size=shard.size,
                rank=shard.rank,
            )

        blocks = num_blocks or _blocks_left_on_gpu(
            config, model_config, decoder, sampler, cache_of(1, ""), dtype, max_context
        )
        # Nobody but rank 0 reads all of the weights, and a rank with less room than the others holds them up.
        digest = parallel.exchange(checkpoint.digest() if shard.rank == 0 else "")[0]
        kv_cache = cache_of(min(map(int, parallel.exchange(str(blocks)))), digest)
        swap_space = _swap_space(config, kv_cache)
        made.append((parallel, kv_cache, swap_space))
        room = resolve_max_context(config, model_config, kv_cache.num_blocks)
        captured = _captured_steps(config, backend, decoder, kv_cache, room) if config.captures_decodes else None
        runner = ModelRunner(decoder, sampler, kv_cache, room, captured, swap_space)
        _warm_up(runner, config.block_size, room)
        return runner

    try:
        engine = ThreadEngine(build, threads=config.threads, cores=config.cores)
    except torch.OutOfMemoryError as error:
        raise _out_of_memory(config, model_config, checkpoint, device, dtype, num_blocks, error) from error
    ((parallel, kv_cache, swap_space),) = made
    max_context = resolve_max_context(config, model_config, kv_cache.num_blocks)
    one = kv_block_bytes(model_config, config.block_size, dtype, shard.size)
    _log.info("%s", describe_cache(kv_cache.num_blocks, config.block_size, one, max_context))
    return LoadedEngine(engine, parallel, kv_cache, model_config, kv_cache.num_blocks, max_context, swap_space)


def _backend(device: torch.device) -> Backend:
    # Each host needs what its own kernels are compiled with alone: numba or Triton.
    if device.type == "cpu":
        from twostroke.model.cpu.backend import CpuBackend

        return CpuBackend()
    from twostroke.model.cuda.backend import CudaBackend

    return CudaBackend()


def _captured_steps(
    config: EngineConfig, backend: Backend, decoder: Decoder, kv_cache: KVCache, max_context: int
) -> CapturedSteps | None:
    if config.device == "cuda":
        return CudaGraphSteps(decoder, kv_cache, max_context, config.bounds.max_sequences)
    from twostroke.model.cpu.backend import CpuBackend
    from twostroke.model.cpu.captured_steps import CpuCapturedSteps

    if config.tensor_parallel > 1 or not isinstance(backend, CpuBackend):
        return None  # the ranks' sums are torch's
    return CpuCapturedSteps(decoder, backend.launcher, kv_cache, max_context)


def _sampler(vocab_size: int, device: torch.device) -> TokenSampler:
    if device.type == "cpu":
        return Sampler(vocab_size, device)
    from twostroke.model.sampling.device_sampler import DeviceSampler  # Triton is imported only where it can run

    return DeviceSampler(vocab_size, device)


def _blocks_left_on_gpu(
    config: EngineConfig,
    model: ModelConfig,
    decoder: Decoder,
    sampler: TokenSampler,
    kv_cache: KVCache,
    dtype: torch.dtype,
    max_context: int,
) -> int:
    memory = measure_gpu(
        decoder,
        sampler,
        model,
        config.bounds,
        kv_cache,
        max_context=max_context,
        share=config.gpu_memory_share,
        is_captured=config.captures_decodes,
    )
    return blocks_in(cache_bytes_on_gpu(memory), config, model, dtype)


def _swap_space(config: EngineConfig, kv_cache: KVCache) -> SwapSpace | None:
    num_blocks = config.swap_bytes // (kv_cache.block_bytes * kv_cache.num_layers)
    if num_blocks == 0:
        return None
    free = available_bytes(torch.device("cpu"))
    if config.swap_bytes > free:
        raise ConfigError(
            f"too little host memory: {gibibytes(config.swap_bytes)} of swap space are asked for, but only "
            f"{gibibytes(free)} are free: lower decode.swap_gib"
        )
    return SwapSpace(kv_cache, num_blocks)


def _needed_bytes(
    config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> tuple[int, int]:
    """(weights, largest step) of this rank."""
    step = step_bytes_on_cpu(model, config.bounds, dtype) if device.type == "cpu" else 0  # a GPU's is measured later
    return weight_bytes(checkpoint.shapes, dtype, config.quantization) // config.tensor_parallel, step


def _check_memory(
    config: EngineConfig,
    model: ModelConfig,
    needed: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    num_blocks: int | None,
) -> None:
    weights, step = needed
    check_memory(
        device.type,
        weights=weights,
        cache=(num_blocks or 1) * kv_block_bytes(model, config.block_size, dtype, config.tensor_parallel),
        step=step,
        free=available_bytes(device),
    )


def _out_of_memory(
    config: EngineConfig,
    model: ModelConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    num_blocks: int | None,
    error: torch.OutOfMemoryError,
) -> ConfigError:
    """What a GPU without room for the steps, or for weights that others took while they were loaded, is told by."""
    weights = weight_bytes(checkpoint.shapes, dtype, config.quantization) // config.tensor_parallel
    cache = (num_blocks or 0) * kv_block_bytes(model, config.block_size, dtype, config.tensor_parallel)
    said = str(error).splitlines()[0] if str(error) else "out of memory"
    return ConfigError(
        f"too little memory on {device.type}: weights {gibibytes(weights)} + KV cache {gibibytes(cache)} leave too "
        f"little for steps of {config.bounds.max_tokens} tokens and {config.bounds.max_sequences} sequences: lower "
        f"kv_cache_gib, max_step_tokens or max_batch, quantise, or take a smaller model ({said})"
    )


def _warm_up(runner: ModelRunner, block_size: int, max_context: int) -> None:
    """Run each kind of work once, so that no request waits for a kernel to be compiled.

    The blocks written are nobody's yet, and what they hold then is as good as zeros.
    """
    length = min(max_context - 1, 2 * block_size + 1)
    if length < 1:
        return
    table = range(-(-(length + 1) // block_size))
    draw = Draw(SamplingParams(temperature=0.0), history=[0] * (length + 1), num_prompt_tokens=length)
    prompt = SequenceStep([0] * length, start=0, block_ids=table, draw=draw)
    following = SequenceStep([0], start=length, block_ids=table, draw=draw)
    for step in (prompt, following):
        runner.run([step])
