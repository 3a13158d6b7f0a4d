"""KV at one byte a value: bounds of the error, and what becomes of values at the edge."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.rigs.kv_pair import rank_shard
from twostroke.kvtransfer.layout import KVShard
from twostroke.kvtransfer.transports.host_units import decode, encode
from twostroke.protocol.kv_layout import Encoding, KVLayout

ENCODINGS: list[Encoding] = ["int8", "fp8"]
DTYPES = ["float32", "bfloat16", "float16"]
ROUNDING = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-10}


def make_shard(dtype: str, encoding: Encoding, *, heads: int = 2, unit_tokens: int = 4, head_dim: int = 24) -> KVShard:
    layout = KVLayout("m", dtype, num_layers=1, num_kv_heads=4, head_dim=head_dim, block_size=8)
    return rank_shard(layout, first_head=1, num_heads=heads, unit_tokens=unit_tokens, encoding=encoding)


def there_and_back(values: Tensor, encoding: Encoding, dtype: str) -> Tensor:
    """values [units, 2, heads, tokens, dim] as `dtype` has them after the way, in fp64."""
    units, _, heads, tokens, dim = values.shape
    source = make_shard(
        str(values.dtype).removeprefix("torch."), encoding, heads=heads, unit_tokens=tokens, head_dim=dim
    )
    target = make_shard(dtype, encoding, heads=heads, unit_tokens=tokens, head_dim=dim)
    wire = np.full(units * source.unit_bytes, 0xAB, np.uint8)
    encode(values.contiguous().view(torch.uint8).reshape(-1).numpy(), source, wire)
    out = np.full(units * target.stored_unit_bytes, 0xCD, np.uint8)
    decode(wire, target, out)
    return torch.from_numpy(out).view(getattr(torch, dtype)).reshape(values.shape).double()


def scales_of(values: Tensor, encoding: Encoding) -> Tensor:
    """fp64 [..., 1]: an upper bound of each row's scale, by the definition."""
    limit = 127 if encoding == "int8" else 448
    return (values.double().abs().amax(-1, keepdim=True) / limit * (1 + 2.0**-7)).clamp(min=2.0**-126)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)))
def test_errors_stay_within_half_a_step_and_the_rounding_of_the_target(
    source: str, target: str, encoding: Encoding
) -> None:
    torch.manual_seed(0)
    sizes = torch.logspace(-6, 3, 10).view(10, 1, 1, 1, 1)
    values = (torch.randn(10, 2, 3, 5, 24) * sizes).to(getattr(torch, source))
    exact, scale = values.double(), scales_of(values, encoding)
    error = (there_and_back(values, encoding, target) - exact).abs()
    step = scale / 2 if encoding == "int8" else torch.maximum(exact.abs() / 16, scale * 2.0**-10)
    slack = 1.001 if source == "float32" else 1.0
    rounding = (exact.abs() + step) * ROUNDING[target] + (2.0**-24 if target == "float16" else 0.0)
    assert bool((error <= step * slack + rounding).all()), (error / (step + rounding)).max()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_value_of_a_code_comes_back_exactly(encoding: Encoding) -> None:
    """Rows that hold multiples of a power of two need no rounding; the fp8 values are torch's own."""
    if encoding == "int8":
        row = torch.arange(-127.0, 128.0)
    else:
        codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
        row = codes.view(torch.float8_e4m3fn).float()
    values = torch.stack([row, row * 2.0**-9, row * 2.0**40]).view(3, 1, 1, 1, -1).expand(3, 2, 1, 2, -1)
    assert torch.equal(there_and_back(values, encoding, "float32"), values.double())


