"""What an engine's step can't do without, and what the machine can do: the two sides of the floor."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from twostroke.model.config import ModelConfig
from twostroke.model.quantization import INT4_GROUP, Quantization, of_lm_head

GEMM_SIZE = 2048  # [1024, 2048] x [2048, 2048], three times: 26 GFLOP
READ_BYTES = 512 * 2**20  # far more than any cache holds
BYTES_A_WEIGHT = {"none": 2.0, "int8": 1.0, "int4": 0.5 + 2 / INT4_GROUP}


@dataclass(frozen=True)
class Limits:
    """What the machine did just now."""

    gemm: float  # bf16 operations a second
    read: float  # bytes a second

    def mean(self, other: "Limits") -> "Limits":
        return Limits((self.gemm + other.gemm) / 2, (self.read + other.read) / 2)


@dataclass(frozen=True)
class Work:
    """What one step can't do without."""

    tokens: int  # tokens that count
    operations: float
    bytes: float  # weights and cached KV that must be read

    def floor_s(self, limits: Limits) -> float:
        """Seconds that the step takes at least."""
        return max(self.operations / limits.gemm, self.bytes / limits.read)


def prefill_work(config: ModelConfig, tokens: int, quantization: Quantization) -> Work:
    """A prompt in one chunk that draws one token: only one row needs the last layer's output and the logits."""
    attention, mlp, head = _matrix_sizes(config)
    kv = config.hidden_size * 2 * config.kv_size
    last_layer = tokens * (kv + config.hidden_size * config.q_size) + (attention - kv + mlp)
    products = tokens * (config.num_layers - 1) * (attention + mlp) + last_layer + head
    scores = config.num_layers * config.q_size * tokens * tokens  # causal: half of 2 x 2 x tokens^2
    return Work(tokens, 2.0 * products + 2.0 * scores, _weight_bytes(config, quantization))


def decode_work(config: ModelConfig, batch: int, context: float, quantization: Quantization) -> Work:
    """One decode step of `batch` sequences with `context` tokens each."""
    attention, mlp, head = _matrix_sizes(config)
    products = batch * (config.num_layers * (attention + mlp) + head)
    scores = batch * config.num_layers * 2 * config.q_size * context
    kv_bytes = batch * config.num_layers * 2 * config.kv_size * context * 2
    return Work(batch, 2.0 * (products + scores), _weight_bytes(config, quantization) + kv_bytes)


def _matrix_sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Weights of a layer's attention, of its MLP, and of the LM head."""
    attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
    return attention, 3 * config.hidden_size * config.intermediate_size, config.hidden_size * config.vocab_size


def _weight_bytes(config: ModelConfig, quantization: Quantization) -> float:
    attention, mlp, head = _matrix_sizes(config)
    layers = config.num_layers * (attention + mlp)
    return BYTES_A_WEIGHT[quantization] * layers + BYTES_A_WEIGHT[of_lm_head(quantization)] * head


class Machine:
    """Measures the limits with torch's own kernels, on as many threads as torch uses here."""

    def __init__(self, shapes: list[tuple[int, int, int]] | None = None):
        """`shapes`: (rows, columns in, columns out) of the products that the GEMM rate is measured with."""
        self._products = [
            (torch.randn(rows, inner).to(torch.bfloat16), torch.randn(outer, inner).to(torch.bfloat16))
            for rows, inner, outer in shapes or [(1024, GEMM_SIZE, GEMM_SIZE)]
        ]
        self._operations = 2.0 * sum(left.numel() * len(right) for left, right in self._products)
        self._memory = torch.ones(READ_BYTES // 4, dtype=torch.float32)
        self.measure()

    def measure(self) -> Limits:
        """Of now; the best of a few passes each."""
        gemm_s = min(_timed(self._multiply) for _ in range(3))
        read_s = min(_timed(lambda: self._memory.sum()) for _ in range(2))
        return Limits(gemm=self._operations / gemm_s, read=READ_BYTES / read_s)

    def _multiply(self) -> None:
        for left, right in self._products:
            functional.linear(left, right)


def prefill_machine(config: ModelConfig, tokens: int) -> Machine:
    """Its GEMM rate is that of a layer's own projections over `tokens` rows."""
    hidden = config.hidden_size
    shapes = [
        (hidden, config.q_size + 2 * config.kv_size),
        (config.q_size, hidden),
        (hidden, 2 * config.intermediate_size),
        (config.intermediate_size, hidden),
    ]
    return Machine([(tokens, inner, outer) for inner, outer in shapes])


def _timed(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
