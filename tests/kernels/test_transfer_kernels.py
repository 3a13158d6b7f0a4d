"""The kernels of KV transfer in Triton's interpreter, against their references and against damage.

Encoding kernels in Triton's interpreter: bit by bit what the CPU's kernels make.
"""

import random

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from twostroke.model.cpu.kernels.kv_encode import decode_rows, encode_rows
from twostroke.model.cuda.kernels.kv_digest import (
    PADDING,
    copy_and_digest_units,
    digest,
    digest_reference,
    digest_units,
)
from twostroke.model.cuda.kernels.kv_units import (
    UnitPlaces,
    address_tensor,
    copy_units,
    copy_units_reference,
    decode_units,
    encode_units,
    packed_places,
    paged_places,
)

pytestmark = pytest.mark.usefixtures("interpreter")


def places(first_head: int, num_heads: int, unit_tokens: int, *, row_bytes: int, heads: int, size: int) -> UnitPlaces:
    return paged_places(
        row_bytes=row_bytes,
        heads_per_block=heads,
        block_size=size,
        first_head=first_head,
        num_heads=num_heads,
        unit_tokens=unit_tokens,
    )


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8))


CUTS = [
    # first head, heads, unit tokens, heads of a block, block size, row bytes
    (0, 4, 8, 4, 8, 48),  # a unit is a block
    (1, 2, 8, 4, 8, 48),  # some heads, whole height
    (0, 4, 4, 4, 8, 48),  # all heads, half a block
    (3, 1, 2, 4, 8, 48),
    (2, 2, 8, 4, 8, 10),  # rows of no whole words
    (0, 1, 1, 1, 3, 7),
    (0, 2, 16, 2, 16, 1024),  # several tiles a run
]


@pytest.mark.parametrize(("first", "heads", "tokens", "all_heads", "size", "row_bytes"), CUTS)
def test_packing_and_unpacking_equal_their_reference_and_touch_nothing_else(
    first: int, heads: int, tokens: int, all_heads: int, size: int, row_bytes: int
) -> None:
    paged = places(first, heads, tokens, row_bytes=row_bytes, heads=all_heads, size=size)
    packed = packed_places(paged)
    layers = [random_bytes(6 * paged.block_bytes, seed) for seed in range(3)]
    ids = random.Random(1).sample(range(6 * paged.units_per_block), 5)
    unit_layers = [0, 2, 2, 1, 0]
    bases = [layers[layer].data_ptr() for layer in unit_layers]
    here = address_tensor(paged.addresses(bases, ids), torch.device("cpu"))

    buffer, expected = random_bytes(5 * packed.unit_bytes + 16, 9), random_bytes(5 * packed.unit_bytes + 16, 9)
    there = address_tensor(packed.addresses([buffer.data_ptr()], range(5)), torch.device("cpu"))
    copy_units(paged, here, packed, there)
    for place, (layer, unit) in enumerate(zip(unit_layers, ids, strict=True)):
        copy_units_reference(paged, layers[layer], [unit], packed, expected, [place])
    assert torch.equal(buffer, expected)

    targets = [random_bytes(6 * paged.block_bytes, seed + 10) for seed in range(3)]
    wanted = [target.clone() for target in targets]
    back = address_tensor(paged.addresses([targets[i].data_ptr() for i in unit_layers], ids), torch.device("cpu"))
    copy_units(packed, there, paged, back)
    for place, (layer, unit) in enumerate(zip(unit_layers, ids, strict=True)):
        copy_units_reference(packed, expected, [place], paged, wanted[layer], [unit])
    assert all(torch.equal(target, want) for target, want in zip(targets, wanted, strict=True))


def test_units_go_from_a_cache_straight_into_one_with_other_heads_and_blocks() -> None:
    source = places(2, 2, 4, row_bytes=32, heads=4, size=4)
    target = places(0, 2, 4, row_bytes=32, heads=2, size=12)
    here, there = random_bytes(8 * source.block_bytes, 1), random_bytes(3 * target.block_bytes, 2)
    expected = there.clone()
    source_ids, target_ids = [7, 0, 3, 5], [8, 1, 0, 4]
    cpu = torch.device("cpu")
    copy_units(
        source,
        address_tensor(source.addresses([here.data_ptr()], source_ids), cpu),
        target,
        address_tensor(target.addresses([there.data_ptr()], target_ids), cpu),
    )
    copy_units_reference(source, here, source_ids, target, expected, target_ids)
    assert torch.equal(there, expected)


