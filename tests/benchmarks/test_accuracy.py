"""Quantised weights, and KV in FP8, cost the bundled model little, as perplexity of text that it never read."""

import hashlib
import math
import statistics
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

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

BLOCK_SIZE = 16
HELD_OUT_PERCENT = 5
CPU = torch.device("cpu")

KINDS: Mapping[str, tuple[Quantization, torch.dtype | None]] = {
    "plain": ("none", None),
    "int8": ("int8", None),
    "int4": ("int4", None),
    "kv_fp8": ("none", torch.float8_e4m3fn),
}
"""The quantisation of weights, and the numbers that KV is held in."""


def test_quantised_weights_and_kv_in_fp8_keep_the_bundled_models_perplexity() -> None:
    torch.set_num_threads(1)
    windows = held_out_text(BUNDLED_MODEL_DIR, 256, 3, files=12)
    plain, int8, int4, kv_fp8 = (
        math.exp(statistics.fmean(window_losses(BUNDLED_MODEL_DIR, windows, *kind))) for kind in KINDS.values()
    )
    assert 5 < plain < 20
    assert abs(int8 / plain - 1) < 0.005
    assert 1 < int4 / plain < 1.05
    assert 0 < abs(kv_fp8 / plain - 1) < 0.02


def held_out_text(folder: Path, length: int, limit: int, files: int) -> list[Tensor]:
    """Return `limit` windows int64 [length + 1], evenly spread over the first `files` held-out files, in
    the tokens of `folder`'s model.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in _held_out_files()[:files]]
    tokens = torch.tensor([token for text in texts for token in tokenizer.encode(text).ids])
    windows = list(tokens[: (len(tokens) - 1) // length * length + 1].unfold(0, length + 1, length))
    return [windows[index * len(windows) // limit] for index in range(limit)] if len(windows) > limit else windows


def _held_out_files() -> list[Path]:
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
    """Mean cross-entropy in nats of the tokens of each window, all of one length."""
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
