"""The tables of docs/planning.md: `twostroke capacity --tables` prints them, and a test compares."""

from collections.abc import Iterator, Sequence

from twostroke.model.operations import decode_operations, prefill_operations
from twostroke.model.published.hardware import GIB, HARDWARE, Hardware
from twostroke.model.published.models import MODELS, published_model
from twostroke.model.sizes import num_active_parameters, num_parameters, weight_bytes
from twostroke.planning.literature import checked
from twostroke.planning.roofline import (
    Machine,
    largest_batch,
    tpot_floor_s,
    transfer_s,
    ttft_floor_s,
    usd_per_million,
)
from twostroke.planning.search import Terms, fit_of, machine_of

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
"""What tables of floors and of room are about: a model on so many GPUs."""
CONTEXT, PROMPT = 8192, 2048
BEGIN, END = "<!-- made by `twostroke capacity --tables` -->", "<!-- end of what is made -->"


def tables() -> str:
    """All of them, in Markdown."""
    parts = (
        ("Hardware", _hardware()),
        ("Models", _models()),
        ("Room for requests", _room()),
        ("Operations of a step", _operations()),
        ("Experts that a step reads", _experts()),
        ("Floors", _floors()),
        ("KV on a link", _links()),
        ("What a million tokens cost", _costs()),
        ("Against published numbers", _published()),
    )
    lines = [BEGIN, ""]
    for title, table in parts:
        lines += [f"### {title}", "", *table, ""]
    return "\n".join([*lines, END, ""])


