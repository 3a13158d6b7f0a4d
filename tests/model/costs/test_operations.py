"""Operations of a step: what holds for every model, and what the literature says of some."""

import pytest

from twostroke.model.costs.operations import Operation, decode_operations, prefill_operations
from twostroke.model.published.hardware import HARDWARE
from twostroke.model.published.models import published_model

KINDS = ("Llama-3.1-8B", "Mixtral-8x7B-v0.1", "DeepSeek-V3", "gpt-oss-20b", "gemma-3-12b")
"""Dense, with experts, with latents and shared experts, with windows in every other layer, in most layers."""


def by_name(operations: list[Operation]) -> dict[str, Operation]:
    return {one.name: one for one in operations}


@pytest.mark.parametrize("name", KINDS)
def test_more_rows_and_more_context_never_take_fewer_operations_or_bytes(name: str) -> None:
    shape = published_model(name)
    small, larger, longer = (
        by_name(decode_operations(shape, batch, context)) for batch, context in ((4, 256), (9, 256), (4, 700))
    )
    for operation, one in small.items():
        for more in (larger[operation], longer[operation]):
            assert more.flops >= one.flops
            assert more.bytes >= one.bytes


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_in_two_chunks_attends_and_multiplies_as_one_in_one(name: str) -> None:
    shape = published_model(name)
    whole = by_name(prefill_operations(shape, 1500, is_last=False))
    first, second = (
        by_name(prefill_operations(shape, tokens, before, is_last=False)) for tokens, before in ((700, 0), (800, 700))
    )
    for operation, one in whole.items():
        assert one.flops == pytest.approx(first[operation].flops + second[operation].flops)


def test_intensity_is_the_tokens_for_products_and_the_heads_a_kv_head_for_attention() -> None:
    shape = published_model("Llama-3.1-8B")
    decode = by_name(decode_operations(shape, 4, 100_000))
    assert decode["MLP"].flops / decode["MLP"].weight_bytes == 4
    assert decode["attention"].intensity == pytest.approx(shape.num_heads / shape.num_kv_heads, rel=1e-3)
    assert decode["norms"].intensity < 1


def test_the_ridges_are_the_sheets() -> None:
    assert HARDWARE["a100-80gb"].ridge() == pytest.approx(153, abs=0.5)
    assert HARDWARE["h100-80gb"].ridge() == pytest.approx(295, abs=0.5)
