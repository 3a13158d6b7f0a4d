"""Measures the bundled model: `python -m twostroke.tools.bundled.evaluate --out model/bundled`.

Prints as JSON the figures that its MODEL_CARD.md has, and the samples below them, as Markdown.
"""

import argparse
import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from twostroke.tools.bundled.corpus import Document, load_corpus
from twostroke.tools.bundled.vocabulary import encode_documents

PROMPTS = (
    "import os\n\ndef list_files(path):\n    ",
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n        ',
    "def fibonacci(n):\n    ",
    "<|user|>\nWhat does `os.path.join` do?<|end|><|assistant|>\n",
)
MAX_SAMPLE_TOKENS = 96
WINDOW = 4096  # tokens
EDGES = (0, 64, 256, 512, 1024, 2048, 3072, 4096, 6144, 8192)


def token_losses(model: Any, tokens: Tensor) -> Tensor:
    """Cross-entropy in nats of tokens[1:], float32. `tokens`: int64 [length]; longer than the context is an error."""
    device = next(model.parameters()).device
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        hidden = model.model(tokens[None, :-1].to(device), use_cache=False)[0][0]
        losses = []
        # The logits of a whole context would be hundreds of megabytes in float32.
        for start in range(0, len(hidden), 2048):
            logits = functional.linear(hidden[start : start + 2048], model.lm_head.weight).float()
            targets = tokens[1 + start : 1 + start + len(logits)].to(device)
            losses.append(functional.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(losses).cpu()


def held_out_windows(documents: Iterable[list[int]], length: int, limit: int | None = None) -> list[Tensor]:
    """The documents one after the other, cut into windows of length + 1 tokens; at most `limit`, evenly spread."""
    flat = torch.tensor([token for document in documents for token in document])
    windows = [flat[start : start + length + 1] for start in range(0, len(flat) - length, length)]
    if limit is not None and len(windows) > limit:
        windows = [windows[index * len(windows) // limit] for index in range(limit)]
    return windows


def mean_loss(model: Any, windows: list[Tensor]) -> float:
    """Nats a token, over all windows. Leaves the model in the mode in which it was."""
    training = model.training
    model.eval()
    losses = torch.cat([token_losses(model, window) for window in windows])
    model.train(training)
    return losses.mean().item()


def losses_by_position(model: Any, windows: list[Tensor], edges: tuple[int, ...]) -> dict[str, float]:
    """Mean loss in nats of the targets at positions [edge, next edge) of each window."""
    model.eval()
    losses = torch.stack([token_losses(model, window) for window in windows])
    return {f"{a}-{b}": losses[:, a:b].mean().item() for a, b in itertools.pairwise(edges)}


def complete(model: Any, tokenizer: Any, prompt: str, temperature: float) -> str:
    """The text that follows `prompt`, up to `<|end|>`, of seed 0. `tokenizer`: a tokenizers.Tokenizer."""
    torch.manual_seed(0)
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    drawing = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    produced = model.generate(ids, max_new_tokens=MAX_SAMPLE_TOKENS, **drawing)[0, ids.shape[1] :]
    return str(tokenizer.decode(produced.tolist()))


def samples(model: Any, tokenizer: Any) -> str:
    """Each prompt with its completions at temperature 0 and 0.6, as Markdown."""
    parts = []
    for prompt in PROMPTS:
        for temperature in (0.0, 0.6):
            lines = (prompt + complete(model, tokenizer, prompt, temperature)).split("\n")
            parts += [f"\nTemperature {temperature:g}:\n", *(f"    {line}".rstrip() for line in lines)]
    return "\n".join(parts)


def utf8_bytes(documents: list[Document]) -> int:
    return sum(len(turn.text.encode()) for document in documents for turn in document.turns)


def main() -> None:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to measure")
    folder: Path = parser.parse_args().out
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    training, held_out = load_corpus()
    held_out_ids = list(encode_documents(tokenizer, held_out))
    # The rest that fills no window is a window of its own, so that every held-out token counts once.
    windows = held_out_windows(held_out_ids, WINDOW)
    flat = torch.tensor([token for ids in held_out_ids for token in ids])
    losses = torch.cat([token_losses(model, window) for window in (*windows, flat[len(windows) * WINDOW :])])
    loss = losses.mean().item()
    figures = {
        "documents": len(training),
        "chat_share": sum(one.characters for one in training if one.turns[0].role)
        / sum(one.characters for one in training),
        "held_out_documents": len(held_out),
        "held_out_tokens": len(flat),
        "loss": loss,
        "perplexity": math.exp(loss),
        "bits_a_byte": loss * len(losses) / math.log(2) / utf8_bytes(held_out),
        "loss_by_position": losses_by_position(model, held_out_windows(held_out_ids, EDGES[-1]), EDGES),
    }
    print(json.dumps(figures, indent=2))
    print(samples(model, tokenizer))


if __name__ == "__main__":
    main()
