"""Random models for benches: checkpoints of known shapes, and on request a tokenizer that every server loads.

What speed depends on is a model's shape; what its weights say is of no matter.
"""

import itertools
import json
import math
import string
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.weights import SINGLE_FILE
from twostroke.model.parameters import expected_shapes

SHAPES = Path(__file__).with_name("shapes.json")
MODELS: Mapping[str, dict[str, Any]] = json.loads(SHAPES.read_text(encoding="utf-8"))
"""Shapes of random models, by name. Notes on them, where the name does not say all:

160m             GPT-2 small's layers, with grouped-query attention: 125 million parameters
1.2b, smollm2    Llama-3.2-1B; SmolLM2-135M
mla-small        the attention of DeepSeek-V2-Lite, in fewer layers, all of them dense: 520 million parameters
moe-small        as Qwen3-MoE, narrow: 860 million parameters, of which a token takes 160
moe-1.2b-active  as Qwen3-MoE, of 1.2b's size for a token: its MLPs are eight of 32 experts
"""
_DISTINCT = 1 << 22  # values, repeated: drawing a billion takes longer than measuring


def write_random_model(folder: Path, name: str = "160m", *, max_position: int = 4096) -> None:
    """A bf16 checkpoint of a shape in MODELS; small weights, so that nothing overflows."""
    (folder / "config.json").write_text(json.dumps({**MODELS[name], "max_position_embeddings": max_position}))
    values = (torch.randn(_DISTINCT, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    tensors: dict[str, torch.Tensor] = {}
    for tensor, shape in expected_shapes(load_model_config(folder)).items():
        count = math.prod(shape)
        tensors[tensor] = values.repeat(-(-count // _DISTINCT))[:count].view(shape)
    save_file(tensors, folder / SINGLE_FILE)


SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>")  # the last ids of the vocabulary


def write_model(shape: str, max_position: int, folder: Path) -> None:
    """A Llama of random bf16 weights, with a tokenizer, as a Hugging Face folder that every server loads."""
    folder.mkdir(parents=True, exist_ok=True)
    write_random_model(folder, shape, max_position=max_position)
    vocab_size = MODELS[shape]["vocab_size"]
    special_ids = range(vocab_size - len(SPECIAL_TOKENS), vocab_size)
    names = ("bos_token", "eos_token", "pad_token")
    config = {
        **json.loads((folder / "config.json").read_text()),
        **{"torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        **{f"{name}_id": number for name, number in zip(names, special_ids, strict=True)},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tokenizer_config = {
        **{"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
        "model_max_length": max_position,
        **dict(zip(names, SPECIAL_TOKENS, strict=True)),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    _write_tokenizer(folder / "tokenizer.json", vocab_size)


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """Write a byte-level BPE, as Llama 3's: all bytes, words of two and of three letters, then the special tokens.

    Every id has a text, so that no server has a token which it can't show.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # which some hosts of GPUs don't have

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_letters + string.digits
    room = vocab_size - len(SPECIAL_TOKENS) - len(words)
    merges = list(itertools.islice(_merges(letters), room))
    words += ["".join(parts) for parts in merges]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path))


def _merges(letters: str) -> Iterator[tuple[str, str]]:
    yield from itertools.product(letters, repeat=2)
    for first, second, third in itertools.product(letters, repeat=3):
        yield first + second, third
