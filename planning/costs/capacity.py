"""Figures of one model on given GPUs, by formulas and by simulated batches: `twostroke capacity`.

Each section is a list of rows, or an object, in bytes and seconds, as the command's JSON has them; `lines` shows the
same to people. Floors and limits are at the peaks; what is expected is at the efficiency that plans assume.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import msgspec

from twostroke.loadtests.plan import SLO
from twostroke.loadtests.report.estimates import duration
from twostroke.model.checkpoint.config_file import parse_model_config
from twostroke.model.config import ModelConfig
from twostroke.model.costs.operations import decode_operations, prefill_operations
from twostroke.model.costs.sizes import Fit, num_active_parameters, num_parameters, weight_bytes
from twostroke.model.published.hardware import GIB, Hardware
from twostroke.planning.baselines import WAYS, BaselineResult, Tokens, Way, serve_way
from twostroke.planning.costs.drafted_steps import DecodeStep, decode_step
from twostroke.planning.costs.roofline import (
    Interference,
    WorkerHardware,
    as_mha,
    batch_limits,
    cached_flops,
    flops_of,
    knee,
    kv_bytes,
    largest_batch,
    request_usd,
    tpot_floor_s,
    transfer_s,
    ttft_floor_s,
    uncached_flops,
)
from twostroke.planning.search import PlanConstraints, model_fit, profiles_of
from twostroke.planning.workload import Workload
from twostroke.worker.profile import WorkerProfile

Rows = list[dict[str, Any]]

SWEEP = tuple(1 << power for power in range(10))
LINKS = {"10_gbit": 1.25e9, "100_gbit": 12.5e9, "400_gbit": 50e9}
SIMULATED = 200  # requests of a workload
COST_BATCHES = (1, 8, 32)
WAYS_BY_NAME = {way.name: way for way in WAYS}


def model_of_numbers(
    layers: int,
    kv_heads: int,
    head_dim: int,
    heads: int | None = None,
    hidden: int | None = None,
    ffn: int | None = None,
    vocabulary: int = 32_000,
    parameters: float | None = None,
) -> ModelConfig:
    """A dense decoder with gated MLPs.

    What is not given follows from `parameters`: the hidden size as if a layer had 12 of its squares, and the MLP's
    features by what is left. Raises ConfigError.
    """
    if hidden is None:
        guess = math.sqrt((parameters or 0) / (12 * layers)) / head_dim
        heads = heads or max(1, round(guess / kv_heads)) * kv_heads
        hidden = heads * head_dim
    heads = heads or hidden // head_dim
    if ffn is None:
        attention = 2 * hidden * head_dim * (heads + kv_heads)
        ffn = round((((parameters or 0) - 2 * vocabulary * hidden) / layers - attention) / (3 * hidden))
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": max(1, ffn),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "max_position_embeddings": 1 << 20,
    }
    return parse_model_config(fields, "the numbers given")


@dataclass(frozen=True)
class CapacityCase:
    """A model on so many GPUs that share it, and what is asked of them."""

    name: str
    shape: ModelConfig
    machine: WorkerHardware
    terms: PlanConstraints
    contexts: Sequence[int]  # tokens, prompt and answer together
    tpot_s: float  # promised
    prompt: int
    answer: int
    repeated: float = 0.0  # share of the answers, for drafts to find

    def decode_step(self, batch: int, context: float) -> DecodeStep:
        """A step of `batch` sequences with `context` tokens each."""
        return decode_step(
            lambda rows: self.machine.decode_s(self.shape, round(rows), context),
            batch,
            self.repeated,
            most_rows=min(self.terms.step_tokens, self.terms.max_batch),
        )

    def largest_in_time(self, context: float) -> int:
        """The most sequences that keep the TPOT promise, memory aside."""
        return largest_batch(lambda batch: self.decode_step(batch, context).token_s, self.tpot_s)

    @property
    def hardware(self) -> Hardware:
        return self.machine.hardware

    @cached_property
    def weights(self) -> float:
        """Bytes, of all GPUs together."""
        held = self.machine.held
        return weight_bytes(self.shape, int(held.itemsize), held.quantization)

    @cached_property
    def room(self) -> Fit:
        """Raises ConfigError where so many GPUs can't share the model."""
        return model_fit(self.shape, self.machine, self.terms)

    @property
    def knows_compute(self) -> bool:
        """Return whether anybody has said how fast the GPUs compute."""
        return math.isfinite(self.hardware.peak())

    @property
    def context(self) -> float:
        """Tokens of a request in the middle of its answer."""
        return self.prompt + self.answer / 2

    @property
    def usd_per_hour(self) -> float:
        return self.hardware.usd_per_hour * self.machine.ranks

    @cached_property
    def fitting(self) -> int:
        """Requests that have room at once."""
        return self.room.requests_of(self.shape, self.prompt + self.answer, self.terms.bounds)

    @cached_property
    def best_batch(self) -> int:
        """The largest that has room and keeps the TPOT promise."""
        return min(self.fitting, self.largest_in_time(self.context), self.terms.max_batch)


