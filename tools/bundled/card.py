"""Measures the bundled model and writes its MODEL_CARD.md:
`python -m twostroke.tools.bundled.card --out model/bundled`."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from twostroke.tools.bundled.corpus import Document, load_corpus
from twostroke.tools.bundled.evaluate import PROMPTS, complete, held_out_windows, losses_by_position, mean_loss
from twostroke.tools.bundled.recipe import CONTEXT
from twostroke.tools.bundled.trainer import register
from twostroke.tools.bundled.vocabulary import encode_documents

WINDOW = 4096  # tokens
CHAT_PROMPT = "<|user|>\nWhat does `os.path.join` do?<|end|><|assistant|>\n"
EDGES = (0, 64, 256, 512, 1024, 2048, 3072, 4096, 6144, CONTEXT)

TEMPLATE = """\
---
license: apache-2.0
language: [en, code]
library_name: transformers
---
# The bundled model

A Llama of {parameters:,} parameters, trained from nothing on CPython's standard library, so that Twostroke can be
tried, tested and measured without downloading anything. It writes plausible Python and short docstrings. It knows
nothing else, and what it writes is often wrong: use it to see a service work, not to write programs.

| | |
|---|---|
| Architecture | LlamaForCausalLM: {num_hidden_layers} layers, width {hidden_size}, {num_attention_heads} heads of \
{head_dim}, {num_key_value_heads} key/value heads (GQA), SwiGLU {intermediate_size}, tied embeddings |
| Positions | RoPE, theta {rope_theta:,.0f}; {max_position_embeddings:,} tokens of context |
| Vocabulary | byte-level BPE, {vocab_size:,} tokens |
| Weights | bfloat16, {megabytes:.1f} MB |
| Cache | {kv_bytes:,} bytes a token in bfloat16 |

## Data
The Python sources of the standard library of CPython {python} as an interpreter has them installed, without test
suites, generated tables and site-packages; the help topics of `pydoc`; and conversations made from the docstrings of
both Python and C code ("Document `os.path.join`.", "Write a function `...`"), {chat_percent:.0f}% of the text. Nothing
else: no web text, no other people's code, no output of another model.

{documents:,} training documents, {epoch_tokens:,} tokens ({bytes_per_token:.2f} bytes each).
{held_out_documents} documents, {held_out_tokens:,} tokens, are held out: whole files chosen by a hash, with all that
was made from them.

## Training
{steps:,} steps, {tokens:,} tokens ({epochs:.1f} times through the corpus), in about {minutes:.0f} minutes on two
shared cores of a server's CPU, at lowest priority. Muon (hidden matrices) and AdamW (embeddings, norms), bfloat16
autocast over float32 weights, sequences of 512, then 2048, then 4096 tokens, linear decay to 0, seed {seed}, dropout of
{recipe[dropout]} in the first {recipe[dropout_steps]} steps. At the end the loss on the training text was
{training_loss:.2f}: the distance to the held-out loss says that the model has begun to memorise.

`training_log.json` has the whole recipe, the schedule and the losses on the way.

To train it again, with that schedule or for longer (on a GPU, `--device cuda`):

    python -m twostroke.tools.bundled.train --out somewhere --replay model/bundled/training_log.json
    python -m twostroke.tools.bundled.train --out somewhere --minutes 90
    python -m twostroke.tools.bundled.card --out somewhere

The data, the order of the documents and the schedule are then the same, given the same version of CPython; the
weights come out slightly different on another machine, since sums are taken in another order.

## Results
On all held-out documents, in windows of {window} tokens:

| Held-out loss (nats a token) | Perplexity | Bits a byte |
|---|---|---|
| {loss:.3f} | {perplexity:.2f} | {bits_per_byte:.3f} |

By position, in windows of {context:,} tokens. The loss stays level to the end, beyond the longest sequences of the
training; windows are packed with several documents each, so it is no measure of how far back the model looks:

| Position | {position_names} |
|---|{position_rules}|
| Loss | {position_losses} |

## Samples
The first {samples} are completions of plain text, the last two answer a chat. Nothing is picked: seed 0, at most 96 \
tokens.
{sample_text}
## Licence
The weights, the tokenizer and the scripts are given under Apache-2.0. The training data, the Python standard library,
is copyright (c) 2001-2023 Python Software Foundation, all rights reserved, and was used under the PSF-2.0 licence
(<https://docs.python.org/3/license.html>); the model can repeat passages of it, to which that licence applies.
"""


def load_model(folder: Path) -> Any:
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_attn_implementation(register())
    return model.eval()


def samples(folder: Path, tokenizer: Tokenizer) -> str:
    """Each prompt with its completions at temperature 0 and 0.6, as Markdown."""
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    parts = []
    for prompt in (*PROMPTS, CHAT_PROMPT):
        for temperature in (0.0, 0.6):
            text = prompt + complete(model, tokenizer, prompt, temperature)
            parts.append(
                f"\nTemperature {temperature:g}:\n\n"
                + "".join(f"    {line}".rstrip() + "\n" for line in text.split("\n"))
            )
    return "".join(parts)


def utf8_bytes(documents: list[Document]) -> int:
    return sum(len(turn.text.encode()) for document in documents for turn in document.turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to measure")
    options = parser.parse_args()
    folder: Path = options.out
    console = Console()

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    log = json.loads((folder / "training_log.json").read_text(encoding="utf-8"))
    training, held_out = load_corpus()
    held_out_ids = list(encode_documents(tokenizer, held_out))
    held_out_tokens = sum(map(len, held_out_ids))
    model = load_model(folder)
    console.print(f"measuring on {held_out_tokens:,} held-out tokens")
    windows = held_out_windows(held_out_ids, WINDOW)
    by_position = losses_by_position(model, held_out_windows(held_out_ids, CONTEXT), EDGES)
    # The rest that fills no window is a window of its own, so that every held-out token counts once.
    flat = torch.tensor([token for ids in held_out_ids for token in ids])
    rest = flat[len(windows) * WINDOW :]
    whole = mean_loss(model, windows)
    weights = len(windows) * WINDOW, len(rest) - 1
    if weights[1] > 0:
        whole = (whole * weights[0] + mean_loss(model, [rest]) * weights[1]) / sum(weights)
    characters = sum(document.characters for document in training)
    chat = sum(document.characters for document in training if document.turns[0].role)
    values = {
        **config,
        **log,
        "seed": log["recipe"]["seed"],
        "training_loss": log["held_out"][-1][2],
        "megabytes": (folder / "model.safetensors").stat().st_size / 1e6,
        "kv_bytes": 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"],
        "chat_percent": 100 * chat / characters,
        "documents": len(training),
        "bytes_per_token": utf8_bytes(training) / log["epoch_tokens"],
        "held_out_documents": len(held_out),
        "held_out_tokens": held_out_tokens,
        "epochs": log["tokens"] / log["epoch_tokens"],
        "window": WINDOW,
        "context": CONTEXT,
        "loss": whole,
        "perplexity": math.exp(whole),
        "bits_per_byte": whole * sum(weights) / math.log(2) / utf8_bytes(held_out),
        "position_names": " | ".join(by_position),
        "position_rules": "|".join("---" for _ in by_position),
        "position_losses": " | ".join(f"{loss:.3f}" for loss in by_position.values()),
        "samples": 2 * len(PROMPTS),
        "sample_text": samples(folder, tokenizer),
    }
    (folder / "MODEL_CARD.md").write_text(TEMPLATE.format(**values), encoding="utf-8")
    console.print(f"held-out loss {whole:.4f}, perplexity {math.exp(whole):.2f}; by position {by_position}")


if __name__ == "__main__":
    main()
