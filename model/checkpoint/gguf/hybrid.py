"""Qwen3.5's tensors in GGUF files, as llama.cpp's converter changes them, and how to undo it.

What the converter (conversion/qwen.py) does: norms but the delta nets' own have 1 added; `ssm_a` is -exp(A_log); the
convolution has lost a dimension of one; value heads, which lie together by their key head, are dealt out: head j of key
head k, of K, is the head j K + k of the file, in rows of what makes values, and in columns of what reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from twostroke.model.checkpoint.gguf.format import HYBRID
from twostroke.model.checkpoint.quantization import QuantizedWeight

NAMES = {
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
