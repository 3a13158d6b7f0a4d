"""Held-out loss, by position, and sample completions of the bundled model."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

PROMPTS = (
    "import os\n\ndef list_files(path):\n    ",
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n        ',
    "def fibonacci(n):\n    ",
)
MAX_SAMPLE_TOKENS = 96


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
