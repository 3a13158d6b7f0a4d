"""What of config.json is read, and what is refused by name of file and field."""

from pathlib import Path
from typing import Any

import pytest

from twostroke.model.checkpoint.config_file import load_model_config, parse_model_config
from twostroke.model.config import RopeConfig
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
        ({"hidden_act": "gelu"}, "hidden_act"),
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


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128}, 128),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, 8192),
        ({"architectures": ["MistralForCausalLM"]}, 4096),  # transformers' own default
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 128, "use_sliding_window": False}, 128),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128}, 8192),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 128, "use_sliding_window": True}, 128),
    ],
)
def test_contexts_end_where_a_window_would_hide_their_beginning(fields: dict[str, Any], longest: int) -> None:
    raw = LLAMA | {"max_position_embeddings": 8192} | fields
    assert parse_model_config(raw, "config.json").max_position == longest


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
