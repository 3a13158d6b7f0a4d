"""A target whose messages a source can make nothing of."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from transfer_harness import SECRET, TOKEN, D, P, Pair, make_pair, settle

from twostroke.protocol.errors import ConnectionLost, TransferFailed
from twostroke.protocol.messages import (
    Awaited,
    Commit,
    Damaged,
    Grant,
    KVWelcome,
    LinkReady,
    Offer,
    Ping,
    Verified,
    Welcome,
)
from twostroke.protocol.network import Connection, TcpNetwork
from twostroke.protocol.requests import Ticket, mint_ticket


@contextlib.asynccontextmanager
async def raw_target(pair: Pair, *answers: Any, pings: int = 0) -> AsyncIterator[Ticket]:
    """A target that grants, and after the commit sends `answers` (made of the transfer's id); a ticket for it.

    It says Ping so often before its Welcome.
    """

    async def serve(connection: Connection) -> None:
        await connection.receive()
        pending = await pair.transports[1].by_name["memory"].prepare("127.0.0.1", pair.target_cut)
        kv = KVWelcome(pair.target.layout, 0, "memory", "why", (), pending.params)
        for _ in range(pings):
            connection.send(Ping())
        connection.send(Welcome(D, kv))
        try:
            while True:
                message = await connection.receive()
                if isinstance(message, Offer):
                    connection.send(Grant(message.ticket.transfer_id, 0))
                if isinstance(message, Commit):
                    for answer in answers:
                        connection.send(answer(message.transfer_id))
        except ConnectionLost:
            await pending.close()

    listener = await TcpNetwork(SECRET).listen("127.0.0.1", serve)
    yield mint_ticket(SECRET, "r", P, D, (listener.address,))
    await listener.close()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda transfer_id: Damaged(transfer_id, 1, 0), "attempt 0 of chunk 1 is not out"),
        (lambda transfer_id: Damaged(transfer_id, -1, 0), "attempt 0 of chunk -1 is not out"),
        (lambda transfer_id: Damaged(transfer_id, 0, 1), "attempt 1 of chunk 0 is not out"),
        (lambda transfer_id: Damaged(transfer_id, 0, 2), "attempt 2 of chunk 0 is not out"),
        (lambda transfer_id: Grant(transfer_id, 0), "GRANT can't happen"),
        (lambda transfer_id: LinkReady(1, "memory", {}), "link 1 was not asked for"),
        (lambda transfer_id: Ping(), None),
    ],
)
async def test_a_targets_odd_answer_ends_the_transfer(answer: Any, text: str | None) -> None:
    async with make_pair() as pair, raw_target(pair, answer) as ticket:
        out = pair.sender.open(ticket, 4, [1], 4)
        out.commit(TOKEN)
        if text is None:
            await settle(lambda: out.lanes[0].state.name == "COMMITTED")
            out.abort("enough")
        with pytest.raises(TransferFailed, match=text or "enough"):
            await out.done()


async def test_a_target_that_says_too_late_or_of_nobody_that_it_waits_for_room_says_nothing() -> None:
    late = [Awaited, lambda _: Awaited(b"nobody's"), Verified, Awaited]
    async with make_pair() as pair, raw_target(pair, *late) as ticket:
        out = pair.sender.open(ticket, 4, [1], 4)
        out.commit(TOKEN)
        await out.done()


async def test_a_target_that_calls_a_chunk_damaged_twice_at_once_ends_the_transfer() -> None:
    async with make_pair() as pair:
        damaged = [lambda transfer_id: Damaged(transfer_id, 0, 0)] * 2
        async with raw_target(pair, *damaged) as ticket:
            out = pair.sender.open(ticket, 4, [1], 4)
            out.commit(TOKEN)
            with pytest.raises(TransferFailed, match="attempt 0 of chunk 0 is not out"):
                await out.done()


async def test_a_target_that_is_slow_to_prepare_its_link_may_ping_before_its_welcome() -> None:
    verified = [lambda transfer_id: Verified(transfer_id)]
    async with make_pair() as pair, raw_target(pair, *verified, pings=2) as ticket:
        out = pair.sender.open(ticket, 4, [1], 4)
        out.commit(TOKEN)
        await out.done()