def sizes(shape: ModelConfig, kv_itemsize: float, contexts: Sequence[int]) -> dict[str, Any]:
    """KV by itself: of a token and of contexts, with the heads that the model has and with one for each query head."""
    mha = as_mha(shape)
    rows = [
        {
            "context": tokens,
            "kv_bytes": kv_bytes(shape, tokens, kv_itemsize),
            "as_mha_bytes": kv_bytes(mha, tokens, kv_itemsize),
        }
        for tokens in contexts
    ]
    return {"kv_bytes_per_token": kv_bytes(shape, 1, kv_itemsize), "kv_of_a_request": rows}


def capacity(case: CapacityCase) -> dict[str, Any]:
    """All that formulas say, or what needs bandwidth alone where nobody has said how fast the GPUs compute.

    Raises ConfigError where so many GPUs can't share the model.
    """
    shape, machine, hardware = case.shape, case.machine, case.hardware
    active, read = num_active_parameters(shape), hardware.read_bytes_per_s * machine.ranks
    answer = {
        "parameters": num_parameters(shape),
        "active_parameters": active,
        "gpus": machine.ranks,
        "weight_bytes": case.weights,
        "weight_bytes_of_each_gpu": case.weights / machine.ranks,
        "most_tokens_per_s_of_one_sequence": read / (case.weights * active / num_parameters(shape)),
        **sizes(shape, machine.held.kv_itemsize, case.contexts),
        "requests": [_requests(case, context) for context in case.contexts],
        "floors": [_floors(case, context) for context in case.contexts],
    }
    if not case.knows_compute:
        return answer
    return {
        **answer,
        "without_kv_cache": without_cache(case),
        "ridges": [
            {"number": number, "dense": hardware.ridge(number), "sparse": hardware.ridge(number, is_sparse=True)}
            for number in hardware.flops_per_s
        ],
        "intensity": intensities(case),
        **sweep(case),
        "costs": costs(case),
        "transfer": transfer(case),
    }


def without_cache(case: CapacityCase) -> Rows:
    """Cost of a context's next token, and of a whole request, where every token computes all before it again."""
    flops_per_s = case.hardware.peak(case.machine.number(case.shape)) * case.machine.ranks
    rows = []
    for heads, shape in {"MHA": as_mha(case.shape), "as they are": case.shape}.items():
        if heads == "MHA" and shape == case.shape:
            continue
        counted = [
            (f"a token at {tokens:,}", uncached_flops(shape, tokens, 1), flops_of(decode_operations(shape, 1, tokens)))
            for tokens in case.contexts
        ]
        request = shape, case.prompt, case.answer
        counted.append(
            (f"{case.prompt:,} and {case.answer:,} tokens", uncached_flops(*request), cached_flops(*request))
        )
        rows += [
            {
                "heads": heads,
                "what": what,
                "flops": without,
                "hours": without / flops_per_s / 3600,
                "with_cache_flops": with_it,
            }
            for what, without, with_it in counted
        ]
    return rows


def _requests(case: CapacityCase, context: int) -> dict[str, Any]:
    """Count the requests that a worker holds at once, by textbook limits and by what an engine leaves for KV."""
    limits = batch_limits(case.machine.at_peak(), case.shape, case.weights, context, case.tpot_s)
    fitting = case.room.requests_of(case.shape, context, case.terms.bounds)
    in_time = case.largest_in_time(context)
    return {
        "context": context,
        "by_memory": int(limits.memory),
        "by_bandwidth": int(limits.bandwidth),
        "by_compute": int(limits.compute) if case.knows_compute else None,
        "largest": limits.batch,
        "binds": limits.binds,
        "expected_to_fit": fitting,
        "expected_in_tpot": in_time,
        "expected": min(fitting, in_time),
        "expected_binds": "memory" if fitting <= in_time else "TPOT",
    }


def _floors(case: CapacityCase, context: int) -> dict[str, Any]:
    shape, machine = case.shape, case.machine
    return {
        "context": context,
        "ttft_floor_s": ttft_floor_s(machine, shape, context) if case.knows_compute else None,
        "ttft_expected_s": machine.prefill_s(shape, context) if case.knows_compute else None,
        "tpot_floor_s": (floor_s := tpot_floor_s(machine, shape, context)),
        "tpot_expected_s": case.decode_step(1, context).token_s,
        "most_tokens_per_s": 1 / floor_s,
    }


