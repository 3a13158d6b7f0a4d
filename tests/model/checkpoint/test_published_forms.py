"""Checkpoints in forms that publishers give them, beyond what the libraries save: they are what their weights mean."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.model.architectures.test_conformance import FAMILY_SHAPES, make_runner, random_prompts, reference
from tests.model.architectures.test_mtp import SHAPES
from tests.model.checkpoint.test_packed_weights import SIZES, Pack, by_library, compressed, fp8, gptq, told
from tests.model.checkpoint.test_quantised_families import FAMILIES, OF_16, generated, nvfp4
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.checkpoint.weights import SINGLE_FILE, Checkpoint
from twostroke.model.config import ModelConfig
from twostroke.model.costs.operations import stored_form
from twostroke.model.costs.sizes import stored_forms
from twostroke.model.served import NativeModel
from twostroke.protocol.errors import ConfigError


def write(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / SINGLE_FILE, {"format": "pt"})
    return folder


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / SINGLE_FILE)


def packed_by(folder: Path, into: Path, said: dict[str, Any], packs: dict[str, Pack], **extra: Tensor) -> Path:
    """Write the folder's model to `into`, weights whose names have a key of `packs` packed so; the folder's become what
    they mean."""
    raw, tensors = read(folder)
    parts = dict(extra)
    for name, tensor in tensors.items():
        pack = next((pack for key, pack in packs.items() if key in name and tensor.dim() == 2), None)
        if pack is None:
            parts[name] = tensor
            continue
        packed, tensors[name] = pack(tensor)
        parts |= {f"{name.removesuffix('.weight')}.{ending}": part for ending, part in packed.items()}
    write(folder, raw, tensors)
    return write(into, raw | {"quantization_config": said}, parts)


def means_what_it_holds(folder: Path, plain: Path) -> ModelConfig:
    """Check that the quantised weights of `folder` are those of `plain`. Return the config."""
    config = load_model_config(folder)
    checkpoint, (_, meant) = Checkpoint(folder, config), read(plain)
    assert checkpoint.forms
    for name in checkpoint.forms:
        found = checkpoint.weight(name)
        assert isinstance(found, QuantizedWeight)
        torch.testing.assert_close(found.dequantized(torch.float32), meant[name], rtol=1e-6, atol=0)
    return config


def test_keys_and_values_on_disk_of_layers_that_share_them_are_not_read(
    tmp_path: Path, write_checkpoint: Any, generate: Any
) -> None:
    """Google's files of Gemma 4 E2B and E4B have them; transformers leaves them out, too."""
    folder = write_checkpoint(**FAMILY_SHAPES["gemma4"])
    prompts = random_prompts(96, 1, (1, 17, 64))
    expected, _ = reference(folder, prompts, 8)
    raw, tensors = read(folder)
    for layer in (4, 5, 6):
        stem, dim = f"model.layers.{layer}.self_attn", 16 if layer == 5 else 32
        unused = {f"{stem}.{part}_proj.weight": torch.full((dim, raw["hidden_size"]), torch.nan) for part in "kv"}
        tensors |= unused | {f"{stem}.k_norm.weight": torch.full((dim,), torch.nan)}
    runner = make_runner(write(tmp_path, raw, tensors), 8, len(prompts) * 84)
    assert generate(runner, prompts, 8, chunk=37, block_size=8) == expected


@pytest.mark.parametrize("shape", ["qwen3_5", "qwen3_5_moe"])
def test_text_alone_may_have_the_names_of_a_checkpoint_that_sees_images(
    shape: str, tmp_path: Path, write_checkpoint: Any, generate: Any
) -> None:
    folder = write_checkpoint(**FAMILY_SHAPES[shape])
    expected = generated(folder, generate)
    raw, tensors = read(folder)
    named = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    write(tmp_path, raw, named | {"model.visual.norm": torch.ones(3), "mtp.norm.weight": torch.ones(3)})
    assert generated(tmp_path, generate) == expected
    left = ["model.language_model.layers.0"]
    raw["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": left}
    forms = stored_forms(load_model_config(write(tmp_path, raw, named)))
    assert not any(name.startswith("model.layers.0.") for name in forms)


