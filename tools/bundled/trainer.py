"""The bundled model while it learns: its recipe, forward and backward, optimizers, export.

Training runs on transformers' own Llama: a well-kept implementation with a backward pass, whereas our decoder is for
inference only. That the two agree is tested; that this one is right is not ours to prove.
"""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import LlamaConfig, LlamaForCausalLM

from twostroke.model.bundled import BUNDLED_MODEL_DIR

CONFIG = json.loads((BUNDLED_MODEL_DIR / "config.json").read_text(encoding="utf-8"))
"""5.8 M parameters: small enough for the repository, with all that a large Llama has (GQA, RoPE, SwiGLU)."""


@dataclass(frozen=True)
class Recipe:
    seed: int = 20
    tokens_per_step: int = 8192
    # (progress at which the phase ends, sequence length): attention is cheap on short sequences, so most of the
    # training sees those; the last phases make the long context usable.
    phases: tuple[tuple[float, int], ...] = ((0.80, 512), (0.90, 2048), (1.0, 4096))
    muon_learning_rate: float = 0.02  # the hidden matrices
    adam_learning_rate: float = 0.003  # embeddings and norms
    weight_decay: float = 0.1
    warm_up: int = 100  # steps
    dropout: float = 0.1  # of each residual branch; worth more steps of it where the corpus is read a dozen times
    dropout_steps: int = 523  # afterwards none: this run reads the corpus a few times only, and learns faster without
    gradient_clip: float = 1.0

    def learning_rate_factor(self, step: int, progress: float) -> float:
        """Linear warm-up, and linear decay to 0. `step` counts from 0, `progress` runs from 0 to 1."""
        return min((step + 1) / self.warm_up, 1.0) * (1 - progress)

    def sequence_length(self, progress: float) -> int:
        return next((length for end, length in self.phases if progress < end), self.phases[-1][1])


CPU_MICROBATCH_TOKENS = 2048  # what fits the caches best, by measurement; a longer sequence is a microbatch alone
BLOCK_STEPS = 20  # steps that share one reading of the clock, so that a run's schedule is a short list