def intensities(case: CapacityCase) -> Rows:
    """FLOPs a byte of each operation of prompts and of decode steps, by batch and context."""
    rows = []
    for context in sorted({case.prompt, case.contexts[-1]}):
        phases = [("prefill", 1, prefill_operations(case.shape, context, formats=case.machine.held))]
        for batch in sorted({1, 32, max(1, case.best_batch)}):
            phases.append(("decode", batch, decode_operations(case.shape, batch, context, case.machine.held)))
        for phase, batch, operations in phases:
            longest = max(operations, key=lambda one: case.machine.operation_s(case.shape, one))
            of_step = {"phase": phase, "batch": batch, "context": context, "flops": flops_of(operations)}
            of_step["bytes"] = sum(one.bytes for one in operations)
            of_step |= {one.name: one.intensity for one in operations}
            rows.append({**of_step, "bound_by": case.machine.bound(case.shape, longest)})
    return rows


def sweep(case: CapacityCase) -> dict[str, Any]:
    """Decode steps of batches from 1 to 512, and the batch from which on more rows hardly pay."""
    token_s = [case.decode_step(batch, case.context).token_s for batch in SWEEP]
    rows = [
        {"batch": batch, "tokens_per_s": batch / seconds, "tpot_s": seconds, "has_room": batch <= case.fitting}
        for batch, seconds in zip(SWEEP, token_s, strict=True)
    ]
    return {"sweep": rows, "knee": knee(SWEEP, [row["tokens_per_s"] for row in rows])}


def costs(case: CapacityCase) -> Rows:
    """USD of a request, and of a million tokens of answers, by how many share the steps."""
    prefill_s = case.machine.prefill_s(case.shape, case.prompt)
    rows = []
    for batch in sorted({*COST_BATCHES, case.best_batch} - {0}):
        answer_s = case.answer * case.decode_step(batch, case.context).token_s
        usd = request_usd(case.usd_per_hour, prefill_s, answer_s, batch)
        rows.append(
            {
                "batch": batch,
                "request_s": prefill_s + answer_s,
                "request_usd": usd,
                "usd_per_million_tokens": usd / case.answer * 1e6,
                "has_room": batch <= case.fitting,
                "is_best": batch == case.best_batch,
            }
        )
    return rows


def interference(case: CapacityCase, batch: int) -> Interference:
    """Return the terms of the inequality for a worker of so many rows."""
    step_s = case.decode_step(batch, case.context).token_s
    kv = kv_bytes(case.shape, case.prompt, case.machine.held.kv_itemsize)
    return Interference(case.machine.prefill_s(case.shape, case.prompt), case.answer, step_s, batch, kv)


def transfer(case: CapacityCase) -> Rows:
    """Compare transfers on some links with how long other prompts make an answer wait, and tell the border."""
    rows = []
    for batch in sorted({1, 8, max(1, case.best_batch)}):
        found = interference(case, batch)
        rows.append(
            {
                "batch": batch,
                "requests_per_s": found.rate,
                "others_prompts_s": found.waits_s,
                **{f"{name}_s": transfer_s(found.kv_bytes, speed) for name, speed in LINKS.items()},
                "border_bytes_per_s": found.slowest_link,
                "shortest_answer_at_10_gbit": found.shortest_answer(LINKS["10_gbit"]),
            }
        )
    return rows


# --- what only a simulation tells ---


def profile_of_case(case: CapacityCase, workload: Workload) -> WorkerProfile | None:
    """The case's worker for a simulation; None: it has no room for the workload's longest request."""
    quantization = case.machine.held.quantization
    for one in profiles_of(case.shape, case.hardware, (quantization,), workload, case.terms):
        if one.ranks == case.machine.ranks and not one.shares_contexts:
            return one
    return None


def border(case: CapacityCase, batch: int = 8) -> dict[str, Any]:
    """The slowest link on which a prefill and a decode worker write answers as fast as two that do both: by the
    inequality, and simulated. The decode worker has twice the rows, which the inequality leaves out."""
    found = interference(case, batch)
    profile = profile_of_case(case, Workload("alike", ((case.prompt, case.answer),)))
    answer = {"batch": batch, "requests_per_s": found.rate, "border_bytes_per_s": found.slowest_link}
    if profile is None:
        return {**answer, "simulated_bytes_per_s": None}
    draw = random.Random(0)
    times = accumulate(draw.expovariate(2 * found.rate) for _ in range(SIMULATED))
    requests: list[Tokens] = [(at_s, case.prompt, case.answer, "") for at_s in times]

    def tpot_s(way: Way, link: float) -> float:
        linked = msgspec.structs.replace(profile, link_bytes_per_s=link)
        return serve_way(requests, linked, way, "fcfs", SLO(), 2).tpot_mean_s

    both, low, high = tpot_s(WAYS_BY_NAME["iteration, paged"], 1.0), 6.0, 13.0  # powers of ten
    while high - low > 0.02:
        middle = (low + high) / 2
        gains = tpot_s(WAYS_BY_NAME["disaggregated, paged"], 10**middle) < both
        low, high = (low, middle) if gains else (middle, high)
    return {**answer, "simulated_bytes_per_s": 10**high if high < 13 else None}


