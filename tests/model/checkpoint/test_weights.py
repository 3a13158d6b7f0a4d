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


def stacked(folder: Path) -> None:
    """Rewrite a checkpoint with one tensor of all experts for gate and up, and one for down, as transformers 5 has."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        names = [name for name in tensors if ".mlp.experts.0.gate_proj." in name]
        for first in names:
            base, _, ending = first.partition("0.gate_proj.weight")
            numbers = range(
                sum(name.startswith(base) and name.endswith(f"gate_proj.weight{ending}") for name in tensors)
            )
            of_each = {
                part: [tensors.pop(f"{base}{number}.{part}_proj.weight{ending}") for number in numbers]
                for part in ("gate", "up", "down")
            }
            gate_up = [torch.cat(both) for both in zip(of_each["gate"], of_each["up"], strict=True)]
            tensors[f"{base}gate_up_proj{ending}"] = torch.stack(gate_up)
            tensors[f"{base}down_proj{ending}"] = torch.stack(of_each["down"])

    rewrite(folder, change)


EXPERTS: dict[str, Any] = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 24},
    **{"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def test_one_tensor_of_all_experts_is_what_theirs_are_one_by_one(write_checkpoint: Any) -> None:
    folder = write_checkpoint(**EXPERTS)
    before = open_checkpoint(folder)
    kept = {name: before.tensor(name).clone() for name in before.shapes}
    digest = before.digest()
    stacked(folder)
    after = open_checkpoint(folder)
    assert all(torch.equal(after.tensor(name), tensor) for name, tensor in kept.items())
    down = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert torch.equal(after.tensor(down, slice(3, 9), slice(2, 5)), kept[down][3:9, 2:5])
    assert after.digest() == digest


@pytest.mark.parametrize("block", [None, [8, 16]], ids=["one scale an expert", "blocks"])
def test_one_tensor_of_all_experts_may_be_in_fp8(block: list[int] | None, write_checkpoint: Any) -> None:
    """Mistral Small 4 is published so: gate and up of an expert share a scale."""
    told = {"quant_method": "fp8", "modules_to_not_convert": ["self_attn", "gate"], "weight_block_size": block}
    folder = write_checkpoint(**EXPERTS, quantization_config=told)
    generator = torch.Generator().manual_seed(1)
    scales: dict[str, torch.Tensor] = {}

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            rows, columns = tensors[name].shape
            shape = (1, 1) if block is None else (-(-rows // block[0]), -(-columns // block[1]))
            found = torch.rand(shape, generator=generator) + 1
            shared = scales.get(name.replace(".up_proj.", ".gate_proj.")) if block is None else None
            scales[name] = tensors[f"{name}_scale_inv"] = found if shared is None else shared.clone()

    rewrite(folder, quantise)
    before = open_checkpoint(folder)
    names = before.forms.keys()
    assert len(names) == 2 * 5 * 3
    kept = {name: before.weight(name).dequantized(torch.float32) for name in names}  # type: ignore[union-attr]
    stacked(folder)
    if block is None:
        rewrite(folder, lambda tensors: tensors.update(one_scale_an_expert(tensors)))
    after = open_checkpoint(folder)
    assert after.forms == before.forms
    for name, weight in kept.items():
        assert torch.equal(after.weight(name).dequantized(torch.float32), weight)  # type: ignore[union-attr]


def one_scale_an_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """[experts, 1, 1], and scales of activations, which nobody needs."""
    found = {name: tensor[:, :1].clone() for name, tensor in tensors.items() if name.endswith("gate_up_proj_scale_inv")}
    return found | {name.replace("_scale_inv", "_activation_scale"): torch.ones(5) for name in found}


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