class Trainer:
    """A run: the model, its optimizers, and how many steps they have taken."""

    def __init__(self, recipe: Recipe, device: str, compiled: bool) -> None:
        self.recipe, self.device = recipe, device
        self.model = build_model(recipe, device)
        self.optimizers = build_optimizers(self.model, recipe)
        self.dropout = add_dropout(self.model, recipe.dropout)
        self.parameters: int = sum(p.numel() for p in self.model.parameters())
        self.steps = 0  # taken so far
        self._head_loss = mean_cross_entropy
        if compiled:
            # Layer by layer: all share one compilation, so that a new sequence length costs seconds, not minutes.
            # Each length is compiled for itself: dynamic shapes cost speed, and there are only three.
            self._head_loss = torch.compile(mean_cross_entropy, dynamic=False)
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)

    def step(self, batch: Tensor, progress: float) -> float:
        """One update from int64 [rows, length + 1]; returns the mean loss in nats a token."""
        if self.dropout and self.steps >= self.recipe.dropout_steps:
            while self.dropout:
                self.dropout.pop().remove()
            torch.compiler.reset()
        self.model.train()
        factor = self.recipe.learning_rate_factor(self.steps, progress)
        rates = (self.recipe.muon_learning_rate, self.recipe.adam_learning_rate)
        for optimizer, rate in zip(self.optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        microbatch = CPU_MICROBATCH_TOKENS if self.device == "cpu" else self.recipe.tokens_per_step
        total = 0.0
        for part in torch.split(batch, max(1, microbatch // (batch.shape[1] - 1))):
            loss = self._loss(part.to(self.device)) * (len(part) / len(batch))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.gradient_clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        return total

    def _loss(self, tokens: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            hidden = self.model.model(tokens[:, :-1], use_cache=False)[0]
            return self._head_loss(hidden, self.model.lm_head.weight, tokens[:, 1:])

    def export(self, out: Path, log: dict[str, Any]) -> None:
        """Writes the model folder; the weights (bfloat16, tied head left out) replace the old ones in one step."""
        for name in ("config.json", "generation_config.json"):
            (out / name).write_bytes((BUNDLED_MODEL_DIR / name).read_bytes())
        (out / "training_log.json").write_text(json.dumps(log) + "\n", encoding="utf-8")
        weights = {
            name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
            for name, tensor in self.model.state_dict().items()
            if name != "lm_head.weight"
        }
        partial = out / "model.safetensors.partial"
        save_file(weights, partial, metadata={"format": "pt"})
        partial.chmod(0o644)
        partial.replace(out / "model.safetensors")


class Schedule:
    """How far a run is, 0 to 1, at each step: by the clock, by the number of steps, or as recorded in an earlier run.

    `recorded` holds one number for each block of BLOCK_STEPS steps.
    """

    def __init__(self, minutes: float | None, steps: int | None, recorded: list[float], replay: bool) -> None:
        self.minutes, self.steps, self.recorded, self.replay = minutes, steps, recorded, replay
        self.start = time.monotonic()

    def progress(self, step: int) -> float:
        """Whichever of time and steps is further on. Appends to `recorded` at the first step of each block."""
        block = step // BLOCK_STEPS
        if block < len(self.recorded):
            return self.recorded[block]
        if self.replay:
            return 1.0
        by_steps = step / self.steps if self.steps is not None else 0.0
        elapsed_s = time.monotonic() - self.start
        by_clock = elapsed_s / (self.minutes * 60) if self.minutes is not None else 0.0
        self.recorded.append(round(min(1.0, max(by_steps, by_clock)), 5))
        return self.recorded[block]


class TokenStream:
    """The order in which training reads the corpus: every document once an epoch, shuffled, packed without padding.

    Endless, and a pure function of (documents, seed).
    """

    def __init__(self, documents: Sequence[Sequence[int]], seed: int) -> None:
        self.documents = documents
        self.seed = seed
        self.position = 0  # tokens read so far
        self.epoch_tokens = sum(map(len, documents))
        self._epoch = -1
        self._tokens = torch.empty(0, dtype=torch.int32)

    def batch(self, rows: int, length: int) -> Tensor:
        """The next rows x length tokens as int64 [rows, length + 1]; the last column is the next row's first token.

        Advances the position. Near an epoch's end, the few tokens that do not fill a batch are passed over.
        """
        needed = rows * length + 1
        if needed > self.epoch_tokens:
            raise ValueError(f"a batch of {needed} tokens is larger than the corpus of {self.epoch_tokens}")
        if self.epoch_tokens - self.position % self.epoch_tokens < needed:
            self.position += self.epoch_tokens - self.position % self.epoch_tokens
        epoch, offset = divmod(self.position, self.epoch_tokens)
        if epoch != self._epoch:
            order = list(range(len(self.documents)))
            random.Random(self.seed * 1_000_003 + epoch).shuffle(order)
            flat = [token for index in order for token in self.documents[index]]
            self._tokens, self._epoch = torch.tensor(flat, dtype=torch.int32), epoch
        window = self._tokens[offset : offset + needed].long()
        self.position += rows * length
        return torch.stack([window[row * length : (row + 1) * length + 1] for row in range(rows)])


def build_model(recipe: Recipe, device: str) -> Any:
    """A freshly initialised float32 Llama; autocast makes its matrix products bfloat16."""
    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).float().to(device)


def add_dropout(model: Any, rate: float) -> list[RemovableHandle]:
    """Dropout on each residual branch, which transformers' Llama has none of, until the handles are removed."""

    def drop(module: torch.nn.Module, _: object, output: Tensor) -> Tensor:
        # One mask for all rows of a microbatch: on a CPU, drawing a number for each element takes a tenth of the step.
        return output * functional.dropout(torch.ones_like(output[:1]), rate, module.training)

    branches = [branch for layer in model.model.layers for branch in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    return [branch.register_forward_hook(drop) for branch in branches]


def build_optimizers(model: Any, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices: it learns markedly more from each token than AdamW, and tokens are scarce here."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=recipe.muon_learning_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(others, lr=recipe.adam_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def mean_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """`hidden` [rows, length, width], `head` [vocabulary, width], `targets` [rows, length] -> nats a token, float32."""
    return functional.cross_entropy(functional.linear(hidden, head).float().flatten(0, 1), targets.flatten())
