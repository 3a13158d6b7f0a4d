"""Offers: callbacks of waiting requests, single use of tickets, and KV that is kept while its request waits for room.

Callbacks are tested on virtual time, beside a receiver that does nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from tests.rigs.kv_pair import fails
from tests.rigs.played import played_by
from tests.worker.worker_rig import DECODE, LAYERS, PREFILL, SECRET, TRANSFERS, make_parts
from twostroke.kvtransfer.ranks import AwaitedOffers
from twostroke.kvtransfer.transfer import OutgoingTransfer, UsedTickets
from twostroke.protocol.kv_layout import NO_BLOCK, RankCut
from twostroke.protocol.messages import Abort, Awaited, Hello, KVHello, Offer, Reach, Welcome
from twostroke.protocol.requests import Address, Peer, SampledToken, Ticket, mint_ticket
from twostroke.simulator.memory_network import MemoryConnection, MemoryFabric
from twostroke.simulator.memory_transport import KINDS, LinkFabric, Parts
from twostroke.simulator.virtual_loop import run_virtually

TICKET = Ticket(b"a transfer", "r", Peer("source", 1), Peer("target", 2), (Address("host", 1),))


class FakeReceiver:
    """The part of a KVReceiver that AwaitedOffers uses."""

    def __init__(self) -> None:
        self.offers: set[bytes] = set()
        self.refused: list[Ticket] = []
        self.on_offer: Callable[[bytes], None] = lambda _: None

    def has_offer(self, ticket: Ticket) -> bool:
        return ticket.transfer_id in self.offers

    def offer(self, transfer_id: bytes) -> None:
        self.offers.add(transfer_id)
        self.on_offer(transfer_id)

    def refuse_offer(self, ticket: Ticket) -> None:
        self.refused.append(ticket)


Steps = list[tuple[float, str]]
"""Events of the offer or of its waiting request, each with its time in seconds."""


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        pytest.param([(0, "comes"), (0, "wait")], [("came", 0.0)], id="here already"),
        pytest.param([(0, "wait"), (1, "comes"), (0, "comes")], [("came", 1.0)], id="told once"),
        pytest.param([(0, "wait"), (0, "another comes"), (1, "comes")], [("came", 1.0)], id="and no other"),
        pytest.param([(0, "wait"), (0, "declined"), (1, "comes")], [("came", 1.0)], id="declined by somebody else"),
        pytest.param([(0, "wait"), (3, "comes")], [("missing", 2.0)], id="too late"),
        pytest.param([(0, "wait"), (0, "refuse"), (0, "comes"), (0, "refuse")], [], id="refused"),
        pytest.param([(0, "wait for ever"), (1000, "comes"), (0, "comes")], [("came", 1000.0)], id="without a limit"),
    ],
)
def test_a_wait_of_two_seconds_for_an_offer_ends_with_one_call(steps: Steps, told: list[tuple[str, float]]) -> None:
    heard: list[tuple[str, float]] = []

    async def main() -> None:
        loop, receiver = asyncio.get_running_loop(), FakeReceiver()
        offers = AwaitedOffers(receiver)  # type: ignore[arg-type]

        def hear(what: str) -> Callable[[], None]:
            return lambda: heard.append((what, loop.time()))

        happens: dict[str, Callable[[], None]] = {
            "comes": lambda: receiver.offer(TICKET.transfer_id),
            "another comes": lambda: receiver.offer(b"another"),
            "declined": lambda: receiver.on_offer(TICKET.transfer_id),
            "refuse": lambda: offers.refuse_offer(TICKET),
            "wait": lambda: offers.await_offer(TICKET, 2.0, on_offered=hear("came"), on_missing=hear("missing")),
            "wait for ever": lambda: offers.await_offer(TICKET, on_offered=hear("came")),
        }
        for after_s, what in steps:
            await asyncio.sleep(after_s)
            happens[what]()
        await asyncio.sleep(10.0)
        assert len(receiver.refused) == sum(what == "refuse" for _, what in steps)

    run_virtually(main())
    assert heard == told


def test_old_ones_are_forgotten_by_time_and_by_number() -> None:
    now = 0.0
    used = UsedTickets(lambda: now, 10, 3)
    assert used.use(b"a")
    now = 9.0
    assert used.use(b"b")
    now = 10.0
    assert used.use(b"c")
    assert b"a" not in used
    assert used.use(b"d")
    assert used.use(b"e")
    assert b"b" not in used
    assert b"c" in used


NUM_TOKENS, BLOCKS, TOKEN = 8, [0, 1], SampledToken(42)
LONG_S = 20 * TRANSFERS.progress_s


@dataclass
class Ends:
    """A source and a target, one rank each."""

    source: Parts
    target: Parts
    address: Address
    fabric: MemoryFabric

    def ticket(self) -> Ticket:
        return mint_ticket(SECRET, "r", PREFILL, DECODE, (self.address,))

    async def connect_rank(self, rank: int) -> MemoryConnection:
        """A connection of one of a source's two ranks, whose messages the test writes itself."""
        connection = await self.fabric.at("prefill-0").connect(self.address)
        layout = replace(self.target.store.layout, tp_size=2)
        connection.send(Hello(PREFILL, DECODE, KVHello(layout, rank, "raw", Reach(KINDS, "one machine", "cpu"))))
        assert isinstance(await connection.receive(), Welcome)
        return connection

    async def offer(self, ticket: Ticket) -> OutgoingTransfer:
        """All of it is computed. Returns when the offer has had time to arrive."""
        transfer = self.source.sender.begin_transfer(ticket, NUM_TOKENS, BLOCKS, NUM_TOKENS)
        transfer.commit(TOKEN)
        await asyncio.sleep(0.5)
        return transfer

    async def keep(self) -> tuple[Ticket, OutgoingTransfer]:
        """An offer whose request waits for room, and has done so for long."""
        ticket = self.ticket()
        out = await self.offer(ticket)
        self.target.receiver.keep_offer(ticket)
        await asyncio.sleep(LONG_S)
        return ticket, out

    async def assert_arrives(self, ticket: Ticket, out: OutgoingTransfer) -> None:
        assert await self.target.receiver.expect_transfer(ticket, BLOCKS, NUM_TOKENS, 0).verified() == TOKEN
        await out.done()


