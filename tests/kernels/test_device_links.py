"""What CUDA links do besides launching: their buffers, and cuda_ipc's whole conversation, in Triton's interpreter.

"Devices" are CPU tensors; handles of memory are stand-ins that hold addresses. Only one side launches at a time: the
interpreter is not thread-safe.
"""

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch

from twostroke.kvtransfer.link import DataLink, DeviceStore
from twostroke.kvtransfer.rules.layout import Cut, Segment
from twostroke.kvtransfer.transports import cuda_ipc
from twostroke.kvtransfer.transports.cuda_ipc import CudaIpcTransport, LayerHandle
from twostroke.kvtransfer.transports.device_units import DeviceUnits
from twostroke.kvtransfer.transports.host_units import HostUnits
from twostroke.protocol.errors import ConnectionLost, ProtocolError
from twostroke.protocol.kv_layout import Encoding, KVLayout

pytestmark = pytest.mark.usefixtures("interpreter")
SEAL = 2**63 + 5


class Store:
    """A DeviceStore whose device is the CPU; its bytes can be looked at."""

    rank = 0
    device = "cpu"

    def __init__(self, layout: KVLayout, num_blocks: int = 6, seed: int | None = None):
        self.layout = layout
        self.num_blocks = num_blocks
        size = num_blocks * layout.block_bytes
        generator = np.random.default_rng(seed)
        self.layers = [
            torch.zeros(size, dtype=torch.uint8)
            if seed is None
            else torch.from_numpy(generator.integers(0, 256, size, np.uint8))
            for _ in range(layout.num_layers)
        ]

    def layer_tensor(self, layer: int) -> torch.Tensor:
        return self.layers[layer]

    def units(self, cut: Cut, segments: list[Segment]) -> bytes:
        out = np.zeros(sum(len(s.unit_ids) for s in segments) * HostUnits(HostView(self), cut).unit_bytes, np.uint8)
        HostUnits(HostView(self), cut).pack(segments, out)
        return out.tobytes()


class HostView:
    """The same store as a HostStore."""

    rank = 0

    def __init__(self, store: Store):
        self.layout, self.num_blocks, self._layers = store.layout, store.num_blocks, store.layers

    def layer_bytes(self, layer: int) -> memoryview:
        return self._layers[layer].numpy().data


def layout_of(head_dim: int = 8, heads: int = 4, block_size: int = 4, dtype: str = "bfloat16") -> KVLayout:
    return KVLayout("m", dtype, num_layers=2, num_kv_heads=heads, head_dim=head_dim, block_size=block_size)


def segments_of(seed: int, cut: Cut, blocks: int = 6) -> list[Segment]:
    draw = random.Random(seed)
    ids = range(blocks * cut.units_per_block)
    return [Segment(layer, tuple(draw.sample(ids, 2))) for layer in (1, 0)]


