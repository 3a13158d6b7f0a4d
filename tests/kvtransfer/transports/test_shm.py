"""Shm links: one copy, by the target alone, out of a cache that the target does not trust.

Also the handshake of two ends on one machine. Refusals by the system, and processes that die: tests/faults.
"""

import asyncio
import contextlib
import fcntl
import gc
import mmap
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.rigs.kv_links import SharedBytesStore, blocks, linked, mappings, two
from tests.rigs.kv_pair import BLOCK_SIZE, open_descriptors
from twostroke.kvtransfer.layout import KVShard, Segment
from twostroke.kvtransfer.transports import local, shm, sockets
from twostroke.kvtransfer.transports.shm import ShmPool, receive_pool, send_pool
from twostroke.protocol.errors import ConnectionLost, ProtocolError
from twostroke.protocol.messages import Run


def filled(*sizes: int) -> SharedBytesStore:
    store = SharedBytesStore(*sizes)
    store.fill(1)
    return store


async def test_a_block_that_the_source_reuses_before_it_was_read_does_not_pass() -> None:
    source, target = filled(), SharedBytesStore()
    async with linked("shm", source, target) as (sender, receiver):
        await sender.send([Segment(1, (2, 3))], 9)
        source.layers[1][4 * source.block_bytes - 1] ^= 1
        assert not await receiver.receive([Segment(1, (2, 3))], 9)


@pytest.mark.parametrize("outside", [4, -1, 2**31 - 1])
async def test_units_that_the_source_has_not_break_the_link_before_anything_is_read(outside: int) -> None:
    source, target = filled(1, 4), SharedBytesStore(1, 16)
    async with linked("shm", source, target) as (sender, receiver):
        message = memoryview(bytearray(4 * 2 + 16)).cast("i")
        message[0], message[1] = 1, outside
        sender.thread.socket.sendall(message)
        with pytest.raises(ProtocolError, match="outside of its 4"):
            await receiver.receive([Segment(0, (5, 6))], 1)
        with pytest.raises(ConnectionLost, match="closed"):
            await receiver.receive([Segment(0, (5, 6))], 1)
        assert not any(target.layers[0])


async def test_a_target_with_other_stages_reads_each_layer_from_the_tensor_that_holds_it_there() -> None:
    """The target's stage has the last three of six layers in three groups: one tensor, the source's second."""
    source, windows = SharedBytesStore(6, 16, windows=(0, 8, 8) * 2), (0, 8, 8) * 2
    target = SharedBytesStore(6, 16, windows=windows, pp_size=2, rank=1)
    source.fill(1)
    layers, table = range(3, 6), tuple(range(6))
    shards = [KVShard(store.layout, store.rank, layers, 0, 1, BLOCK_SIZE, "raw") for store in (source, target)]
    async with linked("shm", source, target, *shards) as (sender, receiver):
        runs = tuple(Run(layer, 0, 2) for layer in layers)
        sent, received = (shard.segments(runs, table) for shard in shards)
        await asyncio.gather(sender.send(sent, 9), receiver.receive(received, 9))
    for layer, (there, here) in zip(layers, ((0, 0), (2, 1), (2, 2)), strict=True):  # groups of table rows
        tensor = source.layout.groups.tensor_of_layer[layer]
        for row in range(2):
            assert target.block(0, 3 * row + here) == source.block(tensor, 3 * row + there), (layer, row)


async def test_a_source_runs_only_a_few_chunks_ahead_of_its_target() -> None:
    source, target = filled(1, 64), SharedBytesStore(1, 64)
    chunk, num_chunks, most_ahead = [Segment(0, tuple(range(64)))], 200, 16
    async with linked("shm", source, target) as (sender, receiver):
        num_sent = 0

        async def send_all() -> None:
            nonlocal num_sent
            for seed in range(num_chunks):
                await sender.send(chunk, seed)
                num_sent += 1

        sending = asyncio.create_task(send_all())
        for seed in range(num_chunks):
            assert await receiver.receive(chunk, seed)
            assert num_sent - (seed + 1) <= most_ahead, "a short prompt's chunk would wait behind all of them"
        await sending


