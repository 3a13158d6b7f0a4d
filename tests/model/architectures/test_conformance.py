"""Greedy output equals transformers' `generate` in fp32, token by token.

Random models have near-ties. The weights are scaled so that logits spread over several units, and each case asserts
that transformers' own best two logits are never closer than MIN_MARGIN, far over fp32's rounding here (1e-5).
"""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.model.conftest import make_decoder
from twostroke.model.bundled import BUNDLED_MODEL_DIR as BUNDLED
from twostroke.model.captured_steps import StepReplays
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.config import ModelConfig
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.cpu.captured_steps import CpuCapturedSteps
from twostroke.model.runner import ModelRunner
from twostroke.model.sampling.sampler import Sampler

NEW_TOKENS = 32
FEW_TOKENS = 24  # over the border of a block, of each family
PROMPT_LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 64, 65, 100, 127, 128, 129, 200, 256, 300, 511, 700)
MIN_MARGIN = 2e-4


SHAPES: dict[str, dict[str, Any]] = {
    "mha": {"num_key_value_heads": 4},
    "gqa": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "mqa": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "llama3_rope": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "linear_rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "yarn_rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    },
    "head_dim_40": {"hidden_size": 160},
    "head_dim_72_given": {"head_dim": 72, "num_attention_heads": 2, "num_key_value_heads": 1},
    "head_dim_80": {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 2},
    "biases": {"attention_bias": True, "mlp_bias": True},
}

SEEDS = {
    "mistral_window": 1,
    "olmo3": 1,
    "granite4_dense": 2,
    "nemotron_h": 3,
    "nemotron_h_experts": 1,
    "gqa": 3,
    "mqa": 3,
    "tied": 3,
    "linear_rope": 3,
    "yarn_rope": 3,
    "head_dim_40": 2,
    "head_dim_72_given": 2,
}
"""Chosen for their margins; 0 for the others."""

# (chunk, block size): the whole prompt at once, chunks that straddle blocks, blocks larger than chunks, odd blocks.
WAYS = ((700, 16), (37, 8), (48, 64), (129, 5))


def family(model_type: str, name: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [f"{name}ForCausalLM"], "model_type": model_type, "pad_token_id": 0, **fields}


