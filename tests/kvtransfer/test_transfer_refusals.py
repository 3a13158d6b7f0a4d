"""What a source or a target refuses: tickets, layouts and hellos that do not fit, and prefixes that are not there."""

from typing import Any

import pytest
from faulty_pair import NUM_TOKENS, assert_a_transfer_works, begin, finish, hello
from transfer_harness import BytesStore, D, P, make_pair, reach, settle

from twostroke.kvtransfer.config import TransferConfig
from twostroke.kvtransfer.rules.lifecycle import SenderState
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.messages import Hello, KVHello, Refuse
from twostroke.protocol.requests import Peer

# --- prefixes that are not there ---


async def test_a_source_that_has_nothing_tells_a_target_that_waits() -> None:
    async with make_pair() as pair:
        ticket = pair.ticket()
        incoming = pair.receiver.expect(ticket, [4, 5], NUM_TOKENS, 0)
        pair.sender.decline(ticket, "nothing is cached")
        with pytest.raises(TransferFailed, match="gave up: nothing is cached"):
            await incoming.verified()
        await assert_a_transfer_works(pair)


async def test_a_source_that_has_nothing_tells_a_target_that_has_not_asked_its_receiver_yet() -> None:
    async with make_pair() as pair:
        heard: list[bytes] = []
        pair.receiver.on_offer = heard.append
        ticket = pair.ticket()
        assert not pair.receiver.has_offer(ticket)
        pair.sender.decline(ticket, "nothing is cached")
        await settle(lambda: heard == [ticket.transfer_id])
        assert pair.receiver.has_offer(ticket)
        assert pair.receiver.offered_tokens(ticket.transfer_id) is None
        with pytest.raises(TransferFailed, match="given the transfer up already"):
            await pair.receiver.expect(ticket, [4, 5], NUM_TOKENS, 0).verified()
        with pytest.raises(ValueError, match="made out to"):
            pair.sender.decline(pair.ticket(source=Peer("prefill-9", 1)), "not mine")


async def test_an_offer_that_waits_tells_its_tokens_until_it_is_withdrawn() -> None:
    async with make_pair() as pair:
        heard: list[bytes] = []
        pair.receiver.on_offer = heard.append
        out = pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        transfer_id = out.ticket.transfer_id
        await settle(lambda: heard == [transfer_id])
        assert pair.receiver.offered_tokens(transfer_id) == NUM_TOKENS
        out.abort("the client left")
        await settle(lambda: pair.receiver.offered_tokens(transfer_id) is None)
        assert pair.receiver.has_offer(out.ticket)


# --- tickets, epochs, fingerprints ---


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("signature", "signature is wrong"),
        ("other decode epoch", "the ticket's target is decode-0 in its epoch 63"),
        ("other decode worker", "the ticket's target is decode-1, not decode-0"),
    ],
)
async def test_a_ticket_that_is_forged_or_made_out_to_others_fails_at_the_target(fault: str, text: str) -> None:
    async with make_pair() as pair:
        ticket = {
            "signature": pair.ticket(secret=b"another secret"),
            "other decode epoch": pair.ticket(target=Peer("decode-0", 99)),
            "other decode worker": pair.ticket(target=Peer("decode-1", 22)),
        }[fault]
        with pytest.raises(TransferFailed, match=text):
            await pair.receiver.expect(ticket, [4, 5], NUM_TOKENS, 0).verified()
        out = pair.sender.open(ticket, NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match=r"signature is wrong|and this is decode-0 of epoch 16"):
            await out.done()


async def test_a_source_does_not_use_another_ones_ticket() -> None:
    async with make_pair() as pair:
        out = pair.sender.open(pair.ticket(source=Peer("prefill-0", 12)), NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="made out to"):
            await out.done()
        assert not pair.sender._tasks


async def test_a_ticket_is_good_for_one_transfer() -> None:
    async with make_pair() as pair:
        out, incoming = begin(pair)
        finish(out)
        await incoming.verified()
        await out.done()
        again = pair.receiver.expect(out.ticket, [8, 9], NUM_TOKENS, 0)
        with pytest.raises(TransferFailed, match="used before"):
            await again.verified()
        once_more = pair.sender.open(out.ticket, NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="used before"):
            await once_more.done()


async def test_another_layout_is_refused_with_both_values_and_the_transfers_say_so() -> None:
    source = BytesStore(dtype="float16")
    async with make_pair(source=source, target=BytesStore(dtype="float32")) as pair:
        out = pair.sender.open(pair.ticket(), NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="the KV dtype differs: float16 at the source, float32 at the target"):
            await out.done()


async def test_other_token_counts_fail_both_sides() -> None:
    async with make_pair() as pair:
        ticket = pair.ticket()
        incoming = pair.receiver.expect(ticket, [4, 5], NUM_TOKENS - 1, 0)
        out = pair.sender.open(ticket, NUM_TOKENS, [0, 1], 0)
        for waiting in (incoming.verified(), out.done()):
            with pytest.raises(TransferFailed, match="8 tokens are offered, 7 expected"):
                await waiting
        await assert_a_transfer_works(pair)


async def test_too_many_offers_without_a_request_are_refused() -> None:
    async with make_pair(config=TransferConfig(max_pending_offers=1)) as pair:
        first = pair.sender.open(pair.ticket("a"), NUM_TOKENS, [0, 1], 0)
        second = pair.sender.open(pair.ticket("b"), NUM_TOKENS, [0, 1], 0)
        with pytest.raises(TransferFailed, match="too many offers"):
            await second.done()
        assert first.lanes[0].state is SenderState.OFFERED


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"receiver": Peer("decode-0", 23)},
            "you look for decode-0 of epoch 17, and this is decode-0 of epoch 16",
        ),
        (
            {"receiver": Peer("decode-9", 22)},
            "you look for decode-9 of epoch 16, and this is decode-0 of epoch 16",
        ),
        ({"model": "g"}, "the model differs: g at the source, f at the target"),
        ({"tp_size": 2, "num_kv_heads": 2}, "the number of KV heads differs: 2 at the source, 1 at the target"),
        ({"names": ("other",)}, "the source offers other, the target memory"),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused_with_both_values(fields: dict[str, Any], text: str) -> None:
    async with make_pair() as pair:
        connection = await pair.network.connect(pair.address)
        connection.send(hello(pair, **fields))
        refusal = await connection.receive()
        assert isinstance(refusal, Refuse)
        assert text in refusal.reason
        await connection.close()


@pytest.mark.parametrize("rank", [-1, 1, 1 << 40])
async def test_a_rank_that_has_nothing_for_this_one_is_refused(rank: int) -> None:
    async with make_pair() as pair:
        connection = await pair.network.connect(pair.address)
        connection.send(Hello(P, D, KVHello(pair.source.layout, rank, "raw", reach("memory"))))
        assert await connection.receive() == Refuse(f"rank {rank} of 1 has nothing for rank 0 of 1")
        await connection.close()


async def test_a_token_channels_hello_is_refused() -> None:
    async with make_pair() as pair:
        connection = await pair.network.connect(pair.address)
        connection.send(Hello(P, D))
        assert await connection.receive() == Refuse("this is no token channel")
        await connection.close()
