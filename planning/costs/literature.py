"""Our calculators against numbers that others have published: `twostroke capacity --check`, rows in literature.json.

A number agrees where it rounds to what is stated, or, where the source counts or rounds otherwise, within what its row
allows. Where the source slips, the row has the right number too: ours is held against that, and the remark says why.
"""

import random
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import cache
from math import ceil, log2
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from twostroke.model.config import ModelConfig, ModelShape
from twostroke.model.costs.operations import Operation, decode_operations, prefill_operations, product_intensity
from twostroke.model.costs.sizes import num_active_parameters, num_parameters, weight_bytes
from twostroke.model.parallel.form import ParallelForm
from twostroke.model.published.hardware import HARDWARE, Hardware
from twostroke.model.published.models import published_model
from twostroke.planning.baselines import BaselineResult
from twostroke.planning.costs.capacity import CapacityCase, border, continuous_gain, model_of_numbers, serve_ways
from twostroke.planning.costs.profiles import SMALL
from twostroke.planning.costs.roofline import (
    WorkerHardware,
    as_mha,
    batch_limits,
    flops_of,
    kv_bytes,
    request_usd,
    tpot_floor_s,
    ttft_floor_s,
    uncached_flops,
    usd_per_million,
)
from twostroke.planning.search import PlanConstraints, worker_hardware
from twostroke.protocol.errors import ConfigError


class LiteratureFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One number of a source, in its unit, and how ours is computed."""

    what: str
    source: str
    stated: str  # as it is printed there: a number, or LOW to HIGH
    formula: str  # of FORMULAS
    given: dict[str, Any]  # to it; models and GPUs by name
    per: float = 1.0  # the source's unit, in ours
    within: float = 0.0  # relative, beyond rounding
    bound: Literal["", "lower", "upper"] = ""  # ours is such a bound of what the source has measured
    right: str = ""  # where the source slips: what it should state
    remark: str = ""

    @property
    def ours(self) -> float:
        """Our number in the source's unit."""
        return _ours(self.formula, self.given) / self.per

    def is_wrong(self, ours: float) -> bool:
        """Return whether ours is another number than the right one."""
        low, _, high = (self.right or self.stated).partition(" to ")
        if self.bound:
            return ours > float(low) if self.bound == "lower" else ours < float(low)
        half = 0.5 * 10.0 ** float(Decimal(low).as_tuple().exponent) * 1.001
        off = max(float(low) - ours, ours - float(high or low))
        return bool(off > half + self.within * abs(float(low)))


def read_rows(content: bytes, source: str) -> list[LiteratureFigure]:
    """Return a file's rows. Raises ConfigError, which names the field that is wrong."""
    try:
        rows = msgspec.json.decode(content, type=list[LiteratureFigure])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source}: {error}") from error
    for number, row in enumerate(rows):
        if row.formula not in FORMULAS:
            raise ConfigError(f"{source}: no formula {row.formula!r} - at `$[{number}].formula`")
        if row.right and not row.remark:
            raise ConfigError(f"{source}: a slip needs a remark - at `$[{number}].remark`")
    return rows


@cache
def checked() -> list[tuple[LiteratureFigure, float]]:
    """All rows, each with our number."""
    file = Path(__file__).with_name("literature.json")
    return [(row, row.ours) for row in read_rows(file.read_bytes(), str(file))]


def check_lines() -> tuple[list[str], int, int]:
    """The table for people, how many rows it has, and how many are wrong."""
    lines = [f"{'what':66}{'ours':>12}{'stated':>14}  source"]
    for row, ours in checked():
        word = "WRONG: " if row.is_wrong(ours) else "slips: " if row.right else ""
        remark = f" ({row.remark})" if row.remark else ""
        lines.append(f"{row.what:66}{ours:>12.6g}{row.stated:>14}  {word}{row.source}{remark}")
    return lines, len(checked()), sum(row.is_wrong(ours) for row, ours in checked())


# --- formulas by name ---


def _ours(formula: str, given: Mapping[str, Any]) -> float:
    return FORMULAS[formula](
        **{name: _NAMED[name](value) if name in _NAMED else value for name, value in given.items()}
    )


def _model(named: str | Mapping[str, Any]) -> ModelConfig:
    """A model of the table, as MHA where that is said, or one by its numbers."""
    if isinstance(named, str):
        name, _, heads = named.partition(" as ")
        return as_mha(published_model(name)) if heads else published_model(name)
    return model_of_numbers(**named)


_NAMED: Mapping[str, Callable[[Any], Any]] = {"model": _model, "other": _model, "gpu": HARDWARE.__getitem__}


def _step(model: ModelShape, prompt: int = 0, context: int = 0, batch: int = 1) -> list[Operation]:
    """The operations of a prompt, or of a decode step."""
    return decode_operations(model, batch, context) if context else prefill_operations(model, prompt, is_last=False)


def _tables(model: ModelConfig) -> int:
    return model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)


def _square(model: ModelShape, prompt: int) -> float:
    """FLOPs of a prompt whose attention computes all pairs of tokens, as without a causal mask."""
    return flops_of(_step(model, prompt)) + flops_of(_step(model, prompt), "attention")


def _bytes(model: ModelConfig, context: int) -> float:
    return weight_bytes(model, 2, "none") + kv_bytes(model, context)


def _training(model: ModelConfig, tokens: int) -> float:
    """FLOPs a token: forward, and twice that backward."""
    return 3 * (flops_of(_step(model, tokens)) / tokens + 2 * model.hidden_size * model.vocab_size)


