"""Sizes and a place for `twostroke bench gpu` in Triton's interpreter: as many rows, over heads and blocks of the real
sizes but few of them. Times mean nothing here; that no row dies of a typo does."""

import time
from collections.abc import Callable

import torch

from twostroke.benchmarks.gpu.limits import GpuPlace, Sizes
from twostroke.benchmarks.random_model import MODELS
from twostroke.model.checkpoint.config_file import parse_model_config
from twostroke.model.cuda.graphs import Recorder
from twostroke.model.cuda.kernels.launch import H100

TINY = Sizes(
    model=parse_model_config(
        {
            **MODELS["1.2b"],
            "vocab_size": 128,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
        "the tiny shape",
    ),
    read_bytes=1024,
    gemm_size=16,
    attention_lengths=(16, 32, 64, 100, 130),
    attention_tokens=128,
    prefix=150,
    chunk=70,
    prompts=(5, 40, 70),
    small_prompts=((5, 0.9), (20, 0.9), (72, 0.9)),
    decode_batches=(1, 2, 3, 4, 5, 6),
    decode_context=5,
    decode_steps=1,
    turns=1,
    long_decodes=((2, 100), (2, 300), (3, 200)),
    skewed_decode=(700, (3, 20)),
    gated_tokens=(1, 16, 20),
    gated_prompts=(20, 70),
    fp8_tokens=(1, 20, 65, 130),
    experts=(4, 2, 64, 64),
    expert_tokens=(1, 20, 130),
    window=64,
    windowed_prompt=150,
    windowed_decodes=((1, 140), (2, 140)),
    sampled_rows=(1, 2, 3),
    pack_bytes=2**17,
    started="160m",
)


class WallClock:
    """Implements Clock; once is enough."""

    def seconds(self, run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    queued_seconds = seconds


class _NoEvent:
    def record(self) -> None:
        """Nothing here is asynchronous."""

    def synchronize(self) -> None:
        """Do nothing, as `record` does."""


class Repeating(Recorder):
    """Its graphs are the functions themselves."""

    def __init__(self) -> None:
        pass

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        return run

    def event(self) -> torch.cuda.Event:
        return _NoEvent()  # type: ignore[return-value]


DRY = GpuPlace(torch.device("cpu"), H100, WallClock(), Repeating)
