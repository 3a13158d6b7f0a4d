"""CPU projections against fp64, at sizes that fill no panel, tile or pair, and with numbers that must not leak.

Quantised projections against the weight that they say they compute with.
"""

from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
from numba import cfunc, types
from torch import Tensor

from twostroke.model.backend import Linear
from twostroke.model.checkpoint.quantization import QuantizedWeight, fp4_values, quantize
from twostroke.model.config import Quantization
from twostroke.model.cpu import linears
from twostroke.model.cpu.backend import CpuBackend
from twostroke.model.cpu.kernels import decode, elementwise, paged_attention, prefill
from twostroke.model.cpu.kernels.launch import Kernel, Kernels, Launcher, Words, compiled
from twostroke.model.cpu.kernels.projections import gemm, packing, quant
from twostroke.model.cpu.linears import CpuLinear, CpuQuantizedLinear, TorchQuantizedLinear, make_linear

needs_packing = pytest.mark.skipif(
    not linears.is_supported(torch.float32), reason="this CPU has no AVX2, so torch makes its projections"
)
needs_packed_bf16 = pytest.mark.skipif(
    not linears.is_supported(torch.bfloat16), reason="this CPU has no AVX512-BF16, so torch makes its bf16 projections"
)

FORMATS = [
    pytest.param(torch.bfloat16, torch.bfloat16, id="bf16", marks=needs_packed_bf16),
    pytest.param(torch.bfloat16, torch.float32, id="bf16-to-fp32", marks=needs_packed_bf16),
    pytest.param(torch.float32, torch.float32, id="fp32"),
    pytest.param(torch.float32, torch.bfloat16, id="fp32-to-bf16"),
]
DTYPES = [pytest.param(torch.bfloat16, id="bf16", marks=needs_packed_bf16), pytest.param(torch.float32, id="fp32")]
SIZES = [(64, 64), (1, 1), (65, 3), (200, 1501), (70, 2052), (7, 66)]  # (out, in); blocks are 1024 bf16, 512 fp32


