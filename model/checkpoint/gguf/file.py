"""The tensors of a GGUF file, by their names in a Hugging Face folder.

What llama.cpp's converter (conversion/qwen.py) changes in Qwen3.5's tensors is undone: norms but the delta nets' own
have 1 added; `ssm_a` is -exp(A_log); the convolution has lost a dimension of one; value heads, which lie together by
their key head, are dealt out: head j of key head k, of K, is the head j K + k of the file, in rows of what makes
values, and in columns of what reads them.
"""

import re
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twostroke.model.checkpoint.gguf.blocks import BLOCK_KINDS, read_blocks
from twostroke.model.checkpoint.gguf.format import HYBRID, ROPE_FACTORS, read_gguf
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.checkpoint.tensor_file import StoredWeight
from twostroke.protocol.errors import ConfigError

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_FLOATS = ("F32", "F16", "BF16")


class GgufFile:
    """The tensors of a file, by their names in a Hugging Face folder. Implements TensorFile.

    Raises ConfigError for a file that can't be read, and for a tensor in a format that is not known here.
    """

    def __init__(self, path: Path):
        file = read_gguf(path)
        is_hybrid = file.metadata.get("general.architecture") == HYBRID
        self._conversion = Conversion.of(file.metadata) if is_hybrid else None
        names = NAMES | HYBRID_NAMES if is_hybrid else NAMES
        self._tensors = {_hub_name(name, names): tensor for name, tensor in file.tensors.items()}
        self._tensors.pop(ROPE_FACTORS, None)  # `unpacked_folder` has read them
        for name, tensor in self._tensors.items():
            if tensor.kind.name not in (*_FLOATS, *BLOCK_KINDS):
                known = ", ".join((*_FLOATS, *BLOCK_KINDS))
                raise ConfigError(f"{path}: tensor {name} is {tensor.kind.name}; only {known} are supported")

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._tensors[name].shape
        return (found[0], 1, found[1]) if name.endswith("conv1d.weight") else found

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor; of a quantised one, that of activations."""
        kind = self._tensors[name].kind.name
        return kind if kind in _FLOATS else "BF16"

    def tensor(self, name: str, rows: slice, columns: slice) -> Tensor:
        """Return a tensor that is not quantised, without a copy."""
        tensor = self._tensors[name]
        numbers = tensor.data.view({"F32": np.float32, "F16": np.float16}.get(tensor.kind.name, np.int16))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the mapping is never written to
            found = torch.from_numpy(numbers.reshape(tensor.shape))
        found = found.view(torch.bfloat16) if tensor.kind.name == "BF16" else found
        found = found if self._conversion is None else self._conversion.undone(name, found)
        return found[rows, columns] if found.dim() == 2 else found[rows]

    def stored_weight(self, name: str) -> StoredWeight | None:
        tensor, conversion = self._tensors[name], self._conversion
        kind = BLOCK_KINDS.get(tensor.kind.name)
        if kind is None:
            return None

        def read(rows: slice) -> QuantizedWeight:
            order = None if conversion is None else conversion.rows(name)
            found = read_blocks(tensor.data[rows] if order is None else tensor.data[order[rows].numpy()], kind)
            return found if conversion is None else conversion.with_columns(name, found)

        return StoredWeight(kind.form, (name,), read)

    def content(self, name: str) -> memoryview:
        return self._tensors[name].data.reshape(-1).data


def _hub_name(name: str, names: Mapping[str, str]) -> str:
    """A tensor's name in a Hugging Face folder; one that no folder has is left as it is."""
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in WHOLE_NAMES:
        return f"model.layers.{layer[1]}.{WHOLE_NAMES[layer[2]]}"
    stem, _, kind = (layer[2] if layer else name).rpartition(".")
    if stem not in names:
        return name
    return f"model.layers.{layer[1]}.{names[stem]}.{kind}" if layer else f"{names[stem]}.{kind}"


HYBRID_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
WHOLE_NAMES = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
"""Names within a layer beside those of other families: without and with the kind that follows them."""


@dataclass(frozen=True)
class Conversion:
    """The converter's changes to the tensors of one file, by its metadata."""

    key_heads: int
    value_heads: int
    key: int  # features of a head
    value: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "Conversion":
        """The conversion of a file whose config.json has been made, so that all of this is there."""
        group, rank, state, inner = (
            metadata[f"{HYBRID}.ssm.{name}"] for name in ("group_count", "time_step_rank", "state_size", "inner_size")
        )
        return cls(group, rank, state, inner // rank)

    def rows(self, name: str) -> Tensor | None:
        """Return the file's row of each row of the tensor; None where they are the same."""
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            behind = 2 * self.key_heads * self.key
            return torch.cat((torch.arange(behind), behind + self._dealt(self.value)))
        if name.endswith("in_proj_z.weight"):
            return self._dealt(self.value)
        if name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
            return self._dealt(1)
        return None

    def undone(self, name: str, found: Tensor) -> Tensor:
        """Return a tensor of the file that is not quantised as a Hugging Face folder has it."""
        rows = self.rows(name)
        found = found if rows is None else found[rows]
        if name.endswith("A_log"):
            return (-found).log()
        if name.endswith("conv1d.weight"):
            return found[:, None]
        if name.endswith("out_proj.weight"):
            return found[:, self._dealt(self.value)]
        return found - 1 if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight") else found

    def with_columns(self, name: str, weight: QuantizedWeight) -> QuantizedWeight:
        """Return a quantised weight with its columns undone. Raises ValueError where groups lie across heads."""
        if not name.endswith("linear_attn.out_proj.weight"):
            return weight
        if self.value % weight.group_size:
            raise ValueError(f"its groups of {weight.group_size} columns lie across heads of {self.value}")
        columns = self._dealt(self.value)
        groups = columns[:: weight.group_size] // weight.group_size
        offsets = None if weight.offsets is None else weight.offsets[:, groups]
        return replace(weight, values=weight.values[:, columns], scales=weight.scales[:, groups], offsets=offsets)

    def _dealt(self, width: int) -> Tensor:
        """Return the file's feature of each feature of the value heads, of which each has `width`."""
        heads = torch.arange(self.value_heads).view(-1, self.key_heads).T.reshape(-1)
        return (heads[:, None] * width + torch.arange(width)).reshape(-1)
