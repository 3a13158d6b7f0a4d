"""Text of checkpoints that see images: greedy output equals transformers', whatever names the tensors have."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tests.model.architectures.test_conformance import (
    DELTA,
    FEW_TOKENS,
    MIN_MARGIN,
    SCALED,
    F,
    W,
    make_runner,
    random_prompts,
    reference,
)
from twostroke.model.backend import LoadOptions
from twostroke.model.checkpoint.config_file import load_model_config, parse_model_config
from twostroke.model.checkpoint.tensor_file import text_names
from twostroke.model.checkpoint.weights import SINGLE_FILE, Checkpoint
from twostroke.model.config import TEXT_PREFIXES
from twostroke.model.costs.sizes import stored_forms
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.parallel.tensor_parallel import SingleRank
from twostroke.model.served import NativeModel
from twostroke.protocol.errors import ConfigError

LENGTHS = (1, 17, 64, 129)
TEXT: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 1024},
}
SEES: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 28, "patch_size": 14},
}
QWEN_SEES: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4}
}
QWEN_TOKENS = {"image_token_id": 95, "video_token_id": 94, "vision_start_token_id": 93, "vision_end_token_id": 92}

EXPERTS_OF_LATENTS: dict[str, Any] = {
    **{"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 2, "topk_group": 1},
}

MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": TEXT
        | {"head_dim": 16, "sliding_window": 24, "layer_types": [W, W, F], "query_pre_attn_scalar": 20},
        "vision_config": SEES,
        **{"image_token_index": 95, "boi_token_index": 94, "eoi_token_index": 93, "mm_tokens_per_image": 4},
    },
    "gemma4": {
        "text_config": TEXT
        | {
            **{"head_dim": 16, "sliding_window": 24, "layer_types": [W, W, F], "hidden_size_per_layer_input": 0},
            **{"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24},
        },
        "vision_config": SEES | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
        "audio_config": None,
    },
    "gemma4_unified": {
        "text_config": TEXT
        | {"head_dim": 16, "sliding_window": 24, "layer_types": [W, F, W], "global_head_dim": 16}
        | {"num_global_key_value_heads": 1, "attention_k_eq_v": True},
        "vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 32},
        "audio_config": None,
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "vision_config": QWEN_SEES,
        **QWEN_TOKENS,
    },
    "qwen3_vl": {
        "text_config": TEXT
        | {
            "head_dim": 24,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 4, 4], "mrope_interleaved": True},
        },
        "vision_config": QWEN_SEES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        "tie_word_embeddings": True,
        **QWEN_TOKENS,
    },
    "llama4": {
        "text_config": TEXT
        | {
            **{"head_dim": 24, "num_local_experts": 3, "intermediate_size_mlp": 40, "attention_chunk_size": 48},
            **{"interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1], "floor_scale": 20, "attn_scale": 0.5},
        },
        "vision_config": SEES
        | {"intermediate_size": 64, "projector_input_dim": 8, "projector_output_dim": 8}
        | {"vision_output_dim": 8, "patch_size": 14},
    },
    "qwen3_5": {
        "text_config": TEXT
        | DELTA
        | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}},
        "vision_config": QWEN_SEES | {"num_position_embeddings": 16},
        **QWEN_TOKENS,
    },
    "qwen3_5_moe": {
        "text_config": TEXT
        | DELTA
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
        | {"shared_expert_intermediate_size": 24},
        "vision_config": QWEN_SEES | {"num_position_embeddings": 16},
        **QWEN_TOKENS,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "head_dim": 24, "sliding_window": None},
        "vision_config": SEES | {"model_type": "pixtral", "head_dim": 8},
        "image_token_index": 95,
        "tie_word_embeddings": False,
    },
    "mistral3:ministral3": {
        "text_config": TEXT | {"model_type": "ministral3", "head_dim": 24, "rope_parameters": {**SCALED}},
        "vision_config": SEES | {"model_type": "pixtral", "head_dim": 8},
        "image_token_index": 95,
    },
    "mistral3:mistral4": {
        "text_config": TEXT
        | EXPERTS_OF_LATENTS
        | {"model_type": "mistral4", "num_key_value_heads": 4, "rope_parameters": {**SCALED}},
        "vision_config": SEES | {"model_type": "pixtral", "head_dim": 8},
        "image_token_index": 95,
    },
    "kimi_k25": {
        "text_config": TEXT
        | EXPERTS_OF_LATENTS
        | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "first_k_dense_replace": 1},
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"pos_emb_height": 4, "pos_emb_width": 4, "patch_size": 4},
        "projection_hidden_size": 16,
        "tie_word_embeddings": False,
    },
}
"""Fields by model type, with `:` and a name where there are several."""


@pytest.fixture(scope="module", params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint as transformers saves it."""
    kind, _, name = request.param.partition(":")
    fields, folder = MODELS[request.param], tmp_path_factory.mktemp(f"{kind}_{name}")
    torch.manual_seed(2)
    model = AutoModelForImageTextToText.from_config(CONFIG_MAPPING[kind](**fields))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    if (
        kind == "kimi_k25"
    ):  # transformers 5.23 writes layers as `blocks`, which published files and its own reader don't
        tensors = load_file(folder / SINGLE_FILE).items()
        as_published = {
            n.replace("language_model.model.blocks.", "language_model.model.layers."): t for n, t in tensors
        }
        save_file(as_published, folder / SINGLE_FILE, metadata={"format": "pt"})
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def renamed(saved: Path, folder: Path, text: str, head: str) -> Path:
    """Return a copy of the checkpoint with these prefixes of its text's tensors; its towers never have `model.`."""
    tensors = load_file(saved / SINGLE_FILE)
    of_text = {there: name for name, there in text_names(tensors).items()}

    def name_of(there: str) -> str:
        name = of_text.get(there)
        if name is None:
            return there.removeprefix("model.")
        return f"{head}{name}" if name.startswith("lm_head.") else f"{text}{name.removeprefix('model.')}"

    save_file({name_of(there): tensor for there, tensor in tensors.items()}, folder / SINGLE_FILE)
    (folder / "config.json").write_text(json.dumps(config_of(saved)))
    return folder


