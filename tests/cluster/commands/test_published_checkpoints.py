"""`twostroke check` of config.json as published, without weights: each is native, with its model card's figures."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from twostroke.cluster.cli import main
from twostroke.model.checkpoint.config_file import parse_model_config
from twostroke.model.config import ModelConfig


def of_images(name: str, model_type: str, text: dict[str, Any], **fields: Any) -> dict[str, Any]:
    more: dict[str, Any] = {"architectures": [name], "model_type": model_type, "text_config": text, "vision_config": {}}
    return more | fields


FP8_BY_TENSOR = {
    **{"activation_scheme": "static", "quant_method": "fp8", "weight_block_size": None, "dequantize": False},
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
}
YARN = {
    **{"rope_type": "yarn", "type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "llama_4_scaling_beta": 0.1,
}
QWEN2_5_VL_7B = {
    **{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "vocab_size": 152_064},
    **{"hidden_size": 3584, "intermediate_size": 18_944, "num_attention_heads": 28, "num_hidden_layers": 28},
    **{"num_key_value_heads": 4, "max_position_embeddings": 128_000, "max_window_layers": 28, "rms_norm_eps": 1e-06},
    **{"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "sliding_window": 32_768},
    **{"use_sliding_window": False, "tie_word_embeddings": False, "vision_config": {"depth": 32}},
    **{"vision_start_token_id": 151_652, "vision_end_token_id": 151_653, "vision_token_id": 151_654},
}
QWEN3_VL_4B = of_images(
    "Qwen3VLForConditionalGeneration",
    "qwen3_vl",
    {
        **{"model_type": "qwen3_vl_text", "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728},
        **{"num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128},
        **{"max_position_embeddings": 262_144, "rope_theta": 5e6, "tie_word_embeddings": True},
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
    },
    tie_word_embeddings=True,
)
MISTRAL_SMALL_3_1 = of_images(
    "Mistral3ForConditionalGeneration",
    "mistral3",
    {
        **{"model_type": "mistral", "vocab_size": 131_072, "hidden_size": 5120, "intermediate_size": 32_768},
        **{"num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "head_dim": 128},
        **{"max_position_embeddings": 131_072, "rope_theta": 1e9, "rms_norm_eps": 1e-05, "sliding_window": None},
    },
    image_token_index=10,
)
MINISTRAL_3_8B = of_images(
    "Mistral3ForConditionalGeneration",
    "mistral3",
    {
        **{"model_type": "ministral3", "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 14_336},
        **{"num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "head_dim": 128},
        **{"max_position_embeddings": 262_144, "rms_norm_eps": 1e-05, "sliding_window": None},
        "rope_parameters": YARN | {"factor": 16.0, "original_max_position_embeddings": 16_384, "rope_theta": 1e6},
        "tie_word_embeddings": False,
    },
    quantization_config=FP8_BY_TENSOR,
)
GLM_4_7_FLASH = {
    **{"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "vocab_size": 154_880},
    **{"hidden_size": 2048, "intermediate_size": 10_240, "num_attention_heads": 20, "num_hidden_layers": 47},
    **{"num_key_value_heads": 20, "max_position_embeddings": 202_752, "rms_norm_eps": 1e-05, "rope_theta": 1e6},
    **{"moe_intermediate_size": 1536, "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True},
    **{"routed_scaling_factor": 1.8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0},
    **{"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
}
MINIMAX_M2 = {
    **{"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "vocab_size": 200_064},
    **{"hidden_size": 3072, "intermediate_size": 1536, "num_attention_heads": 48, "num_hidden_layers": 62},
    **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608, "rope_theta": 5_000_000},
    **{"rotary_dim": 64, "num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid"},
    **{"attn_type_list": [1] * 62, "qk_norm_type": "per_layer", "use_qk_norm": True, "use_routing_bias": True},
    **{"num_mtp_modules": 3, "shared_intermediate_size": 0, "sliding_window": None, "auto_map": {"AutoConfig": "x"}},
    "quantization_config": {
        **{"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]},
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}
MISTRAL_SMALL_4 = of_images(
    "Mistral3ForConditionalGeneration",
    "mistral3",
    {
        **{"model_type": "mistral4", "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 12_288},
        **{"num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 32, "head_dim": 128},
        **{"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64},
        **{"qk_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 1_048_576, "rope_interleave": True},
        **{"moe_intermediate_size": 2048, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4},
        **{"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
        "rope_parameters": YARN | {"factor": 128.0, "original_max_position_embeddings": 8192, "rope_theta": 1e4},
    },
    quantization_config=FP8_BY_TENSOR,
)
KIMI_K2_5 = of_images(
    "KimiK25ForConditionalGeneration",
    "kimi_k25",
    {
        **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "vocab_size": 163_840},
        **{"hidden_size": 7168, "intermediate_size": 18_432, "num_attention_heads": 64, "num_hidden_layers": 61},
        **{"num_key_value_heads": 64, "max_position_embeddings": 262_144, "rope_theta": 50_000.0},
        **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "first_k_dense_replace": 1, "moe_intermediate_size": 2048, "n_routed_experts": 384},
        **{"n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid"},
        **{"topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.827, "moe_layer_freq": 1},
        "rope_scaling": {
            **{"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0},
            **{"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        "quantization_config": {
            **{"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
                }
            },
        },
    },
    tie_word_embeddings=False,
    auto_map={"AutoConfig": "x"},
)
GRANITE_4_H_SMALL = {
    **{"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "vocab_size": 100_352},
    **{"hidden_size": 4096, "intermediate_size": 768, "shared_intermediate_size": 1536, "num_hidden_layers": 40},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 72, "num_experts_per_tok": 10},
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    **{"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4},
    **{"mamba_expand": 2, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False},
    **{"attention_multiplier": 0.0078125, "embedding_multiplier": 12, "residual_multiplier": 0.22},
    **{"logits_scaling": 16, "position_embedding_type": "nope", "rope_scaling": None, "rope_theta": 10_000},
    **{"init_method": "mup", "normalization_function": "rmsnorm", "max_position_embeddings": 131_072},
    **{"rms_norm_eps": 1e-05, "tie_word_embeddings": True, "output_router_logits": False},
}
NEMOTRON_H_8B = {
    **{"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "vocab_size": 131_072},
    **{"hidden_size": 4096, "intermediate_size": 21_504, "num_hidden_layers": 52, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "head_dim": 128, "attention_head_dim": 128, "attention_bias": False},
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    **{"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4},
    **{"chunk_size": 128, "expand": 2, "use_conv_bias": True, "use_bias": False, "mamba_proj_bias": False},
    **{"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "mlp_bias": False, "max_position_embeddings": 8192},
    **{"time_step_limit": [0.0, float("inf")], "time_step_min": 0.001, "time_step_max": 0.1, "time_step_rank": 256},
    **{"layer_norm_epsilon": 1e-05, "rms_norm_eps": 1e-05, "residual_in_fp32": False, "sliding_window": None},
    **{"tie_word_embeddings": False, "auto_map": {"AutoConfig": "x"}},
}
NEMOTRON_3_NANO = NEMOTRON_H_8B | {
    **{"hidden_size": 2688, "intermediate_size": 1856, "num_key_value_heads": 2, "max_position_embeddings": 262_144},
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    **{"mamba_num_heads": 64, "n_routed_experts": 128, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    **{"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "partial_rotary_factor": 1.0, "rope_theta": 10_000},
}
BAMBA_9B = {
    **{"architectures": ["BambaForCausalLM"], "model_type": "bamba", "vocab_size": 128_256, "hidden_size": 4096},
    **{"intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "mamba_n_heads": 128, "mamba_d_head": 64},
    **{"mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True},
    **{"mamba_proj_bias": False, "mamba_chunk_size": 256, "max_position_embeddings": 262_144},
    **{"rms_norm_eps": 1e-05, "rope_theta": 10_000.0, "tie_word_embeddings": False},
}
LFM2_1_2B = {
    **{"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 65_536, "hidden_size": 2048},
    **{"block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12_288, "block_ffn_dim_multiplier": 1.0},
    **{"block_multiple_of": 256, "block_norm_eps": 1e-05, "norm_eps": 1e-05, "conv_L_cache": 3, "conv_bias": False},
    **{"full_attn_idxs": [2, 5, 8, 10, 12, 14], "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16},
    **{"num_key_value_heads": 8, "max_position_embeddings": 128_000, "rope_theta": 1_000_000.0, "use_pos_enc": True},
}
LFM2_8B_A1B = {
    **{"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "vocab_size": 65_536, "hidden_size": 2048},
    **{"intermediate_size": 7168, "moe_intermediate_size": 1792, "num_hidden_layers": 24, "num_dense_layers": 2},
    **{"num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    **{"use_expert_bias": True, "num_attention_heads": 32, "num_key_value_heads": 8, "conv_L_cache": 3},
    "layer_types": ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)],
    **{"conv_bias": False, "norm_eps": 1e-05, "max_position_embeddings": 128_000, "rope_theta": 1_000_000.0},
}

# Layers behind the last one, which draft tokens, are left on disk.
DEEPSEEK_V3_2 = {
    **{"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "vocab_size": 129_280},
    **{"hidden_size": 7168, "intermediate_size": 18_432, "num_attention_heads": 128, "num_hidden_layers": 61},
    **{"num_key_value_heads": 128, "max_position_embeddings": 163_840, "rms_norm_eps": 1e-06, "rope_theta": 10_000},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1},
    **{"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_layer_freq": 1, "num_nextn_predict_layers": 1},
    **{"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "tie_word_embeddings": False},
    "rope_scaling": {
        **{"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1},
        **{"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "quantization_config": {
        **{"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic"},
        "weight_block_size": [128, 128],
    },
}
GLM_5 = {
    **{"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "vocab_size": 154_880},
    **{"hidden_size": 6144, "intermediate_size": 12_288, "num_attention_heads": 64, "num_hidden_layers": 78},
    **{"num_key_value_heads": 64, "max_position_embeddings": 202_752, "rms_norm_eps": 1e-05, "head_dim": 64},
    **{"q_lora_rank": 2048, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
    **{"first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1},
    **{"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1, "qk_head_dim": 256},
    **{"index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True},
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}

PUBLISHED: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "Qwen2.5-VL (text alone)": (QWEN2_5_VL_7B, 7_615_616_512, 7_615_616_512, 56 * 1024),
    "Qwen3-VL (text alone)": (QWEN3_VL_4B, 4_022_468_096, 4_022_468_096, 144 * 1024),
    "Mistral (text alone)": (MISTRAL_SMALL_3_1, 23_572_403_200, 23_572_403_200, 160 * 1024),
    "Ministral 3 (text alone)": (MINISTRAL_3_8B, 8_489_553_920, 8_489_553_920, 136 * 1024),
    "GLM-4.7-Flash": (GLM_4_7_FLASH, 29_943_393_920, 3_896_766_080, 47 * 576 * 2),
    "MiniMax-M2": (MINIMAX_M2, 228_689_764_864, 11_030_553_088, 248 * 1024),
    "Mistral 4 (text alone)": (MISTRAL_SMALL_4, 118_972_826_624, 6_632_588_288, 36 * 320 * 2),
    "DeepSeek-V3 (text alone)": (KIMI_K2_5, 1_026_408_232_448, 32_861_500_928, 61 * 576 * 2),
    "Granite 4": (GRANITE_4_H_SMALL, 32_207_337_984, 8_803_121_664, 16 * 1024),
    "Nemotron-H": (NEMOTRON_H_8B, 8_100_852_736, 8_100_852_736, 16 * 1024),
    "Nemotron-H, with experts": (NEMOTRON_3_NANO, 31_577_940_288, 3_580_076_352, 6 * 1024),
    "Bamba": (BAMBA_9B, 9_780_235_392, 9_780_235_392, 12 * 1024),
    "LFM2": (LFM2_1_2B, 1_170_340_608, 1_170_340_608, 12 * 1024),
    "LFM2-MoE": (LFM2_8B_A1B, 8_339_930_560, 1_557_740_992, 12 * 1024),
    "DeepSeek-V3.2": (DEEPSEEK_V3_2, 671_877_944_064, 38_403_822_336, 61 * 704 * 2),
    "GLM-5": (GLM_5, 743_911_218_432, 41_784_728_832, 78 * 704 * 2),
}
"""config.json by family, with the number of parameters, that of a token's, and bytes of KV a token in bf16."""


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_published_checkpoint_is_native(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields, parameters, active, kv_bytes = PUBLISHED[family]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ranks = 1 if parameters < 100e9 else 8
    arguments = ["--gpu", "h200", "--dtype", "bfloat16", "--tensor-parallel", str(ranks)]
    code = main(["check", str(tmp_path), "--json", *arguments])
    told = json.loads(capsys.readouterr().out)
    assert (code, told["family"], told["way"], told["reason"]) == (0, family.partition(", ")[0], "native", None)
    assert (told["parameters"], told["active_parameters"]) == (parameters, active)
    latents = fields.get("text_config", fields).get("kv_lora_rank")
    assert told["kv_bytes_per_token"] == (kv_bytes if latents else kv_bytes // ranks)


# Two blocks of each layer, of 1072 tokens and 16: the state that a step reads, and the one that it writes. Of LFM2 six
# layers attend, so its ten convolutions are counted as twelve.
@pytest.mark.parametrize(
    ("fields", "expected"), [(GRANITE_4_H_SMALL, 36 * 2 * 1072 * 4096), (LFM2_1_2B, 12 * 2 * 16 * 2048)]
)
def test_the_bytes_of_a_requests_states_are_told(
    fields: dict[str, Any], expected: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    main(["check", str(tmp_path), "--json", "--gpu", "h200", "--dtype", "bfloat16"])
    told = json.loads(capsys.readouterr().out)
    assert told["kv_window_bytes"] == expected
    assert expected >= 2 * state_bytes(parse_model_config(fields, "test"))


def state_bytes(config: ModelConfig) -> int:
    """Return the bytes of all numbers of a request's states, once."""
    sizes = config.state
    assert sizes is not None
    layers = sum(config.keeps_state(layer) for layer in range(config.num_layers))
    return 4 * layers * (math.prod(sizes.matrix) + (sizes.taps - 1) * sizes.conv_width)
