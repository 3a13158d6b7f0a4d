"""The shm transport's links: one copy between two caches on this machine, by the target alone."""

import asyncio
import contextlib
import errno
import fcntl
import gc
import mmap
import os
import random
import resource
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from kvtransfer.layout import Cut, Lane, Segment, cut_lane, plan_lanes
from kvtransfer.link import DataLink
from kvtransfer.transports import local, shared_pool, shm
from kvtransfer.transports.shared_pool import PoolDescription, receive_pool, send_pool
from kvtransfer.transports.shm import HERE_BYTES, ShmTransport
from model.config import ModelConfig, RopeConfig
from model.kv_cache import SharedKVCache, make_kv_cache
from protocol.errors import ConnectionLost, ProtocolError

NUM_LAYERS = 3


def make_cache(
    num_blocks: int = 16, block_size: int = 4, heads: int = 2, tp_size: int = 1, rank: int = 0, head_dim: int = 8
) -> SharedKVCache:
    config = ModelConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_layers=NUM_LAYERS,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_position=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
    )
    cache = make_kv_cache(
        config,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
        model_digest="m",
        tp_size=tp_size,
        rank=rank,
    )
    assert isinstance(cache, SharedKVCache)
    return cache


def filled(cache: SharedKVCache, seed: int = 1) -> SharedKVCache:
    generator = torch.Generator().manual_seed(seed)
    for tensor in cache.tensors:
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def cuts(source: SharedKVCache, target: SharedKVCache, lane: Lane | None = None) -> tuple[Cut, Cut]:
    if lane is None:
        (lane,) = plan_lanes(source.layout.tp_size, target.layout.tp_size, source.layout.num_kv_heads)
    return cut_lane(lane, source.layout, target.layout, "raw")


def belongings() -> tuple[int, int, int]:
    """Open descriptors, mappings of caches, threads."""
    mappings = Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:kv-cache")
    return len(os.listdir("/proc/self/fd")), mappings, threading.active_count()


def assert_nothing_is_left(before: tuple[int, int, int]) -> None:
    """Less may be left, where what earlier tests forgot was collected meanwhile."""
    if belongings() != before:
        gc.collect()
    after = belongings()
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


@contextlib.asynccontextmanager
async def transports(
    source: SharedKVCache, target: SharedKVCache, **options: float
) -> AsyncIterator[tuple[ShmTransport, ShmTransport]]:
    """One on either side; nothing may be left of them in the end."""
    before = belongings()
    sending, receiving = ShmTransport(source, **options), ShmTransport(target, **options)
    try:
        yield sending, receiving
    finally:
        await sending.close()
        await receiving.close()
    assert_nothing_is_left(before)


@contextlib.asynccontextmanager
async def link(
    source: SharedKVCache, target: SharedKVCache, lane: Lane | None = None
) -> AsyncIterator[tuple[DataLink, DataLink]]:
    async with transports(source, target) as (sending, receiving):
        source_cut, target_cut = cuts(source, target, lane)
        pending = await receiving.prepare("127.0.0.1", target_cut)
        yield await asyncio.gather(sending.join(pending.params, source_cut), pending.established())


async def move(links: tuple[DataLink, DataLink], source: list[Segment], target: list[Segment], seal: int = 5) -> bool:
    _, intact = await asyncio.gather(links[0].send(source, seal), links[1].receive(target, seal))
    return intact


def copy_of(cache: SharedKVCache) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in cache.tensors]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


# --- bytes ---


@pytest.mark.parametrize(("num_blocks", "head_dim"), [(1, 1), (16, 8), (700, 16), (40, 2048)])
async def test_units_arrive_in_the_order_of_both_tables(num_blocks: int, head_dim: int) -> None:
    source = filled(make_cache(num_blocks, head_dim=head_dim))
    target = make_cache(num_blocks, head_dim=head_dim)
    async with link(source, target) as links:
        sent, received, expected = [], [], copy_of(target)
        for layer in range(NUM_LAYERS):
            from_ids = random.Random(layer).sample(range(num_blocks), num_blocks)
            to_ids = random.Random(layer + 5).sample(range(num_blocks), num_blocks)
            sent.append(Segment(layer, tuple(from_ids)))
            received.append(Segment(layer, tuple(to_ids)))
            expected[layer][to_ids] = source.tensors[layer][from_ids]
        assert await move(links, sent, received)
        assert same(target.tensors, expected)


