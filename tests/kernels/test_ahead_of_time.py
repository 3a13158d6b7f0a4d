"""Every kernel compiles for GPUs that are not there, within their registers and shared memory."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.ahead_of_time import FAMILIES, TARGETS, compile_family

LIMIT_S = 240.0
OF_STATES = {"convolution_kernel", "delta_step_kernel", "mamba_step_kernel", "convolution_gate_kernel"}
EARLY = {
    "rms_norm_kernel",
    "gemm_kernel",
    "rope_kv_kernel",
    "decode_attention_kernel",
    "merge_segments_kernel",
} | OF_STATES
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}  # a program's most


def compiled_for(family: str, *capabilities: int) -> Any:
    """`make test` compiles the family for a GPU with wgmma, in few shapes where it has a version of these;
    `make test-wide` has all of it for each GPU."""
    first = f"few_{family}" if f"few_{family}" in FAMILIES else family
    cases = [pytest.param(first, 90, id="90")]
    for one in capabilities or TARGETS:
        if (family, one) != (first, 90):
            cases.append(pytest.param(family, one, marks=pytest.mark.wide, id=f"all of {one}"))
    return pytest.mark.parametrize(("family", "capability"), cases)


COPYING = {"move_units_kernel", "digest_parts_kernel"}


Compiled = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def forks() -> Any:
    """Starts processes that have torch and Triton, without the interpreter: loading these takes longer than most
    families take to compile, and each needs a process that has compiled nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "tests.kernels.ahead_of_time"])
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("TRITON_INTERPRET", raising=False)
        forkserver.ensure_running()
    return context


@pytest.fixture
def compiled(forks: Any, tmp_path: Path) -> Compiled:
    """Gives the launches of a family, each with at most so many bytes spilled and within the GPU's shared memory."""

    def compile_anew(family: str, capability: int, most_spilled: int = 0) -> list[dict[str, Any]]:
        with ProcessPoolExecutor(1, forks) as fork:
            kernels = fork.submit(compile_family, capability, family, tmp_path).result(LIMIT_S)
        for kernel in kernels:
            assert kernel["spilled_bytes"] <= most_spilled, kernel
            assert kernel["shared_bytes"] < SHARED_BYTES[capability], kernel
            # Whoever is launched before the kernel ahead of it has ended must wait for it.
            is_early = capability >= 90 and kernel["kernel"] in EARLY
            assert kernel["awaits_inputs"] == kernel["launched_early"] == is_early, kernel
            assert not kernel["is_hasty"], kernel  # nothing is read, written or ended before the wait
        return kernels

    return compile_anew


def names(kernels: list[dict[str, Any]]) -> set[str]:
    return {kernel["kernel"] for kernel in kernels}


@compiled_for("attention")
def test_attention_compiles_to_asynchronous_copies_and_the_best_products_there_are(
    family: str, capability: int, compiled: Compiled
) -> None:
    # What is spilled of decodes is stored and loaded once a row, outside the loop over its keys. Hopper's tiles of
    # heads of 128 were the fastest of ten on an H200, though they spill.
    kernels = compiled(family, capability, most_spilled={80: 8, 90: 256}.get(capability, 0))
    for kernel in kernels:
        may_spill = kernel["kernel"] == "prefill_attention_kernel" and kernel["head_dim_padded"] == 128
        assert capability != 90 or may_spill or not kernel["spilled_bytes"], kernel
    paged = {"prefill_attention_kernel", "decode_attention_kernel", "merge_segments_kernel"}
    assert names(kernels) == paged
    few = {64, 128}
    dims = few if family == "few_attention" else {128, 256} if capability == 89 else {64, 80, 96, 128, 256, 512}
    for name in ("prefill_attention_kernel", "decode_attention_kernel"):
        assert {kernel["head_dim"] for kernel in kernels if kernel["kernel"] == name} == dims
    for name in names(kernels) - {"merge_segments_kernel"}:  # which knows of none
        windows = {kernel["window"] for kernel in kernels if kernel["kernel"] == name}
        assert len(windows) > 1, name
    for kernel in kernels:
        prefill = kernel["kernel"] == "prefill_attention_kernel"
        # Without asynchronous copies the loop over the keys would wait for memory at every step.
        copies = kernel["kernel"] in ("prefill_attention_kernel", "decode_attention_kernel")
        assert kernel["async_copies"] == copies, kernel
        assert kernel["wgmma"] == (prefill and capability == 90), kernel
        assert kernel["tcgen05"] == (prefill and capability == 100), kernel


