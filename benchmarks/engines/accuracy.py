"""`twostroke bench accuracy`: what quantising its weights, or KV in FP8, costs a model, as perplexity of held-out text.

Each runs on this CPU's own kernels, over the same windows of Python's standard library that the bundled
model never read; another model reads the same text in its own tokens.
"""

import argparse
import hashlib
import json
import math
import statistics
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from twostroke.benchmarks.console import positive, say
from twostroke.model.architectures.decoder import Decoder
from twostroke.model.backend import LoadOptions
from twostroke.model.batch import Drawing, StepInput, make_layouts
from twostroke.model.bundled import BUNDLED_MODEL_DIR
from twostroke.model.cache.kv_cache import make_kv_cache
from twostroke.model.checkpoint.config_file import load_model_config
from twostroke.model.checkpoint.decoder_weights import load_decoder_weights
from twostroke.model.checkpoint.weights import Checkpoint
from twostroke.model.config import Quantization
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.engine_config import resolve_dtype
from twostroke.model.parallel.tensor_parallel import SingleRank
from twostroke.model.step import SequenceStep
from twostroke.protocol.errors import ConfigError

BLOCK_SIZE = 16
HELD_OUT_PERCENT = 5
CPU = torch.device("cpu")

PLAIN = "none"
KINDS: Mapping[str, tuple[Quantization, torch.dtype | None]] = {
    PLAIN: ("none", None),
    "int8": ("int8", None),
    "int4": ("int4", None),
    "kv_fp8": ("none", torch.float8_e4m3fn),
}
"""The quantisation of weights, and the numbers that KV is held in, by name."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `twostroke bench accuracy`."""
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL_DIR, metavar="DIR", help="default: the bundled one")
    parser.add_argument("--windows", type=positive, default=100, help="stretches of text, evenly spread")
    parser.add_argument("--length", type=positive, default=512, help="tokens of each")


def run(args: argparse.Namespace) -> int:
    """Measure and print; the last line of stdout is one JSON object. Returns the exit code. Raises ConfigError."""
    load_model_config(args.model)  # so that a folder that is none is told as such
    windows = held_out_text(args.model, args.length, args.windows)
    losses: dict[str, list[float]] = {}
    for kind, (quantization, kv_dtype) in KINDS.items():
        say(f"{kind}: {len(windows)} windows of {args.length} tokens")
        losses[kind] = window_losses(args.model, windows, quantization, kv_dtype)
    plain = losses[PLAIN]
    result: dict[str, float] = {"perplexity": round(math.exp(statistics.fmean(plain)), 4)}
    print(f"{'':8}{'perplexity':>12}{'ratio':>10}{'+- of the ratio':>18}")
    for kind, found in losses.items():
        perplexity = math.exp(statistics.fmean(found))
        ratio = perplexity / math.exp(statistics.fmean(plain))
        differences = [a - b for a, b in zip(found, plain, strict=True)]
        error = ratio * statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
        print(f"{kind:8}{perplexity:>12.4f}{ratio:>10.4f}{error:>18.4f}")
        if kind != PLAIN:
            result |= {f"{kind}_over_plain": round(ratio, 5), f"{kind}_error": round(error, 5)}
    print(json.dumps(result))
    return 0


def held_out_text(folder: Path, length: int, limit: int, files: int | None = None) -> list[Tensor]:
    """Return `limit` windows int64 [length + 1], evenly spread over the first `files` held-out files (None: all), in
    the tokens of `folder`'s model. Raises ConfigError.
    """
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises nothing more special
        raise ConfigError(f"{folder / 'tokenizer.json'} can't be read: {error}") from error
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in held_out_files()[:files]]
    tokens = torch.tensor([token for text in texts for token in tokenizer.encode(text).ids])
    windows = list(tokens[: (len(tokens) - 1) // length * length + 1].unfold(0, length + 1, length))
    return [windows[index * len(windows) // limit] for index in range(limit)] if len(windows) > limit else windows


def held_out_files() -> list[Path]:
    """Return the standard library's files that the bundled model has not read: one of twenty, by a hash of its name
    (tools/train_bundled/corpus.py)."""
    library = Path(sysconfig.get_paths()["stdlib"])
    left_out = ("test", "tests", "idle_test", "site-packages", "_bundled")
    found = []
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        digest = hashlib.sha256(f"twostroke-1\0split\0{name.as_posix()}".encode()).digest()
        if int.from_bytes(digest[:8], "big") % 100 < HELD_OUT_PERCENT and not set(left_out).intersection(name.parts):
            found.append(path)
    return found


def window_losses(
    folder: Path, windows: Sequence[Tensor], quantization: Quantization, kv_dtype: torch.dtype | None = None
) -> list[float]:
    """Mean cross-entropy in nats of the tokens of each window, all of one length. Raises ConfigError."""
    length = len(windows[0]) - 1
    checkpoint = Checkpoint(folder, load_model_config(folder))
    config = checkpoint.config
    dtype = resolve_dtype("auto", checkpoint.dtype, CPU)
    backend = CpuBackend()
    options = LoadOptions(dtype, CPU, length, quantization, kv_dtype)
    weights = load_decoder_weights(checkpoint, config, options, backend)
    decoder = Decoder(config, weights, backend, SingleRank())
    groups = config.kv_groups
    blocks = range(-(-length // BLOCK_SIZE) * groups.count)
    cache = make_kv_cache(
        config,
        num_blocks=len(blocks),
        block_size=BLOCK_SIZE,
        dtype=kv_dtype or dtype,
        device=CPU,
        model_digest="accuracy",
    )
    every_row = Drawing(rows=torch.arange(length), sequences=torch.zeros(length, dtype=torch.int64))
    losses: list[float] = []
    try:
        with torch.inference_mode():
            for window in windows:
                tokens = window[:-1].contiguous()
                layouts = make_layouts([SequenceStep(tokens.tolist(), 0, blocks, None)], BLOCK_SIZE, CPU, groups)
                logits = decoder.forward(StepInput(tokens, layouts, cache.tensors, every_row))
                assert logits is not None  # every row draws
                losses.append(functional.cross_entropy(logits, window[1:]).item())
    finally:
        cache.close()
    return losses
