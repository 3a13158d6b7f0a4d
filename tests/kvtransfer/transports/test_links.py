"""The common behaviour of links of all transports, and the choice of transports."""

import asyncio
import contextlib
import random
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.rigs.kv_links import ALL_NAMES, SharedBytesStore, blocks, linked, move, two
from tests.rigs.kv_pair import BytesStore, rank_shard
from twostroke.kvtransfer.config import TransferConfig, TransportName
from twostroke.kvtransfer.layout import Segment
from twostroke.kvtransfer.transports import make_transports
from twostroke.protocol.errors import ConfigError, ConnectionLost

ALL = pytest.mark.parametrize("name", ALL_NAMES)
ON_SOCKETS = pytest.mark.parametrize("name", ["shm", "tcp"])


@ALL
@pytest.mark.parametrize(("num_blocks", "head_dim"), [(1, 1), (2500, 4), (40, 8192)])
async def test_blocks_arrive_in_the_order_of_both_tables(name: str, num_blocks: int, head_dim: int) -> None:
    source, target = (SharedBytesStore(2, num_blocks, head_dim) for _ in range(2))
    source.fill(1)
    async with linked(name, source, target) as ends:
        tables = [
            [tuple(random.Random(seed).sample(range(num_blocks), num_blocks)) for seed in pair]
            for pair in ((1, 2), (3, 4))
        ]
        for seed, layers in ((0, (0,)), (2**64 - 1, (1, 0))):
            chunks = [[Segment(layer, tables[side][layer]) for layer in layers] for side in range(2)]
            assert await move(ends, chunks[0], chunks[1], seed)
            for layer in layers:
                for from_id, to_id in zip(tables[0][layer], tables[1][layer], strict=True):
                    assert source.block(layer, from_id) == target.block(layer, to_id)


@ALL
async def test_heads_and_blocks_of_other_sizes_are_filled_where_they_belong(name: str) -> None:
    source = SharedBytesStore(1, 40, 512, num_kv_heads=4, block_size=16, tp_size=2)
    target = SharedBytesStore(1, 160, 512, num_kv_heads=4, block_size=4)
    source.fill(1)
    source_cut, target_cut = rank_shard(source.layout, 1, 1, 4, "raw"), rank_shard(target.layout, 3, 1, 4, "raw")
    order = tuple(random.Random(1).sample(range(160), 160))
    async with linked(name, source, target, source_cut, target_cut) as ends:
        assert await move(ends, [Segment(0, order)], [Segment(0, tuple(range(160)))])
    size = 512 * 2  # of a row: one token of one head
    for to_id, unit_id in enumerate(order):
        block, part = divmod(unit_id, 4)
        for kind in range(2):
            start = ((block * 2 + kind) * 2 + 1) * 16 * size + part * 4 * size
            end = ((to_id * 2 + kind) * 4 + 3) * 4 * size
            assert target.layers[0][end : end + 4 * size] == source.layers[0][start : start + 4 * size]
    untouched = target.layers[0][: 3 * 4 * size]  # heads 0 to 2 of K in block 0
    assert untouched == bytes(len(untouched))


@ALL
async def test_many_calls_under_way_are_carried_out_in_their_order(name: str) -> None:
    source, target = SharedBytesStore(1, 64, 2048), SharedBytesStore(1, 64, 2048)
    source.fill(1)
    draw = random.Random(5)
    sizes = [draw.choice([1, 2, 30, 64]) for _ in range(40)]  # some inline, some in parts
    async with linked(name, source, target) as (sender, receiver):

        async def call(make_call: Callable[[int, list[Segment]], object], seed: int) -> list[object]:
            under_way: list[asyncio.Future[object]] = []
            results: list[object] = []
            order = random.Random(seed)
            for seed, size in enumerate(sizes):
                segments = [Segment(0, tuple(random.Random(seed).sample(range(64), size)))]
                under_way.append(asyncio.ensure_future(make_call(seed, segments)))  # type: ignore[arg-type]
                while len(under_way) > order.randrange(3):
                    results.append(await under_way.pop(0))
            return results + [await each for each in under_way]

        _, intact = await asyncio.gather(
            call(lambda seed, segments: sender.send(segments, seed), 1),
            call(lambda seed, segments: receiver.receive(segments, seed), 2),
        )
        assert intact == [True] * len(sizes)
    touched = {unit for seed, size in enumerate(sizes) for unit in random.Random(seed).sample(range(64), size)}
    assert all(source.block(0, unit) == target.block(0, unit) for unit in touched)


@ALL
async def test_what_is_discarded_leaves_the_stream_in_step(name: str) -> None:
    source, target = SharedBytesStore(1, 8, 20_000), SharedBytesStore(1, 8, 20_000)
    source.fill(1)
    async with linked(name, source, target) as (sender, receiver):
        await asyncio.gather(sender.send([Segment(0, (0, 1, 2, 3, 4, 5))], 1), receiver.discard(6))
        assert target.copy() == [bytes(len(target.layers[0]))]
        assert await move((sender, receiver), [Segment(0, (7,))], [Segment(0, (2,))])
        assert target.block(0, 2) == source.block(0, 7)


