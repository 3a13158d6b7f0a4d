"""Nixl links: one descriptor a chunk, an agent that ends with its link, and refusals with a remedy."""

import asyncio
import os
import socket
import sys
from importlib.util import find_spec

import msgspec
import pytest
from torch import Tensor

from tests.faults.census import socket_inodes
from tests.rigs.kv_links import SharedBytesStore, blocks, linked, move, two
from tests.rigs.kv_pair import BytesStore, rank_shard
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.layout import Segment
from twostroke.kvtransfer.transports import make_transports, nixl
from twostroke.protocol.errors import ConfigError, ConnectionLost, ProtocolError

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="needs nixl: make tools")


def listening_at() -> set[str]:
    """The addresses at which this process listens for TCP connections."""
    found = set()
    for descriptor in socket_inodes().values():
        with socket.socket(fileno=os.dup(descriptor)) as each:
            is_internet = each.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(str(each.getsockname()[0]))
    return found


@needs_nixl
async def test_a_chunk_is_one_descriptor_however_many_rows_and_blocks_it_is_of(monkeypatch: pytest.MonkeyPatch) -> None:
    source = SharedBytesStore(2, 40, 512, num_kv_heads=4, block_size=16, tp_size=2)
    target = SharedBytesStore(2, 160, 512, num_kv_heads=4, block_size=4)
    source.fill(1)
    shards = rank_shard(source.layout, 1, 1, 4, "raw"), rank_shard(target.layout, 3, 1, 4, "raw")
    sizes: list[tuple[int, int]] = []
    read = nixl.NixlTarget._read

    def counted(end: nixl.NixlTarget, address: int, into: Tensor, until_s: float | None) -> None:
        sizes.append((end._places(address, into.numel(), 0).descCount(), into.numel()))
        read(end, address, into, until_s)

    async with linked("nixl", source, target, *shards) as ends:
        monkeypatch.setattr(nixl.NixlTarget, "_read", counted)
        chunk = [Segment(layer, tuple(range(160))) for layer in range(2)]
        assert await move(ends, chunk, chunk)
    assert sizes == [(1, 320 * shards[0].unit_bytes + 16)]


@needs_nixl
async def test_nothing_but_the_links_own_interface_is_listened_on_and_nothing_after_it() -> None:
    store = SharedBytesStore()
    before = listening_at()
    async with linked("nixl", store, store):
        assert listening_at() - before == {"127.0.0.1"}
    assert listening_at() == before


@needs_nixl
async def test_bytes_that_were_read_get_into_no_block_once_their_link_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call is cancelled between the read and the copy into blocks."""
    source, target = SharedBytesStore(1, 8, 16_384), SharedBytesStore(1, 8, 16_384)
    source.fill(1)
    fetch, loop, fetched = nixl.NixlTarget._fetch, asyncio.get_running_loop(), asyncio.Event()

    def held_up(end: nixl.NixlTarget, packed: Tensor) -> None:
        fetch(end, packed)
        loop.call_soon_threadsafe(fetched.set)
        while not end.thread.is_broken:
            os.sched_yield()

    async with linked("nixl", source, target) as (sender, receiver):
        monkeypatch.setattr(nixl.NixlTarget, "_fetch", held_up)
        sending = asyncio.create_task(sender.send([Segment(0, (0, 1, 2))], 1))
        receiving = asyncio.create_task(receiver.receive([Segment(0, (0, 1, 2))], 1))
        await fetched.wait()
        receiving.cancel()
        await receiver.close()
        await asyncio.wait([sending])
        assert target.copy() == [bytes(len(target.layers[0]))]
        assert receiver._agent is None


@needs_nixl
@pytest.mark.parametrize(
    ("index", "num_bytes", "complaint"), [(9, 2064, "outside of its"), (0, 2065, "was announced"), (0, 0, "announced")]
)
async def test_a_chunk_that_is_not_where_or_as_long_as_it_must_be_breaks_the_link(
    index: int, num_bytes: int, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SharedBytesStore(1, 8, 128)
    lie = nixl._CHUNK.pack(index, num_bytes)
    monkeypatch.setattr(nixl.NixlSource, "_announce", lambda end, *_: end.thread.socket.sendall(lie))
    async with linked("nixl", store, store) as (sender, receiver):
        assert store.block_bytes == 2048
        sending = asyncio.create_task(sender.send([Segment(0, (1,))], 1))
        with pytest.raises(ProtocolError, match=complaint):
            await receiver.receive([Segment(0, (2,))], 1)
        await receiver.close()
        with pytest.raises(ConnectionLost):
            await sending


@needs_nixl
async def test_a_chunk_that_has_no_room_in_the_buffers_is_refused() -> None:
    store = SharedBytesStore(1, 8, 2048)
    async with linked("nixl", store, store, max_chunk_bytes=2 * store.block_bytes) as (sender, _):
        assert sender.max_chunk_bytes == 2 * store.block_bytes
        with pytest.raises(ProtocolError, match="no room"):
            await sender.send([Segment(0, (0, 1, 2))], 1)


@needs_nixl
@pytest.mark.parametrize(
    ("lie", "complaint"),
    [
        ({"num_units": 10**6}, "units"),
        ({"addresses": ()}, "units"),
        ({"metadata": b"junk"}, "nixl"),
        ({"addresses": (8, 8)}, "nixl"),
        (None, "as they must be"),
    ],
)
async def test_buffers_that_are_not_described_as_they_must_be_break_the_link(
    lie: dict[str, object] | None, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SharedBytesStore()
    honest = nixl.msgspec.msgpack.encode

    def encode(offered: nixl.Offered) -> bytes:
        return b"\xc1" if lie is None else honest(msgspec.structs.replace(offered, **lie))

    async with two("nixl", store, store, join_timeout_s=5) as (sending, receiving):
        pending = await receiving.prepare("127.0.0.1", blocks(store))
        with monkeypatch.context() as patch:
            patch.setattr(nixl.msgspec.msgpack, "encode", encode)
            joined, established = await asyncio.gather(
                sending.join(pending.params, blocks(store)), pending.established(), return_exceptions=True
            )
        assert isinstance(joined, ConnectionLost)
        assert isinstance(established, ConnectionLost)
        assert complaint in str(established)
        await pending.close()


async def test_machines_without_rdma_are_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "rdma_ports", tuple)
    store = BytesStore()
    here, there = (nixl.NixlTransport(store, machine=name) for name in ("one", "another"))
    pending = await there.prepare("127.0.0.1", blocks(store))
    with pytest.raises(ConnectionLost, match=r"the target's has no active port.*set kv_transfer.transport to auto"):
        await here.join(pending.params, blocks(store))
    await pending.close()


def test_a_worker_without_the_package_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, nixl.PACKAGE, None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[nixl\]'.*or set the transport to auto"):
        make_transports(TransferConfig(transport="nixl"), BytesStore())


def test_auto_does_not_take_it() -> None:
    assert "nixl" not in make_transports(TransferConfig(), SharedBytesStore()).by_name
