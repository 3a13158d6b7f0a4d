"""Our calculators against numbers that others have published: `twostroke plan --check`.

A number agrees where it rounds to what is printed there, or, where the source counts or rounds otherwise, within what
its row allows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from twostroke.model.config import ModelShape
from twostroke.model.operations import prefill_operations, product_intensity
from twostroke.model.published.hardware import HARDWARE
from twostroke.model.published.models import MODELS, published_model
from twostroke.model.sizes import num_active_parameters, num_parameters, weight_bytes
from twostroke.planning.roofline import usd_per_million
from twostroke.protocol.kv_layout import KVLayout


@dataclass(frozen=True)
class Row:
    """One number, in the source's unit."""

    what: str
    source: str
    ours: float
    theirs: str  # as it is printed there
    within: float = 0.0  # relative, beyond rounding

    @property
    def is_wrong(self) -> bool:
        digits = len(self.theirs.partition(".")[2])
        half = 0.5 * 10.0**-digits
        return abs(self.ours - float(self.theirs)) > half * 1.001 + self.within * abs(float(self.theirs))


def rows() -> list[Row]:
    """All of them."""
    return [*_parameters(), *_kv(), *_weights(), *_operations(), *_others()]


def check_lines() -> tuple[list[str], int, int]:
    """The table for people, how many rows it has, and how many are wrong."""
    found = rows()
    lines = [f"{'what':58}{'ours':>12}{'theirs':>12}  source"]
    for row in found:
        word = "  WRONG: " if row.is_wrong else "  "
        lines.append(f"{row.what:58}{row.ours:>12.6g}{row.theirs:>12}{word}{row.source}")
    return lines, len(found), sum(row.is_wrong for row in found)


_CARD = "the model's card on the hub"


def _parameters() -> Iterator[Row]:
    """In thousands of millions."""
    for name, theirs, source in (
        ("Llama-2-7b", "6.74", _CARD),
        ("Llama-2-13b", "13.0", _CARD),
        ("Llama-2-70b", "69.0", _CARD),
        ("Llama-3.1-8B", "8.03", _CARD),
        ("Llama-3.1-70B", "70.6", _CARD),
        ("Llama-3.1-405B", "406", _CARD),
        ("Qwen2.5-7B", "7.61", _CARD),
        ("Qwen2.5-72B", "72.7", _CARD),
        ("Qwen3-8B", "8.2", _CARD),
        ("Qwen3-32B", "32.8", _CARD),
        ("Qwen3-30B-A3B", "30.5", _CARD),
        ("Qwen3-235B-A22B", "235", _CARD),
        ("Mistral-7B-v0.1", "7.24", _CARD),
        ("Mixtral-8x7B-v0.1", "46.7", "Mistral AI, Mixtral of experts, 2023"),
        ("Mixtral-8x22B-v0.1", "141", MODELS["Mixtral-8x22B-v0.1"].source),
        ("DeepSeek-V2-Lite", "15.7", MODELS["DeepSeek-V2"].source),
        ("DeepSeek-V2", "236", MODELS["DeepSeek-V2"].source),
        ("DeepSeek-V3", "671", MODELS["DeepSeek-V3"].source),
        ("gpt-oss-120b", "116.83", "OpenAI, arXiv:2508.10925, table 1"),
    ):
        within = 0.001 if name == "Qwen2.5-7B" else 0.0  # cut off, not rounded
        yield Row(f"{name}: parameters, 10^9", source, num_parameters(published_model(name)) / 1e9, theirs, within)
    for name, theirs, source in (
        ("Mixtral-8x7B-v0.1", "12.9", "Mistral AI, Mixtral of experts, 2023"),
        ("Mixtral-8x22B-v0.1", "39", MODELS["Mixtral-8x22B-v0.1"].source),
        ("Qwen3-235B-A22B", "22", _CARD),
        ("DeepSeek-V2", "21", MODELS["DeepSeek-V2"].source),
    ):
        yield Row(f"{name}: active, 10^9", source, num_active_parameters(published_model(name)) / 1e9, theirs)
    for name, theirs, source in (
        ("gpt-oss-20b", "3.61", "OpenAI, arXiv:2508.10925, table 1"),
        ("gpt-oss-120b", "5.13", "OpenAI, arXiv:2508.10925, table 1"),
        ("DeepSeek-V3", "37", MODELS["DeepSeek-V3"].source),
    ):
        shape = published_model(name)
        ours = (num_active_parameters(shape) - shape.vocab_size * shape.hidden_size) / 1e9
        yield Row(f"{name}: active, the embedding aside, 10^9", source, ours, theirs)
    for name, theirs, source in (
        ("gemma-3-1b", "698", "Gemma Team, arXiv:2503.19786, table 1"),
        ("gemma-3-4b", "3209", "Gemma Team, arXiv:2503.19786, table 1"),
        ("gemma-3-12b", "10759", "Gemma Team, arXiv:2503.19786, table 1"),
        ("gemma-3-27b", "25600", "Gemma Team, arXiv:2503.19786, table 1"),
        ("Qwen3-8B", "6950", _CARD),
        ("Qwen2.5-7B", "6530", _CARD),
    ):
        shape = published_model(name)
        tables = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
        within = 0.001 if name.startswith("Qwen") else 0.0  # printed in steps of ten millions
        ours = (num_parameters(shape) - tables) / 1e6
        yield Row(f"{name}: parameters without embeddings, 10^6", source, ours, theirs, within)


_HUB_POST = "Hugging Face, Llama 3.1, 2024: inference memory requirements"
_INSIGHTS = "Zhao et al., Insights into DeepSeek-V3, ISCA 2025"


