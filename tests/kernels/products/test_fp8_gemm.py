"""Products of weights and activations in FP8 in Triton's interpreter, against their references."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.paged_cases import assert_close
from tests.rigs import reference
from tests.rigs.cuda_reference import fp8_linear_reference, quantize_tokens_reference
from twostroke.model.checkpoint.quantization import QuantizedWeight
from twostroke.model.cuda.backend import CudaBackend, Fp8CudaLinear, GroupedCudaLinear
from twostroke.model.cuda.kernels.fp8 import quantize_tokens
from twostroke.model.cuda.kernels.gemm import FP8_GROUP, GemmConfig, SplitWorkspace, gemm, gemm_config, pack_fp8
from twostroke.model.cuda.kernels.launch import A100, B200, H100, GpuTarget

pytestmark = pytest.mark.usefixtures("interpreter")
SMALL = GemmConfig(16, 16, FP8_GROUP, num_warps=1, num_stages=2)
CPU = torch.device("cpu")


def make_weight(rows: int, columns: int, is_grouped: bool) -> QuantizedWeight:
    """Weights of about 1 / sqrt(columns), whose scales differ by much."""
    generator = torch.Generator().manual_seed(rows + columns)
    groups = -(-columns // FP8_GROUP) if is_grouped else 1
    values = torch.randn((rows, columns), generator=generator)
    scales = torch.rand((rows, groups), generator=generator) * 0.9 + 0.1
    return QuantizedWeight(
        (values * 100).to(torch.float8_e4m3fn), scales / 100 / columns**0.5, FP8_GROUP if is_grouped else columns, 8
    )


def activations(tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Tokens of very different sizes."""
    sizes = torch.logspace(-4, 4, tokens)[:, None]
    return (torch.randn((tokens, columns), generator=torch.Generator().manual_seed(tokens)) * sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 16), (1, 16), (5, 200), (3, 1040)])
def test_each_token_is_rounded_with_a_scale_of_its_own(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = activations(*shape, dtype)
    x[:1] = 0
    codes, scales = quantize_tokens(x)
    expected, expected_scales = quantize_tokens_reference(x)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.float(), expected.float())
    assert (codes.float().abs().amax(1)[1:] == 448).all()


def test_broken_activations_stay_broken() -> None:
    x = torch.ones((3, 32), dtype=torch.bfloat16)
    x[0, 3], x[1, 4] = float("nan"), float("inf")
    weight = make_weight(16, 32, is_grouped=False)
    y = Fp8CudaLinear(weight, None, H100, SplitWorkspace(CPU))(x)
    assert y[:2].isnan().all()
    assert not y[2].isnan().any()


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 16, 128), (3, 33, 304), (9, 20, 640), (16, 17, 16)])
def test_products_equal_their_reference(tokens: int, rows: int, columns: int, is_grouped: bool, splits: int) -> None:
    x, weight = activations(tokens, columns, torch.bfloat16), pack_fp8(make_weight(rows, columns, is_grouped))
    bias, workspace = torch.randn(rows).bfloat16(), SplitWorkspace(CPU)
    codes, scales = quantize_tokens(x)
    for b, out_dtype in ((None, torch.bfloat16), (bias, torch.float32)):
        actual = gemm(codes, weight, b, out_dtype, workspace, replace(SMALL, splits=splits), scales)
        expected = fp8_linear_reference(x, weight, b, out_dtype)
        # In fp32 the order of sums is another.
        torch.testing.assert_close(actual, expected, rtol=1.6e-2 if out_dtype == torch.bfloat16 else 1e-4, atol=1e-3)
    assert not workspace.arrived.any()


@pytest.mark.parametrize("tokens", [3, 70])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_a_product_ends_in_the_gate_of_its_halves(is_grouped: bool, tokens: int) -> None:
    x, weight = activations(tokens, 272, torch.bfloat16), make_weight(2 * 21, 272, is_grouped)
    actual = Fp8CudaLinear(weight, None, H100, SplitWorkspace(CPU))(x, activation="silu")
    expected = reference.gate(fp8_linear_reference(x, pack_fp8(weight), None, torch.float32), "silu")
    assert_close(actual, expected.bfloat16(), scale=4)


@pytest.mark.parametrize("is_grouped", [False, True])
def test_prompts_take_many_tiles_of_tokens_and_a_rows_result_does_not_depend_on_the_others(is_grouped: bool) -> None:
    x = activations(150, 272, torch.bfloat16)
    linear = Fp8CudaLinear(make_weight(200, 272, is_grouped), None, H100, SplitWorkspace(CPU))
    y = linear(x)
    assert_close(y, fp8_linear_reference(x, linear._weight, None, x.dtype), scale=2)
    assert torch.equal(linear(x[:129])[128], y[128])


def test_the_product_is_near_that_of_whole_activations() -> None:
    x, weight = torch.randn(40, 512).bfloat16(), make_weight(64, 512, is_grouped=True)
    y = Fp8CudaLinear(weight, None, H100, SplitWorkspace(CPU))(x).float()
    whole = x.float() @ weight.dequantized(torch.float32).T
    assert (y - whole).norm() < 0.04 * whole.norm()


@pytest.mark.parametrize("is_grouped", [False, True])
def test_an_embedding_looks_up_a_ranks_rows(is_grouped: bool) -> None:
    weight = make_weight(10, 160, is_grouped)
    found = Fp8CudaLinear(weight, None, H100, SplitWorkspace(CPU)).embed(
        torch.tensor([3, 14, 20, -1]), 5, torch.float32
    )
    assert torch.equal(found[1], weight.dequantized(torch.float32)[9])
    assert not found[[0, 2, 3]].any()


def test_gpus_that_know_fp8_multiply_it_and_others_widen_weights() -> None:
    def made(weight: QuantizedWeight, target: GpuTarget, dtype: torch.dtype = torch.bfloat16) -> type:
        return type(CudaBackend(target).make_linear(weight, None, "auto", dtype))

    rows, blocks = make_weight(16, 256, False), make_weight(16, 256, True)
    for weight in (rows, blocks):
        assert made(weight, H100) is made(weight, B200) is made(weight, GpuTarget.of((8, 9), 142)) is Fp8CudaLinear
        assert made(weight, A100) is made(weight, GpuTarget.of((8, 6), 84)) is GroupedCudaLinear
        assert made(weight, H100, torch.float32) is GroupedCudaLinear
    assert made(replace(blocks, scales=blocks.scales.repeat(1, 2), group_size=64), H100) is GroupedCudaLinear
    assert made(make_weight(16, 40, False), H100) is GroupedCudaLinear  # rows of no whole vectors


def test_every_row_of_the_tables_has_steps_of_the_scales() -> None:
    for target in (H100, B200, GpuTarget.of((8, 9), 142)):
        for tokens in (1, 16, 17, 33, 65, 1000):
            config = gemm_config(target, torch.float8_e4m3fn, 8, tokens, 4096, 4096)
            assert config.block_k == FP8_GROUP
            assert tokens <= config.block_t or config.splits == 1
