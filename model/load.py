"""The loading of a model folder into a running engine."""

import gc
import logging
import os
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from twostroke.model.architectures.decoder import Decoder
from twostroke.model.backend import Backend, LoadOptions
from twostroke.model.batch import StepDecoder
from twostroke.model.cache.kv_cache import KVCache, make_kv_cache
from twostroke.model.cache.memory import (
    GpuMemory,
    available_bytes,
    cache_bytes_on_gpu,
    check_memory,
    describe_cache,
    gibibytes,
)
from twostroke.model.cache.swap_space import SwapSpace
from twostroke.model.captured_steps import ALL_EAGER, NOTHING_CAPTURED, StepReplays
from twostroke.model.config import ModelShape
from twostroke.model.costs.operations import MachineLimits, NumberFormats, StepWork, step_work
from twostroke.model.costs.sizes import StepBounds, communicator_bytes, step_bytes_on_cpu
from twostroke.model.cuda.graphs import (
    GRAPH_BYTES,
    CudaGraphSteps,
    PromptGraphs,
    Recorder,
    StepShape,
    batch_sizes,
    most_rows,
    step_shapes,
)
from twostroke.model.engine import ThreadEngine
from twostroke.model.engine_config import (
    EngineConfig,
    block_bytes,
    blocks_in,
    check_cores,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
    resolve_max_context,
    resolve_num_blocks,
)
from twostroke.model.machine_limits import machine_limits
from twostroke.model.parallel.experts import ExpertHits, ExpertSlots
from twostroke.model.parallel.tensor_parallel import GroupRanks, RankPlace, SingleRank, TensorParallel
from twostroke.model.runner import LACKING, ModelRunner, RankExtras, TokenSampler
from twostroke.model.sampling.sampler import Sampler
from twostroke.model.served import ServedModel, open_model
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.requests import SamplingParams

if TYPE_CHECKING:  # numba is imported only where there is no GPU
    from twostroke.model.cpu.kernels.launch import CoreLending

_log = logging.getLogger(__name__)


def load_engine(config: EngineConfig, place: RankPlace | None = None) -> "LoadedEngine":
    """Load, check and warm up; blocks the caller. Raises ConfigError with one line that a user can act on.

    `place` is for an engine of several ranks, and for them alone; all have to load at the same time.
    """
    if (place is None) != (config.parallel.num_ranks == 1):
        raise ValueError(f"{place} is no place among {config.parallel.num_ranks} ranks")
    return LoadedEngine(config, place)


