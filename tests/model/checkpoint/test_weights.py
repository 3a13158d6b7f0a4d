"""Checkpoints: sharded or not, and every way in which a folder does not fit."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.weights import INDEX_FILE, SINGLE_FILE, Checkpoint
from twostroke.protocol.errors import ConfigError


def open_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder, load_model_config(folder))


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def test_shards_hold_what_the_single_file_holds(write_checkpoint: Any) -> None:
    single, sharded = open_checkpoint(write_checkpoint()), open_checkpoint(write_checkpoint(shards=3))
    assert single.shapes.keys() == sharded.shapes.keys()
    assert all(torch.equal(single.tensor(name), sharded.tensor(name)) for name in single.shapes)
    assert single.digest() == sharded.digest()


def test_the_digest_tells_models_apart(write_checkpoint: Any) -> None:
    digests = [
        open_checkpoint(write_checkpoint(**fields)).digest()
        for fields in ({}, {"seed": 1}, {"dtype": torch.bfloat16}, {"rope_theta": 20000.0})
    ]
    assert len(set(digests)) == 4
    assert open_checkpoint(write_checkpoint()).digest() == digests[0]


def test_the_digest_sees_a_single_changed_number(write_checkpoint: Any) -> None:
    folder = write_checkpoint()
    before = open_checkpoint(folder).digest()

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][17, 5] += 1

    rewrite(folder, change)
    assert open_checkpoint(folder).digest() != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tensors_keep_the_checkpoints_dtype(dtype: torch.dtype, write_checkpoint: Any) -> None:
    checkpoint = open_checkpoint(write_checkpoint(dtype=dtype))
    assert checkpoint.dtype == checkpoint.tensor("model.norm.weight").dtype == dtype


def test_buffers_and_tied_heads_of_older_checkpoints_are_let_pass(write_checkpoint: Any) -> None:
    folder = write_checkpoint(tie_word_embeddings=True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(folder, change)
    assert "lm_head.weight" not in open_checkpoint(folder).shapes


@pytest.mark.parametrize(
    ("name", "held", "complaint"),
    [
        ("layers.1.mlp.up_proj", None, r"layers\.1\.mlp\.up_proj\.weight is missing"),
        ("layers.0.self_attn.q_norm", torch.ones(8), r"q_norm\.weight is none of a Llama decoder"),
        ("norm", torch.ones(31), r"norm\.weight has shape \[31\], config.json asks for \[32\]"),
        ("norm", torch.ones(32, dtype=torch.int32), r"model\.norm\.weight is I32"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    name: str, held: torch.Tensor | None, complaint: str, write_checkpoint: Any
) -> None:
    folder = write_checkpoint()

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(f"model.{name}.weight", None)
        if held is not None:
            tensors[f"model.{name}.weight"] = held

    rewrite(folder, change)
    with pytest.raises(ConfigError, match=complaint) as caught:
        open_checkpoint(folder)
    assert str(caught.value).startswith(str(folder))


def test_a_missing_shard_is_named(write_checkpoint: Any) -> None:
    folder = write_checkpoint(shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_checkpoint(folder)


def test_a_shard_without_a_promised_tensor_is_named(write_checkpoint: Any) -> None:
    folder = write_checkpoint(shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    name, _ = tensors.popitem()
    save_file(tensors, shard)
    with pytest.raises(ConfigError, match=f"{shard.name}: tensor {name} is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize("file", ["../model.safetensors", "model.bin", 3])
def test_an_index_may_only_name_safetensors_of_its_folder(file: object, write_checkpoint: Any) -> None:
    folder = write_checkpoint(shards=2)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(ConfigError, match="is no safetensors file of this folder"):
        open_checkpoint(folder)


def test_pickle_files_are_refused_unread(write_checkpoint: Any) -> None:
    folder = write_checkpoint()
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin is a pickle file"):
        open_checkpoint(folder)


def test_a_damaged_file_is_named(write_checkpoint: Any) -> None:
    folder = write_checkpoint()
    data = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=rf"{SINGLE_FILE} can't be read as safetensors"):
        open_checkpoint(folder)


def test_the_whole_file_is_read_where_an_index_of_older_shards_lies_beside_it(write_checkpoint: Any) -> None:
    folder, older = write_checkpoint(seed=1), write_checkpoint(seed=2, shards=2)
    expected = open_checkpoint(folder).digest()
    for path in older.glob("model*.safetensors*"):
        (folder / path.name).write_bytes(path.read_bytes())
    assert open_checkpoint(folder).digest() == expected, "as transformers does"
    for path in older.glob("model*-of-*.safetensors"):
        (folder / path.name).unlink()
    assert open_checkpoint(folder).digest() == expected
    theirs = AutoModelForCausalLM.from_pretrained(folder).get_input_embeddings().weight
    assert torch.equal(open_checkpoint(folder).tensor("model.embed_tokens.weight"), theirs)


def test_numbers_that_json_has_no_words_for_are_read_as_transformers_writes_them(write_checkpoint: Any) -> None:
    folder = write_checkpoint()
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"rope_theta": {"__float__": "5e4"}}))
    assert load_model_config(folder).rope.theta == 5e4
    (folder / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": {"__float__": "Infinity"}}))
    with pytest.raises(ConfigError, match="rms_norm_eps: expected a positive number, found inf"):
        load_model_config(folder)
    (folder / "config.json").write_text(json.dumps(raw | {"rms_norm_eps": {"__float__": "many"}}))
    with pytest.raises(ConfigError, match=r"config\.json can't be read as JSON: .*many"):
        load_model_config(folder)


def test_a_named_pipe_in_place_of_tensors_is_refused_and_not_waited_for(write_checkpoint: Any) -> None:
    for folder, file in (
        (write_checkpoint(), SINGLE_FILE),
        (write_checkpoint(shards=2), "model-00001-of-00002.safetensors"),
    ):
        (folder / file).unlink()
        os.mkfifo(folder / file)
        with pytest.raises(ConfigError, match=rf"{file} is no regular file"):
            open_checkpoint(folder)


@pytest.mark.parametrize("file", ["../../../etc/passwd", "../other.safetensors"])
def test_an_index_beside_the_whole_file_may_name_nothing_elsewhere_either(file: str, write_checkpoint: Any) -> None:
    folder = write_checkpoint()
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(ConfigError, match=r"weight_map: model\.norm\.weight: .* is no safetensors file of this folder"):
        open_checkpoint(folder)