def test_a_tensor_that_nobody_knows_is_refused_where_no_images_are_seen(tmp_path: Path, write_checkpoint: Any) -> None:
    raw, tensors = read(write_checkpoint())
    folder = write(tmp_path, raw, tensors | {"visual.norm": torch.ones(3)})
    with pytest.raises(ConfigError, match=r"tensor visual\.norm is none of a"):
        Checkpoint(folder, load_model_config(folder))


def test_gptq_may_leave_modules_unquantised_by_pattern(tmp_path: Path, write_checkpoint: Any, generate: Any) -> None:
    folder = write_checkpoint(**SIZES)
    dynamic = {"-:.*self_attn.*": {}, r"-:model\.layers\.1\..*": {}, "+:.*mlp.*": {"bits": 4, "desc_act": False}}
    said = told("gptq", bits=4, group_size=32, sym=True, desc_act=False, dynamic=dynamic)
    packed_by(folder, tmp_path, said, {"layers.0.mlp": gptq(4)})
    config = means_what_it_holds(tmp_path, folder)
    assert stored_forms(config).keys() == Checkpoint(tmp_path, config).forms.keys()
    assert generated(tmp_path, generate) == generated(folder, generate)


def group(layout: str, *targets: str, **weights: Any) -> dict[str, Any]:
    return {"format": layout, "targets": list(targets), "weights": weights}


