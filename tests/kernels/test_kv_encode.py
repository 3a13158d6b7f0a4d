"""Encoding kernels in Triton's interpreter: bit by bit what the CPU's kernels make."""

import random

import numpy as np
import pytest
import torch

from twostroke.model.cpu.kernels.kv_encode import decode_rows, encode_rows
from twostroke.model.cuda.kernels.kv_units import (
    address_tensor,
    decode_units,
    encode_units,
    packed_places,
    paged_places,
)

pytestmark = pytest.mark.usefixtures("interpreter")
CPU = torch.device("cpu")


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("first", "heads", "tokens", "all_heads", "size", "dim"),
    [(0, 2, 4, 2, 4, 64), (1, 2, 2, 4, 4, 24), (3, 1, 1, 4, 3, 7), (0, 3, 8, 3, 8, 128)],
)
def test_units_are_encoded_from_their_blocks_and_decoded_into_them_as_on_a_cpu(
    first: int, heads: int, tokens: int, all_heads: int, size: int, dim: int, dtype: str, encoding: str
) -> None:
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    places = paged_places(
        row_bytes=dim * kind.itemsize, heads_per_block=all_heads, block_size=size, first_head=first, num_heads=heads,
        unit_tokens=tokens,
    )  # fmt: skip
    scale = torch.logspace(-4, 3, all_heads * size).view(all_heads, size, 1)
    blocks = (torch.randn(4, 2, all_heads, size, dim) * scale).to(kind)
    blocks[0, 0, first, 0, :] = 0
    ids = random.Random(0).sample(range(1, 4 * places.units_per_block), 3)
    packed = torch.empty(3, 2, heads, tokens, dim, dtype=kind)
    for place, unit in enumerate(ids):
        block, start = unit // places.units_per_block, unit % places.units_per_block * tokens
        packed[place] = blocks[block, :, first : first + heads, start : start + tokens]
    wire_bytes = 2 * heads * tokens * (dim + 2)
    expected = np.zeros(3 * wire_bytes, np.uint8)
    encode_rows(encoding, dtype, packed.view(torch.uint8).reshape(-1).numpy(), expected, 3, dim)

    wire = torch.full((3 * wire_bytes + 16,), 0xAB, dtype=torch.uint8)
    addresses = address_tensor(places.addresses([blocks.data_ptr()], ids), CPU)
    encode_units(places, addresses, encoding, dtype, dim, wire)
    assert np.array_equal(wire[:-16].numpy(), expected)
    assert bool((wire[-16:] == 0xAB).all())

    decoded = np.zeros(packed.numel() * kind.itemsize, np.uint8)
    decode_rows(encoding, dtype, expected, decoded, 3, dim)
    wanted = blocks.clone()
    for place, unit in enumerate(ids):
        block, start = unit // places.units_per_block, unit % places.units_per_block * tokens
        values = torch.from_numpy(decoded).view(kind).view(packed.shape)[place]
        wanted[block, :, first : first + heads, start : start + tokens] = values
    decode_units(places, addresses, encoding, dtype, dim, wire)
    assert torch.equal(blocks, wanted)


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_broken_rows_come_out_broken_and_tiny_ones_whole(encoding: str) -> None:
    places = packed_places(
        paged_places(row_bytes=64, heads_per_block=1, block_size=4, first_head=0, num_heads=1, unit_tokens=4)
    )
    values = torch.zeros(1, 2, 1, 4, 16)
    values[0, 0, 0, :, 5] = torch.tensor([float("nan"), float("inf"), -float("inf"), 3e38])
    values[0, 1, 0, :, 5] = torch.tensor([1e-45, 1e-38, -1.0, 2.0**126])
    out = torch.full_like(values, 7.0)
    wire = torch.empty(2 * 4 * 18, dtype=torch.uint8)
    encode_units(places, address_tensor(places.addresses([values.data_ptr()], [0]), CPU), encoding, "float32", 16, wire)
    decode_units(places, address_tensor(places.addresses([out.data_ptr()], [0]), CPU), encoding, "float32", 16, wire)
    assert bool(out[0, 0].isnan().all())
    assert not bool(out[0, 1].isnan().any())
    torch.testing.assert_close(out[0, 1], values[0, 1], rtol=0.07, atol=2.0**-127)
