"""Compiles the kernels of an engine's steps in threads, before the first of them is launched.

Triton compiles a kernel where it is first launched, and the caller waits: 50 kernels take 15 s one after the other.
Most of a kernel's time is LLVM's and ptxas's, which leave the interpreter's lock to others.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction

from twostroke.model.batch import Drawing, StepDecoder, StepInput, make_layouts, place
from twostroke.model.cache.kv_cache import KVCache
from twostroke.model.cuda.kernels import launch
from twostroke.model.cuda.sampler import DeviceSampler
from twostroke.model.sampling.token_masks import TokenMasks
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import SamplingParams

_log = logging.getLogger(__name__)
_MAX_THREADS = 16
_ALONE = threading.Lock()  # of two at once the last to end would leave the other's patch in Triton


@dataclass
class Compiled:
    """Kernels that a compilation in threads has brought."""

    kernels: int = 0


@contextmanager
def compiling_in_threads(threads: int) -> Iterator[Compiled]:
    """Inside, this thread's launches compile what they would launch, and launch nothing; at the end all is compiled.

    What kernels would have written is of any value: nothing may depend on it.
    """
    caller, compiled = threading.get_ident(), Compiled()
    with _ALONE:
        run = JITFunction.run

        def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            is_ours = threading.get_ident() == caller
            return run(self, *args, grid=grid, warmup=warmup or is_ours, **kwargs)

        launch.compiles_only = True
        JITFunction.run = compile_only
        try:
            with ThreadPoolExecutor(threads, "compile") as pool, AsyncCompileMode(pool) as mode:
                yield compiled
            for kernel in mode.future_kernels.values():
                compiled.kernels += 1
                if torch.cuda.is_available():
                    kernel.result().run  # noqa: B018  loads it, so that its memory is taken before the cache is sized
        finally:
            JITFunction.run = run
            launch.compiles_only = False


def compile_steps(decoder: StepDecoder, sampler: object, make_cache: Callable[..., KVCache]) -> None:
    """Compile what steps of decodes and of prompts launch, and draws of every kind. All ranks call this together.

    `sampler` draws where it is a DeviceSampler. `make_cache` is called for a cache of one block.
    """
    kv_cache = make_cache(num_blocks=1, model_digest="")
    begin, threads = time.monotonic(), min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with torch.inference_mode(), compiling_in_threads(threads) as compiled:
        for lengths in ([1, 2], [1]):
            decoder.forward(_step(kv_cache, lengths))
        if isinstance(sampler, DeviceSampler):
            _draw(sampler, torch.empty((2, decoder.vocab_size), device=kv_cache.tensors[0].device))
    kv_cache.close()
    _log.info(
        "compiled %d kernels in %.1f s, in %d threads; TRITON_CACHE_DIR (%s) keeps them for later starts",
        compiled.kernels,
        time.monotonic() - begin,
        threads,
        os.environ.get("TRITON_CACHE_DIR", "not set: ~/.triton/cache"),
    )


def _step(kv_cache: KVCache, lengths: list[int]) -> StepInput:
    """Sequences of one block, the cache's first."""
    device, groups = kv_cache.tensors[0].device, kv_cache.groups
    steps = [SequenceStep([0] * length, start=0, block_ids=[0] * groups.count, draw=None) for length in lengths]
    rows, count = sum(lengths), len(lengths)
    return StepInput(
        torch.zeros(rows, dtype=torch.int64, device=device),
        make_layouts(steps, kv_cache.block_size, device, groups, kv_cache.local_tokens),
        kv_cache.tensors,
        Drawing(place(np.cumsum(lengths) - 1, device), torch.arange(count, dtype=torch.int64, device=device)),
    )


def _draw(sampler: DeviceSampler, logits: torch.Tensor) -> None:
    count, words = len(logits), -(-logits.shape[1] // 32)
    draw = Draw(SamplingParams(temperature=1.0, top_k=2, top_p=0.9), history=[0], num_prompt_tokens=1)
    masks = TokenMasks(np.arange(count), np.full((count, words), -1, np.int32))
    sampler.launch(logits, [draw] * count, [1] * count, masks)