class LoadedEngine:
    """An engine ready to step, and what its worker must know of it."""

    engine: ThreadEngine
    model_config: ModelShape
    max_context: int  # tokens of prompt and output together
    weights: str | None  # what quantised ones are held in, for people
    dtype: str  # of activations, as torch names it
    parallel: TensorParallel
    kv_cache: KVCache
    swap_space: SwapSpace | None
    expert_hits: ExpertHits | None  # None: the model has no experts, or their hits are not counted
    expert_slots: ExpertSlots | None  # None: ranks have no room for copies of experts
    limits: MachineLimits  # of this rank's device

    def __init__(self, config: EngineConfig, place: RankPlace | None):
        """Resolve and check settings as load_engine says; the parts are made on the engine's thread."""
        self._config = config
        self._place = place
        self._rank = 0 if place is None else place.rank
        self._stage, self._shard = config.parallel.place(self._rank)
        found = open_model(config.model_dir, config.way, has_mtp=config.has_mtp)
        model = self.model_config = found.shape
        check_cores(config)
        self._device = resolve_device(config)
        self._dtype = resolve_dtype(config.dtype, found.dtype, self._device)
        self.dtype = str(self._dtype).removeprefix("torch.")
        self._kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, model, self._dtype)
        block_size = model.fitting_block_size(config.block_size, self._kv_dtype.itemsize)
        config = self._config = replace(config, block_size=block_size)
        self.weights = found.weights_as(config.quantization)
        found.check_ranks(config.parallel, config.block_size)
        weights = found.weight_bytes(self._dtype, config.quantization, config.parallel)
        block = block_bytes(config, model, self._kv_dtype)
        # A GPU's largest step is measured later.
        step = step_bytes_on_cpu(model, config.bounds, self._dtype.itemsize) if self._device.type == "cpu" else 0
        blocks = resolve_num_blocks(config, model, self._kv_dtype, weights + step)
        self.max_context = resolve_max_context(config, model, blocks)
        free = available_bytes(self._device)
        check_memory(self._device.type, weights=weights, cache=(blocks or 1) * block, step=step, free=free)
        self._lending: CoreLending | None = None
        if config.core_table is not None:
            from twostroke.model.cpu.kernels.launch import lend_cores

            self._lending = lend_cores(config.threads or len(os.sched_getaffinity(0)), config.core_table)
        try:
            build = partial(self._build, found, blocks)
            self.engine = ThreadEngine(build, threads=config.threads, cores=config.cores, lending=self._lending)
        except torch.OutOfMemoryError as error:
            # No room for steps or weights: other processes may have taken it meanwhile.
            said = str(error).splitlines()[0] if str(error) else "out of memory"
            raise ConfigError(
                f"too little memory on {self._device.type}: weights {gibibytes(weights)} + KV cache "
                f"{gibibytes((blocks or 0) * block)} leave too little for steps of {config.bounds.max_tokens} tokens "
                f"and {config.bounds.max_sequences} sequences: lower kv_cache_gib, max_step_tokens or max_batch, "
                f"quantise, or take a smaller model ({said})"
            ) from error
        requests = self.num_blocks / model.kv_groups.blocks_of(
            self.max_context, config.block_size, config.bounds.max_tokens
        )
        _log.info("%s", describe_cache(self.num_blocks, config.block_size, block, requests, self.max_context))

    @property
    def num_blocks(self) -> int:
        return self.kv_cache.num_blocks

    def work(self) -> StepWork:
        """The model's steps' operations and reads, on all ranks together."""
        formats = NumberFormats(self._config.quantization, self._dtype.itemsize, self._kv_dtype.itemsize)
        return step_work(self.model_config, formats)

    def _join_ranks(self) -> None:
        """Form the group with the other ranks, where there are any, on the engine's thread."""
        device, place = self._device, self._place
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the device of this thread's kernels
        if place is None:
            self.parallel = SingleRank()
            return
        self.parallel = GroupRanks(self._shard, place.rendezvous, device, self._stage, place.host)

    def _warm_up(self, runner: ModelRunner) -> None:
        """Run the first steps. Raises ConfigError where their logits are broken."""
        num_broken = runner.num_broken_rows
        _warm_up(runner, self.kv_cache, self.max_context)
        if runner.num_broken_rows > num_broken:
            raise ConfigError(
                f"{self._config.model_dir}: the logits of a first prompt are NaN or infinite: the weights are broken, "
                f"or too large for {str(self._dtype).removeprefix('torch.')}: take another copy, or set model.dtype: "
                "float32"
            )

    def _build(self, found: ServedModel, blocks: int | None) -> ModelRunner:
        """Build the runner on the engine's thread. Raises ConfigError."""
        config, device, model, rank = self._config, self._device, self.model_config, self._rank
        self._join_ranks()
        backend = _backend(device, config, self._lending)
        spare = config.parallel.spare_experts
        options = LoadOptions(
            self._dtype,
            device,
            self.max_context,
            config.quantization,
            self._kv_dtype,
            spare,
            config.parallel.context_ranks > 1,
        )
        decoder = found.decoder(options, backend, self.parallel)
        sampler = _sampler(model.vocab_size, device) if rank == 0 else None
        make_cache = partial(
            make_kv_cache,
            model,
            block_size=config.block_size,
            dtype=self._kv_dtype,
            device=device,
            parallel=config.parallel,
            rank=rank,
        )
        if device.type == "cuda" and self._stage.count == 1:
            from twostroke.model.cuda.compile_ahead import compile_steps

            compile_steps(decoder, sampler, make_cache)
        if blocks is None:
            one = make_cache(num_blocks=1, model_digest="")
            memory = measure_gpu(decoder, sampler, one, config, self.max_context, model.dense_context, self.parallel)
            blocks = blocks_in(cache_bytes_on_gpu(memory), config, model, self._kv_dtype)
        # Only rank 0 reads all of the weights, for the digest; the rank with the least room decides for all.
        digest = self.parallel.exchange(found.digest() if rank == 0 else "")[0]
        blocks = min(map(int, self.parallel.exchange(str(blocks))))
        self.kv_cache = make_cache(num_blocks=blocks, model_digest=digest)
        self.swap_space = _swap_space(config, self.kv_cache, block_bytes(config, model, self._kv_dtype))
        self.max_context = resolve_max_context(config, model, blocks)
        # Beyond, the host must know how many tokens queries choose from.
        captured_context = min(self.max_context, model.dense_context)
        replays = _captured_steps(config, backend, decoder, self.kv_cache, captured_context, sampler)
        hits = self.expert_hits = _expert_hits(decoder)
        self.expert_slots = None
        if spare and isinstance(decoder, Decoder):
            self.expert_slots = ExpertSlots(decoder.experts, spare, self.parallel)
        runner = ModelRunner(
            decoder,
            sampler,
            self.kv_cache,
            self.max_context,
            replays,
            RankExtras(self.swap_space or LACKING, hits or LACKING, self.expert_slots or LACKING),
            self.parallel,
        )
        self._warm_up(runner)
        if hits is not None:
            hits.clear()
        self.limits = machine_limits(device, self._dtype, torch.get_num_threads())
        return runner


