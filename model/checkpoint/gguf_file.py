"""The tensors of a GGUF file, dequantised by the `gguf` package of the format's authors as they are asked for."""

import re
from collections.abc import Collection
from pathlib import Path

import torch
from gguf.quants import dequantize
from torch import Tensor

from twostroke.model.checkpoint.gguf_format import ROPE_FACTORS, read_gguf
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
_FLOATS = ("F32", "F16")
_QUANTIZED = ("BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


class GgufFile:
    """The tensors of a file, by their names in a Hugging Face folder. Implements weights.TensorFile.

    Raises ConfigError for a file that can't be read, and for a tensor in a format that is not known here.
    """

    def __init__(self, path: Path):
        self._tensors = {_name_of(name): tensor for name, tensor in read_gguf(path).tensors.items()}
        self._tensors.pop(ROPE_FACTORS, None)  # `folder_of` has read them
        for name, tensor in self._tensors.items():
            if tensor.kind.name not in (*_FLOATS, *_QUANTIZED):
                known = ", ".join((*_FLOATS, *_QUANTIZED))
                raise ConfigError(f"{path}: tensor {name} is {tensor.kind.name}; only {known} are supported")

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """Of what is quantised: what keeps nearly all that it has."""
        kind = self._tensors[name].kind.name
        return kind if kind in _FLOATS else "BF16"

    def tensor(self, name: str, rows: slice, columns: slice) -> Tensor:
        """fp32, of the rows that are asked for alone."""
        tensor = self._tensors[name]
        one_row = len(tensor.shape) == 1
        values = dequantize(tensor.data if one_row else tensor.data[rows], tensor.kind)
        if not values.flags.writeable:  # a view of the file, which torch would take for memory of its own
            values = values.copy()
        return torch.from_numpy(values)[rows] if one_row else torch.from_numpy(values)[:, columns]

    def content(self, name: str) -> memoryview:
        return self._tensors[name].data.reshape(-1).data


def _name_of(name: str) -> str:
    """A tensor's name in a Hugging Face folder; one that no folder has is left as it is."""
    layer = _LAYER.fullmatch(name)
    stem, _, kind = (layer[2] if layer else name).rpartition(".")
    if stem not in NAMES:
        return name
    return f"model.layers.{layer[1]}.{NAMES[stem]}.{kind}" if layer else f"{NAMES[stem]}.{kind}"
