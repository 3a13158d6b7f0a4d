"""Compile the CUDA backend's kernels for a GPU that is not there, and report what came out.

`compile_family(90, "attention")` runs a family of operations on tensors without data, and lets Triton compile each
launch for that compute capability as it would on such a GPU. So what is compiled is what the backend would launch,
divisibility of arguments included. `python -m tests.kernels.ahead_of_time 90 attention` prints it, one JSON object a
kernel. Run it without TRITON_INTERPRET.

A family is a function that launches its kernels as the engine would, over a set of shapes that covers the tables of
launch configurations; `FAMILIES` names them all. Those that take longest have a version of few shapes, too.
"""

import functools
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from twostroke.model.architectures.delta_net import DeltaWeights
from twostroke.model.architectures.mamba import MambaWeights
from twostroke.model.architectures.states import ConvolutionWeights, StateWeights
from twostroke.model.backend import (
    AttentionForm,
    ExpertPlaces,
    ExpertWeights,
    GroupNorm,
    HeadNorms,
    MLAHeads,
    RowNorms,
)
from twostroke.model.batch import BatchLayout
from twostroke.model.checkpoint.quantization import QuantizedWeight, quantize
from twostroke.model.config import Activation, Quantization, Routing
from twostroke.model.cpu.linears import PlainLinear
from twostroke.model.cuda.backend import CudaBackend, CudaLinear, Fp8CudaLinear, GroupedCudaLinear
from twostroke.model.cuda.kernels import launch as launches
from twostroke.model.cuda.kernels.device_sampling import (
    DrawParameters,
    SamplingFeatures,
    draw_on_device,
    mask_on_device,
)
from twostroke.model.cuda.kernels.elementwise import gate, gate_codes
from twostroke.model.cuda.kernels.gemm import SplitWorkspace
from twostroke.model.cuda.kernels.kv_units import (
    copy_and_digest_units,
    copy_units,
    decode_units,
    digest,
    digest_units,
    encode_units,
    packed_places,
    paged_places,
)
from twostroke.model.cuda.kernels.launch import A100, B200, H100, GpuTarget
from twostroke.model.cuda.kernels.mla import latent_decode, latent_decode_config
from twostroke.model.cuda.kernels.states import CudaStates
from twostroke.model.state_sizes import ConvolutionSizes, DeltaSizes, MambaSizes

TARGETS = {80: A100, 89: GpuTarget.of((8, 9), 142), 90: H100, 100: B200}


HEADS = 32
PLAIN, WINDOWED, CHUNKED, SUNK, CAPPED = (
    AttentionForm(scale=0.1),
    AttentionForm(scale=0.1, window=1024),
    AttentionForm(scale=0.1, window=-8192),
    AttentionForm(scale=0.1, window=128, sinks=torch.empty(HEADS, device="meta")),
    AttentionForm(scale=0.1, window=4096, soft_cap=50.0),
)
# Head dimension, block size and form: on each GPU every row of its launch tables, large blocks as well as small ones.
_ATTENTION_SHAPES = {
    80: ((64, 16, PLAIN), (80, 128, WINDOWED), (96, 32, SUNK), (128, 16, PLAIN), (256, 64, CAPPED), (512, 16, PLAIN)),
    89: ((128, 16, PLAIN), (256, 32, CAPPED)),
    90: (
        (64, 128, PLAIN),
        (80, 128, WINDOWED),
        (96, 64, SUNK),
        (128, 16, PLAIN),
        (128, 128, PLAIN),
        (128, 64, CHUNKED),
        (256, 64, CAPPED),
        (512, 16, PLAIN),
    ),
    100: ((64, 64, SUNK), (80, 16, PLAIN), (96, 128, PLAIN), (128, 64, CHUNKED), (256, 32, WINDOWED), (512, 16, PLAIN)),
}


Shapes = Sequence[tuple[int, int, AttentionForm]]
_FEW_SHAPES: Shapes = ((64, 64, SUNK), (128, 128, PLAIN))