def _kv() -> Iterator[Row]:
    for name, theirs in (("Llama-3.1-8B", "128"), ("Llama-3.1-70B", "320"), ("Llama-3.1-405B", "504")):
        ours = 2 * published_model(name).kv_values / 1024
        yield Row(
            f"{name}: KV of a token, KiB", "of the sizes in Grattafiori et al., arXiv:2407.21783, table 3", ours, theirs
        )
    yield Row(
        "Llama-2-7b: KV of a token, MiB",
        "Touvron et al., arXiv:2307.09288: 32 layers, 32 heads of 128",
        2 * published_model("Llama-2-7b").kv_values / 2**20,
        "0.5",
    )
    for name, theirs in (("DeepSeek-V3", "70.272"), ("Qwen2.5-72B", "327.680"), ("Llama-3.1-405B", "516.096")):
        ours = 2 * published_model(name).kv_values / 1000
        yield Row(f"{name}: KV of a token, kB", f"{_INSIGHTS}, table 1", ours, theirs)
    for name, tokens, theirs in (
        ("Llama-3.1-8B", 16_000, "1.95"),
        ("Llama-3.1-8B", 128_000, "15.62"),
        ("Llama-3.1-70B", 16_000, "4.88"),
        ("Llama-3.1-70B", 128_000, "39.06"),
    ):
        ours = 2 * published_model(name).kv_values * tokens / 2**30
        yield Row(f"{name}: KV of {tokens:,} tokens, GiB", _HUB_POST, ours, theirs)
    yield Row(
        "OPT-13B: KV of a token, KiB",
        "Kwon et al., vLLM, SOSP 2023, section 3",
        2 * _opt(40, 40).kv_values / 1024,
        "800",
    )
    yield Row(
        "OPT-66B: KV of 512 tokens, GiB",
        "Zhong et al., DistServe, OSDI 2024, section 3.3",
        2 * _opt(64, 72).kv_values * 512 / 2**30,
        "1.13",
    )
    layout = KVLayout("", "bfloat16", 80, 8, 128, 16, tp_size=8)
    yield Row(
        "Llama-3.1-70B: KV of a token on one of 8 ranks, KiB",
        "Grattafiori et al., arXiv:2407.21783, table 3: one KV head a rank",
        layout.block_bytes * layout.num_tensors / layout.block_size / 1024,
        "40",
    )


def _opt(layers: int, heads: int) -> ModelShape:
    """Zhang et al., OPT, 2022, table 1: heads of 128, as many of keys and values."""
    return ModelShape(
        vocab_size=50272,
        hidden_size=heads * 128,
        intermediate_size=4 * heads * 128,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        max_position=2048,
    )


def _weights() -> Iterator[Row]:
    for name, theirs in (("Llama-3.1-8B", "16"), ("Llama-3.1-70B", "140"), ("Llama-3.1-405B", "810")):
        ours = weight_bytes(published_model(name), 2, "none") / 1e9
        yield Row(f"{name}: weights in bf16, GB", f"{_HUB_POST}; by the round name", ours, theirs, within=0.01)


_UNVEILED = "Yuan et al., LLM Inference Unveiled, arXiv:2402.16363, table 1"
_NVIDIA = "NVIDIA, GPU Performance Background User's Guide"


def _operations() -> Iterator[Row]:
    for name, inner, outer, theirs in (
        ("q_proj", 4096, 4096, "1024"),
        ("gate_proj", 4096, 11008, "1215"),
        ("down_proj", 11008, 4096, "1215"),
    ):
        ours = product_intensity(2048, inner, outer)
        yield Row(f"Llama-2-7b: {name} of 2,048 tokens, FLOP a byte", _UNVEILED, ours, theirs)
    yield Row("Llama-2-7b: q_proj of a decode step, FLOP a byte", _UNVEILED, product_intensity(1, 4096, 4096), "1")
    for rows_, theirs in ((512, "315"), (1, "1")):
        ours = product_intensity(rows_, 1024, 4096)
        yield Row(f"a linear layer 1,024 to 4,096, batch {rows_}, FLOP a byte", _NVIDIA, ours, theirs)
    for name, theirs, within in (
        ("DeepSeek-V2", "155", 0.0),
        ("DeepSeek-V3", "250", 0.0),
        ("Llama-3.1-405B", "2448", 0.011),  # with half as much attention
    ):
        shape = published_model(name)
        forward = sum(one.flops for one in prefill_operations(shape, 4096, is_last=False) if one.kind != "norm") / 4096
        ours = 3 * (forward + 2 * shape.hidden_size * shape.vocab_size) / 1e9  # forward, and twice that backward
        yield Row(f"{name}: GFLOP a token of training at 4,096", f"{_INSIGHTS}, table 2", ours, theirs, within)


def _others() -> Iterator[Row]:
    yield Row("V100: ridge, FLOP a byte", _NVIDIA, 125e12 / 900e9, "138.9")
    yield Row(
        "H100 SXM: ridge, FLOP a byte", "Austin et al., How to Scale Your Model, 2025", _ridge("h100-80gb"), "295"
    )
    yield Row(
        "DeepSeek-V3 served for a day, USD",
        "DeepSeek-AI, Open-Source Week, day 6, 2025: 226.75 nodes of 8 GPUs at 2 USD, 168 10^9 tokens out",
        usd_per_million(226.75 * 8 * 2.0, 168e9 / 86_400) * 168e3,
        "87072",
    )


def _ridge(name: str) -> float:
    return HARDWARE[name].ridge()