def _table(head: Sequence[str], body: Iterator[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in body:
        yield f"| {' | '.join(row)} |"


def _hardware() -> Iterator[str]:
    def row(one: Hardware) -> Sequence[str]:
        fp8 = one.flops_per_s.get("fp8")
        return (
            f"`{one.name}`",
            f"{one.memory_bytes / GIB:.0f}",
            f"{one.read_bytes_per_s / 1e12:.2f}",
            f"{one.flops_per_s['bf16'] / 1e12:.0f}",
            "-" if fp8 is None else f"{fp8 / 1e12:.0f}",
            f"{one.ridge():.0f}",
            "-" if fp8 is None else f"{one.ridge('fp8'):.0f}",
            f"{one.link_bytes_per_s / 1e9:.0f}",
            f"{one.usd_per_hour:g}",
            one.source,
        )

    head = ("", "GiB", "TB/s", "bf16 TFLOP/s", "FP8", "ridge", "FP8", "link GB/s", "USD/h, assumed", "source")
    yield from _table(head, map(row, HARDWARE.values()))


def _models() -> Iterator[str]:
    def row(name: str) -> Sequence[str]:
        shape = published_model(name)
        weights = (weight_bytes(shape, 2, kind) / 1e9 for kind in ("auto", "int8", "int4"))
        kept = sum(not shape.window(layer) for layer in range(shape.num_layers)) / shape.num_layers
        windowed = "" if kept == 1 else f" ({kept * 2 * shape.kv_values / 1024:.4g} without windows')"
        return (
            name,
            f"{num_parameters(shape) / 1e9:.2f}",
            f"{num_active_parameters(shape) / 1e9:.2f}",
            *(f"{one:.1f}" for one in weights),
            f"{2 * shape.kv_values / 1024:.4g}{windowed}",
            f"{shape.kv_values / 1024:.4g}",
            MODELS[name].source,
        )

    head = ("", "10^9 parameters", "active", "GB as published", "int8", "int4", "KV KiB/token", "in FP8", "source")
    yield from _table(head, map(row, MODELS))


def _machine(gpu: str, ranks: int) -> Machine:
    return machine_of(HARDWARE[gpu], ranks, "auto", Terms())


def _room() -> Iterator[str]:
    def row(place: tuple[str, str, int]) -> Sequence[str]:
        name, gpu, ranks = place
        shape = published_model(name)
        found = [fit_of(shape, machine_of(HARDWARE[gpu], ranks, "auto", Terms(kv)), Terms(kv)) for kv in (2.0, 1.0)]
        return (
            name,
            f"{ranks} `{gpu}`",
            f"{found[0].weight_bytes / GIB:.1f}",
            f"{max(0, found[0].cache_bytes) / GIB:.1f}",
            *(str(one.requests_of(shape, context)) for one in found for context in (2048, CONTEXT)),
        )

    head = ("", "on", "weights GiB a GPU", "left for KV", "of 2,048 tokens", "of 8,192", "KV in FP8: 2,048", "8,192")
    yield from _table(head, map(row, PLACES))


def _operations() -> Iterator[str]:
    shape = published_model("Llama-3.1-8B")
    machine = _machine("h100-80gb", 1)
    yield f"Llama-3.1-8B in bf16, on an H100, whose ridge is at {machine.hardware.ridge():.0f}."
    yield ""

    def body() -> Iterator[Sequence[str]]:
        for phase, operations in (
            (f"prompt of {PROMPT:,}", prefill_operations(shape, PROMPT)),
            ("decode, 1 row", decode_operations(shape, 1, PROMPT)),
            ("decode, 32 rows", decode_operations(shape, 32, PROMPT)),
            ("decode, 256 rows", decode_operations(shape, 256, PROMPT)),
        ):
            for one in operations:
                figures = f"{one.flops / 1e9:.4g}", f"{one.bytes / 1e6:.4g}", f"{one.intensity:.3g}"
                yield phase, one.name, *figures, machine.bound(shape, one)

    yield from _table(("", "operation", "GFLOP", "MB", "FLOP/byte", "bound by"), body())


def _experts() -> Iterator[str]:
    batches = (1, 4, 16, 64, 256)

    def row(name: str) -> Sequence[str]:
        experts = published_model(name).spec.layer.experts
        if experts is None:
            raise ValueError(f"{name} has no experts")
        routing = experts.routing
        return (
            name,
            f"{routing.top_k} of {routing.num_experts}",
            *(f"{routing.expected_hit(one):.1f}" for one in batches),
        )

    names = ("Mixtral-8x7B-v0.1", "gpt-oss-120b", "Qwen3-30B-A3B", "DeepSeek-V3")
    yield from _table(("", "a token takes", *(f"batch {one}" for one in batches)), map(row, names))


def _floors() -> Iterator[str]:
    def row(place: tuple[str, str, int]) -> Sequence[str]:
        name, gpu, ranks = place
        shape, machine = published_model(name), _machine(gpu, ranks)
        return (
            name,
            f"{ranks} `{gpu}`",
            f"{ttft_floor_s(machine, shape, PROMPT) * 1000:.3g}",
            f"{machine.prefill_s(shape, PROMPT) * 1000:.3g}",
            f"{tpot_floor_s(machine, shape, PROMPT) * 1000:.3g}",
            f"{machine.decode_s(shape, 1, PROMPT) * 1000:.3g}",
            *(str(largest_batch(machine, shape, PROMPT, tpot_s)) for tpot_s in (0.025, 0.05)),
        )

    head = ("", "on", "TTFT floor ms", "expected", "TPOT floor ms", "expected", "batch in 25 ms", "in 50 ms")
    yield from _table(head, map(row, PLACES))


def _links() -> Iterator[str]:
    speeds = (1.25e9, 12.5e9, 25e9, 50e9, 450e9)

    def row(name: str) -> Sequence[str]:
        size = 2 * published_model(name).kv_values * PROMPT
        return name, f"{size / 2**20:.0f}", *(f"{transfer_s(size, speed) * 1000:.3g}" for speed in speeds)

    names = ("Llama-2-7b", "Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-405B", "DeepSeek-V3")
    head = ("ms for 2,048 tokens", "MiB", "10 Gbit/s", "100", "200", "400", "NVLink 450 GB/s")
    yield from _table(head, map(row, names))


def _costs() -> Iterator[str]:
    rates, prices = (100, 500, 1000, 2500, 5000), (1.0, 2.0, 3.0, 5.0)

    def row(rate: int) -> Sequence[str]:
        return f"{rate:,} tokens/s a GPU", *(f"{usd_per_million(price, rate):.2f}" for price in prices)

    yield from _table(("USD a million tokens", *(f"{price:g} USD/h" for price in prices)), map(row, rates))


def _published() -> Iterator[str]:
    def body() -> Iterator[Sequence[str]]:
        for row, ours in checked():
            yield row.what, f"{ours:.6g}", row.stated, f"{row.source}{'; it slips' if row.right else ''}", row.remark

    yield from _table(("", "ours", "stated", "source", "remark"), body())
