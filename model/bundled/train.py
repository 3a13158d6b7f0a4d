"""Trains the bundled model: `python -m model.bundled.train --out model/bundled --minutes 90`.

Training runs on transformers' own Llama: a well-kept implementation with a backward pass, whereas our decoder is for
inference only. That the two agree is tested; that this one is right is not ours to prove.

A run is given `--minutes` (the schedule then follows the clock, whatever else the machine does) or `--steps`. Either
way the progress at each step is written to training_log.json; `--replay` of that file repeats the same schedule.
"""

import argparse
import contextlib
import json
import platform
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from model.bundled import attention
from model.bundled.conversations import chat_documents
from model.bundled.corpus import Document, plain_documents
from model.bundled.evaluate import held_out_windows, mean_loss
from model.bundled.recipe import CONTEXT, Recipe, model_config, save_config
from model.bundled.stream import TokenStream
from model.bundled.vocabulary import encode_documents, save_tokenizer, train_tokenizer

CACHE = Path(".cache/bundled-training")
PROGRESS_BLOCK = 20  # steps that share one reading of the clock
MICROBATCH_TOKENS = 2048  # what fits a CPU's caches best, by measurement; a longer sequence is a microbatch alone
EVALUATION_WINDOWS = 96  # of 512 tokens


def load_corpus() -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents."""
    plain = plain_documents()
    documents = plain + chat_documents(sum(document.characters for document in plain))
    return [d for d in documents if not d.held_out], [d for d in documents if d.held_out]


def prepare_tokenizer(out: Path, training: list[Document]) -> Tokenizer:
    """The folder's tokenizer; learned and saved where it has none. A longer training keeps the vocabulary it has."""
    if not (out / "tokenizer.json").exists():
        save_tokenizer(train_tokenizer(turn.text for document in training for turn in document.turns), out, CONTEXT)
    return Tokenizer.from_file(str(out / "tokenizer.json"))


def build_model(recipe: Recipe, device: str) -> Any:
    torch.manual_seed(recipe.seed)
    model: Any = LlamaForCausalLM(model_config()).float().to(device)
    model.set_attn_implementation(attention.register() if device == "cpu" else "sdpa")

    def drop(module: torch.nn.Module, _: object, output: Tensor) -> Tensor:
        # One mask for all rows of a microbatch: on a CPU, drawing a number for each element takes a tenth of the step.
        return output * functional.dropout(torch.ones_like(output[:1]), recipe.dropout, module.training)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.down_proj.register_forward_hook(drop)
    return model


