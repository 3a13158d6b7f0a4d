"""Which blocks a prefix's export references, and for how long."""

import asyncio
from collections.abc import Sequence

import pytest

from twostroke.protocol.blocks import chain_hashes
from twostroke.protocol.errors import TransferFailed
from twostroke.protocol.requests import Address, Peer, Ticket
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.pulls import PrefixExports, Transfers

TICKET = Ticket(b"a transfer", "r", Peer("source", 1), Peer("target", 2), (Address("host", 1),))
TOKENS = tuple(range(12))
SALT = b"tenant"


class FakeTransfer:
    """An outgoing transfer that ends when the test says so."""

    def __init__(self) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_tokens: list[object] = []

    def commit(self, first_token: object) -> None:
        self.first_tokens.append(first_token)

    async def done(self) -> None:
        await self.end


class FakeSender:
    """What PrefixExports uses of a KVSender."""

    def __init__(self) -> None:
        self.opened: list[tuple[Ticket, int, tuple[int, ...], int]] = []
        self.transfers: list[FakeTransfer] = []
        self.declined: list[Ticket] = []
        self.refusal: ValueError | None = None

    def open(self, ticket: Ticket, num_tokens: int, block_ids: Sequence[int], num_ready_tokens: int) -> FakeTransfer:
        if self.refusal is not None:
            raise self.refusal
        self.opened.append((ticket, num_tokens, tuple(block_ids), num_ready_tokens))
        self.transfers.append(FakeTransfer())
        return self.transfers[-1]

    def decline(self, ticket: Ticket, reason: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.declined.append(ticket)


class Scene:
    """Exports out of a pool of 8 blocks of 4 tokens, which has TOKENS cached."""

    def __init__(self) -> None:
        self.pool, self.sender, self.num_ended = BlockPool(8, 4), FakeSender(), 0
        self.transfers = Transfers(self.ended)
        self.exports = PrefixExports(sender=self.sender, pool=self.pool, transfers=self.transfers)  # type: ignore[arg-type]
        self.blocks = self.pool.allocate(3)
        for block_id, name in zip(self.blocks, chain_hashes(TOKENS, 4, SALT), strict=True):
            self.pool.publish(block_id, name)
        self.pool.release(self.blocks)

    def ended(self) -> None:
        self.num_ended += 1


@pytest.mark.parametrize(("length", "num_blocks"), [(13, 3), (100, 3), (12, 2), (9, 2), (5, 1)])
async def test_the_longest_cached_prefix_that_leaves_a_token_is_sent_whole_and_without_a_first_token(
    length: int, num_blocks: int
) -> None:
    scene = Scene()
    prompt = (*TOKENS, *range(200, 300))[:length]
    assert scene.exports.send(TICKET, prompt, SALT)
    num_tokens = 4 * num_blocks
    assert scene.sender.opened == [(TICKET, num_tokens, tuple(scene.blocks[:num_blocks]), num_tokens)]
    assert scene.sender.transfers[0].first_tokens == [None]
    assert scene.pool.owned_blocks == num_blocks
    scene.sender.transfers[0].end.set_result(None)
    await scene.transfers.ended()


@pytest.mark.parametrize("is_whole", [True, False])
async def test_blocks_are_referenced_until_the_transfer_ends_however_it_ends(is_whole: bool) -> None:
    scene = Scene()
    for _ in range(2):
        assert scene.exports.send(TICKET, (*TOKENS, 1), SALT)
    await asyncio.sleep(0)
    assert scene.transfers.is_busy
    for number, transfer in enumerate(scene.sender.transfers):
        assert (scene.pool.owned_blocks, scene.num_ended) == (3, number)
        if is_whole:
            transfer.end.set_result(None)
        else:
            transfer.end.set_exception(TransferFailed("a test wants it"))
        while scene.num_ended == number:  # noqa: ASYNC110  (a few turns of the loop)
            await asyncio.sleep(0)
    assert scene.pool.owned_blocks == 0
    assert not scene.transfers.is_busy
    assert len(scene.pool.names(0, scene.pool.num_blocks)) == 3, "they can be sent again"


@pytest.mark.parametrize(("tokens", "salt"), [(TOKENS, b""), ((5, *TOKENS), SALT), (TOKENS[:4], SALT), ((), SALT)])
async def test_where_nothing_is_cached_the_target_is_told(tokens: tuple[int, ...], salt: bytes) -> None:
    scene = Scene()
    assert not scene.exports.send(TICKET, tokens, salt)
    assert scene.sender.declined == [TICKET]
    assert not scene.transfers.is_busy


async def test_a_ticket_that_cannot_be_is_ignored_where_nothing_is_cached() -> None:
    scene = Scene()
    scene.sender.refusal = ValueError("not our ticket")
    assert not scene.exports.send(TICKET, TOKENS, b"")


async def test_no_reference_stays_where_a_transfer_cannot_be_opened() -> None:
    scene = Scene()
    scene.sender.refusal = ValueError("a test wants it")
    with pytest.raises(ValueError, match="a test wants it"):
        scene.exports.send(TICKET, (*TOKENS, 1), SALT)
    assert scene.pool.owned_blocks == 0