@ALL
@pytest.mark.parametrize("num_blocks", [2, 64])
async def test_a_chunk_with_another_seed_or_another_chunks_bytes_has_a_wrong_checksum(
    name: str, num_blocks: int
) -> None:
    source, target = SharedBytesStore(1, 64, 2048), SharedBytesStore(1, 64, 2048)
    source.fill(1)
    chunk = [Segment(0, tuple(range(num_blocks)))]
    async with linked(name, source, target) as (sender, receiver):
        for seeded, expected in ((1, 2), (2**63, 2**63 + 2**40), (5, 5)):
            _, has_right_checksum = await asyncio.gather(sender.send(chunk, seeded), receiver.receive(chunk, expected))
            assert has_right_checksum == (seeded == expected), "the stream stays in step"
        swapped = await asyncio.gather(
            sender.send(chunk, 6), sender.send(chunk, 7), receiver.receive(chunk, 7), receiver.receive(chunk, 6)
        )
        assert swapped[2:] == [False, False]


@ALL
async def test_units_that_a_store_has_not_break_the_link(name: str) -> None:
    source, target = SharedBytesStore(1, 64, 2048), SharedBytesStore(1, 64, 2048)
    async with linked(name, source, target) as (sender, _):
        with pytest.raises((ValueError, ConnectionLost), match="not all within"):
            await sender.send([Segment(0, (64,))], 1)
        with pytest.raises(ConnectionLost):
            await sender.send([Segment(0, (1,))], 1)


@ALL
async def test_a_cancelled_receive_breaks_the_link_and_late_bytes_go_nowhere(name: str) -> None:
    source, target = SharedBytesStore(1, 8, 16_384), SharedBytesStore(1, 8, 16_384)
    source.fill(1)
    async with linked(name, source, target) as (sender, receiver):
        receive = asyncio.create_task(receiver.receive([Segment(0, (0, 1, 2, 3))], 1))
        behind = asyncio.create_task(receiver.receive([Segment(0, (4, 5))], 2))
        await asyncio.wait([receive], timeout=0.02)
        receive.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receive
        await receiver.close()
        with pytest.raises(ConnectionLost):
            await behind
        with pytest.raises(ConnectionLost, match="closed"):
            await receiver.receive([Segment(0, (0,))], 3)
        send = asyncio.create_task(sender.send([Segment(0, (4, 5, 6, 7))], 1))
        await asyncio.wait([send], timeout=0.05)
        await sender.close()
        await asyncio.wait([send])
        assert send.cancelled() or isinstance(send.exception(), ConnectionLost | None)
        assert target.copy() == [bytes(len(target.layers[0]))]


@ALL
async def test_a_peer_that_is_gone_breaks_the_link(name: str) -> None:
    source, target = SharedBytesStore(1, 8, 16_384), SharedBytesStore(1, 8, 16_384)
    async with linked(name, source, target) as (sender, receiver):
        await sender.close()
        for size in (1, 3):
            with pytest.raises(ConnectionLost):
                await receiver.receive([Segment(0, tuple(range(size)))], 1)
        await receiver.close()
        await receiver.close()


@ALL
async def test_a_peer_that_does_not_join_is_not_awaited_for_ever(name: str) -> None:
    store = SharedBytesStore()
    async with two(name, store, store, join_timeout_s=0.2) as (_, receiving):
        pending = await receiving.prepare("127.0.0.1", blocks(store))
        with pytest.raises(ConnectionLost):
            await pending.established()
        await pending.close()


@ALL
async def test_a_pending_link_may_be_given_up_while_it_is_awaited(name: str) -> None:
    store = SharedBytesStore()
    async with two(name, store, store, join_timeout_s=30) as (_, receiving):
        pending = await receiving.prepare("127.0.0.1", blocks(store))
        waiting = asyncio.create_task(pending.established())
        await asyncio.wait([waiting], timeout=0.02)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await pending.close()


@ALL
async def test_parameters_of_another_transport_are_refused(name: str) -> None:
    store = SharedBytesStore()
    async with two(name, store, store) as (sending, _):
        with pytest.raises(ConnectionLost, match="not those of"):
            await sending.join({"segment": "x"}, blocks(store))


def _address(name: str, params: Mapping[str, Any]) -> Any:
    """Address of the listener with these `params`."""
    return f"\0twostroke-kv-{params['name']}" if name == "shm" else (params["host"], params["port"])


