"""Train the bundled model: `python tools/train_bundled/train.py --out somewhere --minutes 90`.

The recipe is that of `--recipe`, model/bundled/training_log.json unless another is named. `--minutes` has the schedule
follow the clock, whatever else the machine does; without it the schedule of the recipe's log is repeated. The run's own
training_log.json has both. Training runs on transformers' Llama, which has a backward pass; our decoder has none.
"""

import argparse
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from corpus import Document, load_corpus
from evaluate import encoded, mean_loss, windows_of
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

BUNDLED = Path(__file__).resolve().parents[2] / "model" / "bundled"
COPIED = ("config", "generation_config", "tokenizer_config", "special_tokens_map", "chat_template")
CPU_MICROBATCH_TOKENS = 2048  # what fits the caches best, by measurement; a longer sequence is a microbatch alone
EVALUATE_EVERY_S = 180.0
SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]
# A small model can't repair a token boundary that it never saw. So line breaks, indentation and words are separate
# tokens: a prompt may end after `:`, after the line break or after the indentation, and its tokens are each time a
# prefix of those that the finished text has.
PATTERN = "|".join(
    (
        r"[ _]?\p{L}+",  # a word, with the space or underscore before it
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+",  # punctuation
        r"[\r\n]+",
        r"(?<![^\r\n])[ \t]+",  # a line's whole indentation
        r"\s+(?!\S)",  # spaces inside a line, all but the one that belongs to the next word
        r"\s+",
    )
)


def train_tokenizer(training: list[Document]) -> Tokenizer:
    """Return byte-level BPE of 4,096 tokens, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_byte])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
    )
    tokenizer.train_from_iterator((turn.text for document in training for turn in document.turns), trainer)
    begin = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, 0)]
    )
    return tokenizer


def batches(documents: list[list[int]], seed: int) -> Iterator[Any]:
    """Take (rows, length) by `send`, and give int64 [rows, length + 1]: every document once an epoch, shuffled, packed.

    The last column is the next row's first token. What fills no batch at an epoch's end is passed over.
    """
    epoch, offset, tokens = 0, 0, torch.empty(0, dtype=torch.int32)
    rows, length = yield None
    while True:
        if offset + rows * length + 1 > len(tokens):
            order = list(range(len(documents)))
            random.Random(seed * 1_000_003 + epoch).shuffle(order)
            tokens = torch.tensor([token for index in order for token in documents[index]], dtype=torch.int32)
            epoch, offset = epoch + 1, 0
        window = tokens[offset : offset + rows * length + 1].long()
        offset += rows * length
        rows, length = yield torch.stack([window[row * length : (row + 1) * length + 1] for row in range(rows)])


def add_dropout(model: Any, rate: float) -> list[Any]:
    """Drop on each residual branch, where transformers' Llama has no dropout, until the handles are removed."""

    def drop(module: torch.nn.Module, _: object, output: Tensor) -> Tensor:
        # One mask for all rows of a microbatch: on a CPU, drawing a number for each element takes a tenth of the step.
        return output * functional.dropout(torch.ones_like(output[:1]), rate, module.training)

    branches = [branch for layer in model.model.layers for branch in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    return [branch.register_forward_hook(drop) for branch in branches]


def optimizers_of(model: Any, recipe: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices: it learns markedly more from each token than AdamW, and tokens are scarce here."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=recipe["muon_learning_rate"], weight_decay=recipe["weight_decay"]),
        torch.optim.AdamW(others, lr=recipe["adam_learning_rate"], betas=(0.9, 0.95), weight_decay=0.0),
    ]


def export(model: Any, tokenizer: Tokenizer, out: Path, log: dict[str, Any]) -> None:
    """Write the model folder; the weights, bfloat16 without the tied head, replace the old ones in one step."""
    for source in (path for name in COPIED for path in BUNDLED.glob(f"{name}.j*") if path.parent != out):
        shutil.copy(source, out)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "training_log.json").write_text(json.dumps(log) + "\n", encoding="utf-8")
    named = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    weights = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in named.items()}
    partial = out / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.replace(out / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the model folder to write")
    parser.add_argument("--recipe", type=Path, default=BUNDLED / "training_log.json", help="default: the bundled one's")
    parser.add_argument("--minutes", type=float, help="wall-clock budget that the schedule follows")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    log = json.loads(options.recipe.read_text())
    recipe, block, seed = log["recipe"], log["progress_block_steps"], log["recipe"]["seed"]
    schedule: list[float] = [] if options.minutes else log["progress"]

    training, held_out = load_corpus()
    known = out / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(known)) if known.exists() else train_tokenizer(training)
    documents = list(encoded(tokenizer, training))
    windows = windows_of(encoded(tokenizer, held_out), 512, 96)
    reader = batches(documents, seed)
    next(reader)
    torch.manual_seed(seed)
    model: Any = LlamaForCausalLM(LlamaConfig(**json.loads((BUNDLED / "config.json").read_text()))).float()
    model.to(options.device)
    optimizers, dropout = optimizers_of(model, recipe), add_dropout(model, recipe["dropout"])
    print(f"{sum(map(len, documents)):,} tokens in {len(documents):,} documents", flush=True)
    log |= {"progress": schedule, "held_out": [], "epoch_tokens": sum(map(len, documents)), "torch": torch.__version__}

    began = evaluated = time.monotonic()
    steps, tokens, progress = 0, 0, 0.0
    while progress < 1.0:
        if steps // block == len(schedule) and options.minutes:
            schedule.append(round(min(1.0, (time.monotonic() - began) / 60 / options.minutes), 5))
        progress = schedule[steps // block] if steps // block < len(schedule) else 1.0
        if progress < 1.0:
            length = next(length for end, length in recipe["phases"] if progress < end)
            rows = max(1, recipe["tokens_per_step"] // length)
            if steps == recipe["dropout_steps"]:
                for handle in dropout:
                    handle.remove()
            factor = min((steps + 1) / recipe["warm_up"], 1.0) * (1 - progress)
            for optimizer, kind in zip(optimizers, ("muon", "adam"), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = recipe[f"{kind}_learning_rate"] * factor
            batch, loss_of_step = reader.send((rows, length)), 0.0
            microbatch = CPU_MICROBATCH_TOKENS if options.device == "cpu" else rows * length
            model.train()
            for part in torch.split(batch.to(options.device), max(1, microbatch // length)):
                with torch.autocast(options.device, torch.bfloat16):
                    logits = model(part[:, :-1], use_cache=False).logits.float()
                loss = functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()) * (len(part) / len(batch))
                loss.backward()
                loss_of_step += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["gradient_clip"])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            steps, tokens = steps + 1, tokens + rows * length
        if progress >= 1.0 or time.monotonic() - evaluated > EVALUATE_EVERY_S:
            evaluated = time.monotonic()
            held_out_loss = mean_loss(model, windows)
            print(f"step {steps}, {progress:.0%}: held-out loss {held_out_loss:.4f} (training {loss_of_step:.4f})")
            log["held_out"].append([steps, tokens, round(loss_of_step, 4), round(held_out_loss, 4)])
            log |= {"minutes": round((evaluated - began) / 60, 1), "steps": steps, "tokens": tokens}
            export(model, tokenizer, out, log)


if __name__ == "__main__":
    main()
