"""Sender and receiver together, over real sockets, when nothing goes wrong.

Seeds of chunks.
"""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Sequence
from typing import Any

import msgspec
import pytest

from tests.rigs.kv_faulty_pair import EACH, FaultyLink, FaultyTransport
from tests.rigs.kv_pair import BLOCK_BYTES, BLOCK_SIZE, TOKEN, BytesStore, D, Pair, fails, make_pair, settle
from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.layout import Segment
from twostroke.kvtransfer.link import CHECKSUM_BYTES, Transport, chunk_seed
from twostroke.kvtransfer.transfer import OutgoingTransfer
from twostroke.kvtransfer.transports.tcp import TcpLink
from twostroke.protocol.messages import Chunk, Run
from twostroke.protocol.requests import Peer


def compute(out: OutgoingTransfer, num_layers: int, *ends: int) -> None:
    """Report the layers of chunks that end at these tokens, as an engine would."""
    for end in ends:
        for layer in range(num_layers):
            out.layer_ready(layer, end)


async def arrives(
    pair: Pair,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    num_tokens: int,
    *ends: int,
    skip: int = 0,
    ready: int = 0,
) -> int:
    """Make a whole transfer, computed in chunks that end at `ends`, and check it; returns how many chunks were sent.

    `ready` tokens are there from the start.
    """
    ticket = pair.ticket()
    incoming = pair.receiver.expect_transfer(ticket, target_ids, num_tokens, skip)
    out = pair.sender.begin_transfer(ticket, num_tokens, source_ids, ready)
    (rank_pair,) = out.pairs.values()
    compute(out, pair.source.layout.num_layers, *ends)
    out.commit(TOKEN)
    assert await incoming.verified() == TOKEN
    await out.done()
    assert_arrived(pair, source_ids, target_ids, skip // BLOCK_SIZE)
    return rank_pair.num_chunks


def assert_arrived(pair: Pair, source_ids: Sequence[int], target_ids: Sequence[int], skip: int = 0) -> None:
    for layer in range(pair.source.layout.num_layers):
        for source_id, target_id in list(zip(source_ids, target_ids, strict=True))[skip:]:
            assert pair.source.block(layer, source_id) == pair.target.block(layer, target_id)


@EACH
async def test_every_block_arrives_in_its_place_with_the_first_token(transport: str) -> None:
    async with make_pair(transport) as pair:
        pair.source.fill(1)
        await arrives(pair, [4, 0, 1], [7, 8, 3], 10, 4, 9, 10)
        untouched = set(range(32)) - {7, 8, 3}
        assert all(pair.target.block(layer, block) == bytes(96) for layer in range(3) for block in untouched)
        num_bytes = 3 * 3 * 96
        assert (pair.sender.stats.bytes, pair.receiver.stats.bytes) == (num_bytes, num_bytes)
        assert (pair.sender.stats.done, pair.receiver.stats.done) == (1, 1)


@EACH
async def test_layers_with_a_window_send_what_the_next_token_attends_to_from_blocks_that_move_along(
    transport: str,
) -> None:
    """Layers 0 and 2 have a window of 6: of 18 tokens the next one attends to those from 13 on, in rows 3 and 4."""
    source, target = (BytesStore(windows=(6, 0, 6)) for _ in range(2))
    async with make_pair(transport, source=source, target=target) as pair:
        source.fill(5)
        ticket = pair.ticket()
        # A row is a block of layer 1, which keeps all, one of layer 0, and one of layer 2.
        there = [0, -1, -1, 1, -1, -1, 2, -1, -1, 3, 13, 23, 4, 14, 24]
        incoming = pair.receiver.expect_transfer(ticket, there, 18, 4)
        here = [10, 20, 30, 11, 21, 31, 12, -1, -1, 13, -1, -1, 14, -1, -1]
        out = pair.sender.begin_transfer(ticket, 18, here, 0)
        compute(out, 3, 8)
        here = [10, -1, -1, 11, -1, -1, 12, 20, 30, 13, 21, 31, 14, 22, 1]
        out.windows_moved(here)
        compute(out, 3, 18)
        out.commit(TOKEN)
        assert await incoming.verified() == TOKEN
        await out.done()
        assert pair.receiver.stats.bytes == (4 + 2 + 2) * source.block_bytes
        for mine, its in zip(here[3:], there[3:], strict=True):
            if its >= 0:
                assert source.block(0, mine) == target.block(0, its)
        untouched = set(range(32)) - set(there[3:])
        assert all(target.block(0, block) == bytes(96) for block in untouched)


@EACH
async def test_many_transfers_share_one_connection(transport: str) -> None:
    async with make_pair(transport) as pair:
        pair.source.fill(2)
        order = list(range(10))
        random.Random(3).shuffle(order)
        tickets = [pair.ticket(str(index)) for index in range(10)]
        outs = [
            pair.sender.begin_transfer(tickets[index], 12, [3 * index, 3 * index + 1, 3 * index + 2], 0)
            for index in range(10)
        ]
        incomings = [
            pair.receiver.expect_transfer(tickets[i], [31 - 3 * i, 30 - 3 * i, 29 - 3 * i], 12, 0) for i in range(10)
        ]
        for end in (5, 12):
            for index in order:
                compute(outs[index], 3, end)
        for index in order:
            outs[index].commit(TOKEN)
        await asyncio.gather(*(incoming.verified() for incoming in incomings), *(out.done() for out in outs))
        for i in range(10):
            assert_arrived(pair, [3 * i, 3 * i + 1, 3 * i + 2], [31 - 3 * i, 30 - 3 * i, 29 - 3 * i])
        assert len(pair.sender._tasks) == 1


async def test_a_prefix_that_the_target_has_is_not_sent() -> None:
    async with make_pair() as pair:
        pair.source.fill(1)
        pair.target.fill(2)
        before = pair.target.block(0, 5)
        await arrives(pair, [0, 1, 2], [5, 6, 7], 12, 12, skip=8, ready=4)
        assert pair.target.block(0, 5) == before
        assert pair.sender.stats.bytes == 3 * 96


async def test_a_prompt_that_is_all_there_needs_no_chunk() -> None:
    async with make_pair() as pair:
        await arrives(pair, [0, 1], [5, 6], 7, skip=7, ready=7)
        assert pair.receiver.stats.bytes == 0


@EACH
async def test_everything_waits_in_the_blocks_until_a_late_grant(transport: str) -> None:
    async with make_pair(transport) as pair:
        pair.source.fill(1)
        ticket = pair.ticket()
        out = pair.sender.begin_transfer(ticket, 10, [4, 0, 1], 0)
        rank_pair = out.pairs[0]
        compute(out, 3, 4, 8, 10)
        out.commit(TOKEN)
        waiter = asyncio.create_task(out.done())
        await asyncio.wait([waiter], timeout=0.05)
        assert not waiter.done()
        incoming = pair.receiver.expect_transfer(ticket, [7, 8, 3], 10, 0)
        assert await incoming.verified() == TOKEN
        await waiter
        assert_arrived(pair, [4, 0, 1], [7, 8, 3])
        assert rank_pair.num_chunks == 1, "all layers in one"


async def test_a_pulled_prefix_has_no_first_token() -> None:
    async with make_pair() as pair:
        pair.source.fill(1)
        ticket = pair.ticket()
        incoming = pair.receiver.expect_transfer(ticket, [5, 6], 8, 0)
        out = pair.sender.begin_transfer(ticket, 8, [0, 1], 8)
        out.commit(None)
        assert await incoming.verified() is None
        await out.done()
        assert_arrived(pair, [0, 1], [5, 6])


async def test_transfers_take_turns_by_chunk_so_a_short_prompt_waits_for_no_long_one() -> None:
    source, target = BytesStore(1, 512), BytesStore(1, 512)
    config = TransferConfig(max_chunk_bytes=8 * BLOCK_BYTES, lease_s=20)
    blocks = {"long": range(200), "other": range(200, 400), "short": range(400, 432)}
    begun: list[int] = []
    sent: list[str] = []
    recording: list[FaultyTransport] = []

    class Recorded(FaultyLink):
        async def send(self, segments: Sequence[Segment], seed: int) -> None:
            begun.append(seed)
            await super().send(segments, seed)
            sent.extend(name for name, ids in blocks.items() if segments[0].unit_ids[0] in ids)

    def record(inner: Transport) -> Transport:
        recording.append(FaultyTransport(inner, Recorded))
        recording[0].gate.shut()
        return recording[0]

    async with make_pair(source=source, target=target, config=config, wrap_source=record) as pair:
        source.fill(1)
        outs, waiting = [], []
        for name, ids in blocks.items():
            ticket, num_tokens = pair.ticket(name), len(ids) * BLOCK_SIZE
            waiting.append(pair.receiver.expect_transfer(ticket, ids, num_tokens, 0).verified())
            outs.append(pair.sender.begin_transfer(ticket, num_tokens, ids, num_tokens))
            outs[-1].commit(TOKEN)
            await settle(lambda: len(begun) == 2 and outs[-1].pairs[0].has_chunk)
        recording[0].gate.open.set()
        await asyncio.gather(*waiting, *(out.done() for out in outs))
        assert_arrived(pair, list(range(432)), list(range(432)))
    assert sent[:2] == ["long"] * 2, "they were under way before the others came"
    assert sorted(sent[2:5]) == sorted(sent[5:8]) == sorted(sent[8:11]) == sorted(sent[11:14]) == sorted(blocks)
    assert "short" not in sent[14:]
    assert all(a != b for a, b in itertools.pairwise(sent[14:50]))


@pytest.mark.parametrize("side", ["source", "target"])
async def test_two_chunks_are_under_way_on_a_link_at_a_time(side: str) -> None:
    """The wire has work while the event loop turns from one to the next; more would be unfair to others."""
    source, target = BytesStore(1, 64), BytesStore(1, 64)
    under_way, most = 0, 0

    class Watched(FaultyLink):
        async def send(self, segments: Sequence[Segment], seed: int) -> None:
            await watch(super().send(segments, seed))

        async def receive(self, segments: Sequence[Segment], seed: int) -> bool:
            return bool(await watch(super().receive(segments, seed)))

    async def watch(call: Awaitable[Any]) -> Any:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            await asyncio.sleep(0)
            return await call
        finally:
            under_way -= 1

    wraps: dict[str, Any] = {f"wrap_{side}": lambda inner: FaultyTransport(inner, Watched)}
    config = TransferConfig(max_chunk_bytes=4 * BLOCK_BYTES, lease_s=20)
    async with make_pair(source=source, target=target, config=config, **wraps) as pair:
        source.fill(1)
        await arrives(pair, range(64), range(64), 256, ready=256)
        assert most == 2


async def test_the_sender_reports_the_link_of_each_pair() -> None:
    async with make_pair() as pair:
        assert pair.sender.links() == ()
        await arrives(pair, [1], [1], 4, ready=4)
        (report,) = pair.sender.links()
        assert (report.target, report.transport) == (D, "tcp")
        assert report.why
        assert any(text.startswith("shm") for text in report.missing)
        assert not any("sockets" in text for text in report.missing)
        await pair.receiver.close()
        await settle(lambda: not pair.sender.links())


async def test_the_reason_why_a_link_is_slow_is_reported_with_what_a_better_one_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TcpLink, "shortfall", "it goes over sockets")
    async with make_pair() as pair:
        await arrives(pair, [1], [1], 4, ready=4)
        (report,) = pair.sender.links()
        assert report.missing[-1] == "it goes over sockets"