def build_optimizers(model: Any, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices: it learns markedly more from each token than AdamW, and tokens are scarce here."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=recipe.muon_learning_rate, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(others, lr=recipe.adam_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def export(model: Any, out: Path, log: dict[str, Any]) -> None:
    """Writes the model folder; the weights (bfloat16, tied head left out) replace the old ones in one step."""
    save_config(out)
    (out / "training_log.json").write_text(json.dumps(log) + "\n", encoding="utf-8")
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    partial = out / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(out / "model.safetensors")


def train_step(
    model: Any, loss_of: Any, batch: Tensor, recipe: Recipe, optimizers: list[torch.optim.Optimizer]
) -> float:
    """One update from int64 [rows, length + 1]; returns the mean loss in nats a token."""
    rows = max(1, MICROBATCH_TOKENS // (batch.shape[1] - 1))
    parts = batch.split(rows)
    total = 0.0
    for part in parts:
        loss = loss_of(part) * (len(part) / len(batch))
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.gradient_clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return total


class Clock:
    """The progress (0 to 1) at a step: by the clock, by the number of steps, or as recorded in an earlier run."""

    def __init__(self, minutes: float | None, steps: int | None, recorded: list[float], replay: bool) -> None:
        self.minutes, self.steps, self.recorded, self.replay = minutes, steps, recorded, replay
        self.start = time.monotonic()

    def resume(self, progress: float) -> None:
        if self.minutes is not None:
            self.start = time.monotonic() - progress * self.minutes * 60

    def progress(self, step: int) -> float:
        """Appends to `recorded` at the first step of each block."""
        block = step // PROGRESS_BLOCK
        if block < len(self.recorded):
            return self.recorded[block]
        if self.replay:
            return 1.0
        by_steps = step / self.steps if self.steps is not None else 0.0
        elapsed = time.monotonic() - self.start
        by_clock = elapsed / (self.minutes * 60) if self.minutes is not None else 0.0
        self.recorded.append(round(min(1.0, max(by_steps, by_clock)), 5))
        return self.recorded[block]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--minutes", type=float, help="wall-clock budget that the schedule follows")
    parser.add_argument("--steps", type=int, help="number of steps that the schedule follows")
    parser.add_argument("--replay", type=Path, help="a training_log.json whose schedule is to be repeated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile (it needs a C++ compiler)")
    parser.add_argument("--resume", action="store_true", help=f"go on from the checkpoint in {CACHE}")
    parser.add_argument("--export-every-s", type=float, default=600.0)
    chosen = parser.parse_args()
    if chosen.minutes is None and chosen.steps is None and chosen.replay is None:
        parser.error("give --minutes, --steps or --replay")
    return chosen


def main() -> None:
    options = arguments()
    console = Console()
    recipe = Recipe()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    CACHE.mkdir(parents=True, exist_ok=True)

    console.print("reading the standard library")
    training, held_out = load_corpus()
    tokenizer = prepare_tokenizer(out, training)
    stream_documents = list(encode_documents(tokenizer, training))
    windows = held_out_windows(encode_documents(tokenizer, held_out), 512, EVALUATION_WINDOWS)

    stream = TokenStream(stream_documents, recipe.seed)
    model = build_model(recipe, options.device)
    optimizers = build_optimizers(model, recipe)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{parameters:,} parameters; {stream.epoch_tokens:,} training tokens, {len(training):,} documents")

    def plain_loss(tokens: Tensor) -> Tensor:
        tokens = tokens.to(options.device)
        with torch.autocast(options.device, torch.bfloat16):
            hidden = model.model(tokens[:, :-1], use_cache=False)[0]
            logits = functional.linear(hidden, model.lm_head.weight)
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    # Each phase's shape is compiled for itself: dynamic shapes cost speed, and there are only three.
    loss_of = plain_loss if options.no_compile else torch.compile(plain_loss, dynamic=False)

    log: dict[str, Any] = {
        "recipe": asdict(recipe),
        "parameters": parameters,
        "epoch_tokens": stream.epoch_tokens,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "progress_block_steps": PROGRESS_BLOCK,
        "progress": json.loads(options.replay.read_text())["progress"] if options.replay else [],
        "held_out": [],  # [step, tokens, training loss, held-out loss], nats a token
    }
    average = 0.0  # training loss, nats a token, over the last 50 steps or so
    step, checkpoint = 0, CACHE / "checkpoint.pt"
    clock = Clock(options.minutes, options.steps, log["progress"], options.replay is not None)
    if options.resume and checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        torch.set_rng_state(saved["random"])
        step, stream.position, log = saved["step"], saved["position"], json.loads(saved["log"])
        average = log["held_out"][-1][2]
        clock.recorded = log["progress"]
        clock.resume(saved["progress"])
        console.print(f"resumed at step {step}")

    def save_checkpoint() -> None:
        state = {
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "random": torch.get_rng_state(),
            "step": step,
            "position": stream.position,
            "progress": log["progress"][-1],
            "log": json.dumps(log),
        }
        torch.save(state, checkpoint.with_suffix(".partial"))
        checkpoint.with_suffix(".partial").replace(checkpoint)

    def evaluate() -> None:
        loss = mean_loss(model, windows)
        log["held_out"].append([step, stream.position, round(average, 4), round(loss, 4)])
        console.print(f"step {step}: held-out loss {loss:.4f} (training {average:.4f})")

    rates = (recipe.muon_learning_rate, recipe.adam_learning_rate)
    last_evaluation = last_export = last_print = time.monotonic()
    printed_tokens = stream.position
    model.train()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.1f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=1.0)
        while (progress := clock.progress(step)) < 1.0:
            length = recipe.sequence_length(progress)
            for optimizer, rate in zip(optimizers, rates, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = rate * recipe.learning_rate_factor(step, progress)
            batch = stream.batch(max(1, recipe.tokens_per_step // length), length)
            loss = train_step(model, loss_of, batch, recipe, optimizers)
            step += 1
            average = loss if step == 1 else average + (loss - average) * max(0.02, 1 / step)
            now = time.monotonic()
            bar.update(task, completed=progress, description=f"step {step} loss {average:.3f}")
            if now - last_print > 30:
                speed = (stream.position - printed_tokens) / (now - last_print)
                last_print, printed_tokens = now, stream.position
                console.print(
                    f"step {step} progress {progress:.3f} length {length} "
                    f"epoch {stream.position / stream.epoch_tokens:.2f} loss {average:.3f} {speed:,.0f} tokens/s"
                )
            if now - last_evaluation > 180:
                last_evaluation = now
                evaluate()
                save_checkpoint()
            if now - last_export > options.export_every_s:
                last_export = now
                export(model, out, log)
                console.print(f"exported at step {step}")
    evaluate()
    log["steps"], log["tokens"] = step, stream.position
    export(model, out, log)
    with contextlib.suppress(shutil.SameFileError):
        shutil.copy(out / "training_log.json", CACHE / "training_log.json")
    console.print(f"done: {step} steps, {stream.position:,} tokens")


if __name__ == "__main__":
    main()