FP8_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def test_each_of_two_groups_is_read_in_its_own_form(tmp_path: Path, write_checkpoint: Any, generate: Any) -> None:
    """The first group that names a module wins, and names win over `Linear`."""
    folder = write_checkpoint(**SIZES)
    groups = {
        "group_0": group("float-quantized", "re:.*self_attn.*", r"re:.*layers\.1\.mlp\.down_proj", **FP8_ROWS),
        "group_1": group("nvfp4-pack-quantized", r"re:.*mlp\.(gate|up|down)_proj$", **OF_16),
    }
    said = {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"]}
    rows = fp8("row")
    packs = {"self_attn": rows, "layers.1.mlp.down_proj": rows, "mlp": nvfp4(True)}
    packed_by(folder, tmp_path, said | {"config_groups": groups}, packs)
    config = means_what_it_holds(tmp_path, folder)
    forms = stored_forms(config)
    assert forms == dict(Checkpoint(tmp_path, config).forms)
    kinds = {name: forms[f"model.layers.1.{name}.weight"].kind for name in ("self_attn.q_proj", "mlp.up_proj")}
    assert kinds == {"self_attn.q_proj": "fp8", "mlp.up_proj": "fp4"}
    assert generated(tmp_path, generate) == generated(folder, generate)
    of_attention, of_mlp = stored_form(config, of_attention=True), stored_form(config)
    assert of_attention is not None
    assert of_mlp is not None
    assert (of_attention.kind, of_mlp.kind) == ("fp8", "fp8"), "of the middle layer, whose down is FP8"


def test_a_group_of_all_else_takes_what_another_does_not_name(tmp_path: Path, write_checkpoint: Any) -> None:
    folder = write_checkpoint(**SIZES)
    groups = {"a": group("pack-quantized", "Linear", **INT4), "b": group("float-quantized", "re:.*o_proj", **FP8_ROWS)}
    said = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    packs = {"o_proj": fp8("row"), "layers": by_library("pack-quantized", **INT4)}
    packed_by(folder, tmp_path, said | {"ignore": ["lm_head"]}, packs)
    config = means_what_it_holds(tmp_path, folder)
    assert stored_forms(config) == dict(Checkpoint(tmp_path, config).forms)


KV_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
OF_ATTENTION = {"targets": ["LlamaAttention"], "weights": None, "input_activations": KV_FP8}


@pytest.mark.parametrize(
    "said",
    [
        told("compressed-tensors", config_groups={}, format=None, kv_cache_scheme=KV_FP8),
        told("compressed-tensors", config_groups={"group_0": OF_ATTENTION}, format="dense"),
        told("modelopt", quantization={"quant_algo": None, "kv_cache_quant_algo": "FP8"}),
    ],
)
def test_weights_are_plain_where_the_kv_cache_alone_is_quantised(
    said: dict[str, Any], tmp_path: Path, write_checkpoint: Any, generate: Any
) -> None:
    folder = write_checkpoint()
    stem = "model.layers.{}.self_attn"
    scales = {f"{stem.format(layer)}.{kind}_scale": torch.tensor(0.5 + layer) for layer in (0, 1) for kind in "qkv"}
    scales |= {
        f"{stem.format(0)}.k_zero_point": torch.tensor(0),
        f"{stem.format(1)}.v_proj.output_scale": torch.ones(1),
    }
    packed_by(folder, tmp_path, said, {}, **scales)
    checkpoint = Checkpoint(tmp_path, load_model_config(tmp_path))
    assert not checkpoint.forms
    assert [checkpoint.kv_scales(layer) for layer in (0, 1)] == [(0.5, 0.5), (1.5, 1.5)]
    assert generated(tmp_path, generate) == generated(folder, generate)


def stacked(tensors: dict[str, Tensor], pack: Pack, scales: tuple[str, ...]) -> tuple[dict[str, Tensor], ...]:
    """Return Llama 4's experts packed as ModelOpt keeps them, [experts, in, out], and what all tensors mean then."""
    parts, meant = dict[str, Tensor](), dict(tensors)
    for name, tensor in tensors.items():
        if ".experts." not in name:
            parts[name] = tensor
            continue
        count, columns, rows = tensor.shape
        # One scale for all experts: they are packed as one weight, whose rows are all experts'.
        packed, means = pack(tensor.transpose(1, 2).reshape(count * rows, columns))
        parts[name] = packed["weight"].view(count, rows, -1).transpose(1, 2)
        for scale in scales:
            part = packed[scale]
            is_number = part.numel() == 1
            parts[f"{name}_{scale}"] = part if is_number else part.view(count, rows, -1).transpose(1, 2)
        parts[f"{name}_input_scale"] = torch.ones(())
        meant[name] = means.view(count, rows, columns).transpose(1, 2)
    return parts, meant


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
@pytest.mark.parametrize("of_each", [False, True])
def test_llama_4s_experts_may_be_one_quantised_tensor_as_by_modelopt(
    algorithm: str, of_each: bool, tmp_path: Path, write_checkpoint: Any, generate: Any
) -> None:
    folder = write_checkpoint(**FAMILY_SHAPES["llama4"] | FAMILIES["llama4"][0])
    raw, tensors = read(folder)
    forms: dict[str, tuple[Pack, tuple[str, ...]]] = {
        "FP8": (fp8("tensor"), ("weight_scale",)),
        "NVFP4": (nvfp4(False), ("weight_scale", "weight_scale_2")),
    }
    parts, meant = stacked(tensors, *forms[algorithm])
    if of_each:  # one number for each expert
        count = raw["num_local_experts"]
        parts |= {n: p.expand(count) for n, p in parts.items() if "weight_scale" in n and p.numel() == 1}
    ignored = ["lm_head", "*router*", "*self_attn*", "*shared_expert*", "*feed_forward.*_proj"]
    said = told("modelopt", quant_algo=algorithm, kv_cache_quant_algo="FP8", exclude_modules=ignored)
    write(tmp_path, raw | {"quantization_config": said}, parts)
    write(folder, raw, meant)
    model = NativeModel(tmp_path)
    assert model.num_parameters == NativeModel(folder).num_parameters
    kinds = {form.kind for form in Checkpoint(tmp_path, load_model_config(tmp_path)).forms.values()}
    assert kinds == {"fp8" if algorithm == "FP8" else "fp4"}
    assert generated(tmp_path, generate) == generated(folder, generate)


def test_an_mtp_head_that_is_not_on_disk_is_named_with_the_way_out(write_checkpoint: Any) -> None:
    folder = write_checkpoint(**SHAPES["glm4_moe"])  # config.json speaks of a head that the files lack
    with pytest.raises(ConfigError) as caught:
        _ = NativeModel(folder, has_mtp=True).dtype
    words = f"speculation.method: mtp: {folder} has no MTP head, whose tensors would begin with model.layers.2.: "
    assert str(caught.value).startswith(f"{words}set it to auto")


def test_a_single_group_is_of_whatever_modules_the_tensors_say(write_checkpoint: Any, tmp_path: Path) -> None:
    said, pack = compressed("pack-quantized", **INT4)
    said["config_groups"]["group_0"]["targets"] = ["re:.*nothing of this model"]
    folder = write_checkpoint(**SIZES)
    packed_by(folder, tmp_path, said, {"layers": pack()})
    means_what_it_holds(tmp_path, folder)
