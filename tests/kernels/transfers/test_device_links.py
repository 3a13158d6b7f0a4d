"""CUDA links apart from their launches: buffers, and cuda_ipc's whole conversation, in Triton's interpreter.

"Devices" are CPU tensors; handles of memory are stand-ins that hold addresses. Only one side launches at a time: the
interpreter is not thread-safe.
"""

import asyncio
import contextlib
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from msgspec.structs import replace

from tests.rigs.device_store import SEED, TensorStore, segments_of
from tests.rigs.kv_pair import rank_shard
from twostroke.kvtransfer import transports
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.layout import KVShard, Segment, pair_shards, rank_pairs
from twostroke.kvtransfer.link import DataLink, DeviceStore
from twostroke.kvtransfer.transports import cuda_ipc, device_units, make_transports
from twostroke.kvtransfer.transports.cuda_ipc import CudaIpcTransport, LayerHandle, open_layer
from twostroke.kvtransfer.transports.device_units import (
    CudaStaging,
    DeviceQueue,
    DeviceUnits,
    warm_up_pairs,
    warm_up_source,
    warm_up_target,
)
from twostroke.model.cuda.kernels import kv_units
from twostroke.protocol.errors import ConnectionLost, ProtocolError
from twostroke.protocol.kv_layout import Encoding, KVLayout

pytestmark = pytest.mark.usefixtures("interpreter")


def layout_of(head_dim: int = 8, block_size: int = 4) -> KVLayout:
    return KVLayout("m", "bfloat16", num_layers=2, num_kv_heads=4, head_dim=head_dim, block_size=block_size)


def store_of(layout: KVLayout, num_blocks: int = 6, seed: int | None = None) -> TensorStore:
    return TensorStore(layout, num_blocks, "cpu", seed)


def chunk_of(seed: int, shard: KVShard) -> list[Segment]:
    return segments_of(seed, shard, 6, 2)


@pytest.mark.parametrize("encoding", ["raw", "int8", "fp8"])
@pytest.mark.parametrize(("first", "heads", "tokens", "head_dim"), [(0, 4, 4, 8), (1, 2, 2, 8), (3, 1, 1, 5)])
def test_a_chunk_is_unpacked_where_its_digest_holds_and_else_touches_nothing(
    encoding: Encoding, first: int, heads: int, tokens: int, head_dim: int
) -> None:
    layout = layout_of(head_dim)
    shard = rank_shard(layout, first, heads, tokens, encoding)
    source, target = store_of(layout, seed=0), store_of(layout)
    assert isinstance(source, DeviceStore)
    here, there = DeviceUnits(source, shard), DeviceUnits(target, shard)
    sent, received = chunk_of(1, shard), chunk_of(2, shard)
    packed = torch.full((here.buffer_bytes(4),), 0xAB, dtype=torch.uint8)
    here.pack(sent, SEED, packed)
    for place in (0, packed.numel() - 1, 4 * shard.unit_bytes // 2):
        packed[place] ^= 4
        assert not there.unpack(received, SEED, packed)
        packed[place] ^= 4
    assert not there.unpack(received, SEED + 1, packed)
    assert not any(layer.any() for layer in target.layers)
    assert there.unpack(received, SEED, packed)
    wanted, found = source.units(shard, sent), target.units(shard, received)
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=0.0 if encoding == "raw" else 0.15)


def test_memory_is_opened_for_our_own_device_and_no_event_of_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker sees its own GPU alone, whose number is 0; the peer's may be another."""
    opened: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", lambda *arguments: opened.append(arguments))
    open_layer(LayerHandle(b"handle", 64, 8, b"counter", 3, 16), torch.device("cuda", 0))
    assert opened == [(0, b"handle", 64, 8, b"counter", 3, b"", False)]


def test_memory_of_another_stream_is_kept_until_this_ones_work_is_done() -> None:
    class Noted:
        def __init__(self) -> None:
            self.used_on: list[object] = []

        def record_stream(self, stream: object) -> None:
            self.used_on.append(stream)

    queue, memory, stream = DeviceQueue(torch.device("cpu")), Noted(), object()
    queue._stream = stream  # type: ignore[assignment]
    queue.keep(memory)  # type: ignore[arg-type]
    assert memory.used_on == [stream]


def test_units_that_the_store_has_not_are_refused() -> None:
    shard = rank_shard(layout_of(), 0, 4, 2, "raw")
    units = DeviceUnits(store_of(shard.layout), shard)
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
        return LayerHandle(struct.pack("<Q", tensor.data_ptr()), tensor.nbytes, 0, b"", 0, 0)

    monkeypatch.setattr(cuda_ipc, "share_layer", share)
    monkeypatch.setattr(cuda_ipc, "open_layer", lambda handle, _: Address(struct.unpack("<Q", handle.handle)[0]))


@contextlib.asynccontextmanager
async def linked(
    source: TensorStore, target: TensorStore, shard: KVShard, own: KVShard
) -> AsyncIterator[tuple[DataLink, DataLink]]:
    sending, receiving = CudaIpcTransport(source, join_timeout_s=20), CudaIpcTransport(target, join_timeout_s=20)
    try:
        pending = await receiving.prepare("127.0.0.1", own)
        sender, receiver = await asyncio.gather(sending.join(pending.params, shard), pending.established())
        yield sender, receiver
    finally:
        await sending.close()
        await receiving.close()


