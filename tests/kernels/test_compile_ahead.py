"""Kernels compiled ahead of an engine's first step are those that steps launch, on a GPU that is absent."""

import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.kernels.ahead_of_time import AbsentGpu
from tests.model.conftest import WriteCheckpoint, make_decoder
from twostroke.model.batch import Drawing, StepInput, make_layouts
from twostroke.model.cuda.backend import CudaBackend
from twostroke.model.cuda.compile_ahead import compile_steps, compiling_in_threads
from twostroke.model.cuda.kernels import elementwise, launch
from twostroke.model.cuda.sampler import DeviceSampler
from twostroke.model.sampling.token_masks import TokenMasks
from twostroke.model.step import Draw, SequenceStep
from twostroke.protocol.requests import SamplingParams

LIMIT_S = 120.0
STEPS = [[1], [3], [1, 1, 5], [1, 1, 1], [7, 9], [1, 16, 17], [1, 40, 60], [90], [1] * 20]


@pytest.fixture(scope="module")
def process() -> Any:
    """Starts processes without the interpreter, which this one may have loaded Triton with."""
    context = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("TRITON_INTERPRET", raising=False)
        yield partial(ProcessPoolExecutor, 1, context)


def launched_variants(folder: Path, **options: Any) -> tuple[set[str], set[str]]:
    """Kernels with what they are specialised on: those compiled ahead, and those of steps of all kinds."""
    driver.set_active(AbsentGpu(90))
    run, found = JITFunction.run, set[str]()

    def note(*, fn: Any, key: Any, **_: Any) -> bool:
        found.add(f"{fn.name} {key}")
        return True  # or it would be compiled

    knobs.runtime.jit_cache_hook = note
    made = partial(
        make_decoder, folder, CudaBackend(launch.H100), num_blocks=64, block_size=16, dtype=torch.bfloat16, **options
    )
    decoder, cache = made()
    sampler = DeviceSampler(decoder.vocab_size, torch.device("cpu"))
    compile_steps(decoder, sampler, lambda **_: made()[1])
    ahead, found = found, set()

    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: run(self, *args, grid=grid, warmup=True, **kwargs)
    groups = cache.groups
    for lengths in STEPS:
        steps, first = [], 0
        for length in sorted(lengths):
            blocks = -(-(length + 5) // 16) * groups.count
            steps.append(SequenceStep([0] * length, 5, [block % 64 for block in range(first, first + blocks)], None))
            first += blocks
        rows, sequences = np.cumsum(sorted(lengths)) - 1, np.arange(len(lengths))
        layouts = make_layouts(steps, 16, torch.device("cpu"), groups, cache.local_tokens)
        drawing = Drawing(torch.from_numpy(rows), torch.from_numpy(sequences))
        tokens = torch.zeros(sum(lengths), dtype=torch.int64)
        logits = decoder.forward(StepInput(tokens, layouts, cache.tensors, drawing))
        assert logits is not None
        for top_k, top_p in ((0, 1.0), (5, 1.0), (0, 0.5), (5, 0.5)):
            draw = Draw(SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p), [0], 1)
            masks = TokenMasks(np.arange(1), np.zeros((1, -(-logits.shape[1] // 32)), np.int32))
            sampler.launch(logits, [draw] * len(logits), [1] * len(logits), masks)
    return ahead, found


WINDOWED = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "head_dim": 16, "query_pre_attn_scalar": 16,
    "rope_local_base_freq": 10000.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        pytest.param({}, {}, id="plain"),
        pytest.param({}, {"quantization": "int4"}, id="int4"),
        pytest.param({}, {"kv_dtype": torch.float8_e4m3fn}, id="KV in FP8"),
        pytest.param(WINDOWED, {}, id="groups of layers"),
    ],
)
def test_no_step_launches_a_variant_that_was_not_compiled_ahead(
    fields: dict[str, Any], options: dict[str, Any], write_checkpoint: WriteCheckpoint, process: Any
) -> None:
    folder = write_checkpoint(hidden_size=64, intermediate_size=128, **fields)
    with process() as executor:
        ahead, launched = executor.submit(launched_variants, folder, **options).result(LIMIT_S)
    assert len(ahead) > 8
    assert launched - ahead == set()
    # Nor is any specialised on what differs from step to step, such as where a slice of a tensor begins.
    assert len({variant.replace("'D'", "''") for variant in launched}) == len(launched)


def compile_some(folder: Path) -> tuple[int, list[str], bool]:
    """Return how many kernels were compiled, those compiled at launch, and if launches still compile alone."""
    knobs.cache.dir = str(folder)
    driver.set_active(AbsentGpu(90))
    run, x = JITFunction.run, torch.zeros((3, 64), dtype=torch.bfloat16)
    with compiling_in_threads(2) as compiled:
        for _ in range(2):
            elementwise.rms_norm(x, x[0], 1e-5)
            elementwise.gate(x, "silu")
    later: list[str] = []
    knobs.runtime.jit_cache_hook = lambda *, repr, **_: later.append(repr)
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: run(self, *args, grid=grid, warmup=True, **kwargs)
    elementwise.rms_norm(x, x[0], 1e-5)
    elementwise.gate(x, "silu")
    return compiled.kernels, later, launch.compiles_only


def test_kernels_compiled_in_threads_are_there_when_they_are_launched(process: Any, tmp_path: Path) -> None:
    with process() as executor:
        kernels, later, compiles_only = executor.submit(compile_some, tmp_path).result(LIMIT_S)
    assert (kernels, later, compiles_only) == (2, [], False)


def compile_in_two_threads() -> bool:
    """Return True if Triton launches as before once both threads are done, the second of which began within the
    first."""
    run, within, second_is_in = JITFunction.run, threading.Event(), threading.Event()

    def first() -> None:
        with compiling_in_threads(1):
            within.set()
            second_is_in.wait(0.5)

    thread = threading.Thread(target=first)
    thread.start()
    within.wait()
    with compiling_in_threads(1):
        second_is_in.set()
        thread.join()
    return JITFunction.run is run and not launch.compiles_only


def test_two_compilations_at_once_leave_triton_as_it_was(process: Any) -> None:
    with process() as executor:
        assert executor.submit(compile_in_two_threads).result(LIMIT_S)