async def test_a_source_whose_target_reads_nothing_is_woken_by_close() -> None:
    source, target = SharedBytesStore(1, 4096, 1), SharedBytesStore(1, 4096, 1)
    async with linked("shm", source, target) as (sender, _):
        chunk = [Segment(0, tuple(range(4096)))]
        sends = [asyncio.create_task(sender.send(chunk, 1)) for _ in range(100)]
        done, stuck = await asyncio.wait(sends, timeout=0.2)
        assert stuck, "the socket's buffer is full"
        await sender.close()
        await asyncio.wait(stuck)
        assert all(isinstance(send.exception(), ConnectionLost) for send in stuck)
        assert all(send.exception() is None for send in done)


async def test_a_closed_link_reads_no_longer() -> None:
    async with linked("shm", SharedBytesStore(), SharedBytesStore()) as (sender, receiver):
        mapped = mappings()
        await receiver.close()
        assert mappings() == mapped - 1
        with pytest.raises(ConnectionLost):
            await sender.send([Segment(0, (1,))], 1)


# --- joining ---


async def test_a_transport_closes_links_that_are_not_awaited() -> None:
    store = SharedBytesStore()
    async with two("shm", store, store) as (sending, receiving):
        pending = await receiving.prepare("", blocks(store))
        joining = asyncio.create_task(sending.join(pending.params, blocks(store)))
        await asyncio.wait([joining], timeout=0.05)
        assert not joining.done()
        await receiving.close()
        with pytest.raises(ConnectionLost):
            await joining


async def test_a_link_that_can_not_be_opened_is_closed_though_its_connection_ends_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_closing, may_close = threading.Event(), threading.Event()

    def refuse(*_: Any) -> None:
        raise OSError("refused")

    def unmap(_: shm.ShmTarget) -> None:
        is_closing.set()
        may_close.wait()

    monkeypatch.setattr(shm, "send_pool", refuse)
    monkeypatch.setattr(shm.ShmTarget, "unmap", unmap)
    store = SharedBytesStore()
    async with two("shm", store, store) as (sending, receiving):
        pending = await receiving.prepare("", blocks(store))
        establishing = asyncio.create_task(pending.established())
        with pytest.raises(ConnectionLost, match="refused"):
            await sending.join(pending.params, blocks(store))
        await asyncio.to_thread(is_closing.wait)
        establishing.cancel()
        may_close.set()
        with pytest.raises(asyncio.CancelledError):
            await establishing
        assert not receiving.links


async def test_encoded_kv_is_refused_at_both_ends() -> None:
    store = SharedBytesStore()
    async with two("shm", store, store) as (sending, receiving):
        for call in (receiving.prepare("", blocks(store, "int8")), sending.join({}, blocks(store, "int8"))):
            with pytest.raises(ConnectionLost, match="not encoded as int8"):
                await call


