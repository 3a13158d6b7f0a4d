"""Published numbers are ours, and our server counts the same bytes."""

import json
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from twostroke.cluster.cli import main
from twostroke.kvtransfer.layout import first_units, pair_shards, rank_pairs
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.cache.kv_cache import make_kv_cache
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.weights import Checkpoint
from twostroke.model.costs.sizes import weight_bytes
from twostroke.model.parallel.form import ParallelForm
from twostroke.model.published.hardware import HARDWARE, read_hardware
from twostroke.model.published.models import MODELS, published_model, read_models
from twostroke.planning.costs import literature
from twostroke.planning.costs.literature import checked, read_rows
from twostroke.planning.costs.tables import tables
from twostroke.protocol.errors import ConfigError
from twostroke.protocol.kv_layout import KVLayout

LITERATURE = ("System Characteristics", "Day 57", "Bottlenecks", "Inference Basics", "Inference Systems Overview")


def test_no_number_of_the_literature_is_another_than_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "--check"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "WRONG" in line] == []
    assert json.loads(last) == {"rows": len(checked()), "wrong": 0}
    assert len(checked()) >= 60
    sources = {row.source for row, _ in checked()}
    assert all(sources)
    assert all(any(said in source for source in sources) for said in LITERATURE)


def test_a_number_that_is_another_fails_the_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (row, ours), *others = checked()
    monkeypatch.setattr(literature, "checked", lambda: [(row, ours * 1.1), *others])
    assert main(["capacity", "--check"]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["wrong"] == 1
    assert [row.what in line for line in lines if "WRONG" in line] == [True]


def test_a_number_beyond_rounding_is_told_to_be_wrong() -> None:
    row = next(row for row, _ in checked() if row.stated == "8.03")
    assert [row.is_wrong(ours) for ours in (8.03, 8.034, 8.036, 8.023)] == [False, False, True, True]
    rounded = structs.replace(row, stated="8.1e16", within=0.0)
    assert [rounded.is_wrong(ours) for ours in (8.06e16, 8.16e16)] == [False, True]
    within = structs.replace(row, stated="2 to 4")
    assert [within.is_wrong(ours) for ours in (1.4, 1.6, 3.0, 4.6)] == [True, False, False, True]
    lower, upper = (structs.replace(row, stated="12", bound=bound) for bound in ("lower", "upper"))
    assert [(lower.is_wrong(ours), upper.is_wrong(ours)) for ours in (7.0, 13.0)] == [(False, True), (True, False)]


def test_where_a_source_slips_ours_is_held_against_the_right_number() -> None:
    slips = [(row, ours) for row, ours in checked() if row.right]
    assert len(slips) >= 10
    assert all(row.remark for row, _ in slips)
    assert [row.what for row, ours in slips if not structs.replace(row, right="").is_wrong(ours)] == []


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"formula": "luck"}, r"no formula 'luck' - at `\$\[0\].formula`"),
        ({"right": "3"}, r"a slip needs a remark - at `\$\[0\].remark`"),
        ({"stated": 3}, r"Expected `str`, got `int` - at `\$\[0\].stated`"),
        ({"sauce": ""}, "unknown field `sauce`"),
    ],
)
def test_a_row_that_is_none_names_its_field(row: dict[str, Any], told: str) -> None:
    whole = {"what": "x", "source": "y", "stated": "2", "formula": "quotient", "given": {"of": 4, "by": 2}}
    assert read_rows(json.dumps([whole]).encode(), "rows")[0].ours == 2
    with pytest.raises(ConfigError, match=f"^rows: .*{told}"):
        read_rows(json.dumps([whole | row]).encode(), "rows")


def test_a_wrong_field_of_the_tables_of_models_and_hardware_is_named() -> None:
    with pytest.raises(ConfigError, match=r"models: .*`source` - at `\$\[0\]`"):
        read_models(b'[{"name": "x", "config": {}}]', "models")
    row = json.loads(msgspec.json.encode(HARDWARE["h200"]))
    assert read_hardware(json.dumps([row]).encode(), "gpus")["h200"] == HARDWARE["h200"]
    with pytest.raises(ConfigError, match=r"gpus: .*at `key` in `\$\[0\].flops_per_s"):
        read_hardware(json.dumps([row | {"flops_per_s": {"fp9": 1.0}}]).encode(), "gpus")
    with pytest.raises(ConfigError, match="gpus: all figures are to be above 0"):
        read_hardware(json.dumps([row | {"read_bytes_per_s": 0.0}]).encode(), "gpus")


def test_the_tables_have_a_row_for_each_gpu_and_each_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capacity", "--tables"]) == 0
    told = capsys.readouterr().out
    assert told == tables()
    assert all(f"| `{name}` |" in told for name in HARDWARE)
    assert all(f"\n| {one} |" in told for one in MODELS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_counted_as_the_checkpoint_has_them(ranks: int) -> None:
    config = load_model_config(BUNDLED_MODEL_DIR)
    checkpoint = Checkpoint(BUNDLED_MODEL_DIR, config)
    held = sum(checkpoint.tensor(name).nbytes for name in checkpoint.shapes)
    assert weight_bytes(config, checkpoint.dtype.itemsize, "none", parallel=ParallelForm(ranks)) == -(-held // ranks)


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
        parallel=ParallelForm(ranks),
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
    """A layer with a window sends what follow-ups attend to: its window of tokens, the next one among them."""
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
    for pair in rank_pairs(source, target):
        shard, _ = pair_shards(pair, source, target, "raw")
        first = first_units(source.groups, pair.layers, tokens, shard.unit_tokens, 0, pair.share)
        carried += (
            sum(shard.share.below(tokens // shard.unit_tokens) - first[layer] for layer in pair.layers)
            * shard.unit_bytes
        )
    copies = max(1, ranks[1] // shape.num_kv_heads)
    assert carried == source.sent_bytes(tokens) * copies
    assert source.token_bytes == 2 * shape.kv_values