@compiled_for("attention_over_fp8")
def test_attention_over_a_cache_in_fp8_compiles_as_over_any_other(
    family: str, capability: int, compiled: Compiled
) -> None:
    kernels = compiled(family, capability, most_spilled=16)  # as above, and of a sink
    attending = {"prefill_attention_kernel", "decode_attention_kernel"}
    assert names(kernels) == attending | {"merge_segments_kernel", "rope_kv_kernel"}
    for kernel in kernels:
        prefill = kernel["kernel"] == "prefill_attention_kernel"
        assert kernel["async_copies"] == (kernel["kernel"] in attending), kernel
        assert kernel["wgmma"] == (prefill and capability == 90), kernel
        assert kernel["tcgen05"] == (prefill and capability == 100), kernel


@compiled_for("latents")
def test_attention_to_latents_compiles_to_asynchronous_copies(family: str, capability: int, compiled: Compiled) -> None:
    kernels = compiled(family, capability)
    attending = {"latent_decode_kernel", "latent_part_kernel"}
    assert names(kernels) == attending | {"write_latents_kernel", "turn_queries_kernel", "merge_segments_kernel"}
    for kernel in kernels:
        # Without asynchronous copies the loop over the context would wait for memory at every step.
        assert kernel["async_copies"] == (kernel["kernel"] in attending), kernel
        of_prompts = kernel["kernel"] == "latent_part_kernel"
        assert kernel["wgmma"] == (of_prompts and capability == 90), kernel
        assert kernel["tcgen05"] == (of_prompts and capability == 100), kernel


@compiled_for("elementwise")
def test_elementwise_kernels_compile_to_wide_loads(family: str, capability: int, compiled: Compiled) -> None:
    kernels = compiled(family, capability)
    of_some_families = {"square_sums_kernel", "norm_rows_kernel", "soft_cap_kernel"}
    assert (
        names(kernels) == {"rms_norm_kernel", "rope_kv_kernel", "gate_kernel", "gate_codes_kernel"} | of_some_families
    )
    for kernel in kernels:
        assert kernel["wide_loads"] or kernel["kernel"] == "rope_kv_kernel", kernel


@compiled_for("states")
def test_steps_of_states_compile_to_wide_loads_and_programs_that_share_a_multiprocessor(
    family: str, capability: int, compiled: Compiled
) -> None:
    kernels = compiled(family, capability)
    assert names(kernels) == OF_STATES
    for kernel in kernels:
        # The convolution's numbers lie in threes.
        assert kernel["wide_loads"] or kernel["kernel"] == "convolution_kernel", kernel
        # Two programs of 256 threads, which hold a matrix each.
        assert kernel["registers"] <= 128 or capability < 90, kernel


@compiled_for("transfer")
def test_kernels_of_kv_transfer_compile_to_wide_copies(family: str, capability: int, compiled: Compiled) -> None:
    kernels = compiled(family, capability)
    assert names(kernels) == COPYING | {"code_units_kernel", "digest_kernel"}
    for kernel in kernels:
        # A copy of single words takes several times as long.
        assert kernel["wide_loads"] or kernel["kernel"] not in COPYING, kernel
        # A product that is not rounded before it is added to gives other codes than the host's.
        assert not kernel["fused_products"], kernel


@compiled_for("projections")
def test_projections_compile_to_asynchronous_copies_and_the_best_products_there_are(
    family: str, capability: int, compiled: Compiled
) -> None:
    kernels = compiled(family, capability)
    assert names(kernels) == {"gemm_kernel"} | ({"vocab_embedding_kernel"} if capability == 90 else set())
    products = [kernel for kernel in kernels if kernel["kernel"] == "gemm_kernel"]
    for kernel in products:
        # Without asynchronous copies each step would wait for memory.
        assert kernel["async_copies"], kernel
        # Tiles of fewer than 64 rows take the matrix instructions of a warp.
        assert kernel["wgmma"] == (capability == 90 and kernel["block_n"] >= 64), kernel
        assert kernel["tcgen05"] == (capability == 100 and kernel["block_n"] >= 64), kernel
    for bits in (16, 8, 4):
        tiles = [kernel for kernel in products if kernel["bits"] == bits]
        assert any(kernel["splits"] > 1 for kernel in tiles)
        # Of tokens: cuBLAS has prompts unless weights are quantised.
        largest = 64 if bits == 16 else 256 if capability >= 90 else 128
        assert max(kernel["block_t"] for kernel in tiles) == largest