def play(script: Callable[[Ends], Awaitable[None]]) -> None:
    """Run `script` on virtual time; afterwards neither side keeps anything."""

    async def main() -> None:
        fabric, links = MemoryFabric(seed=1), LinkFabric(bytes_per_s=1e5)
        source, target = make_parts(PREFILL, fabric, links), make_parts(DECODE, fabric, links)
        (address,) = await target.receiver.start("target")
        try:
            await script(Ends(source, target, address, fabric))
        finally:
            for parts in (source, target):
                await parts.close()
        assert (target.receiver._offers, target.receiver._kept) == ({}, set())
        assert source.sender.stats.in_flight == target.receiver.stats.in_flight == 0

    run_virtually(main(), limit_s=10 * LONG_S)


@pytest.mark.parametrize("first", ["offer", "request"])
@played_by(play)
async def test_an_offer_whose_request_waits_for_room_is_kept_until_it_is_granted(ends: Ends, first: str) -> None:
    ticket = ends.ticket()
    if first == "request":  # as it is on a target of several ranks, and where a source has several
        ends.target.receiver.keep_offer(ticket)
    out = await ends.offer(ticket)
    ends.target.receiver.keep_offer(ticket)
    await asyncio.sleep(LONG_S)
    assert not out.ended
    assert ends.target.receiver.offered_tokens(ticket.transfer_id) == NUM_TOKENS
    await ends.assert_arrives(ticket, out)


@played_by(play)
async def test_an_offer_whose_request_never_arrives_is_not_kept(ends: Ends) -> None:
    out = await ends.offer(ends.ticket())
    await fails(out.done(), match=r"no request for the offer|did not grant")
    assert asyncio.get_running_loop().time() < TRANSFERS.progress_s + 1.0


@played_by(play)
async def test_a_kept_offer_ends_when_its_request_is_given_up(ends: Ends) -> None:
    ticket, out = await ends.keep()
    ends.target.receiver.refuse_offer(ticket)
    await fails(out.done(), match="has given the request up")


@played_by(play)
async def test_a_kept_offer_ends_when_its_source_gives_it_up(ends: Ends) -> None:
    ticket, out = await ends.keep()
    out.abort("its blocks are needed")
    await asyncio.sleep(0.5)
    assert ends.target.receiver.offered_tokens(ticket.transfer_id) is None
    await fails(
        ends.target.receiver.expect_transfer(ticket, BLOCKS, NUM_TOKENS, 0).verified(),
        match="has given the transfer up already",
    )


