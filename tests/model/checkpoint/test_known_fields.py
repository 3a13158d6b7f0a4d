"""Fields of config.json: each that transformers' class of a family has is read or known to change nothing."""

import math
from contextlib import suppress
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from twostroke.model.architectures.families import FAMILIES
from twostroke.model.architectures.families.family import ConfigFields, Family
from twostroke.model.architectures.families.wrappers import WRAPPERS
from twostroke.model.checkpoint.config_file import CHANGES, INERT, parse_model_config
from twostroke.protocol.errors import ConfigError

BY_NAME = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
DERIVED = {"qk_head_dim"}
"""Fields that transformers' classes compute from others and write beside them."""
UNUSED = {
    "deepseek_v2": {"norm_topk_prob"},
    **{key: {"num_nextn_predict_layers"} for key in ("deepseek_v3", "kimi_k25")},
    "nemotron_h": {"sliding_window", "expand", "mamba_proj_bias", "time_step_limit", "num_nextn_predict_layers"},
    **{key: {"mlp_bias"} for key in ("deepseek_v32", "glm_moe_dsa")},
    **{key: {"attn_logit_softcapping", "_sliding_window_pattern"} for key in ("gemma3_text", "gemma3")},
}
"""Fields that a class has, and that transformers' modules do not read."""
MIXED = ["linear_attention"] * 3 + ["full_attention"]
NEEDED: dict[str, dict[str, Any]] = {
    "glm4_moe": {"num_attention_heads": 64},  # or the hidden size is no multiple of it, and there is no head_dim
    "granitemoehybrid": {"layer_types": MIXED},
    "bamba": {"attn_layer_indices": [3]},
    "nemotron_h": {"layers_block_type": [*MIXED, "moe"]},
    "lfm2_moe": {"layer_types": ["conv"] * 3 + ["full_attention"]},
}
"""Fields without which the defaults of a class make no model that is served."""
VARIED: tuple[dict[str, Any], ...] = (
    {},
    {"use_sliding_window": True, "sliding_window": 64, "layer_types": None},
    {"first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 1, "topk_group": 1},
    {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
)
"""Some fields are read where others say so."""


def written_by_transformers(family: Family) -> dict[str, Any]:
    """Return the defaults that the family's class writes, of a few layers."""
    kind = CONFIG_MAPPING[family.model_type]
    fields: dict[str, Any] = {"num_hidden_layers": 4}
    if family in WRAPPERS:
        return dict(kind(text_config=fields).to_dict())
    return dict(kind(**fields | NEEDED.get(family.model_type, {})).to_dict())


def asked_of(family: Family) -> set[str]:
    asked: set[str] = set()
    for more in VARIED:
        with suppress(ConfigError):  # not each family has them
            family.read_config(ConfigFields({**written_by_transformers(family), **more}, "config.json", taken=asked))
    return asked


@BY_NAME
def test_each_field_of_transformers_own_class_is_read_or_changes_nothing(family: Family) -> None:
    written = written_by_transformers(family)
    names = {*written} | {f"text_config.{name}" for name in written.get("text_config", ())}
    known = INERT | DERIVED | UNUSED.get(family.model_type, set()) | PretrainedConfig().to_dict().keys()
    left = {name for name in names - asked_of(family) if name.removeprefix("text_config.") not in known}
    assert not left, "a new version of transformers has fields that ours must read, or know as inert"


@BY_NAME
def test_what_transformers_writes_of_its_defaults_is_taken(family: Family) -> None:
    raw = written_by_transformers(family) | {"architectures": [family.architecture]}
    assert parse_model_config(raw, "config.json").num_layers == 4


def different(name: str) -> Any:
    """A value of the field that changes something."""
    return next(value for value in (0.7, False) if value not in CHANGES[name])


@BY_NAME
def test_a_field_that_changes_what_others_compute_is_read_or_refused_by_name(family: Family) -> None:
    raw = written_by_transformers(family) | {"architectures": [family.architecture]}
    asked = asked_of(family)
    for name in CHANGES.keys() - asked - {asked_name.removeprefix("text_config.") for asked_name in asked}:
        if name in UNUSED.get(family.model_type, ()):
            continue
        with pytest.raises(ConfigError, match=f"config.json: {name}: .*changes what a model computes"):
            parse_model_config(raw | {name: different(name)}, "config.json")
        for harmless in (*CHANGES[name], *family.always.get(name, ())):
            assert parse_model_config(raw | {name: harmless}, "config.json").num_layers == 4


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_parts_of_a_rotation_that_nobody_reads_are_refused_by_name(name: str) -> None:
    raw = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    raw |= {"vocab_size": 96, "num_hidden_layers": 2}
    rope = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(ConfigError, match=f"config.json: {name}.short_mscale: 1.2 changes what a model computes"):
        parse_model_config(raw | {name: rope | {"short_mscale": 1.2}}, "config.json")
    with pytest.raises(
        ConfigError, match=f"config.json: {name}.llama_4_scaling_beta: 0.1 changes what a model computes"
    ):
        parse_model_config(raw | {name: rope | {"llama_4_scaling_beta": 0.1}}, "config.json")
    assert parse_model_config(raw | {name: rope | {"short_mscale": 1.0}}, "config.json").rope.factor == 2.0


W, F = "sliding_attention", "full_attention"
WINDOWED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 64},
    "mixtral": {"sliding_window": 64},
    "phi3": {"sliding_window": 64},
    "qwen3_moe": {"sliding_window": 64, "use_sliding_window": True},
}