async def test_a_long_layer_is_cut_into_chunks_of_the_configured_size() -> None:
    source, target = BytesStore(1, 64, 60), BytesStore(1, 64, 60)
    async with make_pair(source=source, target=target, config=TransferConfig(max_chunk_bytes=3500)) as pair:
        source.fill(1)
        assert await arrives(pair, range(64), range(64), 256, ready=256) == 22


async def test_a_cancelled_waiter_leaves_the_transfer_as_it_is() -> None:
    async with make_pair() as pair:
        ticket = pair.ticket()
        incoming = pair.receiver.expect_transfer(ticket, [1], 4, 0)
        out = pair.sender.begin_transfer(ticket, 4, [1], 0)
        waiters = [asyncio.create_task(out.done()), asyncio.create_task(incoming.verified())]
        await asyncio.wait(waiters, timeout=0.02)
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)
        compute(out, 3, 4)
        out.commit(TOKEN)
        await incoming.verified()
        await out.done()


async def test_a_connection_rests_and_goes_on_beyond_its_lease() -> None:
    config = TransferConfig(lease_s=0.15)
    async with make_pair(config=config) as pair:
        for _ in range(2):
            await arrives(pair, [1], [1], 4, ready=4)
            (task,) = pair.sender._tasks
            await asyncio.wait([task], timeout=0.4)
            assert not task.done(), "pings keep it"


