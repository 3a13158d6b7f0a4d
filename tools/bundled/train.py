"""Trains the bundled model: `python -m twostroke.tools.bundled.train --out model/bundled --minutes 90`.

A run is given `--minutes` (the schedule then follows the clock, whatever else the machine does) or `--steps`. Either
way the progress at each step is written to training_log.json; `--replay` of that file repeats the same schedule.
"""

import argparse
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from twostroke.tools.bundled.corpus import Document, load_corpus
from twostroke.tools.bundled.evaluate import held_out_windows, mean_loss
from twostroke.tools.bundled.trainer import BLOCK_STEPS, CONFIG, Recipe, Schedule, TokenStream, Trainer
from twostroke.tools.bundled.vocabulary import encode_documents, save_tokenizer, train_tokenizer

EVALUATION_WINDOWS = 96  # of 512 tokens
EVALUATE_EVERY_S = 180.0


def prepare_tokenizer(out: Path, training: list[Document]) -> Tokenizer:
    """The folder's tokenizer; learned and saved where it has none. A longer training keeps the vocabulary it has."""
    if not (out / "tokenizer.json").exists():
        save_tokenizer(
            train_tokenizer(turn.text for document in training for turn in document.turns),
            out,
            CONFIG["max_position_embeddings"],
        )
    return Tokenizer.from_file(str(out / "tokenizer.json"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--minutes", type=float, help="wall-clock budget that the schedule follows")
    parser.add_argument("--steps", type=int, help="number of steps that the schedule follows")
    parser.add_argument("--replay", type=Path, help="a training_log.json whose schedule is to be repeated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile (it needs a C++ compiler)")
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

    console.print("reading the standard library")
    training, held_out = load_corpus()
    tokenizer = prepare_tokenizer(out, training)
    stream = TokenStream(list(encode_documents(tokenizer, training)), recipe.seed)
    windows = held_out_windows(encode_documents(tokenizer, held_out), 512, EVALUATION_WINDOWS)
    trainer = Trainer(recipe, options.device, compiled=not options.no_compile)
    console.print(f"{trainer.parameters:,} parameters; {stream.epoch_tokens:,} tokens in {len(training):,} documents")

    log: dict[str, Any] = {
        "progress_block_steps": BLOCK_STEPS,
        "progress": json.loads(options.replay.read_text())["progress"] if options.replay else [],
        "minutes": 0.0,  # spent in training
        "steps": 0,
        "tokens": 0,
        "held_out": [],  # [step, tokens, training loss, held-out loss], nats a token
        "recipe": asdict(recipe),
        "parameters": trainer.parameters,
        "epoch_tokens": stream.epoch_tokens,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    average = 0.0  # training loss, nats a token, over the last 50 steps or so
    schedule = Schedule(options.minutes, options.steps, log["progress"], options.replay is not None)
    start = time.monotonic()

    def evaluate() -> None:
        log["minutes"] = round((time.monotonic() - start) / 60, 1)
        log["steps"], log["tokens"] = trainer.steps, stream.position
        with torch.compiler.set_stance("force_eager"):  # its shapes are not worth a compilation
            loss = mean_loss(trainer.model, windows)
        log["held_out"].append([trainer.steps, stream.position, round(average, 4), round(loss, 4)])
        console.print(f"step {trainer.steps}: held-out loss {loss:.4f} (training {average:.4f})")

    evaluated = start
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.1f}%"), TimeRemainingColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=1.0)
        while (progress := schedule.progress(trainer.steps)) < 1.0:
            length = recipe.sequence_length(progress)
            loss = trainer.step(stream.batch(max(1, recipe.tokens_per_step // length), length), progress)
            average += (loss - average) * max(0.02, 1 / trainer.steps)
            bar.update(task, completed=progress, description=f"step {trainer.steps} loss {average:.3f}")
            if time.monotonic() - evaluated > EVALUATE_EVERY_S:
                evaluated = time.monotonic()
                evaluate()
                trainer.export(out, log)
    evaluate()
    trainer.export(out, log)
    console.print(f"done: {trainer.steps} steps, {stream.position:,} tokens")


if __name__ == "__main__":
    main()