def test_fp8_codes_are_those_that_torch_rounds_to() -> None:
    torch.manual_seed(1)
    row = torch.cat((torch.randn(4000) * 3, torch.randn(4000) * 2.0**-7, torch.randn(500) * 100))
    row[0] = 448.0  # so that the scale is 1
    values = row.clamp(-448, 448).view(1, 1, 1, 1, -1).expand(1, 2, 1, 1, -1)
    expected = values.to(torch.float8_e4m3fn).float().double()
    assert torch.equal(there_and_back(values, "fp8", "float32"), expected)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(encoding: Encoding, dtype: str) -> None:
    values = torch.zeros(2, 2, 2, 3, 24, dtype=getattr(torch, dtype))
    assert torch.equal(there_and_back(values, encoding, dtype), values.double())


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_row_with_a_broken_value_is_broken_altogether_and_its_neighbours_are_not(
    encoding: Encoding, dtype: str, broken: float
) -> None:
    torch.manual_seed(2)
    values = torch.randn(2, 2, 2, 3, 24).to(getattr(torch, dtype))
    whole = there_and_back(values, encoding, dtype)
    values[1, 0, 1, 2, 17] = broken
    result = there_and_back(values, encoding, dtype)
    assert bool(result[1, 0, 1, 2].isnan().all())
    result[1, 0, 1, 2] = whole[1, 0, 1, 2]
    assert torch.equal(result, whole)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_extremes_keep_their_bounds_or_are_broken_but_never_wrong(encoding: Encoding) -> None:
    for size in (1e-45, 1e-40, 2.0**-126, 1e-30, 1e30, 2.0**126):
        values = torch.linspace(-1, 1, 24).mul(size).view(1, 1, 1, 1, -1).expand(1, 2, 1, 1, -1).contiguous()
        error = (there_and_back(values, encoding, "float32") - values.double()).abs()
        step = scales_of(values, encoding) / 2
        bound = step if encoding == "int8" else torch.maximum(values.double().abs() / 16, step * 2.0**-9)
        assert bool((error <= bound * 1.001).all()), size
    for size in (2.0**127, torch.finfo(torch.float32).max):
        values = torch.linspace(-1, 1, 24).mul(size).view(1, 1, 1, 1, -1).expand(1, 2, 1, 1, -1).contiguous()
        assert bool(there_and_back(values, encoding, "float32").isnan().all()), "beyond what s * c can hold"
    large = torch.full((1, 2, 1, 1, 24), 1e6)
    assert bool(there_and_back(large, encoding, "float16").isinf().all()), "the target's dtype can't hold it"


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("heads", "unit_tokens", "head_dim"), [(1, 1, 2), (4, 8, 64), (3, 2, 80), (2, 4, 7)])
def test_a_unit_is_its_codes_and_then_its_scales(
    encoding: Encoding, heads: int, unit_tokens: int, head_dim: int
) -> None:
    torch.manual_seed(3)
    shard = make_shard("bfloat16", encoding, heads=heads, unit_tokens=unit_tokens, head_dim=head_dim)
    values = torch.randn(5, 2, heads, unit_tokens, head_dim).bfloat16()
    wire = np.zeros(5 * shard.unit_bytes, np.uint8)
    encode(values.view(torch.uint8).reshape(-1).numpy(), shard, wire)
    units = torch.from_numpy(wire).view(5, shard.unit_bytes)
    codes, scales = units[:, : values[0].numel()], units[:, values[0].numel() :]
    kind = torch.int8 if encoding == "int8" else torch.float8_e4m3fn
    rebuilt = codes.contiguous().view(kind).float().view(values.shape)
    rebuilt *= scales.contiguous().view(torch.bfloat16).float().view(*values.shape[:-1], 1)
    assert torch.equal(rebuilt.double(), there_and_back(values, encoding, "float32"))


def test_values_at_an_odd_address_are_refused() -> None:
    shard = make_shard("bfloat16", "int8")
    raw = np.zeros(shard.stored_unit_bytes + 1, np.uint8)[1:]
    with pytest.raises(ValueError, match="odd address"):
        encode(raw, shard, np.zeros(shard.unit_bytes, np.uint8))
