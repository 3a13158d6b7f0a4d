"""Tables of hardware, models and what follows from both, which `twostroke capacity --tables` prints."""

from collections.abc import Iterator, Mapping, Sequence

from twostroke.model.config import Routing
from twostroke.model.costs.operations import decode_operations, prefill_operations
from twostroke.model.costs.sizes import num_active_parameters, num_parameters, weight_bytes
from twostroke.model.published.hardware import GIB, HARDWARE, Hardware
from twostroke.model.published.models import MODELS, published_model
from twostroke.planning.costs.literature import LiteratureFigure, checked
from twostroke.planning.costs.roofline import (
    kv_bytes,
    largest_batch,
    tpot_floor_s,
    transfer_s,
    ttft_floor_s,
    usd_per_million,
)
from twostroke.planning.search import PlanConstraints, model_fit, worker_hardware

PLACES = (
    ("Llama-3.1-8B", "l40s", 1),
    ("Llama-3.1-8B", "a100-80gb", 1),
    ("Llama-3.1-8B", "h100-80gb", 1),
    ("Llama-3.1-70B", "h100-80gb", 4),
    ("Llama-3.1-70B", "h200", 2),
    ("Llama-3.1-405B", "b200", 8),
    ("Qwen3-30B-A3B", "h100-80gb", 1),
    ("DeepSeek-V3", "h200", 8),
    ("gpt-oss-120b", "h100-80gb", 2),
    ("gemma-3-27b", "h100-80gb", 1),
)
"""Models on numbers of GPUs for the tables of floors and of room."""
CONTEXT, PROMPT = 8192, 2048
WITH_EXPERTS = ("Mixtral-8x7B-v0.1", "gpt-oss-120b", "Qwen3-30B-A3B", "DeepSeek-V3")
SENT = ("Llama-2-7b", "Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-405B", "DeepSeek-V3")
RATES = (100, 500, 1000, 2500, 5000)


def tables() -> str:
    """All of them, in Markdown."""
    parts = {
        "Hardware": map(_hardware, HARDWARE.values()),
        "Models": map(_model, MODELS),
        "Room for requests": (_room(*place) for place in PLACES),
        "Operations of a step": _operations(),
        "Experts that a step reads": map(_experts, WITH_EXPERTS),
        "Floors": (_floors(*place) for place in PLACES),
        "KV on a link": map(_links, SENT),
        "What a million tokens cost": map(_costs, RATES),
        "Against the literature": map(_published, checked()),
    }
    lines: list[str] = []
    for title, rows in parts.items():
        lines += [f"### {title}", "", *_table(list(rows)), ""]
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Heads are the rows' keys."""
    yield f"| {' | '.join(rows[0])} |"
    yield "|" + "---|" * len(rows[0])
    for row in rows:
        yield f"| {' | '.join(row.values())} |"


def _hardware(one: Hardware) -> Mapping[str, str]:
    fp8 = "fp8" in one.flops_per_s
    return {
        "": f"`{one.name}`",
        "GiB": f"{one.memory_bytes / GIB:.0f}",
        "TB/s": f"{one.read_bytes_per_s / 1e12:.2f}",
        "bf16 TFLOP/s": f"{one.peak('bf16') / 1e12:.0f}",
        "FP8": f"{one.peak('fp8') / 1e12:.0f}" if fp8 else "-",
        "ridge in bf16": f"{one.ridge():.0f}",
        "sparse": f"{one.ridge(is_sparse=True):.0f}",
        "in FP8": f"{one.ridge('fp8'):.0f}" if fp8 else "-",
        "link GB/s": f"{one.link_bytes_per_s / 1e9:.0f}",
        "USD/h, assumed": f"{one.usd_per_hour:g}",
        "source": one.source,
    }


def _model(name: str) -> Mapping[str, str]:
    shape = published_model(name)
    kept = sum(not shape.window(layer) for layer, _ in shape.kv_layers) / len(shape.kv_layers)
    windowed = "" if kept == 1 else f" ({kept * kv_bytes(shape) / 1024:.4g} without windows')"
    return {
        "": name,
        "10^9 parameters": f"{num_parameters(shape) / 1e9:.2f}",
        "active": f"{num_active_parameters(shape) / 1e9:.2f}",
        "GB as published": f"{weight_bytes(shape, 2, 'auto') / 1e9:.1f}",
        "int8": f"{weight_bytes(shape, 2, 'int8') / 1e9:.1f}",
        "int4": f"{weight_bytes(shape, 2, 'int4') / 1e9:.1f}",
        "KV KiB/token": f"{kv_bytes(shape) / 1024:.4g}{windowed}",
        "in FP8": f"{kv_bytes(shape, 1, 1.0) / 1024:.4g}",
        "source": MODELS[name].source,
    }


