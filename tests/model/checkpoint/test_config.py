"""Fields of config.json that are taken, and those that are refused by name of file and field."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import GlmMoeDsaConfig

from twostroke.model.checkpoint.config_file import load_model_config, parse_model_config
from twostroke.model.config import RopeConfig
from twostroke.model.costs.sizes import fit, num_parameters
from twostroke.model.parallel.form import ParallelForm
from twostroke.model.served import open_model
from twostroke.protocol.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GEMMA3, GEMMA4 = ({"architectures": [f"Gemma{version}ForCausalLM"]} for version in (3, 4))
V32, GLM5 = ({"architectures": [f"{name}ForCausalLM"]} for name in ("DeepseekV32", "GlmMoeDsa"))
MINISTRAL = {"architectures": ["MinistralForCausalLM"], "sliding_window": 9}


def test_fields_left_out_have_transformers_defaults() -> None:
    config = parse_model_config(LLAMA, "config.json")
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rms_norm_eps, config.rope, config.tie_word_embeddings) == (1e-6, RopeConfig(), False)


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_a_missing_field_is_named(name: str) -> None:
    raw = {key: value for key, value in LLAMA.items() if key != name}
    with pytest.raises(ConfigError, match=f"some/config.json: {name}: is missing"):
        parse_model_config(raw, "some/config.json")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures"),
        ({"architectures": None, "model_type": "mamba"}, "architectures"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_act": "gelu"}, r"hidden_act: 'gelu' is not supported, only .* are"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"quantization_config": "gptq"}, "quantization_config"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.short_factor"),
        ({"rope_scaling": {"rope_type": "su"}}, "rope_scaling.rope_type"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 7}}, "rope_scaling.short_factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters.low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": ["GlmForCausalLM"], "head_dim": 16, "partial_rotary_factor": 0.2}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_parameters"),
        ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]}, "no_rope_layers"),
        (MINISTRAL | {"layer_types": ["full_attention"]}, "layer_types"),
        (GEMMA3 | {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        (GEMMA3 | {"rope_scaling": {"type": "proportional"}}, "rope_scaling.rope_type"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config.hidden_size"),
        (MINISTRAL | {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        (V32 | {"q_lora_rank": None}, "q_lora_rank"),
        (V32 | {"index_head_dim": 32}, "index_head_dim"),
        (V32 | {"index_topk": 0}, "index_topk"),
        (V32 | {"layer_types": ["full_attention"] * 2}, "layer_types"),
        (V32 | {"rope_interleave": False}, "rope_interleave"),
        (V32 | {"indexer_rope_interleave": True}, "indexer_rope_interleave"),
        (V32 | {"index_topk_freq": 2}, "index_topk_freq"),
        (GLM5 | {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        (GLM5 | {"indexer_types": ["shared", "full"]}, "indexer_types"),
        (GLM5 | {"indexer_types": ["full"]}, "indexer_types"),
        (GLM5 | {"index_topk_pattern": "FX"}, "indexer_types"),
        (GLM5 | {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        (GEMMA4 | {"global_head_dim": 2**40}, "per_layer_config"),
        ({"rope_parameters": {"partial_rotary_factor": 1e308}}, "rope_parameters.partial_rotary_factor"),
    ],
)
def test_a_wrong_field_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: {named}: "):
        parse_model_config(LLAMA | change, "config.json")


def test_both_spellings_of_rope_mean_the_same() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = parse_model_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | scaling}, "c")
    new = parse_model_config(LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | scaling}, "c")
    assert old == new
    assert old.rope.original_max_position == 64
    both = LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}}
    assert parse_model_config(both, "c").rope.type == "linear", "as transformers reads it"


W, F = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("family", "fields", "windows"),
    [
        ("Mistral", {"sliding_window": 128}, (128,) * 4),
        ("Mistral", {"sliding_window": None}, ()),
        ("Mistral", {}, (4096,) * 4),  # transformers' own default
        ("Mistral", {"sliding_window": 8192}, ()),  # no context is longer
        ("Ministral", {"sliding_window": 128, "layer_types": [W, F, F, W]}, (128, 0, 0, 128)),
        ("Qwen2", {"sliding_window": 128}, ()),
        ("Qwen2", {"sliding_window": 128, "use_sliding_window": True}, (0,) * 4),  # from layer 28 on
        ("Qwen2", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3}, (0, 0, 0, 128)),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        ("Phi3", {}, ()),
        ("Phi3", {"sliding_window": 2047}, (2047,) * 4),
        ("SmolLM3", {"sliding_window": 9, "use_sliding_window": True, "no_rope_layer_interval": 2}, (0, 9, 0, 9)),
        ("Gemma2", {"sliding_window": 64}, (64, 0, 64, 0)),
        ("Gemma3", {"sliding_window": 64, "sliding_window_pattern": 3}, (64, 64, 0, 64)),
        ("Gemma3", {"sliding_window": 64, "layer_types": [F, F, F, W]}, (0, 0, 0, 64)),
        ("Olmo3", {}, (4096, 4096, 4096, 0)),
    ],
)
def test_windows_are_those_of_transformers(family: str, fields: dict[str, Any], windows: tuple[int, ...]) -> None:
    shape = {"max_position_embeddings": 8192, "num_hidden_layers": 4, "architectures": [f"{family}ForCausalLM"]}
    config = parse_model_config(LLAMA | shape | fields, "config.json")
    assert config.windows == windows
    assert config.max_position == 8192


def test_layers_with_windows_turn_by_angles_of_their_own_whatever_the_window_is() -> None:
    shape = {"num_hidden_layers": 4, "sliding_window_pattern": 2, "sliding_window": 10_000}
    old = {"rope_theta": 7e4, "rope_local_base_freq": 300.0, "rope_scaling": {"type": "linear", "factor": 8.0}}
    new = {
        "rope_parameters": {
            F: {"rope_type": "linear", "factor": 8.0, "rope_theta": 7e4},
            W: {"rope_type": "default", "rope_theta": 300.0},
        }
    }
    for spelling in (old, new):
        config = parse_model_config(LLAMA | GEMMA3 | shape | spelling, "config.json")
        assert config.windows == ()
        local, full = RopeConfig(theta=300.0), RopeConfig("linear", theta=7e4, factor=8.0)
        assert [config.rope_of(layer) for layer in range(4)] == [local, full, local, full]


GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    **{"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "vocab_size": 262_144},
    **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32_768},
    **{"rope_local_base_freq": 10_000, "rope_theta": 1_000_000, "sliding_window": 512, "sliding_window_pattern": 6},
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {
        **{"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024},
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    },
}


@pytest.mark.parametrize(
    ("raw", "parameters", "context", "with_windows"),
    [(GEMMA3_1B, 999_885_952, 32_768, 22), (GEMMA3_4B, 3_880_263_168, 131_072, 29)],
)
def test_published_files_that_leave_much_out_are_read(
    raw: dict[str, Any], parameters: int, context: int, with_windows: int
) -> None:
    config = parse_model_config(raw, "config.json")
    assert num_parameters(config) == parameters
    assert config.max_position == context
    assert sum(window > 0 for window in config.windows) == len(config.local_layers) == with_windows


@pytest.mark.parametrize(
    ("said", "sharing"),
    [
        ({}, ()),
        ({"indexer_types": ["full", "shared", "full", "shared", "shared"]}, (1, 3, 4)),
        ({"index_topk_pattern": "FSSFS"}, (1, 2, 4)),
        ({"index_topk_pattern": ["full", "full", "full", "full", "shared"]}, (4,)),
        ({"index_topk_freq": 2}, (2, 4)),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 3}, (3, 4)),
    ],
)
def test_layers_share_a_choice_as_in_transformers(said: dict[str, Any], sharing: tuple[int, ...]) -> None:
    raw = LLAMA | GLM5 | {"num_hidden_layers": 5} | said
    config = parse_model_config(raw, "config.json")
    assert config.index is not None
    assert config.index.sharing == {*sharing}
    expected = GlmMoeDsaConfig(num_hidden_layers=5, **said).indexer_types
    assert [layer for layer, kind in enumerate(expected) if kind == "shared"] == [*sharing]


@pytest.mark.parametrize(
    ("form", "named"),
    [
        (ParallelForm(2, shares_contexts=True), "context_parallel: ranks would have to choose"),
        (ParallelForm(1, 2), "pipeline_parallel: a stage would begin with layer 2, which attends to what"),
        (ParallelForm(1, 4), None),
    ],
)
def test_ranks_that_could_not_choose_are_refused(form: ParallelForm, named: str | None, tmp_path: Path) -> None:
    raw = LLAMA | GLM5 | {"num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "full"]}
    if named is None:
        raw["indexer_types"] = ["full"] * 4
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with nullcontext() if named is None else pytest.raises(ConfigError, match=f"^{named}"):
        open_model(tmp_path).check_ranks(form, 16)


LLAMA4_SCOUT = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": {
        **{"max_position_embeddings": 10_485_760, "rope_theta": 500_000.0, "attn_temperature_tuning": 4},
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
            "original_max_position_embeddings": 8192,
        },
    },
}


def test_a_published_llama_4_keeps_chunks_in_three_of_four_layers() -> None:
    config = parse_model_config(LLAMA4_SCOUT, "config.json")
    assert num_parameters(config) == 107_769_861_120
    assert config.windows == (-8192, -8192, -8192, 0) * 12
    assert config.unrotated_layers == config.scaled_layers == frozenset(range(3, 48, 4))
    found = fit(config, 0, itemsize=2, kv_itemsize=2, memory=60 << 30)
    assert found.kv_bytes_per_token == 12 * 2 * 8 * 128 * 2
    assert found.kv_window_bytes == 3 * 8193 * found.kv_bytes_per_token
    with pytest.raises(ConfigError, match=r"text_config\.layer_types: expected 48 times"):
        parse_model_config({**LLAMA4_SCOUT, "text_config": {"layer_types": ["sliding_attention"]}}, "config.json")
    with pytest.raises(ConfigError, match=r"num_experts_per_tok: 2 is not supported"):
        parse_model_config({**LLAMA4_SCOUT, "text_config": {"num_experts_per_tok": 2}}, "config.json")


def test_a_folder_without_config_is_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        load_model_config(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_an_unreadable_config_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        load_model_config(tmp_path)
    assert "\n" not in str(caught.value)