def _limit(model: ModelConfig, gpu: Hardware, context: int, of: str, gpus: int = 1, tpot_s: float = 1.0) -> float:
    weights = weight_bytes(model, 2, "none")
    return float(getattr(batch_limits(WorkerHardware(gpu, gpus).at_peak(), model, weights, context, tpot_s), of))


def _gpus(model: ModelConfig, gpu: Hardware, context: int) -> int:
    """The fewest that share a model, in a power of two, with room for one request."""
    return 1 << max(0, ceil(log2(_bytes(model, context) / gpu.memory_bytes)))


def _intensity(operation: str, **step: Any) -> float:
    return next(one.intensity for one in _step(**step) if one.name == operation)


@cache
def _chats() -> Mapping[str, BaselineResult]:
    """Ways to batch and to allocate, simulated for lengths as of shared chats.

    The memory is what OPT-13B leaves of 40 GB, 15,700 tokens (Kwon et al., SOSP 2023, section 3).
    """
    draw = random.Random(1)

    def length(mu: float, sigma: float) -> int:
        return max(4, min(1024, round(draw.lognormvariate(mu, sigma))))

    lengths = [(length(4.4, 1.2), length(5.3, 1.1)) for _ in range(200)]
    return {one.way: one for one in serve_ways(lengths, replace(SMALL, kv_tokens=15_700))}


def _used(way: str) -> float:
    return 1 - (_chats()[way].waste or 0)


@cache
def _border(model: ModelConfig, on: str, prompt: int, answer: int, batch: int) -> Mapping[str, float]:
    terms = PlanConstraints()
    machine = worker_hardware(HARDWARE[on], 1, "auto", terms)
    return border(CapacityCase("", model, machine, terms, (), 0.05, prompt, answer), batch)


FORMULAS: Mapping[str, Callable[..., float]] = {
    # models
    "parameters": lambda model: num_parameters(model),
    "active": lambda model: num_active_parameters(model),
    "parameters without embeddings": lambda model: num_parameters(model) - _tables(model),
    "active without the embedding": lambda model: num_active_parameters(model) - model.vocab_size * model.hidden_size,
    "experts": lambda model: model.num_experts,
    "experts of a token": lambda model: model.num_experts * model.expert_share,
    "window": lambda model: model.window(0),
    "weights": lambda model, gpus=1: weight_bytes(model, 2, "none", None, ParallelForm(gpus)),
    # KV, and room for it
    "KV": lambda model, tokens=1: kv_bytes(model, tokens),
    "KV of a rank": lambda model, gpu, gpus: kv_bytes(model) * WorkerHardware(gpu, gpus).kv_share(model),
    "KV over KV": lambda model, other: kv_bytes(model) / kv_bytes(other),
    "largest batch": _limit,
    "GPUs": _gpus,
    # operations
    "ridge": lambda gpu, number=None, is_sparse=False: gpu.ridge(number, is_sparse=is_sparse),
    "peak": lambda gpu, number=None, is_sparse=False: gpu.peak(number, is_sparse=is_sparse),
    "bandwidth": lambda gpu: gpu.read_bytes_per_s,
    "memory": lambda gpu: gpu.memory_bytes,
    "most tokens of one sequence": lambda model, read_bytes_per_s: read_bytes_per_s / weight_bytes(model, 2, "none"),
    "quotient": lambda of, by: of / by,
    "share of compute": lambda gpu, intensity: intensity / gpu.ridge(),
    "intensity of a product": product_intensity,
    "FLOPs of a product": lambda rows, inner, outer: 2 * rows * inner * outer,
    "bytes of a product": lambda rows, inner, outer: 2 * (rows * inner + inner * outer + rows * outer),
    "intensity": _intensity,
    "intensity of the square": lambda **step: 2 * _intensity(**step),
    "intensity of a step": lambda model, context: flops_of(_step(model, 0, context)) / weight_bytes(model, 2, "none"),
    "products by squares": lambda layers, hidden, squares, tokens=1: 2 * layers * squares * tokens * hidden**2,
    "products": lambda **step: flops_of(_step(**step), "product"),
    "attention": lambda **step: flops_of(_step(**step), "attention"),
    "attention of the square": lambda **step: 2 * flops_of(_step(**step), "attention"),
    "prefill of the square": _square,
    "FLOPs": lambda **step: flops_of(_step(**step)),
    "bytes": _bytes,
    "prefill of the square over bytes": lambda model, prompt: _square(model, prompt) / _bytes(model, prompt),
    "FLOPs over bytes": lambda model, context: flops_of(_step(model, 0, context)) / _bytes(model, context),
    "FLOPs of training": _training,
    "FLOPs without a cache": lambda model, prompt, answer: uncached_flops(model, prompt, answer),
    "growth": lambda formula, of, by: _ours(formula, of) / _ours(formula, by),
    # times and money
    "TTFT floor": lambda model, gpu, prompt: ttft_floor_s(WorkerHardware(gpu), model, prompt),
    "TPOT floor": lambda model, gpu, context: tpot_floor_s(WorkerHardware(gpu), model, context),
    "latency": lambda first_s, tokens, token_s: first_s + (tokens - 1) * token_s,
    "cost of a request": request_usd,
    "cost of a million tokens": usd_per_million,
    # batching, allocation, transfers
    "longest over mean": lambda answers: continuous_gain(answers, len(answers)),
    "gain over static": lambda way: _chats()[way].output_rate / _chats()["static batching"].output_rate,
    "share used": _used,
    "requests over": lambda way, beside: _used(way) / _used(beside),
    "border": lambda of, **given: _border(**given)[of],
}
