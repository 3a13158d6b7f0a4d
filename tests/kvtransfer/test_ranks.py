"""Transfers of workers of several ranks: rank 0 leads, the others do as it says over real connections."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.kvtransfer.test_layout import LAYERS, Fleet, assert_prompt, block_table, layout_of, write_prompt
from tests.rigs.kv_pair import SECRET, TOKEN, D, P, fails, settle
from twostroke.kvtransfer.lifecycle import SenderState
from twostroke.kvtransfer.ranks import RankedReceiver, RankedSender, RankedTransfer, RankTransfers
from twostroke.kvtransfer.receiver import KVReceiver
from twostroke.kvtransfer.sender import KVSender
from twostroke.model.parallel.ranked_engine import RankConnections
from twostroke.protocol.errors import ConnectionLost, WorkerLost
from twostroke.protocol.kv_layout import NO_BLOCK
from twostroke.protocol.messages import RankFailed, RankHello, RankLoaded, StepEnded
from twostroke.protocol.network import Connection, TcpNetwork
from twostroke.protocol.requests import Address, Peer, SampledToken

HOST = "127.0.0.1"
TOKENS = 21
NETWORK = TcpNetwork(SECRET)


class OtherRank:
    """A rank other than 0: its connection and its part of the transfers. It has no engine."""

    def __init__(self, connection: Connection, sender: KVSender, receiver: KVReceiver, layers: range = range(LAYERS)):
        self.connection = connection
        self.transfers = RankTransfers(sender=sender, receiver=receiver, layers=layers, tell=connection.send)
        self.task = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        with contextlib.suppress(ConnectionLost):
            while True:
                message = await self.connection.receive()
                if not isinstance(message, StepEnded):
                    self.transfers.handle(message)


@contextlib.asynccontextmanager
async def led(worker: Peer, size: int) -> AsyncIterator[tuple[RankConnections, list[Connection]]]:
    """Rank 0's connections, and the other ends of them."""
    ranks = RankConnections(worker=worker, size=size, network=NETWORK)
    leader = await ranks.listen(HOST)
    others = [await NETWORK.connect(leader) for _ in ranks.others]
    for rank, connection in zip(ranks.others, others, strict=True):
        connection.send(RankHello(worker, rank))
        connection.send(RankLoaded(Address(HOST, rank)))
    assert await ranks.loaded() == tuple(Address(HOST, rank) for rank in ranks.others)
    try:
        yield ranks, others
    finally:
        await ranks.close()
        for connection in others:
            await connection.close()


class Workers:
    """A source of 2 ranks and a target of 4, with as many KV heads as the source has ranks, but what is led."""

    def __init__(self, fleet: Fleet, source: RankConnections, target: RankConnections, addresses: tuple[Address, ...]):
        self.fleet = fleet
        self.sender = RankedSender(fleet.senders[0], source, time.monotonic)
        self.receiver = RankedReceiver(fleet.receivers[0], addresses, target, time.monotonic)
        self.others: list[OtherRank] = []  # rank 1 of the source, then ranks 1 to 3 of the target
        self.source_ids = block_table(TOKENS, 4, 1)
        self.target_ids = block_table(TOKENS, 8, 2)

    def open(self, num_ready: int = 0) -> RankedTransfer:
        return self.sender.begin_transfer(self.fleet.ticket, TOKENS, self.source_ids, num_ready)

    def expect(self) -> Any:
        return self.receiver.expect_transfer(self.fleet.ticket, self.target_ids, TOKENS, 8)


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    source, target = layout_of(2, 2, 4), layout_of(4, 2, 8)
    async with (
        asyncio.timeout(30),
        Fleet(source, target) as fleet,
        led(P, 2) as (source_ranks, source_ends),
        led(D, 4) as (target_ranks, target_ends),
    ):
        for store in fleet.sources:
            write_prompt(store, block_table(TOKENS, 4, 1), TOKENS)
        made = Workers(fleet, source_ranks, target_ranks, fleet.ticket.target_addresses[1:])
        made.others = [OtherRank(source_ends[0], fleet.senders[1], fleet.receivers[0])]
        for end, receiver in zip(target_ends, fleet.receivers[1:], strict=True):
            made.others.append(OtherRank(end, fleet.senders[0], receiver))
        yield made
        for worker in (made.sender, made.receiver):
            await worker.close()
            assert worker.stats.in_flight == 0
        for other in made.others:
            other.task.cancel()
            await asyncio.gather(other.task, return_exceptions=True)
            await asyncio.gather(*other.transfers._tasks)


async def test_every_rank_gets_the_blocks_that_windows_have_reached(workers: Workers) -> None:
    workers.source_ids = (*workers.source_ids[:-1], NO_BLOCK)
    outgoing, other = workers.open(), workers.others[0].transfers
    await settle(lambda: bool(other._outgoing))
    (part,) = other._outgoing.values()
    assert part.block_ids[-1] == NO_BLOCK
    table = block_table(TOKENS, 4, 1)
    outgoing.windows_moved(table)
    await settle(lambda: part.block_ids == tuple(table))
    outgoing.abort("that was all")
    await fails(outgoing.done(), match="that was all")


async def test_kv_said_to_be_ready_with_two_steps_under_way_waits_for_both(workers: Workers) -> None:
    incoming, other = workers.expect(), workers.others[0].transfers
    other.step_began()
    other.step_began()
    outgoing = workers.open()
    for layer in range(LAYERS):
        outgoing.layer_ready(layer, TOKENS)
    await settle(lambda: bool(other._fed))
    other.step_ended()
    sent = workers.fleet.senders[1].stats
    await settle(lambda: workers.fleet.senders[0].stats.bytes > 0)
    assert (sent.bytes, len(other._fed)) == (0, 1)
    other.step_began()
    other.step_ended()
    assert not other._fed  # though a third one is under way
    outgoing.commit(TOKEN)
    assert await incoming.verified() == TOKEN
    await outgoing.done()