def attention(capability: int, shapes: Shapes | None = None) -> None:
    """Launch what the backend compiles before it first attends, and a step of decodes and chunks, in bf16 and once in
    fp32."""
    for head_dim, block_size, form in shapes or _ATTENTION_SHAPES[capability]:
        run_attention(TARGETS[capability], head_dim, block_size, torch.bfloat16, form)
    if capability == 80:
        run_attention(TARGETS[capability], 128, 16, torch.float32, PLAIN)


_FP8_SHAPES: Shapes = ((64, 16, SUNK), (80, 32, PLAIN), (128, 64, PLAIN), (256, 64, CAPPED))


def attention_over_fp8(capability: int, shapes: Shapes = _FP8_SHAPES) -> None:
    """The same over a cache in FP8, and the write into it."""
    for head_dim, block_size, form in shapes:
        run_attention(TARGETS[capability], head_dim, block_size, torch.bfloat16, form, torch.float8_e4m3fn)
    qkv, cos_sin = (torch.empty((1003, width), dtype=torch.bfloat16, device="meta") for width in (48 * 128, 128))
    kv_layer = torch.empty((4096, 2, 8, 16, 128), dtype=torch.float8_e4m3fn, device="meta")
    CudaBackend(TARGETS[capability]).rope_and_write_kv(qkv, cos_sin.float(), kv_layer, _layout(1003, 16))


def run_attention(
    target: GpuTarget,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    form: AttentionForm,
    kv_dtype: torch.dtype | None = None,
) -> None:
    groups = 8
    layout = _layout(tokens=1003, block_size=block_size)
    q = torch.empty((1003, HEADS, head_dim), dtype=dtype, device="meta")
    kv_layer = torch.empty((4096, 2, groups, block_size, head_dim), dtype=kv_dtype or dtype, device="meta")
    CudaBackend(target).attention(q, kv_layer, layout, form)


def elementwise(capability: int) -> None:
    """Norms, rotary embedding (after norms of heads, too) with the write into the cache, gated activations, in bf16."""
    tokens, groups, block_size = 1003, 8, 16
    backend = CudaBackend(TARGETS[capability])

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def gains(size: int) -> torch.Tensor:
        return empty(size, dtype=torch.float32)

    shapes: tuple[tuple[int, int, Activation], ...] = ((32, 80, "silu"), (32, 128, "silu"), (16, 256, "gelu_tanh"))
    for heads, head_dim, activation in shapes:
        hidden = heads * head_dim
        x = backend.rms_norm(empty(tokens, hidden), gains(hidden), 1e-5)
        backend.add_rms_norm(x, empty(tokens, hidden), gains(hidden), 1e-5)
        cos_sin = empty(8192, head_dim, dtype=torch.float32)
        qkv, kv_layer = empty(tokens, (heads + 2 * groups) * head_dim), empty(4096, 2, groups, block_size, head_dim)
        weights = gains(head_dim)
        for norms in (None, HeadNorms(weights, weights, 1e-6), HeadNorms(weights, weights, 1e-6, weights)):
            backend.rope_and_write_kv(qkv, cos_sin, kv_layer, _layout(tokens, block_size), norms)
        gate(empty(tokens, 2 * 4 * hidden), activation)
        gate_codes(empty(tokens, 2 * 4 * hidden), activation)
    row_norms = RowNorms(gains(32 * 128), gains(groups * 128), ranks=1, eps=1e-6)
    qkv = empty(tokens, (32 + 2 * groups) * 128)
    backend.norm_rows(qkv, backend.square_sums(qkv, row_norms), row_norms)
    backend.soft_cap(empty(64, 256_000, dtype=torch.float32), 30.0)


