"""The shm transport's links: one copy between two caches on this machine, by the target alone.

How two ends of the shm transport find each other: who is let in, and what the system may refuse.
"""

import asyncio
import contextlib
import errno
import os
import random
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.rigs.shm_links import (
    NUM_LAYERS,
    assert_nothing_is_left,
    belongings,
    copy_of,
    cuts,
    filled,
    link,
    make_cache,
    move,
    same,
    transports,
)
from twostroke.kvtransfer.rules.layout import Cut, Segment, plan_lanes
from twostroke.kvtransfer.transports import local, shared_pool, shm
from twostroke.kvtransfer.transports.shared_pool import receive_pool, send_pool
from twostroke.kvtransfer.transports.shm import ShmTransport
from twostroke.protocol.errors import ConnectionLost, ProtocolError

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


# --- two processes ---

_SOURCE = """
import asyncio, json, sys
sys.path[:0] = json.loads(sys.argv[1])
from twostroke.kvtransfer.rules.layout import Segment
from twostroke.kvtransfer.transports.shm import ShmTransport
from tests.rigs.shm_links import cuts, filled, make_cache

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
    folders = [str(Path(__file__).parents[3]), *(entry for entry in sys.path if entry)]
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
