"""Trial transfers: which blocks they take, and that these come back on every path."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tests.rigs.kv_pair import Pair, make_pair, settle
from twostroke.protocol.errors import RequestError, TransferFailed
from twostroke.protocol.kv_layout import KVLayout
from twostroke.protocol.requests import Peer, Ticket
from twostroke.worker.block_pool import BlockPool
from twostroke.worker.trials import LinkProbe

SOURCE, TARGET = Peer("p0", 1), Peer("d0", 2)
BLOCK = 4
LAYOUT = KVLayout("m", "float32", 2, 2, 8, BLOCK)


def tickets(count: int) -> list[Ticket]:
    return [Ticket(bytes([i]) * 16, "doctor", SOURCE, TARGET, ()) for i in range(count)]


@dataclass(frozen=True)
class Store:
    layout: KVLayout = LAYOUT
    rank: int = 0
    num_blocks: int = 16


@dataclass(frozen=True)
class Report:
    target: Peer
    rank: int
    transport: str
    why: str
    missing: tuple[str, ...]


@dataclass
class Transfer:
    """One side of a transfer. It ends when the test says so."""

    block_ids: Sequence[int]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str | None = None
    is_committed: bool = False
    is_aborted: bool = False

    def commit(self, first_token: None) -> None:
        assert first_token is None
        self.is_committed = True

    def abort(self, _reason: str) -> None:
        self.is_aborted = True

    async def done(self) -> None:
        await self.over.wait()
        if self.failure or self.is_aborted:
            raise TransferFailed(self.failure or "aborted")

    verified = done

    async def cancel(self) -> None:
        self.is_aborted = True
        await self.over.wait()


class Side:
    """A sender and a receiver that keep what they are asked for, and finish as many transfers as they are told."""

    def __init__(self, num_done: int = 0, seconds: float = 0.0):
        self.transfers: list[Transfer] = []
        self.now = 0.0
        self._num_done = num_done
        self._seconds = seconds
        self.stuck = asyncio.Event()

    def open(self, ticket: Ticket, num_tokens: int, block_ids: Sequence[int], num_ready_tokens: int) -> Transfer:
        assert num_ready_tokens == num_tokens
        return self._begin(block_ids)

    def expect(self, ticket: Ticket, block_ids: Sequence[int], num_tokens: int, skip_tokens: int) -> Transfer:
        assert skip_tokens == 0
        return self._begin(block_ids)

    def links(self) -> tuple[Report, ...]:
        return (
            Report(TARGET, 0, "tcp", "the only one", ("shm: one machine",)),
            Report(TARGET, 1, "tcp", "the only one", ("shm: one machine",)),
            Report(Peer("d1", 3), 0, "shm", "another worker's", ()),
        )

    def _begin(self, block_ids: Sequence[int]) -> Transfer:
        transfer = Transfer(tuple(block_ids))
        self.transfers.append(transfer)
        if len(self.transfers) <= self._num_done:
            self.now += self._seconds * len(self.transfers)
            transfer.over.set()
        else:
            self.stuck.set()
        return transfer


@dataclass
class Rig:
    side: Side
    pool: BlockPool = field(default_factory=lambda: BlockPool(16, BLOCK))
    num_releases: int = 0

    def __post_init__(self) -> None:
        self.probe = LinkProbe(
            pool=self.pool,
            sender=self.side,  # type: ignore[arg-type]
            receiver=self.side,  # type: ignore[arg-type]
            store=Store(),  # type: ignore[arg-type]
            clock=lambda: self.side.now,
            on_released=self._released,
        )

    def _released(self) -> None:
        assert self.pool.owned_blocks == 0
        self.num_releases += 1

    def run(self, end: str, count: int, num_tokens: int) -> "asyncio.Task[object]":
        return asyncio.create_task(getattr(self.probe, end)(tickets(count), num_tokens))

    def is_over(self) -> bool:
        self.pool.check_integrity()
        return self.pool.owned_blocks == 0 and not self.probe.is_busy and self.num_releases == 1


async def test_the_source_times_each_transfer_and_tells_its_links_once() -> None:
    rig = Rig(Side(num_done=3, seconds=0.5))
    times = await rig.probe.source(tickets(3), 9)
    assert times.seconds == (0.5, 1.0, 1.5)
    assert (times.transport, times.why, times.missing) == ("tcp", "the only one", ("shm: one machine",))
    assert [len(transfer.block_ids) for transfer in rig.side.transfers] == [3, 3, 3]
    assert all(transfer.is_committed for transfer in rig.side.transfers)
    await asyncio.sleep(0)
    assert rig.is_over()


async def test_the_target_takes_every_transfer_in_turn() -> None:
    rig = Rig(Side(num_done=3))
    await rig.probe.target(tickets(3), 8)
    assert [len(transfer.block_ids) for transfer in rig.side.transfers] == [2, 2, 2]
    await asyncio.sleep(0)
    assert rig.is_over()


@pytest.mark.parametrize("end", ["source", "target"])
async def test_a_trial_takes_half_of_the_free_blocks_and_no_more(end: str) -> None:
    rig = Rig(Side(num_done=2))
    held = rig.pool.allocate(6)  # 10 are free
    await getattr(rig.probe, end)(tickets(1), 5 * BLOCK)
    with pytest.raises(RequestError, match="6 blocks: it may take 1 to 5"):
        await getattr(rig.probe, end)(tickets(1), 5 * BLOCK + 1)
    assert rig.pool.owned_blocks == 6
    rig.pool.release(held)


@pytest.mark.parametrize("end", ["source", "target"])
async def test_a_failed_transfer_ends_the_trial_and_frees_its_blocks(end: str) -> None:
    rig = Rig(Side(num_done=1))
    call = rig.run(end, 3, 8)
    await rig.side.stuck.wait()
    rig.side.transfers[1].failure = "the link broke"
    rig.side.transfers[1].over.set()
    with pytest.raises(TransferFailed, match="the link broke"):
        await call
    assert len(rig.side.transfers) == 2
    await asyncio.sleep(0)
    assert rig.is_over()


@pytest.mark.parametrize("end", ["source", "target"])
async def test_a_cancelled_trial_keeps_its_blocks_until_its_transfer_has_ended(end: str) -> None:
    rig = Rig(Side())
    call = rig.run(end, 3, 8)
    await rig.side.stuck.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    for _ in range(5):
        await asyncio.sleep(0)
    assert rig.side.transfers[0].is_aborted
    assert rig.probe.is_busy
    assert rig.pool.owned_blocks == 2  # somebody may still read or write them
    rig.side.transfers[0].over.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(rig.side.transfers) == 1
    assert rig.is_over()


async def test_a_worker_without_a_side_says_so() -> None:
    pool = BlockPool(16, BLOCK)
    probe = LinkProbe(pool=pool, sender=None, receiver=None, store=Store(), clock=float)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="sends no KV"):
        await probe.source(tickets(1), 8)
    with pytest.raises(RequestError, match="receives no KV"):
        await probe.target(tickets(1), 8)


@dataclass
class Ends:
    """Both workers' probes over a real sender and receiver."""

    pair: Pair
    pools: tuple[BlockPool, BlockPool]
    source: LinkProbe
    target: LinkProbe

    @classmethod
    def of(cls, pair: Pair) -> "Ends":
        pools = BlockPool(pair.source.num_blocks, BLOCK), BlockPool(pair.target.num_blocks, BLOCK)
        clock = time.monotonic
        return cls(
            pair,
            pools,
            LinkProbe(pool=pools[0], sender=pair.sender, receiver=None, store=pair.source, clock=clock),
            LinkProbe(pool=pools[1], sender=None, receiver=pair.receiver, store=pair.target, clock=clock),
        )

    async def released(self) -> None:
        await settle(lambda: not (self.source.is_busy or self.target.is_busy))
        assert [pool.owned_blocks for pool in self.pools] == [0, 0]


