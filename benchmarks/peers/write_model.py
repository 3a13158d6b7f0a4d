"""Write a Llama of random bf16 weights, with a tokenizer, as a Hugging Face folder that every server loads.

    python benchmarks/peers/write_model.py small /tmp/peers/models/small

What is compared is speed, which does not depend on what the weights say. Greedy answers of random weights differ from
server to server; their length does not, since clients ask for `ignore_eos`.
"""

import argparse
import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHAPES: dict[str, dict[str, Any]] = {
    # The one of `twostroke bench engine`: 125M parameters.
    "small": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    # Llama-3.2-1B's: 1.24B parameters.
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
    },
}
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>")  # the last ids of the vocabulary
SEED = 0
STANDARD_DEVIATION = 0.02  # as Llamas are initialised


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_model(SHAPES[arguments.shape], arguments.folder)
    print(arguments.folder)


def write_model(shape: dict[str, Any], folder: Path) -> None:
    """Make `folder`: weights, configuration, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    begin, end, pad = range(shape["vocab_size"] - len(SPECIAL_TOKENS), shape["vocab_size"])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        **shape,
        "bos_token_id": begin,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            **dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL_TOKENS, strict=True)),
        },
    )
    make_tokenizer(shape["vocab_size"]).save(str(folder / "tokenizer.json"))
    draw = torch.Generator().manual_seed(SEED)
    weights = {
        name: torch.ones(size, dtype=torch.bfloat16)
        if len(size) == 1
        else torch.empty(size).normal_(std=STANDARD_DEVIATION, generator=draw).bfloat16()
        for name, size in weight_shapes(shape)
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def weight_shapes(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each weight, as transformers calls them."""
    hidden, intermediate, vocabulary = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    queries = shape["num_attention_heads"] * shape["head_dim"]
    keys = shape["num_key_value_heads"] * shape["head_dim"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for index in range(shape["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, queries)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (intermediate, hidden)
        yield f"{layer}.mlp.up_proj.weight", (intermediate, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, intermediate)
    yield "model.norm.weight", (hidden,)
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """A byte-level BPE, as Llama 3's: all bytes, then words of two and of three letters, then the special tokens.

    Every id has a text, so that no server has a token which it can't show.
    """
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = string.ascii_letters + string.digits
    pairs = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    merges = [(pair[0], pair[1]) for pair in pairs]
    words += pairs
    for pair, letter in itertools.product(pairs, letters):
        if len(words) == vocab_size - len(SPECIAL_TOKENS):
            break
        words.append(pair + letter)
        merges.append((pair, letter))
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