@compiled_for("grouped_projections")
def test_projections_of_checkpoints_forms_compile_to_asynchronous_copies(
    family: str, capability: int, compiled: Compiled
) -> None:
    kernels = compiled(family, capability)
    products = [kernel for kernel in kernels if kernel["kernel"] == "grouped_gemm_kernel"]
    assert {kernel["block_t"] for kernel in products} == {16, 64, 128}
    assert all(kernel["async_copies"] for kernel in products)
    assert any(kernel["wgmma"] for kernel in products) == (capability == 90)


@compiled_for("gated_projections")
def test_products_that_end_in_a_gate_compile_as_those_that_do_not(
    family: str, capability: int, compiled: Compiled
) -> None:
    kernels = compiled(family, capability)
    products = [kernel for kernel in kernels if kernel["kernel"] == "gemm_kernel"]
    # Of prompts the gate is a launch of its own.
    assert {kernel["kernel"] for kernel in kernels} >= {"gemm_kernel", "gate_kernel"}
    assert {kernel["block_t"] for kernel in products} >= {16, 32, 64}
    assert all(kernel["async_copies"] for kernel in products)
    assert any(kernel["wgmma"] for kernel in products) == (capability == 90)


@compiled_for("fp8_projections", 89, 90, 100)
def test_products_of_fp8_compile_to_the_best_there_are(family: str, capability: int, compiled: Compiled) -> None:
    kernels = compiled(family, capability)
    assert names(kernels) == {"gemm_kernel", "quantize_tokens_kernel"}
    products = [kernel for kernel in kernels if kernel["kernel"] == "gemm_kernel"]
    assert {(kernel["block_t"], kernel["scales_steps"]) for kernel in products} == {
        (tokens, by_steps) for tokens in (16, 32, 64, 128) for by_steps in (False, True)
    }
    for kernel in products:
        assert kernel["async_copies"], kernel
        assert kernel["wgmma"] == (capability == 90), kernel
        assert kernel["tcgen05"] == (capability == 100), kernel


@compiled_for("sampling")
def test_sampling_compiles_to_wide_loads_and_programs_that_share_a_multiprocessor(
    family: str, capability: int, compiled: Compiled
) -> None:
    # ptxas keeps one number of the row's, not of its logits, in memory.
    kernels = compiled(family, capability, most_spilled=8)
    # Only vocabularies, of which there are two here, have kernels of their own: what rows ask for, and how many they
    # are, changes from step to step, and a step would wait for the compiler.
    few = {"prepare_kernel": 2, "settle_kernel": 2, "mask_kernel": 2}
    counts = {name: sum(kernel["kernel"] == name for kernel in kernels) for name in names(kernels)}
    assert counts == few | {"extremes_kernel": 1, "weigh_kernel": 6, "cut_kernel": 2, "race_kernel": 1}
    for kernel in kernels:
        # Four programs of 128 threads on one multiprocessor, at least: their loads are what hides memory's latency.
        assert kernel["registers"] <= 128, kernel
        assert kernel["shared_bytes"] <= 16 << 10, kernel
        # These read no logits: what is left of a row's groups or parts, and a word for 32 tokens.
        assert kernel["wide_loads"] or kernel["kernel"] in few, kernel


@compiled_for("experts")
def test_experts_compile_to_products_whose_weights_are_copied_ahead(
    family: str, capability: int, compiled: Compiled
) -> None:
    kernels = compiled(family, capability)
    products = {"gate_up_kernel", "down_kernel"}
    others = {"route_kernel", "locate_kernel", "order_kernel", "sum_kernel", "gate_by_sigmoid_kernel"}
    assert names(kernels) == products | others
    for name in products:
        of_it = [kernel for kernel in kernels if kernel["kernel"] == name]
        assert {kernel["block_t"] for kernel in of_it} == {16, 64, 128}
        assert len(of_it) == 12  # of four forms
        for kernel in of_it:
            assert kernel["async_copies"], kernel