@ON_SOCKETS
async def test_only_the_peer_with_the_token_gets_the_link_however_many_connect_first(name: str) -> None:
    source, target = SharedBytesStore(), SharedBytesStore()
    source.fill(1)
    shard = blocks(source)
    async with two(name, source, target) as (sending, receiving):
        pending = await receiving.prepare("127.0.0.1", shard)
        where = pending.params
        unknown_peers = [socket.socket(socket.AF_UNIX if name == "shm" else socket.AF_INET) for _ in range(3)]
        for unknown in unknown_peers:
            unknown.connect(_address(name, where))
        zeros = "A" * 43 + "="
        for wrong, complaint in (
            ({"token": zeros}, "can't join"),
            ({"token": "no"}, "not those of"),
            ({"streams": 0} if name == "tcp" else {"token": 5}, "not those of"),
            ({"port": 1} if name == "tcp" else {"name": "nobody"}, "can't join"),
        ):
            with pytest.raises(ConnectionLost, match=complaint):
                await sending.join({**where, **wrong}, shard)
        ends = await asyncio.gather(sending.join(where, shard), pending.established())
        assert await move(ends, [Segment(0, (1,))], [Segment(0, (2,))])
        assert target.block(0, 2) == source.block(0, 1)
        with pytest.raises(ConnectionLost):
            await sending.join(where, shard)
        for unknown in unknown_peers:
            assert unknown.recv(1) == b"", "sent away once the peer had come"
            unknown.close()


@ON_SOCKETS
@pytest.mark.parametrize("pauses", [1, 2, 3])
async def test_a_listener_that_closes_while_a_peer_connects_closes_the_connection(
    name: str, pauses: int, recwarn: pytest.WarningsRecorder
) -> None:
    faults: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    store = SharedBytesStore()
    async with two(name, store, store) as (_, receiving):
        pending = await receiving.prepare("127.0.0.1", blocks(store))
        with socket.socket(socket.AF_UNIX if name == "shm" else socket.AF_INET) as peer:
            await asyncio.sleep(0)
            peer.connect(_address(name, pending.params))
            for _ in range(pauses):  # 1: the loop knows of the peer, and calls this test before the listener
                await asyncio.sleep(0)
            await pending.close()
            peer.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert peer.recv(1) == b""
    assert not faults
    assert not [str(one.message) for one in recwarn if issubclass(one.category, ResourceWarning)]


@ON_SOCKETS
async def test_a_transport_that_is_closed_closes_its_listeners(name: str) -> None:
    store = SharedBytesStore()
    async with two(name, store, store) as (sending, receiving):
        pending = await receiving.prepare("127.0.0.1", blocks(store))
        waiting = asyncio.create_task(pending.established())
        await asyncio.sleep(0)
        await receiving.close()
        with pytest.raises(ConnectionLost, match="given up"):
            await waiting
        with pytest.raises(ConnectionLost, match="can't join"):
            await sending.join(pending.params, blocks(store))


class GpuStore:
    """One that says it is on a GPU."""

    layout = BytesStore().layout
    rank = 0
    num_blocks = 1
    device = "cuda:0"

    def layer_tensor(self, layer: int) -> object:
        raise NotImplementedError


def test_a_store_gets_all_transports_that_it_can_do_best_first() -> None:
    assert make_transports(TransferConfig(), BytesStore()).reach.transports == ("tcp",)
    mapped = make_transports(TransferConfig(), SharedBytesStore())
    assert mapped.reach.transports == tuple(mapped.by_name) == ("shm", "tcp")
    assert (mapped.reach.device, mapped.reach.is_configured) == ("cpu", False)
    assert make_transports(TransferConfig(transport="tcp"), SharedBytesStore()).reach.is_configured
    assert make_transports(TransferConfig(transport="tcp"), SharedBytesStore()).reach.transports == ("tcp",)
    assert make_transports(TransferConfig(transport="torch_distributed"), BytesStore()).reach.transports == (
        "torch_distributed",
    )


@pytest.mark.parametrize(
    ("choice", "store", "way_out"),
    [
        ("shm", BytesStore(), "set the transport to auto or tcp"),
        ("tcp", GpuStore(), "set the transport to auto"),
        ("shm", GpuStore(), "set the transport to auto"),
    ],
)
def test_a_transport_that_can_not_be_had_is_refused_with_the_way_out(
    choice: TransportName, store: BytesStore | GpuStore, way_out: str
) -> None:
    with pytest.raises(ConfigError, match=way_out):
        make_transports(TransferConfig(transport=choice), store)


def test_processes_of_one_machine_say_the_same_machine() -> None:
    code = (
        "from tests.rigs.kv_pair import BytesStore\n"
        "from twostroke.kvtransfer.config import TransferConfig\n"
        "from twostroke.kvtransfer.transports import make_transports\n"
        "print(make_transports(TransferConfig(), BytesStore()).reach.machine)"
    )
    theirs = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    assert theirs == make_transports(TransferConfig(), BytesStore()).reach.machine != ""


def test_torch_and_numba_are_imported_only_for_what_needs_them() -> None:
    code = (
        "import sys, twostroke.kvtransfer.sender, twostroke.kvtransfer.receiver, twostroke.kvtransfer.transports.tcp;"
        "sys.exit(bool({'torch', 'numba'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