def slots(table: list[int], block_size: int) -> tuple[list[int], list[int]]:
    """Block and place in it of each token."""
    return [block for block in table for _ in range(block_size)], list(range(block_size)) * len(table)


@pytest.mark.parametrize(("heads", "source_tp", "target_tp"), [(4, 1, 1), (4, 1, 2), (4, 4, 2), (1, 1, 2), (4, 2, 8)])
@pytest.mark.parametrize("block_sizes", [(4, 4), (2, 8), (8, 2), (6, 4)])
async def test_any_cut_of_heads_and_blocks_arrives_where_it_belongs(
    heads: int, source_tp: int, target_tp: int, block_sizes: tuple[int, int]
) -> None:
    num_tokens = 24
    from_size, to_size = block_sizes
    whole = filled(make_cache(32, from_size, heads))
    sources = [make_cache(32, from_size, heads, source_tp, rank) for rank in range(source_tp)]
    targets = [make_cache(32, to_size, heads, target_tp, rank) for rank in range(target_tp)]
    from_table = random.Random(1).sample(range(32), num_tokens // from_size)
    to_table = random.Random(2).sample(range(32), num_tokens // to_size)
    for cache in sources:
        first = cache.layout.first_head(cache.rank)
        for layer in range(NUM_LAYERS):
            held = whole.tensors[layer][:, :, first : first + cache.layout.heads_per_rank]
            cache.tensors[layer].copy_(held)
    for lane in plan_lanes(source_tp, target_tp, heads):
        source, target = sources[lane.source_rank], targets[lane.target_rank]
        source_cut, target_cut = cuts(source, target, lane)
        async with link(source, target, lane) as links:
            for layer in range(NUM_LAYERS):
                pieces = [
                    tuple(block * cut.units_per_block + part for block in table for part in range(cut.units_per_block))
                    for cut, table in ((source_cut, from_table), (target_cut, to_table))
                ]
                assert await move(links, [Segment(layer, pieces[0])], [Segment(layer, pieces[1])])
    for cache in targets:
        first = cache.layout.first_head(cache.rank)
        for layer in range(NUM_LAYERS):
            expected = torch.zeros_like(cache.tensors[layer])
            from_blocks, from_slots = slots(from_table, from_size)
            to_blocks, to_slots = slots(to_table, to_size)
            held = whole.tensors[layer][from_blocks, :, :, from_slots]  # [tokens, 2, heads, head_dim]
            expected[to_blocks, :, :, to_slots] = held[:, :, first : first + cache.layout.heads_per_rank]
            assert torch.equal(cache.tensors[layer], expected)


async def test_two_chunks_may_be_under_way_and_stay_in_order() -> None:
    source, target = filled(make_cache(64, head_dim=2048)), make_cache(64, head_dim=2048)
    assert 16 * source.block_bytes > HERE_BYTES, "these go by the thread"
    async with link(source, target) as (sender, receiver):
        chunks = [[Segment(i % 3, tuple(range(16 * j, 16 * j + 16)))] for i, j in enumerate((2, 0, 3, 1))]
        calls = [asyncio.create_task(receiver.receive(chunk, seal)) for seal, chunk in enumerate(chunks)]
        for seal, chunk in enumerate(chunks):
            await sender.send(chunk, seal)
        assert await asyncio.gather(*calls) == [True] * 4
        for chunk in chunks:
            ids = list(chunk[0].unit_ids)
            assert torch.equal(source.tensors[chunk[0].layer][ids], target.tensors[chunk[0].layer][ids])


@pytest.mark.parametrize("head_dim", [8, 2048])
async def test_bytes_of_another_chunk_do_not_pass_and_the_link_goes_on(head_dim: int) -> None:
    source, target = filled(make_cache(16, head_dim=head_dim)), make_cache(16, head_dim=head_dim)
    everything = [Segment(0, tuple(range(16)))]
    async with link(source, target) as links:
        sender, receiver = links
        _, intact = await asyncio.gather(sender.send(everything, 1), receiver.receive(everything, 2))
        assert not intact
        assert await move(links, everything, everything)


async def test_a_block_that_the_source_reuses_before_it_was_read_does_not_pass() -> None:
    source, target = filled(make_cache()), make_cache()
    async with link(source, target) as (sender, receiver):
        await sender.send([Segment(1, (2, 3))], 9)
        source.tensors[1][3, 1, 1, 3, 7] += 1
        assert not await receiver.receive([Segment(1, (2, 3))], 9)


@pytest.mark.parametrize("head_dim", [8, 2048])
async def test_what_is_discarded_leaves_the_stream_in_step(head_dim: int) -> None:
    source, target = filled(make_cache(16, head_dim=head_dim)), make_cache(16, head_dim=head_dim)
    async with link(source, target) as links:
        sender, receiver = links
        await asyncio.gather(sender.send([Segment(0, tuple(range(16)))], 1), receiver.discard(16))
        assert not any(tensor.any() for tensor in target.tensors)
        assert await move(links, [Segment(2, (7,))], [Segment(2, (1,))])
        assert torch.equal(target.tensors[2][1], source.tensors[2][7])


# --- ends ---


@pytest.mark.parametrize("outside", [4, -1, 2**31 - 1])
async def test_units_that_the_source_has_not_break_the_link_before_anything_is_read(outside: int) -> None:
    source, target = filled(make_cache(4)), make_cache(16)
    async with link(source, target) as (sender, receiver):
        message = memoryview(bytearray(4 * 2 + 16)).cast("i")
        message[0], message[1] = 1, outside
        sender._thread.socket.sendall(message)  # type: ignore[attr-defined]
        with pytest.raises(ProtocolError, match="outside of its 4"):
            await receiver.receive([Segment(0, (5, 6))], 1)
        with pytest.raises(ConnectionLost, match="closed"):
            await receiver.receive([Segment(0, (5, 6))], 1)
        assert not any(tensor.any() for tensor in target.tensors)


async def test_each_end_has_its_own_direction() -> None:
    async with link(make_cache(), make_cache()) as (sender, receiver):
        with pytest.raises(ConnectionLost, match="only sends"):
            await sender.receive([Segment(0, (1,))], 1)
        with pytest.raises(ConnectionLost, match="only sends"):
            await sender.discard(1)
        with pytest.raises(ConnectionLost, match="only receives"):
            await receiver.send([Segment(0, (1,))], 1)


async def test_a_cancelled_receive_breaks_the_link_and_nothing_is_written_later() -> None:
    source, target = filled(make_cache()), make_cache()
    async with link(source, target) as (sender, receiver):
        receive = asyncio.create_task(receiver.receive([Segment(0, (1,))], 1))
        await asyncio.wait([receive], timeout=0.02)
        receive.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receive
        await receiver.close()
        for call in (receiver.receive([Segment(0, (1,))], 1), receiver.discard(1)):
            with pytest.raises(ConnectionLost, match="closed"):
                await call
        with pytest.raises(ConnectionLost):
            await sender.send([Segment(0, (1,))], 1)
        assert not target.tensors[0].any()


async def test_a_peer_that_is_gone_breaks_the_link_also_for_calls_that_wait() -> None:
    async with link(make_cache(), make_cache()) as (sender, receiver):
        waiting = [asyncio.create_task(receiver.receive([Segment(0, (i,))], 1)) for i in range(3)]
        await asyncio.wait(waiting, timeout=0.02)
        await sender.close()
        for call in waiting:
            with pytest.raises(ConnectionLost):
                await call
        await receiver.close()
        await receiver.close()


async def test_a_source_runs_only_a_few_chunks_ahead_of_its_target() -> None:
    source, target = filled(make_cache(64)), make_cache(64)
    chunk, num_chunks, most_ahead = [Segment(0, tuple(range(64)))], 200, 16
    async with link(source, target) as (sender, receiver):
        num_sent = 0

        async def send_all() -> None:
            nonlocal num_sent
            for seal in range(num_chunks):
                await sender.send(chunk, seal)
                num_sent += 1

        sending = asyncio.create_task(send_all())
        for seal in range(num_chunks):
            assert await receiver.receive(chunk, seal)
            assert num_sent - (seal + 1) <= most_ahead, "a short prompt's chunk would wait behind all of them"
        await sending


async def test_a_source_whose_target_reads_nothing_is_woken_by_close() -> None:
    source, target = make_cache(4096, head_dim=1), make_cache(4096, head_dim=1)
    async with link(source, target) as (sender, _):
        chunk = [Segment(0, tuple(range(4096)))]
        sends = [asyncio.create_task(sender.send(chunk, 1)) for _ in range(100)]
        done, stuck = await asyncio.wait(sends, timeout=0.2)
        assert stuck, "the socket's buffer is full"
        await sender.close()
        await asyncio.wait(stuck)
        assert all(isinstance(send.exception(), ConnectionLost) for send in stuck)
        assert all(send.exception() is None for send in done)


async def test_a_closed_link_reads_no_longer() -> None:
    source, target = filled(make_cache()), make_cache()
    async with link(source, target) as (sender, receiver):
        mapped = belongings()[1]
        await receiver.close()
        assert belongings()[1] == mapped - 1
        with pytest.raises(ConnectionLost):
            await sender.send([Segment(0, (1,))], 1)


# --- joining ---


async def test_a_peer_that_does_not_join_is_not_awaited_for_ever() -> None:
    cache = make_cache()
    async with transports(cache, cache, join_timeout_s=0.1) as (_, receiving):
        pending = await receiving.prepare("", cuts(cache, cache)[1])
        with pytest.raises(ConnectionLost, match="did not join"):
            await pending.established()
        await pending.close()


async def test_a_pending_link_may_be_given_up_while_it_is_awaited() -> None:
    cache = make_cache()
    async with transports(cache, cache) as (_, receiving):
        pending = await receiving.prepare("", cuts(cache, cache)[1])
        waiting = asyncio.create_task(pending.established())
        await asyncio.wait([waiting], timeout=0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await pending.close()


async def test_a_transport_lets_go_of_links_that_nobody_awaits() -> None:
    cache = make_cache()
    async with transports(cache, cache) as (sending, receiving):
        source_cut, target_cut = cuts(cache, cache)
        pending = await receiving.prepare("", target_cut)
        joining = asyncio.create_task(sending.join(pending.params, source_cut))
        await asyncio.wait([joining], timeout=0.05)
        assert not joining.done()
        await receiving.close()
        with pytest.raises(ConnectionLost):
            await joining


@pytest.mark.parametrize(
    "params", [{"segment": "x"}, {"name": "00", "token": 5}, {"name": "zz", "token": "00"}, {"name": "00" * 16}]
)
async def test_parameters_of_another_transport_are_refused(params: dict[str, str | int]) -> None:
    cache = make_cache()
    async with transports(cache, cache) as (sending, _):
        with pytest.raises(ConnectionLost, match="link parameters are not"):
            await sending.join(params, cuts(cache, cache)[0])


async def test_encoded_kv_is_refused_at_both_ends() -> None:
    cache = make_cache()
    cut = Cut(cache.layout, 0, 2, 4, "int8")
    async with transports(cache, cache) as (sending, receiving):
        with pytest.raises(ConnectionLost, match="not encoded as int8"):
            await receiving.prepare("", cut)
        with pytest.raises(ConnectionLost, match="not encoded as int8"):
            await sending.join({"name": "00", "token": "00"}, cut)


async def test_only_the_peer_with_the_token_gets_the_link_however_many_strangers_come_first() -> None:
    source, target = filled(make_cache()), make_cache()
    async with transports(source, target, join_timeout_s=5.0) as (sending, receiving):
        source_cut, target_cut = cuts(source, target)
        pending = await receiving.prepare("", target_cut)
        strangers = []
        for _ in range(3):
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[-1].connect(b"\0twostroke-kv-" + str(pending.params["name"]).encode())
        with pytest.raises(ConnectionLost, match="the link broke"):
            await sending.join({**pending.params, "token": "00" * 32}, source_cut)
        links = await asyncio.gather(sending.join(pending.params, source_cut), pending.established())
        assert await move(links, [Segment(0, (1,))], [Segment(0, (2,))])
        assert torch.equal(target.tensors[0][2], source.tensors[0][1])
        with pytest.raises(ConnectionLost):
            await sending.join(pending.params, source_cut)
        for stranger in strangers:
            assert stranger.recv(1) == b"", "sent away once the peer had come"
            stranger.close()


@pytest.mark.parametrize("refuses", ["source", "target"])
async def test_a_process_of_another_user_gets_no_link(refuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    real = local.is_same_user

    def is_same_user(connected: socket.socket) -> bool:
        """As if this side ran as somebody else: the listener's end has the name, the connecting one none."""
        if bool(connected.getsockname()) != (refuses == "target"):
            return real(connected)
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        try:
            return real(connected)
        finally:
            monkeypatch.undo()
            install()

    def install() -> None:
        monkeypatch.setattr(local, "is_same_user", is_same_user)

    install()
    async with transports(cache, cache, join_timeout_s=0.3) as (sending, receiving):
        source_cut, target_cut = cuts(cache, cache)
        pending = await receiving.prepare("", target_cut)
        outcomes = await asyncio.gather(
            sending.join(pending.params, source_cut), pending.established(), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [ConnectionLost, ConnectionLost]
        assert ("another user" in str(outcomes[0])) == (refuses == "source")
        assert "timed out" not in str(outcomes[0]), "it was sent away"
        await pending.close()


# --- what the system may refuse ---


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def without_descriptors(call: Callable[..., Any]) -> Callable[..., Any]:
    def limited(*arguments: Any) -> Any:
        with no_descriptors_left():
            return call(*arguments)

    return limited


def refusing(code: int) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return refuse


def break_descriptors_of_the_source(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shm, "send_pool", without_descriptors(send_pool))


def break_descriptors_of_the_target(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shm, "receive_pool", without_descriptors(receive_pool))


def break_mapping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shared_pool.mmap, "mmap", refusing(errno.ENOMEM))


def break_passing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shared_pool.socket, "send_fds", refusing(errno.ENOSPC))


@pytest.mark.parametrize(
    "fault",
    [break_descriptors_of_the_source, break_descriptors_of_the_target, break_mapping, break_passing],
)
async def test_what_the_system_refuses_is_a_lost_connection_on_both_sides(
    fault: Callable[[pytest.MonkeyPatch], None],
) -> None:
    source, target = filled(make_cache()), make_cache()
    async with transports(source, target, join_timeout_s=5.0) as (sending, receiving):
        source_cut, target_cut = cuts(source, target)
        pending = await receiving.prepare("", target_cut)
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            outcomes = await asyncio.gather(
                sending.join(pending.params, source_cut), pending.established(), return_exceptions=True
            )
        assert [type(outcome) for outcome in outcomes] == [ConnectionLost, ConnectionLost]
        pending = await receiving.prepare("", target_cut)
        links = await asyncio.gather(sending.join(pending.params, source_cut), pending.established())
        assert await move(links, [Segment(0, (1,))], [Segment(0, (1,))])


async def test_without_a_descriptor_for_the_socket_neither_end_can_begin() -> None:
    cache = make_cache()
    async with transports(cache, cache) as (sending, receiving):
        with no_descriptors_left():
            with pytest.raises(ConnectionLost, match="can't listen"):
                await receiving.prepare("", cuts(cache, cache)[1])
            with pytest.raises(ConnectionLost, match="can't join"):
                await sending.join({"name": "00", "token": "00"}, cuts(cache, cache)[0])


# --- what a peer may claim of its cache ---


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in (left, right):
        end.settimeout(5)
    with left, right:
        yield left, right


def describe(cache: SharedKVCache, **changes: Any) -> PoolDescription:
    offsets = tuple(cache.layer_offset(layer) for layer in range(NUM_LAYERS))
    described = PoolDescription(cache.layout, cache.num_blocks, offsets, 0, 2, 4)
    return msgspec.structs.replace(described, **changes)


def hand_over(end: socket.socket, descriptors: list[int], payload: bytes) -> None:
    socket.send_fds(end, [len(payload).to_bytes(4, "little")], descriptors)
    end.sendall(payload)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_blocks": 17}, "not all within"),
        ({"num_blocks": 0}, "has 0 blocks"),
        ({"num_blocks": 2**40}, "blocks"),
        ({"layer_offsets": (0, 4096, -8)}, "not all within"),
        ({"layer_offsets": (0, 4096, 2**60)}, "not all within"),
        ({"layer_offsets": (0,)}, "places 1 of its 3 layers"),
        ({"first_head": 1}, "heads that its cache has not"),
        ({"first_head": -1}, "heads that its cache has not"),
        ({"num_heads": 1}, "other units"),
        ({"unit_tokens": 2}, "other units"),
    ],
)
def test_a_pool_that_is_not_as_agreed_is_not_mapped(
    changes: dict[str, Any], complaint: str, ends: tuple[socket.socket, socket.socket]
) -> None:
    cache = make_cache(16, head_dim=32)
    before = belongings()
    hand_over(ends[0], [cache.memory_fd], msgspec.msgpack.encode(describe(cache, **changes)))
    with pytest.raises(ProtocolError, match=complaint):
        receive_pool(ends[1], cuts(cache, cache)[1])
    assert_nothing_is_left(before)


@pytest.mark.parametrize(("field", "value"), [("model", "other"), ("dtype", "bfloat16"), ("num_layers", 0)])
def test_a_pool_of_another_layout_is_not_mapped(
    field: str, value: Any, ends: tuple[socket.socket, socket.socket]
) -> None:
    cache = make_cache()
    described = describe(cache, layout=msgspec.structs.replace(cache.layout, **{field: value}))
    hand_over(ends[0], [cache.memory_fd], msgspec.msgpack.encode(described))
    with pytest.raises(ProtocolError, match="doesn't fit"):
        receive_pool(ends[1], cuts(cache, cache)[1])


def test_memory_that_could_shrink_is_not_mapped(ends: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    cache = make_cache()
    size = os.fstat(cache.memory_fd).st_size
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    ordinary = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    try:
        for descriptor, complaint in ((unsealed, "could shrink"), (ordinary, "not a memfd|could shrink")):
            os.ftruncate(descriptor, size)
            hand_over(ends[0], [descriptor], msgspec.msgpack.encode(describe(cache)))
            with pytest.raises(ProtocolError, match=complaint):
                receive_pool(ends[1], cuts(cache, cache)[1])
    finally:
        os.close(unsealed)
        os.close(ordinary)


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [(b"\xc1", "not described"), (msgspec.msgpack.encode([1, 2]), "not described"), (bytes(70_000), "in 70000 bytes")],
)
def test_a_pool_that_is_not_described_is_not_mapped(
    payload: bytes, complaint: str, ends: tuple[socket.socket, socket.socket]
) -> None:
    cache = make_cache()
    hand_over(ends[0], [cache.memory_fd], payload)
    with pytest.raises(ProtocolError, match=complaint):
        receive_pool(ends[1], cuts(cache, cache)[1])


def test_a_peer_that_sends_no_descriptor_or_leaves_is_noticed(ends: tuple[socket.socket, socket.socket]) -> None:
    cache = make_cache()
    ends[0].sendall(b"\0\0\0\0")
    with pytest.raises(ProtocolError, match="no descriptor"):
        receive_pool(ends[1], cuts(cache, cache)[1])
    ends[0].close()
    with pytest.raises(ConnectionResetError):
        receive_pool(ends[1], cuts(cache, cache)[1])


def test_the_target_gets_a_descriptor_by_which_it_cannot_write(ends: tuple[socket.socket, socket.socket]) -> None:
    cache = make_cache()
    send_pool(ends[0], cache, cuts(cache, cache)[0])
    _, (descriptor,), _, _ = socket.recv_fds(ends[1], 4, 1)
    try:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def test_a_cache_that_is_closed_is_not_handed_out(ends: tuple[socket.socket, socket.socket]) -> None:
    cache = make_cache()
    source_cut = cuts(cache, cache)[0]
    cache.close()
    with pytest.raises(ValueError, match="closed"):
        send_pool(ends[0], cache, source_cut)


# --- two processes ---

_SOURCE = """
import asyncio, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from test_shm import Segment, ShmTransport, cuts, filled, make_cache

async def main():
    cache = filled(make_cache(head_dim=2048))
    link = await ShmTransport(cache).join(json.loads(sys.stdin.readline()), cuts(cache, cache)[0])
    await link.send([Segment(1, (3, 4, 5))], 7)
    print("sent", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_source_that_is_killed_after_it_sent_harms_nobody() -> None:
    target = make_cache(head_dim=2048)
    cut = cuts(target, target)[1]
    before = belongings()
    transport = ShmTransport(target, join_timeout_s=60.0)
    pending = await transport.prepare("", cut)
    folders = [str(Path(__file__).parent), *(entry for entry in sys.path if entry)]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _SOURCE, msgspec.json.encode(folders).decode()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(msgspec.json.encode(pending.params) + b"\n")
        receiver = await pending.established()
        assert await child.stdout.readline() == b"sent\n"
    finally:
        child.kill()
        await child.communicate()
    assert await receiver.receive([Segment(1, (0, 1, 2))], 7), "the memory lives as long as it is mapped"
    assert torch.equal(target.tensors[1][:3], filled(make_cache(head_dim=2048)).tensors[1][3:6])
    with pytest.raises(ConnectionLost):
        await receiver.receive([Segment(1, (0, 1, 2))], 7)
    await transport.close()
    del receiver, pending, transport
    assert_nothing_is_left(before)