@pytest.mark.parametrize("model_type", WINDOWED)
def test_windows_in_some_layers_are_refused_where_the_family_has_them_in_all(model_type: str) -> None:
    family = next(one for one in FAMILIES.values() if one.model_type == model_type)
    raw = written_by_transformers(family) | {"architectures": [family.architecture], **WINDOWED[model_type]}
    for mixed in ([W, F, W, F], [F] * 4, ["chunked_attention"] * 4):
        with pytest.raises(ConfigError, match=r"config.json: layer_types: layer \d is '\w+', and has a window of 64"):
            parse_model_config(raw | {"layer_types": mixed}, "config.json")
    with pytest.raises(ConfigError, match=r"config.json: layer_types: expected a list of 4"):
        parse_model_config(raw | {"layer_types": [W]}, "config.json")
    assert parse_model_config(raw | {"layer_types": [W] * 4}, "config.json").windows == (64,) * 4
    without = raw | {"sliding_window": None, "layer_types": [F] * 4}
    assert parse_model_config(without, "config.json").windows == ()


def test_windows_of_a_family_that_has_none_are_refused_unless_they_are_switched_off() -> None:
    family = FAMILIES["LlamaForCausalLM"]
    raw = written_by_transformers(family) | {"architectures": [family.architecture], "max_position_embeddings": 512}
    with pytest.raises(ConfigError, match=r"config.json: sliding_window: 64: Llama has no windows"):
        parse_model_config(raw | {"sliding_window": 64}, "config.json")
    for harmless in (
        {"sliding_window": 64, "use_sliding_window": False},
        {"sliding_window": 512},
        {"layer_types": None},
    ):
        assert parse_model_config(raw | harmless, "config.json").windows == ()


@BY_NAME
def test_architectures_and_model_type_must_speak_of_the_same_family(family: Family) -> None:
    raw = written_by_transformers(family) | {"architectures": [family.architecture]}
    others = {one.model_type for one in FAMILIES.values()} - {family.model_type}
    for other in (*sorted(others), "mamba"):
        with pytest.raises(
            ConfigError, match=f"config.json: model_type: '{other}' is not what {family.architecture} has"
        ):
            parse_model_config(raw | {"model_type": other}, "config.json")
    for same in (None, *family.other_types):
        assert not math.isnan(parse_model_config(raw | {"model_type": same}, "config.json").rms_norm_eps)
