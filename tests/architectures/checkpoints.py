"""Tiny random checkpoints, made by transformers, of families that we have a decoder for, and of others."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

_COMMON: dict[str, Any] = {
    "vocab_size": 101,  # no multiple of 64, nor of the ranks
    "hidden_size": 72,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FOUR_HEADS: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
_EXPERTS: dict[str, Any] = {**FOUR_HEADS, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_WINDOWS: dict[str, Any] = {"sliding_window": 37, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
}
# Of so many heads no token's scores are all 0: among equals transformers chooses in no order.
_INDEX: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 48}
_SCALED: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 64},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
}
_CAPS: dict[str, Any] = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 8.0}
_FACTORS: dict[str, Any] = {
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2},
    **{"residual_multiplier": 0.22, "logits_scaling": 2.0},
}

OTHERS: dict[str, dict[str, Any]] = {
    "biogpt": {**FOUR_HEADS, "num_key_value_heads": 4},
    "stablelm": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "use_qkv_bias": True},
    "apertus": {"num_attention_heads": 6, "num_key_value_heads": 2, "rope_parameters": None},
    "arcee": {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 96},
    "cohere": {**FOUR_HEADS, "logit_scale": 0.5},
    "cohere2": {**FOUR_HEADS, **_WINDOWS},
    "dots1": {
        **FOUR_HEADS,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "ernie4_5": {"head_dim": 8, "tie_word_embeddings": True},
    "exaone4": {**FOUR_HEADS, "sliding_window": 29, "sliding_window_pattern": 2, "num_hidden_layers": 3},
    "gpt2": {"hidden_size": 60, "num_attention_heads": 3},
    "gpt_neox": {"hidden_size": 96, "num_attention_heads": 6, "use_parallel_residual": True},
    "granitemoe": {**FOUR_HEADS, "num_local_experts": 3, "num_experts_per_tok": 2, "attention_multiplier": 0.2},
    "helium": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    "hunyuan_v1_dense": {**FOUR_HEADS, "head_dim": 20},
    "jais2": {**FOUR_HEADS},
    "nemotron": {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 80},
    "olmo": {"clip_qkv": 0.9},
    "opt": {"hidden_size": 48, "num_attention_heads": 3, "ffn_dim": 64, "word_embed_proj_dim": 40},
    "persimmon": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4},
    "phi": {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    "seed_oss": {**FOUR_HEADS, "head_dim": 24},
    "starcoder2": {"sliding_window": 33},
    "vaultgemma": {**FOUR_HEADS, **_WINDOWS, "head_dim": 16, "query_pre_attn_scalar": 40},
}
"""Differences from the common fields by model type, with `:` and a name where there are several."""

OURS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 80, "num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": None},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 96, "num_attention_heads": 2, "num_key_value_heads": 2},
    "phi3": {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2},
    "glm": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    "glm4": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
    "mistral:window": {**FOUR_HEADS, "head_dim": 80, "sliding_window": 33},
    "ministral": {**FOUR_HEADS, **_WINDOWS, "head_dim": 24},
    "qwen3:window": {**FOUR_HEADS, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    "phi3:window": {**FOUR_HEADS, "sliding_window": 50},
    "gemma2": {**FOUR_HEADS, **_WINDOWS, **_CAPS, "head_dim": 80, "tie_word_embeddings": False},
    "gemma3_text": {
        **FOUR_HEADS,
        **{"head_dim": 96, "num_hidden_layers": 4, "sliding_window": 24, "sliding_window_pattern": 3},
        **{"rope_local_base_freq": 100.0, "query_pre_attn_scalar": 60, "tie_word_embeddings": False},
    },
    "deepseek_v2": {**FOUR_HEADS, **_LATENT, "first_k_dense_replace": 2, "q_lora_rank": None},
    "deepseek_v3": {
        **FOUR_HEADS,
        **_LATENT,
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.7},
        **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 2, "num_mtp_layers": 0},
    },
    "glm4_moe_lite": {
        **FOUR_HEADS,
        **_LATENT,
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2},
        **{"mlp_layer_types": ["dense", "sparse"]},
    },
    "deepseek_v32": {
        **FOUR_HEADS,
        **_LATENT,
        **_INDEX,
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.7},
        **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 2},
    },
    "glm_moe_dsa": {
        **FOUR_HEADS,
        **_LATENT,
        **_INDEX,
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1},
        **{"num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"]},
    },
    "ministral3": {**FOUR_HEADS, "head_dim": 24, "rope_parameters": _SCALED},
    "minimax_m2": {**FOUR_HEADS, "head_dim": 24, "rotary_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3},
    "granite": {**FOUR_HEADS, **_FACTORS},
    "olmo2": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2},
    "olmo3": {**FOUR_HEADS, "num_hidden_layers": 4, "sliding_window": 50},
    "mixtral": {**FOUR_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 50},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 40, "num_hidden_layers": 3, "mlp_only_layers": [1]},
    "qwen3_moe": {**_EXPERTS, "head_dim": 24, "norm_topk_prob": True},
    "olmoe": {**_EXPERTS},
    "glm4_moe": {
        **FOUR_HEADS,
        **{"head_dim": 24, "use_qk_norm": True, "num_hidden_layers": 3, "num_nextn_predict_layers": 0},
        **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.7},
        **{"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 2},
    },
    "gpt_oss": {
        **FOUR_HEADS,
        **_WINDOWS,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": None,
    },
}


def write_checkpoint(folder: Path, name: str, fields: dict[str, Any], seed: int = 0) -> None:
    """Weights N(0, 1.5 / sqrt(fan in)), so that logits spread over several units; norms near 1, biases near 0."""
    config = CONFIG_MAPPING[name.partition(":")[0]](**{**_COMMON, **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            elif parameter.dim() == 1:
                parameter.add_(noise * 0.1)
        for name_of, buffer in model.named_buffers():
            if name_of.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    model.save_pretrained(folder)