def _backend(device: torch.device, config: EngineConfig, lending: "CoreLending | None") -> Backend:
    # Each host needs what its own kernels are compiled with alone: numba or Triton.
    if device.type == "cpu":
        from twostroke.model.cpu.backend import CpuBackend

        return CpuBackend(lending)
    from twostroke.model.cuda.backend import CudaBackend

    return CudaBackend(prefill_kernel=config.prefill_kernel)


def _sampler(vocab_size: int, device: torch.device) -> TokenSampler:
    if device.type == "cpu":
        from twostroke.model.cpu.kernels.sampling import CpuSampling

        return Sampler(vocab_size, CpuSampling(vocab_size))
    from twostroke.model.cuda.sampler import DeviceSampler

    return DeviceSampler(vocab_size, device)


def _captured_steps(
    config: EngineConfig,
    backend: Backend,
    decoder: StepDecoder,
    kv_cache: KVCache,
    max_context: int,
    sampler: TokenSampler | None,
) -> StepReplays:
    """Return what replays steps: nothing on one of several stages."""
    if config.parallel.has_stages:
        return ALL_EAGER
    if config.device == "cuda":
        return _graphs(config, decoder, kv_cache, max_context, sampler)
    if config.announces_layers:
        return ALL_EAGER
    from twostroke.model.cpu.backend import CpuBackend
    from twostroke.model.cpu.captured_steps import CpuCapturedSteps

    if config.parallel.tensor_ranks > 1 or not (isinstance(backend, CpuBackend) and isinstance(decoder, Decoder)):
        return ALL_EAGER  # the ranks' sums are torch's, and so is most of what transformers computes
    return StepReplays(CpuCapturedSteps(decoder, backend.launcher, kv_cache, max_context))


def _graphs(
    config: EngineConfig, decoder: StepDecoder, kv_cache: KVCache, max_context: int, sampler: TokenSampler | None
) -> StepReplays:
    from twostroke.model.cuda.sampler import DeviceSampler

    begin, recorder = time.monotonic(), Recorder(kv_cache.tensors[0].device)
    shapes = prompt_shapes(config, decoder, kv_cache)
    # The steps with the most rows first: the others fit into their memory.
    prompts = PromptGraphs(decoder, kv_cache, max_context, shapes, recorder) if shapes else NOTHING_CAPTURED
    decodes, most = None, config.bounds.max_sequences
    if not config.announces_layers:
        decodes = CudaGraphSteps(decoder, kv_cache, max_context, most, recorder)
        has_all_logits = config.parallel.tensor_ranks == 1  # else they are gathered elsewhere
        if isinstance(sampler, DeviceSampler) and has_all_logits:
            sampler.capture(decodes.all_logits, decodes.sizes, recorder)
    _log.info(
        "captured %d graphs of decode steps and %d of small steps with prompts in %.1f s",
        0 if decodes is None else len(batch_sizes(min(most, kv_cache.num_blocks))),
        len(shapes),
        time.monotonic() - begin,
    )
    return StepReplays(decodes or NOTHING_CAPTURED, prompts)


def prompt_shapes(config: EngineConfig, decoder: StepDecoder, kv_cache: KVCache) -> list[StepShape]:
    """Return the shapes of steps with prompts that get graphs: none where the host must know the contexts' lengths.

    Latents are expanded part by part, as far as contexts go, and states are computed row by row of block tables; what
    transformers computes may ask for more. Nor are there any of one of several stages, or with an MTP head, which runs
    over all of a prompt's hidden states.
    """
    layout = kv_cache.layout
    if not isinstance(decoder, Decoder) or layout.kinds == 1 or layout.state_numbers or config.parallel.has_stages:
        return []
    if decoder.has_mtp:
        return []
    most = most_rows(decoder.parameters_a_layer, config.announces_layers)
    return step_shapes(config.bounds.max_tokens, config.bounds.max_sequences, most)


def _expert_hits(decoder: StepDecoder) -> ExpertHits | None:
    layers = decoder.experts if isinstance(decoder, Decoder) else []
    hits = [None if experts is None else experts.hits for experts in layers]
    return ExpertHits(hits) if any(layer is not None for layer in hits) else None


