"""The bundled model while it learns: forward and backward, optimizers, checkpoint, export.

Training runs on transformers' own Llama: a well-kept implementation with a backward pass, whereas our decoder is for
inference only. That the two agree is tested; that this one is right is not ours to prove.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import LlamaForCausalLM

from twostroke.model.bundled import attention
from twostroke.model.bundled.recipe import Recipe, model_config, save_config

CPU_MICROBATCH_TOKENS = 2048  # what fits the caches best, by measurement; a longer sequence is a microbatch alone


def build_model(recipe: Recipe, device: str) -> Any:
    """A freshly initialised float32 Llama; autocast makes its matrix products bfloat16."""
    torch.manual_seed(recipe.seed)
    model: Any = LlamaForCausalLM(model_config()).float().to(device)
    model.set_attn_implementation(attention.register() if device == "cpu" else "sdpa")
    return model


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


class Trainer:
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

    def save(self, path: Path, log: dict[str, Any]) -> None:
        """Writes a checkpoint: everything that `restore` needs to go on as if nothing had happened."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "random": torch.get_rng_state(),
            "steps": self.steps,
            "log": json.dumps(log),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def restore(self, path: Path) -> dict[str, Any]:
        """Goes back to a checkpoint; returns the log that was saved with it."""
        saved = torch.load(path, weights_only=True, map_location=self.device)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        torch.set_rng_state(saved["random"].cpu())
        self.steps = saved["steps"]
        log: dict[str, Any] = json.loads(saved["log"])
        return log

    def export(self, out: Path, log: dict[str, Any]) -> None:
        """Writes the model folder; the weights (bfloat16, tied head left out) replace the old ones in one step."""
        save_config(out)
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