def batching(case: CapacityCase, workload: Workload) -> dict[str, Any]:
    """The literature's ways to batch and to allocate on one worker that is given all of a workload at once."""
    profile = profile_of_case(case, workload)
    if profile is None:
        return {"batching": None, "allocation": []}
    lengths = workload.lengths[:SIMULATED]
    # Memory is short, so that how it is allocated matters: it holds eight of the longest requests.
    scarce = msgspec.structs.replace(profile, kv_tokens=min(profile.kv_tokens, 8 * workload.longest))
    static, *served = serve_ways(lengths, scarce)
    answers = [answer for _, answer in lengths]
    return {
        "batching": {
            "workload": workload.name,
            "kv_tokens": scarce.kv_tokens,
            "longest_over_mean": continuous_gain(answers, len(answers)),
            "of_batches_of_8": continuous_gain(answers, 8),
            "simulated_gain": served[0].output_rate / static.output_rate,
        },
        "allocation": [
            {
                "way": one.way,
                "waste": one.waste,
                "requests_over_largest": (1 - (one.waste or 0)) / (1 - (served[0].waste or 0)),
                "tokens_per_s": one.output_rate,
                "tpot_s": one.tpot_mean_s,
            }
            for one in served
        ],
    }


def serve_ways(lengths: Sequence[tuple[int, int]], profile: WorkerProfile) -> list[BaselineResult]:
    """Static batching, and then each allocation with continuous batching: one worker is given all requests at once."""
    requests: list[Tokens] = [(0.0, prompt, answer, "") for prompt, answer in lengths]
    ways = [way for way in WAYS if way.has_cache and not (way.is_chunked or way.is_disaggregated)]
    return [serve_way(requests, profile, way, "fcfs", SLO(), 1) for way in ways]


def continuous_gain(answers: Sequence[int], rows: int) -> float:
    """Steps of static batches, each as many as its longest answer, over those of rows that are never idle."""
    batches = (answers[first : first + rows] for first in range(0, len(answers), rows))
    return sum(max(batch) * len(batch) for batch in batches) / sum(answers)


# --- for people ---


def lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """A line for each figure, and a table for each list."""
    for name, value in answer.items():
        if isinstance(value, list) and value:
            yield f"\n{_words(name)}:"
            cells = [list(map(_words, value[0])), *([shown(*item) for item in row.items()] for row in value)]
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            yield from ("  " + "  ".join(map(str.rjust, row, widths)) for row in cells)
        elif isinstance(value, dict):
            yield f"\n{_words(name)}: " + ", ".join(f"{_words(key)} {shown(key, one)}" for key, one in value.items())
        elif not isinstance(value, list):
            yield f"{_words(name)}: {shown(name, value)}"


def _words(name: str) -> str:
    """A figure's name without its unit, which `shown` says."""
    if not name.endswith("_per_s"):
        for suffix in ("_s", "_bytes" if name != "weight_bytes" else ""):
            name = name.removesuffix(suffix)
    return name.removesuffix("_bytes_per_s").replace("weight_bytes", "weights").replace("_", " ")


def shown(name: str, value: Any) -> str:
    """A figure for people, by the unit at the end of its name."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or isinstance(value, str):
        return value or "-"
    if name.startswith("weight_bytes"):
        return f"{value / 1e9:.4g} GB"
    if name.endswith(("_bytes", "bytes_per_token")):
        unit, size = next((one for one in (("GiB", GIB), ("MiB", 2**20)) if value >= one[1]), ("KiB", 1024))
        return f"{value / size:.4g} {unit}"
    if name.endswith("bytes_per_s"):
        return f"{value / 1e9:.4g} GB/s"
    if name.endswith("_s") and not name.endswith("_per_s"):
        return duration(value)
    if name in ("flops", "with_cache_flops"):
        return f"{value / 1e12:,.4g} TFLOP" if value >= 1e12 else f"{value / 1e9:.4g} GFLOP"
    if name == "bytes":
        return f"{value / 1e9:.4g} GB"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