# A prompt's queries absorb where they are few, and meet expanded keys and values where they are many.
LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16},
    **{"first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
}
EXPERT_GROUPS: dict[str, Any] = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    **{"routed_scaling_factor": 1.7, "num_hidden_layers": 3},
}
# Some contexts are longer than what is attended to. With so many heads no score is exactly 0: among equals
# transformers chooses in no order.
INDEX: dict[str, Any] = {"index_n_heads": 16, "index_head_dim": 20, "index_topk": 24}
# States fit into blocks of eight tokens.
DELTA: dict[str, Any] = {
    **{"num_hidden_layers": 4, "head_dim": 16, "num_key_value_heads": 2, "partial_rotary_factor": 0.25},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
MAMBA: dict[str, Any] = {
    **{"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 6, "mamba_n_groups": 1, "mamba_expand": 1},
}
GRANITE4: dict[str, Any] = MAMBA | {
    **{"layer_types": ["mamba", "attention", "mamba", "mamba"], "shared_intermediate_size": 40},
    **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22, "logits_scaling": 2.0},
}
NEMOTRON_H: dict[str, Any] = {
    **{"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "mamba_num_heads": 4, "mamba_head_dim": 16},
    **{"ssm_state_size": 6, "n_groups": 2},
}
LLAMA4: dict[str, Any] = {
    **{"head_dim": 16, "num_hidden_layers": 4, "num_local_experts": 5, "intermediate_size": 40},
    **{"intermediate_size_mlp": 56, "floor_scale": 50, "attn_scale": 0.5},
}
# Queries are scaled by how often their position exceeds 64.
SCALED: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 64},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
}
W, F = "sliding_attention", "full_attention"
FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "mistral": family("mistral", "Mistral", head_dim=24, sliding_window=None),
    "mistral_window": family("mistral", "Mistral", sliding_window=33),
    "ministral": family(
        "ministral", "Ministral", head_dim=24, num_hidden_layers=3, sliding_window=100, layer_types=[W, F, W]
    ),
    "ministral3": family("ministral3", "Ministral3", head_dim=24, rope_parameters=SCALED),
    "qwen2": family("qwen2", "Qwen2", num_key_value_heads=1, tie_word_embeddings=True),
    "qwen2_window": family("qwen2", "Qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1),
    "qwen3": family("qwen3", "Qwen3", head_dim=24),
    "smollm3": family("smollm3", "SmolLM3", num_hidden_layers=4, no_rope_layer_interval=2),
    "phi3": family("phi3", "Phi3"),
    "phi3_window": family("phi3", "Phi3", sliding_window=50),
    "phi4_mini": family(
        "phi3",
        "Phi3",
        hidden_size=64,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=1024,
        max_position_embeddings=1024,
        rope_scaling={"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0] * 6},
    ),
    "gemma2": family(
        "gemma2",
        "Gemma2",
        head_dim=24,
        sliding_window=40,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=8.0,
        query_pre_attn_scalar=20,
    ),
    "gemma3": family(
        "gemma3_text",
        "Gemma3",
        hidden_size=72,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        num_hidden_layers=4,
        sliding_window=24,
        sliding_window_pattern=3,
        rope_theta=1000000.0,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        query_pre_attn_scalar=24,
        tie_word_embeddings=True,
    ),
    "gemma3_by_type": family(
        "gemma3_text",
        "Gemma3",
        sliding_window=600,
        head_dim=16,
        layer_types=[F, W],
        rope_parameters={
            F: {"rope_type": "default", "rope_theta": 50000.0},
            W: {"rope_type": "default", "rope_theta": 300.0},
        },
        final_logit_softcapping=20.0,
    ),
    "granite": family(
        "granite",
        "Granite",
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.22,
        logits_scaling=2.0,
    ),
    "olmo2": family("olmo2", "Olmo2", num_attention_heads=6, num_key_value_heads=2, hidden_size=48),
    "olmo3": family(
        "olmo3",
        "Olmo3",
        num_hidden_layers=4,
        sliding_window=50,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    ),
    "deepseek_v2": family("deepseek_v2", "DeepseekV2", **LATENT, q_lora_rank=24, attention_bias=True, mlp_bias=True),
    "deepseek_v2_yarn": family(
        "deepseek_v2",
        "DeepseekV2",
        **LATENT,
        q_lora_rank=None,
        rope_scaling={
            **{"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1},
            **{"mscale": 0.707, "mscale_all_dim": 0.707},
        },
    ),
    "deepseek_v3": family("deepseek_v3", "DeepseekV3", **LATENT, q_lora_rank=40, num_nextn_predict_layers=1),
    "deepseek_v2_experts": family(
        "deepseek_v2",
        "DeepseekV2",
        **LATENT | EXPERT_GROUPS,
        q_lora_rank=24,
        topk_method="group_limited_greedy",
        n_shared_experts=2,
        moe_intermediate_size=20,
    ),
    "deepseek_v3_experts": family(
        "deepseek_v3", "DeepseekV3", **LATENT | EXPERT_GROUPS, q_lora_rank=24, moe_intermediate_size=20
    ),
    "deepseek_v3_halves": family("deepseek_v3", "DeepseekV3", **LATENT, q_lora_rank=40, rope_interleave=False),
    "glm4_moe_lite": family(
        "glm4_moe_lite",
        "Glm4MoeLite",
        **LATENT | EXPERT_GROUPS,
        q_lora_rank=24,
        moe_intermediate_size=20,
        mlp_layer_types=["sparse", "dense", "sparse"],
    ),
    "deepseek_v32": family("deepseek_v32", "DeepseekV32", **LATENT | INDEX | {"index_topk": 1000}, q_lora_rank=40),
    "deepseek_v32_experts": family(
        "deepseek_v32",
        "DeepseekV32",
        **LATENT | INDEX | EXPERT_GROUPS,
        q_lora_rank=24,
        moe_intermediate_size=20,
        attention_bias=True,
        rope_scaling={
            **{"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1},
            **{"mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm_moe_dsa": family(
        "glm_moe_dsa",
        "GlmMoeDsa",
        **LATENT | INDEX | EXPERT_GROUPS | {"num_hidden_layers": 4, "index_topk": 50},
        q_lora_rank=24,
        moe_intermediate_size=20,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "glm": family("glm", "Glm", head_dim=16),
    "glm4": family("glm4", "Glm4", head_dim=24, num_key_value_heads=1, attention_bias=False),
    "mixtral": family("mixtral", "Mixtral", num_local_experts=5, num_experts_per_tok=2, sliding_window=50),
    "minimax_m2": family(
        "minimax_m2",
        "MiniMaxM2",
        head_dim=24,
        rotary_dim=12,
        num_local_experts=6,
        num_experts_per_tok=3,
    ),
    "qwen2_moe": family(
        "qwen2_moe",
        "Qwen2Moe",
        num_hidden_layers=3,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "qwen3_moe": family(
        "qwen3_moe",
        "Qwen3Moe",
        head_dim=24,
        num_experts=9,
        num_experts_per_tok=4,
        moe_intermediate_size=20,
        norm_topk_prob=True,
    ),
    "olmoe": family("olmoe", "Olmoe", num_experts=7, num_experts_per_tok=3),
    "glm4_moe": family(
        "glm4_moe",
        "Glm4Moe",
        head_dim=24,
        num_hidden_layers=3,
        attention_bias=True,
        use_qk_norm=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        n_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        num_nextn_predict_layers=0,
    ),
    "qwen3_next": family(
        "qwen3_next",
        "Qwen3Next",
        **DELTA,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
        mlp_only_layers=[1],
    ),
    "qwen3_5": family("qwen3_5_text", "Qwen3_5", **DELTA, tie_word_embeddings=True),
    "qwen3_5_moe": family(
        "qwen3_5_moe_text",
        "Qwen3_5Moe",
        **DELTA,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
    ),
    "granite4": family(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        **GRANITE4,
        num_local_experts=6,
        num_experts_per_tok=3,
        position_embedding_type="nope",
    ),
    "granite4_dense": family(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        **GRANITE4 | {"mamba_n_groups": 4, "mamba_conv_bias": False},
        num_local_experts=0,
        position_embedding_type="rope",
    ),
    "granite4_attention": family(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        **GRANITE4 | {"layer_types": ["attention"] * 4},
        num_local_experts=0,
        position_embedding_type="rope",
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "bamba": family("bamba", "Bamba", **MAMBA, attn_layer_indices=[1]),
    "nemotron_h": family(
        "nemotron_h",
        "NemotronH",
        **NEMOTRON_H,
        hybrid_override_pattern="M-M*-M",
        num_hidden_layers=6,
        mlp_bias=True,
        use_bias=True,
        num_nextn_predict_layers=1,
    ),
    "nemotron_h_experts": family(
        "nemotron_h",
        "NemotronH",
        **NEMOTRON_H | {"n_groups": 4},
        layers_block_type=["mamba", "moe", "attention", "mamba", "mlp", "mamba", "moe"],
        num_hidden_layers=7,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=20,
        moe_shared_expert_intermediate_size=24,
        routed_scaling_factor=1.7,
    ),
    "lfm2": family(
        "lfm2",
        "Lfm2",
        num_hidden_layers=4,
        full_attn_idxs=[1],
        conv_bias=True,
        conv_L_cache=4,
        block_ff_dim=60,
        block_multiple_of=16,
        block_ffn_dim_multiplier=1.2,
        tie_embedding=True,
    ),
    "lfm2_moe": family(
        "lfm2_moe",
        "Lfm2Moe",
        num_hidden_layers=4,
        layer_types=["conv", "conv", F, "conv"],
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        routed_scaling_factor=1.7,
        norm_eps=1e-5,
    ),
    "gemma4": family(  # a small one: shared keys and values, embeddings for each layer, wide heads in full layers
        "gemma4_text",
        "Gemma4",
        num_hidden_layers=7,
        layer_types=[W, W, F, W, F, W, F],
        num_kv_shared_layers=3,
        head_dim=16,
        per_layer_config={str(layer): {"head_dim": 32} for layer in (2, 4, 6)},
        num_key_value_heads=1,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=96,
        use_double_wide_mlp=True,
        sliding_window=33,
    ),
    "gemma4_large": family(  # fewer and wider heads in full layers, whose values are their keys
        "gemma4_text",
        "Gemma4",
        num_hidden_layers=4,
        layer_types=[W, W, W, F],
        head_dim=16,
        num_key_value_heads=4,
        num_attention_heads=8,
        per_layer_config={"3": {"head_dim": 32, "num_key_value_heads": 1}},
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=20,
        final_logit_softcapping=3.0,
    ),
    "llama4": family(
        "llama4_text",
        "Llama4",
        **LLAMA4,
        attention_chunk_size=32,  # whole blocks
        interleave_moe_layer_step=1,
        rope_scaling={
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
            "original_max_position_embeddings": 128,
        },
    ),
    "llama4_dense_between": family(
        "llama4_text",
        "Llama4",
        **LLAMA4,
        attention_chunk_size=37,
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        no_rope_layers=[1, 0, 1, 0],
        attention_bias=True,
    ),
    "gpt_oss": family(
        "gpt_oss",
        "GptOss",
        head_dim=16,
        sliding_window=37,
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
}


# transformers makes this of a config alone: its own folder has all experts in one tensor (test_wrappers.py).
MISTRAL4 = family(
    "mistral4", "Mistral4", **LATENT | EXPERT_GROUPS, q_lora_rank=24, moe_intermediate_size=20, rope_parameters=SCALED
)


def make_runner(folder: Path, block_size: int, num_blocks: int) -> ModelRunner:
    backend = CpuBackend()
    config = load_model_config(folder)
    num_blocks *= config.kv_groups.count
    decoder, kv_cache = make_decoder(folder, backend, num_blocks=num_blocks, block_size=block_size)
    max_context = config.max_position
    captured = CpuCapturedSteps(decoder, backend.launcher, kv_cache, config.dense_context)
    return ModelRunner(decoder, Sampler(decoder.vocab_size), kv_cache, max_context, StepReplays(captured))


def random_prompts(vocab_size: int, seed: int, lengths: tuple[int, ...] = PROMPT_LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def counts_padding(config: ModelConfig) -> bool:
    """Return True if transformers' results depend on padding: positions scale queries, or a state's inputs have a bias,
    which the convolution sees at padding, too."""
    inputs = getattr(config.spec.layer.state, "inputs", None)
    return config.query_scale is not None or (inputs is not None and inputs.has_bias)


def reference(
    folder: Path, prompts: list[list[int]], new_tokens: int = NEW_TOKENS, auto_class: Any = AutoModelForCausalLM
) -> tuple[list[list[int]], torch.Tensor]:
    """Return transformers' tokens, and its margins between the best two logits, [prompts, new_tokens]."""
    if counts_padding(load_model_config(folder)) and len(prompts) > 1:
        tokens, margins = zip(*[reference(folder, [prompt], new_tokens, auto_class) for prompt in prompts], strict=True)
        return [row for rows in tokens for row in rows], torch.cat(margins)
    reference_model = auto_class.from_pretrained(folder, dtype=torch.float32).eval()
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    # Set on the model: what a call leaves out is taken from there, and the bundled model's config has an EOS.
    reference_model.generation_config = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    out = reference_model.generate(padded, attention_mask=mask)
    best = torch.stack(out.logits, dim=1).topk(2).values
    return out.sequences[:, longest:].tolist(), best[..., 0] - best[..., 1]


def lengths_before_near_ties(margins: torch.Tensor) -> list[int]:
    """Return how many tokens of each row can be compared: a trained model's near-ties can't be chosen away."""
    return [int(ties[0]) if len(ties := (row < MIN_MARGIN).nonzero()) else len(row) for row in margins]


# What is left of these differs from them in nothing that rope's, projections' and attention's own tests do not see.
FIRST = {"gqa", "tied", "llama3_rope", "head_dim_72_given", "biases"}
ALL_SHAPES = [pytest.param(shape, marks=[] if shape in FIRST else pytest.mark.models) for shape in SHAPES]


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_greedy_output_equals_transformers(shape: str, write_checkpoint: Any, generate: Any) -> None:
    folder = write_checkpoint(seed=SEEDS.get(shape, 0), **SHAPES[shape])
    prompts = random_prompts(load_model_config(folder).vocab_size, seed=1)
    expected, margins = reference(folder, prompts)
    assert margins.min() > MIN_MARGIN, "choose another seed: this model has a near-tie"
    for chunk, block_size in WAYS:
        num_blocks = len(prompts) * -(-(max(PROMPT_LENGTHS) + NEW_TOKENS) // block_size)
        runner = make_runner(folder, block_size, num_blocks)
        assert generate(runner, prompts, NEW_TOKENS, chunk=chunk, block_size=block_size) == expected
    warm = [(len(prompt) - 1) // block_size * block_size for prompt in prompts]  # what a prefix cache would give
    again = generate(runner, prompts, NEW_TOKENS, chunk=chunk, block_size=block_size, cached=warm)
    assert again == expected


# Windows, rope and latents of these are others', too.
MORE = {
    "qwen2_window",
    "phi3_window",
    "ministral",
    "gemma3_by_type",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v3_halves",
    "deepseek_v32",
}
ALL_FAMILIES = [pytest.param(shape, marks=pytest.mark.models if shape in MORE else []) for shape in FAMILY_SHAPES]


@pytest.mark.parametrize("shape", ALL_FAMILIES)
def test_every_family_generates_as_transformers_does(shape: str, write_checkpoint: Any, generate: Any) -> None:
    folder = write_checkpoint(seed=SEEDS.get(shape, 0), **FAMILY_SHAPES[shape])
    prompts = random_prompts(load_model_config(folder).vocab_size, 1, (1, 2, 17, 64, 129, 600))
    expected, margins = reference(folder, prompts, FEW_TOKENS)
    assert margins.min() > MIN_MARGIN, "choose another seed: this model has a near-tie"
    runner = make_runner(folder, 8, len(prompts) * 84)
    assert generate(runner, prompts, FEW_TOKENS, chunk=37, block_size=8) == expected


@pytest.mark.skipif(not (BUNDLED / "model.safetensors").exists(), reason="the bundled model is not trained yet")
def test_the_bundled_model_continues_its_own_sources_as_transformers_does(generate: Any) -> None:
    """Real text; each row is compared up to its first near-tie."""
    lengths_of = PROMPT_LENGTHS[::2]
    sources = (Path(__file__).read_text(encoding="utf-8"), Path(argparse.__file__).read_text(encoding="utf-8"))
    tokens = Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).encode("\n".join(sources)).ids
    prompts = [tokens[100 * i : 100 * i + length] for i, length in enumerate(lengths_of)]
    expected, margins = reference(BUNDLED, prompts, FEW_TOKENS)
    runner = make_runner(BUNDLED, 16, len(prompts) * -(-(max(lengths_of) + FEW_TOKENS) // 16))
    outputs = generate(runner, prompts, FEW_TOKENS, chunk=256, block_size=16)
    lengths = lengths_before_near_ties(margins)
    for output, row, length in zip(outputs, expected, lengths, strict=True):
        assert output[:length] == row[:length]
    assert sum(lengths) > 0.9 * len(prompts) * FEW_TOKENS