@pytest.mark.parametrize(
    ("first", "heads", "tokens", "all_heads", "size", "row_bytes"), [c for c in CUTS if c[5] % 8 == 0]
)
def test_units_are_digested_where_they_lie_and_on_their_way_as_if_packed(
    first: int, heads: int, tokens: int, all_heads: int, size: int, row_bytes: int
) -> None:
    source = places(first, heads, tokens, row_bytes=row_bytes, heads=all_heads, size=size)
    target = places(1, heads, tokens, row_bytes=row_bytes, heads=heads + 1, size=2 * size)
    here, there = random_bytes(6 * source.block_bytes, 1), random_bytes(6 * target.block_bytes, 2)
    ids = random.Random(2).sample(range(6 * source.units_per_block), 5)
    packed = torch.zeros(5 * source.unit_bytes, dtype=torch.uint8)
    copy_units_reference(source, here, ids, packed_places(source), packed, range(5))
    expected = there.clone()
    copy_units_reference(source, here, ids, target, expected, ids)
    wanted = digest_reference(packed.numpy(), 2**64 - 5)
    cpu = torch.device("cpu")
    sources = address_tensor(source.addresses([here.data_ptr()], ids), cpu)
    targets = address_tensor(target.addresses([there.data_ptr()], ids), cpu)
    out = torch.zeros(2, dtype=torch.int64)
    digest_units(source, sources, 2**64 - 5, out)
    assert out.numpy().tobytes() == wanted
    out.zero_()
    copy_and_digest_units(source, sources, target, targets, 2**64 - 5, out)
    assert out.numpy().tobytes() == wanted
    assert torch.equal(there, expected)


def test_units_of_different_shapes_are_refused() -> None:
    one, other = (places(0, heads, 4, row_bytes=32, heads=4, size=4) for heads in (2, 4))
    nothing = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="different shapes"):
        copy_units(one, nothing, other, nothing)
    with pytest.raises(ValueError, match="different shapes"):
        copy_and_digest_units(one, nothing, other, nothing, 1, nothing)
    odd = places(0, 2, 1, row_bytes=10, heads=4, size=4)
    with pytest.raises(ValueError, match="not words"):
        digest_units(odd, nothing, 1, nothing)


def digest_of(data: NDArray[np.uint8], seal: int) -> bytes:
    padded = torch.zeros(-(-data.size // PADDING) * PADDING + 16, dtype=torch.uint8)
    padded[: data.size] = torch.from_numpy(data)
    out = torch.zeros(2, dtype=torch.int64)
    digest(padded, data.size, seal, out)
    return out.numpy().tobytes()


@pytest.mark.parametrize("size", [0, 1, 8, 15, 16, 4096, 16384, 50_001])
@pytest.mark.parametrize("seal", [0, 1, 2**63 - 1, 2**64 - 1, 0x0123456789ABCDEF])
def test_a_digest_equals_its_reference(size: int, seal: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert digest_of(data, seal) == digest_reference(data, seal)


def test_a_digest_over_more_tiles_than_programs_equals_its_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twostroke.model.cuda.kernels.kv_digest._MAX_PROGRAMS", 2)
    data = np.random.default_rng(3).integers(0, 256, 5 * 16384 + 24, np.uint8)
    assert digest_of(data, 5) == digest_reference(data, 5)


def test_every_damage_changes_the_digest() -> None:
    """The reference is tested: the kernel equals it."""
    generator = np.random.default_rng(4)
    data = generator.integers(0, 256, 4096, np.uint8)
    seen = {digest_reference(data, 1)}

    def differs(changed: NDArray[np.uint8], seal: int = 1) -> None:
        value = digest_reference(changed, seal)
        assert value not in seen
        seen.add(value)

    for seal in (0, 2, 1 << 63):
        differs(data, seal)
    for bit in generator.choice(data.size * 8, 300, replace=False):
        flipped = data.copy()
        flipped[bit // 8] ^= 1 << (bit % 8)
        differs(flipped)
    for cut in (1, 2, 8, 15, 16, 512, 4095, 4096):
        differs(data[: data.size - cut])
    blocks = data.reshape(16, 256)
    for i in range(15):
        swapped = blocks.copy()
        swapped[[i, i + 1]] = blocks[[i + 1, i]]
        differs(swapped.reshape(-1))
        doubled = blocks.copy()
        doubled[i + 1] = blocks[i]
        differs(doubled.reshape(-1))
    differs(blocks[::-1].reshape(-1))
    differs(np.concatenate((data[8:], data[:8])))
    zeros = np.zeros(4096, np.uint8)
    for size in range(0, 128, 8):
        differs(zeros[: size + 1])


def test_digests_of_similar_data_share_no_bits_but_by_chance() -> None:
    data = np.zeros(1024, np.uint8)
    values = []
    for place in range(0, 1024, 4):
        data[place] = 1
        values.append(np.unpackbits(np.frombuffer(digest_reference(data, 0), np.uint8)))
        data[place] = 0
    bits = np.array(values)
    assert bits.mean(0).min() > 0.3, "no bit of the digest is stuck"
    assert bits.mean(0).max() < 0.7, "no bit of the digest is stuck"
    assert len({bytes(half) for value in values for half in (value[:64], value[64:])}) == 2 * len(values)


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
