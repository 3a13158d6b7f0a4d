"""How large the work of `twostroke bench gpu` is, and where it is done."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from twostroke.cluster.bench.engine_models import MODELS
from twostroke.cluster.bench.gpu_limits import Clock, GpuLimits
from twostroke.model.config import ModelConfig, parse_model_config
from twostroke.model.cuda_graphs import Recorder
from twostroke.model.kernels.launch import Target

_LLAMA_8B = parse_model_config(
    {
        **MODELS["1.2b"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
    },
    "the 8B shape",
)


@dataclass(frozen=True)
class Sizes:
    """What is measured. The defaults are PERF's table: Llama-3.1-8B's shape on a GPU of 80 GB."""

    model: ModelConfig = _LLAMA_8B
    block_size: int = 128  # tokens
    read_bytes: int = 2**31
    gemm_size: int = 8192
    attention_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)
    attention_tokens: int = 16384  # of a batch of prompts that short
    prefix: int = 6144  # tokens that are cached before a chunk
    chunk: int = 2048
    prompts: tuple[int, ...] = (1024, 4096, 8192)
    decode_batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    decode_context: int = 1024
    decode_steps: int = 32
    long_decodes: tuple[tuple[int, int], ...] = ((32, 4096), (32, 16384), (128, 4096))  # batch, context
    sampled_rows: tuple[int, ...] = (1, 32, 256)
    pack_blocks: tuple[int, ...] = (16, 32, 64, 128)
    pack_bytes: int = 2**28

    @property
    def max_context(self) -> int:
        """In whole blocks."""
        most = max(*self.prompts, self.decode_context + self.decode_steps)
        return -(-most // self.block_size) * self.block_size


@dataclass(frozen=True)
class GpuPlace:
    """The device, and what a test replaces on a host without one."""

    device: torch.device
    target: Target
    clock: Clock
    recorder: Callable[[], Recorder]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    ratio: float  # of what it is held against: 1 is as good
    aim: float | None  # of the ratio
    figure: str  # the absolute figure, with its unit
    against: str  # what the ratio is of


Measure = Callable[[Sizes, GpuPlace, GpuLimits], list[Row]]
