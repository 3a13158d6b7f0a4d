"""Who is told of an offer, or of its absence, and who is not: on virtual time, beside a receiver that does nothing."""

import asyncio
from collections.abc import Callable
from typing import Any

from tests.simulation.virtual_loop import run_virtually
from twostroke.kvtransfer.offers import AwaitedOffers
from twostroke.protocol.requests import Address, Peer, Ticket

TICKET = Ticket(b"a transfer", "r", Peer("source", 1), Peer("target", 2), (Address("host", 1),))


class FakeReceiver:
    """What AwaitedOffers uses of a KVReceiver."""

    def __init__(self) -> None:
        self.offers: set[bytes] = set()
        self.refused: list[Ticket] = []
        self.on_offer: Callable[[bytes], None] = lambda _: None

    def has_offer(self, ticket: Ticket) -> bool:
        return ticket.transfer_id in self.offers

    def offer(self, transfer_id: bytes) -> None:
        self.offers.add(transfer_id)
        self.on_offer(transfer_id)

    def refuse(self, ticket: Ticket) -> None:
        self.refused.append(ticket)


def told_of(script: Callable[[FakeReceiver, AwaitedOffers, Callable[[], None]], Any]) -> list[tuple[str, float]]:
    """What `script` hears, and when, if an offer is waited for 2 s. It is given a function that begins to wait."""
    told: list[tuple[str, float]] = []

    async def main() -> None:
        loop, receiver = asyncio.get_running_loop(), FakeReceiver()
        offers = AwaitedOffers(receiver)  # type: ignore[arg-type]

        def wait() -> None:
            offers.wait(
                TICKET,
                2.0,
                came=lambda: told.append(("came", loop.time())),
                missing=lambda: told.append(("missing", loop.time())),
            )

        await script(receiver, offers, wait)
        await asyncio.sleep(10.0)

    run_virtually(main())
    return told


def test_an_offer_that_is_here_is_told_at_once():
    async def script(receiver: FakeReceiver, _: AwaitedOffers, wait: Callable[[], None]) -> None:
        receiver.offers.add(TICKET.transfer_id)
        wait()

    assert told_of(script) == [("came", 0.0)]


def test_an_offer_that_comes_is_told_once_and_no_other_is():
    async def script(receiver: FakeReceiver, _: AwaitedOffers, wait: Callable[[], None]) -> None:
        wait()
        receiver.offer(b"another")
        await asyncio.sleep(1.0)
        receiver.offer(TICKET.transfer_id)
        receiver.offer(TICKET.transfer_id)

    assert told_of(script) == [("came", 1.0)]


def test_what_somebody_else_declines_is_still_waited_for():
    async def script(receiver: FakeReceiver, _: AwaitedOffers, wait: Callable[[], None]) -> None:
        wait()
        receiver.on_offer(TICKET.transfer_id)
        await asyncio.sleep(1.0)
        receiver.offer(TICKET.transfer_id)

    assert told_of(script) == [("came", 1.0)]


def test_an_offer_that_does_not_come_is_missing_and_comes_too_late():
    async def script(receiver: FakeReceiver, _: AwaitedOffers, wait: Callable[[], None]) -> None:
        wait()
        await asyncio.sleep(3.0)
        receiver.offer(TICKET.transfer_id)

    assert told_of(script) == [("missing", 2.0)]


def test_after_a_refusal_nothing_is_told_and_the_receiver_refuses_too():
    async def script(receiver: FakeReceiver, offers: AwaitedOffers, wait: Callable[[], None]) -> None:
        wait()
        offers.refuse(TICKET)
        receiver.offer(TICKET.transfer_id)
        offers.refuse(TICKET)
        assert receiver.refused == [TICKET, TICKET]

    assert told_of(script) == []


def test_without_a_limit_an_offer_is_waited_for_however_long_it_takes():
    async def script(receiver: FakeReceiver, offers: AwaitedOffers, _: Callable[[], None]) -> None:
        came: list[float] = []
        offers.wait(TICKET, came=lambda: came.append(asyncio.get_running_loop().time()))
        await asyncio.sleep(1000.0)
        receiver.offer(TICKET.transfer_id)
        receiver.offer(TICKET.transfer_id)
        assert came == [1000.0]

    assert told_of(script) == []
