"""The prefill worker alone: its replies, its transfers, and what becomes of blocks when things end early."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.rigs.played import played_by
from tests.simulation.fake_model import expected_tokens
from tests.worker.worker_rig import LAYERS, PREFILL, ROUTER, Rig, a_request, begin, play
from twostroke.kvtransfer.ranks import Outgoing
from twostroke.protocol.errors import (
    EpochMismatch,
    RequestError,
    TicketRefused,
    WorkerLost,
)
from twostroke.protocol.messages import Cancel
from twostroke.protocol.requests import Address, LogContext, Peer, PrefillReply, Ticket

NOWHERE = Address("nobody", 1)
"""A ticket for a decode worker there: the transfer fails as soon as the connection is refused."""


@played_by(play, role="prefill", max_step_tokens=7)
async def test_the_reply_has_the_first_token_and_blocks_go_back(rig: Rig) -> None:
    reply: PrefillReply = await rig.worker.prefill(a_request(40), None)
    assert [token.token_id for token in reply.event.tokens] == expected_tokens(a_request(40), (0,) * LAYERS)[:1]
    assert (reply.event.index, reply.event.finish_reason) == (0, None)
    assert reply.num_cached_tokens == 0
    assert reply.prefill_s > 0
    assert rig.pool.owned_blocks == 0
    again = await rig.worker.prefill(a_request(40), None)
    assert again.event.tokens == reply.event.tokens
    assert again.num_cached_tokens == 39


@pytest.mark.parametrize("how", ["nobody listens", "nobody answers"])
def test_the_router_is_told_once_that_kv_was_not_sent_and_the_log_says_why(how: str, caplog: pytest.LogCaptureFixture):
    async def script(rig: Rig) -> None:
        address = NOWHERE if how == "nobody listens" else await rig.silent_peer("decode-0")
        request = a_request(log_context=LogContext("a client's"))
        reply = await rig.worker.prefill(request, rig.ticket(target_address=address))
        assert reply.event.error is None
        if how == "nobody answers":
            assert (rig.pool.owned_blocks, rig.worker.stats().num_transfers) == (3, 1)
        await rig.worker.drain()
        await asyncio.sleep(0.1)
        assert rig.not_sent == ["r"]
        assert rig.worker.stats().transfers_failed == 1
        assert rig.pool.owned_blocks == 0

    play(script, role="prefill")
    why = "nobody listens" if how == "nobody listens" else "the target's welcome took longer than 2 s"
    (line,) = [record for record in caplog.records if record.getMessage().startswith("the KV was not sent: ")]
    assert why in line.getMessage()
    assert line.log_context == LogContext("a client's")


@played_by(play, role="prefill", max_step_tokens=1)
async def test_the_router_is_told_before_the_reply_where_the_transfer_has_failed_by_then(rig: Rig) -> None:
    call = begin(rig.worker.prefill(a_request(60), rig.ticket(target_address=NOWHERE)))
    while not rig.not_sent:  # noqa: ASYNC110  (virtual time)
        await asyncio.sleep(0.0005)
    assert not call.done()
    await call


@pytest.mark.parametrize("is_computed", [False, True])
@played_by(play, role="prefill", max_step_tokens=4)
async def test_a_transfer_that_its_router_cancels_is_not_reported(rig: Rig, is_computed: bool) -> None:
    address = await rig.silent_peer("decode-0")
    call = begin(rig.worker.prefill(a_request(), rig.ticket(target_address=address)))
    if is_computed:
        await call
    else:
        await asyncio.sleep(0.0015)
        assert not call.done()
    rig.router.send(Cancel("r"))
    await asyncio.gather(call, return_exceptions=True)
    await rig.worker.drain()
    await asyncio.sleep(0.1)
    assert rig.worker.stats().transfers_failed == 1
    assert rig.not_sent == []


@pytest.mark.parametrize(
    ("prefill", "name", "error"),
    [
        (Peer(PREFILL.worker_id, 12), "r", EpochMismatch),
        (Peer("prefill-9", 11), "r", TicketRefused),
        (PREFILL, "another", TicketRefused),
    ],
)
@played_by(play, role="prefill")
async def test_a_ticket_for_another_worker_is_refused(
    rig: Rig, prefill: Peer, name: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await rig.worker.prefill(a_request(), rig.ticket(name, prefill))


@pytest.mark.parametrize("how", ["call", "message", "router"])
@played_by(play, role="prefill", max_step_tokens=4)
async def test_a_request_that_is_cancelled_while_it_sends_gives_its_blocks_back(rig: Rig, how: str) -> None:
    address = await rig.silent_peer("decode-0")
    call = begin(rig.worker.prefill(a_request(40), rig.ticket(target_address=address)))
    await asyncio.sleep(0.0015)
    assert rig.pool.owned_blocks > 0
    if how == "call":
        call.cancel()
    elif how == "message":
        rig.router.send(Cancel("r"))
    else:
        rig.fabric.cut(ROUTER)
    (outcome,) = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(outcome, asyncio.CancelledError if how == "call" else WorkerLost)
    await asyncio.sleep(0.1)
    assert rig.pool.owned_blocks == 0
    assert rig.worker.stats().aborted_requests >= 1


@pytest.mark.parametrize("how", ["message", "router"])
@played_by(play, role="prefill")
async def test_a_transfer_still_running_after_the_reply_ends_with_its_request(rig: Rig, how: str) -> None:
    address = await rig.silent_peer("decode-0")
    await rig.worker.prefill(a_request(), rig.ticket(target_address=address))
    assert rig.pool.owned_blocks == 3
    with pytest.raises(RequestError, match="here already"):
        await rig.worker.prefill(a_request(), None)
    if how == "message":
        rig.router.send(Cancel("r"))
    else:
        rig.fabric.cut(ROUTER)
    await asyncio.sleep(0.1)
    assert rig.pool.owned_blocks == 0
    stats = rig.worker.stats()
    assert (stats.finished_requests, stats.aborted_requests, stats.transfers_failed) == (1, 0, 1)
    await rig.worker.drain()


def test_what_is_still_to_be_copied_is_not_sent_before_the_step_that_copies_it(monkeypatch: pytest.MonkeyPatch):
    async def script(rig: Rig) -> None:
        await rig.worker.prefill(a_request(40), None)
        opened: list[int] = []
        open_transfer = rig.worker._deps.sender.begin_transfer

        def seen(ticket: Ticket, num_tokens: int, block_ids: Sequence[int], num_ready: int) -> Outgoing:
            opened.append(num_ready)
            return open_transfer(ticket, num_tokens, block_ids, num_ready)

        monkeypatch.setattr(rig.worker._deps.sender, "begin_transfer", seen)
        await rig.worker.prefill(a_request(40, "again"), rig.ticket("again", target_address=NOWHERE))
        assert rig.engine.num_copied == 1
        assert opened == [36], "of 39 tokens that are computed, three lie in another's block"

    play(script, role="prefill")