@pytest.mark.parametrize("encoding", ["raw", "int8", "fp8"])
@pytest.mark.parametrize(("first", "heads", "tokens", "head_dim"), [(0, 4, 4, 8), (1, 2, 2, 8), (3, 1, 1, 5)])
def test_a_chunk_is_unpacked_where_its_digest_holds_and_else_touches_nothing(
    encoding: Encoding, first: int, heads: int, tokens: int, head_dim: int
) -> None:
    layout = layout_of(head_dim)
    cut = Cut(layout, first, heads, tokens, encoding)
    source, target = Store(layout), Store(layout)
    assert isinstance(source, DeviceStore)
    for layer in source.layers:
        values = torch.randn(layer.numel() // 2).bfloat16()
        layer.copy_(values.view(torch.uint8))
    here, there = DeviceUnits(source, cut), DeviceUnits(target, cut)
    sent, received = segments_of(1, cut), segments_of(2, cut)
    packed = torch.full((here.buffer_bytes(4),), 0xAB, dtype=torch.uint8)
    here.pack(sent, SEAL, packed)
    for place in (0, packed.numel() - 1, 4 * cut.unit_bytes // 2):
        packed[place] ^= 4
        assert not there.unpack(received, SEAL, packed)
        packed[place] ^= 4
    assert not there.unpack(received, SEAL + 1, packed)
    assert not any(layer.any() for layer in target.layers)
    assert there.unpack(received, SEAL, packed)
    raw = cut if encoding == "raw" else Cut(layout, first, heads, tokens, "raw")
    wanted, found = (
        torch.frombuffer(bytearray(store.units(raw, segments)), dtype=torch.bfloat16).float()
        for store, segments in ((source, sent), (target, received))
    )
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0 if encoding == "raw" else 0.15)


def test_units_that_the_store_has_not_are_refused() -> None:
    cut = Cut(layout_of(), 0, 4, 2, "raw")
    units = DeviceUnits(Store(cut.layout), cut)
    for segment in (Segment(2, (0,)), Segment(-1, (0,)), Segment(0, (12,)), Segment(0, (-1,))):
        with pytest.raises(ValueError, match=r"layer|units"):
            units.addresses([segment])
    assert units.addresses([Segment(1, (11,))]).shape == (1,)


class Address:
    """A storage that is somewhere."""

    def __init__(self, address: int):
        self._address = address

    def data_ptr(self) -> int:
        return self._address


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles of memory that hold its address."""

    def share(tensor: torch.Tensor) -> LayerHandle:
        return LayerHandle(struct.pack("<Q", tensor.data_ptr()), tensor.numel(), 0, b"", 0, b"", False, 0)

    monkeypatch.setattr(cuda_ipc, "share_layer", share)
    monkeypatch.setattr(cuda_ipc, "open_layer", lambda handle, _: Address(struct.unpack("<Q", handle.handle)[0]))


@contextlib.asynccontextmanager
async def linked(source: Store, target: Store, cut: Cut, own: Cut) -> AsyncIterator[tuple[DataLink, DataLink]]:
    sending, receiving = CudaIpcTransport(source, join_timeout_s=20), CudaIpcTransport(target, join_timeout_s=20)
    try:
        pending = await receiving.prepare("127.0.0.1", own)
        sender, receiver = await asyncio.gather(sending.join(pending.params, cut), pending.established())
        yield sender, receiver
    finally:
        await sending.close()
        await receiving.close()


async def test_the_target_reads_units_from_the_sources_memory(shared: None) -> None:
    source, target = Store(layout_of(heads=4, block_size=4), seed=1), Store(layout_of(heads=4, block_size=8))
    cut, own = Cut(source.layout, 1, 2, 4, "raw"), Cut(target.layout, 1, 2, 4, "raw")
    async with linked(source, target, cut, own) as (sender, receiver):
        sent, received = segments_of(1, cut), segments_of(2, own)
        await sender.send(sent, SEAL)
        assert await receiver.receive(received, SEAL)
        assert target.units(own, received) == source.units(cut, sent)
        await sender.send(sent, SEAL)
        await receiver.discard(4)
        await sender.send(sent, SEAL)
        assert not await receiver.receive(received, SEAL + 1), "another chunk's seal"
        await sender.send(sent, SEAL)
        source.layers[1] ^= 1
        assert not await receiver.receive(received, SEAL), "the source gave the blocks to somebody else"


async def test_units_that_the_peer_has_not_are_a_breach_of_the_protocol(shared: None) -> None:
    source, target = Store(layout_of(), num_blocks=9, seed=1), Store(layout_of(), num_blocks=9)
    cut = Cut(source.layout, 0, 4, 4, "raw")
    async with linked(source, target, cut, cut) as (sender, receiver):
        receiver._num_peer_units = 5  # type: ignore[attr-defined]
        await sender.send([Segment(0, (5,))], SEAL)
        with pytest.raises(ProtocolError, match="outside"):
            await receiver.receive([Segment(0, (0,))], SEAL)
        with pytest.raises(ConnectionLost):
            await receiver.receive([Segment(0, (0,))], SEAL)
    assert not any(layer.any() for layer in target.layers)


async def test_a_pool_that_is_too_small_for_its_blocks_is_refused(
    shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying(tensor: torch.Tensor) -> LayerHandle:
        return LayerHandle(struct.pack("<Q", tensor.data_ptr()), tensor.numel() - 1, 0, b"", 0, b"", False, 0)

    monkeypatch.setattr(cuda_ipc, "share_layer", lying)
    store = Store(layout_of())
    cut = Cut(store.layout, 0, 4, 4, "raw")
    transport = CudaIpcTransport(store, join_timeout_s=20)
    pending = await transport.prepare("127.0.0.1", cut)
    joining, waiting = await asyncio.gather(
        transport.join(pending.params, cut), pending.established(), return_exceptions=True
    )
    assert isinstance(joining, ConnectionLost)
    assert isinstance(waiting, ProtocolError)
    await pending.close()
    await transport.close()


async def test_an_error_of_cuda_breaks_the_link(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(layout_of())
    cut = Cut(store.layout, 0, 4, 4, "raw")
    async with linked(store, store, cut, cut) as (sender, _):

        def fails(*_: object) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(cuda_ipc, "digest_units", fails)
        with pytest.raises(ConnectionLost, match="illegal memory access"):
            await sender.send([Segment(0, (1,))], SEAL)
        with pytest.raises(ConnectionLost, match="closed"):
            await sender.send([Segment(0, (1,))], SEAL)


async def test_lanes_that_cuda_ipc_cannot_move_are_refused() -> None:
    transport = CudaIpcTransport(Store(layout_of(head_dim=5)))
    with pytest.raises(ConnectionLost, match="not made of"):
        await transport.prepare("127.0.0.1", Cut(layout_of(head_dim=5), 0, 1, 1, "raw"))
    with pytest.raises(ConnectionLost, match="not encoded"):
        await transport.join({}, Cut(layout_of(), 0, 4, 4, "int8"))


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_ipc.missing() == "a CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert cuda_ipc.missing() is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    assert "expandable_segments" in str(cuda_ipc.missing())
