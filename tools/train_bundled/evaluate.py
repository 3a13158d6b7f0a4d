"""Measure the bundled model: `python tools/train_bundled/evaluate.py --out model/bundled`.

Prints as JSON the figures of its MODEL_CARD.md, and the samples below them, as Markdown.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from corpus import Document, load_corpus
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

PROMPTS = (
    "import os\n\ndef list_files(path):\n    ",
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n        ',
    "def fibonacci(n):\n    ",
    "<|user|>\nWhat does `os.path.join` do?<|end|><|assistant|>\n",
)
WINDOW = 4096  # tokens


def encoded(tokenizer: Tokenizer, documents: Iterable[Document]) -> Iterator[list[int]]:
    """Give token ids of each document, from `<|begin|>` to the last `<|end|>`; conversations as the template has
    them."""
    end = tokenizer.token_to_id("<|end|>")
    for document in documents:
        ids = [tokenizer.token_to_id("<|begin|>")]
        for turn in document.turns:
            text = turn.text
            if turn.role:
                ids.append(tokenizer.token_to_id(f"<|{turn.role}|>"))
                text = "\n" + text.strip()
            ids += [*tokenizer.encode(text, add_special_tokens=False).ids, end]
        yield ids


def windows_of(documents: Iterable[list[int]], length: int, limit: int | None = None) -> list[Tensor]:
    """Cut the documents, one after the other, into windows of length + 1 tokens; at most `limit`, evenly spread."""
    flat = torch.tensor([token for document in documents for token in document])
    windows = [flat[start : start + length + 1] for start in range(0, len(flat) - length, length)]
    if limit is not None and len(windows) > limit:
        windows = [windows[index * len(windows) // limit] for index in range(limit)]
    return windows


@torch.no_grad()
def mean_loss(model: Any, windows: list[Tensor]) -> float:
    """Return nats a token, over all windows."""
    model.eval()
    device, losses = next(model.parameters()).device, []
    for window in windows:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(window[None, :-1].to(device), use_cache=False).logits[0].float()
        losses.append(functional.cross_entropy(logits, window[1:].to(device), reduction="none").cpu())
    return torch.cat(losses).mean().item()


def complete(model: Any, tokenizer: Tokenizer, prompt: str, temperature: float) -> str:
    """Return the text that follows `prompt`, up to `<|end|>`, of seed 0."""
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    drawing = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    return str(tokenizer.decode(model.generate(ids, max_new_tokens=96, **drawing)[0, ids.shape[1] :].tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to measure")
    folder: Path = parser.parse_args().out
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    training, held_out = load_corpus()
    flat = [token for ids in encoded(tokenizer, held_out) for token in ids]
    # The rest that fills no window is a window of its own, so that every held-out token counts once.
    windows = [torch.tensor(flat[start : start + WINDOW + 1]) for start in range(0, len(flat) - 1, WINDOW)]
    loss = mean_loss(model, windows)
    num_bytes = sum(len(turn.text.encode()) for document in held_out for turn in document.turns)
    figures = {
        "documents": len(training),
        "held_out_documents": len(held_out),
        "held_out_tokens": len(flat),
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_a_byte": loss * (len(flat) - 1) / math.log(2) / num_bytes,
    }
    print(json.dumps(figures, indent=2))
    for prompt in PROMPTS:
        for temperature in (0.0, 0.6):
            print(f"\nTemperature {temperature:g}:\n")
            lines = (prompt + complete(model, tokenizer, prompt, temperature)).split("\n")
            print("\n".join(f"    {line}".rstrip() for line in lines))


if __name__ == "__main__":
    main()
