"""Published numbers are ours, the tables of the documentation are the code's, and our server counts the same bytes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from twostroke.kvtransfer.rules.layout import cut_lane, first_units, plan_lanes
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.cache.kv_cache import make_kv_cache
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.weights import Checkpoint
from twostroke.model.published.models import published_model
from twostroke.model.sizes import weight_bytes
from twostroke.planning.published import check_lines, rows
from twostroke.planning.tables import BEGIN, END, tables
from twostroke.protocol.kv_layout import KVLayout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planning.md"


def test_no_published_number_is_another_than_ours() -> None:
    lines, count, wrong = check_lines()
    assert [line for line in lines if "WRONG" in line] == []
    assert (count >= 30, wrong) == (True, 0)
    assert all(row.source for row in rows())


def test_a_number_beyond_rounding_is_told_to_be_wrong() -> None:
    row = next(row for row in rows() if row.theirs == "8.03")
    assert not row.is_wrong
    assert replace(row, ours=8.036).is_wrong
    assert replace(row, ours=8.023).is_wrong


def test_the_tables_of_the_documentation_are_made_by_the_command() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = text[text.index(BEGIN) : text.index(END) + len(END)] + "\n"
    assert found == tables(), "make them again: twostroke plan --tables"


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_counted_as_the_checkpoint_has_them(ranks: int) -> None:
    config = load_model_config(BUNDLED_MODEL_DIR)
    checkpoint = Checkpoint(BUNDLED_MODEL_DIR, config)
    held = sum(checkpoint.tensor(name).nbytes for name in checkpoint.shapes)
    assert weight_bytes(config, checkpoint.dtype.itemsize, "none", ranks=ranks) == -(-held // ranks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "fp8"])
@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-V2-Lite", "gpt-oss-20b"])
def test_a_cache_takes_the_bytes_that_are_planned(name: str, ranks: int, dtype: torch.dtype) -> None:
    """Heads and copies of them, latents, and layers with windows, which take turns in the same blocks."""
    shape, blocks, size = published_model(name), 3, 16
    cache = make_kv_cache(
        shape,
        num_blocks=blocks,
        block_size=size,
        dtype=dtype,
        device=torch.device("cpu"),
        model_digest="",
        tp_size=ranks,
    )
    try:
        on_ranks = ranks * sum(tensor.nbytes for tensor in cache.tensors)
    finally:
        cache.close()
    copies = max(1, ranks // shape.num_kv_heads)
    assert on_ranks * shape.kv_groups.count == blocks * size * shape.kv_values * dtype.itemsize * copies


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "DeepSeek-V3", "gpt-oss-20b", "gemma-3-4b"])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 4)])
def test_lanes_of_a_transfer_carry_the_bytes_that_are_planned(name: str, ranks: tuple[int, int]) -> None:
    """Of a layer with a window what follow-ups attend to: its window of tokens, the next one among them."""
    shape, tokens = published_model(name), 4096
    source, target = (
        KVLayout(
            *("", "bfloat16", shape.num_layers, shape.num_kv_heads, shape.head_dim, block, size),
            windows=shape.windows,
            kinds=shape.kv_kinds,
        )
        for block, size in zip((64, 16), ranks, strict=True)
    )
    carried = 0
    for lane in plan_lanes(source, target):
        cut, _ = cut_lane(lane, source, target, "raw")
        first = first_units(source.groups, lane.layers, tokens, cut.unit_tokens, 0, lane.share)
        carried += (
            sum(cut.share.below(tokens // cut.unit_tokens) - first[layer] for layer in lane.layers) * cut.unit_bytes
        )
    copies = max(1, ranks[1] // shape.num_kv_heads)
    assert carried == round(tokens * source.token_bytes * source.groups.share_sent(tokens)) * copies
    assert source.token_bytes == 2 * shape.kv_values