def _room(name: str, gpu: str, ranks: int) -> Mapping[str, str]:
    shape = published_model(name)
    found, in_fp8 = (
        model_fit(shape, worker_hardware(HARDWARE[gpu], ranks, "auto", terms), terms)
        for terms in (PlanConstraints(2.0), PlanConstraints(1.0))
    )
    return {
        "": name,
        "on": f"{ranks} `{gpu}`",
        "weights GiB a GPU": f"{found.weight_bytes / GIB:.1f}",
        "left for KV": f"{max(0, found.cache_bytes) / GIB:.1f}",
        "of 2,048 tokens": str(found.requests_of(shape, PROMPT)),
        "of 8,192": str(found.requests_of(shape, CONTEXT)),
        "KV in FP8: 2,048": str(in_fp8.requests_of(shape, PROMPT)),
        "8,192": str(in_fp8.requests_of(shape, CONTEXT)),
    }


def _operations() -> Iterator[Mapping[str, str]]:
    shape, machine = (
        published_model("Llama-3.1-8B"),
        worker_hardware(HARDWARE["h100-80gb"], 1, "auto", PlanConstraints()),
    )
    phases = {f"prompt of {PROMPT:,}": prefill_operations(shape, PROMPT)}
    phases |= {f"decode, batch {batch}": decode_operations(shape, batch, PROMPT) for batch in (1, 32, 256)}
    for phase, operations in phases.items():
        for one in operations:
            yield {
                "Llama-3.1-8B in bf16 on an H100": phase,
                "operation": one.name,
                "GFLOP": f"{one.flops / 1e9:.4g}",
                "MB": f"{one.bytes / 1e6:.4g}",
                "FLOP/byte": f"{one.intensity:.3g}",
                "bound by": machine.bound(shape, one),
            }


def _experts(name: str) -> Mapping[str, str]:
    shape = published_model(name)
    routing = Routing(shape.num_experts, round(shape.num_experts * shape.expert_share))
    batches = {f"batch {batch}": f"{routing.expected_hit(batch):.1f}" for batch in (1, 4, 16, 64, 256)}
    return {"": name, "a token takes": f"{routing.top_k} of {routing.num_experts}", **batches}


def _floors(name: str, gpu: str, ranks: int) -> Mapping[str, str]:
    shape, machine = published_model(name), worker_hardware(HARDWARE[gpu], ranks, "auto", PlanConstraints())

    def token_s(batch: int) -> float:
        return machine.decode_s(shape, batch, PROMPT)

    return {
        "": name,
        "on": f"{ranks} `{gpu}`",
        "TTFT floor ms": f"{ttft_floor_s(machine, shape, PROMPT) * 1000:.3g}",
        "TTFT expected": f"{machine.prefill_s(shape, PROMPT) * 1000:.3g}",
        "TPOT floor ms": f"{tpot_floor_s(machine, shape, PROMPT) * 1000:.3g}",
        "TPOT expected": f"{token_s(1) * 1000:.3g}",
        "batch in 25 ms": str(largest_batch(token_s, 0.025)),
        "in 50 ms": str(largest_batch(token_s, 0.05)),
    }


def _links(name: str) -> Mapping[str, str]:
    size = 2 * published_model(name).kv_values * PROMPT
    speeds = {"10 Gbit/s": 1.25e9, "100": 12.5e9, "200": 25e9, "400": 50e9, "NVLink 450 GB/s": 450e9}
    times = {link: f"{transfer_s(size, speed) * 1000:.3g}" for link, speed in speeds.items()}
    return {"ms for 2,048 tokens": name, "MiB": f"{size / 2**20:.0f}", **times}


def _costs(rate: int) -> Mapping[str, str]:
    usd = {f"{price:g} USD/h": f"{usd_per_million(price, rate):.2f}" for price in (1.0, 2.0, 3.0, 5.0)}
    return {"USD a million tokens": f"{rate:,} tokens/s a GPU", **usd}


def _published(found: tuple[LiteratureFigure, float]) -> Mapping[str, str]:
    row, ours = found
    slip = f"it slips, {row.right}: " if row.right else ""
    return {
        "": row.what,
        "ours": f"{ours:.6g}",
        "stated": row.stated,
        "source": row.source,
        "remark": slip + row.remark,
    }