@pytest.mark.parametrize("lost", ["source", "target"])
@played_by(play)
async def test_a_kept_offer_ends_with_its_connection(ends: Ends, lost: str) -> None:
    ticket, out = await ends.keep()
    await (ends.source.sender.close() if lost == "source" else ends.target.receiver.close())
    await fails(out.done())
    await asyncio.sleep(0.5)
    assert ends.target.receiver.offered_tokens(ticket.transfer_id) is None
    ends.target.receiver.refuse_offer(ticket)


@played_by(play)
async def test_an_offer_is_kept_no_longer_for_a_request_whose_ticket_turns_out_to_be_forged(ends: Ends) -> None:
    ticket, out = await ends.keep()
    forged = replace(ticket, mac=bytes(16))
    await fails(ends.target.receiver.expect_transfer(forged, BLOCKS, NUM_TOKENS, 0).verified(), match="signature")
    await fails(out.done(), match="no request for the offer")


@played_by(play)
async def test_what_a_rank_offers_that_is_no_part_of_the_transfer_is_not_kept(ends: Ends) -> None:
    unknown = await ends.connect_rank(1)
    ticket = ends.ticket()
    unknown.send(Offer(ticket, NUM_TOKENS))
    out = await ends.offer(ticket)
    ends.target.receiver.keep_offer(ticket)
    await ends.assert_arrives(ticket, out)
    assert ends.target.receiver.offered_tokens(ticket.transfer_id) is None
    while not isinstance(message := await unknown.receive(), Abort):
        pass
    assert message == Abort(ticket.transfer_id, "nothing is expected of this rank")
    await unknown.close()


@played_by(play)
async def test_a_source_that_hears_of_no_room_twice_and_too_late_sends_all_the_same(ends: Ends) -> None:
    ticket = ends.ticket()
    out = await ends.offer(ticket)
    for _ in range(2):
        ends.target.receiver.keep_offer(ticket)
    incoming = ends.target.receiver.expect_transfer(ticket, BLOCKS, NUM_TOKENS, 0)
    assert await incoming.verified() == TOKEN
    await out.done()


@played_by(play)
async def test_all_ranks_offers_of_one_transfer_are_kept_as_one(ends: Ends) -> None:
    ends.target.receiver.config = TRANSFERS.model_copy(update={"max_pending_offers": 1})
    ticket = mint_ticket(SECRET, "r", PREFILL, DECODE, (ends.address,), source_cut=RankCut(2))
    ranks = [await ends.connect_rank(rank) for rank in range(2)]
    for rank in ranks:
        rank.send(Offer(ticket, NUM_TOKENS))
    await asyncio.sleep(0.5)
    ends.target.receiver.keep_offer(ticket)
    for rank in ranks:
        while not isinstance(message := await rank.receive(), Abort | Awaited):
            pass
        assert message == Awaited(ticket.transfer_id)
        await rank.close()
    ends.target.receiver.refuse_offer(ticket)


@pytest.mark.parametrize(("skipped", "is_sent"), [(0, False), (4, True), (8, True)])
@played_by(play)
async def test_a_source_that_lacks_a_prefixs_beginning_sends_the_rest_to_none_who_lacks_it_too(
    ends: Ends, skipped: int, is_sent: bool
) -> None:
    ends.source.pool.allocate(2)
    ends.target.pool.allocate(2)
    ticket = ends.ticket()
    out = ends.source.sender.begin_transfer(ticket, NUM_TOKENS, [NO_BLOCK, 1], NUM_TOKENS, min_skip_tokens=4)
    out.commit(TOKEN)
    incoming = ends.target.receiver.expect_transfer(ticket, BLOCKS, NUM_TOKENS, skipped)
    if is_sent:
        assert await incoming.verified() == TOKEN
        await out.done()
    else:
        await fails(incoming.verified(), match="the target has 0 tokens of 4 that are not here")
        await fails(out.done(), match="not here")
    assert asyncio.get_running_loop().time() < 1.0, "the target learns at once that it has to compute"
    assert ends.source.store.violations == ends.target.store.violations == []
    assert ends.target.receiver.stats.bytes == (NUM_TOKENS - skipped) * 8 * LAYERS * is_sent