def _swap_space(config: EngineConfig, kv_cache: KVCache, block: int) -> SwapSpace | None:
    num_blocks = config.swap_bytes // block  # on each stage as many as on that with the most layers
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
    decoder: StepDecoder,
    sampler: TokenSampler | None,
    kv_cache: KVCache,
    config: EngineConfig,
    max_context: int,
    dense_context: int,
    parallel: TensorParallel,
) -> GpuMemory:
    """Run the largest steps with draws over a cache of one block, in which all tokens lie on each other; closes it.

    `dense_context` is ModelShape's.

    Where steps are to be captured, the memory of the largest and of its logits belongs to them for good.
    """
    bounds, block_size, device = config.bounds, kv_cache.block_size, kv_cache.tensors[0].device
    runner = ModelRunner(decoder, sampler, kv_cache, max_context, parallel=parallel)
    gc.collect()  # memory of an earlier engine must not count as this one's weights
    torch.cuda.empty_cache()
    weights = torch.cuda.memory_reserved(device)

    def peak(batch: list[SequenceStep]) -> int:
        """Return the peak memory that torch took from the device during the batch, holes included."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        runner.run(batch)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_reserved(device) - weights

    # Log-probabilities take another path through the sampler.
    batch_of = partial(largest_batch, block_size=block_size, max_context=max_context, num_groups=kv_cache.groups.count)
    peak_step = max(peak(batch_of(bounds, logprobs=logprobs)) for logprobs in (None, 20))
    if max_context > dense_context:  # a prompt's last chunk chooses among all tokens
        peak_step = max(peak_step, peak([longest_chunk(bounds.max_tokens, block_size, max_context)]))
    graphs = 0
    width = -(-max_context // block_size) * kv_cache.groups.count

    def captured_bytes(rows: int, sequences: int, count: int) -> int:
        """Return the memory that `count` graphs keep: the largest one's step, its block tables, its logits, and the
        driver's part."""
        tables = 2 * sequences * width * torch.int32.itemsize
        logits = sequences * decoder.logits_width * torch.float32.itemsize
        kept = tables + logits + count * GRAPH_BYTES
        if isinstance(decoder, Decoder) and decoder.has_mtp:  # the head has graphs of its own
            kept += sequences * decoder.hidden_size * decoder.dtype.itemsize + count * GRAPH_BYTES
        return peak(batch_of(StepBounds(rows, sequences))) + kept

    if not config.announces_layers and not config.parallel.has_stages:
        most = bounds.max_sequences
        graphs += captured_bytes(most, most, len(batch_sizes(most)))
    if shapes := prompt_shapes(config, decoder, kv_cache):
        sequences = max(shape.sequences for shape in shapes)
        graphs += captured_bytes(shapes[0].rows, sequences, len(shapes))
    runner.close()
    kv_cache.close()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuMemory(
        total,
        free,
        config.gpu_memory_share,
        weights,
        peak_step,
        graphs,
        staging=config.staging_bytes,
        communicators=communicator_bytes(config.parallel),
    )


def largest_batch(
    bounds: StepBounds, block_size: int, max_context: int, logprobs: int | None = None, num_groups: int = 1
) -> list[SequenceStep]:
    """Return a batch with as many sequences and tokens as a step may have, each drawing with all filters."""
    count = max(1, min(bounds.max_sequences, bounds.max_tokens))
    sampling = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, logprobs=logprobs)
    left = bounds.max_tokens
    batch: list[SequenceStep] = []
    for index in range(count):
        length = min(max_context - 1, left // (count - index)) or 1
        left -= length
        batch.append(
            SequenceStep(
                token_ids=[0] * length,
                start=0,
                block_ids=[0] * (-(-length // block_size) * num_groups),
                draw=Draw(sampling, history=[0] * length, num_prompt_tokens=length),
            )
        )
    return batch


def longest_chunk(max_tokens: int, block_size: int, max_context: int) -> SequenceStep:
    """Return the last tokens of the longest prompt, as many as a step may have, without a draw."""
    length = min(max_tokens, max_context)
    return SequenceStep([0] * length, max_context - length, block_ids=[0] * -(-max_context // block_size), draw=None)


def _warm_up(runner: ModelRunner, kv_cache: KVCache, max_context: int) -> None:
    """Run each kind of work once, so that no request waits for a kernel to be compiled.

    The blocks belong to no sequence yet; their content counts as zeros.
    """
    num_rows, num_groups = kv_cache.num_blocks // kv_cache.groups.count, kv_cache.groups.count
    room = max(1, num_rows) * kv_cache.block_size  # a state that another group's rows overwrite is none
    length = min(max_context - 1, 2 * kv_cache.block_size + 1, room - 1)
    if length < 1:
        return
    num_places = -(-(length + 1) // kv_cache.block_size) * num_groups
    # Where blocks are few, all groups share one, as they share tensors.
    table = [place % kv_cache.num_blocks for place in range(num_places)]
    # A GPU compiles the kernels of both filters.
    sampling = SamplingParams(temperature=1.0, top_k=2, top_p=0.9)
    draw = Draw(sampling, history=[0] * (length + 1), num_prompt_tokens=length)
    prompt = SequenceStep([0] * length, start=0, block_ids=table, draw=draw)
    following = SequenceStep([0], start=length, block_ids=table, draw=draw)
    for step in (prompt, following):
        runner.run([step])