@pytest.mark.parametrize("refuses", ["source", "target"])
async def test_a_process_of_another_user_gets_no_link(refuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sockets.is_trusted

    def is_trusted(connected: socket.socket) -> bool:
        """Act as if this side ran as another user: the listener's end has the name, the connecting one none."""
        if bool(connected.getsockname()) != (refuses == "target"):
            return real(connected)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 4242)
            return real(connected)

    monkeypatch.setattr(sockets, "is_trusted", is_trusted)
    store = SharedBytesStore()
    async with two("shm", store, store, join_timeout_s=0.3) as (sending, receiving):
        pending = await receiving.prepare("", blocks(store))
        outcomes = await asyncio.gather(
            sending.join(pending.params, blocks(store)), pending.established(), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [ConnectionLost, ConnectionLost]
        assert ("another user" in str(outcomes[0])) == (refuses == "source")
        assert "Timeout" not in str(outcomes[0]), "it was sent away"
        await pending.close()


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    gc.collect()  # so that none is given back meanwhile
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_without_a_descriptor_for_the_socket_neither_end_can_begin() -> None:
    store = SharedBytesStore()
    async with two("shm", store, store) as (sending, receiving):
        pending = await receiving.prepare("", blocks(store))
        with no_descriptors_left():
            with pytest.raises(ConnectionLost, match="can't listen"):
                await receiving.prepare("", blocks(store))
            with pytest.raises(ConnectionLost, match="can't join"):
                await sending.join(pending.params, blocks(store))


# --- what a peer may claim of the cache that it hands over ---


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (left, right):
        end.settimeout(5)
    with left, right:
        yield left, right


STORE = SharedBytesStore(3, 16, num_kv_heads=2)


def described(**changes: Any) -> bytes:
    offsets = tuple(STORE.layer_offset(layer) for layer in range(3))
    pool = ShmPool(STORE.layout, 0, STORE.num_blocks, 0, 2, 4, offsets)
    return msgspec.msgpack.encode(msgspec.structs.replace(pool, **changes))


def hand_over(end: socket.socket, descriptor: int, payload: bytes) -> None:
    end.sendall(len(payload).to_bytes(4, "little") + payload[:30_000])  # of what is too long nobody reads more
    socket.send_fds(end, [b"\0"], [descriptor])


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (described(num_blocks=17), "not all within"),
        (described(num_blocks=0), "has 0 blocks"),
        (described(num_blocks=2**40), "blocks"),
        (described(layer_offsets=(0, 4096, -8)), "not all within"),
        (described(layer_offsets=(0, 4096, 2**60)), "not all within"),
        (described(layer_offsets=(0,)), "places 1 of its 3 layers"),
        (described(first_head=1), "heads that its cache has not"),
        (described(first_head=-1), "heads that its cache has not"),
        (described(rank=1), "layers that its cache has not"),
        (described(rank=-1), "layers that its cache has not"),
        (described(layout=msgspec.structs.replace(STORE.layout, pp_size=3)), "layers that its cache has not"),
        (described(num_heads=1), "other units"),
        (described(unit_tokens=2), "other units"),
        (described(layout=msgspec.structs.replace(STORE.layout, model="other")), "doesn't fit"),
        (described(layout=msgspec.structs.replace(STORE.layout, dtype="float32")), "doesn't fit"),
        (described(layout=msgspec.structs.replace(STORE.layout, num_layers=0)), "doesn't fit"),
        (b"\xc1", "not described"),
        (msgspec.msgpack.encode([1, 2]), "not described"),
        (bytes(70_000), "in 70000 bytes"),
    ],
)
def test_a_pool_that_is_not_as_agreed_is_not_mapped(
    payload: bytes, complaint: str, ends: tuple[socket.socket, socket.socket]
) -> None:
    before = open_descriptors(), mappings()
    hand_over(ends[0], STORE.memory_fd, payload)
    with pytest.raises(ProtocolError, match=complaint):
        receive_pool(ends[1], blocks(STORE))
    assert open_descriptors() <= before[0]
    assert mappings() <= before[1]


def test_memory_that_could_shrink_is_not_mapped(ends: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    ordinary = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    for descriptor, complaint in ((unsealed, "could shrink"), (ordinary, "not a memfd|could shrink")):
        os.ftruncate(descriptor, os.fstat(STORE.memory_fd).st_size)
        hand_over(ends[0], descriptor, described())
        with pytest.raises(ProtocolError, match=complaint):
            receive_pool(ends[1], blocks(STORE))
        os.close(descriptor)


def test_a_peer_that_sends_no_descriptor_or_leaves_is_noticed(ends: tuple[socket.socket, socket.socket]) -> None:
    payload = described()
    ends[0].sendall(len(payload).to_bytes(4, "little") + payload + b"\0")
    with pytest.raises(ProtocolError, match="no descriptor"):
        receive_pool(ends[1], blocks(STORE))
    ends[0].sendall(len(payload).to_bytes(4, "little") + payload)
    ends[0].close()
    with pytest.raises(ConnectionResetError):
        receive_pool(ends[1], blocks(STORE))


def test_the_target_gets_a_descriptor_by_which_it_cannot_write(ends: tuple[socket.socket, socket.socket]) -> None:
    send_pool(ends[0], STORE, blocks(STORE))
    local.receive_description(ends[1], ShmPool, blocks(STORE))
    _, (descriptor,), _, _ = socket.recv_fds(ends[1], 1, 1)
    try:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