async def test_every_rank_sends_its_heads_once_it_has_computed_them_itself(workers: Workers) -> None:
    incoming, other = workers.expect(), workers.others[0].transfers
    other.step_began()
    outgoing = workers.open()
    for layer in range(LAYERS):
        outgoing.layer_ready(layer, TOKENS)  # rank 0's step is done, and rank 1's has hardly begun
    await settle(lambda: bool(other._fed))
    other.layer_done(0)
    sent = workers.fleet.senders[1]
    # The blocks from token 8 on go to two ranks, one after the other, which hold copies.
    first_layer = 2 * 4 * workers.fleet.sources[1].layout.block_bytes
    await settle(lambda: sent.stats.bytes >= first_layer)
    assert sent.stats.bytes == first_layer
    other.step_ended()
    outgoing.commit(TOKEN)
    assert await incoming.verified() == TOKEN
    await outgoing.done()
    assert sent.stats.bytes == LAYERS * first_layer
    for store in workers.fleet.targets:
        assert_prompt(store, workers.target_ids, range(8, TOKENS))
    for side, ends in ((workers.sender, workers.fleet.senders), (workers.receiver, workers.fleet.receivers)):
        assert (side.stats.done, side.stats.failed, side.stats.in_flight) == (1, 0, 0)
        assert side.stats.bytes == sum(end.stats.bytes for end in ends)


async def test_what_is_ready_when_no_step_is_under_way_is_sent_at_once(workers: Workers) -> None:
    incoming, outgoing = workers.expect(), workers.open()
    for layer in range(LAYERS):
        outgoing.layer_ready(layer, TOKENS)
    outgoing.commit(None)
    assert await incoming.verified() is None
    await outgoing.done()


async def test_a_part_that_fails_on_one_rank_is_given_up_on_all_of_both_workers(workers: Workers) -> None:
    incoming, outgoing = workers.expect(), workers.open(TOKENS)
    other = workers.others[0].transfers
    await settle(lambda: bool(other._outgoing))
    next(iter(other._outgoing.values())).abort("no more")
    await fails(outgoing.done(), match=r"no more \(on rank 1\)")
    await fails(incoming.verified())
    assert all(end.stats.in_flight == 0 for end in workers.fleet.senders)
    assert (workers.sender.stats.failed, workers.receiver.stats.failed) == (1, 1)


async def test_a_transfer_that_rank_0_gives_up_ends_everywhere(workers: Workers) -> None:
    incoming, outgoing = workers.expect(), workers.open()
    await incoming.cancel()
    await fails(outgoing.done(), match="the target gave up")
    assert all(end.stats.in_flight == 0 for end in workers.fleet.receivers)


async def test_a_lost_rank_ends_its_workers_transfers_present_and_future(workers: Workers) -> None:
    outgoing = workers.open()
    await workers.others[0].connection.close()
    await fails(outgoing.done(), match="rank 1 is lost")
    await fails(workers.open().done(), match="rank 1 is lost")
    assert workers.sender.stats.failed == 2


async def test_an_offer_that_is_refused_by_rank_0_is_refused_by_all(workers: Workers) -> None:
    outgoing = workers.open()
    workers.receiver.refuse_offer(workers.fleet.ticket)
    await fails(outgoing.done(), match="given the request up")


async def test_an_offer_that_is_kept_by_rank_0_is_kept_by_all(workers: Workers) -> None:
    workers.receiver.keep_offer(workers.fleet.ticket)
    own = workers.open(TOKENS)
    other = workers.others[0].transfers
    await settle(lambda: bool(other._outgoing))
    pairs = [rank_pair for part in (own._own, *other._outgoing.values()) for rank_pair in part.pairs.values()]
    assert len(pairs) == 4
    await settle(lambda: not any(rank_pair._deadline.runs for rank_pair in pairs))
    assert all(rank_pair.state is SenderState.OFFERED for rank_pair in pairs)
    incoming = workers.expect()
    own.commit(TOKEN)
    assert await incoming.verified() == TOKEN
    await own.done()
    assert not any(receiver._kept for receiver in workers.fleet.receivers)


async def test_first_tokens_that_differ_between_ranks_are_not_believed(workers: Workers) -> None:
    incoming = workers.expect()
    for rank, token in ((1, SampledToken(7)), (0, TOKEN), (2, TOKEN), (3, TOKEN)):
        incoming.part_ended(rank, None, token)
    await fails(incoming.verified(), match="different first tokens")
    for receiver in workers.fleet.receivers:  # whose parts have not ended
        await receiver.close()


async def test_a_rank_that_fails_tells_why() -> None:
    async with led(P, 3) as (ranks, others):
        others[1].send(RankFailed("out of memory"))
        assert await ranks.lost == "rank 2 failed: out of memory"
        with pytest.raises(WorkerLost, match="out of memory"):
            ranks.check()


@pytest.mark.parametrize("hello", [RankHello(D, 1), RankHello(P, 0), RankHello(P, 2), RankHello(P, 1), StepEnded()])
async def test_an_unexpected_rank_is_refused(hello: RankHello | StepEnded) -> None:
    async with led(P, 2) as (ranks, _):
        assert ranks._listener is not None
        unknown = await NETWORK.connect(ranks._listener.address)
        unknown.send(hello)
        await unknown.receive()  # a refusal
        with pytest.raises(ConnectionLost):
            await unknown.receive()
        await unknown.close()
        assert ranks.loss is None
