"""Projections and embeddings of the CUDA backend against torch, on the GPU at hand."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from torch import Tensor

from twostroke.model.checkpoint.quantization import quantize

if TYPE_CHECKING:
    from twostroke.model.cuda.linears import CudaLinear

pytestmark = pytest.mark.gpu

Bits = Literal[16, 8, 4]
BITS: list[Bits] = [16, 8, 4]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RELATIVE_ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SHAPES = [(4096, 4096), (1024, 14336), (1536, 288), (1000, 1040), (77, 300)]  # split, not split, with ends of all kinds

MakeLinear = Callable[[Tensor, Bits, Tensor | None], "CudaLinear"]


@pytest.fixture
def make_linear(_gpu: None) -> MakeLinear:
    from twostroke.model.cuda.kernels.launch import Target
    from twostroke.model.cuda.kernels.skinny_gemm import SplitWorkspace
    from twostroke.model.cuda.linears import CudaLinear

    device = torch.device("cuda", torch.cuda.current_device())
    target, workspace = Target.of_device(device), SplitWorkspace(device)

    def make(weight: Tensor, bits: Bits, bias: Tensor | None) -> "CudaLinear":
        if bits == 16:
            return CudaLinear(weight, bias, target, workspace)
        return CudaLinear(quantize(weight, bits), bias, target, workspace)

    return make


def case(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias; sums of about 1."""
    torch.manual_seed(tokens + rows + columns)
    x, weight, bias = (torch.randn(shape, device="cuda") for shape in ((tokens, columns), (rows, columns), (rows,)))
    return x.to(dtype), (weight / columns**0.5).to(dtype), bias.to(dtype)


def computed_with(weight: Tensor, bits: Bits) -> Tensor:
    """fp32 [out, in]."""
    return weight.float() if bits == 16 else quantize(weight, bits).dequantized(torch.float32)


def assert_near(actual: Tensor, expected: Tensor, limit: float) -> None:
    assert (actual.float() - expected).norm() <= limit * expected.norm()
    assert (actual.float() - expected).abs().max() <= 5 * limit * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_linears_equal_their_reference(
    make_linear: MakeLinear, rows: int, columns: int, bits: Bits, dtype: torch.dtype
) -> None:
    _, weight, bias = case(1, rows, columns, dtype)
    linear = make_linear(weight, bits, bias)
    for tokens in (1, 2, 16, 17, 32, 40, 64, 65, 200, 1111):
        x = case(tokens, rows, columns, dtype)[0]
        expected = x.float() @ computed_with(weight, bits).T + bias.float()
        assert_near(linear(x), expected, RELATIVE_ERRORS[dtype])
        assert linear(x).dtype == dtype
        # In fp32 only what is rounded before it is multiplied counts: int4 weights of many tokens.
        logits = linear(x, torch.float32)
        assert logits.dtype == torch.float32
        assert_near(logits, expected, RELATIVE_ERRORS[dtype] if bits == 4 else 1e-4)


@pytest.mark.parametrize("bits", BITS)
def test_splits_give_the_same_bits_every_time_beside_any_rows(make_linear: MakeLinear, bits: Bits) -> None:
    x, weight, _ = case(13, 1024, 14336, torch.bfloat16)
    linear = make_linear(weight, bits, None)
    first = linear(x, torch.float32)
    for _ in range(200):
        assert torch.equal(linear(x, torch.float32), first)
    others = x.clone()
    others[:4], others[5:] = float("nan"), 1e30
    assert torch.equal(linear(others, torch.float32)[4], first[4])
    assert torch.equal(linear(x[4:5], torch.float32)[0], first[4])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tokens", [1, 24, 64])
def test_captured_linears_that_share_a_workspace_stay_right(make_linear: MakeLinear, tokens: int, bits: Bits) -> None:
    x, up, _ = case(tokens, 1536, 1024, torch.bfloat16)
    _, down, _ = case(tokens, 1024, 1536, torch.bfloat16)
    first, second = make_linear(up, bits, None), make_linear(down, bits, None)
    second(first(x), torch.float32)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = second(first(x), torch.float32)
    for _ in range(20):
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(out, second(first(x), torch.float32))
        expected = (x.float() @ computed_with(up, bits).T).bfloat16().float() @ computed_with(down, bits).T
        assert_near(out, expected, 1e-2)


@pytest.mark.parametrize("bits", BITS)
def test_embeddings_look_up_the_slice_of_a_rank(make_linear: MakeLinear, bits: Bits) -> None:
    _, weight, _ = case(1, 500, 1030, torch.bfloat16)
    linear = make_linear(weight, bits, None)
    token_ids = torch.tensor([1000, 999, 1499, 1500, 0, 1234, 2**40], device="cuda")
    rows = linear.embed(token_ids, 1000, torch.bfloat16)
    assert torch.equal(rows[[0, 2, 5]], computed_with(weight, bits)[[0, 499, 234]].bfloat16())
    assert not rows[[1, 3, 4, 6]].any()