async def test_the_callers_mistakes_are_refused_at_once() -> None:
    async with make_pair() as pair:
        ticket = pair.ticket()
        with pytest.raises(ValueError, match="need 2 blocks"):
            pair.sender.begin_transfer(ticket, 5, [0], 0)
        with pytest.raises(ValueError, match="6 tokens are ready of 5"):
            pair.sender.begin_transfer(ticket, 5, [0, 1], 6)
        with pytest.raises(ValueError, match="5 tokens do not fit a table of 1 blocks"):
            pair.receiver.expect_transfer(ticket, [0], 5, 0)
        with pytest.raises(ValueError, match="5 tokens can't come with 6"):
            pair.receiver.expect_transfer(ticket, [0, 1], 5, 6)
        with pytest.raises(ValueError, match="end within a block"):
            pair.receiver.expect_transfer(ticket, [0, 1], 5, 3)
        with pytest.raises(ValueError, match="distinct blocks of 32: 0 is"):
            pair.receiver.expect_transfer(ticket, [0, 0], 5, 0)
        with pytest.raises(ValueError, match="distinct blocks of 32: 32 is"):
            pair.receiver.expect_transfer(ticket, [0, 32], 5, 0)
        out = pair.sender.begin_transfer(ticket, 5, [0, 1], 0)
        with pytest.raises(ValueError, match="before every layer"):
            out.commit(TOKEN)
        with pytest.raises(ValueError, match="6 tokens are ready of 5"):
            out.layer_ready(0, 6)
        out.abort("done with it")
        out.commit(TOKEN)
        out.layer_ready(0, 5)
        await fails(out.done(), match="done with it")


