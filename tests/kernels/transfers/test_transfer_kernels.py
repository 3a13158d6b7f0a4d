"""The kernels of KV transfer in Triton's interpreter, against their references and against damage.

Encoding kernels in Triton's interpreter: bit by bit what the CPU's kernels make.
"""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.rigs.cuda_reference import digest_reference
from twostroke.model.cpu.kernels.kv_encode import decode_rows, encode_rows
from twostroke.model.cuda.kernels.kv_units import (
    PADDING,
    UnitPlaces,
    address_tensor,
    copy_and_digest_units,
    copy_units,
    decode_units,
    digest,
    digest_units,
    encode_units,
    packed_places,
    paged_places,
)

pytestmark = pytest.mark.usefixtures("interpreter")


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Cut:
    """Selection of units of a cache whose layers are [blocks, 2, all_heads, size, row_bytes]."""

    first: int  # head
    heads: int
    tokens: int  # of a unit
    all_heads: int
    size: int
    row_bytes: int

    @property
    def places(self) -> UnitPlaces:
        return paged_places(
            row_bytes=self.row_bytes, heads_per_block=self.all_heads, block_size=self.size, first_head=self.first,
            num_heads=self.heads, unit_tokens=self.tokens,
        )  # fmt: skip

    def layer(self, seed: int, blocks: int = 6) -> torch.Tensor:
        return random_bytes(blocks * self.places.block_bytes, seed)

    def unit(self, layer: torch.Tensor, number: int) -> torch.Tensor:
        """A view, [2, heads, tokens, row_bytes]."""
        block, part = divmod(number, self.size // self.tokens)
        blocks = layer.view(-1, 2, self.all_heads, self.size, self.row_bytes)
        tokens = slice(part * self.tokens, (part + 1) * self.tokens)
        return blocks[block, :, self.first : self.first + self.heads, tokens]

    def draw(self, seed: int) -> list[int]:
        return random.Random(seed).sample(range(6 * self.size // self.tokens), 5)


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8))


CUTS = [
    Cut(0, 4, 8, 4, 8, 48),  # a unit is a block
    Cut(1, 2, 8, 4, 8, 48),  # some heads, whole height
    Cut(0, 4, 4, 4, 8, 48),  # all heads, half a block
    Cut(3, 1, 2, 4, 8, 48),
    Cut(2, 2, 8, 4, 8, 10),  # rows of no whole words
    Cut(0, 1, 1, 1, 3, 7),
    Cut(0, 2, 16, 2, 16, 1024),  # several tiles a run
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_units_are_packed_and_unpacked_and_nothing_else_is_touched(cut: Cut) -> None:
    paged, packed = cut.places, packed_places(cut.places)
    layers, ids = [cut.layer(seed) for seed in (0, 1, 2, 3, 4)], cut.draw(1)
    here = address_tensor(paged.addresses([layer.data_ptr() for layer in layers], ids), CPU)
    buffer = random_bytes(5 * packed.unit_bytes + 16, 9)
    expected = buffer.clone()
    there = address_tensor(packed.addresses([buffer.data_ptr()], range(5)), CPU)
    copy_units(paged, here, packed, there)
    units = [cut.unit(layer, number) for layer, number in zip(layers, ids, strict=True)]
    expected[:-16] = torch.stack(units).flatten()
    assert torch.equal(buffer, expected)

    targets = [cut.layer(seed + 10) for seed in range(5)]
    wanted = [target.clone() for target in targets]
    back = address_tensor(paged.addresses([target.data_ptr() for target in targets], ids), CPU)
    copy_units(packed, there, paged, back)
    for want, unit, number in zip(wanted, units, ids, strict=True):
        cut.unit(want, number).copy_(unit)
    assert all(map(torch.equal, targets, wanted))


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut.row_bytes % 8 == 0], ids=str)
def test_units_are_digested_where_they_lie_and_on_their_way_to_other_blocks_as_if_packed(cut: Cut) -> None:
    other = replace(cut, first=1, all_heads=cut.heads + 1, size=2 * cut.size)
    here, there, ids = cut.layer(1), other.layer(2), cut.draw(2)
    expected = there.clone()
    for number in ids:
        other.unit(expected, number).copy_(cut.unit(here, number))
    packed = torch.stack([cut.unit(here, number) for number in ids]).flatten()
    wanted = digest_reference(packed.numpy(), 2**64 - 5)
    sources = address_tensor(cut.places.addresses([here.data_ptr()], ids), CPU)
    targets = address_tensor(other.places.addresses([there.data_ptr()], ids), CPU)
    out = torch.zeros(2, dtype=torch.int64)
    digest_units(cut.places, sources, 2**64 - 5, out)
    assert out.numpy().tobytes() == wanted
    out.zero_()
    copy_and_digest_units(cut.places, sources, other.places, targets, 2**64 - 5, out)
    assert out.numpy().tobytes() == wanted
    assert torch.equal(there, expected)