async def test_the_target_reads_units_from_the_sources_memory(shared: None) -> None:
    source, target = store_of(layout_of(), seed=1), store_of(layout_of(block_size=8))
    shard, own = rank_shard(source.layout, 1, 2, 4, "raw"), rank_shard(target.layout, 1, 2, 4, "raw")
    async with linked(source, target, shard, own) as (sender, receiver):
        sent, received = chunk_of(1, shard), chunk_of(2, own)
        await sender.send(sent, SEED)
        assert await receiver.receive(received, SEED)
        assert torch.equal(target.units(own, received), source.units(shard, sent))
        await sender.send(sent, SEED)
        await receiver.discard(4)
        await sender.send(sent, SEED)
        assert not await receiver.receive(received, SEED + 1), "another chunk's seed"
        await sender.send(sent, SEED)
        source.layers[1] += 1
        assert not await receiver.receive(received, SEED), "the source gave the blocks to somebody else"


async def test_units_that_the_peer_has_not_are_a_breach_of_the_protocol(shared: None) -> None:
    source, target = store_of(layout_of(), num_blocks=9, seed=1), store_of(layout_of(), num_blocks=9)
    shard = rank_shard(source.layout, 0, 4, 4, "raw")
    async with linked(source, target, shard, shard) as (sender, receiver):
        receiver._num_peer_units = 5  # type: ignore[attr-defined]
        await sender.send([Segment(0, (5,))], SEED)
        with pytest.raises(ProtocolError, match="outside"):
            await receiver.receive([Segment(0, (0,))], SEED)
        with pytest.raises(ConnectionLost):
            await receiver.receive([Segment(0, (0,))], SEED)
    assert not any(layer.any() for layer in target.layers)


