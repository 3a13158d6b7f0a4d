"""Well-known models by the config.json that their makers published, as far as sizes depend on it.

Each is named as on the hub, without its owner. `source` names the paper or card that the makers tell of it in; the
fields are those of the `config.json` in that repository.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from twostroke.model.checkpoint.config_file import parse_model_config
from twostroke.model.config import ModelConfig
from twostroke.protocol.errors import ConfigError


@dataclass(frozen=True)
class Published:
    """A model that can be planned with by its name alone."""

    name: str
    source: str
    fields: Mapping[str, Any]


def _dense(
    architecture: str,
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    context: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        **more,
    }


def _llama(*sizes: int, **more: Any) -> dict[str, Any]:
    return _dense("LlamaForCausalLM", *sizes, **more)


def _qwen2(*sizes: int, **more: Any) -> dict[str, Any]:
    return _dense("Qwen2ForCausalLM", *sizes, **more)


def _qwen3(*sizes: int, **more: Any) -> dict[str, Any]:
    return _dense("Qwen3ForCausalLM", *sizes, head_dim=128, **more)


def _qwen3_moe(*sizes: int, expert: int) -> dict[str, Any]:
    more = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert, "norm_topk_prob": True}
    return _dense("Qwen3MoeForCausalLM", *sizes, head_dim=128, **more)


def _gemma3(*sizes: int, head: int, window: int = 1024) -> dict[str, Any]:
    return _dense("Gemma3ForCausalLM", *sizes, head_dim=head, sliding_window=window) | {"tie_word_embeddings": True}


_NOT_EXPERTS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    more: dict[str, Any] = {
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    }
    more["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": _NOT_EXPERTS}
    return _dense("GptOssForCausalLM", 2880, 2880, layers, 64, 8, 201088, 131072, **more)


def _deepseek(architecture: str, *sizes: int, query_rank: int | None, **more: Any) -> dict[str, Any]:
    latents = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    return {**_dense(architecture, *sizes), "q_lora_rank": query_rank, **latents, **more}


_LLAMA2, _LLAMA3 = "Touvron et al., arXiv:2307.09288", "Grattafiori et al., arXiv:2407.21783"
_QWEN25, _QWEN3 = "Qwen Team, arXiv:2412.15115", "Qwen Team, arXiv:2505.09388"
_MIXTRAL, _GEMMA3 = "Jiang et al., arXiv:2401.04088", "Gemma Team, arXiv:2503.19786"
_GPT_OSS = "OpenAI, arXiv:2508.10925"
_V2, _V3 = "DeepSeek-AI, arXiv:2405.04434", "DeepSeek-AI, arXiv:2412.19437"

MODELS: Mapping[str, Published] = {
    name: Published(name, source, fields)
    for name, source, fields in (
        ("Llama-2-7b", _LLAMA2, _llama(4096, 11008, 32, 32, 32, 32000, 4096)),
        ("Llama-2-13b", _LLAMA2, _llama(5120, 13824, 40, 40, 40, 32000, 4096)),
        ("Llama-2-70b", _LLAMA2, _llama(8192, 28672, 80, 64, 8, 32000, 4096)),
        ("Llama-3.1-8B", _LLAMA3, _llama(4096, 14336, 32, 32, 8, 128256, 131072)),
        ("Llama-3.1-70B", _LLAMA3, _llama(8192, 28672, 80, 64, 8, 128256, 131072)),
        ("Llama-3.1-405B", _LLAMA3, _llama(16384, 53248, 126, 128, 8, 128256, 131072)),
        ("Qwen2.5-7B", _QWEN25, _qwen2(3584, 18944, 28, 28, 4, 152064, 131072)),
        ("Qwen2.5-32B", _QWEN25, _qwen2(5120, 27648, 64, 40, 8, 152064, 131072)),
        ("Qwen2.5-72B", _QWEN25, _qwen2(8192, 29568, 80, 64, 8, 152064, 131072)),
        ("Qwen3-8B", _QWEN3, _qwen3(4096, 12288, 36, 32, 8, 151936, 40960)),
        ("Qwen3-32B", _QWEN3, _qwen3(5120, 25600, 64, 64, 8, 151936, 40960)),
        ("Qwen3-30B-A3B", _QWEN3, _qwen3_moe(2048, 6144, 48, 32, 4, 151936, 40960, expert=768)),
        ("Qwen3-235B-A22B", _QWEN3, _qwen3_moe(4096, 12288, 94, 64, 4, 151936, 40960, expert=1536)),
        (
            "Mistral-7B-v0.1",
            "Jiang et al., arXiv:2310.06825",
            _dense("MistralForCausalLM", 4096, 14336, 32, 32, 8, 32000, 32768, sliding_window=4096),
        ),
        (
            "Mixtral-8x7B-v0.1",
            _MIXTRAL,
            _dense(
                *("MixtralForCausalLM", 4096, 14336, 32, 32, 8, 32000, 32768),
                num_local_experts=8,
                num_experts_per_tok=2,
            ),
        ),
        (
            "Mixtral-8x22B-v0.1",
            "Mistral AI, Cheaper, better, faster, stronger, 2024",
            _dense(
                *("MixtralForCausalLM", 6144, 16384, 56, 48, 8, 32000, 65536),
                num_local_experts=8,
                num_experts_per_tok=2,
            ),
        ),
        (
            "DeepSeek-V2-Lite",
            _V2,
            _deepseek(
                *("DeepseekV2ForCausalLM", 2048, 10944, 27, 16, 16, 102400, 163840),
                query_rank=None,
                moe_intermediate_size=1408,
                n_routed_experts=64,
                n_shared_experts=2,
                num_experts_per_tok=6,
                first_k_dense_replace=1,
            ),
        ),
        (
            "DeepSeek-V2",
            _V2,
            _deepseek(
                *("DeepseekV2ForCausalLM", 5120, 12288, 60, 128, 128, 102400, 163840),
                query_rank=1536,
                moe_intermediate_size=1536,
                n_routed_experts=160,
                n_shared_experts=2,
                num_experts_per_tok=6,
                first_k_dense_replace=1,
                topk_method="group_limited_greedy",
                n_group=8,
                topk_group=3,
            ),
        ),
        (
            "DeepSeek-V3",
            _V3,
            _deepseek(
                *("DeepseekV3ForCausalLM", 7168, 18432, 61, 128, 128, 129280, 163840),
                query_rank=1536,
                moe_intermediate_size=2048,
                n_routed_experts=256,
                n_shared_experts=1,
                num_experts_per_tok=8,
                first_k_dense_replace=3,
                n_group=8,
                topk_group=4,
                quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
            ),
        ),
        ("gpt-oss-20b", _GPT_OSS, _gpt_oss(24, 32)),
        ("gpt-oss-120b", _GPT_OSS, _gpt_oss(36, 128)),
        ("gemma-3-1b", _GEMMA3, _gemma3(1152, 6912, 26, 4, 1, 262144, 32768, head=256, window=512)),
        ("gemma-3-4b", _GEMMA3, _gemma3(2560, 10240, 34, 8, 4, 262208, 131072, head=256)),
        ("gemma-3-12b", _GEMMA3, _gemma3(3840, 15360, 48, 16, 8, 262208, 131072, head=256)),
        ("gemma-3-27b", _GEMMA3, _gemma3(5376, 21504, 62, 32, 16, 262208, 131072, head=128)),
    )
}


def known_as(name: str) -> str | None:
    """Return the table's name of a model, whoever's copy of it `name` is; None where it is none, or lies here."""
    bare = name.rpartition("/")[2].removesuffix("-Instruct").removesuffix("-hf").lower()
    known = {one.lower(): one for one in MODELS}
    return known.get(bare) if not Path(name).exists() else None


@cache
def published_model(name: str) -> ModelConfig:
    """Raises ConfigError for a model that the table does not have."""
    if name not in MODELS:
        raise ConfigError(f"{name}: none of the models known by name, which are {', '.join(MODELS)}")
    return parse_model_config(MODELS[name].fields, name)