def test_the_text_of_a_checkpoint_that_sees_images_is_served(saved: Path, tmp_path: Path, generate: Any) -> None:
    """The positions of its three dimensions are all alike in text."""
    prompts = random_prompts(90, 1, LENGTHS)
    expected, margins = reference(saved, prompts, FEW_TOKENS, AutoModelForImageTextToText)
    assert margins.min() > MIN_MARGIN, "choose another seed: this model has a near-tie"
    folders = [saved]
    for index, (text, head) in enumerate((*TEXT_PREFIXES, ("model.", ""))):
        (tmp_path / str(index)).mkdir()
        folders.append(renamed(saved, tmp_path / str(index), text, head))
    for folder in folders:
        runner = make_runner(folder, 8, len(prompts) * 84)
        assert generate(runner, prompts, FEW_TOKENS, chunk=37, block_size=8) == expected


@pytest.mark.parametrize("saved", ["qwen2_5_vl"], indirect=True)
def test_fields_of_the_text_may_stand_among_the_others_as_qwen_publishes_them(saved: Path) -> None:
    nested = config_of(saved)
    flat = nested["text_config"] | {name: value for name, value in nested.items() if name != "text_config"}
    assert parse_model_config(flat, "config.json") == load_model_config(saved)


def test_towers_are_named_in_one_line_and_never_read(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_model_config(saved)
    tensors = load_file(saved / SINGLE_FILE)
    towers = tensors.keys() - text_names(tensors).values()
    assert towers
    # In a type that no decoder takes, so that to look at one would be refused.
    broken = {name: tensor.to(torch.int8) if name in towers else tensor for name, tensor in tensors.items()}
    save_file(broken, tmp_path / SINGLE_FILE)
    (tmp_path / "config.json").write_text(json.dumps(config_of(saved)))
    model = NativeModel(tmp_path)
    assert model.digest() == NativeModel(saved).digest()
    with caplog.at_level(logging.INFO):
        model.decoder(LoadOptions(torch.float32, torch.device("cpu"), 64), CpuBackend(), SingleRank())
    (line,) = [record.message for record in caplog.records]
    assert line == f"serving {config.spec.family}: the {len(towers)} tensors for images are not loaded"
    assert "(text alone)" in line


def test_a_tensor_of_the_text_that_nobody_knows_is_refused_as_ever(saved: Path, tmp_path: Path) -> None:
    tensors = load_file(saved / SINGLE_FILE)
    names = text_names(tensors)
    first = names["model.layers.0.input_layernorm.weight"]
    tensors[first.replace("input_layernorm", "another_norm")] = torch.zeros(64)
    save_file(tensors, tmp_path / SINGLE_FILE)
    (tmp_path / "config.json").write_text(json.dumps(config_of(saved)))
    config = load_model_config(saved)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.another_norm\.weight is none of a .*text alone. decoder"):
        Checkpoint(tmp_path, config)


def test_modules_that_are_left_as_they_are_may_have_the_names_of_files(saved: Path) -> None:
    raw = config_of(saved)
    last = load_model_config(saved).num_layers - 1  # which attends, whatever the others do
    for text, head in TEXT_PREFIXES:
        left = [f"{text}layers.{last}.self_attn.o_proj", f"re:{text}layers.1.*", f"{head}lm_head"]
        raw["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": left}
        forms = stored_forms(parse_model_config(raw, "config.json")).keys()
        assert f"model.layers.{last}.self_attn.o_proj.weight" not in forms
        assert any(name.startswith("model.layers.0.") for name in forms)
        assert not any(name.startswith(("model.layers.1.", "lm_head.")) for name in forms)


def test_quantization_may_stand_in_the_texts_part(saved: Path) -> None:
    """Kimi K2.5's is published so."""
    raw = config_of(saved)
    raw["text_config"]["quantization_config"] = {"quant_method": "fp8"}
    stored = parse_model_config(raw, "config.json").stored
    assert stored is not None
    assert stored.method == "fp8"


def test_a_text_of_another_family_is_refused_by_name(saved: Path) -> None:
    raw = config_of(saved)
    raw["text_config"]["model_type"] = "mamba"
    with pytest.raises(ConfigError, match=r"text_config.model_type: 'mamba' is no text that is served"):
        parse_model_config(raw, "config.json")
