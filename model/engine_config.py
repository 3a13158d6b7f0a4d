"""Settings of an engine, and what follows from them for this machine and this model."""

import os
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Literal

import torch

from twostroke.model.cache.memory import available_bytes, cache_bytes_on_host
from twostroke.model.config import KVCacheDtype, ModelShape, PrefillKernel, Quantization
from twostroke.model.costs.sizes import DEFAULT_BOUNDS, StepBounds, kv_block_bytes
from twostroke.model.parallel.form import ONE_RANK, ParallelForm
from twostroke.model.served import Way
from twostroke.protocol.errors import ConfigError


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine; cluster/config checks what can be checked without the model and this machine.

    `num_blocks` or `kv_cache_bytes` sizes the cache.

    Neither of them: on CUDA the cache gets what is left of `gpu_memory_share`, on a CPU a part of the host's free
    memory, which `host_ranks` share. Memory and threads are each rank's.
    """

    model_dir: Path
    _: KW_ONLY
    way: Way | None = None  # None: native where there is a decoder of ours
    has_mtp: bool = False  # the checkpoint's MTP head drafts tokens
    device: Literal["cpu", "cuda"] = "cpu"
    gpu: int = 0  # which one of those that this process sees
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    quantization: Quantization = "auto"  # of the projections' weights
    parallel: ParallelForm = ONE_RANK
    block_size: int = 16  # tokens
    kv_cache_bytes: int | None = None  # all layers together
    num_blocks: int | None = None
    host_ranks: int = 1  # of all workers
    swap_bytes: int = 0  # of host memory, for KV of preempted requests
    staging_bytes: int = 0  # of the GPU's memory, that links take while KV travels
    gpu_memory_share: float = 0.9  # of the GPU's memory, that weights, cache and steps together may take
    prefill_kernel: PrefillKernel = "plain"
    bounds: StepBounds = DEFAULT_BOUNDS
    announces_layers: bool = False  # in every step: no decode step is replayed then
    threads: int | None = None  # cores that a step may use; None: all
    cores: tuple[int, ...] | None = None  # which ones; None: whichever the system chooses
    core_table: Path | None = None  # by which workers of a host lend cores; on CPUs, one rank. None: they don't
    max_context: int | None = None  # tokens; None: what the model and the cache allow


def resolve_dtype(choice: str, checkpoint_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations.

    `auto` on CUDA is the checkpoint's; on a CPU bf16 where the checkpoint is bf16 and the CPU has instructions for it,
    else fp32 (fp16 has no fast CPU kernels, and bf16 would lose bits of it).
    """
    if choice != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[choice]
    if device.type == "cuda":
        return checkpoint_dtype
    return torch.bfloat16 if checkpoint_dtype == torch.bfloat16 and has_fast_bf16() else torch.float32


def resolve_kv_dtype(choice: KVCacheDtype, model: ModelShape, dtype: torch.dtype) -> torch.dtype:
    """The cache's dtype beside activations of `dtype`. Raises ConfigError where the model's cache can't have it."""
    if choice == "auto":
        return dtype
    if model.kv_kinds == 1:
        raise ConfigError(
            f"kv_cache_dtype: {choice} is not for latents, which this model caches in place of keys and values: "
            "leave it at auto"
        )
    return torch.float8_e4m3fn


def has_fast_bf16() -> bool:
    """Return True if this CPU multiplies bf16 matrices faster than fp32 ones."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def check_cores(config: EngineConfig) -> None:
    """Raises ConfigError where the engine is to run on cores that this process may not use."""
    if config.cores is None:
        return
    usable = os.sched_getaffinity(0)
    for core in config.cores:
        if core not in usable:
            raise ConfigError(
                f"cores: {core} is none of the {len(usable)} that this process may run on (`taskset -cp $$` shows "
                "which): name some of these, or leave cores out"
            )


def resolve_device(config: EngineConfig) -> torch.device:
    """Return the torch device. Raises ConfigError where it does not exist."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda is asked for, but torch finds no CUDA device: use device cpu")
    return torch.device("cuda", config.gpu) if config.device == "cuda" else torch.device("cpu")


def resolve_num_blocks(
    config: EngineConfig, model: ModelShape, kv_dtype: torch.dtype, needed: int = 0, free: int | None = None
) -> int | None:
    """Return the number of blocks of the cache; None: as many as fit, on a GPU.

    On a CPU the default size is a part of the `free` bytes (None: those that are free now), after the `needed` bytes of
    this rank's weights and steps. Raises ConfigError where the size does not hold one block.
    """
    if config.num_blocks is not None:
        return config.num_blocks
    size = config.kv_cache_bytes
    if size is None:
        if config.device == "cuda":
            return None
        one = block_bytes(config, model, kv_dtype)
        longest = config.max_context or model.max_position
        context = model.kv_groups.blocks_of(longest, config.block_size, config.bounds.max_tokens) * one
        free = available_bytes(torch.device("cpu")) if free is None else free
        size = cache_bytes_on_host(free, config.host_ranks, needed=needed, full_context=context)
    return blocks_in(size, config, model, kv_dtype)


def resolve_max_context(config: EngineConfig, model: ModelShape, num_blocks: int | None) -> int:
    """Tokens of the longest request. `num_blocks` is None where the cache has no size yet.

    Raises ConfigError for more than the model or the cache takes.
    """
    room = model.max_position
    if num_blocks is not None:
        room = model.kv_groups.tokens_in(num_blocks, config.block_size, config.bounds.max_tokens)
    if config.max_context is None:
        return min(model.max_position, room)
    if config.max_context > model.max_position:
        raise ConfigError(
            f"max_context: {config.max_context} is outside of the model's 1 to {model.max_position} positions"
        )
    if config.max_context > room:
        raise ConfigError(
            f"max_context: {config.max_context} tokens don't fit into {num_blocks} blocks of {config.block_size} "
            "tokens: lower max_context, or raise num_blocks or kv_cache_gib"
        )
    return config.max_context


def blocks_in(size: int, config: EngineConfig, model: ModelShape, kv_dtype: torch.dtype) -> int:
    """Blocks that `size` bytes hold. Raises ConfigError where they hold none."""
    one = block_bytes(config, model, kv_dtype)
    if size < one:
        raise ConfigError(f"a KV cache of {size} bytes does not hold one block, which takes {one}")
    return size // one


def block_bytes(config: EngineConfig, model: ModelShape, kv_dtype: torch.dtype) -> int:
    """Return kv_block_bytes for this engine's ranks and stages."""
    return kv_block_bytes(model, config.block_size, kv_dtype.itemsize, config.parallel)
