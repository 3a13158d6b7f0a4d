"""From a model folder to a running engine."""

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
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.decoder_weights import load_decoder_weights, weight_bytes
from twostroke.model.checkpoint.weights import Checkpoint
from twostroke.model.config import ModelConfig
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
    loading = _Loading(config, place)
    try:
        engine = ThreadEngine(loading.build, threads=config.threads, cores=config.cores)
    except torch.OutOfMemoryError as error:
        raise loading.out_of_memory(error) from error
    model, kv_cache, max_context = loading.model, loading.kv_cache, loading.max_context
    one = kv_cache.block_bytes * kv_cache.num_layers
    _log.info("%s", describe_cache(kv_cache.num_blocks, config.block_size, one, max_context))
    return LoadedEngine(engine, loading.parallel, kv_cache, model, kv_cache.num_blocks, max_context, loading.swap_space)


class _Loading:
    """One engine on its way: its settings resolved and checked here, its parts made by `build`."""

    parallel: TensorParallel
    kv_cache: KVCache
    swap_space: SwapSpace | None

    def __init__(self, config: EngineConfig, place: RankPlace | None):
        """Raises ConfigError."""
        self.config = config
        self.place = place
        self.shard = Shard(0 if place is None else place.rank, config.tensor_parallel)
        self.model = load_model_config(config.model_dir)
        check_size(self.model, config.tensor_parallel)
        self.checkpoint = Checkpoint(config.model_dir, self.model)
        check_cores(config)
        self.device = resolve_device(config)
        self.dtype = resolve_dtype(config.dtype, self.checkpoint.dtype, self.device)
        self.num_blocks = resolve_num_blocks(config, self.model, self.dtype)
        self.max_context = resolve_max_context(config, self.model, self.num_blocks)
        # A GPU's largest step is measured later.
        step = step_bytes_on_cpu(self.model, config.bounds, self.dtype) if self.device.type == "cpu" else 0
        check_memory(
            self.device.type,
            weights=self.weight_bytes,
            cache=(self.num_blocks or 1) * self.block_bytes,
            step=step,
            free=available_bytes(self.device),
        )

    @property
    def weight_bytes(self) -> int:
        """Of this rank."""
        return weight_bytes(self.model, self.dtype, self.config.quantization) // self.config.tensor_parallel

    @property
    def block_bytes(self) -> int:
        """Of a block of the KV cache in all layers, on this rank."""
        return kv_block_bytes(self.model, self.config.block_size, self.dtype, self.config.tensor_parallel)

    def build(self) -> ModelRunner:
        """On the engine's thread. Raises ConfigError."""
        config, device = self.config, self.device
        if device.type == "cuda":
            torch.cuda.set_device(device)  # where this thread's kernels go
        self.parallel = SingleRank() if self.place is None else GroupRanks(self.shard, self.place.rendezvous, device)
        backend = _backend(device)
        weights = load_decoder_weights(
            self.checkpoint,
            self.model,
            self.dtype,
            device,
            self.max_context,
            backend,
            config.quantization,
            self.shard,
        )
        decoder = Decoder(self.model, weights, backend, self.parallel)
        sampler = _sampler(self.model.vocab_size, device) if self.shard.rank == 0 else DrawnElsewhere()
        blocks = self.num_blocks
        if blocks is None:
            memory = measure_gpu(decoder, sampler, self._cache(1, ""), config, self.max_context)
            blocks = blocks_in(cache_bytes_on_gpu(memory), config, self.model, self.dtype)
        # Nobody but rank 0 reads all of the weights, and a rank with less room than the others holds them up.
        digest = self.parallel.exchange(self.checkpoint.digest() if self.shard.rank == 0 else "")[0]
        self.kv_cache = self._cache(min(map(int, self.parallel.exchange(str(blocks)))), digest)
        self.swap_space = _swap_space(config, self.kv_cache)
        self.max_context = resolve_max_context(config, self.model, self.kv_cache.num_blocks)
        captured = _captured_steps(config, backend, decoder, self.kv_cache, self.max_context)
        runner = ModelRunner(decoder, sampler, self.kv_cache, self.max_context, captured, self.swap_space)
        _warm_up(runner, config.block_size, self.max_context)
        return runner

    def out_of_memory(self, error: torch.OutOfMemoryError) -> ConfigError:
        """For a GPU without room for the steps, or for weights: others may have taken it while they were loaded."""
        cache = (self.num_blocks or 0) * self.block_bytes
        bounds = self.config.bounds
        said = str(error).splitlines()[0] if str(error) else "out of memory"
        return ConfigError(
            f"too little memory on {self.device.type}: weights {gibibytes(self.weight_bytes)} + KV cache "
            f"{gibibytes(cache)} leave too little for steps of {bounds.max_tokens} tokens and {bounds.max_sequences} "
            "sequences: lower kv_cache_gib, max_step_tokens or max_batch, quantise, or take a smaller model "
            f"({said})"
        )

    def _cache(self, num_blocks: int, digest: str) -> KVCache:
        return make_kv_cache(
            self.model,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            dtype=self.dtype,
            device=self.device,
            model_digest=digest,
            tp_size=self.shard.size,
            rank=self.shard.rank,
        )


def _backend(device: torch.device) -> Backend:
    # Each host needs what its own kernels are compiled with alone: numba or Triton.
    if device.type == "cpu":
        from twostroke.model.cpu.backend import CpuBackend

        return CpuBackend()
    from twostroke.model.cuda.backend import CudaBackend

    return CudaBackend()


def _sampler(vocab_size: int, device: torch.device) -> TokenSampler:
    if device.type == "cpu":
        from twostroke.model.cpu.kernels.sampling import CpuSampling

        return Sampler(vocab_size, CpuSampling(vocab_size))
    from twostroke.model.cuda.sampler import DeviceSampler

    return DeviceSampler(vocab_size, device)


def _captured_steps(
    config: EngineConfig, backend: Backend, decoder: Decoder, kv_cache: KVCache, max_context: int
) -> CapturedSteps | None:
    if not config.captures_decodes:
        return None
    if config.device == "cuda":
        return CudaGraphSteps(decoder, kv_cache, max_context, config.bounds.max_sequences)
    from twostroke.model.cpu.backend import CpuBackend
    from twostroke.model.cpu.captured_steps import CpuCapturedSteps

    if config.tensor_parallel > 1 or not isinstance(backend, CpuBackend):
        return None  # the ranks' sums are torch's
    return CpuCapturedSteps(decoder, backend.launcher, kv_cache, max_context)


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


def measure_gpu(
    decoder: Decoder, sampler: TokenSampler, kv_cache: KVCache, config: EngineConfig, max_context: int
) -> GpuMemory:
    """Run the largest steps with draws over a cache of one block, in which all tokens lie on each other; closes it.

    Where decode steps are to be captured, the memory of a step and of its logits belongs to them for good.
    """
    bounds, block_size, device = config.bounds, kv_cache.block_size, kv_cache.tensors[0].device
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
    if config.captures_decodes:
        inputs = 2 * bounds.max_sequences * -(-max_context // block_size) * torch.int32.itemsize  # block tables
        logits = bounds.max_sequences * decoder.vocab_size * torch.float32.itemsize
        decodes = largest_batch(replace(bounds, max_tokens=bounds.max_sequences), block_size, max_context, None)
        graphs = peak(decodes) + inputs + logits + len(batch_sizes(bounds.max_sequences)) * GRAPH_BYTES
    kv_cache.close()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(total, free, config.gpu_memory_share, weights, peak_step, graphs)


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