CHUNK = Chunk(b"t" * 16, 3, (Run(2, 0, 4), Run(3, 0, 4)), 4096)
SOURCE, TARGET = Peer("prefill-0", 2**63 + 5), Peer("decode-0", 9)


def test_the_seed_of_a_chunk_has_64_bits_that_both_sides_compute() -> None:
    seed = chunk_seed(CHUNK, SOURCE, TARGET)
    assert 0 <= seed < 2**64
    assert seed == chunk_seed(msgspec.structs.replace(CHUNK), SOURCE, TARGET)
    assert CHECKSUM_BYTES == 16


@pytest.mark.parametrize(
    ("changes", "peers"),
    [
        ({"transfer_id": b"u" * 16}, (SOURCE, TARGET)),
        ({"sequence": 4}, (SOURCE, TARGET)),
        ({"runs": (Run(3, 0, 4), Run(2, 0, 4))}, (SOURCE, TARGET)),
        ({"runs": (Run(2, 0, 4), Run(3, 1, 4))}, (SOURCE, TARGET)),
        ({"runs": (Run(2, 0, 4), Run(3, 0, 5))}, (SOURCE, TARGET)),
        ({"num_bytes": 4097}, (SOURCE, TARGET)),
        ({}, (SOURCE, Peer("decode-0", 10))),
        ({}, (Peer("prefill-0", 1), TARGET)),
        ({}, (TARGET, SOURCE)),
    ],
)
def test_the_seed_of_a_chunk_is_of_everything_that_its_message_says_and_of_both_epochs(
    changes: dict[str, object], peers: tuple[Peer, Peer]
) -> None:
    assert chunk_seed(msgspec.structs.replace(CHUNK, **changes), *peers) != chunk_seed(CHUNK, SOURCE, TARGET)
