"""FLOPs and bytes of steps, against numbers computed by hand, and which GPUs have published limits."""

from dataclasses import replace

import pytest

from twostroke.model.config import (
    IndexSizes,
    MLASizes,
    ModelShape,
)
from twostroke.model.costs.operations import NumberFormats, StepWork, decode_operations, step_work
from twostroke.model.machine_limits import published_gpu
from twostroke.model.published.hardware import GIB
from twostroke.model.published.models import published_model

TINY = ModelShape(
    vocab_size=32,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_position=64,
)
ATTENTION, MLP, HEAD = 8 * 8 + 8 * 8 + 8 * 8, 3 * 8 * 16, 8 * 32  # weights: queries, keys and values, output; MLP; head


def test_a_token_multiplies_each_weight_once_and_a_step_reads_it_once() -> None:
    work = step_work(TINY)
    assert work.token_flops == 2 * 2 * (ATTENTION + MLP)
    assert work.row_flops == 2 * 2 * (ATTENTION + MLP) + 2 * HEAD
    assert work.pair_flops == work.context_flops == 2 * 2 * (2 * 8), "two products of 8 numbers in each of two layers"
    assert work.weight_bytes == 2 * (2 * (ATTENTION + MLP) + HEAD)
    assert work.context_bytes == 2 * 2 * (2 * 4), "a key and a value of 4 numbers in each of two layers"
    assert work.expert_bytes == 0


def test_a_steps_flops_and_bytes_are_the_sums_of_its_parts() -> None:
    work = StepWork(100.0, 3.0, 120.0, 5.0, 1000.0, 0.0, 0.0, 7.0)
    assert work.flops(10, 50.0, 4, 80) == 10 * 100 + 50 * 3 + 4 * 120 + 80 * 5
    assert work.read_bytes(10, 4, 80) == 1000 + 80 * 7


def test_of_experts_a_step_reads_those_that_its_tokens_hit() -> None:
    work = StepWork(0.0, 0.0, 0.0, 0.0, 1000.0, 800.0, 0.25, 0.0)
    assert work.read_bytes(0, 1, 0) == 1000 + 200
    assert work.read_bytes(0, 2, 0) == 1000 + 800 * (1 - 0.75**2)
    mixtral = step_work(published_model("Mixtral-8x7B-v0.1"))
    assert mixtral.read_bytes(4096, 0, 0) == pytest.approx(46.7e9 * 2, rel=0.01), "46.7 billion parameters in bf16"
    assert mixtral.row_flops == pytest.approx(12.9e9 * 2, rel=0.03), "12.9 billion of them for a token"


def test_quantised_weights_are_fewer_bytes_and_the_cache_counts_by_its_own_numbers() -> None:
    work = step_work(TINY, NumberFormats("int8", 2.0, 1.0))
    assert work.weight_bytes < step_work(TINY).weight_bytes
    assert work.context_bytes == step_work(TINY).context_bytes / 2


def test_layers_with_windows_add_nothing_for_a_longer_context() -> None:
    for window in (4, -4):
        windowed = ModelShape(**{**vars(TINY), "windows": (window, 0)})
        assert step_work(windowed).context_flops == step_work(TINY).context_flops / 2
        assert step_work(windowed).pair_flops == step_work(TINY).pair_flops / 2


def test_beyond_what_is_attended_to_a_token_adds_a_key_of_the_index_and_its_scores() -> None:
    latent = MLASizes(rank=16, rotary=4, key=8, value=8, query_rank=12)
    indexed = replace(latent, index=IndexSizes(heads=3, key=6, top_k=32, sharing=frozenset({1})))
    shape, dense = (ModelShape(**{**vars(TINY), "head_dim": one.row, "latent": one}) for one in (indexed, latent))
    work = step_work(shape)
    assert work.context_bytes == 2 * 6, "one of two layers has an index"
    assert work.context_flops == work.pair_flops == 2 * 3 * (6 + 1)
    assert work.token_flops > step_work(dense).token_flops
    within, beyond = (decode_operations(shape, 2, context) for context in (32, 100))
    assert sum(one.kv_bytes for one in within) == sum(one.kv_bytes for one in decode_operations(dense, 2, 32))
    assert sum(one.kv_bytes for one in beyond) == 2 * 2 * (2 * 32 * 20 + 100 * 6)


@pytest.mark.parametrize(
    ("told", "gib", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", 80, "h100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100-80gb"),
        ("NVIDIA L40S", 45, "l40s"),
        ("NVIDIA H100 PCIe", 80, None),
        ("NVIDIA A10G", 24, None),
    ],
)
def test_a_gpu_has_the_tables_limits_by_its_name_and_memory(told: str, gib: int, expected: str | None) -> None:
    found = published_gpu(told, gib * GIB)
    assert (None if found is None else found.name) == expected