async def test_a_pool_that_is_too_small_for_its_blocks_is_refused(
    shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying(tensor: torch.Tensor) -> LayerHandle:
        return LayerHandle(struct.pack("<Q", tensor.data_ptr()), tensor.nbytes - 1, 0, b"", 0, 0)

    monkeypatch.setattr(cuda_ipc, "share_layer", lying)
    store = store_of(layout_of())
    shard = rank_shard(store.layout, 0, 4, 4, "raw")
    transport = CudaIpcTransport(store, join_timeout_s=20)
    pending = await transport.prepare("127.0.0.1", shard)
    joining, waiting = await asyncio.gather(
        transport.join(pending.params, shard), pending.established(), return_exceptions=True
    )
    assert isinstance(joining, ConnectionLost)
    assert isinstance(waiting, ProtocolError)
    await pending.close()
    await transport.close()


async def test_an_error_of_cuda_breaks_the_link(shared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(layout_of())
    shard = rank_shard(store.layout, 0, 4, 4, "raw")
    async with linked(store, store, shard, shard) as (sender, _):

        def fails(*_: object) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(cuda_ipc, "digest_units", fails)
        with pytest.raises(ConnectionLost, match="illegal memory access"):
            await sender.send([Segment(0, (1,))], SEED)
        with pytest.raises(ConnectionLost, match="closed"):
            await sender.send([Segment(0, (1,))], SEED)


class Compiled:
    """A kernel that notes the variants it is launched in, each of which Triton compiles once, for seconds."""

    def __init__(self, kernel: Any, variants: set[str]):
        self._kernel, self._variants = kernel, variants

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            widths = [argument.bit_length() > 31 for argument in arguments if isinstance(argument, int)]
            self._variants.add(f"{self._kernel.fn.__name__} {widths} {constants}")
            self._kernel[grid](*arguments, **constants)

        return launch


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    variants: set[str] = set()
    for name in ("digest_parts_kernel", "move_units_kernel", "digest_kernel", "code_units_kernel"):
        monkeypatch.setattr(kv_units, name, Compiled(getattr(kv_units, name), variants))
    return variants


async def test_a_cuda_ipc_link_compiles_nothing_for_a_chunk_when_it_is_joined(shared: None, compiled: set[str]) -> None:
    source, target = store_of(layout_of(), seed=1), store_of(layout_of(block_size=8))
    shard, own = rank_shard(source.layout, 1, 2, 4, "raw"), rank_shard(target.layout, 1, 2, 4, "raw")
    async with linked(source, target, shard, own) as (sender, receiver):
        before = set(compiled)
        await sender.send(chunk_of(1, shard), SEED)
        assert await receiver.receive(chunk_of(2, own), SEED)
        assert before
        assert compiled == before


@pytest.mark.parametrize("encoding", ["raw", "fp8"])
@pytest.mark.parametrize("head_dim", [8, 5])
def test_staging_compiles_nothing_for_a_chunk_once_it_is_warm(
    encoding: Encoding, head_dim: int, compiled: set[str]
) -> None:
    shard = rank_shard(layout_of(head_dim), 1, 2, 2, encoding)
    source, target = CudaStaging(store_of(shard.layout, seed=1), shard), CudaStaging(store_of(shard.layout), shard)
    source.warm_up()
    before = set(compiled)
    packed = source.buffer(0, 4)
    source.pack(chunk_of(1, shard), SEED, packed)
    assert target.unpack(chunk_of(2, shard), SEED, packed)
    assert before
    assert compiled == before


def test_a_worker_compiles_at_its_start_what_rank_pairs_with_its_peers_need(compiled: set[str]) -> None:
    store = store_of(layout_of())
    peers = [layout_of(), replace(layout_of(block_size=8), tp_size=2)]
    warm_up_pairs(("cuda_ipc", "torch_distributed"), store, peers, "raw")
    before = set(compiled)
    for peer in peers:
        for own, theirs in [
            pair_shards(rank_pair, store.layout, peer, "raw") for rank_pair in rank_pairs(store.layout, peer)
        ]:
            queue, device = DeviceQueue(torch.device("cpu")), torch.device("cpu")
            warm_up_source(own, queue, device)
            warm_up_target(theirs, own, queue, device)
            CudaStaging(store, own).warm_up()
    assert compiled == before


def test_a_gpus_transports_are_there_once_their_kernels_are_compiled(
    compiled: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transports, "_device", lambda _: "a GPU")
    store = store_of(layout_of())
    make_transports(TransferConfig(transport="torch_distributed", encoding="fp8"), store, peers=[store.layout])
    before = set(compiled)
    assert before
    CudaStaging(store, rank_shard(store.layout, 0, 4, 4, "fp8")).warm_up()
    assert compiled == before


class NotedQueue:
    """A stream that notes when it is the current one, and which memory of others it is told of."""

    current: ClassVar[list["NotedQueue"]] = []

    def __init__(self, _: torch.device):
        self.kept: list[int] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.current.append(self)
        yield
        self.current.pop()

    def keep(self, memory: torch.Tensor) -> None:
        self.kept.append(memory.data_ptr())

    def wait(self) -> None:
        assert not self.current


def test_staging_never_allocates_from_the_engines_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed activations may still be in use by work that the engine has queued on its stream."""
    monkeypatch.setattr(device_units, "DeviceQueue", NotedQueue)
    shard = rank_shard(layout_of(), 0, 4, 4, "raw")
    source, target = CudaStaging(store_of(shard.layout, seed=1), shard), CudaStaging(store_of(shard.layout), shard)
    owners: list[NotedQueue | None] = []
    empty = torch.empty

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        if "device" in options:
            owners.append(NotedQueue.current[-1] if NotedQueue.current else None)
        return empty(*arguments, **options)

    monkeypatch.setattr(torch, "empty", noted)
    for units in (2, 4):  # a buffer that grows
        packed = source.buffer(0, units)
        assert source._waiting.kept[-1] == packed.data_ptr()  # type: ignore[attr-defined]
    source.pack(chunk_of(1, shard), SEED, packed)
    assert target.unpack(chunk_of(2, shard), SEED, packed)
    assert owners[:2] == [source._posting] * 2
    assert len(owners) >= 4
    assert None not in owners


async def test_a_cache_is_shared_once_and_unmapped_on_the_links_thread(
    shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "DeviceQueue", NotedQueue)
    share, num_shared, unmapped = cuda_ipc.share_layer, 0, list[tuple[str, bool]]()

    def counted(tensor: torch.Tensor) -> LayerHandle:
        nonlocal num_shared
        num_shared += 1
        return share(tensor)

    class Mapped(Address):
        def __del__(self) -> None:
            unmapped.append((threading.current_thread().name, bool(NotedQueue.current)))

    monkeypatch.setattr(cuda_ipc, "share_layer", counted)
    monkeypatch.setattr(cuda_ipc, "open_layer", lambda handle, _: Mapped(struct.unpack("<Q", handle.handle)[0]))
    store = store_of(layout_of())
    shard = rank_shard(store.layout, 0, 4, 4, "raw")
    sending, receiving = CudaIpcTransport(store, join_timeout_s=20), CudaIpcTransport(store, join_timeout_s=20)
    for _ in range(3):
        pending = await receiving.prepare("127.0.0.1", shard)
        links = await asyncio.gather(sending.join(pending.params, shard), pending.established())
        for link in links:
            await link.close()
    assert num_shared == store.layout.num_tensors
    assert unmapped == [("kv-cuda_ipc", True)] * 3 * store.layout.num_tensors
    await sending.close()
    await receiving.close()


async def test_encodings_that_cuda_ipc_cannot_move_are_refused() -> None:
    transport = CudaIpcTransport(store_of(layout_of(head_dim=5)))
    with pytest.raises(ConnectionLost, match="not made of"):
        await transport.prepare("127.0.0.1", rank_shard(layout_of(head_dim=5), 0, 1, 1, "raw"))
    with pytest.raises(ConnectionLost, match="not encoded"):
        await transport.join({}, rank_shard(layout_of(), 0, 4, 4, "int8"))


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_ipc.missing() == "a CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert cuda_ipc.missing() is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    assert "expandable_segments" in str(cuda_ipc.missing())