def test_units_of_different_shapes_are_refused() -> None:
    one, other, odd = Cut(0, 2, 4, 4, 4, 32).places, Cut(0, 4, 4, 4, 4, 32).places, Cut(0, 2, 1, 4, 4, 10).places
    nothing = torch.empty(0, dtype=torch.int64)
    with pytest.raises(ValueError, match="different shapes"):
        copy_units(one, nothing, other, nothing)
    with pytest.raises(ValueError, match="different shapes"):
        copy_and_digest_units(one, nothing, other, nothing, 1, nothing)
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
    monkeypatch.setattr("twostroke.model.cuda.kernels.kv_units._MAX_PROGRAMS", 2)
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


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("cut", "dim"),
    [
        (Cut(0, 2, 4, 2, 4, 0), 64),
        (Cut(1, 2, 2, 4, 4, 0), 24),
        (Cut(3, 1, 1, 4, 3, 0), 7),
        (Cut(0, 3, 8, 3, 8, 0), 128),
    ],
)
def test_units_are_encoded_from_their_blocks_and_decoded_into_them_as_on_a_cpu(
    cut: Cut, dim: int, dtype: str, encoding: str
) -> None:
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    cut = replace(cut, row_bytes=dim * kind.itemsize)
    places = cut.places
    scale = torch.logspace(-4, 3, cut.all_heads * cut.size).view(cut.all_heads, cut.size, 1)
    blocks = (torch.randn(6, 2, cut.all_heads, cut.size, dim) * scale).to(kind)
    blocks[0, 0, cut.first, 0, :] = 0
    layer, ids = blocks.view(torch.uint8).view(-1), [0, *cut.draw(0)[:2]]
    packed = torch.stack([cut.unit(layer, number) for number in ids])
    rows = packed[0].numel() // cut.row_bytes
    expected = np.zeros(3 * rows * (dim + 2), np.uint8)
    encode_rows(encoding, dtype, packed.view(-1).numpy(), expected, 3, dim)

    wire = torch.full((expected.size + 16,), 0xAB, dtype=torch.uint8)
    addresses = address_tensor(places.addresses([blocks.data_ptr()], ids), CPU)
    encode_units(places, addresses, encoding, dtype, dim, wire)
    assert np.array_equal(wire[:-16].numpy(), expected)
    assert bool((wire[-16:] == 0xAB).all())

    decoded = torch.zeros_like(packed)
    decode_rows(encoding, dtype, expected, decoded.view(-1).numpy(), 3, dim)
    wanted = layer.clone()
    for number, unit in zip(ids, decoded, strict=True):
        cut.unit(wanted, number).copy_(unit)
    decode_units(places, addresses, encoding, dtype, dim, wire)
    assert torch.equal(layer, wanted)


@pytest.mark.parametrize("encoding", ["int8", "fp8"])
def test_broken_rows_come_out_broken_and_tiny_ones_whole(encoding: str) -> None:
    places = packed_places(Cut(0, 1, 4, 1, 4, 64).places)
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
