from typing import Literal

import pytest
import torch

from twostroke.model.checkpoint.quantization import quantize
from twostroke.model.cuda.kernels.elementwise import vocab_embedding, vocab_embedding_reference
from twostroke.model.cuda.kernels.launch import H100
from twostroke.model.cuda.kernels.quant_gemm import pack
from twostroke.model.cuda.kernels.skinny_gemm import SplitWorkspace
from twostroke.model.cuda.linear import CudaLinear, CudaQuantizedLinear

pytestmark = pytest.mark.usefixtures("interpreter")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The slice holds tokens 100 to 139.
TOKEN_IDS = torch.tensor([100, 99, 139, 140, 0, 117, 117, -1, 2**40])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 64, 1024, 1030])
def test_vocab_embedding_looks_up_its_slice_and_gives_zeros_elsewhere(hidden: int, dtype: torch.dtype) -> None:
    table = torch.randn(40, hidden).to(dtype)
    actual = vocab_embedding(TOKEN_IDS, table, 100, dtype)
    assert torch.equal(actual, vocab_embedding_reference(TOKEN_IDS, table, 100, dtype))
    assert torch.equal(actual[0], table[0])
    assert torch.equal(actual[2], table[39])
    assert not actual[[1, 3, 4, 7, 8]].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("hidden", [1, 65, 128, 1030])
def test_vocab_embedding_widens_quantized_rows(hidden: int, bits: Literal[8, 4], dtype: torch.dtype) -> None:
    table = quantize(torch.randn(40, hidden), bits)
    actual = vocab_embedding(TOKEN_IDS, pack(table), 100, dtype)
    assert torch.equal(actual, vocab_embedding_reference(TOKEN_IDS, pack(table), 100, dtype))
    assert torch.equal(actual[5], table.dequantized(dtype)[17])
    assert not actual[[1, 3, 4, 7, 8]].any()


def test_the_slices_of_all_ranks_add_up_to_the_whole_table() -> None:
    table = torch.randn(30, 48)
    token_ids = torch.arange(30)
    parts = [vocab_embedding(token_ids, table[first : first + 10], first, torch.float32) for first in (0, 10, 20)]
    assert torch.equal(torch.stack(parts).sum(0), table)


def test_no_token_has_no_rows() -> None:
    assert vocab_embedding(TOKEN_IDS[:0], torch.randn(40, 8), 0, torch.float32).shape == (0, 8)


def test_linears_give_rows_of_the_weights_that_they_multiply_with() -> None:
    weight = torch.randn(40, 100)
    workspace = SplitWorkspace(weight.device)
    plain = CudaLinear(weight, None, H100, workspace)
    assert torch.equal(plain.rows(torch.tensor([3, 39]), torch.float32), weight[[3, 39]])
    for bits in (8, 4):
        quantized = quantize(weight, bits)
        linear = CudaQuantizedLinear(quantized, None, H100, workspace)
        assert torch.equal(
            linear.rows(torch.tensor([103, 1]), torch.float32, first=100),
            torch.stack((quantized.dequantized(torch.float32)[3], torch.zeros(100))),
        )