class PoisonedLauncher(Launcher):
    """Launcher whose memory is NaN until a kernel writes it."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.full(shape, torch.nan if dtype.is_floating_point else -77, dtype=dtype)


def random_weights(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(out_features, in_features).to(dtype), torch.randn(out_features).to(dtype)


def check(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> None:
    y = CpuLinear(weight, bias, PoisonedLauncher())(x, out_dtype)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert y.dtype == out_dtype
    relative = 4e-3 if out_dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(y.double(), expected, rtol=relative, atol=2e-6 * weight.shape[1])


@needs_packing
@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("out_features", "in_features"), SIZES)
@pytest.mark.parametrize(("dtype", "out_dtype"), FORMATS)
def test_projections_equal_fp64(
    dtype: torch.dtype, out_dtype: torch.dtype, out_features: int, in_features: int, threads: int
) -> None:
    weight, bias = random_weights(out_features, in_features, dtype)
    torch.set_num_threads(threads)
    try:
        for rows in (1, 2, 7, 64, 300):
            check(torch.randn(rows, in_features).to(dtype), weight, bias, out_dtype)
    finally:
        torch.set_num_threads(1)


@needs_packing
@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize(("dtype", "out_dtype"), FORMATS)
def test_any_number_of_rows_can_be_projected(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    weight, _ = random_weights(130, 77, dtype)
    for rows in range(71):
        check(torch.randn(rows, 77).to(dtype), weight, None, out_dtype)


@needs_packing
@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize(("dtype", "out_dtype"), FORMATS)
def test_a_row_has_the_same_result_in_every_batch(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    weight, bias = random_weights(100, 1501, dtype)
    linear = CpuLinear(weight, bias, Launcher())
    x = torch.randn(300, 1501).to(dtype)
    whole = linear(x, out_dtype)
    for start, end in [(0, 1), (5, 13), (7, 70), (299, 300)]:
        assert torch.equal(linear(x[start:end], out_dtype), whole[start:end])


@needs_packing
@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
    weight, bias = random_weights(70, 33, dtype)
    check_what_is_not_finite_stays_in_its_row(CpuLinear(weight, bias, Launcher()), torch.randn(9, 33).to(dtype))


def check_what_is_not_finite_stays_in_its_row(linear: Linear, x: torch.Tensor) -> None:
    expected = linear(x)
    x[4] = torch.nan
    x[5] = torch.inf
    y = linear(x)
    assert y[4].isnan().all()
    assert not y[5].isfinite().any()
    others = [row for row in range(len(x)) if row not in (4, 5)]
    assert torch.equal(y[others], expected[others])


@needs_packing
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(("count", "hidden"), [(130, 34), (5, 7), (64, 1)])
def test_embeddings_are_rows_of_a_slice_of_the_vocabulary(
    dtype: torch.dtype, count: int, hidden: int, is_packed: bool
) -> None:
    weight, _ = random_weights(count, hidden, dtype)
    backend = CpuBackend()
    backend.launcher = PoisonedLauncher()
    table = CpuLinear(weight, None, backend.launcher) if is_packed else weight
    token_ids = torch.tensor([100, 99 + count, 102, 0, 99, 100 + count, 102])
    expected = torch.zeros(7, hidden, dtype=dtype)
    expected[[0, 1, 2, 6]] = weight[[0, count - 1, 2, 2]]
    assert torch.equal(backend.embed(token_ids, table, 100, dtype), expected)


@needs_packing
def test_other_formats_are_left_to_torch() -> None:
    weight, bias = random_weights(90, 51, torch.float16)
    linear = CpuBackend().make_linear(weight, bias, "none", weight.dtype)
    x = torch.randn(3, 51).half()
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight, bias))


@needs_packing
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_projection_keeps_nothing_of_what_it_was_made_of(dtype: torch.dtype, quantization: Quantization) -> None:
    weight, bias, x = (torch.randn(*shape).to(dtype) for shape in ((40, 24), (40,), (3, 24)))
    linear = CpuBackend().make_linear(weight, bias, quantization, dtype)
    before = linear(x).clone()
    weight.zero_()
    bias.zero_()
    assert torch.equal(linear(x), before)


@pytest.mark.parametrize("module", [paged_attention, decode, elementwise, gemm, packing, prefill, quant])
def test_a_start_finds_the_machine_code_of_the_last_one(module: ModuleType) -> None:
    kernels = [value for value in vars(module).values() if isinstance(value, Kernel)]
    kernels += [value.of(torch.float32) for value in vars(module).values() if isinstance(value, Kernels)]
    assert kernels
    for kernel in kernels:
        closure = kernel._function.__closure__  # type: ignore[attr-defined]
        assert closure is None, "numba's cache does not know a closure again in another process"


@pytest.mark.parametrize(
    ("tile", "registers"),
    [
        pytest.param(gemm._tile_of_pairs, "zmm", id="bf16", marks=needs_packed_bf16),
        pytest.param(gemm._tile_of_floats, "zmm", id="fp32", marks=needs_packed_bf16),
        pytest.param(gemm._short_tile, "ymm", id="avx2", marks=needs_packing),
    ],
)
def test_a_tile_that_is_optimised_again_and_again_keeps_its_sums_in_registers(tile: Any, registers: str) -> None:
    """This happens to a tile on its way into a kernel: each function that it becomes a part of is optimised as a
    whole."""

    @compiled
    def once(words):
        tile(words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7], words[8])

    @compiled
    def twice(words):
        once(words)

    kernel = cfunc(types.void(Words()), error_model="numpy")(lambda words: twice(words))
    code = kernel._library.get_asm_str().splitlines()
    assert not [line for line in code if registers in line and "(%rsp)" in line], "sums go to memory and back"


needs_avx512_bf16 = pytest.mark.skipif(
    not linears.is_quantized_supported(torch.bfloat16, 64), reason="needs AVX512-BF16 and AVX512-VBMI"
)
# Full and part panels of 64 outputs, groups of 64 inputs, chunks of 256.
SHAPES = [(1, 8), (64, 64), (65, 72), (200, 328), (48, 840)]


@needs_avx512_bf16
@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_projections_compute_with_the_dequantised_weight(
    bits: Literal[8, 4], outputs: int, inputs: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(inputs)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16() if has_bias else None
    linear = CpuQuantizedLinear(packing.quantize_and_pack(weight, bits), bias, Launcher())
    meant = quantize(weight, bits).dequantized(torch.float32).double()
    for tokens in (1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17, 31, 33, 257, 531):
        x = torch.randn(tokens, inputs, generator=generator).bfloat16()
        expected = x.double() @ meant.T + (bias.double() if bias is not None else 0)
        torch.testing.assert_close(linear(x, torch.float32).double(), expected, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(linear(x).double(), expected, rtol=5e-3, atol=1e-4)


@needs_avx512_bf16
@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize("inputs", [600, 2376])  # int8 is widened 2048 columns at a time, for many rows
@pytest.mark.parametrize("bits", [8, 4])
def test_a_rows_result_does_not_depend_on_the_others(bits: Literal[8, 4], inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(100, inputs, generator=generator).bfloat16()
    linear = CpuQuantizedLinear(packing.quantize_and_pack(weight, bits), None, Launcher())
    x = torch.randn(540, inputs, generator=generator).bfloat16()
    together = linear(x, torch.float32)
    for first, count in ((0, 1), (3, 2), (5, 4), (2, 7), (10, 9), (20, 17), (9, 32), (500, 33), (1, 530)):
        assert torch.equal(linear(x[first : first + count], torch.float32), together[first : first + count])


FORMS: dict[str, tuple[int, int | None, bool]] = {  # bits (0: FP8), columns of a group, offsets
    "int8 by rows": (8, None, False),
    "int8 by rows with offsets": (8, None, True),
    "int8 by 16": (8, 16, False),
    "int8 by 32 with offsets": (8, 32, True),
    "int4 by rows": (4, None, False),
    "int4 by 16 with offsets": (4, 16, True),
    "int4 by 32": (4, 32, False),
    "int4 by 128 with offsets": (4, 128, True),
    "int4 by 96": (4, 96, False),
    "FP8 by rows": (0, None, False),
    "FP8 by 128": (0, 128, False),
    "NVFP4": (4, 16, False),
}


def random_quantized(form: str, outputs: int, inputs: int) -> QuantizedWeight:
    """Every value that there is, scales and offsets that fp16 holds."""
    bits, group, has_offsets = FORMS[form]
    generator = torch.Generator().manual_seed(inputs)
    size = inputs if group is None else min(group, inputs)
    shape = (outputs, -(-inputs // size))
    scales = (torch.randn(shape, generator=generator) / 256).half().float()
    offsets = torch.randn(shape, generator=generator).half().float() if has_offsets else None
    if form == "NVFP4":  # scales in FP8, times a number that two bytes don't hold
        values = fp4_values(torch.randint(16, (outputs, inputs), generator=generator))
        steps, units = (1000 * scales).abs().to(torch.float8_e4m3fn).float(), torch.full((outputs,), 0.00123456789)
        return QuantizedWeight(values, steps * units[:, None], size, 4, units=units)
    if bits == 0:
        values = torch.randn(outputs, inputs, generator=generator).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn)
        values[:, 0] = -0.0
        return QuantizedWeight(values, scales, size, 8, offsets)
    least, most = (-8, 8) if bits == 4 else (-128, 128)
    values = torch.randint(least, most, (outputs, inputs), generator=generator, dtype=torch.int8)
    values[:, 0] = least
    return QuantizedWeight(values, scales, size, 4 if bits == 4 else 8, offsets)


@needs_avx512_bf16
@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (65, 72), (100, 600)])
@pytest.mark.parametrize("form", FORMS)
def test_projections_of_any_form_compute_with_the_dequantised_weight(form: str, outputs: int, inputs: int) -> None:
    weight = random_quantized(form, outputs, inputs)
    generator = torch.Generator().manual_seed(outputs)
    ordered = replace(weight, order=torch.randperm(inputs, generator=generator))
    # Offsets keep 11 bits: those of 8-bit weights, less half a step where there is a -128, are rounded to that.
    relative = 5e-4 if weight.offsets is not None and weight.bits == 8 else 2e-6
    for each in (weight, ordered):
        linear = make_linear(each, None, "auto", torch.bfloat16, PoisonedLauncher())
        assert isinstance(linear, CpuQuantizedLinear)
        meant = each.dequantized(torch.float32).double()
        for tokens in (1, 4, 7, 9, 31, 49):
            x = torch.randn(tokens, inputs, generator=generator).bfloat16()
            expected = x.double() @ meant.T
            size = float((x.double().abs() @ meant.abs().T).max())
            torch.testing.assert_close(linear(x, torch.float32).double(), expected, rtol=1e-5, atol=relative * size)
            assert torch.equal(linear(x[:1], torch.float32), linear(x, torch.float32)[:1])
    table = make_linear(weight, None, "auto", torch.bfloat16, Launcher())
    found = table.embed(torch.tensor([99, 100 + outputs - 1, 100, 100 + outputs]), 100, torch.bfloat16)
    expected = weight.dequantized(torch.float32).bfloat16()
    torch.testing.assert_close(found[1:3], expected[[outputs - 1, 0]], rtol=8e-3, atol=10 * relative)
    assert not found[[0, 3]].any()


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_any_cpu_computes_with_any_form(form: str, has_room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_room:
        monkeypatch.setattr(linears, "available_bytes", lambda device: 1000)
    weight = replace(random_quantized(form, 300, 72), order=torch.randperm(72))
    linear = make_linear(weight, None, "auto", torch.float32, Launcher())
    assert isinstance(linear, TorchQuantizedLinear) == (not has_room)
    x = torch.randn(3, 72)
    torch.testing.assert_close(linear(x), x @ weight.dequantized(torch.float32).T)


@needs_avx512_bf16
@pytest.mark.usefixtures("on_each_unit")
@pytest.mark.parametrize("form", ["int8 by rows", "int8 by 16", "int4 by 32", "int4 by 128 with offsets"])
def test_what_is_not_finite_stays_in_its_row_of_quantised_projections(form: str) -> None:
    linear = make_linear(random_quantized(form, 70, 600), None, "auto", torch.bfloat16, Launcher())
    for tokens in (7, 16, 31, 70):
        check_what_is_not_finite_stays_in_its_row(linear, torch.randn(tokens, 600).bfloat16())


@needs_avx512_bf16
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("form", ["int8 by rows", "FP8 by 128", "int4 by 128 with offsets"])
def test_a_recorded_projection_computes_what_the_same_one_does_at_once(form: str, threads: int) -> None:
    launcher = Launcher()
    linear = make_linear(random_quantized(form, 300, 328), None, "auto", torch.bfloat16, launcher)
    torch.set_num_threads(threads)
    try:
        for tokens in (1, 20, 70):
            x = torch.randn(tokens, 328).bfloat16()
            linear(x)  # numba's cache
            with torch.no_grad(), launcher.recording() as program:
                y = linear(x)
            for _ in range(2):
                y.fill_(torch.nan)
                program.replay()
                assert torch.equal(y, linear(x))
            x.copy_(torch.randn(tokens, 328))
            program.replay()
            assert torch.equal(y, linear(x))
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(3, 7), (600, 130)])
@pytest.mark.parametrize("bits", [8, 4])
def test_any_cpu_computes_with_the_dequantised_weight(
    bits: Literal[8, 4], outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator).to(dtype)
    linear = TorchQuantizedLinear(quantize(weight, bits), bias)
    meant = quantize(weight, bits).dequantized(dtype)
    x = torch.randn(5, inputs, generator=generator).to(dtype)
    torch.testing.assert_close(linear(x), x @ meant.T + bias, rtol=2e-2, atol=2e-2)
    chosen = torch.tensor([outputs - 1, 0, outputs // 2])
    assert torch.equal(linear.embed(chosen, 0, dtype), meant[chosen])


@pytest.mark.skipif(not quant.is_supported(), reason="this CPU has no AVX512-BF16 and AVX512-VBMI")
@pytest.mark.parametrize("bits", [8, 4])
def test_the_first_product_of_a_process_can_be_recorded(bits: Literal[8, 4]) -> None:
    """A step that had torch make a table would run eagerly for good."""
    for cached in (packing.code_table, packing.values_of_codes):
        cached.cache_clear()
    launcher = Launcher()
    linear = CpuQuantizedLinear(packing.quantize_and_pack(torch.randn(64, 128).bfloat16(), bits), None, launcher)
    x, token_ids = torch.randn(1, 128).bfloat16(), torch.tensor([3])
    with torch.inference_mode(), launcher.recording():
        linear(x)
        if bits == 8:
            linear.embed(token_ids, 0, torch.bfloat16)