async def test_real_transfers_are_timed_on_both_ends() -> None:
    async with make_pair() as pair:
        ends = Ends.of(pair)
        pair.source.fill(3)
        signed = [pair.ticket("doctor") for _ in range(4)]
        times, _ = await asyncio.gather(ends.source.source(signed, 20), ends.target.target(signed, 20))
        assert len(times.seconds) == 4
        assert min(times.seconds) > 0
        assert times.transport == "memory"
        assert pair.sender.stats.done == pair.receiver.stats.done == 4
        await ends.released()


async def test_a_target_that_refuses_leaves_the_source_free_once_it_is_cancelled() -> None:
    async with make_pair() as pair:
        ends = Ends.of(pair)
        held = ends.pools[1].allocate(30)
        signed = [pair.ticket("doctor")]
        sending = asyncio.create_task(ends.source.source(signed, 20))
        with pytest.raises(RequestError, match="it may take 1 to 1 here"):
            await ends.target.target(signed, 20)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        ends.pools[1].release(held)
        await ends.released()


async def test_a_cancelled_source_lets_its_target_go() -> None:
    async with make_pair() as pair:
        ends = Ends.of(pair)
        signed = [pair.ticket("doctor") for _ in range(500)]
        calls = [asyncio.create_task(call) for call in (ends.source.source(signed, 60), ends.target.target(signed, 60))]
        await settle(lambda: pair.receiver.stats.done > 2)
        calls[0].cancel()
        with pytest.raises(TransferFailed):
            await calls[1]
        await ends.released()