def states(capability: int) -> None:
    """Single tokens of layers that keep a state, in bf16, in sizes of Qwen3-Next, Nemotron Nano, Falcon-H1
    and LFM2."""
    del capability

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def step(weights: StateWeights, steps: int, kv_heads: int = 2) -> None:
        sizes = weights.sizes
        inputs = empty(1003, sizes.input_width - steps, dtype=torch.bfloat16)
        products = (inputs, empty(1003, steps)) if steps else (inputs,)
        numbers = max(sizes.numbers_in(kind, kv_heads) for kind in (0, 1))
        kv_layer = empty(64, 2, kv_heads, -(-numbers // 2048) * 16, 256, dtype=torch.bfloat16)
        out = empty(
            1003, sizes.output_width, dtype=torch.float32 if isinstance(weights, MambaWeights) else torch.bfloat16
        )
        CudaStates().step(weights, products, kv_layer, _layout(1003, 16), out)

    delta = DeltaSizes(key_heads=16, value_heads=32, key=128, value=128, taps=4)
    no_product = PlainLinear(empty(1, 1), None)
    heads, conv = [empty(32), empty(32)], empty(delta.conv_width, 4)
    step(DeltaWeights(no_product, no_product, conv, *heads, norm=empty(128), eps=1e-6, sizes=delta), steps=64)
    for mamba in (MambaSizes(128, 80, 128, groups=8, taps=4), MambaSizes(24, 64, 256, groups=1, taps=4)):
        heads, conv = [empty(mamba.heads)] * 3, empty(mamba.conv_width, 4)
        norm, limits = GroupNorm(empty(mamba.output_width), mamba.output_width, 1e-5), (0.0, float("inf"))
        of_layer = MambaWeights(no_product, no_product, conv, empty(mamba.conv_width), *heads, limits, norm, mamba)
        step(of_layer, steps=mamba.heads, kv_heads=8)
    convolution = ConvolutionSizes(channel_count=2048, taps=3)
    step(ConvolutionWeights(no_product, empty(2048, 3), None, convolution), steps=0, kv_heads=8)


def latents(capability: int, all_heads: Sequence[int] = (16, 128)) -> None:
    """MLA of V3's sizes, and the write of them, in bf16, with 16 heads of a rank and with 128; with 16
    also in rows of V3.2's sizes, which have an index's key behind."""
    block_size = 64

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    layout, kv_layer = _layout(1003, block_size), empty(4096, 1, 1, block_size, 576)
    cos_sin = empty(8192, 64, dtype=torch.float32)
    backend = CudaBackend(TARGETS[capability])
    backend.write_latents(empty(1003, 576), empty(512, dtype=torch.float32), 1e-6, cos_sin, kv_layer, layout)
    wide = empty(4096, 1, 1, block_size, 704)
    backend.write_latents(empty(1003, 576), empty(512, dtype=torch.float32), 1e-6, cos_sin, wide, layout)
    backend.make_mla(MLAHeads(empty(16, 128, 512), empty(16, 512, 128), 0.1))(
        empty(1003, 16 * 192), cos_sin, wide, layout
    )
    for heads in all_heads:
        attention = backend.make_mla(MLAHeads(empty(heads, 128, 512), empty(heads, 512, 128), 0.1))
        attention(empty(1003, heads * 192), cos_sin, kv_layer, layout)
        # Over parts of blocks, of so many tokens, as ranks that share contexts attend.
        config = latent_decode_config(TARGETS[capability], heads, torch.bfloat16, layout.max_context_len)
        out, log_sums = empty(3, heads, 512), empty(3, heads, dtype=torch.float32)
        for tokens in (8, 16):
            part = empty(4096, 1, 1, tokens, 576)
            latent_decode(empty(heads, 3, 512), empty(3, heads, 576), part, layout, 0.1, out, config, log_sums)


def _layout(tokens: int, block_size: int) -> BatchLayout:
    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return BatchLayout(
        positions=empty(tokens, dtype=torch.int64),
        slots=empty(tokens, dtype=torch.int64),
        query_starts=empty(6),
        context_lens=empty(5),
        block_tables=empty(5, 8192 // block_size),
        num_decodes=3,
        max_query_len=700,
        max_context_len=8192,
    )


def transfer(capability: int, shapes: Sequence[tuple[int, int]] = ((64, 16), (128, 16), (128, 128))) -> None:
    """The kernels of KV transfer, which are launched alike on every GPU."""
    del capability
    for head_dim, block_size in shapes:
        run_transfer(head_dim, block_size, groups=8)


def run_transfer(head_dim: int, block_size: int, groups: int) -> None:
    """Pack, digest, encode and decode a chunk: all heads of whole blocks, then one head of half blocks."""
    addresses = torch.empty(128, dtype=torch.int64, device="meta")
    wire = torch.empty(1 << 22, dtype=torch.uint8, device="meta")
    out = torch.empty(2, dtype=torch.int64, device="meta")
    for num_heads, unit_tokens in ((groups, block_size), (1, block_size // 2)):
        places = paged_places(
            row_bytes=2 * head_dim, heads_per_block=groups, block_size=block_size, first_head=0, num_heads=num_heads,
            unit_tokens=unit_tokens,
        )  # fmt: skip
        packed = packed_places(places)
        copy_units(places, addresses, packed, addresses)
        copy_units(packed, addresses, places, addresses)
        digest_units(places, addresses, 1 << 60, out)
        copy_and_digest_units(places, addresses, packed, addresses, 1 << 60, out)
        for encoding in ("int8", "fp8"):
            encode_units(places, addresses, encoding, "bfloat16", head_dim, wire)
            decode_units(places, addresses, encoding, "bfloat16", head_dim, wire)
    digest(wire, 1 << 22, 1 << 60, out)


def projections(capability: int, all_tokens: Sequence[int] | None = None) -> None:
    """Rows of the launch tables, bf16 in and out, columns split; on sm_90 logits, not split, and embeddings too."""
    device = torch.device("cpu")  # weights are quantised for real, and small
    target, workspace = TARGETS[capability], SplitWorkspace(device)

    def linears(rows: int, columns: int) -> tuple[CudaLinear, ...]:
        weight = torch.zeros((rows, columns), dtype=torch.bfloat16)
        quantized = [CudaLinear(quantize(weight, bits), None, target, workspace) for bits in (8, 4)]
        return (CudaLinear(weight, None, target, workspace), *quantized)

    # Where every row would take too long, the largest tiles: they need the most registers and shared memory.
    all_tokens = all_tokens or ((16, 32, 64, 128, 256) if capability in (80, 90) else (64, 256))
    for linear, tokens in itertools.product(linears(64, 4096), all_tokens):
        linear(torch.zeros((tokens, 4096), dtype=torch.bfloat16))
    if capability == 90:
        for linear in linears(1024, 128):
            linear(torch.zeros((64, 128), dtype=torch.bfloat16), torch.float32)
        for linear in linears(1024, 128)[:2]:
            linear.embed(torch.zeros(3, dtype=torch.int64), 0, torch.bfloat16)


def grouped_projections(capability: int) -> None:
    """Every kind of weight that checkpoints have in groups, bf16 in, in every tile; embeddings on sm_90."""
    for kind, group, has_offsets in (("int8", 32, False), ("int4", 128, True), ("int4", 16, True), ("fp8", 128, False)):
        values = torch.zeros((1024, 256), dtype=torch.float8_e4m3fn if kind == "fp8" else torch.int8)
        scales = torch.ones((1024, 256 // group))
        offsets = torch.ones_like(scales) if has_offsets else None
        weight = QuantizedWeight(values, scales, group, 4 if kind == "int4" else 8, offsets)
        linear = GroupedCudaLinear(weight, None)
        linear(torch.zeros((1, 256), dtype=torch.bfloat16))
        if capability == 90:
            linear.embed(torch.zeros(3, dtype=torch.int64), 0, torch.bfloat16)


def fp8_projections(capability: int) -> None:
    """FP8 by FP8 in every tile, columns split where tokens are few, scales a row and a block."""
    target, workspace = TARGETS[capability], SplitWorkspace(torch.device("cpu"))
    for groups in (1, 32):
        values = torch.zeros((1024, 4096), dtype=torch.float8_e4m3fn)
        weight = QuantizedWeight(values, torch.ones((1024, groups)), 4096 // groups, 8)
        linear = Fp8CudaLinear(weight, None, target, workspace)
        linear(torch.zeros((1, 4096), dtype=torch.bfloat16))


def gated_projections(capability: int, few: bool = False) -> None:
    """Products of few tokens that end in the gate, of weights in every form, or as they are and in the smallest."""
    target, workspace = TARGETS[capability], SplitWorkspace(torch.device("cpu"))
    weight = torch.zeros((1024, 4096), dtype=torch.bfloat16)
    weights = (weight, quantize(weight, 4)) if few else (weight, quantize(weight, 8), quantize(weight, 4))
    forms = [CudaLinear(form, None, target, workspace) for form in weights]
    codes = QuantizedWeight(weight.to(torch.float8_e4m3fn), torch.ones((1024, 32)), 128, 8)
    for linear in (*forms, *([Fp8CudaLinear(codes, None, target, workspace)] if target.has_fp8 and not few else [])):
        linear(weight[:1], activation="silu")


def experts(capability: int) -> None:
    """Routers of several kinds; experts as they are, quantised and in MXFP4, in every tile."""
    backend, number, size, hidden = CudaBackend(TARGETS[capability]), 4, 64, 256
    logits = torch.zeros((3, 128))
    grouped = Routing(128, 8, "sigmoid", True, groups=8, top_groups=4, summed=2)
    for routing, correction in ((Routing(128, 8, normalises=True), None), (grouped, torch.zeros(128))):
        chosen = backend.route(logits, correction, routing)
    backend.gate_by_sigmoid(torch.zeros((3, hidden), dtype=torch.bfloat16), torch.zeros((3, 1)))
    x = torch.zeros((3, hidden), dtype=torch.bfloat16)
    plain = [
        torch.zeros(shape, dtype=torch.bfloat16) for shape in ((number * 2 * size, hidden), (number * hidden, size))
    ]
    biases = [torch.zeros((number, rows), dtype=torch.bfloat16) for rows in (2 * size, hidden)]
    fp4 = [
        QuantizedWeight(weight.to(torch.float8_e4m3fn), torch.ones(len(weight), weight.shape[1] // 32), 32, 4)
        for weight in plain
    ]
    kinds: tuple[tuple[Any, Activation, Quantization], ...] = (
        (ExpertWeights(number, *plain, None, None), "silu", "none"),
        (ExpertWeights(number, *plain, None, None), "silu", "int8"),
        (ExpertWeights(number, *plain, None, None), "silu", "int4"),
        (ExpertWeights(number, *fp4, *biases), "clamped", "auto"),
    )
    for weights, activation, quantization in kinds:
        backend.make_experts(weights, activation, quantization, torch.bfloat16)(x, chosen)
    places = ExpertPlaces(torch.zeros((128, 9), dtype=torch.int32), number)
    copied = ExpertWeights(number, *plain, None, None, 0, 128, places)
    backend.make_experts(copied, "silu", "none", torch.bfloat16)(x, chosen)


def sampling(capability: int) -> None:
    """Drawing from large vocabularies, whatever rows ask for."""
    del capability
    for rows, vocab_size in ((64, 128256), (1, 262144)):
        run_sampling(rows, vocab_size)


def run_sampling(rows: int, vocab_size: int) -> None:
    def empty(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, dtype=dtype, device="meta")

    parameters = DrawParameters(
        temperature=empty(torch.float64),
        top_k=empty(torch.int32),
        top_p=empty(torch.float64),
        log_min_p=empty(torch.float64),
        keys=empty(torch.int64),
    )
    logits = torch.empty((rows, vocab_size), device="meta")
    for asked in itertools.starmap(SamplingFeatures, itertools.product((False, True), repeat=3)):
        draw_on_device(logits, parameters, asked)
    words = torch.empty((rows, vocab_size // 32), dtype=torch.int32, device="meta")
    mask_on_device(logits, empty(torch.int64), words)


FAMILIES: dict[str, Callable[[int], None]] = {
    "attention": attention,
    "attention_over_fp8": attention_over_fp8,
    "latents": latents,
    "elementwise": elementwise,
    "states": states,
    "projections": projections,
    "grouped_projections": grouped_projections,
    "fp8_projections": fp8_projections,
    "gated_projections": gated_projections,
    "experts": experts,
    "sampling": sampling,
    "transfer": transfer,
    "few_attention": functools.partial(attention, shapes=_FEW_SHAPES),
    "few_attention_over_fp8": functools.partial(attention_over_fp8, shapes=_FP8_SHAPES[:1]),
    "few_latents": functools.partial(latents, all_heads=(16,)),
    "few_transfer": functools.partial(transfer, shapes=((128, 16),)),
    "few_projections": functools.partial(projections, all_tokens=(64, 256)),
    "few_gated_projections": functools.partial(gated_projections, few=True),
}


@dataclass(frozen=True)
class AbsentGpu:
    """Driver with the answers that Triton asks for before it compiles."""

    capability: int

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of stack and spill memory a thread, as cuobjdump reports them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        report = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (re.search(rf"\b{name}:(\d+)", report) for name in ("REG", "STACK", "LOCAL"))
    if registers is None or stack is None or local is None:
        raise RuntimeError(f"cuobjdump answered: {report}")
    return {"registers": int(registers[1]), "spilled_bytes": int(stack[1]) + int(local[1])}


def compile_family(capability: int, family: str, cache: Path | None = None) -> list[dict[str, Any]]:
    """Return the result of each launch of the family, with Triton's cache in this folder (None: where it is anyway).
    From here on this process only compiles and launches nothing: call it once a process."""
    if cache is not None:
        os.environ["TRITON_CACHE_DIR"] = str(cache)
    driver.set_active(AbsentGpu(capability))
    launches.has_dependent_launch = lambda device: capability >= 90  # type: ignore[assignment]
    launch = JITFunction.run
    kernels: dict[Any, dict[str, Any]] = {}  # by what Triton compiled, which it gives again for a like launch

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = launch(self, *args, grid=grid, warmup=True, **kwargs)
        if compiled not in kernels:
            kernels[compiled] = describe(compiled, dict(zip(self.arg_names, args, strict=False)) | kwargs)

    JITFunction.run = compile_only
    FAMILIES[family](capability)
    return list(kernels.values())


def describe(compiled: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a launch with these arguments."""
    described: dict[str, Any] = {"kernel": compiled.metadata.name}
    described |= {name.lower(): value for name, value in arguments.items() if name.isupper() and isinstance(value, int)}
    ptx = compiled.asm["ptx"]
    described |= resource_usage(compiled.asm["cubin"])
    described["shared_bytes"] = compiled.metadata.shared
    described["wgmma"] = "wgmma.mma_async" in ptx
    described["tcgen05"] = "tcgen05.mma" in ptx
    before, awaits, _ = ptx.partition("griddepcontrol.wait")
    described["awaits_inputs"] = bool(awaits)
    described["is_hasty"] = bool(awaits) and bool(re.search(r"\b(ld|st|atom|red|cp)\.\S*global|\bret;", before))
    described["launched_early"] = compiled.metadata.launch_pdl
    described["async_copies"] = "cp.async.cg" in ptx
    described["fused_products"] = "fma.rn.f32" in ptx
    described["wide_loads"] = bool(re.search(r"ld\.global\S*\.v(4\.b32|2\.b64)", ptx))
    return described


if __name__ == "__main__":
    for kernel in compile_family(int(sys.argv[1]), sys.argv[2]):
        print(json.dumps(kernel))
